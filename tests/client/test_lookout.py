"""A leader's sleep over real rings: which acks the kernel hands over, and what it leaves to Python.

`DANUBE_FUZZ_CASES=100000 pytest tests/client/test_lookout.py` looks longer; a failure prints the seed that
repeats its case alone.
"""

from __future__ import annotations

import ctypes
import os
import random
import select
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pytest

from danube_fast.client.link.answers import REQUEST_BITS, Answers, Ticket, is_answered
from danube_fast.client.link.lookout import Link, Lookout
from danube_fast.clock import MILLISECOND_NS, SECOND_NS
from danube_fast.errors import DanubeError
from danube_fast.net import protocol as p
from danube_fast.ring.duplex import Duplex
from danube_fast.ring.duplex_kernel import ring_peer, signal_peer
from danube_fast.ring.handover import RingServer, dial, take
from danube_fast.ring.layout import AT_READER_SLEEPING
from tests.workers.broker import wait_until

RING_BYTES = 1 << 16
MESSAGE_BYTES_MAX = 1 << 20
RECORD_BYTES_MAX = 4096
FUZZ_CASES = int(os.environ.get("DANUBE_FUZZ_CASES", "3000"))
FUZZ_SEED = int(os.environ.get("DANUBE_FUZZ_SEED", "1"))
ONE_CASE = os.environ.get("DANUBE_FUZZ_CASE", "")
LONG_NS = 60 * SECOND_NS
SOON_SECONDS = 30.0
"""Far less than LONG_NS, and enough for a busy machine."""


class Line(NamedTuple):
    """One worker's rings, both sides, and the number under which rows know them."""

    near: Duplex
    far: Duplex
    number: int
    identity: bytes

    def say(self, record: bytes) -> bool:
        """Put one record into the ring as the worker would, and wake a reader that sleeps."""
        pushed = self.far._out.try_push(record)
        ring_peer(self.far.row)
        return pushed

    def rest(self) -> list[bytes]:
        """Take all records that are left."""
        return list(iter(self.near._in.pop, None))

    @property
    def is_armed(self) -> bool:
        """Whether the reader has asked for a signal."""
        word = ctypes.c_int64.from_address(self.near._in.address + AT_READER_SLEEPING)
        return word.value != 0


class House:
    """Lines of one client to a server of rings, its rows, and its epoll."""

    def __init__(self, lines: int = 2) -> None:
        self._endpoint = f"ipc://@danube-test-{os.getpid()}-{time.monotonic_ns()}"
        self.server = RingServer(
            self._endpoint, ring_bytes=RING_BYTES, links_max=lines,
            message_bytes_max=MESSAGE_BYTES_MAX,
        )  # fmt: skip
        self.epoll = select.epoll()
        self.answers = Answers()
        self.lines = [self._enter(10 + index) for index in range(lines)]

    def _enter(self, number: int) -> Line:
        known = set(self.server._links)
        sock = dial(self._endpoint) or pytest.fail("no listener")
        self.server.look()
        near = take(sock, MESSAGE_BYTES_MAX) or pytest.fail("no rings")
        self.epoll.register(near.fileno(), select.EPOLLIN)
        (identity,) = set(self.server._links) - known
        return Line(near, self.server._links[identity], number, identity)

    def end(self, line: Line) -> None:
        """The worker of that line ends."""
        self.server._close(line.identity)

    def lookout(self, spin_ns: int = 0) -> Lookout:
        """What a leader sleeps with."""
        links = [Link(line.near.fileno(), line.near, line.number) for line in self.lines]
        return Lookout(self.epoll.fileno(), self.answers.address, spin_ns, links)

    def ticket(self, line: Line, request: int) -> Ticket:
        """A call that waits for that request of that line."""
        ticket = Ticket()
        assert self.answers.expect(ticket, line.number, request)
        return ticket

    def close(self) -> None:
        for line in self.lines:
            line.near.close()
        self.server.close()
        self.epoll.close()


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.close()


def sleep(lookout: Lookout, row: int, limit_ns: int) -> list[int]:
    """Sleep as a leader does; the descriptors that it is to read then."""
    count = lookout.sleep(row, limit_ns)
    return list(lookout.found(count)) if count > 0 else []


