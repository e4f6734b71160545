"""Topics that are larger than the log: uploaded to a store, trimmed, and read across the seam, on real processes."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.clock import SystemClock
from danube_fast.errors import (
    DanubeError,
    DeadlineExceeded,
    FailedPrecondition,
    ResourceExhausted,
    Unavailable,
)
from danube_fast.history.holds import held_keys, make_hold, release_hold, renew_hold
from danube_fast.history.manifest import ManifestLog, Record
from danube_fast.history.objects import verify_object
from danube_fast.history.stores.local import LocalStore
from danube_fast.testing.broker import Broker
from tests.workers.broker import wait_until

KIB, MIB = 1024, 1024 * 1024
TOPIC = "/default/flights"
_NUMBER = struct.Struct("<Q")
WAIT_SECONDS = 60.0
LOG_BYTES_MAX = 24 * MIB
SMALL: dict[str, Any] = {
    "segment_bytes": MIB, "segment_start_bytes": 256 * KIB, "retention_seconds_min": 0,
    "wal_bytes_max": LOG_BYTES_MAX, "history_flush_seconds": 1, "history_object_bytes": 4 * MIB,
    "history_part_bytes": MIB,
}  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A folder that is to be the store."""
    return tmp_path / "store"


@pytest.fixture
def broker(store: Path) -> Iterator[Broker]:
    """A broker with that store."""
    with Broker(workers=2, store=f"file://{store}", **SMALL) as running:
        yield running


def payloads(start: int, count: int, size: int = 1000) -> list[bytes]:
    """Numbered messages."""
    return [_NUMBER.pack(number).ljust(size, b".") for number in range(start, start + count)]


def publish(client: Any, start: int, count: int, topic: str = TOPIC) -> None:
    """Publish numbered messages, and wait for their acks; begin anew where too much waits for the store."""
    deadline = time.monotonic() + WAIT_SECONDS
    at, end = start, start + count
    while at < end:
        producer = client.producer(topic)
        try:
            while at < end:
                some = min(500, end - at)
                producer.send_many(payloads(at, some))
                producer.flush(timeout=WAIT_SECONDS)
                at += some
        except ResourceExhausted as error:
            if "wait for the object store" not in str(error):
                raise
            assert time.monotonic() < deadline, "the store did not catch up"
            time.sleep(0.05)
        finally:
            with contextlib.suppress(ResourceExhausted):
                producer.close()


def read_all(
    client: Any, start: int, end: int, topic: str = TOPIC, position: Any = "earliest"
) -> None:
    """Read by a reader, and expect each number from `start` to `end` once, in order."""
    expected = start
    with client.reader(topic, start=position) as reader:
        while expected < end:
            batch = reader.receive_batch(1000, timeout=WAIT_SECONDS)
            assert len(batch), f"nothing came behind message {expected} of {end}"
            for payload in batch.payloads():
                assert _NUMBER.unpack_from(payload)[0] == expected
                expected += 1


def keep_for_ever(client: Any, topic: str = TOPIC, **values: Any) -> None:
    """Create a topic that stays."""
    client.admin.create_topic(topic)
    client.admin.set_topic_policy(topic, {"retention_policy": "forever", **values})


def worker_of(client: Any) -> int:
    """Number of the worker that has the topic."""
    return int(client.admin.describe_topic(TOPIC)["placement"][0]["worker"])


def first_offset(client: Any) -> int:
    """First message that may be read."""
    with client.reader(TOPIC) as reader:
        return int(reader.receive_batch(1, timeout=WAIT_SECONDS).offsets[0])


def manifests(store: Path) -> dict[int, ManifestLog]:
    """All manifests of a store, by partition id."""
    opened = LocalStore(store, SystemClock())
    found = {}
    for folder in sorted((store / "manifests").iterdir()):
        first = min(path for path in folder.iterdir() if path.name.isdigit())
        record = Record.decode(first.read_bytes(), str(first))
        log = ManifestLog(opened, record.identity, record.partition_id, 1 << 30)
        log.load()
        found[record.partition_id] = log
    return found


