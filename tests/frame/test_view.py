"""Reading: windows, addresses, lies of compressed bodies, and the plain way of doing it."""

from __future__ import annotations

import os
import resource
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from danube_fast.errors import DataLoss
from danube_fast.frame import layout
from danube_fast.frame import view as view_module
from danube_fast.frame.kernel import address_of
from danube_fast.frame.layout import HEADER_BYTES, Codec
from danube_fast.frame.pack import encode_frame
from danube_fast.frame.stamp import reseal
from danube_fast.frame.view import FrameView
from tests.frame.samples import FULL, rows_of, stamped
from tests.frame.test_check import ATTRIBUTES, GOOD, build

ROOT = Path(__file__).parents[2]


def test_windows_are_slices() -> None:
    view = FrameView(encode_frame(**FULL))
    columns = (view.payloads, view.keys, view.attributes, view.event_times, view.deliver_at)
    for read in columns:
        whole = read()
        assert whole is not None and len(whole) == 5
        for start in (-2, 0, 1, 4, 5, 9):
            for stop in (None, -1, 0, 2, 5, 9):
                assert read(start, stop) == whole[start:stop], (read, start, stop)


def test_absent_columns_are_none() -> None:
    view = FrameView(encode_frame([b"a"]))
    assert view.keys() is None and view.key_hashes() is None and view.attributes() is None
    assert view.event_times() is None and view.deliver_at() is None
    assert view.redelivery_counts() is None


@pytest.mark.parametrize("plain", [False, True])
def test_payloads_of_several_frames_in_one_list(
    monkeypatch: pytest.MonkeyPatch, plain: bool
) -> None:
    if plain:
        monkeypatch.setattr(view_module, "OBJECTS_READABLE", False)
    first, second = (
        FrameView(encode_frame([b"a", None, b"c"])),
        FrameView(encode_frame([b"d", b""])),
    )
    items: list[bytes | None] = [None] * 6
    first.fill_payloads(items, 0, 0, 3)
    second.fill_payloads(items, 3, 0, 2)
    first.fill_payloads(items, 5, 2, 9)
    assert items == [b"a", None, b"c", b"d", b"", b"c"]
    with pytest.raises(IndexError, match="too short"):
        second.fill_payloads(items, 5, 0, 2)
    assert items == [b"a", None, b"c", b"d", b"", b"c"]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4, Codec.ZSTD])
@pytest.mark.parametrize("payloads", [
    [b"a"], [None], [b""], [b"x" * 1000], [bytes(100_000)], [b"first", None, b""], [None, b"second"],
])  # fmt: skip
def test_the_first_payload_alone(
    monkeypatch: pytest.MonkeyPatch, payloads: list[bytes | None], codec: Codec, plain: bool
) -> None:
    if plain:
        monkeypatch.setattr(view_module, "OBJECTS_READABLE", False)
    count = len(payloads)
    columns = [
        {},
        {"keys": [b"k"] * count, "attributes": [{"a": "b"}] * count},
        {"event_times": [7] * count, "deliver_at": [9] * count},
    ]
    for each in columns:
        frame = stamped(encode_frame(payloads, codec=codec, **each))
        fresh, used = FrameView(frame), FrameView(frame)
        assert used.payloads(0, 1) == [payloads[0]]
        for view in (fresh, used):
            assert view.first_payload() == view.payloads(0, 1)[0] == payloads[0]


def test_first_payloads_leave_as_many_references_to_none_as_before() -> None:
    for payload in (b"some", None, b""):
        view = FrameView(encode_frame([payload]))
        view.first_payload()
        before = sys.getrefcount(None)
        for _ in range(2000):
            view.first_payload()
        assert abs(sys.getrefcount(None) - before) < 100, payload


def test_the_first_payload_of_a_damaged_frame_raises() -> None:
    frame = encode_frame([b"x" * 1000], codec=Codec.LZ4)
    frame[HEADER_BYTES + 2] ^= 0xFF
    with pytest.raises(DataLoss):
        FrameView(frame).first_payload()


def test_unpacking_leaves_as_many_references_to_none_as_before() -> None:
    view = FrameView(encode_frame([b"a", None, b"c"] * 100))
    assert view.payloads() == [b"a", None, b"c"] * 100
    before = sys.getrefcount(None)
    for _ in range(100):
        view.payloads()
    assert abs(sys.getrefcount(None) - before) < 100, "a list has 100 times None, replaced 200"


def test_the_memory_of_batches_is_used_again() -> None:
    view = FrameView(encode_frame([bytes(100)] * 2300))
    turns, batches = 40, 20

    def turn() -> None:
        assert len([view.payloads() for _ in range(batches)]) == batches

    def faults() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    for _ in range(turns):
        turn()
    before = faults()
    for _ in range(turns):
        turn()
    # 2,300 objects of 144 B are 80 pages: without anchors each turn faults most of them in again
    assert faults() - before < 10 * batches * turns
    kept = len(view_module._anchors._kept)
    assert 0 < kept <= 32
    big = FrameView(encode_frame([bytes(100_000)] * 2))
    for _ in range(turns):
        big.payloads()
    assert all(len(each) == 100 for each in list(view_module._anchors._kept)), (
        "large ones are not kept"
    )


