"""A disk that fails under single publishes over rings: whatever it does, what was acked stays.

Kernels write these to the log, queue their syncs and answer them; what goes wrong is left to the ordinary way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from danube_fast.errors import DeadlineExceeded, Internal, ResourceExhausted
from danube_fast.wal.durable_writes import Way
from tests.faults.rig import SEGMENTS, Background, Disk, FaultyServer, Word, read_all
from tests.faults.ring_rig import FLEETING, FSYNC, MEMORY, OS, RingLoad
from tests.workers.broker import wait_until

SETTINGS: dict[str, Any] = {"workers": 1, "segment_bytes": 4 << 20, "index_map_bytes": 1 << 20}
ACKS = 40
"""Between two faults, for each publisher."""
HEARTBEAT_TIMEOUT_MS = 3000
HANG_SECONDS = 1.2 * HEARTBEAT_TIMEOUT_MS / 1000
REFUSALS = (Internal, ResourceExhausted, DeadlineExceeded)


@pytest.fixture(autouse=True, params=[Way.DSYNC, Way.DIRECT])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    """How small groups are made durable."""
    chosen: Way = request.param
    monkeypatch.setenv("DANUBE_DURABLE_WRITES", chosen)
    return chosen


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def check_after_kill(server: FaultyServer, load: RingLoad, *topics: str, about: str) -> None:
    """What was acked is there, before and after SIGKILL of everything."""
    with server.client() as client:
        load.check(client, *topics, about=about)
    server.kill("all")
    server.start()
    with server.client() as client:
        load.check(client, *topics, about=f"{about}, after SIGKILL")
    load.stop_takers()


def check_errors(load: RingLoad, *topics: str) -> None:
    """Publishes ended with an ack, or with a refusal that can be acted on."""
    for publisher in load.of(*topics):
        wrong = [error for error in publisher.errors if not isinstance(error, REFUSALS)]
        assert not wrong, f"{publisher.topic}: {wrong[:3]}"


def test_syncs_fail_under_ring_publishes(tmp_path: Path, disk: Disk, stack: ExitStack) -> None:
    """At once, while kernels wait for the sync, and late, when the group was left to the ordinary way."""
    server = stack.enter_context(FaultyServer(tmp_path / "data", disk, **SETTINGS))
    load = RingLoad(server, stack)
    disk.choose(SEGMENTS)
    pid = server.pid_of(1)
    with load.running():
        for number, is_late in ((1, False), (2, True)):
            load.wait_acks(ACKS)
            if is_late:
                disk.hold_syncs()
                disk.wait_held()
                load.wait_acks(ACKS, OS, MEMORY, FLEETING)
                disk.release_syncs(failures=1)
            else:
                disk.fail_syncs(1)
            disk.wait_failed(number)
            load.wait_acks(ACKS)
    check_errors(load, FSYNC, OS)
    for publisher in load.of(MEMORY, FLEETING):
        assert not publisher.errors, "a failed sync reached a topic that needs no disk"
    assert server.pid_of(1) == pid, "the worker died of a failed sync"
    check_after_kill(server, load, FSYNC, OS, about="after failed syncs")


def test_a_publish_whose_sync_fails_is_not_acked(
    tmp_path: Path, disk: Disk, stack: ExitStack
) -> None:
    """Alone, so that the sync that fails is its own; later syncs fail too, so that no repair makes it good."""
    server = stack.enter_context(FaultyServer(tmp_path / "data", disk, **SETTINGS))
    client = stack.enter_context(server.client(transport="shm"))
    strict = client.producer(FSYNC, durability="fsync", timeout=0.5)
    kept = client.producer(MEMORY, durability="memory")
    for _ in range(ACKS):
        strict.publish(b"before")
    disk.choose(SEGMENTS)
    disk.fail_syncs(-1)
    for _ in range(2):
        with pytest.raises(REFUSALS):
            strict.publish(b"broken")
    assert disk[Word.SYNCS_FAILED]
    kept.publish(b"needs no disk")
    server.kill("all")
    disk.fail_syncs(0)
    server.start()
    assert strict.publish(b"after").offset >= ACKS
    payloads = [message.payload for message in read_all(client, FSYNC)]
    assert payloads[:ACKS] == [b"before"] * ACKS and payloads.count(b"after") == 1


def test_syncs_that_hang_hold_up_fsync_topics_alone(
    tmp_path: Path, disk: Disk, stack: ExitStack
) -> None:
    """Longer than the heartbeat's timeout: a worker that waited for the disk would be killed."""
    server = stack.enter_context(
        FaultyServer(tmp_path / "data", disk, heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS, **SETTINGS)
    )
    load = RingLoad(server, stack)
    disk.choose(SEGMENTS)
    pid = server.pid_of(1)
    with load.running():
        load.wait_acks(ACKS)
        disk.hold_syncs()
        disk.wait_held()
        held_ns = time.monotonic_ns()
        while time.monotonic_ns() < held_ns + HANG_SECONDS * 1e9:
            load.wait_acks(ACKS, OS, MEMORY, FLEETING)
        released_ns = time.monotonic_ns()
        disk.release_syncs()
        load.wait_acks(ACKS)
    assert (server.pid_of(1), server.status()["processes"][1]["restarts"]) == (pid, 0)
    for publisher in load.of(FSYNC):
        early = [
            call
            for call in publisher.calls
            if call.offset >= 0 and held_ns < call.began_ns and call.ended_ns < released_ns
        ]
        assert not early, f"{len(early)} messages were acked while no sync could end"
    for publisher in load.publishers:
        assert not publisher.errors, f"{publisher.topic}: {publisher.errors[:3]}"
    check_after_kill(server, load, FSYNC, OS, about="after a hang")


