"""Every fault is found and named; sound frames pass."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from danube_fast.errors import DataLoss
from danube_fast.frame import layout
from danube_fast.frame.check import Fault, check_frame, check_header_crc, describe_fault
from danube_fast.frame.crc import crc32c
from danube_fast.frame.kernel import address_of
from danube_fast.frame.layout import BufferId, Codec, Flag
from danube_fast.frame.pack import encode_frame
from danube_fast.frame.stamp import stamp, write_pad
from danube_fast.frame.view import FrameView
from tests.frame.samples import FULL, stamped

Buffers = dict[BufferId, bytes]
GOOD: Buffers = {
    BufferId.PAYLOAD_OFFSETS: struct.pack("<3i", 0, 3, 5),
    BufferId.PAYLOAD_DATA: b"aaabb",
}
KEYS: Buffers = {
    BufferId.KEY_OFFSETS: struct.pack("<3i", 0, 0, 2),
    BufferId.KEY_DATA: b"kk",
}
ATTRIBUTES: Buffers = {
    BufferId.ATTRIBUTE_OFFSETS: struct.pack("<3i", 0, 1, 1),
    BufferId.ATTRIBUTE_KEY_OFFSETS: struct.pack("<2i", 0, 1),
    BufferId.ATTRIBUTE_KEY_DATA: b"a",
    BufferId.ATTRIBUTE_VALUE_OFFSETS: struct.pack("<2i", 0, 2),
    BufferId.ATTRIBUTE_VALUE_DATA: b"bb",
}


def build(buffers: Buffers, *, count: int = 2, flags: int = 0, span: int = 0) -> bytearray:
    """A frame written by hand, straight from the drawing in layout.py, sealed."""
    body = struct.pack("<II", len(buffers), 0)
    for buffer_id, data in buffers.items():
        body += struct.pack("<HHI", buffer_id, 0, len(data))
    for data in buffers.values():
        body += data + bytes(-len(data) % 8)
    head = struct.pack("<IBBHIII", 0x46524644, 1, 0, flags, 128 + len(body), count, len(body))
    tail = struct.pack("<QQqIIH", 1, 0, 0, 0, 0, 0).ljust(40, b"\0")
    crc = crc32c(head + tail + body)
    broker = bytes(48) + struct.pack("<I", span).ljust(16, b"\0")
    return bytearray(head + struct.pack("<I", crc) + tail + broker + body)


def verdict(frame: bytearray, *, flags: int = Flag.DELAYED, available: int | None = None) -> int:
    available = len(frame) if available is None else available
    return int(check_frame(address_of(frame), available, flags, 1))


def test_a_frame_written_by_hand_is_read() -> None:
    frame = build({**GOOD, **KEYS, **ATTRIBUTES})
    assert verdict(frame) == len(frame)
    view = FrameView(frame)
    assert view.payloads() == [b"aaa", b"bb"]
    assert view.keys() == [b"", b"kk"]
    assert view.attributes() == [{"a": "bb"}, {}]
    assert view.key_hashes() is not None  # computed: the frame brings none


CASES: list[tuple[str, Buffers, dict[str, Any], Fault]] = [
    ("no offsets", {BufferId.PAYLOAD_DATA: b""}, {}, Fault.COLUMNS),
    ("no data", {BufferId.PAYLOAD_OFFSETS: bytes(12)}, {}, Fault.COLUMNS),
    ("count too large", GOOD, {"count": 3}, Fault.BUFFER_BYTES),
    ("count too small", GOOD, {"count": 1}, Fault.BUFFER_BYTES),
    ("count zero", GOOD, {"count": 0}, Fault.MESSAGE_COUNT),
    ("count huge", GOOD, {"count": 0xFFFF_FFFF}, Fault.BUFFER_BYTES),
    ("falls", {**GOOD, BufferId.PAYLOAD_OFFSETS: struct.pack("<3i", 0, 6, 5)}, {}, Fault.OFFSETS),
    ("below", {**GOOD, BufferId.PAYLOAD_OFFSETS: struct.pack("<3i", 0, -1, 5)}, {}, Fault.OFFSETS),
    ("starts", {**GOOD, BufferId.PAYLOAD_OFFSETS: struct.pack("<3i", 1, 3, 5)}, {}, Fault.OFFSETS),
    ("short", {**GOOD, BufferId.PAYLOAD_DATA: b"aaab"}, {}, Fault.OFFSETS),
    ("long", {**GOOD, BufferId.PAYLOAD_DATA: b"aaabbb"}, {}, Fault.OFFSETS),
    ("bitmap size", {BufferId.PAYLOAD_VALIDITY: b"\3\0", **GOOD}, {}, Fault.BUFFER_BYTES),
    ("null has bytes", {BufferId.PAYLOAD_VALIDITY: b"\2", **GOOD}, {}, Fault.NULLS),
    ("order", dict(reversed(GOOD.items())), {}, Fault.OFFSETS),
    ("key data alone", {**GOOD, BufferId.KEY_DATA: b""}, {}, Fault.COLUMNS),
    ("key hash alone", {**GOOD, BufferId.KEY_HASH: bytes(16)}, {}, Fault.COLUMNS),
    ("key hash size", {**GOOD, **KEYS, BufferId.KEY_HASH: bytes(8)}, {}, Fault.BUFFER_BYTES),
    ("key null", {**GOOD, BufferId.KEY_VALIDITY: b"\1", **KEYS}, {}, Fault.NULLS),
    (
        "attributes without values",
        {**GOOD, **dict(list(ATTRIBUTES.items())[:3])},
        {},
        Fault.COLUMNS,
    ),
    (
        "pair count",
        {**GOOD, **ATTRIBUTES, BufferId.ATTRIBUTE_OFFSETS: struct.pack("<3i", 0, 1, 2)},
        {},
        Fault.BUFFER_BYTES,
    ),
    ("times size", {**GOOD, BufferId.EVENT_TIME: bytes(8)}, {}, Fault.BUFFER_BYTES),
    ("bitmap alone", {**GOOD, BufferId.EVENT_TIME_VALIDITY: b"\3"}, {}, Fault.COLUMNS),
    ("bitmap alone", {**GOOD, BufferId.DELIVER_AT_VALIDITY: b"\3"}, {}, Fault.COLUMNS),
    ("deltas unsplit", {**GOOD, BufferId.OFFSET_DELTA: bytes(8)}, {"span": 9}, Fault.DELTAS),
    (
        "deltas unsplit",
        {**GOOD, BufferId.OFFSET_DELTA: struct.pack("<2I", 0, 1)},
        {"span": 9},
        Fault.COLUMNS,
    ),
    ("counts unsplit", {**GOOD, BufferId.REDELIVERY_COUNT: bytes(8)}, {}, Fault.COLUMNS),
    ("split without deltas", GOOD, {"flags": 1, "span": 2}, Fault.COLUMNS),
    (
        "deltas over the span",
        {**GOOD, BufferId.OFFSET_DELTA: struct.pack("<2I", 1, 9)},
        {"flags": 1, "span": 9},
        Fault.DELTAS,
    ),
    (
        "deltas that stand still",
        {**GOOD, BufferId.OFFSET_DELTA: struct.pack("<2I", 3, 3)},
        {"flags": 1, "span": 9},
        Fault.DELTAS,
    ),
]


@pytest.mark.parametrize(("name", "buffers", "options", "fault"), CASES)
def test_lies_in_the_body(
    name: str, buffers: Buffers, options: dict[str, Any], fault: Fault
) -> None:
    frame = build(buffers, **options)
    assert verdict(frame, flags=Flag.SPLIT) == fault, name
    with pytest.raises(DataLoss, match=fault.name):
        FrameView(frame).check()


def test_directory_that_does_not_fill_the_body() -> None:
    for buffers, at, value in ((GOOD, 128, 3), (GOOD, 128, 1), (GOOD, 128, 99), (GOOD, 132, 1)):
        frame = build(buffers)
        struct.pack_into("<I", frame, at, value)
        assert check_frame(address_of(frame), len(frame), 0, 0) < 0
    frame = build(GOOD)
    frame += bytes(8)
    struct.pack_into("<I", frame, layout.At.FRAME_BYTES, len(frame))
    struct.pack_into("<I", frame, layout.At.RAW_BODY_BYTES, len(frame) - 128)
    assert check_frame(address_of(frame), len(frame), 0, 0) == Fault.DIRECTORY


HEADER_LIES = [
    (layout.At.MAGIC, "<I", 0, Fault.MAGIC),
    (layout.At.VERSION, "<B", 2, Fault.VERSION),
    (layout.At.CODEC, "<B", 3, Fault.CODEC),
    (layout.At.FLAGS, "<H", 8, Fault.FLAGS),
    (layout.At.FLAGS, "<H", 2, Fault.FLAGS),
    (layout.At.FRAME_BYTES, "<I", 120, Fault.FRAME_BYTES),
    (layout.At.FRAME_BYTES, "<I", 132, Fault.FRAME_BYTES),
    (layout.At.FRAME_BYTES, "<I", 0xFFFF_FFF8, Fault.TRUNCATED),
    (layout.At.RAW_BODY_BYTES, "<I", 8, Fault.RAW_BODY_BYTES),
    (layout.At.BODY_PADDING, "<B", 1, Fault.BODY_PADDING),
    (layout.At.RESERVED_A, "<B", 1, Fault.RESERVED),
    (layout.At.RESERVED_A + 4, "<B", 1, Fault.RESERVED),
    (layout.At.BASE_SEQUENCE, "<Q", 1 << 62, Fault.SEQUENCE),
    (layout.At.BASE_SEQUENCE, "<Q", (1 << 64) - 1, Fault.SEQUENCE),
    (layout.At.BODY_CRC32C, "<I", 1, Fault.BODY_CRC),
    (layout.At.PRODUCER_ID, "<Q", 5, Fault.BODY_CRC),
]


@pytest.mark.parametrize(("at", "kind", "value", "fault"), HEADER_LIES)
def test_lies_in_the_header(at: int, kind: str, value: int, fault: Fault) -> None:
    frame = build(GOOD)
    struct.pack_into(kind, frame, at, value)
    assert verdict(frame, flags=Flag.SPLIT) == fault


def test_fewer_bytes_than_the_frame() -> None:
    frame = build(GOOD)
    for available in (-1, 0, 127, 128, len(frame) - 1):
        assert verdict(frame, available=available) == Fault.TRUNCATED
    assert verdict(frame + bytes(100)) == len(frame)


def test_any_changed_byte_of_client_half_or_body_is_noticed() -> None:
    frame = stamped(encode_frame(**FULL))
    assert verdict(frame) == len(frame)
    for at in (*range(64), *range(128, len(frame))):
        frame[at] ^= 0x40
        assert verdict(frame) < 0, at
        frame[at] ^= 0x40


def test_any_changed_byte_of_the_header_is_noticed() -> None:
    frame = stamped(encode_frame(**FULL))
    address = address_of(frame)
    assert check_header_crc(address) == 1
    for at in range(128):
        frame[at] ^= 1
        assert check_header_crc(address) == 0, at
        with pytest.raises(DataLoss):
            FrameView(frame).check(stamped=True)
        frame[at] ^= 1


def test_a_stamp_leaves_the_client_half_and_the_body_alone() -> None:
    frame = encode_frame(**FULL)
    before = bytes(frame)
    stamp(address_of(frame), 1, 2, 3, 4, 5, 6, 7, 8)
    assert (frame[:64], frame[128:]) == (before[:64], before[128:])
    view = FrameView(frame)
    names = ("log_id", "log_position", "base_offset", "append_time_ns", "synced_position")
    names += ("partition_id", "epoch", "offset_span")
    assert [getattr(view, name) for name in names] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_flags_must_be_allowed() -> None:
    frame = build(GOOD, flags=Flag.CONTROL)
    assert verdict(frame) == Fault.FLAGS
    assert verdict(frame, flags=Flag.SPLIT) == Fault.FLAGS
    assert verdict(frame, flags=Flag.CONTROL | Flag.PAD) == len(frame)


def test_a_pad_frame_has_no_body() -> None:
    frame = bytearray(b"\xee" * 4096)
    write_pad(address_of(frame), 4096)
    stamped(frame, span=0)
    assert verdict(frame) == Fault.FLAGS
    assert verdict(frame, flags=Flag.PAD) == 4096
    assert frame[128:] == b"\xee" * (4096 - 128)
    view = FrameView(frame)
    view.check(stamped=True)
    assert view.payloads() == [] and view.keys() is None and view.offsets().size == 0
    struct.pack_into("<I", frame, layout.At.MESSAGE_COUNT, 1)
    assert verdict(frame, flags=Flag.PAD) == Fault.MESSAGE_COUNT


def test_a_compressed_frame_cannot_ask_for_more_than_the_limit() -> None:
    frame = encode_frame([b"a" * 5000], codec=Codec.ZSTD)
    claim = layout.COMPRESSED_BODY_BYTES_MAX + 1
    struct.pack_into("<I", frame, layout.At.RAW_BODY_BYTES, claim)
    assert check_frame(address_of(frame), len(frame), 0, 0) == Fault.RAW_BODY_BYTES


def test_every_fault_has_a_sentence() -> None:
    for fault in Fault:
        assert describe_fault(fault).startswith(f"{fault.name}: ")
    assert "unknown" in describe_fault(-99)