def test_any_address_and_any_buffer_type() -> None:
    frame = bytes(stamped(encode_frame(**FULL)))
    expected = rows_of(FrameView(frame))
    for shift in range(9):
        view = FrameView(bytes(shift) + frame + b"behind", shift)
        view.check(stamped=True)
        assert rows_of(view) == expected and bytes(view.frame) == frame
    for buffer in (bytearray(frame), memoryview(frame), np.frombuffer(frame, np.uint8),
                   np.frombuffer(frame, np.int64), memoryview(frame).cast("I")):  # fmt: skip
        assert rows_of(FrameView(buffer)) == expected


def test_a_view_keeps_its_buffer() -> None:
    view = FrameView(encode_frame(**FULL, codec=Codec.LZ4))
    assert view.payloads() == view.payloads() == FULL["payloads"]


def test_less_than_a_header() -> None:
    for buffer, offset in ((b"", 0), (bytes(127), 0), (bytes(200), 73), (bytes(200), -1)):
        with pytest.raises(DataLoss, match="header"):
            FrameView(buffer, offset)


def test_columns_of_an_unsound_frame_raise() -> None:
    frame = build(GOOD, count=3)
    with pytest.raises(DataLoss, match="BUFFER_BYTES"):
        FrameView(frame).payloads()
    with pytest.raises(DataLoss, match="BUFFER_BYTES"):
        FrameView(frame).offsets()


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
def test_lies_of_a_compressed_body(codec: Codec) -> None:
    frame = encode_frame([b"a" * 5000, b"b" * 5000], codec=codec)
    true = FrameView(frame).raw_body_bytes
    for claim in (0, 8, true - 8, true + 8, true * 2, layout.COMPRESSED_BODY_BYTES_MAX):
        changed = bytearray(frame)
        struct.pack_into("<I", changed, layout.At.RAW_BODY_BYTES, claim)
        reseal(address_of(changed))
        with pytest.raises(DataLoss):
            FrameView(changed).payloads()
    for count in (1, 3, 0xFFFF_FFFF):
        changed = bytearray(frame)
        struct.pack_into("<I", changed, layout.At.MESSAGE_COUNT, count)
        with pytest.raises(DataLoss, match=r"BUFFER_BYTES|MESSAGE_COUNT"):
            FrameView(changed).payloads()
    for at in range(HEADER_BYTES, len(frame)):
        changed = bytearray(frame)
        changed[at] ^= 0xFF
        with pytest.raises(DataLoss, match="BODY_CRC"):
            FrameView(changed).check()


def test_attributes_that_are_not_utf8_do_not_stop_a_reader() -> None:
    bad = {**ATTRIBUTES, layout.BufferId.ATTRIBUTE_VALUE_DATA: b"\xff\xfe"}
    assert FrameView(build({**GOOD, **bad})).attributes() == [{"a": "��"}, {}]


def test_base_offset_beyond_the_limit() -> None:
    frame = stamped(encode_frame([b"a"]))
    struct.pack_into("<Q", frame, layout.At.BASE_OFFSET, (1 << 64) - 1)
    with pytest.raises(DataLoss, match="base_offset"):
        FrameView(frame).offsets()


def test_the_plain_way_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [stamped(encode_frame(**FULL, codec=codec)) for codec in Codec]
    fast = [rows_of(FrameView(frame)) for frame in frames]
    parts = [FrameView(frame).payloads(1, 4) for frame in frames]
    monkeypatch.setattr(view_module, "OBJECTS_READABLE", False)
    assert [rows_of(FrameView(frame)) for frame in frames] == fast
    assert [FrameView(frame).payloads(1, 4) for frame in frames] == parts


def test_everything_in_a_process_without_readable_objects() -> None:
    """The fallback is chosen at import; this process imports with it forced."""
    code = (
        "from danube_fast.frame.cpython import OBJECTS_READABLE\n"
        "from tests.frame.samples import FULL, rows_of, stamped\n"
        "from danube_fast.frame.pack import encode_frame\n"
        "from danube_fast.frame.view import FrameView\n"
        "frame = stamped(encode_frame(**FULL))\n"
        "print(OBJECTS_READABLE, frame.hex(), rows_of(FrameView(frame)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "DANUBE_PLAIN_FRAMES": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    frame = stamped(encode_frame(**FULL))
    expected = f"False {frame.hex()} {rows_of(FrameView(frame))}\n"
    assert result.stdout == expected, result.stderr