def test_a_disk_that_is_slow_for_a_while(tmp_path: Path, disk: Disk, stack: ExitStack) -> None:
    """Syncs around the time that kernels wait: groups go one way and the other in turns."""
    server = stack.enter_context(FaultyServer(tmp_path / "data", disk, **SETTINGS))
    load = RingLoad(server, stack)
    disk.choose(SEGMENTS)
    with load.running():
        for milliseconds in (1, 1.5, 2, 2.5, 4, 20, 0):
            disk.delay_syncs(milliseconds / 1000)
            began_ns = time.monotonic_ns()
            load.wait_acks(20)
            for publisher in load.of(FSYNC):
                quick = [
                    call
                    for call in publisher.calls
                    if call.began_ns > began_ns
                    and call.ended_ns - call.began_ns < milliseconds * 1e6
                ]
                assert not quick, f"{len(quick)} messages were acked before a sync could end"
    for publisher in load.publishers:
        assert not publisher.errors, f"{publisher.topic}: {publisher.errors[:3]}"
    check_after_kill(server, load, FSYNC, OS, about="of a slow disk")


ROUNDS = 45
LAGS_SECONDS = [number * 1e-4 for number in range(15)]


def test_a_slow_sync_with_an_os_group_behind_it(
    tmp_path: Path, disk: Disk, stack: ExitStack
) -> None:
    """No sync is queued for a group of `os` topics alone: nothing may wait for that, when all is quiet afterwards."""
    server = stack.enter_context(FaultyServer(tmp_path / "data", disk, **SETTINGS))
    clients = [stack.enter_context(server.client(transport="shm")) for _ in range(2)]
    strict = clients[0].producer(FSYNC, durability="fsync", timeout=5.0)
    loose = clients[1].producer(OS, durability="os", timeout=5.0)
    begun = threading.Barrier(2, timeout=60)

    def publish_late(stopping: threading.Event) -> None:
        for number in range(ROUNDS):
            begun.wait()
            stopping.wait(LAGS_SECONDS[number % len(LAGS_SECONDS)])
            loose.publish(b"os")

    for producer in (strict, loose):
        producer.publish(b"first")
    disk.choose(SEGMENTS)
    disk.delay_syncs(0.005)
    with Background(publish_late):
        for number in range(ROUNDS):
            begun.wait()
            try:
                strict.publish(b"fsync")
            except DeadlineExceeded:
                begun.abort()
                raise AssertionError(f"publish {number} waits for a sync in vain") from None


def test_writes_fail_under_ring_publishes(tmp_path: Path, disk: Disk, stack: ExitStack) -> None:
    """Nothing can be written for a while: what fails leaves its first half behind, or nothing."""
    server = stack.enter_context(FaultyServer(tmp_path / "data", disk, **SETTINGS))
    load = RingLoad(server, stack, timeout=0.5)
    pid = server.pid_of(1)
    with load.running():
        for torn in (True, False):
            load.wait_acks(ACKS)
            failed = {each: len(each.errors) for each in load.of(FSYNC, OS)}
            disk.fill(everything=True, torn=torn)
            load.wait_acks(ACKS, MEMORY, FLEETING)
            wait_until(
                "an error for all who need the disk",
                lambda f=failed: all(len(each.errors) > count for each, count in f.items()),
            )
            disk.empty()
            load.wait_acks(ACKS)
    check_errors(load, FSYNC, OS)
    for publisher in load.of(FSYNC, OS):
        assert any(isinstance(error, ResourceExhausted) for error in publisher.errors)
    for publisher in load.of(MEMORY, FLEETING):
        assert not publisher.errors, "a full disk reached a topic that needs none"
    assert disk[Word.WRITES_FAILED]
    assert server.pid_of(1) == pid, "the worker died of a full disk"
    check_after_kill(server, load, FSYNC, OS, about="after writes that failed")


def test_short_writes_under_ring_publishes(tmp_path: Path, disk: Disk, stack: ExitStack) -> None:
    """Every other write of the log stops within its first frame, without an error."""
    server = stack.enter_context(FaultyServer(tmp_path / "data", disk, **SETTINGS))
    load = RingLoad(server, stack)
    with load.running():
        load.wait_acks(ACKS)
        disk.shorten()
        load.wait_acks(ACKS)
        assert disk[Word.WRITES_SHORT] > ACKS // 2, "hardly a write was short"
        disk.empty()
        load.wait_acks(ACKS)
    for publisher in load.publishers:
        assert not publisher.errors, f"{publisher.topic}: {publisher.errors[:3]}"
    check_after_kill(server, load, FSYNC, OS, about="after short writes")


def test_no_room_for_new_segments_under_ring_publishes(
    tmp_path: Path, disk: Disk, stack: ExitStack
) -> None:
    """What has its room is written; then publishes are refused until there is room again."""
    server = stack.enter_context(
        FaultyServer(tmp_path / "data", disk, **{**SETTINGS, "segment_bytes": 1 << 20})
    )
    load = RingLoad(server, stack, {FSYNC: 3, OS: 3, FLEETING: 1}, timeout=0.5)
    with load.running():
        load.wait_acks(ACKS)
        disk.fill()
        wait_until(
            "a refusal for all who need the disk",
            lambda: all(each.errors for each in load.of(FSYNC, OS)),
        )
        load.wait_acks(ACKS, FLEETING)
        disk.empty()
        load.wait_acks(ACKS)
    check_errors(load, FSYNC, OS)
    for publisher in load.of(FSYNC, OS):
        assert any(isinstance(error, ResourceExhausted) for error in publisher.errors)
    check_after_kill(server, load, FSYNC, OS, about="after a full disk")
