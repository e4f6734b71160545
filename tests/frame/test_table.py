"""Tables: the columns of many frames are those of each frame, one behind the other, whatever each of them has."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube_fast.errors import DataLoss
from danube_fast.frame.kernel import address_of
from danube_fast.frame.layout import Codec
from danube_fast.frame.pack import encode_frame
from danube_fast.frame.split import split_frame
from danube_fast.frame.stamp import write_pad
from danube_fast.frame.view import FrameView
from tests.frame.samples import FULL, random_columns, stamped

pytest.importorskip("pyarrow")
from danube_fast.frame.table import producer_ids, tables

NAMES = {1: "loader", 2: "späher"}
"""Of three producers."""


def _frames(seed: int) -> list[bytes]:
    """Draw stamped frames of one partition, in the order of offsets; gaps between some, some of them split."""
    chance = random.Random(seed)
    frames, offset = [], chance.randrange(50)
    for _ in range(chance.randrange(1, 6)):
        columns = random_columns(chance)
        frame = encode_frame(
            **columns, codec=chance.choice(list(Codec)), publish_time_ns=chance.randrange(2**60),
            producer_id=chance.randrange(1, 4), base_sequence=chance.randrange(2**40),
        )  # fmt: skip
        count = len(columns["payloads"])
        frame = stamped(frame, base_offset=offset)
        if chance.random() < 0.5:
            chosen = sorted(chance.sample(range(count), chance.randrange(1, count + 1)))
            frame = split_frame(FrameView(frame), np.array(chosen, dtype=np.int32))
        frames.append(bytes(frame))
        offset += count + chance.randrange(4)
    return frames


def _expected(frames: list[bytes], low: int, high: int) -> list[tuple[Any, ...]]:
    rows = []
    for frame in frames:
        view = FrameView(frame)
        count = view.message_count
        none = [None] * count
        rows += [
            row
            for row in zip(
                view.offsets().tolist(),
                view.sequences().tolist(),
                view.payloads(),
                view.keys() or none,
                [sorted(pairs.items()) for pairs in view.attributes() or [{}] * count],
                [None if time is None else time // 1000 for time in view.event_times() or none],
                [view.publish_time_ns // 1000] * count,
                [NAMES.get(view.producer_id)] * count,
                strict=True,
            )
            if low <= row[0] < high
        ]
    return rows


def _found(memory: bytes, low: int, high: int, **limits: int) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for table in tables(memory, low, high, **limits):
        columns = [
            table.offsets(), table.sequences(), table.payloads(), table.keys(), table.attributes(),
            table.event_times(), table.publish_times(), table.producer_names(NAMES),
        ]  # fmt: skip
        values = []
        for column in columns:
            column.validate(full=True)
            assert len(column) == table.row_count
            is_time = str(column.type).startswith("timestamp")
            values.append(column.cast("int64").to_pylist() if is_time else column.to_pylist())
        values[4] = [sorted(pairs) for pairs in values[4]]
        rows += zip(*values, strict=True)
    return rows


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    low=st.integers(0, 80),
    length=st.integers(0, 120),
    rows_max=st.integers(1, 30),
)
def test_a_table_has_the_messages_of_its_frames(
    seed: int, low: int, length: int, rows_max: int
) -> None:
    frames = _frames(seed)
    memory = b"".join(frames)
    expected = _expected(frames, low, low + length)
    assert _found(memory, low, low + length) == expected
    assert _found(memory, low, low + length, rows_max=rows_max) == expected
    assert _found(memory, low, low + length, bytes_max=300) == expected
    assert producer_ids(memory) == sorted({FrameView(frame).producer_id for frame in frames})


def test_pads_are_passed_and_limits_bound_tables() -> None:
    frame = bytes(stamped(encode_frame(**FULL), base_offset=10))
    pad = bytearray(256)
    write_pad(address_of(pad), 256)
    found = list(tables(frame + bytes(pad) + frame, 0, 100, rows_max=1))
    assert [table.row_count for table in found] == [FrameView(frame).message_count] * 2
    assert producer_ids(pad) == producer_ids(b"") == []


def test_a_damaged_frame_is_told_behind_the_sound_ones() -> None:
    frame = bytes(stamped(encode_frame(**FULL), base_offset=10))
    torn = frame + frame[: len(frame) // 2]
    found = tables(torn, 0, 100)
    assert next(found).row_count == FrameView(frame).message_count
    with pytest.raises(DataLoss, match=f"damaged frame at byte {len(frame)}: TRUNCATED"):
        next(found)


def test_text_that_is_no_utf8_is_mended() -> None:
    frame = stamped(encode_frame([b"a"], attributes=[{"name": "value"}]), base_offset=0)
    at = bytes(frame).index(b"value")
    frame[at : at + 2] = b"\xff\xfe"
    (table,) = tables(frame, 0, 10)
    assert table.attributes().to_pylist() == [[("name", "\ufffd\ufffdlue")]]
