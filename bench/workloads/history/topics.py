"""Topics with history, as these workloads need them: filled, uploaded, trimmed, and compared in the store.

publish       prepared messages, by lists, until all are acked
upload        until manifests name them all
trim          until the log is as small as it gets
compare       every byte of every message in the store, in order
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from danube_fast.bench.load.payloads import Payloads
from danube_fast.bench.load.processes import HEAR_SECONDS, Broker, Crew, Member
from danube_fast.bench.load.rig import Rig
from danube_fast.bench.load.verify import Verifier
from danube_fast.bench.plan import Figures, Plan
from danube_fast.bench.workloads.history.stores import Store
from danube_fast.errors import DataLoss, DeadlineExceeded
from danube_fast.frame.view import FrameView
from danube_fast.history.catalog import read_catalog
from danube_fast.history.manifest import Manifest
from danube_fast.history.reader import HistoryReader
from danube_fast.history.stores.store import ObjectStore
from danube_fast.wal.layout import SEGMENT_SUFFIX

__all__ = ["FOREVER", "HISTORY", "SMALL_SEGMENTS", "compare", "counters", "create", "history_of"]
__all__ += ["keep_forever", "log_bytes", "options_of", "publish", "read_back", "roll_log"]
__all__ += ["there_and_back"]
__all__ += ["uploaded_messages", "wait_trimmed", "wait_until"]

STREAMS = "danube_fast.bench.load.streams"
GIB = 1 << 30
FAULTS = ("lost", "duplicated", "corrupted")
FOREVER = {"retention_policy": "forever"}
HISTORY: dict[str, Any] = {
    "spare_segments": 0, "history_flush_seconds": 1, "history_backlog_bytes_max": 64 * GIB,
}  # fmt: skip
"""No zeroing of spares beside the run, no refusal of what waits for the store."""
SMALL_SEGMENTS = {
    "retention_seconds_min": 0, "segment_bytes": 16 << 20, "segment_start_bytes": 4 << 20,
}  # fmt: skip
"""What is in the store leaves the log at once, but for the segment that is being written."""
UPLOAD_SECONDS = 300.0
TRIM_SECONDS = 30.0
BALLAST_BYTES = 64 << 10
BALLAST_SEGMENTS = 4
SNAPSHOT_SECONDS = 0.3
SEGMENTS_LEFT = 4 + BALLAST_SEGMENTS
"""Of a trimmed log: what was put in last, what stood before it, and the segment that is written."""
STEP_SECONDS = 0.02
COMPARE_BYTES = 4 << 20
SLOWEST_PER_S = 50_000


def wait_until(what: str, is_there: Callable[[], bool], seconds: float = UPLOAD_SECONDS) -> None:
    """Look often. Raises DeadlineExceeded."""
    deadline = time.monotonic() + seconds
    while not is_there():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{what} did not come within {seconds:g} s; is this host busy?")
        time.sleep(STEP_SECONDS)


def counters(broker: Broker) -> dict[str, int]:
    """What the broker counts, as of now."""
    found: dict[str, int] = broker.status()["counters"]
    return found


# ------------------------------------------------------------------ filling


def create(broker: Broker, plan: Plan, topic: str, policy: Mapping[str, Any] | None = None) -> None:
    """Create a topic."""
    broker.client.admin.create_topic(topic, **plan.topic_options)  # type: ignore[arg-type]
    if policy:
        broker.client.admin.set_topic_policy(topic, dict(policy))


def keep_forever(broker: Broker, topic: str) -> None:
    """From now on the topic has history."""
    broker.client.admin.set_topic_policy(topic, dict(FOREVER))


def options_of(rig: Rig, plan: Plan, broker: Broker, topic: str) -> dict[str, Any]:
    """What the members of a run are told."""
    return {
        "url": broker.url, "transport": plan.transport, "spin_us": plan.spin_us,
        "topic_options": plan.topic_options, "topics": [topic], "subscription": "bench",
        "message_bytes": plan.message_bytes, "messages": plan.messages, "rate": 0, "index": 0,
        "step": 1, "streams": 1, "is_reliable": True,
        "fd": rig.payloads(plan.messages, plan.message_bytes),
    }  # fmt: skip


def start_producer(crew: Crew, options: dict[str, Any]) -> Member:
    """Start a producer of all prepared messages, until it waits for its go."""
    producer = crew.start("producer", f"{STREAMS}:produce_lists", options, [options["fd"]])
    producer.hear()
    return producer


def run_producer(producer: Member, messages: int) -> dict[str, Any]:
    """Let it publish them by lists; what it reports."""
    producer.tell("go")
    report: dict[str, Any] = producer.hear(HEAR_SECONDS + messages / SLOWEST_PER_S)
    producer.tell("bye")
    return report


def publish(crew: Crew, options: dict[str, Any]) -> None:
    """Publish all prepared messages, until all are acked."""
    run_producer(start_producer(crew, options), options["messages"])


def read_back(crew: Crew, options: dict[str, Any]) -> dict[str, Any]:
    """All messages by a consumer that compares them; what that reports."""
    consumer = crew.start("consumer", f"{STREAMS}:consume_batches", options, [options["fd"]])
    consumer.hear()
    consumer.tell("go")
    report: dict[str, Any] = consumer.hear(HEAR_SECONDS + options["messages"] / SLOWEST_PER_S)
    consumer.tell("bye")
    return report


# ------------------------------------------------------------------ the store


def history_of(store: ObjectStore, topic: str) -> tuple[int, bytes, Manifest]:
    """Partition id, identity of the broker and manifest of a topic. Raises DataLoss if there is none."""
    found = read_catalog(store).of_topic(topic)
    if len(found) != 1:
        raise DataLoss(f"{store.url} has {len(found)} manifests of {topic}")
    return found[0].partition_id, found[0].identity, found[0].manifest


def uploaded_messages(store: Store, topic: str) -> int:
    """How many messages manifests name."""
    opened = store.open()
    try:
        found = read_catalog(opened).of_topic(topic)
    finally:
        opened.close()
    return sum(s.message_count for each in found for s in each.manifest.sections)


def compare(figures: Figures, store: Store, topic: str, payloads: Payloads) -> None:
    """Count in `figures` what the store lacks of the prepared messages, has twice, or has wrong."""
    opened = store.open()
    verifier = Verifier(payloads, 1)
    try:
        partition_id, _, manifest = history_of(opened, topic)
        reader, at = HistoryReader(opened, partition_id, manifest), 0
        while (fetched := reader.fetch(at, COMPARE_BYTES)) is not None:
            place = 0
            while place < len(fetched.data):
                view = FrameView(fetched.data, place)
                verifier.take(view.payloads())
                place += view.frame_bytes
            at = fetched.end_offset
    finally:
        opened.close()
    add_faults(figures, {x: getattr(verifier, x) for x in FAULTS})


def add_faults(figures: Figures, found: Mapping[str, Any]) -> None:
    """Count what went wrong in one part of a run."""
    for name in FAULTS:
        setattr(figures, name, (getattr(figures, name) or 0) + found[name])


# ------------------------------------------------------------------ the log


def log_bytes(data_dir: Path) -> int:
    """Bytes of all segments."""
    total = 0
    for path in data_dir.rglob(f"*{SEGMENT_SUFFIX}"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def roll_log(rig: Rig, broker: Broker) -> None:
    """Fill some segments of the one log with what none needs: a log keeps what stands behind its last two
    snapshots, and each new segment brings one."""
    (topic,) = rig.topics(1)
    message = bytes(BALLAST_BYTES)
    some = [message] * (SMALL_SEGMENTS["segment_bytes"] // BALLAST_BYTES)
    with broker.client.producer(topic, dispatch="reliable", durability="os") as producer:
        for _ in range(BALLAST_SEGMENTS):
            producer.send_many(some)
            producer.flush(timeout=TRIM_SECONDS)
            time.sleep(SNAPSHOT_SECONDS)


def wait_trimmed(broker: Broker, size: int) -> None:
    """Until the logs have `size` bytes at most. Raises DeadlineExceeded."""
    wait_until("the trim of the log", lambda: log_bytes(broker.data_dir) <= size, TRIM_SECONDS)


# ------------------------------------------------------------------ runs beside each other


def there_and_back(
    runs: Mapping[str, Callable[[], Figures]],
) -> dict[str, list[Figures]]:
    """Each run twice, in the order there and back, so that a drift of the machine counts for all."""
    found: dict[str, list[Figures]] = {name: [] for name in runs}
    for name in (*runs, *reversed(list(runs))):
        found[name].append(runs[name]())
    return found
