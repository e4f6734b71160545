"""Many topics and requests beside other systems: whole, in order and compared; and that faults are seen.

NATS, Zenoh and Redis are driven where they are present; raw ZeroMQ is present everywhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.bench import command as bench_command
from danube_fast.bench import floors
from danube_fast.bench.command import Choices
from danube_fast.bench.floors import CASES, LANE_CASES
from danube_fast.bench.load.payloads import Payloads, create_payloads
from danube_fast.bench.load.requests import reply_to
from danube_fast.bench.load.rig import Rig
from danube_fast.bench.peers import beside, catalog, redis, roles, runs
from danube_fast.bench.peers.adapter import Adapter, Receiver, Take, Variant, topic_names
from danube_fast.bench.peers.beside import WORKLOADS_COMPARED
from danube_fast.bench.peers.zeromq import ZeroMQ
from danube_fast.bench.plan import Figures, Plan
from danube_fast.bench.workloads import requests
from danube_fast.bench.workloads.catalog import WORKLOADS, planned
from danube_fast.errors import FailedPrecondition, Internal, InvalidArgument, Unavailable
from tests.bench.test_peers import Canned, Notebook, command

SIZE = 100
TOPICS = 7
MESSAGES = 25_003
"""Several lists, each of which begins on another topic."""


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig() as made:
        yield made


def having(workload: str) -> list[Any]:
    """Each variant of a system that is here and has an adapter for the workload."""
    return [
        pytest.param(adapter, variant, id=f"{variant.system}, {variant.durability}"[:60])
        for adapter in catalog.ADAPTERS.values()
        for variant in adapter.variants
        if workload in variant.workloads and adapter.absence() is None
    ]


def run_peer(rig: Rig, adapter: Adapter, variant: Variant, plan: Plan) -> Figures:
    with runs.Bench.of(rig, adapter, variant) as bench:
        figures = bench.run(plan)
    assert (figures.lost, figures.duplicated, figures.corrupted) == (0, 0, 0)
    assert (figures.system, figures.durability) == (variant.system, variant.durability)
    assert (figures.messages_per_s or 0) > 0 and figures.client_cpu_s
    return figures


# ---------------------------------------------------------------- topics


@pytest.mark.parametrize(("adapter", "variant"), having("topics"))
def test_every_message_comes_on_its_topic(rig: Rig, adapter: Adapter, variant: Variant) -> None:
    plan = Plan(workload="topics", messages=MESSAGES, message_bytes=SIZE, topics=TOPICS)
    run_peer(rig, adapter, variant, plan)


def test_a_run_has_one_topic_or_numbered_ones() -> None:
    options: dict[str, Any] = {"topic": "t", "topics": 1}
    assert topic_names(options, ".") == ["t"]
    assert topic_names(options | {"topics": 3}, ":") == ["t:0", "t:1", "t:2"]


class Placed(Canned):
    """Hands over two lists, the second one as of topic `last`."""

    def __init__(self, delivered: list[list[Any]], last: int) -> None:
        super().__init__(delivered)
        self.last = last

    def open_receiver(self, options: dict[str, Any]) -> Receiver:
        delivered = list(zip(self.delivered, (2, self.last), strict=True))

        class Canister(Receiver):
            def receive(self, take: Take, silence_seconds: float) -> None:
                while delivered:
                    some, self.last_topic = delivered.pop(0)
                    take(some)

            def close(self) -> None:
                pass

        return Canister()


@pytest.mark.parametrize(
    ("last", "swap", "found"),
    [(1, False, (0, 0, 0)), (2, False, (0, 0, 1)), (1, True, (1, 1, 0))],
    ids=["as sent", "on another topic", "out of order in a topic"],
)
def test_a_message_on_another_topic_or_out_of_order_is_counted(
    last: int, swap: bool, found: tuple[int, int, int]
) -> None:
    fd = create_payloads(8, SIZE)
    try:
        cut = Payloads(fd, SIZE).cut()
        first, second = ([0, 5], [2, 3, 1, 4, 6, 7]) if swap else ([0, 2], [5, 3, 1, 4, 6, 7])
        lists = [[cut[number] for number in some] for some in (first, second)]
        link: Any = Notebook()
        options = {"fd": fd, "message_bytes": SIZE, "messages": 8, "topics": 3, "is_lossy": True}
        unguarded: Any = roles.consume
        unguarded.__wrapped__(link, options, Placed(lists, last))
    finally:
        os.close(fd)
    (report,) = link.said
    assert (report["lost"], report["duplicated"], report["corrupted"]) == found


@pytest.mark.parametrize("answer", [[[b"a", [1, 2]], [b"b", [3]]], {b"a": [[1, 2]], b"b": [[3]]}])
def test_entries_of_streams_in_both_protocols_of_redis(answer: Any) -> None:
    assert redis._streams(answer) == [(b"a", [1, 2]), (b"b", [3])]


def test_a_message_of_which_half_has_come_is_waited_for() -> None:
    """redis-py connects anew, and loses what comes meanwhile, when it may not wait for the other half."""
    came = [{"channel": b"t:1", "data": b"%d" % number} for number in range(3)]

    class Subscription:
        def __init__(self) -> None:
            self.connection = self
            self.waits: list[float] = []

        def can_read(self, timeout: float) -> bool:
            return len(came) > 1

        def get_message(self, timeout: float) -> Any:
            self.waits.append(timeout)
            return came.pop(0) if came else None

    subscriber: Any = redis._Subscriber.__new__(redis._Subscriber)
    subscriber._subscription, subscriber._place = Subscription(), {b"t:1": 1}
    taken: list[list[bytes]] = []
    subscriber.receive(lambda some: taken.append(some) or True, 5.0)
    assert taken == [[b"0", b"1"], [b"2"]] and subscriber.last_topic == 1
    assert set(subscriber._subscription.waits) == {5.0}


def test_topics_beside_others_by_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--topics", "7", "--durability", "os", "--messages", "3000", "--output", "json"]
    code, out, err = command(capfd, "topics", "--peers", "zeromq,kafka", *words)
    assert code == 0, err
    assert "absent: kafka: it has no adapter for topics" in err
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(line["system"], line["transport"], line["workload"]) for line in lines] == [
        ("danube-fast", "shm", "topics"),
        ("danube-fast", "zmq", "topics"),
        ("zeromq pub-sub", "ipc", "topics"),
    ]
    assert {(x["messages"], x["lost"], x["corrupted"], x["client"]) for x in lines} == {
        (3000, 0, 0, "one by one")
    }


# ---------------------------------------------------------------- requests


@pytest.mark.parametrize("transport", ["zmq", "shm"])
@pytest.mark.parametrize("durability", ["non_reliable", "fsync"])
def test_requests_have_replies(rig: Rig, transport: str, durability: str) -> None:
    changes = {"transport": transport, "durability": durability, "messages": 301, "rate": 500.0}
    figures = WORKLOADS["requests"].run(rig, planned("requests", **changes))
    assert (figures.lost, figures.duplicated, figures.corrupted) == (0, 0, 0)
    assert 0 < (figures.p50_us or 0) <= (figures.p99_us or 0)
    assert 0 < figures.extra["back_to_back_p50_us"] <= figures.extra["back_to_back_p99_us"]
    assert (figures.messages_per_s or 0) * figures.extra["back_to_back_p50_us"] < 2e6, (
        "one at a time"
    )
    assert figures.messages == 301 and figures.broker_cpu_s and figures.client_cpu_s


@pytest.mark.parametrize(("adapter", "variant"), having("requests"))
def test_requests_of_other_systems_have_replies(
    rig: Rig, adapter: Adapter, variant: Variant
) -> None:
    plan = Plan(workload="requests", messages=301, message_bytes=SIZE, rate=500.0)
    figures = run_peer(rig, adapter, variant, plan)
    assert 0 < (figures.p50_us or 0) <= (figures.p99_us or 0)
    assert figures.extra["back_to_back_p50_us"] > 0


def test_a_reply_is_not_its_request() -> None:
    assert reply_to(b"12") == b"21"


def test_the_reply_to_another_request_is_seen(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_HERE", "tests.bench.lossy")
    figures = WORKLOADS["requests"].run(rig, planned("requests", messages=40, rate=500.0))
    assert figures.corrupted == 2 and not figures.is_faultless, "one wrong in each half"


def test_what_a_responder_failed_with_is_the_cause(rig: Rig) -> None:
    with rig.crew() as crew:
        responder = crew.start(
            "responder", "danube_fast.bench.peers.roles:reply", {"peer": "kafka"}
        )
        requester = crew.start("requester", "danube_fast.bench.peers.roles:ask", {"peer": "redis"})
        responder.process.wait(60)
        with pytest.raises(Internal, match="kafka has no adapter for requests"):
            requests.converse(responder, requester)


def test_one_request_alone_cannot_be_halved() -> None:
    with pytest.raises(InvalidArgument, match="--messages must be at least 2"):
        planned("requests", messages=1)


def test_requests_beside_others_by_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--durability", "non_reliable", "--messages", "200", "--transport", "shm"]
    code, out, err = command(capfd, "requests", "--peers", "zeromq,redis", *words)
    assert code == 0, err
    assert "absent: redis: it has no adapter for requests" in out
    rows = [line.split()[:2] for line in out.splitlines()]
    assert ["danube-fast", "0.1.0"] in rows and ["zeromq", "req-rep"] in rows
    assert out.count("back_to_back_p50_us") == 2


@pytest.mark.parametrize("option", ["--page", "--plot"])
def test_pages_and_plots_show_throughput_and_latency_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], option: str
) -> None:
    file = tmp_path / ("x.md" if option == "--page" else "x.svg")
    file.write_text("")
    code, _, err = command(capfd, "topics", "--peers", "zeromq", option, str(file))
    assert code != 0
    assert "show throughput and latency alone" in err


def test_a_system_without_an_adapter_for_any_of_them_says_so() -> None:
    plans = [planned("topics"), planned("requests")]
    assert beside._lacking("redpanda", plans) == "it has no adapter for topics and requests"
    assert beside._lacking("redis", plans) is None
    assert [beside._lacking("redis", [plan]) is None for plan in plans] == [True, False]
    assert set(WORKLOADS_COMPARED) <= set(WORKLOADS)


# ---------------------------------------------------------------- beside NATS


class StandsForNats(ZeroMQ):
    """Requests of raw ZeroMQ, where the floor looks for those of NATS."""

    variants = tuple(v for v in ZeroMQ.variants if "requests" in v.workloads)


class AbsentNats(StandsForNats):
    def absence(self) -> str | None:
        return "no nats-server"


def test_requests_run_beside_nats_where_it_is(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("requests", messages=100, rate=500.0)
    monkeypatch.setattr(floors, "NATS", StandsForNats())
    found = floors.measure(rig, plan)
    assert found.extra["vs_nats"] == pytest.approx((found.p50_us or 0) / found.extra["nats_p50_us"])
    assert found.extra["nats_p99_us"] >= found.extra["nats_p50_us"] > 0
    assert found.extra["reference_p50_us"] > 0
    monkeypatch.setattr(floors, "NATS", AbsentNats())
    assert "vs_nats" not in floors.measure(rig, plan).extra


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_the_floor_of_requests_needs_nats(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = [x for x in (LANE_CASES if transport == "shm" else CASES) if x.workload == "requests"]
    (floor,) = case.floors
    assert floor.is_ceiling and (floor.figure, floor.floor) == ("vs_nats", 1.0)
    assert floor.is_met(0.99) and not floor.is_met(1.01) and not floor.is_met(None)
    monkeypatch.setattr(floors, "NATS", StandsForNats())
    assert floors.select(["requests"], transport) == [case]
    assert case in floors.select([], transport)
    monkeypatch.setattr(floors, "NATS", AbsentNats())
    assert case not in floors.select([], transport)
    with pytest.raises(FailedPrecondition, match="cannot be checked here: no nats-server"):
        floors.select(["requests"], transport)


def test_a_check_says_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "NATS", AbsentNats())
    monkeypatch.setattr(floors, "measure", lambda *_: Figures(workload="any"))
    heard: list[str] = []
    bench_command.check(Choices([], {}, 1, is_json=True), heard.append, lambda _: None)
    assert [x for x in heard if x.endswith("is left out: no nats-server")]


def test_a_peers_own_error_is_one_sentence(rig: Rig) -> None:
    with rig.crew() as crew:
        options = {"peer": "zeromq", "topic": "t", "address": "x"}  # no payloads
        requester = crew.start("requester", "danube_fast.bench.peers.roles:ask", options)
        with pytest.raises(Unavailable, match="KeyError"):
            requester.hear(60)