class Sleeping:
    """A thread inside `Lookout.sleep`."""

    def __init__(self, house: House, row: int = 0, limit_ns: int = LONG_NS) -> None:
        self._lookout = house.lookout()
        self._found: list[list[int]] = []
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._sleep, args=(row, limit_ns), daemon=True)
        self._thread.start()
        for line in house.lines:
            wait_until("the leader's sleep", lambda line=line: line.is_armed)

    def _sleep(self, row: int, limit_ns: int) -> None:
        self._found.append(sleep(self._lookout, row, limit_ns))

    def found(self) -> list[int]:
        """The descriptors that it woke up with, soon."""
        self._thread.join(SOON_SECONDS)
        assert self._found, f"the leader still sleeps after {SOON_SECONDS} s"
        return self._found[0]


def record(*parts: bytes) -> bytes:
    """One message as it lies in a ring."""
    return struct.pack(f"<{1 + len(parts)}I", len(parts), *map(len, parts)) + b"".join(parts)


def acks(*entries: tuple[int, list[int]], texts: dict[int, str] | None = None) -> bytes:
    """A record of PUBLISHED."""
    return record(p.encode(p.Published(list(entries), texts or {})))


def pong(request: int) -> bytes:
    """A record of PONG."""
    return record(p.encode(p.Pong(request)))


# ---------------------------------------------------------------- one thing each


def test_an_ack_goes_to_its_row_and_not_to_python(house: House) -> None:
    line, other = house.lines
    own, not_own = house.ticket(line, 7), house.ticket(other, 7)
    assert line.say(acks((7, [1, 1 << 40])))
    assert sleep(house.lookout(), own.row, LONG_NS) == []
    assert is_answered(own.row) and not is_answered(not_own.row)
    assert house.answers.take(own) == (7, 1, 1 << 40)
    assert house.answers.take(not_own) is None
    assert line.rest() == []


def test_a_request_that_has_the_key_of_another_link_is_left_to_python(house: House) -> None:
    line, next_line = house.lines
    assert next_line.number == line.number + 1
    theirs, beyond = house.ticket(next_line, 7), (1 << REQUEST_BITS) + 7
    assert not house.answers.expect(Ticket(), line.number, beyond), "it would have their key"
    assert line.say(acks((beyond, [0, 5])))
    assert sleep(house.lookout(), 0, LONG_NS) == [line.near.fileno()]
    assert not is_answered(theirs.row) and house.answers.take(theirs) is None
    assert line.rest() == [acks((beyond, [0, 5]))]


def test_a_pong_goes_to_its_row_and_wakes_no_leader(house: House) -> None:
    line, other = house.lines
    beat, not_that = house.ticket(line, 7), house.ticket(other, 7)
    leader = Sleeping(house)
    assert line.say(pong(7))
    wait_until("the answer", lambda: is_answered(beat.row))
    wait_until("the leader's next sleep", lambda: line.is_armed)
    assert house.answers.take(beat) == (7, 0, 0) and house.answers.take(not_that) is None
    assert line.say(pong(8)), "of a request without a row"
    assert leader.found() == [line.near.fileno()] and line.rest() == [pong(8)]


def test_an_ack_wakes_a_leader_that_sleeps(house: House) -> None:
    line = house.lines[1]
    ticket = house.ticket(line, 300)
    leader = Sleeping(house, ticket.row)
    assert line.say(acks((300, [0, 5])))
    assert leader.found() == [] and house.answers.take(ticket) == (300, 0, 5)
    assert not line.is_armed, "the worker would signal a leader that is awake"


def test_an_ack_of_another_thread_wakes_that_one_alone(house: House) -> None:
    line = house.lines[0]
    ours, theirs = house.ticket(line, 1), house.ticket(line, 2)
    leader = Sleeping(house, ours.row)
    woken: list[float] = []
    follower = threading.Thread(
        target=lambda: woken.append(house.answers.sleep(theirs, LONG_NS) or 1), daemon=True
    )
    follower.start()
    assert line.say(acks((2, [0, 9])))
    follower.join(SOON_SECONDS)
    assert woken, "the thread whose ack came still sleeps"
    assert house.answers.take(theirs) == (2, 0, 9)
    wait_until("the leader's next sleep", lambda: line.is_armed)
    assert not is_answered(ours.row)
    assert line.say(acks((1, [0, 8])))
    assert leader.found() == [] and house.answers.take(ours) == (1, 0, 8)


