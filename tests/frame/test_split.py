"""Splitting: any rows of any frame, and again."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube_fast.errors import InvalidArgument
from danube_fast.frame.bundle import bundle_bytes, sealed_bundle, write_bundle
from danube_fast.frame.kernel import address_of
from danube_fast.frame.layout import Codec, Flag
from danube_fast.frame.pack import encode_frame
from danube_fast.frame.split import Cut, split_frame
from danube_fast.frame.view import FrameView
from tests.frame.samples import FULL, random_columns, rows_of, stamped

COPIED = (
    "producer_id", "base_sequence", "publish_time_ns", "producer_epoch", "schema_id",
    "schema_version", "log_id", "log_position", "base_offset", "append_time_ns",
    "synced_position", "partition_id", "epoch", "offset_span",
)  # fmt: skip


def _rows(*indices: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(indices, dtype=np.int32)


def _taken(rows: dict[str, Any], indices: list[int]) -> dict[str, Any]:
    return {
        name: None if column is None else [column[i] for i in indices]
        for name, column in rows.items()
    }


@given(st.integers(0, 2**32), st.sampled_from(list(Codec)), st.booleans())
@settings(max_examples=200, deadline=None)
def test_split_of_a_split_is_the_same_rows(seed: int, codec: Codec, with_counts: bool) -> None:
    chance = random.Random(seed)
    source = stamped(encode_frame(**random_columns(chance), base_sequence=7, codec=codec))
    view = FrameView(source)
    expected = rows_of(view)
    for _ in range(3):
        count = view.message_count
        indices = sorted(chance.sample(range(count), chance.randrange(1, count + 1)))
        counts = np.array([chance.randrange(9) for _ in indices], dtype=np.uint32)
        part = FrameView(split_frame(view, _rows(*indices), counts if with_counts else None))
        part.check(stamped=True)
        expected = _taken(expected, indices)
        if with_counts:
            expected["redelivery_counts"] = counts.tolist()
        assert rows_of(part) == expected
        for name in COPIED:
            assert getattr(part, name) == getattr(view, name), name
        assert part.flags == Flag.SPLIT | (view.flags & Flag.DELAYED) and part.codec == Codec.NONE
        view = part


def test_validity_goes_when_no_chosen_row_is_null() -> None:
    view = FrameView(stamped(encode_frame(**FULL)))
    assert view.place(1) and view.place(4) and view.place(13)
    part = FrameView(split_frame(view, _rows(0, 3)))
    assert (part.place(1), part.place(4), part.place(13)) == (0, 0, 0)


def test_hashes_travel() -> None:
    view = FrameView(stamped(encode_frame(**FULL)))
    whole, part = view.key_hashes(), FrameView(split_frame(view, _rows(1, 3, 4))).key_hashes()
    assert whole is not None and part is not None
    assert part.tolist() == whole[[1, 3, 4]].tolist()


@pytest.mark.parametrize("indices", [(), (1, 1), (2, 1), (-1,), (5,), (0, 5)])
def test_rows_that_do_not_fit(indices: tuple[int, ...]) -> None:
    view = FrameView(stamped(encode_frame(**FULL)))
    with pytest.raises(InvalidArgument, match="rows must rise"):
        split_frame(view, _rows(*indices))


def test_counts_that_do_not_fit() -> None:
    view = FrameView(stamped(encode_frame(**FULL)))
    with pytest.raises(InvalidArgument, match="1 redelivery counts for 2 rows"):
        split_frame(view, _rows(0, 1), np.array([1], dtype=np.uint32))


def test_only_a_stamped_frame_can_be_split() -> None:
    with pytest.raises(InvalidArgument, match="stamp it first"):
        split_frame(FrameView(encode_frame([b"a", b"b"])), _rows(0))


def test_an_offset_span_with_gaps_is_kept() -> None:
    view = FrameView(stamped(encode_frame([b"a", b"b"]), span=50))
    part = FrameView(split_frame(view, _rows(1)))
    assert part.offset_span == 50 and part.offsets().tolist() == [5001]


def test_the_source_may_lie_at_any_address() -> None:
    frame = bytes(stamped(encode_frame(**FULL)))
    expected = split_frame(FrameView(frame), _rows(0, 1, 4))
    for shift in range(1, 9):
        assert split_frame(FrameView(bytes(shift) + frame, shift), _rows(0, 1, 4)) == expected


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_is_written_over_whatever_is_there(seed: int) -> None:
    generator = random.Random(seed)
    view = FrameView(stamped(encode_frame(**random_columns(generator))))
    count = view.message_count
    rows = _rows(*sorted(generator.sample(range(count), generator.randint(1, count))))
    counts = generator.choice([None, np.arange(len(rows), dtype=np.uint32)])
    part, whole = split_frame(view, rows, counts), encode_frame([b"x"])
    frames = [(1, Cut(view, rows, counts)), (2, memoryview(whole)), (3, Cut(view, rows, counts))]
    bundle = bytearray(b"\xee" * bundle_bytes([len(frame) for _, frame in frames]))
    write_bundle(address_of(bundle), frames)
    assert bundle == sealed_bundle([(1, part), (2, whole), (3, part)])


@pytest.mark.parametrize("seed", range(20))
def test_ranges_are_those_of_the_offsets(seed: int) -> None:
    generator = random.Random(seed)
    count = generator.randint(1, 200)
    view = FrameView(stamped(encode_frame([b"x"] * count)))
    if generator.random() < 0.8:
        chosen = [row for row in range(count) if generator.random() < 0.7] or [0]
        view = FrameView(split_frame(view, _rows(*chosen)))
    offsets = view.offsets().tolist()
    start = generator.randint(0, len(offsets))
    stop = generator.randint(start, len(offsets))
    pairs = view.ranges(start, stop).tolist()
    told: list[int] = []
    for low, high in zip(pairs[::2], pairs[1::2], strict=True):
        assert not told or told[-1] + 1 < low < high, "touching ranges are one"
        told += range(low, high)
    assert told == offsets[start:stop]
