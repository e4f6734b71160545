"""Brokers with history, numbered messages, and checks of what a store holds."""

from __future__ import annotations

import contextlib
import itertools
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from danube_fast.clock import SystemClock
from danube_fast.errors import DanubeError, ResourceExhausted
from danube_fast.history.manifest import ManifestLog, Record
from danube_fast.history.objects import verify_object
from danube_fast.history.stores.local import LocalStore
from danube_fast.testing.broker import Broker
from tests.workers.broker import is_running, wait_until

KIB, MIB = 1024, 1024 * 1024
TOPIC = "/default/flights"
NUMBERS = itertools.count()
NUMBER = struct.Struct("<Q")
WAIT_SECONDS = 60.0
LOG_BYTES_MAX = 24 * MIB
SMALL: dict[str, Any] = {
    "segment_bytes": MIB, "segment_start_bytes": 256 * KIB, "retention_seconds_min": 0,
    "wal_bytes_max": LOG_BYTES_MAX, "history_flush_seconds": 1, "history_object_bytes": 4 * MIB,
    "history_part_bytes": MIB,
}  # fmt: skip


def payloads(start: int, count: int, size: int = 1000) -> list[bytes]:
    """Numbered messages."""
    return [NUMBER.pack(number).ljust(size, b".") for number in range(start, start + count)]


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
    client: Any,
    start: int,
    end: int,
    topic: str = TOPIC,
    position: Any = "earliest",
    start_max: int = 0,
) -> None:
    """Read by a reader, and expect each number from `start` to `end` once, in order. `start_max`: up to which number
    deletion may have gone on meanwhile."""
    expected = start
    with client.reader(topic, start=position) as reader:
        while expected < end:
            batch = reader.receive_batch(1000, timeout=WAIT_SECONDS)
            assert len(batch), f"nothing came behind message {expected} of {end}"
            if expected == start:
                expected = NUMBER.unpack_from(batch.payloads()[0])[0]
                assert start <= expected <= max(start, start_max)
            for payload in batch.payloads()[
                : end - expected
            ]:  # what is behind `end` is not looked at
                assert NUMBER.unpack_from(payload)[0] == expected
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
        first = min((path for path in folder.iterdir() if path.name.isdigit()), default=None)
        if first is None:
            continue  # all of them are deleted just now
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
    total = 0
    for path in broker.data_dir.rglob("*.seg*"):
        with contextlib.suppress(FileNotFoundError):  # it is given back just now
            total += path.stat().st_size
    return total


def wait_for_trim(broker: Broker, client: Any, position: int) -> None:
    """Wait until the only log begins behind a position, and its readers need history for what was before. A log is
    trimmed while it grows: so another topic grows."""
    topic = f"/default/trim-{next(NUMBERS)}"
    client.admin.create_topic(topic)

    def is_trimmed() -> bool:
        names = [path.stem for path in broker.data_dir.rglob("*.seg")]
        if min(int(name) for name in names if name.isdigit()) > position:
            return True
        publish(client, 0, 500, topic)
        return False

    wait_until("the trim", is_trimmed)


def uploader_pid(client: Any) -> int:
    """Of the process that uploads; 0 while there is none."""
    status = client.admin.cluster_status()
    found = [each for each in status["processes"] if each["process"] == "uploader"]
    if found[0]["state"] != "ready":
        return 0
    pid = int(found[0]["pid"])
    # of one that was killed just now its state is still there
    return pid if is_running(pid) else 0


def read_until_error(client: Any, end: int) -> tuple[int, DanubeError]:
    """Read from the beginning, each number once and in order; where it ended, and why."""
    expected = 0
    numbered = payloads(0, end)
    try:
        with client.reader(TOPIC, start="earliest") as reader:
            while expected < end:
                batch = reader.receive_batch(1000, timeout=WAIT_SECONDS)
                assert len(batch), f"nothing came behind message {expected} of {end}"
                for payload in batch.payloads():
                    assert bytes(payload) == numbered[expected]
                    expected += 1
    except DanubeError as error:
        return expected, error
    raise AssertionError("all could be read")