@pytest.mark.parametrize("spin_ns", [0, 20 * MILLISECOND_NS])
def test_without_anything_the_limit_ends_the_sleep(house: House, spin_ns: int) -> None:
    ticket = house.ticket(house.lines[0], 1)
    limit_ns = 50 * MILLISECOND_NS
    began = time.monotonic_ns()
    assert sleep(house.lookout(spin_ns), ticket.row, limit_ns) == []
    took_ns = time.monotonic_ns() - began
    assert limit_ns <= took_ns < SOON_SECONDS * SECOND_NS
    assert house.answers.take(ticket) is None
    assert not any(line.is_armed for line in house.lines)


@pytest.mark.parametrize("spin_ns", [0, LONG_NS])
def test_the_end_of_a_worker_is_for_python(house: House, spin_ns: int) -> None:
    house.end(house.lines[1])
    wanted = [house.lines[1].near.fileno()]
    assert sleep(house.lookout(spin_ns), 0, LONG_NS) == wanted


def test_the_end_of_a_worker_wakes_a_leader(house: House) -> None:
    ticket = house.ticket(house.lines[1], 3)
    leader = Sleeping(house, ticket.row)
    house.end(house.lines[1])
    assert leader.found() == [house.lines[1].near.fileno()]


def test_signals_are_for_python_while_something_waits_for_room(house: House) -> None:
    line = house.lines[0]
    lookout = house.lookout()
    signal_peer(line.far.row)
    assert sleep(lookout, 0, 20 * MILLISECOND_NS) == [], "nothing waits"
    while line.near.send([b"x" * 1000]):
        pass
    signal_peer(line.far.row)
    assert sleep(lookout, 0, LONG_NS) == [line.near.fileno()]
    line.near.wait_no_more()
    signal_peer(line.far.row)
    assert sleep(lookout, 0, 20 * MILLISECOND_NS) == []


def test_room_that_a_leader_makes_wakes_the_worker(house: House) -> None:
    """The kernel takes acks, and answers a worker that had found no room for more."""
    line = house.lines[0]
    ticket = house.ticket(line, 1)
    sent = 0
    while line.far.send([p.encode(p.Published([(1, [0, sent])]))]):
        sent += 1
    assert sent > 100
    assert not select.select([line.far.fileno()], [], [], 0)[0]
    assert sleep(house.lookout(), ticket.row, LONG_NS) == []
    assert house.answers.take(ticket) == (1, 0, sent - 1), "not all acks were taken"
    assert select.select([line.far.fileno()], [], [], 0)[0], "the worker waits for room for ever"
    assert line.far.hear() and line.far.send([b"more"])
    assert not select.select([line.far.fileno()], [], [], 0)[0], "one complaint, one signal"


def test_other_descriptors_are_found_once_each_whatever_their_number(house: House) -> None:
    bells = [os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(40)]
    try:
        for bell in bells:
            house.epoll.register(bell, select.EPOLLIN)
        for line in house.lines:
            assert line.say(record(p.encode(p.Pong(1))))
        wanted = {line.near.fileno() for line in house.lines}
        assert set(sleep(house.lookout(), 0, LONG_NS)) == wanted
        for line in house.lines:
            line.rest()
        found = sleep(house.lookout(), 0, LONG_NS)
        assert found and len(found) == len(set(found)) and set(found) <= set(bells)
    finally:
        for bell in bells:
            os.close(bell)


def test_a_thread_on_its_way_to_sleep_hears_that_it_is_to_lead() -> None:
    """The leader leaves after the thread has given the lock back and before its row says that it sleeps."""
    answers = Answers()
    ticket = Ticket()
    assert answers.expect(ticket, 1, 1)
    answers.sleeping[ticket] = None
    answers.hand_over()
    began = time.monotonic()
    answers.sleep(ticket, LONG_NS)
    assert time.monotonic() - began < SOON_SECONDS, "no thread reads the sockets"
    assert not is_answered(ticket.row)


