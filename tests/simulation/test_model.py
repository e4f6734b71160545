"""The model on its own: what it must allow, and what not, where a worker may have given a session up."""

from __future__ import annotations

import pytest

from danube_fast.clock import MILLISECOND_NS
from danube_fast.config import Settings
from danube_fast.net import protocol as p
from danube_fast.testing.loopback import LoopbackServer, Network, Wire
from danube_fast.testing.model import Model
from danube_fast.testing.publishing_model import Violation
from danube_fast.testing.subscription_model import SubscriptionModel
from danube_fast.testing.virtual_clock import Schedule, Trace, VirtualClock
from danube_fast.testing.worker_tap import WorkerTap

SESSION, CONSUMER = 5, 3
FIRST, LATER = (1, 0), (80, 0)
"""What its application has taken: so many frames, of one message each."""
MESSAGES = 100
TIMEOUT_MS = 600


class Client:
    """Has one consumer that reports; a message that failed once has failed too often."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        settings = Settings(session_timeout_ms=TIMEOUT_MS)
        self.tap = WorkerTap(Model(self.clock, Trace(self.clock), settings), 1)
        schedule = Schedule(self.clock)
        server = LoopbackServer(self.tap, lambda: None, -1)
        self.wire: Wire = Network(schedule, None).connect(server, lambda parts: None)  # type: ignore[arg-type]
        self.read(p.Hello(1, 1, "client", {}, "", 0, 0, b""))
        self.send(p.Welcome(1, SESSION, b"", 1, "", "", resumed=False, limits={}))
        self.subscribe()
        for offset in range(MESSAGES):
            self.deliver(offset, 0)

    @property
    def sub(self) -> SubscriptionModel:
        (sub,) = self.tap.model.subscriptions.values()
        return sub

    def read(self, command: p.ClientCommand) -> None:
        self.tap.received(self.wire, p.encode(command), [])

    def send(self, command: p.ServerCommand) -> None:
        self.tap.sent(self.wire, [p.encode(command)])

    def subscribe(self) -> None:
        options = {"reports_taken": True, "failure_policy": {"max_redelivery_count": 0}}
        self.read(p.Subscribe(2, CONSUMER, 1, 2, "s1", "shared", "earliest", "c", options))
        self.send(p.Result(2, {"next_offset": 0}))
        self.read(p.Flow(1, 1 << 20, 1 << 20))

    def report(self, taken: tuple[int, int]) -> None:
        self.read(p.Ping(3, [(CONSUMER, *taken)]))

    def deliver(self, offset: int, attempts: int) -> None:
        sub, consumer = self.sub, self.sub.consumers[-1]
        sub.due[offset] = 0
        sub.charge(consumer, 1, [b"m"])
        sub.deliver(consumer, offset, None, attempts, is_late=False)

    def flush(self, *pairs: int) -> None:
        """Ack messages, and hear that this is durable, and all that was before it."""
        self.read(p.Ack(6, [(CONSUMER, list(pairs))]))
        self.send(p.Result(6, None))

    def seek(self) -> None:
        self.read(p.Seek(7, CONSUMER, "earliest"))
        self.send(p.Result(7, {"next_offset": 0}))

    def be_silent(self) -> None:
        self.clock.now_ns += (TIMEOUT_MS + 1) * MILLISECOND_NS

    def give_up(self) -> None:
        """The worker has no session any more, and another one begins."""
        self.send(p.Error(3, p.Status.NO_SESSION, "no session"))
        self.read(p.Hello(4, 1, "client", {}, "", 0, 0, b""))
        self.send(p.Welcome(4, SESSION + 1, b"", 1, "", "", resumed=False, limits={}))
        self.subscribe()


@pytest.fixture
def client() -> Client:
    client = Client()
    client.report(FIRST)
    client.send(p.Pong(3))
    return client


def test_what_was_reported_before_a_death_has_failed(client: Client):
    client.be_silent()
    client.give_up()
    with pytest.raises(Violation, match="message 0 failed 1 times"):
        client.deliver(0, 1)


def test_a_report_to_a_session_that_was_given_up_fails_nothing(client: Client):
    client.be_silent()
    client.report(LATER)
    client.give_up()
    for offset in range(1, 65):
        client.deliver(offset, 1)


def test_a_report_to_a_session_that_was_given_up_counts_nothing(client: Client):
    client.be_silent()
    client.report(LATER)
    client.give_up()
    for offset in range(65, MESSAGES):
        client.deliver(offset, 0)


def test_a_report_that_was_answered_counts_though_it_came_late(client: Client):
    client.be_silent()
    client.report(LATER)
    client.send(p.Pong(3))
    client.give_up()
    with pytest.raises(Violation, match="message 79 failed 1 times"):
        client.deliver(79, 1)


@pytest.mark.parametrize(
    ("is_closed", "delivered"), [(True, 65), (True, 80), (False, 65), (False, 1)]
)
def test_an_orderly_end_that_comes_late_may_be_one_or_a_death(
    client: Client, delivered: int, *, is_closed: bool
):
    """The worker had given the session up, and counted 64 more than was reported before; or it had not, and
    counts what was reported by now."""
    client.be_silent()
    if is_closed:
        client.read(p.CloseConsumer(3, CONSUMER, LATER))
    client.subscribe()
    for offset in range(1, MESSAGES):
        client.deliver(offset, int(offset < delivered))


@pytest.mark.parametrize(
    ("durable", "owed"), [(0, []), (1, list(range(1, MESSAGES))), (2, list(range(MESSAGES)))]
)
def test_a_death_may_undo_every_seek_that_was_not_durable(
    client: Client, durable: int, owed: list[int]
):
    """All was acked before two seeks, and message 0 was handed out between them. What no seek on disk made new may
    be acked after the death, as it was; with the first on disk that is message 0 alone."""
    client.flush(0, MESSAGES)
    for number in range(2):
        client.seek()
        if number < durable:
            client.flush()
        if number == 0:
            client.deliver(0, 0)
    client.tap.died(set())
    assert [offset for offset in range(MESSAGES) if client.sub.is_owed(offset)] == owed
