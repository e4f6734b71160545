"""Acks without durability: a disk whose fdatasync is slow, fails, or stands still."""

from __future__ import annotations

import statistics
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from danube_fast.errors import Internal, ResourceExhausted
from danube_fast.net.protocol import Error, Status
from tests.crash.payloads import ident_of, number_of
from tests.faults.rig import SEGMENTS, Disk, FaultyServer, RawProducer, Word, read_all
from tests.workers.broker import wait_until

FSYNC = "/default/strict"
OS = "/default/loose"
MEMORY = "/default/kept"
FLEETING = "/default/fleeting"
DELAY_SECONDS = 0.2


def check_topic(client: Any, topic: str, acked: dict[int, int], about: str) -> None:
    """A topic holds what was acked, each at its offset, once, and nothing else."""
    read = [(m.offset, number_of(ident_of(m.payload))) for m in read_all(client, topic)]
    assert read == sorted(acked.items()), f"{topic} {about}"


def seconds_of(answers: list[Any]) -> float:
    """Median time from sending to the answer."""
    assert {answer.status for answer in answers} == {Status.OK}
    return statistics.median((a.answered_ns - a.sent_ns) / 1e9 for a in answers)


def test_an_ack_takes_as_long_as_the_sync_it_promises(tmp_path: Path, disk: Disk) -> None:
    with (
        FaultyServer(tmp_path / "data", disk, workers=1) as server,
        RawProducer(server, FSYNC, 1, durability="fsync") as strict,
        RawProducer(server, OS, 2, durability="os") as loose,
    ):
        for producer in (strict, loose):
            producer.publish()
        disk.delay_syncs(DELAY_SECONDS)
        assert seconds_of([strict.publish() for _ in range(5)]) >= DELAY_SECONDS
        with server.client() as client:
            began = time.monotonic()
            client.publish(FSYNC, b"x")
            assert time.monotonic() - began >= DELAY_SECONDS
        disk.delay_syncs(0)
        disk.choose(SEGMENTS)
        disk.hold_syncs()
        strict.send()
        disk.wait_held()
        assert {loose.publish().status for _ in range(200)} == {Status.OK}, "os waits for a sync"
        assert strict.take(0.1) == 0, "acked without a sync"
        disk.release_syncs()
        strict.settle()


def test_a_failed_sync_takes_back_what_was_not_acked(tmp_path: Path, disk: Disk) -> None:
    server = FaultyServer(tmp_path / "data", disk, workers=1)
    with (
        server,
        RawProducer(server, FSYNC, 1, durability="fsync") as strict,
        RawProducer(server, OS, 2, durability="os") as loose,
    ):
        for producer in (strict, loose):
            for _ in range(10):
                assert producer.publish(5).status == Status.OK
        disk.choose(SEGMENTS)
        for _ in range(2):
            fail_one_sync(disk, strict, loose)
        with server.client() as client:
            for producer in (strict, loose):
                check_topic(client, producer.topic, producer.acked, "after failed syncs")
        server.kill("all")
        server.start()
        with server.client() as client:
            for producer in (strict, loose):
                check_topic(client, producer.topic, producer.acked, "after SIGKILL")
        with RawProducer(server, FSYNC, 1) as again:
            assert again.next_sequence == strict.next_sequence
            assert again.publish(5, sequence=again.next_sequence - 5).status == Status.DUPLICATE


def fail_one_sync(disk: Disk, strict: RawProducer, loose: RawProducer) -> None:
    """A sync stands still, much is published meanwhile, and then it fails."""
    disk.hold_syncs()
    sequence = strict.next_sequence
    first = strict.send(5)
    disk.wait_held()
    doomed = [first, *(strict.send(5) for _ in range(20))]
    for _ in range(40):
        assert loose.publish(5).status == Status.OK, "os waits for a sync"
    assert strict.take(0.1) == 0, "acked without a sync"
    failed = disk[Word.SYNCS_FAILED]
    disk.release_syncs(failures=1)
    disk.wait_failed(failed + 1)
    strict.settle()
    for answer in doomed:
        assert answer.status == Internal.code, answer.status
        assert "the disk failed to make this durable" in answer.text
        assert "send it again" in answer.text
    strict.next_sequence = sequence
    taken = strict.publish_until_taken(count=5)
    assert taken.offset == max(offset for offset in strict.acked if offset < taken.offset) + 1
    loose.publish_until_taken(count=5)


