"""A full disk: publishes are refused, nothing is lost, consumers go on, and it heals by itself."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.errors import ResourceExhausted, Unavailable
from danube_fast.net.protocol import Status
from tests.crash.payloads import ident_of, number_of
from tests.crash.rig import Server
from tests.faults.rig import (
    Disk,
    FaultyServer,
    RawProducer,
    Word,
    fill_up,
    mount_small,
    read_all,
)
from tests.workers.broker import wait_until

FSYNC = "/default/strict"
OS = "/default/loose"
FLEETING = "/default/fleeting"
BATCH = 200
"""Messages of a frame: some 20 KB."""
FRAMES_MAX = 400
"""Far more than what fits the segments that are there."""
TMPFS_BYTES = 24 << 20
SETTINGS: dict[str, Any] = {"workers": 1, "segment_bytes": 1 << 20, "index_map_bytes": 1 << 20}


class Crowd:
    """Producers of three kinds, and a consumer that is behind."""

    def __init__(self, server: Server, stack: contextlib.ExitStack) -> None:
        self.server = server
        options: list[dict[str, Any]] = [
            {"durability": "fsync"}, {"durability": "os"}, {"dispatch": "non_reliable"},
        ]  # fmt: skip
        topics = (FSYNC, OS, FLEETING)
        self.strict, self.loose, self.fleeting = (
            stack.enter_context(RawProducer(server, topic, index, **create))
            for index, (topic, create) in enumerate(zip(topics, options, strict=True), 1)
        )
        self.logged = (self.strict, self.loose)
        for producer in (*self.logged, self.fleeting):
            assert producer.publish(BATCH).status == Status.OK
        self.client = stack.enter_context(server.client())
        self.consumer = stack.enter_context(
            self.client.consumer(FSYNC, subscription="s", initial_position="earliest")
        )
        self.pids = [entry["pid"] for entry in server.status()["processes"]]

    def publish_until_full(self, match: str) -> None:
        """Until the broker refuses both topics, with a reason that can be acted on."""
        for producer in self.logged:
            for _ in range(FRAMES_MAX):
                answer = producer.publish(BATCH)
                if answer.status != Status.OK:
                    break
            assert answer.status == ResourceExhausted.code, answer.status
            assert match in answer.text, answer.text
            producer.next_sequence = answer.sequence

    def consume(self, *, durably: bool) -> None:
        """A batch is received, acked, and with `durably` that is on disk."""
        batch = self.consumer.receive_batch(10, timeout=60)
        assert len(batch) == 10
        self.consumer.ack(batch)
        if durably:
            with contextlib.suppress(Unavailable):  # acks before these were answered with an error
                self.consumer.flush_acks()
            self.consumer.flush_acks()

    def check(self, about: str) -> None:
        """All that was acked is there, once, at its offset; no process died."""
        for producer in self.logged:
            messages = read_all(self.client, producer.topic)
            read = [(m.offset, number_of(ident_of(m.payload))) for m in messages]
            assert read == sorted(producer.acked.items()), f"{producer.topic} {about}"

    def check_alive(self) -> None:
        """Nobody died."""
        assert [entry["pid"] for entry in self.server.status()["processes"]] == self.pids

    def go_on(self) -> None:
        """There is room again: everything is taken without a restart."""
        for producer in self.logged:
            producer.publish_until_taken(count=BATCH)
            for _ in range(10):
                assert producer.publish(BATCH).status == Status.OK
        self.consume(durably=True)

    def die_and_return(self, acked: int) -> None:
        """SIGKILL of everything, and what was acked is still so."""
        self.server.kill("all")
        self.server.start()
        self.check("after SIGKILL")
        lag = len(self.strict.acked) - acked
        wait_until("the lag", lambda: self.consumer.lag() == lag)


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as opened:
        yield opened


def test_a_disk_without_room_for_new_segments(
    tmp_path: Path, disk: Disk, stack: contextlib.ExitStack
) -> None:
    """Cursors and acks have the reserve while publishes are refused."""
    server = stack.enter_context(FaultyServer(tmp_path / "data", disk, **SETTINGS))
    crowd = Crowd(server, stack)
    reserve = tmp_path / "data" / "logs" / "0000" / "reserve.seg"
    wait_until("the reserve", reserve.exists)
    disk.fill()
    crowd.publish_until_full("no new log segment can be made")
    assert disk[Word.WRITES_FAILED]
    for _ in range(5):
        crowd.consume(durably=True)
    assert crowd.fleeting.publish().status == Status.OK
    crowd.check("on a full disk")
    crowd.check_alive()
    disk.empty()
    crowd.go_on()
    crowd.check_alive()
    wait_until("a new reserve", reserve.exists)
    crowd.die_and_return(60)


def test_a_disk_that_can_write_nothing(
    tmp_path: Path, disk: Disk, stack: contextlib.ExitStack
) -> None:
    """As file systems that copy on write are when they are full: the reserve is of no use either.
    Messages are read, acks wait in memory. Writes that fail leave their first half behind, or nothing."""
    server = stack.enter_context(FaultyServer(tmp_path / "data", disk, **SETTINGS))
    crowd = Crowd(server, stack)
    for torn in (True, False):
        disk.fill(everything=True, torn=torn)
        crowd.publish_until_full("free space on its disk")
        crowd.consume(durably=False)
        assert crowd.fleeting.publish().status == Status.OK
        crowd.check("of a disk that cannot be written")
        disk.empty()
        crowd.go_on()
    crowd.check_alive()
    crowd.die_and_return(40)


class SmallDisk:
    """A file system of its own, if this user may mount one; else files that may not grow."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self.folder.mkdir()
        self._ballast = folder / "ballast"
        self._pids: list[int] = []
        mount_small(folder, TMPFS_BYTES, stack)

    def fill(self, pids: list[int]) -> None:
        """No room for another segment."""
        if not os.path.ismount(self.folder):
            self._pids = pids
            self._limit(SETTINGS["segment_bytes"] - 1)
            return
        fill_up(self._ballast)

    def empty(self) -> None:
        """Room again."""
        self._limit(resource.RLIM_INFINITY)
        self._ballast.unlink(missing_ok=True)

    def _limit(self, byte_count: int) -> None:
        for pid in self._pids:
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (byte_count, hard))


def test_a_file_system_that_is_full(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    """The real thing: blocks run out below the log, the index and the metadata."""
    small_disk = SmallDisk(tmp_path / "small", stack)
    server = stack.enter_context(Server(small_disk.folder / "data", **SETTINGS))
    crowd = Crowd(server, stack)
    log = small_disk.folder / "data" / "logs" / "0000"
    wait_until("the reserve", (log / "reserve.seg").exists)
    small_disk.fill(crowd.pids)
    crowd.publish_until_full("no new log segment can be made")
    for _ in range(5):
        crowd.consume(durably=True)
    crowd.check("on a full file system")
    crowd.check_alive()
    small_disk.empty()
    crowd.go_on()
    crowd.check_alive()
    crowd.die_and_return(60)
