"""The network of a simulation: connections whose messages are late, and which end at any instant.

    client --Wire.up--> (delay) --> LoopbackServer.receive --> worker
           <--(delay)-- Wire.down <-- LoopbackServer.send  <--

A connection keeps the order of its messages, as a socket does; when it ends, what was on its way is
lost. `LoopbackServer` stands in for `net.server.Server`, rings and bells for those between processes.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from danube_fast.clock import MICROSECOND_NS, MILLISECOND_NS
from danube_fast.frame.kernel import address_of
from danube_fast.net.server import PeerGone, WouldBlock
from danube_fast.testing.virtual_clock import Schedule

__all__ = ["LoopbackBell", "LoopbackRing", "LoopbackServer", "Network", "Tap", "Wire"]

UNREAD_MAX = 40
"""Messages that a client leaves unread before its worker finds the queue full."""
RECORD_BYTES_MAX = 32 * 1024
RECORDS_MAX = 64


class Tap:
    """Hears everything that a server reads and sends, in its owner's order. This one does not listen."""

    def received(self, wire: Wire, head: bytes, parts: list[Any]) -> None:
        """The owner took a command."""

    def sent(self, wire: Wire, parts: list[bytes]) -> None:
        """The owner sent a message."""

    def refused(self, identity: bytes, parts: list[Any], *, gone: bool) -> None:
        """The owner could not send a message: the peer is gone, or its queue is full."""

    def end_turn(self) -> None:
        """A turn of the owner is over."""


class Network:
    """Delays, and all connections there are."""

    def __init__(self, schedule: Schedule, draw: random.Random) -> None:
        self.schedule = schedule
        self.draw = draw
        self.slow_until_ns = 0
        self._numbers = itertools.count(1)

    def delay_ns(self) -> int:
        """How long the next message is on its way."""
        if self.slow_until_ns > self.schedule.clock.now_ns:
            return self.draw.randrange(1 * MILLISECOND_NS, 300 * MILLISECOND_NS)
        return self.draw.randrange(20 * MICROSECOND_NS, 400 * MICROSECOND_NS)

    def connect(self, server: LoopbackServer, client: Callable[[list[bytes]], None]) -> Wire:
        """A new connection; `client` is called with each message that comes back."""
        identity = b"\0" + next(self._numbers).to_bytes(4, "big")
        wire = Wire(self, server, identity, client)
        server.wires[identity] = wire
        return wire


class Wire:
    """One connection."""

    def __init__(
        self,
        network: Network,
        server: LoopbackServer,
        identity: bytes,
        client: Callable[[list[bytes]], None],
    ) -> None:
        self.identity = identity
        self.server = server
        self.is_cut = False
        """Nothing passes any more."""
        self.is_read = True
        """The client takes what comes; otherwise it waits, up to `UNREAD_MAX`."""
        self._network = network
        self._client = client
        self._up_ns = self._down_ns = 0
        self._on_way_down = 0
        self._unread: deque[list[bytes]] = deque()

    def up(self, *parts: bytes) -> None:
        """The client sends a message."""
        if self.is_cut:
            return
        schedule = self._network.schedule
        self._up_ns = max(self._up_ns, schedule.clock.now_ns + self._network.delay_ns())

        def arrive() -> None:
            if not self.is_cut:
                self.server.arrived(self, list(parts))

        schedule.call(self._up_ns - schedule.clock.now_ns, arrive)

    def down(self, parts: list[bytes]) -> None:
        """The worker sends a message."""
        if self.is_cut:
            return
        schedule = self._network.schedule
        self._down_ns = max(self._down_ns, schedule.clock.now_ns + self._network.delay_ns())
        self._on_way_down += 1

        def arrive() -> None:
            self._on_way_down -= 1
            if self.is_cut:
                return
            if self.is_read:
                self._client(parts)
            else:
                self._unread.append(parts)

        schedule.call(self._down_ns - schedule.clock.now_ns, arrive)

    @property
    def is_full(self) -> bool:
        """The worker finds no room."""
        return len(self._unread) + self._on_way_down >= UNREAD_MAX and not self.is_read

    def read_again(self) -> None:
        """The client takes what has waited, and what comes."""
        self.is_read = True
        while self._unread and not self.is_cut and self.is_read:
            self._client(self._unread.popleft())

    def cut(self, *, silently: bool = False) -> None:
        """The connection ends; `silently`: the worker is not told and sends into the void."""
        self.is_cut = True
        self._unread.clear()
        if not silently:
            self.server.wires.pop(self.identity, None)