def fail_somehow(disk: Disk, strict: RawProducer, number: int) -> None:
    """One more sync fails, `number` in all: that of a publish or any other of the log."""
    disk.fail_syncs(1)
    while disk[Word.SYNCS_FAILED] < number:
        answer = strict.publish(sequence=strict.next_sequence)
        assert answer.status in (Status.OK, Internal.code, ResourceExhausted.code), answer.status
        strict.next_sequence += answer.status == Status.OK


def test_three_failed_syncs_stop_publishes_and_nothing_else(tmp_path: Path, disk: Disk) -> None:
    server = FaultyServer(tmp_path / "data", disk, workers=1)
    with (
        server,
        RawProducer(server, FSYNC, 1, durability="fsync") as strict,
        RawProducer(server, OS, 2, durability="os") as loose,
        RawProducer(server, MEMORY, 3, durability="memory") as kept,
        RawProducer(server, FLEETING, 4, dispatch="non_reliable") as fleeting,
        server.client() as client,
        client.consumer(FSYNC, subscription="s", initial_position="earliest") as consumer,
    ):
        producers = (strict, loose, kept, fleeting)
        for producer in producers:
            assert producer.publish(5).status == Status.OK
        disk.choose(SEGMENTS)
        for number in range(1, 4):
            fail_somehow(disk, strict, number)
        for producer in (strict, loose):
            refused = producer.publish(sequence=producer.next_sequence)
            assert refused.status == ResourceExhausted.code, refused.status
            assert "3 syncs failed within a minute" in refused.text
            assert "restart the broker" in refused.text
        for producer in (kept, fleeting):
            assert producer.publish().status == Status.OK, "refused, though it needs no disk"
        for producer in (strict, loose):
            check_topic(client, producer.topic, producer.acked, "of a log that refuses")
        # Five, and what was acked while another sync of the log took the failure.
        received = [consumer.receive(timeout=60) for _ in strict.acked]
        consumer.ack([message for message in received if message is not None])
        consumer.flush_acks()
        assert consumer.lag() == 0
        server.stop()
        server.start()
        for producer in (strict, loose):
            with RawProducer(server, producer.topic, producer.index) as again:
                assert again.next_sequence == producer.next_sequence
                again.publish_until_taken()
                check_topic(
                    client, producer.topic, {**producer.acked, **again.acked}, "after a restart"
                )
        assert consumer.lag() == 1


def test_syncs_that_fail_again_and_again_ack_nothing(tmp_path: Path, disk: Disk) -> None:
    """The disk stays broken: the repair fails too, and nothing is promised. SIGKILL finds what the
    kernel has: `os` messages whose sync failed are there."""
    server = FaultyServer(tmp_path / "data", disk, workers=1)
    with (
        server,
        RawProducer(server, FSYNC, 1, durability="fsync") as strict,
        RawProducer(server, OS, 2, durability="os") as loose,
    ):
        for producer in (strict, loose):
            assert producer.publish(5).status == Status.OK
        disk.fail_syncs(-1)
        before = dict(strict.acked)
        sequence = strict.next_sequence
        for _ in range(5):
            assert strict.publish(sequence=sequence).status in (
                Internal.code, ResourceExhausted.code,
            )  # fmt: skip
        assert strict.acked == before
        with server.client() as client:
            for producer in (strict, loose):
                check_topic(client, producer.topic, producer.acked, "of a broken disk")
        server.kill("all")
        disk.fail_syncs(0)
        server.start()
        with server.client() as client:
            for producer in (strict, loose):
                check_topic(client, producer.topic, producer.acked, "after SIGKILL")
        with RawProducer(server, FSYNC, 1) as again:
            assert again.next_sequence == sequence
            assert again.publish().status == Status.OK


BROKEN_SECONDS = 3.0


