"""Objects of history: what is written is what is read, and nothing else is taken for it."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube_fast.clock import SystemClock
from danube_fast.errors import DataLoss, FailedPrecondition
from danube_fast.frame.file_header import seal_header
from danube_fast.frame.layout import FRAME_BYTES_CAP, At
from danube_fast.frame.view import FrameView
from danube_fast.history.blocks import BlockTable
from danube_fast.history.layout import (
    BLOCK_BYTES,
    OBJECT_HEADER_BYTES,
    TRAILER_BYTES,
    ObjectHeader,
    Trailer,
    object_key,
)
from danube_fast.history.objects import ObjectWriter, read_blocks, verify_object
from danube_fast.history.stores.memory import MemoryStore
from tests.frame.guarded import Guarded
from tests.history.rig import IDENTITY, START_NS, make_frame, make_frames, put_object

KEY = object_key(1, 0)
MEMORY = Guarded(8192)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(SystemClock())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(64, 5000))
def test_what_is_written_is_read(seed: int, part_bytes: int) -> None:
    chance = random.Random(seed)
    store = MemoryStore(SystemClock())
    frames = {
        partition_id: make_frames(partition_id, chance.randrange(1000), chance.randrange(6), chance)
        for partition_id in chance.sample(range(1, 100), chance.randrange(1, 5))
    }
    sections = put_object(store, frames, part_bytes=part_bytes)
    filled = {number: some for number, some in frames.items() if some}
    assert len(sections) == len(filled)
    for section, (partition_id, some) in zip(sections, filled.items(), strict=True):
        data = b"".join(some)
        assert store.read(KEY, section.position, section.byte_count) == data
        blocks = read_blocks(store, section)
        assert {int(row["partition_id"]) for row in blocks} == {partition_id}
        assert int(blocks["frame_count"].sum()) == len(some)
        assert section.base_offset == int(blocks["base_offset"][0])
        assert section.end_offset - section.base_offset == section.message_count
        assert section.append_min_ns == START_NS + section.base_offset
        assert section.publish_min_ns == section.append_min_ns - 5
    rows = verify_object(store, KEY, IDENTITY)
    assert len(rows) == sum(section.block_count for section in sections)


def test_blocks_end_with_the_frame_that_fills_them(store: MemoryStore) -> None:
    size = BLOCK_BYTES // 3
    frames = [make_frame(5, offset, [bytes(size)]) for offset in range(10)]
    (section,) = put_object(store, {5: frames}, part_bytes=100_000)
    blocks = read_blocks(store, section)
    assert blocks["frame_count"].tolist() == [3, 3, 3, 1]
    assert blocks["base_offset"].tolist() == [0, 3, 6, 9]
    assert blocks["end_offset"].tolist() == [3, 6, 9, 10]
    assert (np.diff(blocks["position"]) == blocks["byte_count"][:-1]).all()


def test_a_table_grows(store: MemoryStore) -> None:
    frames = [make_frame(5, offset, [bytes(BLOCK_BYTES)]) for offset in range(150)]
    (section,) = put_object(store, {5: frames}, part_bytes=8 << 20)
    assert section.block_count == 150
    verify_object(store, KEY, IDENTITY)


def test_parts_have_one_size() -> None:
    writer = ObjectWriter(ObjectHeader(IDENTITY, 1, 2, 3), 1000)
    writer.begin(5, 0)
    whole = b""
    parts = []
    for frame in make_frames(5, 0, 40, random.Random(1)):
        writer.space(len(frame))[:] = frame
        parts.extend(writer.add(len(frame), "x"))
    last, _ = writer.finish()
    parts.extend(last)
    for number, part in enumerate(parts, 1):
        assert part.number == number
        assert part.offset == len(whole)
        whole += part.data
    assert {len(part.data) for part in parts[:-1]} == {1000}
    assert Trailer.decode(whole[-TRAILER_BYTES:], "x").object_bytes == len(whole)


@pytest.mark.parametrize(
    ("at", "words"),
    [
        (At.MAGIC, "no frame"),
        (At.BASE_OFFSET, "frame's header"),
        (128, "frame's body"),
        (At.PRODUCER_ID, "frame's header|frame's body"),
    ],
)
def test_a_damaged_frame_does_not_get_in(at: int, words: str) -> None:
    writer = ObjectWriter(ObjectHeader(IDENTITY, 1, 2, 3), 1000)
    writer.begin(5, 0)
    good, bad = make_frame(5, 0, [b"x"]), make_frame(5, 1, [b"y" * 20])
    bad[at] ^= 1
    writer.space(len(good) + len(bad))[:] = good + bad
    with pytest.raises(DataLoss, match=f"segment 3, {len(good)} bytes on: .*({words})"):
        list(writer.add(len(good) + len(bad), "segment 3"))


def test_an_object_goes_on_without_the_frames_that_were_refused(store: MemoryStore) -> None:
    """Good frames before a bad one are not in it either: the caller reads all of them again."""
    writer = ObjectWriter(ObjectHeader(IDENTITY, 1, 0, START_NS), 100)
    whole = bytearray()
    good = make_frames(5, 0, 3, random.Random(4))
    bad = make_frame(5, 100, [b"y" * 20])
    bad[130] ^= 1
    later = make_frame(6, 0, [b"z"])
    writer.begin(5, 0)
    for frames, is_sound in ((good[:1], True), ([*good[1:], bad], False), (good[1:], True)):
        data = b"".join(frames)
        writer.space(len(data))[:] = data
        if is_sound:
            whole += b"".join(part.data for part in writer.add(len(data), "x"))
        else:
            with pytest.raises(DataLoss):
                writer.add(len(data), "x")
    writer.begin(6, 0)
    writer.space(len(later))[:] = later
    whole += b"".join(part.data for part in writer.add(len(later), "x"))
    parts, sections = writer.finish()
    whole += b"".join(part.data for part in parts)
    store.create(KEY, whole)
    verify_object(store, KEY, IDENTITY)
    assert [section.message_count for section in sections] == [
        sum(FrameView(frame).message_count for frame in good), 1,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (make_frame(6, 1, [b"x"]), "another partition"),
        (make_frame(5, 0, [b"x"]), "do not follow"),
        (make_frame(5, 1, [b"x"])[:-8], "end inside"),
        (make_frame(5, 1, [b"x"]) + b"1234", "end inside"),
    ],
)
def test_frames_out_of_place_do_not_get_in(frame: bytearray, words: str) -> None:
    writer = ObjectWriter(ObjectHeader(IDENTITY, 1, 2, 3), 1000)
    writer.begin(5, 1)
    writer.space(len(frame))[:] = frame
    with pytest.raises(DataLoss, match=words):
        list(writer.add(len(frame), "here"))


def test_a_frame_of_the_largest_size(store: MemoryStore) -> None:
    frames = [make_frame(5, 0, [bytes(FRAME_BYTES_CAP)]), make_frame(5, 1, [b"small"])]
    (section,) = put_object(store, {5: frames}, part_bytes=4096)
    assert store.read(KEY, section.position, section.byte_count) == b"".join(frames)


def test_every_flipped_byte_of_an_object_is_found(store: MemoryStore) -> None:
    put_object(
        store, {5: make_frames(5, 0, 3, random.Random(2), 20), 6: [make_frame(6, 9, [b"x"])]}
    )
    whole = store.read(KEY)
    for at in range(len(whole)):
        store.delete([KEY])
        store.create(KEY, whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises((DataLoss, FailedPrecondition), match=KEY):
            verify_object(store, KEY, IDENTITY)


def test_every_truncated_object_is_found(store: MemoryStore) -> None:
    put_object(store, {5: make_frames(5, 0, 3, random.Random(2), 20)})
    whole = store.read(KEY)
    for size in range(len(whole)):
        store.delete([KEY])
        store.create(KEY, whole[:size])
        with pytest.raises(DataLoss, match=KEY):
            verify_object(store, KEY, IDENTITY)


def test_an_object_of_another_broker_or_name_is_refused(store: MemoryStore) -> None:
    put_object(store, {5: [make_frame(5, 0, [b"x"])]})
    with pytest.raises(DataLoss, match="another broker"):
        verify_object(store, KEY, b"another identity")
    store.create("objects/renamed", store.read(KEY))
    with pytest.raises(DataLoss, match="another name"):
        verify_object(store, "objects/renamed", IDENTITY)


def test_a_newer_format_is_told_from_damage(store: MemoryStore) -> None:
    put_object(store, {5: [make_frame(5, 0, [b"x"])]})
    whole = store.read(KEY)
    head = bytearray(whole[:OBJECT_HEADER_BYTES])
    head[8] = 9
    store.delete([KEY])
    store.create(KEY, seal_header(bytes(head)) + whole[OBJECT_HEADER_BYTES:])
    with pytest.raises(FailedPrecondition, match="start the newer danube-fast"):
        verify_object(store, KEY, IDENTITY)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=600), st.integers(0, 2**32))
def test_no_bytes_lead_outside(noise: bytes, seed: int) -> None:
    """Frames with noise in them, in front of a page that must not be touched."""
    chance = random.Random(seed)
    data = bytearray(b"".join(make_frames(5, 0, 2, chance, 60)))
    at = chance.randrange(len(data))
    data[at : at + len(noise)] = noise[: len(data) - at]
    for put in (MEMORY.put_last, MEMORY.put_first):
        _, window = put(bytes(data))
        table = BlockTable(0)
        table.begin(5)
        with contextlib.suppress(DataLoss):
            table.add(window, "noise")
        assert int(table.rows["byte_count"].sum()) <= len(data)
