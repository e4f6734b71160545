"""Mailboxes driven in one process over rings made of a deque."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from danube_fast.broker import messages as m
from danube_fast.clock import NEVER_NS
from danube_fast.errors import Internal, InvalidArgument, NotFound, Unavailable
from danube_fast.workers.process.mailbox import Link, Mailbox, Reply, Request
from danube_fast.workers.process.records import (
    FIRST,
    PREFIX,
    Assembler,
    Head,
    encode_message,
    fragments,
)

SECOND_NS = 1_000_000_000
MILLISECOND_NS = 1_000_000


class FakeRing:
    """A ring of a few records."""

    def __init__(self, records_max: int = 4, record_bytes_max: int = 200) -> None:
        self.records: deque[bytes] = deque()
        self.records_max = records_max
        self.record_bytes_max = record_bytes_max

    @property
    def readable(self) -> bool:
        return bool(self.records)

    def try_push(self, *parts: bytes | memoryview) -> bool:
        record = b"".join(parts)
        assert len(record) <= self.record_bytes_max
        if len(self.records) == self.records_max:
            return False
        self.records.append(record)
        return True

    def pop(self) -> bytes | None:
        return self.records.popleft() if self.records else None


class FakeBell:
    """Counts."""

    def __init__(self) -> None:
        self.rung = 0
        self.sleeping = False

    def ring(self) -> None:
        self.rung += 1

    def prepare_sleep(self) -> None:
        self.sleeping = True

    def cancel_sleep(self) -> None:
        self.sleeping = False

    def drain(self) -> None:
        pass

    def fileno(self) -> int:
        return -1


class FakePeers:
    """Epochs and who is down."""

    def __init__(self) -> None:
        self.epochs = {0: 1, 1: 1}
        self.down: set[int] = set()

    def epoch(self, process: int) -> int:
        return self.epochs[process]

    def is_down(self, process: int) -> bool:
        return process in self.down


class Pair:
    """Process 0 and process 1."""

    def __init__(self) -> None:
        self.peers = FakePeers()
        self.ring_01, self.ring_10 = FakeRing(), FakeRing()
        self.bells = [FakeBell(), FakeBell()]
        self.now_ns = SECOND_NS
        self.zero = self.make(0)
        self.one = self.make(1)
        self.turn()

    def make(self, index: int) -> Mailbox:
        rings = [self.ring_01, self.ring_10]
        link = Link(1 - index, rings[index], rings[1 - index], self.bells[1 - index])
        epoch = self.peers.epoch(index)
        return Mailbox(index, epoch, [link], self.bells[index], self.peers, self)

    def monotonic_ns(self) -> int:
        return self.now_ns

    def wall_ns(self) -> int:
        return self.now_ns

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.now_ns += MILLISECOND_NS
            self.one.do_work(self.now_ns)
            self.zero.do_work(self.now_ns)


class Nonsense(m.Message, frozen=True):
    """An operation that the other process does not know."""


@pytest.fixture
def pair() -> Pair:
    return Pair()


def ask(pair: Pair, message: m.Message, body: bytes = b"") -> list[Reply]:
    replies: list[Reply] = []
    pair.zero.call(1, message, body, on_reply=replies.append, timeout_ms=1000)
    assert not replies, "a reply must not come from within call()"
    return replies


def test_call_and_reply(pair: Pair) -> None:
    def double(request: Request[m.FindOwner]) -> None:
        request.reply(m.Owner(request.message.partition_id * 2), bytes(request.body) * 2)

    pair.one.serve(m.FindOwner, double)
    replies = ask(pair, m.FindOwner(21), b"ab")
    pair.turn(2)
    assert [(reply.result(), bytes(reply.body)) for reply in replies] == [(m.Owner(42), b"abab")]


def test_errors_keep_their_kind(pair: Pair) -> None:
    def refuse(request: Request[Any]) -> None:
        raise NotFound("no such thing; make it first")

    pair.one.serve(m.FindOwner, refuse)
    refused, unserved = ask(pair, m.FindOwner(1)), ask(pair, m.ReadState(1, 0))
    unknown = ask(pair, Nonsense())
    pair.turn(2)
    with pytest.raises(NotFound, match="make it first"):
        refused[0].result()
    with pytest.raises(InvalidArgument, match="ReadState"):
        unserved[0].result()
    with pytest.raises(InvalidArgument, match="Nonsense"):
        unknown[0].result()


def test_arguments_and_answers_of_another_type_are_refused(pair: Pair, caplog: Any) -> None:
    pair.one.serve(m.FindOwner, lambda request: request.reply({"process": "seven"}))
    pair.one.serve(m.ReadState, lambda request: request.reply())
    wrong: Any = "no number"
    answered, asked = ask(pair, m.FindOwner(1)), ask(pair, m.ReadState(wrong, 0))
    pair.turn(2)
    with pytest.raises(Internal, match="FindOwner"):
        answered[0].result()
    with pytest.raises(Internal, match="ReadState"):
        asked[0].result()


def test_late_reply_and_only_one(pair: Pair) -> None:
    requests: list[Request[Any]] = []
    pair.one.serve(m.PublishBundle, requests.append)
    replies = ask(pair, m.PublishBundle())
    pair.turn(2)
    assert not replies
    requests[0].reply([1])
    requests[0].reply([2])
    pair.turn(2)
    assert [reply.result() for reply in replies] == [[1]]


def test_a_call_that_has_ended_wakes_nobody(pair: Pair) -> None:
    pair.one.serve(m.PublishBundle, lambda request: request.reply([1]))
    replies = ask(pair, m.PublishBundle())
    assert pair.zero.next_deadline_ns() == pair.now_ns + SECOND_NS
    pair.turn(2)
    assert [reply.result() for reply in replies] == [[1]]
    assert pair.zero.next_deadline_ns() == NEVER_NS


def test_large_messages_are_cut_and_joined_in_order(pair: Pair) -> None:
    seen: list[tuple[int, bytes]] = []
    pair.one.serve(m.LogAllowance, lambda r: seen.append((r.message.bytes, bytes(r.body))))
    bodies = [bytes([n]) * (n * 997) for n in range(1, 6)]
    for n, body in enumerate(bodies):
        pair.zero.notify(1, m.LogAllowance(n), body)
    assert pair.zero.next_deadline_ns() <= pair.now_ns + SECOND_NS, "what waits must be retried"
    for _ in range(200):
        pair.turn()
    assert seen == list(enumerate(bodies))


def test_call_expires(pair: Pair) -> None:
    pair.one.serve(m.PublishBundle, lambda request: None)
    replies = ask(pair, m.PublishBundle())
    assert pair.zero.next_deadline_ns() == pair.now_ns + SECOND_NS
    pair.now_ns += SECOND_NS
    pair.turn(2)
    with pytest.raises(Unavailable, match="PublishBundle"):
        replies[0].result()


def test_peer_known_to_be_down_fails_at_once(pair: Pair) -> None:
    pair.peers.down.add(1)
    replies = ask(pair, m.PublishBundle())
    assert not pair.zero.prepare_sleep(), "there is a reply to hand out"
    pair.turn()
    with pytest.raises(Unavailable):
        replies[0].result()


def test_calls_end_when_their_peer_goes_down(pair: Pair) -> None:
    pair.one.serve(m.PublishBundle, lambda request: None)
    replies = ask(pair, m.PublishBundle())
    pair.turn()
    pair.peers.down.add(1)
    pair.turn()
    with pytest.raises(Unavailable, match="down"):
        replies[0].result()


def test_restarted_peer_never_sees_old_calls(pair: Pair) -> None:
    """The call lies in the ring when the peer dies: the caller hears so, the successor does not."""
    handled: list[Request[Any]] = []
    replies = ask(pair, m.PublishBundle())
    pair.peers.epochs[1] = 2
    pair.one = pair.make(1)
    pair.one.serve(m.PublishBundle, handled.append)
    epochs: list[tuple[int, int]] = []
    pair.zero.epoch_watchers.append(lambda peer, epoch: epochs.append((peer, epoch)))
    pair.turn(3)
    assert not handled
    assert epochs == [(1, 2)]
    with pytest.raises(Unavailable, match="restarted"):
        replies[0].result()
    again = ask(pair, m.PublishBundle())
    pair.turn()
    assert len(handled) == 1
    handled[0].reply([7])
    pair.turn(2)
    assert again[0].result() == [7]


def test_restarted_caller_never_takes_old_answers(pair: Pair) -> None:
    requests: list[Request[Any]] = []
    pair.one.serve(m.PublishBundle, requests.append)
    ask(pair, m.PublishBundle())
    pair.one.do_work(pair.now_ns)
    pair.peers.epochs[0] = 2
    pair.zero = pair.make(0)
    replies = ask(pair, m.PublishBundle())  # the same request number as its predecessor's
    requests[0].reply([1])
    pair.turn(2)
    requests[1].reply([2])
    pair.turn(2)
    assert [reply.result() for reply in replies] == [[2]]


def test_a_sleep_that_a_client_ended_hides_no_call_and_nothing_that_waits(pair: Pair) -> None:
    """Rings are not looked at when no peer rang, but what has its time, or waits for room, goes on."""
    assert pair.zero.prepare_sleep()
    pair.zero.silent = True
    pair.ring_10.records.append(b"pushed by a peer that died before it rang")
    pair.zero.do_work(pair.now_ns)
    assert pair.ring_10.records, "no peer rang"
    pair.ring_10.records.clear()
    replies = ask(pair, m.PublishBundle())
    pair.now_ns += SECOND_NS
    assert pair.zero.prepare_sleep()
    pair.zero.silent = True
    pair.zero.do_work(pair.now_ns)
    with pytest.raises(Unavailable):
        replies[0].result()
    pair.zero.notify(1, m.LogAllowance(1), bytes(5000))
    waiting = len(pair.ring_01.records)
    pair.ring_01.records.clear()
    assert pair.zero.prepare_sleep()
    pair.zero.silent = True
    pair.zero.do_work(pair.now_ns)
    assert waiting and pair.ring_01.records, "what found no room goes on"


def test_sleep_is_refused_while_something_is_readable(pair: Pair) -> None:
    assert pair.one.prepare_sleep()
    assert pair.bells[1].sleeping
    pair.zero.notify(1, m.LogAllowance(1))
    assert pair.bells[1].rung
    pair.one.do_work(pair.now_ns)
    assert not pair.bells[1].sleeping
    pair.zero.notify(1, m.LogAllowance(1))
    assert not pair.one.prepare_sleep()
    assert not pair.bells[1].sleeping


def test_fragments_of_the_dead_are_thrown_away() -> None:
    head, body = encode_message(Head(1, 1, 1, 0, "op", {"a": 1}), b"x" * 500)
    records = [b"".join(parts) for parts in fragments(head, body, 100)]
    assert len(records) > 3
    assembler = Assembler()
    assert all(assembler.feed(record) is None for record in records[2:]), "no FIRST was seen"
    assert all(assembler.feed(record) is None for record in records[:2])
    messages = [assembler.feed(record) for record in records]
    assert messages[-1] is not None and bytes(messages[-1].body) == body
    assert assembler.feed(b"abc") is None
    assert assembler.feed(PREFIX.pack(FIRST | 2, 3) + b"\xc1\xc1\xc1") is None
