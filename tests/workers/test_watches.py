"""WATCH, spoken by hand to a real broker."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.broker.topics.changes import Change, TopicChanges
from danube_fast.broker.topics.table import TopicTable
from danube_fast.clock import MILLISECOND_NS, NEVER_NS
from danube_fast.errors import InvalidArgument
from danube_fast.net import protocol
from danube_fast.net.session import Session
from danube_fast.types import REPLY_TOPICS
from danube_fast.undecided import Undecided
from danube_fast.visible import Visible
from danube_fast.workers.coordinator.watches import ENDS_MIN, Watches
from tests.workers.broker import Broker, Client

WAIT_MS = 60_000
SHORT_MS = 200
HIDDEN, SEEN = "/secret/plans", "/shop/orders"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("watches") / "data", fake="", workers=1) as started:
        started.wait_ready()
        yield started


@pytest.fixture
def client(broker: Broker) -> Iterator[Client]:
    with Client(broker) as made:
        yield made


def watch(client: Client, cursor: str, *patterns: str, wait_ms: int = WAIT_MS) -> Any:
    answer = client.ask(protocol.Watch, cursor, list(patterns), wait_ms)
    assert isinstance(answer, protocol.Result), answer
    return answer.value


def test_first_all_that_match_then_what_changes(broker: Broker, client: Client) -> None:
    client.admin("create_topic", topic="/default/w-1")
    client.admin("create_topic", topic="/default/x-1")
    first = watch(client, "", "/default/w-*")
    assert first["topics"] == ["/default/w-1"]
    assert watch(client, "", "/system/*")["topics"] == []
    cursor = first["cursor"]
    with Client(broker) as other:
        request = client.send(protocol.Watch, cursor, ["/default/w-*"], WAIT_MS)
        other.admin("create_topic", topic="/default/x-2")
        other.admin("create_topic", topic="/default/w-2", partitions=2)
        answer = client.receive()
        assert answer.request == request
        assert answer.value["changes"] == [["created", "/default/w-2"]]
        other.admin("delete_topic", topic="/default/w-1")
        other.admin("create_topic", topic="/default/w-1")
        cursor = answer.value["cursor"]
        changes = watch(client, cursor, "/default/w-*")["changes"]
        assert changes == [["deleted", "/default/w-1"], ["created", "/default/w-1"]]


def test_growth_is_told_to_everybody(broker: Broker, client: Client) -> None:
    client.admin("create_topic", topic="/default/g", partitions=1)
    cursor = watch(client, "")["cursor"]
    with Client(broker) as other:
        assert watch(client, cursor, wait_ms=0)["changes"] == []
        other.admin("set_topic", topic="/default/g", partitions=3)
    assert watch(client, cursor)["changes"] == [["grown", "/default/g"]]


def test_nothing_changes_for_so_long(client: Client) -> None:
    cursor = watch(client, "")["cursor"]
    began = time.monotonic()
    answer = watch(client, cursor, "/default/*", wait_ms=SHORT_MS)
    assert answer["changes"] == [] and len(answer["cursor"]) == len(cursor)
    assert time.monotonic() - began >= 0.9 * SHORT_MS / 1000


def test_a_second_watch_of_a_session_ends_the_first(client: Client) -> None:
    cursor = watch(client, "")["cursor"]
    first = client.send(protocol.Watch, cursor, [], WAIT_MS)
    second = client.send(protocol.Watch, cursor, [], SHORT_MS)
    answers = [client.receive(), client.receive()]
    assert [answer.request for answer in answers] == [first, second]
    assert all(answer.value["changes"] == [] for answer in answers)


def test_what_is_no_watch(client: Client) -> None:
    for patterns in (["x"], ["/*/x"], ["/default/"], ["/default/*"] * 257):
        answer = client.ask(protocol.Watch, "", patterns, WAIT_MS)
        assert isinstance(answer, protocol.Error), patterns
        assert answer.code == InvalidArgument.code
    for cursor in ("nonsense", "-1", "x" * 1000):
        assert "topics" in watch(client, cursor, "/default/*")


def test_clients_that_go_leave_nothing_behind(broker: Broker, client: Client) -> None:
    for _ in range(20):
        with Client(broker) as other:
            cursor = watch(other, "")["cursor"]
            other.send(protocol.Watch, cursor, ["/default/*"], WAIT_MS)
    cursor = watch(client, "")["cursor"]
    request = client.send(protocol.Watch, cursor, ["/default/*"], WAIT_MS)
    with Client(broker) as other:
        other.admin("create_topic", topic="/default/late")
    answer = client.receive()
    assert (answer.request, answer.value["changes"]) == (request, [["created", "/default/late"]])


class Asked:
    """An authorizer of another package that hides one topic: WATCH waits for it, and it counts its questions."""

    def __init__(self) -> None:
        self.questions = 0
        self.waits: list[Callable[[], None]] = []
        self.is_known = False

    def visible_to(self, principal: str) -> Visible:
        if not self.is_known:
            self.questions += 1
            raise Undecided("being asked", self.waits.append)
        return Visible(lambda topic: topic != HIDDEN)

    def answer(self) -> None:
        """Let what waits go on, and be asked again by what comes later."""
        self.is_known, waits, self.waits = True, self.waits, []
        for step in waits:
            step()
        self.is_known = False


class Looks:
    """A WATCH of two names, and what is asked and told for it."""

    def __init__(self, *topics: str, wait_ms: int = WAIT_MS, is_new: bool = False) -> None:
        """`topics` are there. `is_new`: the client has no cursor yet."""
        self.asked, self.replies = Asked(), list[Any]()
        handlers: dict[type, Any] = {}
        connections: Any = SimpleNamespace(
            commands=SimpleNamespace(handlers=handlers),
            sessions=Sessions(),
            reply=lambda number, reply: self.replies.append(reply.value),
        )
        self.changes, self.table = TopicChanges(), TopicTable()
        for topic in topics:
            self.table[topic] = SimpleNamespace(topic=topic)  # type: ignore[assignment]
        self.directory: Any = SimpleNamespace(by_name=self.table, changes=self.changes)
        self.now_ns = 0
        clock: Any = SimpleNamespace(monotonic_ns=lambda: self.now_ns)
        asked: Any = self.asked
        self.watches = Watches(
            self.directory, connections, asked, clock, lambda principal, steps: deque(steps, 0)
        )
        self._handle = handlers[protocol.Watch]
        self._session = Session(1, b"token", b"\0one", "raw", "pia")
        cursor = "" if is_new else self.changes.cursor_at(0, 0)
        self._command = protocol.Watch(1, cursor, [HIDDEN, SEEN], wait_ms)

    @property
    def told(self) -> list[Any]:
        """The replies; of cursors, where they are."""
        read = self.changes.read
        found = [(each, read(each["cursor"])) for each in self.replies]
        return [{**each, "cursor": cursor and cursor[0]} for each, cursor in found]

    def begin(self) -> None:
        """Send the WATCH, and let it be answered what it asks."""
        with suppress(Undecided):
            self._handle(self._session, self._command)
        self.asked.is_known = True
        self._handle(self._session, self._command)
        self.asked.is_known = False

    def change(self, *topics: str) -> None:
        """Make topics."""
        for topic in topics:
            self.changes.note(Change.CREATED, topic)
        self.watches.do_work(self.now_ns)


@pytest.mark.parametrize("topics", [(HIDDEN, SEEN), (SEEN,)])
def test_a_list_of_names_asks_the_same_whether_one_is_hidden_or_missing(topics: Any) -> None:
    looks = Looks(*topics, is_new=True)
    looks.begin()
    assert looks.asked.questions == 1
    assert looks.told == [{"cursor": 0, "topics": [SEEN]}]


@pytest.mark.parametrize("topic", [HIDDEN, "/other/topic"])
def test_a_change_of_a_hidden_name_is_waited_for_as_any_other(topic: str) -> None:
    looks = Looks(wait_ms=SHORT_MS)
    looks.begin()
    assert looks.asked.questions == 1 and not looks.replies
    looks.change(topic)
    assert looks.asked.questions == 2 and not looks.replies
    looks.asked.answer()
    assert not looks.replies, "it is parked again"
    looks.now_ns += SHORT_MS * MILLISECOND_NS
    looks.watches.do_work(looks.now_ns)
    assert looks.asked.questions == 3 and not looks.replies
    looks.asked.answer()
    assert looks.told == [{"cursor": 1, "changes": []}]


def test_changes_that_come_during_a_question_are_told_with_its_answer() -> None:
    looks = Looks()
    looks.begin()
    looks.change("/other/topic")
    looks.change(SEEN)
    looks.asked.answer()
    assert looks.told == [{"cursor": 2, "changes": [["created", SEEN]]}]
    assert looks.asked.questions == 2


def test_changes_that_come_within_a_look_are_looked_at_too() -> None:
    """Nothing wakes a WATCH for what has changed before it was parked."""
    looks = Looks()

    def in_turns(principal: str, steps: Any) -> None:
        for number, _ in enumerate(steps):
            if number < 3:
                looks.change(SEEN if number == 2 else "/other/topic")

    looks.watches._in_slices = in_turns
    looks.begin()
    looks.asked.is_known = True
    looks.change("/other/topic")
    assert looks.told == [{"cursor": 4, "changes": [["created", SEEN]]}]


def test_what_was_looked_at_is_not_looked_at_again() -> None:
    looks, seen = Looks(), list[str]()
    looks.asked.visible_to = lambda principal: Visible(lambda topic: bool(seen.append(topic)))  # type: ignore[method-assign]
    looks.begin()
    for number in range(3):
        looks.change(f"/other/{number}")
    assert seen == ["/other/0", "/other/1", "/other/2"]


def test_names_beside_what_may_be_shown_cost_nothing() -> None:
    looks, seen = Looks(HIDDEN, SEEN, "/shop/zero", is_new=True), list[str]()
    visible = Visible(lambda topic: not seen.append(topic), ("/shop/o", "/shop/z"))
    looks.asked.visible_to = lambda principal: visible  # type: ignore[method-assign]
    looks.begin()
    looks.change(HIDDEN)
    assert looks.told[0] == {"cursor": 0, "topics": [SEEN]} and set(seen) == {SEEN}


def test_reply_topics_that_come_and_go_are_no_news() -> None:
    """Any client may make them, as often as it likes."""
    looks = Looks()
    looks.begin()
    looks.change(f"{REPLY_TOPICS}1")
    looks.change(f"{REPLY_TOPICS}2", f"{REPLY_TOPICS}3")
    assert looks.asked.questions == 1
    looks.change(SEEN)
    looks.asked.answer()
    assert looks.told == [{"cursor": 4, "changes": [["created", SEEN]]}]


def test_who_is_shown_something_else_begins_anew() -> None:
    """A topic may have been made, and passed over, before it was shown."""
    looks = Looks(HIDDEN, SEEN)
    shown = [Visible(lambda topic: topic == SEEN, key=1), Visible(lambda topic: True, key=-2)]
    looks.asked.visible_to = lambda principal: shown[0]  # type: ignore[method-assign]
    looks._command = protocol.Watch(1, looks.changes.cursor_at(0, 1), [HIDDEN, SEEN], WAIT_MS)
    looks._handle(looks._session, looks._command)
    looks.change(HIDDEN)
    assert not looks.replies
    del shown[0]
    looks.change("/other/topic")
    (told,) = looks.told
    assert told == {"cursor": 2, "topics": [HIDDEN, SEEN]}
    cursor = looks.replies[0]["cursor"]
    looks._command = protocol.Watch(1, cursor, [HIDDEN, SEEN], WAIT_MS)
    looks._handle(looks._session, looks._command)
    assert len(looks.replies) == 1, "it goes on from there"


def test_a_newer_watch_ends_one_that_is_in_slices() -> None:
    looks, kept = Looks(SEEN, is_new=True), list[Any]()
    looks.watches._in_slices = lambda principal, steps: kept.append(steps)
    looks.begin()
    looks.begin()
    for _ in kept[0]:
        raise AssertionError("the first goes on")
    assert looks.told == [{"cursor": 0, "changes": []}]
    deque(kept[1], 0)
    assert len(looks.replies) == 2 and not looks.watches._newest


def test_a_bug_in_one_look_is_of_one_client(caplog: pytest.LogCaptureFixture) -> None:
    crowd = Crowd()
    for number in range(3):
        crowd.watch(number, WAIT_MS)

    def visible_to(principal: str) -> Visible:
        crowd.watches._authorizer = SimpleNamespace(visible_to=lambda principal: Visible(bool))  # type: ignore[assignment]
        raise ZeroDivisionError("on purpose")

    crowd.watches._authorizer = SimpleNamespace(visible_to=visible_to)  # type: ignore[assignment]
    crowd.changes.note(Change.CREATED, "/a/x")
    crowd.watches.do_work(crowd.now_ns)
    assert sorted(number for _, number in crowd.replies) == [0, 1, 2]
    assert "on purpose" in caplog.text


class Sessions:
    """Those that have not ended, of all numbers."""

    def __init__(self) -> None:
        self.ended: set[int] = set()
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def by_number(self, number: int) -> Any:
        return None if number in self.ended else self


class Crowd:
    """Watches of many sessions, over a clock that is put forward."""

    def __init__(self) -> None:
        self.sessions = Sessions()
        self.now_ns = 0
        self.looks = 0
        self.replies: list[tuple[int, int]] = []
        self._handlers: dict[type, Any] = {}
        self.changes = TopicChanges()
        directory: Any = SimpleNamespace(changes=self.changes)
        connections: Any = SimpleNamespace(
            commands=SimpleNamespace(handlers=self._handlers),
            sessions=self.sessions,
            reply=lambda number, reply: self.replies.append((self.now_ns, number)),
        )
        clock: Any = SimpleNamespace(monotonic_ns=lambda: self.now_ns)
        authorizer: Any = SimpleNamespace(visible_to=self._visible_to)
        self.watches = Watches(
            directory, connections, authorizer, clock, lambda principal, steps: deque(steps, 0)
        )

    def _visible_to(self, principal: str) -> Visible:
        self.looks += 1
        return Visible(bool)

    def watch(self, number: int, wait_ms: int) -> None:
        self.sessions.count = max(self.sessions.count, number + 1 - len(self.sessions.ended))
        session = Session(number, b"token", b"\0one", "raw", "pia")
        self._handlers[protocol.Watch](
            session,
            protocol.Watch(1, self.changes.cursor_at(self.changes.count, 0), ["/a/*"], wait_ms),
        )

    def run(self) -> None:
        while (due := self.watches.next_deadline_ns()) != NEVER_NS:
            self.now_ns = max(self.now_ns, due)
            self.watches.do_work(self.now_ns)


def test_the_end_of_one_watch_is_no_look_at_the_others() -> None:
    crowd = Crowd()
    for number in range(1000):
        crowd.watch(number, 1 + number % 500)
    crowd.looks = 0
    crowd.run()
    expected = sorted(((1 + number % 500) * MILLISECOND_NS, number) for number in range(1000))
    assert sorted(crowd.replies) == expected
    assert crowd.looks == 1000


def test_a_change_is_a_look_at_all_and_none_is_forgotten_behind_it() -> None:
    crowd = Crowd()
    for number in range(10):
        crowd.watch(number, 100 + number)
    crowd.looks = 0
    crowd.changes.note(Change.CREATED, "/b/x")
    assert crowd.watches.do_work(crowd.now_ns) == 10 == crowd.looks
    crowd.run()
    assert [number for _, number in crowd.replies] == [*range(10)]


def test_watches_that_follow_each_other_leave_little_behind() -> None:
    crowd = Crowd()
    for _ in range(10_000):
        crowd.watch(7, WAIT_MS)
    assert len(crowd.replies) == 10_000 - 1
    assert len(crowd.watches._ends) <= 2 + ENDS_MIN
    crowd.run()
    assert crowd.replies[-1] == (WAIT_MS * MILLISECOND_NS, 7)


def test_sessions_that_end_leave_little_behind() -> None:
    crowd = Crowd()
    for number in range(10_000):
        crowd.watch(number, WAIT_MS)
        if number:
            crowd.sessions.ended.add(number - 1)
    crowd.sessions.count = 1
    crowd.watch(10_000, WAIT_MS)
    assert len(crowd.watches._parked) <= 2 + ENDS_MIN
    assert len(crowd.watches._ends) <= 3 * (2 + ENDS_MIN)
    crowd.run()
    assert {number for _, number in crowd.replies} == {9999, 10_000}
