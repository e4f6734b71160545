"""Frames as they stand in a log, and objects of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from danube_fast.frame.kernel import address_of
from danube_fast.frame.pack import encode_frame
from danube_fast.frame.stamp import stamp
from danube_fast.frame.view import FrameView
from danube_fast.history.layout import ObjectHeader
from danube_fast.history.manifest import ManifestLog, Section
from danube_fast.history.objects import ObjectWriter
from danube_fast.history.stores.store import ObjectStore

IDENTITY = b"an identity, 16b"
LOG_ID = 7
START_NS = 1_700_000_000_000_000_000


def make_frame(
    partition_id: int,
    base_offset: int,
    payloads: list[bytes],
    *,
    span: int = 0,
    time_ns: int = 0,
    producer_id: int = 3,
) -> bytearray:
    """One frame with offsets, published 5 ns before it was appended."""
    time_ns = time_ns or START_NS + base_offset
    frame = encode_frame(payloads, producer_id=producer_id, publish_time_ns=time_ns - 5)
    stamp(
        address_of(frame), LOG_ID, 4096, base_offset, time_ns, 2048, partition_id, 4,
        span or len(payloads),
    )  # fmt: skip
    return frame


def make_frames(
    partition_id: int,
    base_offset: int,
    frame_count: int,
    chance: random.Random,
    bytes_max: int = 400,
) -> list[bytearray]:
    """Frames of one to five messages, one after the other."""
    frames = []
    for _ in range(frame_count):
        payloads = [
            chance.randbytes(chance.randrange(bytes_max)) for _ in range(chance.randrange(1, 6))
        ]
        frames.append(make_frame(partition_id, base_offset, payloads))
        base_offset += len(payloads)
    return frames


def put_object(
    store: ObjectStore,
    frames: Mapping[int, list[bytearray]],
    *,
    epoch: int = 1,
    number: int = 0,
    part_bytes: int = 0,
    identity: bytes = IDENTITY,
) -> list[Section]:
    """Send an object with these frames of each partition."""
    header = ObjectHeader(identity, epoch, number, START_NS)
    writer = ObjectWriter(header, part_bytes or max(64, store.part_bytes_min))
    upload = store.begin(writer.key)
    sent = []
    for partition_id, some in frames.items():
        writer.begin(partition_id, 0)
        for frame in some:
            writer.space(len(frame))[:] = frame
            for part in writer.add(len(frame), "a test"):
                sent.append(store.put_part(upload, *part))
        writer.end()
    parts, sections = writer.finish()
    sent.extend(store.put_part(upload, *part) for part in parts)
    store.complete(upload, sent)
    return sections


def put_history(
    store: ObjectStore,
    object_count: int,
    topics: Mapping[int, str],
    *,
    frame_count: int = 4,
    bytes_max: int = 400,
    part_bytes: int = 1 << 20,
) -> dict[int, ManifestLog]:
    """Objects with frames of each of these partitions, and their manifests."""
    chance = random.Random(1)
    logs = {partition_id: ManifestLog(store, IDENTITY, partition_id, 1) for partition_id in topics}
    ends = dict.fromkeys(topics, 0)
    for number in range(object_count):
        frames = {
            partition_id: make_frames(partition_id, end, frame_count, chance, bytes_max)
            for partition_id, end in ends.items()
        }
        sections = put_object(store, frames, number=number, part_bytes=part_bytes)
        for (partition_id, log), section in zip(logs.items(), sections, strict=True):
            last = FrameView(frames[partition_id][-1])
            ends[partition_id] = last.base_offset + last.offset_span
            log.commit(
                topics[partition_id], 1, 1, first_offset=0, end_offset=ends[partition_id],
                added=[section],
            )  # fmt: skip
    return logs


def change_object(store: ObjectStore, key: str, change: Callable[[bytearray], object]) -> None:
    """Put other bytes in an object's place, as a faulty disk does."""
    data = bytearray(store.read(key))
    change(data)
    store.delete([key])
    store.create(key, data)
