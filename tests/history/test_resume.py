"""A writer that goes on where another one was cut short: the very same object, or none."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube_fast.clock import SystemClock
from danube_fast.errors import DataLoss, Internal
from danube_fast.frame.crc import crc32c
from danube_fast.frame.layout import At
from danube_fast.frame.view import FrameView
from danube_fast.history.layout import BLOCK_BYTES, ObjectHeader, object_key
from danube_fast.history.manifest import Section
from danube_fast.history.objects import (
    Frames,
    ObjectWriter,
    OutgoingPart,
    WriterState,
    verify_object,
)
from danube_fast.history.stores.memory import MemoryStore
from tests.history.rig import IDENTITY, make_frame, make_frames

HEADER = ObjectHeader(IDENTITY, 1, 0, 3)
Log = dict[int, list[bytearray]]


def written(
    log: Log, part_bytes: int, batch: int
) -> tuple[bytes, list[Section], list[tuple[WriterState, int, int]]]:
    """The object of a log whose frames come `batch` at a time, its sections, and each state on the way with the
    partition and how many of its frames were added."""
    writer = ObjectWriter(HEADER, part_bytes)
    states = []
    parts: list[OutgoingPart] = []
    for partition_id, frames in log.items():
        writer.begin(partition_id, 0)
        for at in range(0, len(frames), batch):
            data = b"".join(frames[at : at + batch])
            writer.space(len(data))[:] = data
            done = list(writer.add(len(data), "x"))
            parts += done
            if done:
                states.append((writer.state(), partition_id, at + batch))
        writer.end()
    rest, sections = writer.finish()
    return b"".join(part.data for part in [*parts, *rest]), sections, states


def read_again(log: Log, wanted: list[Frames]) -> bytes:
    """The frames that a state names."""
    data = b""
    for partition_id, base_offset, byte_count in wanted:
        frames = log[partition_id]
        rest = b"".join(frame for frame in frames if FrameView(frame).base_offset >= base_offset)
        data += rest[:byte_count]
    return data


def gone_on(
    log: Log, part_bytes: int, state: WriterState, partition_id: int, count: int
) -> tuple[int, bytes, list[Section]]:
    """Where the parts begin that another writer sends, their bytes, and its sections."""
    writer = ObjectWriter.resume(HEADER, part_bytes, state, read_again(log, state.frames_again()))
    parts: list[OutgoingPart] = []
    ids = list(log)
    for number in ids[ids.index(partition_id) :]:
        if number != partition_id:
            writer.begin(number, 0)
        for frame in log[number][count if number == partition_id else 0 :]:
            writer.space(len(frame))[:] = frame
            parts += writer.add(len(frame), "x")
        writer.end()
    rest, sections = writer.finish()
    parts += rest
    assert [part.number for part in parts] == list(
        range(state.part_count + 1, state.part_count + 1 + len(parts))
    )
    return parts[0].offset, b"".join(part.data for part in parts), sections


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(64, 5000), st.integers(1, 5))
def test_the_object_is_the_same_wherever_it_was_cut(seed: int, part_bytes: int, batch: int) -> None:
    chance = random.Random(seed)
    log = {
        number: make_frames(number, chance.randrange(1000), chance.randrange(12), chance)
        for number in chance.sample(range(1, 100), chance.randrange(1, 5))
    }
    whole, sections, states = written(log, part_bytes, batch)
    for state, partition_id, count in states:
        kept = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=WriterState)
        start, rest, found = gone_on(log, part_bytes, kept, partition_id, count)
        assert start == state.sent
        assert whole[start:] == rest
        assert found == sections


def test_blocks_are_the_same_too() -> None:
    """Frames of a third of a block: parts end in open blocks, in full ones and between them."""
    log = {5: [make_frame(5, offset, [bytes(BLOCK_BYTES // 3)]) for offset in range(20)]}
    whole, sections, states = written(log, 64 * 1024, 1)
    assert len(states) == 20
    for state, partition_id, count in states:
        start, rest, found = gone_on(log, 64 * 1024, state, partition_id, count)
        assert whole[start:] == rest
        assert found == sections
    store = MemoryStore(SystemClock())
    store.create(object_key(1, 0), whole)
    verify_object(store, object_key(1, 0), IDENTITY)


def test_other_frames_are_refused() -> None:
    frames = [make_frame(5, offset, [bytes([offset]) * 300]) for offset in range(40)]
    _, _, states = written({5: frames}, 1000, 1)
    state, _, count = states[10]
    data = read_again({5: frames}, state.frames_again())
    first = state.frames_again()[0].base_offset
    for place in (first, count - 1):
        other = list(frames)
        other[place] = make_frame(5, place, [b"?" * 300])  # as sound as the one before
        changed = read_again({5: other}, state.frames_again())
        with pytest.raises(DataLoss, match="not what was there before"):
            ObjectWriter.resume(HEADER, 1000, state, changed)
    for wrong in (data[:-1], data[: -len(frames[0])], data + frames[count], b""):
        with pytest.raises(DataLoss):
            ObjectWriter.resume(HEADER, 1000, state, wrong)
    ObjectWriter.resume(HEADER, 1000, state, data)


def test_frames_with_other_stamps_are_refused() -> None:
    """As after a move: bodies, offsets and times are the same, and so is the crc of the block, but no header is."""
    log = {5: [make_frame(5, offset, [bytes([offset]) * 300]) for offset in range(40)]}
    moved = {5: [bytearray(frame) for frame in log[5]]}
    for frame in moved[5]:
        frame[At.LOG_ID : At.LOG_ID + 8] = (77).to_bytes(8, "little")
        frame[At.HEADER_CRC32C : At.HEADER_CRC32C + 4] = crc32c(
            bytes(frame[: At.HEADER_CRC32C])
        ).to_bytes(4, "little")
    _, _, states = written(log, 1000, 1)
    for state, _, _ in states:
        other = read_again(moved, state.frames_again())
        with pytest.raises(DataLoss, match="not what was there before"):
            ObjectWriter.resume(HEADER, 1000, state, other)
        ObjectWriter.resume(HEADER, 1000, state, read_again(log, state.frames_again()))


def test_there_is_no_state_without_a_part() -> None:
    writer = ObjectWriter(HEADER, 1000)
    with pytest.raises(Internal):
        writer.state()
    writer.begin(5, 0)
    with pytest.raises(Internal):
        writer.state()
