"""Handles of a namespace that another worker passes on: counted where the partition is, until they end."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.broker import messages as m
from danube_fast.errors import ResourceExhausted
from danube_fast.frame.bundle import sealed_bundle
from danube_fast.net.protocol import Status
from tests.workers.shard_rig import FakeRequest, Rig, Shifted
from tests.workers.test_namespace_quotas import ME, OK, OTHER, assign, later, shared

FENCED = int(Status.FENCED)


@pytest.fixture
def rig(rigs: Callable[..., Rig]) -> Rig:
    made = rigs(session_timeout_ms=3_600_000, worker_count=2)
    made.worker.state.clock = made.boot.clock = Shifted(made.boot.clock)
    return made


class PassedOn:
    """Another worker, which passes on what its clients ask."""

    def __init__(self, rig: Rig, peer: int = OTHER) -> None:
        self._rig, self._peer = rig, peer

    def tell(self, message: m.Message, body: Any = b"") -> FakeRequest:
        """Send a message; the request with its answer, when that is there."""
        request: Any = FakeRequest(message)
        request.peer, request.body = self._peer, body
        self._rig.mailbox.handlers[type(message)](request)
        if not isinstance(message, m.CloseProducer | m.SessionsEnded):
            self._rig.turn(lambda: request.done, "an answer")
        made: FakeRequest = request
        return made

    def open(self, session: int, name: str = "p") -> m.Opened:
        """Open a producer on partition 1; raises what refuses it."""
        request: Any = FakeRequest(m.OpenProducer(1, name, session))
        request.peer = self._peer
        self._rig.mailbox.handlers[m.OpenProducer](request)
        self._rig.turn(lambda: request.done, "an answer")
        if request.error is not None:
            raise request.error
        opened: m.Opened = request.value
        return opened


def counted(rig: Rig) -> int:
    """Handles of this worker after it has counted anew."""
    later(rig, 1.1)
    return shared(rig).handles(ME)


def test_a_producer_that_was_passed_on_counts_where_its_partition_is(rig: Rig) -> None:
    """A client whose partition moved may open again by way of the worker that had it."""
    assign(rig, 1, namespace_handles_max=2)
    peer = PassedOn(rig)
    opened = peer.open(5)
    assert counted(rig) == 1
    frame = rig.client().frame(
        {"producer_id": opened.producer_id, "producer_epoch": opened.producer_epoch}, 0, [b"x"]
    )
    bundle = sealed_bundle([(1, frame)])
    assert peer.tell(m.PublishBundle(6), bundle).value[0] == FENCED, "of another client"
    assert peer.tell(m.PublishBundle(5), bundle).value[0] == OK
    assert peer.open(5).producer_id == opened.producer_id, "again: it takes its own place"
    peer.open(6, "q")
    peer.open(0, "of the worker itself")
    with pytest.raises(ResourceExhausted, match="namespace_handles_max 2"):
        peer.open(7, "r")
    assert counted(rig) == 2
    rig.client().open_producer(1, "p")
    assert counted(rig) == 2, "it opened here instead"


@pytest.mark.parametrize("way", ["close", "session", "restart"])
def test_a_producer_that_was_passed_on_counts_no_more_when_it_ends(rig: Rig, way: str) -> None:
    assign(rig, 1, namespace_handles_max=3)
    peer, third = PassedOn(rig), PassedOn(rig, OTHER + 1)
    opened = peer.open(5)
    third.open(5, "q")
    assert counted(rig) == 2
    if way == "close":
        third.tell(m.CloseProducer(1, opened.producer_id, 5))
        assert counted(rig) == 2, "another worker's client of that number"
        peer.tell(m.CloseProducer(1, opened.producer_id, 5))
    elif way == "session":
        peer.tell(m.SessionsEnded([4, 5]))
    else:
        for watcher in rig.mailbox.epoch_watchers:
            watcher(OTHER, 2)
    assert counted(rig) == 1
    peer.open(6)
    assert counted(rig) == 2


def test_owners_hear_of_producers_and_sessions_that_end(rig: Rig) -> None:
    """The side of the worker that passes on."""
    client = rig.client()
    client.post(10, 9, "p")
    rig.turn(lambda: rig.mailbox.asked(m.FindOwner), "the question for the owner")
    located = SimpleNamespace(error=None, value=SimpleNamespace(process=OTHER))
    rig.mailbox.asked(m.FindOwner)[0](located)
    (message,) = [each for each, _ in rig.mailbox.calls if isinstance(each, m.OpenProducer)]
    assert message.partition_id == 9 and message.session > 0
    client.post(12, 9, 77)
    closed = m.CloseProducer(9, 77, message.session)
    rig.turn(lambda: closed in rig.mailbox.notices, "a notice of the close")
    ended = m.SessionsEnded([message.session])
    later(rig, 0.3)
    assert ended not in rig.mailbox.notices
    session = rig.worker.state.sessions.by_number(message.session)
    assert session is not None
    rig.worker.state.sessions.close(session)
    later(rig, 0.3)
    later(rig, 0.3)
    assert rig.mailbox.notices.count(ended) == 1
