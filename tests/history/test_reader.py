"""Reading history: the right frames, few requests, and never a wrong byte."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube_fast.clock import SystemClock
from danube_fast.errors import DataLoss, NotFound
from danube_fast.frame.view import FrameView
from danube_fast.history.layout import BLOCK_BYTES
from danube_fast.history.manifest import Manifest
from danube_fast.history.reader import BLOCK_TABLES_KEPT, HistoryReader
from danube_fast.history.stores.memory import MemoryStore
from danube_fast.workers.shard.read.frames import frames_of
from tests.history.rig import START_NS, change_object, make_frame, make_frames, put_object

PARTITION, OTHER = 5, 6


class CountingStore(MemoryStore):
    """Counts what it is asked."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.reads: list[tuple[str, int, int | None]] = []

    def read(self, key: str, start: int = 0, count: int | None = None) -> bytes:
        self.reads.append((key, start, count))
        return super().read(key, start, count)


def fill(
    store: MemoryStore, object_count: int, chance: random.Random, frame_count: int = 4
) -> tuple[Manifest, list[bytearray]]:
    """Objects with frames of two partitions, and now and then a hole in the offsets."""
    manifest = Manifest()
    manifest.topic = "/default/t"
    frames: list[bytearray] = []
    offset = 0
    for number in range(object_count):
        if chance.random() < 0.3:
            offset += chance.randrange(1, 50)
        mine = make_frames(PARTITION, offset, frame_count, chance)
        view = FrameView(mine[-1])
        offset = view.base_offset + view.offset_span
        frames += mine
        sections = put_object(
            store, {OTHER: make_frames(OTHER, 0, 2, chance), PARTITION: mine}, number=number
        )
        manifest.sections.append(sections[1])
    manifest.end_offset = offset
    return manifest, frames


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 20_000))
def test_reading_on_gives_all_frames(seed: int, bytes_max: int) -> None:
    chance = random.Random(seed)
    store = MemoryStore(SystemClock())
    manifest, frames = fill(store, chance.randrange(1, 6), chance)
    reader = HistoryReader(store, PARTITION, manifest)
    offset, data = 0, b""
    while (found := reader.fetch(offset, bytes_max)) is not None:
        assert found.end_offset > offset
        assert found.base_offset >= offset
        data += found.data
        offset = found.end_offset
    assert data == b"".join(frames)
    assert offset == manifest.end_offset


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_any_offset_and_any_time(seed: int) -> None:
    chance = random.Random(seed)
    store = MemoryStore(SystemClock())
    manifest, frames = fill(store, 3, chance)
    reader = HistoryReader(store, PARTITION, manifest)
    bases = [FrameView(frame).base_offset for frame in frames]
    for _ in range(20):
        offset = chance.randrange(manifest.end_offset)
        found = reader.fetch(offset, 1)
        assert found is not None
        stored = frames_of(PARTITION, found.data)
        assert any(each.end_offset > offset for each in stored)
        time_ns = START_NS + chance.randrange(manifest.end_offset + 5)
        wanted = next((base for base in bases if START_NS + base >= time_ns), None)
        assert reader.find_time(time_ns) == wanted


def test_an_offset_in_the_middle_of_many_objects_costs_two_requests() -> None:
    store = CountingStore()
    manifest, _ = fill(store, 300, random.Random(3), frame_count=1)
    reader = HistoryReader(store, PARTITION, manifest)
    middle = manifest.sections[150]
    store.reads.clear()
    found = reader.fetch(middle.base_offset, 1)
    assert found is not None
    assert found.base_offset == middle.base_offset
    assert len(store.reads) == 2
    reader.fetch(middle.base_offset, 1)
    assert len(store.reads) == 3, "its blocks are known"


def test_a_time_reads_only_the_object_that_can_hold_it() -> None:
    store = CountingStore()
    manifest, _ = fill(store, 50, random.Random(3))
    reader = HistoryReader(store, PARTITION, manifest)
    section = manifest.sections[20]
    store.reads.clear()
    inside = section.append_max_ns
    assert reader.find_time(inside) is not None
    assert {key for key, _, _ in store.reads} == {section.key}
    assert len(store.reads) == 2
    store.reads.clear()
    assert reader.find_time(section.append_min_ns) == section.base_offset
    assert reader.find_time(manifest.sections[-1].append_max_ns + 1) is None
    assert store.reads == []


