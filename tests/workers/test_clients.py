"""`admin.list_clients`: every connection of every process, with what is open on it, page by page."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import danube_fast
from danube_fast.broker.admin import OPERATIONS, Answer
from danube_fast.broker.answers import ClientPage
from danube_fast.broker.messages import ListClients
from danube_fast.errors import InvalidArgument, Unavailable
from danube_fast.net.session import Session
from danube_fast.roles import Processes
from danube_fast.testing.broker import Broker
from danube_fast.workers.reports.clients import ITEMS_MAX, PAGE_ITEMS_MAX, client_page

TOPIC = "/default/clients"


def test_connections_producers_and_consumers_of_all_workers() -> None:
    with (
        Broker(workers=2) as broker,
        danube_fast.connect(broker.url, name="sender") as sender,
        danube_fast.connect(broker.url, name="taker", transport="zmq") as taker,
    ):
        sender.admin.create_topic(TOPIC, partitions=4)
        with (
            sender.producer(TOPIC, name="p") as producer,
            taker.consumer(TOPIC, subscription="s", type="shared", name="c"),
        ):
            producer.publish(b"x", key="k")
            rows = taker.admin.list_clients()
            assert taker.admin.list_clients(limit=3) == rows[:3] or len(rows) >= 3
            assert len(taker.admin.list_clients(limit=3)) == 3
    processes = {"coordinator", "worker-0", "worker-1"}
    for client in ("sender", "taker"):
        mine = [row for row in rows if row["client"] == client]
        assert {row["process"] for row in mine} == processes, rows
    consumers = [item for row in rows for item in row["consumers"]]
    assert {item["partition"] for item in consumers} == {0, 1, 2, 3}
    assert {(item["topic"], item["subscription"]) for item in consumers} == {(TOPIC, "s")}
    assert {item["type"] for item in consumers} == {"shared"}
    producers = [item for row in rows if row["client"] == "sender" for item in row["producers"]]
    assert producers and {(item["topic"], item["name"]) for item in producers} == {(TOPIC, "p")}
    for row in rows:
        assert row["producer_count"] == len(row["producers"])
        assert row["consumer_count"] == len(row["consumers"])
        assert row["silent_ms"] >= 0
    assert {row["transport"] for row in rows if row["client"] == "taker"} == {"zmq"}


def _sessions(count: int, consumers: int) -> list[Session]:
    made = []
    for number in range(count, 0, -1):
        session = Session(number, b"", b"\0id", f"client-{number}", "")
        sub = SimpleNamespace(partition_id=1, name="s", kind=SimpleNamespace(value="shared"))
        session.consumers = {
            place: SimpleNamespace(subscription=sub, name="c", unacked=0)
            for place in range(consumers)
        }
        made.append(session)
    return made


def test_a_page_is_bounded_by_what_is_open_on_its_connections() -> None:
    sessions = _sessions(100, ITEMS_MAX + 5)
    after, seen, pages = 0, [], 0
    while True:
        page = client_page(sessions, after, 1000, 0, None)
        assert sum(1 + len(row.consumers) for row in page.clients) <= PAGE_ITEMS_MAX
        assert all(row.consumer_count == ITEMS_MAX + 5 for row in page.clients)
        seen += [row.session for row in page.clients]
        pages += 1
        if not page.more:
            break
        after = seen[-1]
    assert seen == list(range(1, 101))
    assert pages > 1


def _list(context: Any, **arguments: Any) -> Any:
    ended: list[Any] = []
    answer = Answer(lambda value, error: ended.append(error or value))
    OPERATIONS["list_clients"].function(context, answer, **arguments)
    (outcome,) = ended
    return outcome


class Context:
    """A coordinator and two workers with three connections each."""

    processes = Processes.with_workers(2)
    down = 0
    topics: Any = None
    security = SimpleNamespace(is_enforced=False)

    def clients(self, after: int, limit: int) -> ClientPage:
        return client_page(_sessions(3, 0), after, limit, 0, None)

    def ask(self, worker: int, message: Any, on_reply: Any) -> None:
        assert isinstance(message, ListClients)
        if worker == self.down:
            on_reply(None, Unavailable("it is down"))
        else:
            on_reply(self.clients(message.after, message.limit), None)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 9, 1000])
def test_pages_go_through_all_processes(limit: int) -> None:
    after, seen = "", []
    for _ in range(20):
        page = _list(Context(), after=after, limit=limit)
        assert len(page.clients) <= limit
        seen += [(row.process, row.session) for row in page.clients]
        after = page.after
        if not after:
            break
    names = ("coordinator", "worker-0", "worker-1")
    assert seen == [(name, number) for name in names for number in (1, 2, 3)]


def test_what_cannot_be_listed_says_why() -> None:
    context = Context()
    context.down = 2
    assert isinstance(_list(context), Unavailable)
    for arguments in ({"after": "x"}, {"after": "1:"}, {"limit": 0}):
        with pytest.raises(InvalidArgument):
            _list(Context(), **arguments)