def verify(store: Path) -> int:
    """Check every byte that the manifests name, and that no offset is in two places; messages in all."""
    opened = LocalStore(store, SystemClock())
    total = 0
    for log in manifests(store).values():
        at = 0
        for section in log.manifest.sections:
            assert section.base_offset >= at
            at = section.end_offset
            verify_object(opened, section.key, log._identity)
            total += section.message_count
        assert at <= log.manifest.end_offset
    return total


def uploaded(store: Path, messages: int) -> Callable[[], bool]:
    """Whether the manifests name so many messages."""

    def are() -> bool:
        if not (store / "manifests").exists():
            return False
        logs = manifests(store).values()
        return sum(s.message_count for log in logs for s in log.manifest.sections) >= messages

    return are


def nothing_waits(client: Any) -> bool:
    """Whether the workers know that all is uploaded."""
    return int(client.admin.cluster_status()["counters"]["history_lag_bytes"]) == 0


def log_bytes(broker: Broker) -> int:
    """Bytes of all segments."""
    return sum(path.stat().st_size for path in broker.data_dir.rglob("*.seg*"))


def test_a_topic_is_larger_than_its_log(broker: Broker, store: Path) -> None:
    """Three times as much as all logs may hold is published, kept for ever, and read back."""
    with broker.client() as client:
        keep_for_ever(client)
        total = 3 * LOG_BYTES_MAX // 1000
        publish(client, 0, total)
        assert log_bytes(broker) <= LOG_BYTES_MAX + 2 * SMALL["segment_bytes"]
        wait_until("the upload", uploaded(store, total))
        wait_until("the trim", lambda: log_bytes(broker) < LOG_BYTES_MAX // 2)
        read_all(client, 0, total)
        read_all(client, total // 2, total, position=total // 2)
        assert first_offset(client) == 0
    assert verify(store) == total


def test_a_consumer_passes_the_seam_while_all_goes_on(broker: Broker, store: Path) -> None:
    """One from the beginning catches up with a producer: each message once, in order."""
    with broker.client() as client:
        keep_for_ever(client)
        publish(client, 0, 20_000)
        wait_until("the upload", uploaded(store, 20_000))
        stopped = threading.Event()
        sent = 20_000

        def go_on() -> None:
            nonlocal sent
            with broker.client() as other:
                while not stopped.is_set():
                    publish(other, sent, 1000)
                    sent += 1000

        thread = threading.Thread(target=go_on)
        thread.start()
        try:
            expected = 0
            with client.consumer(
                TOPIC, subscription="s", type="exclusive", initial_position="earliest"
            ) as consumer:
                while expected < 60_000:
                    batch = consumer.receive_batch(1000, timeout=WAIT_SECONDS)
                    assert len(batch), f"nothing came behind message {expected}"
                    for payload in batch.payloads():
                        assert _NUMBER.unpack_from(payload)[0] == expected
                        expected += 1
                    consumer.ack(batch)
        finally:
            stopped.set()
            thread.join(WAIT_SECONDS)
    verify(store)


def test_history_outlives_restarts(broker: Broker, store: Path) -> None:
    """Stopped in order and killed: what was uploaded is read, and the upload goes on behind it."""
    with broker.client() as client:
        keep_for_ever(client)
        publish(client, 0, 10_000)
        wait_until("the upload", uploaded(store, 10_000))
    broker.restart()
    with broker.client() as client:
        read_all(client, 0, 10_000)
        publish(client, 10_000, 10_000)
        wait_until("the upload", uploaded(store, 20_000))
    broker.kill()
    broker.start()
    with broker.client() as client:
        read_all(client, 0, 20_000)
        assert first_offset(client) == 0
    assert verify(store) == 20_000


def uploader_pid(client: Any) -> int:
    """Of the process that uploads; 0 while there is none."""
    status = client.admin.cluster_status()
    found = [each for each in status["processes"] if each["process"] == "uploader"]
    return int(found[0]["pid"]) if found[0]["state"] == "ready" else 0


def test_the_uploader_is_killed_again_and_again(broker: Broker, store: Path) -> None:
    """Manifests are consistent at every instant, and nothing is uploaded twice or left out."""
    with broker.client() as client:
        keep_for_ever(client)
        for kill in range(8):
            publish(client, kill * 4000, 4000)
            pid = 0

            def found() -> bool:
                nonlocal pid
                pid = uploader_pid(client)
                return pid > 0

            wait_until("the uploader", found)
            os.kill(pid, signal.SIGKILL)
            if (store / "manifests").exists():
                verify(store)
        wait_until("the upload", uploaded(store, 32_000))
        read_all(client, 0, 32_000)
    assert verify(store) == 32_000


def test_a_worker_is_killed_while_its_history_is_read(broker: Broker, store: Path) -> None:
    with broker.client() as client:
        keep_for_ever(client)
        publish(client, 0, 20_000)
        wait_until("the upload", uploaded(store, 20_000))
        with client.consumer(
            TOPIC,
            subscription="s",
            type="exclusive",
            initial_position="earliest",
            permits_bytes=256 * KIB,
        ) as consumer:
            seen: set[int] = set()
            killed = False
            while len(seen) < 20_000:
                batch = consumer.receive_batch(500, timeout=WAIT_SECONDS)
                assert len(batch), f"nothing came after {len(seen)} messages"
                seen |= {_NUMBER.unpack_from(payload)[0] for payload in batch.payloads()}
                consumer.ack(batch)
                if not killed and len(seen) > 5000:
                    killed = True
                    broker.kill_worker(worker_of(client))
        assert seen == set(range(20_000))


def test_a_broker_with_history_does_not_start_without_its_store(tmp_path: Path) -> None:
    settings = {"workers": 1, "data_dir": tmp_path / "data", **SMALL}
    store = tmp_path / "store"
    with Broker(store=f"file://{store}", **settings) as broker, broker.client() as client:
        keep_for_ever(client)
        publish(client, 0, 5000)
        wait_until("the upload", uploaded(store, 5000))
        wait_until("the frontier", lambda: nothing_waits(client))
    with pytest.raises(DanubeError, match="started without"):
        Broker(**settings).stop()


def test_moves_take_history_along(broker: Broker, store: Path) -> None:
    """A partition moves with what is in the log only; history is read on from its new worker."""
    with broker.client() as client:
        keep_for_ever(client)
        publish(client, 0, 10_000)
        wait_until("the upload", uploaded(store, 10_000))
        for move in range(3):
            worker = worker_of(client)
            client.admin.move_topic(TOPIC, 1 - worker)
            publish(client, 10_000 + 1000 * move, 1000)
            read_all(client, 0, 11_000 + 1000 * move)
        wait_until("the upload", uploaded(store, 13_000))
        read_all(client, 0, 13_000)
        assert first_offset(client) == 0
    assert verify(store) == 13_000


def test_a_purge_takes_history_away(broker: Broker, store: Path) -> None:
    with broker.client() as client:
        keep_for_ever(client)
        publish(client, 0, 10_000)
        wait_until("the upload", uploaded(store, 10_000))
        client.admin.purge_topic(TOPIC)
        publish(client, 10_000, 1000)
        read_all(client, 10_000, 11_000)
        wait_until("the upload", uploaded(store, 1000))


def test_a_policy_without_history_gives_it_up(broker: Broker, store: Path) -> None:
    """A topic that is kept until it is acked again begins with what the log has."""
    with broker.client() as client:
        keep_for_ever(client)
        publish(client, 0, 20_000)
        wait_until("the upload", uploaded(store, 20_000))
        wait_until("the trim", lambda: log_bytes(broker) < LOG_BYTES_MAX // 2)
        client.admin.set_topic_policy(TOPIC, {"retention_policy": None})
        first = first_offset(client)
        assert 0 < first <= 20_000
        read_all(client, first, 20_000)


def test_topics_without_history_go_on_while_the_store_is_away(tmp_path: Path) -> None:
    """The broker is ready without its store; it names the store, and uploads when it is there."""
    missing = tmp_path / "later" / "store"
    with Broker(workers=1, store=f"file://{missing}", **SMALL) as broker, broker.client() as client:
        keep_for_ever(client)
        publish(client, 0, 1000)
        client.admin.create_topic("/default/other")
        publish(client, 0, 1000, "/default/other")
        wait_until("the reason in the log", lambda: str(missing) in broker.log)
        missing.parent.mkdir()
        wait_until("the upload", uploaded(missing, 1000))


def test_wrong_store_urls_are_told(tmp_path: Path) -> None:
    with pytest.raises(DanubeError, match="nonsense://"):
        Broker(store="nonsense://bucket").stop()


def objects(store: Path) -> set[str]:
    """Names of the objects in the store."""
    return {
        str(path.relative_to(store)) for path in (store / "objects").rglob("*") if path.is_file()
    }


@pytest.fixture
def sweeping(store: Path) -> Iterator[Broker]:
    """A broker that deletes quickly."""
    settings = {**SMALL, "history_delete_seconds": 2}
    with Broker(workers=2, store=f"file://{store}", **settings) as running:
        yield running


def test_old_messages_leave_the_store(sweeping: Broker, store: Path) -> None:
    """`retention_bytes` counts log and history once; what is over goes by whole objects, then from the store."""
    with sweeping.client() as client:
        client.admin.create_topic(TOPIC)
        values = {"retention_policy": "until_expired", "retention_bytes": 10 * MIB}
        client.admin.set_topic_policy(TOPIC, values)
        publish(client, 0, 30_000)
        wait_until("the upload", uploaded(store, 1))

        def is_bounded() -> bool:
            logs = manifests(store).values()
            kept = sum(s.byte_count for log in logs for s in log.manifest.sections)
            return len(objects(store)) <= 5 and kept <= 15 * MIB and nothing_waits(client)

        wait_until("the deletion", is_bounded)
        first = first_offset(client)
        assert 10_000 < first < 22_000
        read_all(client, first, 30_000)
    verify(store)


def test_a_deleted_topic_leaves_the_store(sweeping: Broker, store: Path) -> None:
    """Its own objects go, and those that it shares are written again without it."""
    other = "/default/other"
    with sweeping.client() as client:
        keep_for_ever(client)
        keep_for_ever(client, other)
        publish(client, 0, 1000)
        publish(client, 0, 1000, other)
        wait_until("the upload", uploaded(store, 2000))
        before = objects(store)
        client.admin.delete_topic(TOPIC)

        def is_gone() -> bool:
            return (len(manifests(store)) == 1 and not before & objects(store)) or len(before) > 1

        wait_until("the deletion", is_gone)
        wait_until("the records", lambda: len(manifests(store)) == 1)
        read_all(client, 0, 1000, other)
        assert verify(store) == 1000


def test_orphans_are_swept_and_held_objects_stay(sweeping: Broker, store: Path) -> None:
    """An object that no manifest names goes, unless a reader outside has a hold on it."""
    with sweeping.client() as client:
        keep_for_ever(client)
        publish(client, 0, 1000)
        wait_until("the upload", uploaded(store, 1000))
        named = objects(store)
        opened, clock = LocalStore(store, SystemClock()), SystemClock()
        orphan, held = "objects/00000000/000000000001", "objects/00000000/000000000002"
        opened.create(orphan, b"left behind")
        opened.create(held, b"read by others")
        hold = make_hold(opened, [held], 3600, clock.wall_ns())
        wait_until("the deletion", lambda: objects(store) == named | {held})
        release_hold(opened, renew_hold(opened, hold, 7200, clock.wall_ns()))
        wait_until("the deletion", lambda: objects(store) == named)
        read_all(client, 0, 1000)


def test_a_time_leads_into_history(broker: Broker, store: Path) -> None:
    """A reader and a seek by time begin at the first message from then on, wherever that is."""
    with broker.client() as client:
        client.admin.create_topic(TOPIC)
        values = {"retention_policy": "until_expired", "retention_seconds": 3600}
        client.admin.set_topic_policy(TOPIC, values)
        publish(client, 0, 8000)
        between = dt.datetime.now(dt.UTC)
        publish(client, 8000, 12_000)
        wait_until("the upload", uploaded(store, 20_000))
        wait_until("the trim", lambda: log_bytes(broker) < LOG_BYTES_MAX // 2)
        read_all(client, 8000, 20_000, position=between)
        read_all(client, 0, 20_000, position="-30m")
        with client.consumer(
            TOPIC, subscription="s", type="exclusive", initial_position="latest"
        ) as consumer:
            consumer.seek(between)
            first = consumer.receive_batch(1, timeout=WAIT_SECONDS)
            assert first.offsets.tolist() == [8000]
            consumer.seek(dt.datetime.now(dt.UTC))
            publish(client, 20_000, 1)
            last = consumer.receive_batch(1, timeout=WAIT_SECONDS)
            assert last.offsets.tolist() == [20_000]
        assert first_offset(client) == 0  # nothing is an hour old


def test_a_flush_uploads_at_once(store: Path) -> None:
    """All up to now is in the store when it returns, and held for a reader that has nothing else."""
    settings = {**SMALL, "history_flush_seconds": 3600, "history_delete_seconds": 2}
    with (
        Broker(workers=2, store=f"file://{store}", **settings) as broker,
        broker.client() as client,
    ):
        client.admin.create_topic(TOPIC, partitions=3)
        client.admin.set_topic_policy(TOPIC, {"retention_policy": "forever"})
        publish(client, 0, 3000)
        flushed = client.admin.flush_history(TOPIC, hold_seconds=600)
        assert flushed["store"] == f"file://{store}"
        assert sum(each["end_offset"] for each in flushed["partitions"]) == 3000
        assert verify(store) == 3000
        opened = LocalStore(store, SystemClock())
        assert held_keys(opened, SystemClock().wall_ns()) == objects(store)
        again = client.admin.flush_history(TOPIC)
        assert again["partitions"] == flushed["partitions"] and not again["hold"]
        client.admin.create_topic("/default/acked")
        with pytest.raises(FailedPrecondition, match="has no history"):
            client.admin.flush_history("/default/acked")
        status = client.admin.cluster_status()["history"]
        assert status["store"] == f"file://{store}" and not status["fault"]


def test_the_status_tells_why_nothing_is_uploaded(tmp_path: Path) -> None:
    missing = tmp_path / "later" / "store"
    with Broker(workers=1, store=f"file://{missing}", **SMALL) as broker, broker.client() as client:
        keep_for_ever(client)
        publish(client, 0, 1000)
        wait_until(
            "the reason", lambda: str(missing) in client.admin.cluster_status()["history"]["fault"]
        )
        with pytest.raises(Unavailable, match=str(missing)):
            client.admin.flush_history(TOPIC)
        missing.parent.mkdir()
        wait_until("the upload", uploaded(missing, 1000))
        wait_until("all is well", lambda: not client.admin.cluster_status()["history"]["fault"])


def fill(client: Any) -> int:
    """Publish until the broker refuses, as too much waits for the store; how many messages were accepted."""
    sent = 0
    while True:
        producer = client.producer(TOPIC, timeout=2)
        try:
            producer.send_many(payloads(sent, 500))
            producer.flush()
        except (ResourceExhausted, DeadlineExceeded) as error:
            told = str(error)
            break
        finally:
            with contextlib.suppress(DanubeError):
                producer.close(timeout=0)
        sent += 500
    assert "/later/store" in told
    assert "history_backlog_bytes_max" in told
    assert "make the folder or correct the store's URL" in told, told
    return sent


def test_others_go_on_while_the_store_is_away(tmp_path: Path) -> None:
    """A topic with history is refused, and names the store; one without writes three times what the logs may hold,
    and they stay within that and a segment. All drains by itself when the store is there."""
    missing = tmp_path / "later" / "store"
    other = "/default/acked"
    with Broker(workers=1, store=f"file://{missing}", **SMALL) as broker, broker.client() as client:
        keep_for_ever(client)
        client.admin.create_topic(other)
        sent = fill(client)
        with client.consumer(other, subscription="s", type="exclusive") as consumer:
            for start in range(0, 3 * LOG_BYTES_MAX // 1000, 2000):
                publish(client, start, 2000, other)
                seen = 0
                while seen < 2000:
                    batch = consumer.receive_batch(2000, timeout=WAIT_SECONDS)
                    assert len(batch), f"nothing came behind message {start + seen}"
                    consumer.ack(batch)
                    seen += len(batch)
                # a burst is two segments: what is over goes when the log is looked at next
                wait_until("the trim", lambda: log_bytes(broker) <= LOG_BYTES_MAX + MIB)
        missing.parent.mkdir()
        wait_until("the upload", uploaded(missing, sent))
        publish(client, sent, 1000)
        read_all(client, 0, sent + 1000)