def test_few_tables_are_kept() -> None:
    store = CountingStore()
    manifest, _ = fill(store, BLOCK_TABLES_KEPT + 10, random.Random(3), frame_count=1)
    reader = HistoryReader(store, PARTITION, manifest)
    for section in manifest.sections:
        reader.fetch(section.base_offset, 1)
    assert len(reader._blocks) == BLOCK_TABLES_KEPT


def test_large_ranges_are_blocks_of_one_object() -> None:
    store = MemoryStore(SystemClock())
    manifest = Manifest()
    size = 100_000
    for number in range(2):
        frames = [make_frame(PARTITION, number * 20 + at, [bytes(size)]) for at in range(20)]
        manifest.sections += put_object(
            store, {PARTITION: frames}, number=number, part_bytes=1 << 20
        )
    reader = HistoryReader(store, PARTITION, manifest)
    block = reader.fetch(7, 1)
    assert block is not None
    assert (block.base_offset, block.end_offset) == (6, 9)
    several = reader.fetch(7, 7 * size)
    assert several is not None
    assert (several.base_offset, several.end_offset) == (6, 12)
    rest = reader.fetch(7, 1 << 40)
    assert rest is not None
    assert (rest.base_offset, rest.end_offset) == (6, 20)


def test_an_object_that_is_gone_is_a_loss_with_its_offsets() -> None:
    store = MemoryStore(SystemClock())
    manifest, _ = fill(store, 3, random.Random(1))
    gone = manifest.sections[1]
    store.delete([gone.key])
    reader = HistoryReader(store, PARTITION, manifest)
    words = f"offsets {gone.base_offset} to {gone.end_offset} of /default/t are lost.*{gone.key}"
    with pytest.raises(DataLoss, match=words):
        reader.fetch(gone.base_offset, 1)
    with pytest.raises(DataLoss, match=words):
        reader.find_time(gone.append_max_ns)


def test_an_object_that_goes_after_its_blocks_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(SystemClock())
    manifest, _ = fill(store, 1, random.Random(1))
    reader = HistoryReader(store, PARTITION, manifest)
    reader.fetch(0, 1)

    def gone(*_: object) -> bytes:
        raise NotFound("gone")

    monkeypatch.setattr(store, "read", gone)
    with pytest.raises(DataLoss, match="are lost"):
        reader.fetch(0, 1)


def test_every_flipped_byte_is_found() -> None:
    store = MemoryStore(SystemClock())
    manifest, frames = fill(store, 1, random.Random(2), frame_count=2)
    section = manifest.sections[0]
    whole = store.read(section.key)
    for at in range(section.position, len(whole) - 64):
        store.delete([section.key])
        store.create(section.key, whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        reader = HistoryReader(store, PARTITION, manifest)
        is_other = not (
            section.position <= at < section.position + section.byte_count
            or section.blocks_position <= at < section.blocks_position + 80 * section.block_count
        )
        if is_other:  # bytes of the other partition
            found = reader.fetch(0, 1 << 30)
            assert found is not None
            assert found.data == b"".join(frames)
        else:
            with pytest.raises(DataLoss, match=section.key):
                reader.fetch(0, 1 << 30)


def test_the_blocks_before_a_damaged_one_are_read() -> None:
    """The loss is that of one block, and all before it and behind it is given."""
    store = MemoryStore(SystemClock())
    frames = [make_frame(PARTITION, offset, [bytes(BLOCK_BYTES // 2)]) for offset in range(20)]
    (section,) = put_object(store, {PARTITION: frames}, part_bytes=1 << 20)
    manifest = Manifest()
    manifest.topic, manifest.sections = "/default/t", [section]
    size = len(frames[0])
    change_object(store, section.key, lambda data: flip(data, section.position + 13 * size + 200))
    reader = HistoryReader(store, PARTITION, manifest)
    at = 0
    while at < 12:
        found = reader.fetch(at, 1 << 30)
        assert found is not None
        assert found.data == b"".join(frames[at : found.end_offset])
        at = found.end_offset
    assert at == 12
    with pytest.raises(
        DataLoss, match=f"offsets 12 to 14 of /default/t are lost: .*{section.key}.*crc is another"
    ):
        reader.fetch(12, 1 << 30)
    behind = reader.fetch(14, 1 << 30)
    assert behind is not None
    assert (behind.base_offset, behind.end_offset) == (14, 20)


def flip(data: bytearray, at: int) -> None:
    data[at] ^= 1
