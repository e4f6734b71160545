"""Bundles: round trip, every fault."""

from __future__ import annotations

import struct

import pytest

from danube_fast.errors import DataLoss, InvalidArgument
from danube_fast.frame.bundle import bundle_bytes, bundle_entries, read_bundle, sealed_bundle
from danube_fast.frame.check import Fault
from danube_fast.frame.kernel import address_of
from danube_fast.frame.pack import encode_frame
from danube_fast.frame.view import FrameView


def _frames() -> list[tuple[int, bytearray]]:
    return [
        (7, encode_frame([b"a"])),
        (0xFFFF_FFFF, encode_frame([b"b", b"c"])),
        (7, encode_frame([b"d"])),
    ]


def test_round_trip() -> None:
    frames = _frames()
    bundle = bytearray(sealed_bundle([(frames[0][0], memoryview(frames[0][1])), *frames[1:]]))
    assert len(bundle) == bundle_bytes([len(frame) for _, frame in frames])
    assert read_bundle(address_of(bundle), len(bundle)) == 3
    entries = bundle_entries(bundle)
    assert [entry[0] for entry in entries] == [7, 0xFFFF_FFFF, 7]
    for (_, frame), (_, place, size) in zip(frames, entries, strict=True):
        assert place % 8 == 0 and bundle[place : place + size] == frame
        FrameView(bundle, place).check()
    assert bundle_entries(memoryview(bytes(bundle))) == entries


@pytest.mark.parametrize(
    ("at", "value", "fault"),
    [
        (0, 0, Fault.BUNDLE_MAGIC),
        (4, 0, Fault.BUNDLE_FRAME_COUNT),
        (4, 4, Fault.BUNDLE_SUM),
        (4, 2, Fault.BUNDLE_SUM),
        (4, 0xFFFF_FFFF, Fault.BUNDLE_FRAME_COUNT),
        (12, 0, Fault.BUNDLE_FRAME_BYTES),
        (12, 120, Fault.BUNDLE_FRAME_BYTES),
        (12, 129, Fault.BUNDLE_FRAME_BYTES),
        (12, 128, Fault.BUNDLE_SUM),
        (12, 0xFFFF_FFF8, Fault.BUNDLE_SUM),
    ],
)
def test_lies(at: int, value: int, fault: Fault) -> None:
    bundle = bytearray(sealed_bundle(_frames()))
    struct.pack_into("<I", bundle, at, value)
    result = read_bundle(address_of(bundle), len(bundle))
    if (at, value) == (4, 4):
        assert result < 0  # the fourth entry is read from the first frame's bytes
        return
    assert result == fault
    with pytest.raises(DataLoss, match=fault.name):
        bundle_entries(bundle)


def test_every_shorter_or_longer_length() -> None:
    bundle = bytearray(sealed_bundle(_frames()))
    for length in range(len(bundle)):
        part = bundle[:length] or bytearray(1)
        assert read_bundle(address_of(part), length) < 0
        with pytest.raises(DataLoss):
            bundle_entries(bundle[:length])
    assert read_bundle(address_of(bundle + bytes(8)), len(bundle) + 8) == Fault.BUNDLE_SUM


def test_what_is_not_a_frame_cannot_be_bundled() -> None:
    with pytest.raises(InvalidArgument, match="at least one frame"):
        sealed_bundle([])
    with pytest.raises(InvalidArgument, match="item 1 of the bundle is 129 bytes"):
        sealed_bundle([_frames()[0], (1, bytes(129))])
