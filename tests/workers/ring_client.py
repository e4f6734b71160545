"""A raw client whose connection is a pair of rings, and a clock that a test moves, for workers on a rig."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from typing import Any

import zmq

from danube_fast.ring.handover import dial, take
from tests.workers.shard_rig import RawClient, Rig

MESSAGE_BYTES_MAX = 1 << 30
_NUMBERS = itertools.count()


def fresh_endpoint() -> str:
    """An ipc endpoint that no other rig has."""
    return f"ipc://@danube-test-{os.getpid()}-{time.monotonic_ns()}-{next(_NUMBERS)}"


class Frozen:
    """A clock that stands still until it is moved."""

    def __init__(self, start_ns: int) -> None:
        self.now = start_ns

    def wall_ns(self) -> int:
        return self.now

    def monotonic_ns(self) -> int:
        return self.now


class RingSocket:
    """Rings that look like a DEALER socket; what finds no room waits here."""

    def __init__(self, rig: Rig) -> None:
        sock = dial(rig.ipc_endpoint)
        assert sock is not None, "the worker offers no rings"
        rig.worker.do_work()
        duplex = take(sock, MESSAGE_BYTES_MAX)
        assert duplex is not None, "the worker has not offered its rings within one turn"
        self.duplex = duplex
        self.waiting: deque[list[bytes]] = deque()

    def send_multipart(self, parts: list[Any]) -> None:
        self.waiting.append([bytes(part) for part in parts])
        self.flush()

    def flush(self) -> None:
        """Send what there is room for."""
        while self.waiting and self.duplex.send(self.waiting[0]):
            self.waiting.popleft()
        self.duplex.flush()

    @property
    def is_sent(self) -> bool:
        """Whether all of it is in the ring."""
        return not self.waiting and not self.duplex.slices

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        self.flush()
        parts = self.duplex.receive()
        if parts is None:
            raise zmq.Again
        return parts

    def close(self, linger: int = 0) -> None:
        self.duplex.close()


class RingClient(RawClient):
    """A connection with a session, over rings."""

    socket: RingSocket

    def _connect(self) -> Any:
        return RingSocket(self.rig)


def ring_client(rig: Rig) -> RingClient:
    """A client that ends with the rig."""
    client = RingClient(rig)
    rig.clients.append(client)
    return client
