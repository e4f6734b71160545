"""The bytes on disk: headers pinned, names, padding."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube_fast.errors import DataLoss, FailedPrecondition
from danube_fast.frame.crc import crc32c
from danube_fast.frame.layout import HEADER_BYTES
from danube_fast.wal.layout import (
    GROUP_ALIGNMENT,
    SEGMENT_HEADER_BYTES,
    SEGMENT_SUFFIX,
    SegmentHeader,
    SnapshotHeader,
    group_bytes,
    pad_bytes,
    position_from_name,
    position_name,
)

SEGMENT = SegmentHeader(
    log_id=0x1122334455667788,
    first_position=0x3FF000,
    previous_position=0,
    segment_bytes=0x400000,
    created_ns=1_700_000_000_000_000_000,
    epoch=9,
)
SEGMENT_GOLDEN = bytes.fromhex(
    "44616e7562655367"  # magic
    "01000000"  # version
    "09000000"  # epoch
    "8877665544332211"  # log_id
    "00f03f0000000000"  # first_position
    "0000000000000000"  # previous_position
    "0000400000000000"  # segment_bytes
    "00002a36fe9c9717"  # created_ns
    "00000000"
)
SNAPSHOT = SnapshotHeader(
    log_id=0x1122334455667788,
    position=0x3FF000,
    state_bytes=5,
    created_ns=1_700_000_000_000_000_000,
    epoch=9,
    clean=True,
    state_crc=0xAABBCCDD,
)
SNAPSHOT_GOLDEN = bytes.fromhex(
    "44616e756265536e"  # magic
    "01000000"
    "09000000"
    "8877665544332211"
    "00f03f0000000000"  # position
    "0500000000000000"  # state_bytes
    "00002a36fe9c9717"
    "01000000"  # clean
    "ddccbbaa"  # state_crc
    "00000000"
)


def with_crc(head: bytes) -> bytes:
    return head + crc32c(head).to_bytes(4, "little")


def test_segment_header_is_pinned() -> None:
    data = SEGMENT.encode()
    assert len(data) == SEGMENT_HEADER_BYTES
    assert data[:64].hex() == with_crc(SEGMENT_GOLDEN).hex()
    assert not any(data[64:])
    assert SegmentHeader.decode(data, "x.seg") == SEGMENT


def test_snapshot_header_is_pinned() -> None:
    data = SNAPSHOT.encode()
    assert data.hex() == with_crc(SNAPSHOT_GOLDEN).hex()
    assert SnapshotHeader.decode(data + b"state", "x.snap") == SNAPSHOT


@pytest.mark.parametrize("place", [0, 8, 12, 16, 24, 32, 40, 48, 56, 60, 63])
def test_any_flip_of_a_header_is_seen(place: int) -> None:
    data = bytearray(SEGMENT.encode())
    data[place] ^= 0x10
    with pytest.raises(DataLoss, match=r"x\.seg is damaged"):
        SegmentHeader.decode(bytes(data), "x.seg")


def test_a_newer_version_is_refused_in_one_sentence() -> None:
    head = SEGMENT_GOLDEN[:8] + (2).to_bytes(4, "little") + SEGMENT_GOLDEN[12:]
    with pytest.raises(FailedPrecondition) as caught:
        SegmentHeader.decode(with_crc(head), "x.seg")
    assert "version 2" in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.integers(min_value=0, max_value=1 << 24))
def test_padding_closes_a_group_with_a_whole_header(units: int) -> None:
    byte_count = units * 8
    pad = pad_bytes(byte_count)
    assert (byte_count + pad) % GROUP_ALIGNMENT == 0
    assert pad == 0 or HEADER_BYTES <= pad < GROUP_ALIGNMENT + HEADER_BYTES
    assert pad or byte_count
    assert group_bytes(byte_count) == byte_count + pad


@given(st.integers(min_value=0, max_value=(1 << 64) - 1))
def test_names_round_trip_and_sort_by_position(position: int) -> None:
    name = position_name(position, SEGMENT_SUFFIX)
    assert position_from_name(name, SEGMENT_SUFFIX) == position
    if position:
        assert position_name(position - 1, SEGMENT_SUFFIX) < name


@pytest.mark.parametrize("name", ["spare-1.seg", "reserve.seg", "lock", "1.seg", "x" * 20 + ".seg"])
def test_other_names_are_no_segments(name: str) -> None:
    assert position_from_name(name, SEGMENT_SUFFIX) is None
