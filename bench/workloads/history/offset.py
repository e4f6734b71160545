"""The workloads `history-offset` and `history-offset-s3`: the first message at an offset, out of 10,000 objects.

    published, a frame each | uploaded, the broker stops | cut into an object for each message | the broker starts
    a reader at an offset that was not read before: from its opening to its first message, again and again

The objects and the one manifest record that names them are made as the uploader makes them (ObjectWriter,
ManifestLog): by itself it would take hours. `first_ms` is the median of reads whose manifest is known and whose
object is not; `cold_ms` is the first of all, which has to load the manifest of 10,000 sections. Of S3 the requests
are counted that ask for the manifest or for the object with that offset: what is fetched ahead is none of them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import danube_fast
from danube_fast.bench.load.payloads import Payloads
from danube_fast.bench.load.processes import Broker
from danube_fast.bench.load.rig import Rig, blank
from danube_fast.bench.plan import Figures, Plan
from danube_fast.bench.workloads.history import topics
from danube_fast.bench.workloads.history.relay import relay
from danube_fast.bench.workloads.history.stores import Store, local, s3_url, seaweed
from danube_fast.errors import DataLoss, DeadlineExceeded
from danube_fast.frame.view import FrameView
from danube_fast.history.layout import ObjectHeader
from danube_fast.history.manifest import MANIFESTS_PREFIX, ManifestLog, Section
from danube_fast.history.objects import ObjectWriter
from danube_fast.history.reader import HistoryReader
from danube_fast.history.stores.store import ObjectStore

__all__ = ["run_offset", "run_offset_s3"]

READS = 30
MANY = 1_000_000
"""Numbers of objects from here on are not the uploader's."""
WRITERS = 8
FETCH_BYTES = 4 << 20
PART_BYTES = 64 << 10
READ_SECONDS = 30.0
MS = 1e3

Count = Callable[[str], int]
"""Requests so far for a key, or for keys that begin with it."""


def run_offset(rig: Rig, plan: Plan) -> Figures:
    """Reads from a folder."""
    with local(rig) as store:
        return _run(rig, plan, store, lambda key: 0)


def run_offset_s3(rig: Rig, plan: Plan) -> Figures:
    """Reads from SeaweedFS, their requests counted. Raises FailedPrecondition if that is not installed."""
    with seaweed(rig) as store, relay(store.endpoint) as between:
        counted = store._replace(url=s3_url(between.url))

        def count(key: str) -> int:
            return sum(key in path for _, path in list(between.seen))

        return _run(rig, plan, counted, count)


def _run(rig: Rig, plan: Plan, store: Store, count: Count) -> Figures:
    figures = blank(plan)
    figures.messages = plan.messages
    (topic,) = rig.topics(1)
    settings = topics.HISTORY | topics.SMALL_SEGMENTS | {"store": store.url}
    with rig.own_broker(plan.workload, 1, settings) as broker:
        topics.create(broker, plan, topic, topics.FOREVER)
        payloads = Payloads(rig.payloads(plan.messages, plan.message_bytes), plan.message_bytes)
        _publish_frames(broker, topic, payloads)
        topics.wait_until(
            "the upload", lambda: topics.uploaded_messages(store, topic) >= plan.messages
        )
        topics.wait_until("the end", lambda: topics.counters(broker)["history_lag_bytes"] == 0)
        topics.roll_log(rig, broker)
        broker.stop()
        with contextlib.closing(store.open()) as opened:
            sections = _cut(opened, topic)
        broker.start()
        figures.extra["objects"] = float(len(sections))
        _read(figures, broker, topic, payloads, sections, count)
    topics.compare(figures, store, topic, payloads)
    return figures


def _publish_frames(broker: Broker, topic: str, payloads: Payloads) -> None:
    """Each message in a frame of its own, in order."""
    with broker.client.producer(topic) as producer:
        for number in range(payloads.count):
            producer.send(payloads[number])
            producer.flush()


# ------------------------------------------------------------------ 10,000 objects


def _cut(store: ObjectStore, topic: str) -> list[Section]:
    """Make an object of each frame, and one record that names them in place of those that were there."""
    partition_id, identity, manifest = topics.history_of(store, topic)
    frames = _frames(store, partition_id, manifest)
    epoch = manifest.uploader_epoch
    with concurrent.futures.ThreadPoolExecutor(WRITERS) as writers:
        made = writers.map(
            lambda item: _make(store, identity, epoch, partition_id, *item),
            ((MANY + number, *frame) for number, frame in enumerate(frames)),
        )
        sections = list(made)
    log = ManifestLog(store, identity, partition_id, epoch)
    log.load()
    log.commit(
        manifest.topic, manifest.incarnation, manifest.owner_epoch,
        first_offset=manifest.first_offset, end_offset=manifest.end_offset, added=sections,
        removed=[section.key for section in manifest.sections],
    )  # fmt: skip
    return sections


def _frames(store: ObjectStore, partition_id: int, manifest: Any) -> list[tuple[int, bytes]]:
    """First offset and bytes of each frame."""
    reader, at = HistoryReader(store, partition_id, manifest), 0
    frames: list[tuple[int, bytes]] = []
    while (fetched := reader.fetch(at, FETCH_BYTES)) is not None:
        place = 0
        while place < len(fetched.data):
            view = FrameView(fetched.data, place)
            end = place + view.frame_bytes
            frames.append((view.base_offset, fetched.data[place:end]))
            place = end
        at = fetched.end_offset
    return frames


def _make(
    store: ObjectStore, identity: bytes, epoch: int, partition_id: int, number: int, offset: int,
    frame: bytes,
) -> Section:  # fmt: skip
    """Make one object, with one frame."""
    writer = ObjectWriter(ObjectHeader(identity, epoch, number, time.time_ns()), PART_BYTES)
    writer.begin(partition_id, offset)
    writer.space(len(frame))[:] = frame
    parts = [*writer.add(len(frame), "a frame of the bench")]
    last, sections = writer.finish()
    store.create(writer.key, b"".join(bytes(part.data) for part in [*parts, *last]))
    return sections[0]


# ------------------------------------------------------------------ reads


def _read(
    figures: Figures, broker: Broker, topic: str, payloads: Payloads, sections: list[Section],
    count: Count,
) -> None:  # fmt: skip
    """Read at places all over the middle half."""
    times: list[float] = []
    requests: list[int] = []
    total = len(sections)
    places = [total // 4 + total // 2 * number // READS for number in range(READS + 1)]
    with danube_fast.connect(broker.url, name="bench") as client:
        for place in places:
            section = sections[place]
            keys = section.key, MANIFESTS_PREFIX
            before = sum(map(count, keys))
            began = time.monotonic()
            with client.reader(topic, start=section.base_offset) as reader:
                batch = reader.receive_batch(1, timeout=READ_SECONDS)
                times.append((time.monotonic() - began) * MS)
                requests.append(sum(map(count, keys)) - before)
            if not len(batch):
                raise DeadlineExceeded(f"no message came from offset {section.base_offset}")
            if batch.payloads()[0] != payloads[place]:
                raise DataLoss(f"another message came from offset {section.base_offset}")
    figures.extra |= {
        "first_ms": statistics.median(times[1:]), "first_ms_max": max(times[1:]),
        "cold_ms": times[0], "requests": float(max(requests[1:])), "cold_requests": float(requests[0]),
    }  # fmt: skip
