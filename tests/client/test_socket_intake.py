"""A connection reads a socket: what its kernel takes, and what stays in hand, against what the ordinary decoder yields.

`DANUBE_FUZZ_CASES=100000 pytest tests/client/test_socket_intake.py` looks longer; a failure prints the seed that
repeats its case alone.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
import zmq

from danube_fast.client.link.answers import REQUEST_BITS, Ticket
from danube_fast.client.link.connection import Connection, Identity
from danube_fast.client.link.deliveries import Deliveries, take_from_socket
from danube_fast.client.link.pump import Pump
from danube_fast.clock import SystemClock
from danube_fast.frame.bundle import bundle_entries, sealed_bundle
from danube_fast.net import protocol as p
from danube_fast.net.port import Port
from danube_fast.net.port_row import BODY_FOUND, HEAD_BYTES, HEAD_FOUND, NOTHING, SMALL_BYTES_MAX
from tests.history.rig import make_frame

ENDPOINT = "inproc://intake"
FUZZ_CASES = int(os.environ.get("DANUBE_FUZZ_CASES", "1500"))
FUZZ_SEED = int(os.environ.get("DANUBE_FUZZ_SEED", "1"))
ONE_CASE = os.environ.get("DANUBE_FUZZ_CASE", "")
CONSUMERS = (3, 127, 128, 70_000, 1 << 40)
STRANGER = 5
WAIT_MS = 60_000
Parts = list[bytes]


class House:
    """A connection to a ROUTER of this process, and all that it tells its users."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.bind(ENDPOINT)
        self.pump = Pump(SystemClock())
        self.heard: list[Any] = []
        with self.pump.lock:
            self.connection = Connection(
                self.pump,
                self,  # type: ignore[arg-type]
                [ENDPOINT],
                Identity("fuzz", {}, "host", 1),
            )
            self.welcome()
        for consumer_id in CONSUMERS:
            self.connection.receivers[consumer_id] = Receiver(self.heard, consumer_id)
        self.connection.bundler.settle = lambda *acks: self.heard.append(acks)  # type: ignore[method-assign]

    def open(self, endpoint: str) -> Port:
        """A port, as a dialer makes it."""
        socket = self.context.socket(zmq.DEALER)
        for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
            socket.setsockopt(option, 0)
        socket.connect(endpoint)
        return Port(socket)

    def next_look_ns(self, limit_ns: int) -> int:
        return limit_ns

    redials = False
    claims: ClassVar[dict[str, str]] = {}

    def verdict(self, now_ns: int) -> None: ...

    def settle(self, *, is_open: bool = False) -> None: ...

    def welcome(self) -> None:
        """Open the session of the connection's latest port."""
        assert self.router.poll(WAIT_MS), "no HELLO came"
        self.identity, hello = self.router.recv_multipart()
        request = p.decode_client_command(hello).request
        self.say([p.encode(p.Welcome(request, 1, b"token", 1, "0", "host", False, {}))])
        self.connection.drain()
        assert self.connection.is_open

    def say(self, parts: Parts) -> None:
        """Send a message to the connection."""
        self.router.send_multipart([self.identity, *parts])

    @property
    def port(self) -> Port:
        """That of the connection."""
        assert isinstance(self.connection._port, Port)
        return self.connection._port

    def in_hand(self) -> tuple[int, int]:
        """Head and body that wait for Python."""
        words = self.port._words
        return words[HEAD_FOUND // 8], words[BODY_FOUND // 8]

    def close(self) -> None:
        with self.pump.lock:
            self.connection.close()
            self.pump.close()
        self.router.close(0)
        self.context.term()


class Receiver:
    """Notes the frames and events for one consumer."""

    def __init__(self, heard: list[Any], consumer_id: int) -> None:
        self._heard, self._id = heard, consumer_id

    def on_frame(self, buffer: memoryview, start: int, frame_bytes: int) -> None:
        self._heard.append((self._id, bytes(buffer[start : start + frame_bytes])))

    def on_checked(self, view: Any, place: tuple[int, ...]) -> None:
        view.check()
        self._heard.append((self._id, bytes(view.frame)))

    def on_event(self, event: p.ConsumerEvent) -> None:
        self._heard.append(event)


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.close()


def delivery(consumer_ids: Sequence[int], *bundles: Sequence[bytes | bytearray]) -> Parts:
    """A DELIVER of these bundles of frames."""
    sealed = [bytes(sealed_bundle([(7, frame) for frame in frames])) for frames in bundles]
    return [p.encode(p.Deliver(list(consumer_ids))), *sealed]


class Case:
    """Random messages, and what they mean."""

    def __init__(self, house: House, draw: random.Random) -> None:
        self.house, self.draw = house, draw
        self.number = house.connection.link_number
        self.tickets: dict[int, Ticket] = {}
        for width in [draw.randrange(1, REQUEST_BITS + 1) for _ in range(draw.randrange(1, 9))]:
            request, ticket = draw.getrandbits(width) | 1, Ticket()
            if request not in self.tickets:
                assert house.pump.answers.expect(ticket, self.number, request)
                self.tickets[request] = ticket

    # ------------------------------------------------------------ messages

    def frame(self, size: int) -> bytearray:
        """A frame with a payload of that size; a few are damaged."""
        frame = make_frame(7, self.draw.randrange(1000), [self.draw.randbytes(size)])
        if self.draw.random() < 0.1:
            frame[self.draw.randrange(len(frame))] ^= 1 << self.draw.randrange(8)
        return frame

    def consumer(self) -> int:
        return self.draw.choice((*CONSUMERS, STRANGER))

    def small(self) -> Parts:
        return delivery([self.consumer()], [self.frame(self.draw.randrange(300))])

    def large(self) -> Parts:
        size = self.draw.choice((9_000, SMALL_BYTES_MAX - 300, SMALL_BYTES_MAX, 100_000))
        return delivery([self.consumer()], [self.frame(size)])

    def of_several(self) -> Parts:
        """Several bundles, several frames in one, or both."""
        shape = self.draw.choice(([1, 1], [2], [1, 2, 1]))
        bundles = [[self.frame(self.draw.choice((5, 9_000))) for _ in range(n)] for n in shape]
        return delivery([self.consumer() for _ in range(sum(shape))], *bundles)

    def acks(self) -> Parts:
        """A PUBLISHED, mostly of requests with rows; or with something unusual."""
        draw = self.draw
        entries = [
            (request, [draw.randrange(2), draw.getrandbits(draw.randrange(1, 63))])
            for request in draw.choices(list(self.tickets), k=draw.randrange(1, 4))
        ]
        texts: dict[int, str] = {}
        kind = draw.randrange(10)
        if kind == 0:
            entries[-1] = (max(self.tickets) + 1, [0, 1])
        elif kind == 1:
            entries[-1][1][0] = draw.choice((2, 32, 34))
        elif kind == 2:
            texts = {34: "x" * draw.choice((1, HEAD_BYTES))}
        elif kind == 3:
            entries[-1][1].extend([0, 1])
        elif kind == 4:
            entries *= 2000
        parts = [p.encode(p.Published(entries, texts))]
        return [*parts, b"behind"] if kind == 5 else parts

    def other(self) -> Parts:
        consumer_id = self.draw.choice(CONSUMERS)
        return [
            p.encode(
                self.draw.choice(
                    (
                        p.Pong(self.draw.getrandbits(20)),
                        p.ConsumerEvent(consumer_id, p.EventKind.GAP, {"end": 1}),
                        p.Result(1 << 50, {"some": "x" * self.draw.choice((3, 2 * HEAD_BYTES))}),
                    )
                )
            )
        ]

    def message(self) -> Parts:
        kinds = (self.small, self.small, self.large, self.of_several, self.acks, self.acks)
        return self.draw.choice((*kinds, self.other))()

    # ------------------------------------------------------------ what they mean

    def rows_of(self, parts: Parts) -> dict[int, tuple[int, ...]] | None:
        """Acks that a kernel hands over; None if the message is for Python."""
        command = p.decode_server_command(parts[0])
        if type(command) is not p.Published or len(parts) > 1 or len(parts[0]) > HEAD_BYTES:
            return None
        plain = all(
            request in self.tickets and len(outcome) == 2 and outcome[0] <= 1
            for request, outcome in command.entries
        )
        if command.texts or not plain:
            return None
        return {request: (request, *outcome) for request, outcome in command.entries}

    def meaning(self, parts: Parts) -> list[Any]:
        """What the connection tells of it."""
        command = p.decode_server_command(parts[0])
        if type(command) is p.Published:
            return [] if self.rows_of(parts) is not None else [(command.entries, command.texts)]
        if type(command) is p.ConsumerEvent:
            return [command]
        if type(command) is not p.Deliver:
            return []
        frames = [
            part[start : start + size]
            for part in parts[1:]
            for _, start, size in bundle_entries(part)
        ]
        pairs = zip(command.consumer_ids, frames, strict=True)
        return [pair for pair in pairs if pair[0] in CONSUMERS]

    def check(self) -> None:
        """Let the connection read some messages, in one go or several."""
        house, wanted, rows = self.house, list[Any](), dict[int, tuple[int, ...]]()
        house.heard.clear()
        for _ in range(self.draw.randrange(1, 12)):
            parts = self.message()
            house.say(parts)
            wanted += self.meaning(parts)
            rows.update(self.rows_of(parts) or {})
            if self.draw.random() < 0.3:
                house.connection.drain()
        house.connection.drain()
        assert house.in_hand() == (NOTHING, NOTHING) and not house.connection.readable()
        assert house.connection._deliveries._cell == [None]
        assert len(house.heard) == len(wanted), f"{len(house.heard)} instead of {len(wanted)}"
        for got, want in zip(house.heard, wanted, strict=True):
            assert got == want, f"{str(got)[:200]} instead of {str(want)[:200]}"
        got_rows = {r: house.pump.answers.take(ticket) for r, ticket in self.tickets.items()}
        assert {r: row for r, row in got_rows.items() if row is not None} == rows
        house.pump.answers.no_leader_looks()


def test_whatever_comes_is_what_the_decoder_reads(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, original = [0], Deliveries.take_all

    def counted(deliveries: Deliveries, *source: Any) -> int:
        count = original(deliveries, *source)
        taken[0] += count
        return count

    monkeypatch.setattr(Deliveries, "take_all", counted)
    cases = [int(ONE_CASE)] if ONE_CASE else range(FUZZ_CASES)
    with house.pump.lock:
        for case in cases:
            try:
                Case(house, random.Random(f"{FUZZ_SEED}-{case}")).check()
            except AssertionError as fault:
                again = f"DANUBE_FUZZ_SEED={FUZZ_SEED} DANUBE_FUZZ_CASE={case}"
                raise AssertionError(f"{fault}; again: {again}") from None
    assert ONE_CASE or taken[0] > FUZZ_CASES // 2, f"only {taken[0]} went straight"


def test_what_is_in_hand_counts_as_readable_and_goes_with_its_port(house: House) -> None:
    """An interrupt may strike between a kernel and what Python does with the rest."""
    size, rounds = 4 << 20, 64

    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    def leave_in_hand() -> None:
        connection, port = house.connection, house.port
        house.say(delivery([CONSUMERS[0]], [make_frame(7, 1, [bytes(size)])]))
        connection._deliveries.take_all(take_from_socket, port.row, connection.receivers)
        head, body = house.in_hand()
        assert head > 0 and body > size, "the message is not in hand"
        assert not connection._deliveries.are_all and port.readable()
        connection.reset()
        house.welcome()
        assert house.in_hand() == (NOTHING, NOTHING)

    with house.pump.lock:
        leave_in_hand()
        before = resident()
        for _ in range(rounds):
            leave_in_hand()
        assert resident() - before < rounds * size // 4, "bodies in hand are kept for ever"
        assert house.heard == []


def test_a_large_body_is_received_behind_a_small_one_and_not_behind_a_large_one(
    house: House,
) -> None:
    """Only the first large one is copied."""
    kinds: list[type] = []

    class Kinds(Receiver):
        def on_frame(self, buffer: memoryview, start: int, frame_bytes: int) -> None:
            kinds.append(type(buffer.obj))

    connection = house.connection
    connection.receivers[CONSUMERS[0]] = Kinds(house.heard, CONSUMERS[0])
    with house.pump.lock:
        for size in (10, 100_000, 100_000, 10, 10):
            house.say(delivery([CONSUMERS[0]], [make_frame(7, 1, [bytes(size)])]))
        connection.drain()
    assert [kind is bytearray for kind in kinds] == [True, False, False], kinds
    assert len(house.heard) == 2
