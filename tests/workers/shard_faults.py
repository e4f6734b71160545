"""A disk that stands still, fails or is full, for a worker on a rig; and what tests of such days share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from danube_fast.errors import ResourceExhausted
from danube_fast.frame.bundle import sealed_bundle
from danube_fast.workers.process.mailbox import Request
from tests.workers.shard_rig import WAIT_SECONDS, RawClient, Rig

BIG = 300 * 1024
"""A group of this size does not wait for the sync before it."""


class HeldSyncs:
    """The disk of one log stands still until `release`, or fails at `fail`."""

    def __init__(self, rig: Rig, slot: int = 0) -> None:
        self.log = rig.worker.state.logs[slot]
        self.sync = self.log._appender._sync
        self.push = self.sync.push
        self.held: list[tuple[int, int]] = []
        self.quiet: list[bool] = []
        """Of each sync that was queued, whether its end wakes no one."""
        self.sync.push = self._hold  # type: ignore[method-assign]
        self.log.lend = lambda: None  # type: ignore[method-assign]

    def _hold(self, fd: int, position: int, *, quiet: bool = False) -> None:
        self.held.append((fd, position))
        self.quiet.append(quiet)

    def release_first(self) -> None:
        """One sync succeeds."""
        fd, position = self.held.pop(0)
        self.push(fd, position)
        wait(lambda: self.log.synced_position >= position, "a sync")

    def release(self) -> None:
        """The disk goes on as if nothing had been."""
        self.sync.push = self.push  # type: ignore[method-assign]
        del self.log.lend
        for fd, position in self.held:
            self.push(fd, position)

    def fail(self) -> None:
        """The oldest sync that waits fails; later ones are those of a sound disk."""
        read_end, write_end = os.pipe()  # fdatasync on a pipe fails with EINVAL
        self.sync.push = self.push  # type: ignore[method-assign]
        self.push(write_end, self.held[-1][1])
        wait(lambda: self.log.sync_fault, "a sync fault")
        os.close(read_end)
        os.close(write_end)


def wait(until: Callable[[], Any], what: str) -> None:
    """Wait for another thread; the worker's loop stands still."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not until():
        assert time.monotonic() < deadline, f"{what} did not happen within {WAIT_SECONDS} s"
        time.sleep(0.001)


def post_publish(client: RawClient, *frames: tuple[int, bytearray]) -> int:
    """Publish without waiting for the answer; its request number."""
    return client.post(11, parts=(sealed_bundle(list(frames)),))


def in_flight(rig: Rig, count: int, slot: int = 0) -> Callable[[], bool]:
    """Whether that many groups are between write and sync."""
    journal = rig.worker.state.journals[slot]
    return lambda: len(journal._in_flight) >= count


class Asked:
    """A call of the coordinator whose answer nobody waits for."""

    def __init__(self, message: Any) -> None:
        self.message = message

    def reply(self, value: Any = None) -> None:
        """Dropped."""

    def fail(self, error: Exception) -> None:
        """Dropped."""

    when_done, respond = Request.when_done, Request.respond


class FullLog:
    """No group fits the disk until `mend`."""

    def __init__(self, rig: Rig, slot: int = 0) -> None:
        self.log = rig.worker.state.logs[slot]
        self.log.reserve = self._refuse  # type: ignore[method-assign]
        self.log.append = self._refuse  # type: ignore[method-assign,assignment]
        self.log.lend = lambda: None  # type: ignore[method-assign]

    @staticmethod
    def _refuse(*args: Any, **kwargs: Any) -> int:
        raise ResourceExhausted("the disk is full; free some")

    def mend(self) -> None:
        """There is room again."""
        del self.log.reserve, self.log.append, self.log.lend


def settled(rig: Rig, slot: int = 0) -> None:
    """Everything that waits is written and durable."""
    rig.turn(lambda: not rig.worker.state.journals[slot].busy, "everything written")


def fill(client: RawClient, partition_id: int, count: int, size: int = 100_000) -> None:
    """Publish `count` messages of `size` bytes."""
    opened = client.open_producer(partition_id)
    for i in range(count):
        frame = client.frame(opened, i, [bytes([i % 256]) * size])
        assert client.publish((partition_id, frame)) == [0, i]