def test_a_row_is_not_used_again_while_a_leader_may_still_answer_it(house: House) -> None:
    """A thread gives up while a leader is between finding its row and filling it in."""
    answers, line = house.answers, house.lines[0]
    given_up, answered = house.ticket(line, 1), house.ticket(line, 2)
    rows = [given_up.row, answered.row]
    assert line.say(acks((2, [0, 1])))
    assert sleep(house.lookout(), answered.row, LONG_NS) == []
    assert answers.take(given_up) is None and answers.take(answered) is not None
    assert house.ticket(line, 3).row == rows[1], "rows are not used again at all"
    assert house.ticket(line, 4).row not in rows
    answers.no_leader_looks()
    assert house.ticket(line, 5).row == rows[0]


def test_an_ack_stays_for_python_if_a_row_was_given_up(house: House) -> None:
    line = house.lines[0]
    kept, given_up = house.ticket(line, 1), house.ticket(line, 2)
    assert house.answers.take(given_up) is None
    both = acks((1, [0, 1]), (2, [0, 2]))
    assert line.say(both)
    assert sleep(house.lookout(), kept.row, LONG_NS) == [line.near.fileno()]
    assert line.rest() == [both] and house.answers.take(kept) is None


# ---------------------------------------------------------------- fuzz


class Case:
    """Random records for the rows of one line, and what may become of them."""

    def __init__(self, house: House, draw: random.Random) -> None:
        self.house, self.draw = house, draw
        self.line = draw.choice(house.lines)
        widths = [draw.randrange(1, REQUEST_BITS + 1) for _ in range(draw.randrange(1, 65))]
        self.requests = sorted({draw.getrandbits(width) | 1 for width in widths})
        self.tickets = {request: house.ticket(self.line, request) for request in self.requests}
        others = [line for line in house.lines if line is not self.line]
        self.decoys = [house.ticket(draw.choice(others), each) for each in self.requests[:8]]

    def entries(self, count: int) -> list[Any]:
        """That many acks, each for a row of its own."""
        draw = self.draw
        return [
            [request, [draw.randrange(2), draw.getrandbits(draw.randrange(1, 64))]]
            for request in draw.sample(self.requests, min(count, len(self.requests)))
        ]

    def valid(self) -> bytes:
        if self.draw.random() < 0.1:
            return pong(self.draw.choice(self.requests))
        entries = self.entries(self.draw.randrange(1, 65))
        return record(msgspec.msgpack.encode([68, entries, {}]))

    def odd(self) -> bytes:
        """One thing is wrong with it, or at least unusual."""
        draw, entries = self.draw, self.entries(4)
        head: list[Any] = [68, entries, {}]
        victim = draw.choice(entries)
        kind = draw.randrange(12)
        if kind == 0:
            victim[1] = draw.choice(([], [0], [0, 1, 0], [0] * 16, [[0], 1], None, "text"))
        elif kind == 1:
            victim[1][0] = draw.choice((2, 32, 34, 37, 127, 128, 1 << 32, 1 << 63, -1, True, 1.0))
        elif kind == 2:
            head[2] = {draw.choice((0, 1, 34)): "text"}
        elif kind == 3:
            victim[0] = draw.choice((max(self.requests) + 1, 0, -1, (1 << 64) - 1))
        elif kind == 4:
            head[0] = draw.choice((64, 65, 66, 67, 69, 71, 1, 0, 200, "68"))
        elif kind == 5:
            victim[1][1] = draw.choice((-1, 1 << 63, (1 << 64) - 1, None, 0.5))
        elif kind == 6:
            head.append(draw.choice((1, {}, [])))
        elif kind == 7:
            del head[2:]
        elif kind == 8:
            victim[:] = draw.choice(([], victim[:1], [*victim, 1]))
        elif kind == 9:
            head[1] = entries * draw.choice((2, 100, 200))
        elif kind == 10:
            head[1] = draw.choice(([], {}, None, 5))
        else:
            head[2] = draw.choice(([], None, {34: 5}))
        return record(msgspec.msgpack.encode(head))

    def broken(self) -> bytes:
        """Cut, changed in a byte, of several parts, with a wrong lead, or no message at all."""
        draw, good = self.draw, self.valid()
        kind = draw.randrange(5)
        if kind == 0:
            body = good[8 : draw.randrange(8, len(good))]
            return record(body) if draw.random() < 0.5 else good[:8] + body
        if kind == 1:
            spoilt = bytearray(good)
            for _ in range(draw.randrange(1, 4)):
                spoilt[draw.randrange(len(spoilt))] = draw.getrandbits(8)
            return bytes(spoilt)
        if kind == 2:
            return record(good[8:], *[draw.randbytes(3)] * draw.randrange(1, 3))
        if kind == 3:
            return record(good[8:] + draw.randbytes(draw.randrange(1, 9)))
        return draw.randbytes(draw.randrange(0, 200))

    def records(self) -> list[bytes]:
        """A few, of all kinds."""
        kinds = [self.valid, self.valid, self.odd, self.broken]
        return [self.draw.choice(kinds)() for _ in range(self.draw.randrange(1, 4))]

    def meaning(self, content: bytes) -> list[tuple[int, int, int]] | None:
        """The acks in a record, or the answer to a heartbeat, as Python reads it; None if not all have rows."""
        if len(content) < 8 or struct.unpack_from("<2I", content) != (1, len(content) - 8):
            return None
        try:
            command = p.decode_server_command(content[8:])
        except (msgspec.MsgspecError, DanubeError):
            return None
        if type(command) is p.Pong and command.request in self.tickets:
            return [(command.request, 0, 0)]
        if type(command) is not p.Published or command.texts or len(content) > RECORD_BYTES_MAX:
            return None
        found = []
        for request, outcome in command.entries:
            if request not in self.tickets or len(outcome) != 2 or not 0 <= outcome[0] <= 1:
                return None
            if not 0 <= outcome[1] < 1 << 63:
                return None
            found.append((request, *outcome))
        return found

    def must_take(self, content: bytes) -> bool:
        """Whether the kernel has no excuse: all is acks, in the form in which a worker writes them."""
        meaning = self.meaning(content)
        if meaning is None:
            return False
        if content == pong(meaning[0][0] if meaning else 0):
            return True
        return content == acks(*((request, outcome) for request, *outcome in meaning))

    def check(self) -> tuple[int, int]:
        """Let the kernel look; how many records it took, and how many it left."""
        sent = self.records()
        assert all(map(self.line.say, sent))
        found = sleep(self.house.lookout(), 0, 0)
        left = self.line.rest()
        taken = len(sent) - len(left)
        assert left == sent[taken:], "a record in the ring was changed"
        assert found == [self.line.near.fileno()] * bool(left), f"found {found}, left {left}"
        assert not left or not self.must_take(left[0]), f"not taken: {left[0].hex()}"
        allowed: dict[int, list[tuple[int, int, int]]] = {}
        for content in sent[:taken]:
            meaning = self.meaning(content)
            assert meaning is not None, f"taken, though it is for Python: {content.hex()}"
            for ack in meaning:
                allowed.setdefault(ack[0], []).append(ack)
        for request, ticket in self.tickets.items():
            got = self.house.answers.take(ticket)
            wanted = allowed.get(request, [None])  # type: ignore[list-item]
            assert got in wanted, f"{request} got {got} instead of {wanted}"
        for decoy in self.decoys:
            assert self.house.answers.take(decoy) is None, "a row of another line was answered"
        self.house.answers.no_leader_looks()
        return taken, len(left)


def test_any_record_is_handed_over_rightly_or_left_alone() -> None:
    """Differential against the decoder that Python uses."""
    cases = [int(ONE_CASE)] if ONE_CASE else range(FUZZ_CASES)
    taken = left = 0
    house = House()
    try:
        for case in cases:
            draw = random.Random(f"{FUZZ_SEED}-{case}")
            try:
                done = Case(house, draw).check()
            except AssertionError as fault:
                again = f"DANUBE_FUZZ_SEED={FUZZ_SEED} DANUBE_FUZZ_CASE={case}"
                raise AssertionError(f"{fault}; again: {again}") from None
            taken, left = taken + done[0], left + done[1]
    finally:
        house.close()
    assert ONE_CASE or min(taken, left) > FUZZ_CASES // 2, f"{taken} taken, {left} left"
