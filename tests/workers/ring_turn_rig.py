"""What tests of the turn of kernels over rings share: what was served, and disks that kernels write to in bad luck."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from typing import Any

from danube_fast.wal.appender import Lent
from danube_fast.wal.sync import (
    _AT_ENTRIES,
    _AT_PLACE,
    _AT_POSITION,
    _AT_SIZE,
    _AT_VECTOR,
    _ENTRY_BYTES,
    SyncThread,
    _call_load,
    _call_store,
)
from danube_fast.workers.shard.publish.outlets import Outlets
from danube_fast.workers.shard.publish.ring_intake import RingIntake
from danube_fast.workers.shard.publish.turn_layout import OutletKind
from tests.workers.ring_client import RingClient, ring_client
from tests.workers.shard_faults import post_publish, wait
from tests.workers.shard_rig import Rig

PUBLISHED = 68
TRIES = 300
DELIVERED_TOO = 10


def intake_of(rig: Rig) -> RingIntake:
    """What takes plain publishes; call it before anything takes its place."""
    sleep: Any = rig.worker._idle._wait
    taking: RingIntake = sleep.__self__
    return taking


def outlets_of(rig: Rig) -> Outlets:
    """What makes outlets."""
    return intake_of(rig)._outlets


def watch_served(rig: Rig) -> Counter[int]:
    """Count the frames that kernels serve from now on, by `OutletKind`; those that they delivered too as `kind + DELIVERED_TOO`."""
    counts = Counter[int]()
    outlets = outlets_of(rig)
    show = outlets.show

    def count(slot: int, partition: Any, stored: Any, *, is_delivered: bool) -> None:
        kind = OutletKind.MEMORY
        if partition.logged:
            kind = OutletKind.FSYNC if partition.strict else OutletKind.OS
        counts[kind] += 1
        if is_delivered and outlets._open.get(slot) is not None:
            counts[kind + DELIVERED_TOO] += 1
        show(slot, partition, stored, is_delivered=is_delivered)

    outlets.show = count  # type: ignore[method-assign]
    return counts


class Publisher:
    """Publishes frames, numbered in their order, and keeps the answers."""

    def __init__(self, rig: Rig, partition: int, name: str = "p", client: Any = None) -> None:
        self.client: RingClient = client or ring_client(rig)
        self.rig, self.partition = rig, partition
        self.opened = self.client.open_producer(partition, name)
        self.sent = 0
        self.requests: list[int] = []
        self.answers: dict[int, list[int]] = {}
        self.posted: dict[int, bytes] = {}
        """The first message of each request."""

    def post(self, count: int = 1, *, messages: int = 1, size: int = 8, **columns: Any) -> None:
        """Send so many frames, or have them wait for room."""
        for _ in range(count):
            payloads = [payload(self.sent + i, size) for i in range(messages)]
            frame = self.client.frame(self.opened, self.sent, payloads, **columns)
            self.requests.append(post_publish(self.client, (self.partition, frame)))
            self.posted[self.requests[-1]] = payloads[0]
            self.sent += messages

    def hear(self) -> int:
        """Collect answers; how many there are."""
        self.client.pump()
        for command in self.client.waiting:
            if command[0] == PUBLISHED:
                mine = {entry[0]: entry[1] for entry in command[1] if entry[0] in self.requests}
                command[1][:] = [entry for entry in command[1] if entry[0] not in mine]
                self.answers |= mine
        self.client.waiting[:] = [
            command for command in self.client.waiting if command[0] != PUBLISHED or command[1]
        ]
        return len(self.answers)

    @property
    def outcomes(self) -> list[list[int]]:
        """Answers, in the order of what was posted."""
        return [self.answers[request] for request in self.requests]

    def finish(self) -> list[list[int]]:
        """Turn until all is answered; the answers."""
        self.rig.turn(lambda: self.hear() == len(self.requests), "answers to all publishes")
        return self.outcomes


def payload(number: int, size: int = 8) -> bytes:
    """Message of that number."""
    return b"%08d" % number + bytes(size - 8)


def expected(start: int, stop: int, size: int = 8) -> list[tuple[int, bytes]]:
    """Messages at offsets that are their numbers."""
    return [(at, payload(at, size)) for at in range(start, stop)]


def warmed(rig: Rig, *publishers: Publisher) -> Counter[int]:
    """Publish one message each until nothing is under way, so that kernels may serve the next ones."""
    for publisher in publishers:
        publisher.post()
        publisher.finish()
    rig.turn(lambda: not any(each.busy for each in rig.worker.state.journals.values()), "rest")
    return watch_served(rig)


def served_again(rig: Rig, served: Counter[int], publisher: Publisher, kind: int) -> None:
    """Publish until kernels have served a frame of that kind: a sync may be late now and then."""
    before = served[kind]
    for _ in range(TRIES):
        rig.turn(lambda: not rig.worker.state.journals[0].busy, "everything written")
        publisher.post(5)
        publisher.finish()
        if served[kind] > before:
            return
    raise AssertionError(f"kernels served no frame of kind {kind} in {TRIES} turns: {served}")


class FailingWrites:
    """Kernels are lent a descriptor that takes no writes, until `mend`; the sync thread gets none of their groups."""

    def __init__(self, rig: Rig) -> None:
        self.log = rig.worker.state.logs[0]
        self.fd = os.open(os.devnull, os.O_RDONLY)
        lend = self.log.lend
        self.lent = 0

        def lend_other() -> Lent | None:
            lent = lend()
            self.lent += lent is not None
            return None if lent is None else lent._replace(fd=self.fd, durable_bytes=0)

        self.log.lend = lend_other  # type: ignore[method-assign]

    def mend(self) -> None:
        """Kernels can write again."""
        del self.log.lend
        os.close(self.fd)


class HeldTurns:
    """Kernels write to the log, and the disk stands still for what they have written, until `release` or `fail`."""

    def __init__(self, rig: Rig) -> None:
        self.log = rig.worker.state.logs[0]
        self.sync = self.log._appender._sync
        self.queue = SyncThread(-1)
        _call_store(self.queue._synced_address, self.log.synced_position)
        lend = self.log.lend

        def lend_held() -> Lent | None:
            lent = lend()
            if lent is None:
                return None
            return lent._replace(syncs=self.queue.queue[0], sync_bell=self.queue.queue[1])

        self.log.lend = lend_held  # type: ignore[method-assign]

    @property
    def held(self) -> list[tuple[int, int]]:
        """Descriptor and position of what is queued."""
        return [(load(entry), load(entry + _AT_POSITION)) for entry in self._entries()]

    def _entries(self) -> range:
        start = self.queue._address + _AT_ENTRIES
        return range(start, start + _ENTRY_BYTES * self.queue.backlog, _ENTRY_BYTES)

    def _write_groups(self) -> None:
        """Write the groups that wait in the queue, as its thread would."""
        for entry in self._entries():
            size = load(entry + _AT_SIZE)
            if size:
                group = ctypes.string_at(load(entry + _AT_VECTOR), size)
                path = f"/proc/self/fd/{load(entry)}"
                with open(path, "r+b", buffering=0) as file:
                    os.pwrite(file.fileno(), group, load(entry + _AT_PLACE))

    def note_fault(self) -> None:
        """Kernels see that a sync has failed."""
        _call_store(self.queue._errno_address, 5)

    def release(self) -> None:
        """The disk goes on as if nothing had been."""
        del self.log.lend
        queued = self.log._appender._queued_position  # positions in the queue must not fall
        self._write_groups()
        for fd, position in self.held:
            self.sync.push(fd, max(position, queued))
        self.queue.stop()

    def fail(self) -> None:
        """What waits fails; later syncs are those of a sound disk."""
        read_end, write_end = os.pipe()  # fdatasync on a pipe fails with EINVAL
        del self.log.lend
        self.sync.push(write_end, self.held[-1][1])
        wait(lambda: self.log.sync_fault, "a sync fault")
        os.close(read_end)
        os.close(write_end)
        self.queue.stop()


class QuickDisk:
    """Kernels find all synced that they have written; the disk follows. Not for logs that are opened again."""

    def __init__(self, rig: Rig) -> None:
        self.log = rig.worker.state.logs[0]
        self.queue = SyncThread(-1)
        self.queue.start(1 << 60)
        self.lend, self.take_back = self.log.lend, self.log.take_back
        self.log.lend = self._lend  # type: ignore[method-assign]
        self.log.take_back = self._take_back  # type: ignore[method-assign]

    def _lend(self) -> Lent | None:
        lent = self.lend()
        if lent is None:
            return None
        return lent._replace(syncs=self.queue.queue[0], sync_bell=self.queue.queue[1])

    def _take_back(self, end: int, queued_end: int, *args: Any, is_torn: bool) -> None:
        self.take_back(end, queued_end, *args, is_torn=is_torn)
        if queued_end:
            self.log._appender._sync.push(self.log._appender._chain.segments[-1].open(), queued_end)

    def stop(self) -> None:
        """End its thread."""
        del self.log.lend, self.log.take_back
        self.queue.stop()


def load(address: int) -> int:
    """The word at an address."""
    return int(_call_load(address))


def numbers(client: RingClient, consumer: int = 1) -> list[int]:
    """Offsets that a consumer got, in their order."""
    client.pump()
    return [
        offset
        for number, view in client.delivered
        if number == consumer
        for offset in view.offsets().tolist()
    ]


class LateSyncs:
    """The sync thread sleeps on when kernels queue a sync, until `wake`."""

    def __init__(self, rig: Rig) -> None:
        self._log = rig.worker.state.logs[0]
        self._lend = self._log.lend
        self._bell = os.eventfd(0)
        self._log.lend = self._late  # type: ignore[method-assign]

    def _late(self) -> Any:
        lent = self._lend()
        return lent and lent._replace(sync_bell=self._bell)

    def wake(self) -> None:
        """Have it look at what is queued."""
        syncs = self._log.syncs
        assert isinstance(syncs, SyncThread)
        os.eventfd_write(syncs.queue[1], 1)

    def close(self) -> None:
        """Let kernels wake it again."""
        del self._log.lend
        os.close(self._bell)