def readyz(server: FaultyServer) -> tuple[int, str]:
    """What /readyz answers."""
    assert server.broker is not None
    try:
        with urllib.request.urlopen(server.broker.ready["admin"] + "/readyz", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize("which", ["", SEGMENTS])
def test_a_disk_whose_syncs_all_fail_is_named_at_once(
    tmp_path: Path, disk: Disk, which: str
) -> None:
    server = FaultyServer(tmp_path / "data", disk, workers=1)
    with server, RawProducer(server, FSYNC, 1, durability="fsync") as strict:
        assert strict.publish().status == Status.OK
        assert readyz(server)[0] == 200
        if which:
            disk.choose(which)
        disk.fail_syncs(-1)
        began = time.monotonic()
        assert strict.publish(sequence=1).status in (Internal.code, ResourceExhausted.code)
        wait_until("the end of readiness", lambda: readyz(server)[0] == 503, 60)
        assert "not ready for writes" in readyz(server)[1]
        assert "worker-0" in readyz(server)[1]
        while time.monotonic() < began + BROKEN_SECONDS:
            refused = strict.open("another")
            assert isinstance(refused, Error), "opened, though nothing can be recorded"
            assert refused.code == Internal.code
            assert "Input/output error" in refused.text
            assert "check the disk" in refused.text
        with server.client() as client:
            for opening in (
                lambda: client.producer(FSYNC),
                lambda: client.consumer(FSYNC, subscription="s"),
            ):
                with pytest.raises(Internal, match="Input/output error"):
                    opening()
        assert server.broker is not None
        errors = [line for line in server.broker.error_text().splitlines() if "sync failed" in line]
        attempts = 2 + (time.monotonic() - began)  # the first sync, and one in each second begun
        assert len(errors) <= attempts, errors[-5:]


HEARTBEAT_TIMEOUT_MS = 5000
HANG_SECONDS = 1.2 * HEARTBEAT_TIMEOUT_MS / 1000
"""The disk hangs for longer: a worker that waits for it would be killed."""
FLOOD_BYTES = 1 << 20
FLOOD_FRAMES = 200
HELD_BYTES_MAX = 128 << 20
SMALL_FRAMES = 1500
"""More than the queue of syncs has places."""


def test_a_disk_that_hangs_holds_up_only_what_waits_for_it(tmp_path: Path, disk: Disk) -> None:
    server = FaultyServer(
        tmp_path / "data", disk, workers=1, heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
        segment_bytes=64 << 20, spare_segments=0,
    )  # fmt: skip
    with (
        server,
        RawProducer(server, FSYNC, 1, durability="fsync") as strict,
        RawProducer(server, OS, 2, durability="os") as loose,
        RawProducer(server, FLEETING, 4, dispatch="non_reliable") as fleeting,
        RawProducer(server, "/default/flood", 5, durability="fsync") as flood,
    ):
        producers = (strict, loose, fleeting)
        for producer in producers:
            assert producer.publish().status == Status.OK
        pid = server.pid_of(1)
        memory = server.rss_bytes()
        disk.choose(SEGMENTS)
        disk.hold_syncs()
        hung = time.monotonic()
        for _ in range(SMALL_FRAMES):
            strict.send()
            assert loose.publish().status == Status.OK
        for _ in range(FLOOD_FRAMES):
            flood.send(size=FLOOD_BYTES)
        flood.take(60)
        while not any(answer.text for answer in flood.answers):
            assert flood.take(60), "more and more is taken in"
        refused = next(answer for answer in flood.answers if answer.text)
        assert refused.status == ResourceExhausted.code
        assert "the disk does not keep up" in refused.text
        assert "wait for a sync" in refused.text
        quick = [fleeting.publish() for _ in range(100)]
        while time.monotonic() < hung + HANG_SECONDS:
            quick.append(fleeting.publish())
        assert {answer.status for answer in quick} == {Status.OK}
        assert server.rss_bytes() - memory < 2 * HELD_BYTES_MAX
        assert strict.take() == 0, "acked without a sync"
        disk.release_syncs()
        for producer in (strict, flood):
            producer.settle()
        assert {answer.status for answer in strict.answers} == {Status.OK}
        taken = [answer for answer in flood.answers if answer.status == Status.OK]
        assert 100 < len(taken) * FLOOD_BYTES / 1e6 < 1.2 * HELD_BYTES_MAX / 1e6
        flood.next_sequence = len(taken)
        flood.publish_until_taken()
        assert (server.pid_of(1), server.status()["processes"][1]["restarts"]) == (pid, 0)
        fail_and_hang(disk, strict, fleeting)
        assert (server.pid_of(1), server.status()["processes"][1]["restarts"]) == (pid, 0)
        with server.client() as client:
            for producer in (strict, loose):
                check_topic(client, producer.topic, producer.acked, "after the hang")


def fail_and_hang(disk: Disk, strict: RawProducer, fleeting: RawProducer) -> None:
    """A sync fails, and the next ones, which the repair needs, stand still."""
    failed = disk[Word.SYNCS_FAILED]
    disk.fail_syncs(1)
    disk.hold_syncs()
    hung = time.monotonic()
    assert strict.publish(sequence=strict.next_sequence).status == Internal.code
    disk.wait_failed(failed + 1)
    assert fleeting.publish().status == Status.OK
    while time.monotonic() < hung + HANG_SECONDS:
        refused = strict.publish(sequence=strict.next_sequence)
        assert refused.status == ResourceExhausted.code
        assert "is being repaired" in refused.text, refused.text
        assert fleeting.publish().status == Status.OK
    disk.release_syncs()
    strict.publish_until_taken()