class Room(bytearray):
    """A part that is yet to be written."""

    @property
    def address(self) -> int:
        """Where its memory is."""
        return address_of(self)


class LoopbackServer:
    """The server of a process."""

    def __init__(self, tap: Tap, wake: Callable[[], None], event_fd: int) -> None:
        self.wires: dict[bytes, Wire] = {}
        self.drained = False
        """The last `receive` took everything that was there."""
        self.proves = self.looks_at_senders = False
        self.guard = None
        self.ipc_is_taken = False
        self.proof = ""
        """Connections of a simulation prove nothing."""
        self.introduces = False
        self.address = ""
        self.is_known: Callable[[bytes], bool] = lambda identity: True
        self._tap = tap
        self._wake = wake
        self._event_fd = event_fd
        self._inbox: deque[tuple[Wire, list[bytes]]] = deque()

    def arrived(self, wire: Wire, parts: list[bytes]) -> None:
        """A message is there to be read."""
        self._inbox.append((wire, parts))
        self._wake()

    def readable(self) -> bool:
        """Whether a message waits."""
        return bool(self._inbox)

    def fileno(self) -> int:
        """A descriptor that no process sleeps on."""
        return self._event_fd

    def bind(self, host: str, port: int, ipc_endpoint: str) -> int:
        """Nothing to bind."""
        return 1

    def follow(self, *_: Any) -> None:
        """Do nothing: connections of a simulation are not looked at."""

    def mind_descriptors(self) -> None:
        """There are none."""

    def receive(self, limit: int) -> Iterator[tuple[bytes, Any, list[Any]]]:
        """Up to `limit` waiting messages: identity, command, parts behind it."""
        self.drained = False
        for _ in range(limit):
            if not self._inbox:
                self.drained = True
                return
            wire, parts = self._inbox.popleft()
            rest = [bytearray(part) for part in parts[1:]]  # the worker stamps in place
            self._tap.received(wire, parts[0], rest)
            yield wire.identity, parts[0], rest

    @staticmethod
    def room(size: int) -> Room:
        """Memory for a part."""
        return Room(size)

    def send(self, identity: bytes, parts: list[Any]) -> None:
        """Queue one message for a client. Raises PeerGone or WouldBlock; then nothing was sent."""
        wire = self.wires.get(identity)
        if wire is None:
            self._tap.refused(identity, parts, gone=True)
            raise PeerGone
        if wire.is_full:
            self._tap.refused(identity, parts, gone=False)
            raise WouldBlock
        message = [bytes(part) for part in parts]
        self._tap.sent(wire, message)
        wire.down(message)

    def close(self) -> None:
        """All connections end."""
        for wire in list(self.wires.values()):
            wire.cut()
        self._inbox.clear()


class LoopbackRing:
    """One direction between two processes."""

    record_bytes_max = RECORD_BYTES_MAX

    def __init__(self) -> None:
        self._records: deque[bytes] = deque()

    @property
    def readable(self) -> bool:
        """Whether a pop would give something."""
        return bool(self._records)

    def try_push(self, *parts: bytes | memoryview) -> bool:
        """Append one record; False when there is no room."""
        if len(self._records) >= RECORDS_MAX:
            return False
        self._records.append(b"".join(parts))
        return True

    def pop(self) -> bytes | None:
        """The oldest record, or None."""
        return self._records.popleft() if self._records else None


class LoopbackBell:
    """The doorbell of one process."""

    def __init__(self, ring: Callable[[], None], event_fd: int) -> None:
        self.ring = ring
        self._event_fd = event_fd

    def prepare_sleep(self) -> None:
        """Do nothing: no process sleeps."""

    def cancel_sleep(self) -> None:
        """Do nothing: no process sleeps."""

    def drain(self) -> None:
        """There are no signals."""

    def fileno(self) -> int:
        """A descriptor that no process sleeps on."""
        return self._event_fd
