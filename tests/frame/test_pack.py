"""Packing: what fits, what is refused, and that kernels and plain Python write the same bytes."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube_fast.errors import InvalidArgument
from danube_fast.frame.check import check_frame
from danube_fast.frame.columns import Columns, OneMessage
from danube_fast.frame.cpython import OBJECTS_READABLE
from danube_fast.frame.kernel import address_of
from danube_fast.frame.layout import CLIENT_FLAGS, HEADER_BYTES, Codec
from danube_fast.frame.pack import encode_frame, pack_columns_into, pack_into
from danube_fast.frame.plain import plain_pack
from danube_fast.frame.stamp import seal
from danube_fast.frame.view import FrameView
from tests.frame.samples import FULL, random_columns, rows_of

SMALL_PAYLOADS = [b"x" * size for size in range(40)] + [None, b"", b"last"]


def _packed(columns: Columns, capacity: int, start: int) -> tuple[bytes, int, int]:
    """What `pack_columns_into` writes into memory full of rubbish, and not a byte behind it."""
    memory = bytearray(b"\xa5" * (max(capacity, 0) + 64))
    needed, count = pack_columns_into(address_of(memory), capacity, columns, start)
    written = needed if count else 0
    assert memory[written:] == b"\xa5" * (len(memory) - written)
    return bytes(memory[:written]), count, needed


def test_kernels_are_in_use() -> None:
    assert OBJECTS_READABLE, "this interpreter's objects cannot be read; the rest tests plain code"


@given(st.integers(0, 2**32), st.integers(0, 3000), st.integers(0, 5))
@settings(max_examples=300, deadline=None)
def test_kernel_and_plain_are_identical(seed: int, capacity: int, start: int) -> None:
    columns = Columns(**random_columns(random.Random(seed)))
    start = min(start, columns.count - 1)
    assert _packed(columns, capacity, start) == plain_pack(columns, start, capacity)


@given(st.lists(st.one_of(st.none(), st.binary(max_size=60)), min_size=1, max_size=50))
@settings(deadline=None)
def test_payload_kernel_and_plain_are_identical_at_every_capacity(
    payloads: list[bytes | None],
) -> None:
    columns = Columns(payloads)
    for capacity in (*range(100, 260), 500, 4000):
        memory = bytearray(b"\xa5" * (capacity + 64))
        needed, count = pack_into(address_of(memory), capacity, payloads)
        written = needed if count else 0
        assert (bytes(memory[:written]), count, needed) == plain_pack(columns, 0, capacity)
        assert memory[written:] == b"\xa5" * (len(memory) - written)


def test_every_message_is_packed_once_whatever_the_capacity() -> None:
    for capacity in range(200, 600, 8):
        memory = bytearray(capacity)
        address = address_of(memory)
        start, seen = 0, []
        while start < len(SMALL_PAYLOADS):
            frame_bytes, count = pack_into(address, capacity, SMALL_PAYLOADS, start)
            assert count > 0 and frame_bytes <= capacity
            seal(address, 1, start, 2, 3, 4, 5)
            assert check_frame(address, capacity, CLIENT_FLAGS, 1) == frame_bytes
            seen += FrameView(memory).payloads()
            start += count
        assert seen == SMALL_PAYLOADS


def test_one_message_that_does_not_fit_says_what_it_needs() -> None:
    payloads = [b"y" * 1000, b"z"]
    memory = bytearray(2000)
    needed, count = pack_into(address_of(memory), 500, payloads)
    assert count == 0 and needed > 1000 and memory == bytes(2000)
    assert pack_into(address_of(memory), needed - 8, payloads) == (needed, 0)
    assert pack_into(address_of(memory), needed, payloads) == (needed, 1)
    columns = Columns(payloads, keys=[b"k", b"l"])
    needed, count = pack_columns_into(address_of(memory), 500, columns)
    assert count == 0
    assert pack_columns_into(address_of(memory), needed, columns) == (needed, 1)


def test_address_zero_only_measures() -> None:
    assert pack_into(0, 1 << 20, SMALL_PAYLOADS)[1] == len(SMALL_PAYLOADS)
    needed, count = pack_columns_into(0, 1 << 20, Columns(FULL["payloads"], keys=FULL["keys"]))
    assert (needed, count) == (len(encode_frame(FULL["payloads"], keys=FULL["keys"])), 5)


def test_round_trip_of_every_column_and_codec() -> None:
    for codec in Codec:
        view = FrameView(encode_frame(**FULL, codec=codec))
        view.check()
        rows = rows_of(view)
        assert rows["payloads"] == FULL["payloads"]
        assert rows["keys"] == FULL["keys"]
        assert rows["attributes"] == [pairs or {} for pairs in FULL["attributes"]]
        assert rows["event_times"] == FULL["event_times"]
        assert rows["deliver_at"] == FULL["deliver_at"]
        assert rows["sequences"] == [1000, 1001, 1002, 1003, 1004]
        header = ("producer_id", "publish_time_ns", "producer_epoch", "schema_id", "schema_version")
        for name in header:
            assert getattr(view, name) == FULL[name]


@given(st.integers(0, 2**32), st.sampled_from(list(Codec)))
@settings(max_examples=150, deadline=None)
def test_round_trip_of_random_columns(seed: int, codec: Codec) -> None:
    columns = random_columns(random.Random(seed))
    view = FrameView(encode_frame(**columns, codec=codec))
    view.check()
    assert view.payloads() == columns["payloads"]
    assert view.keys() == columns.get("keys")
    wanted = columns.get("attributes")
    assert view.attributes() == (None if wanted is None else [pairs or {} for pairs in wanted])
    assert view.event_times() == columns.get("event_times")
    assert view.deliver_at() == columns.get("deliver_at")


def test_no_validity_buffer_when_nothing_is_null() -> None:
    with_null = encode_frame([b"a", None])
    without = encode_frame([b"a", b""])
    assert len(with_null) == len(without) + 16
    assert FrameView(without).place(1) == 0


def test_times_as_an_array() -> None:
    times = np.array([3, 2, 1], dtype=np.int64)
    frame = encode_frame([b"a", b"b", b"c"], event_times=times, deliver_at=times[::-1])
    view = FrameView(frame)
    assert (view.event_times(), view.deliver_at()) == ([3, 2, 1], [1, 2, 3])


def test_incompressible_and_tiny_frames_stay_plain() -> None:
    noise = random.Random(1).randbytes(5000)
    for codec in (Codec.LZ4, Codec.ZSTD):
        assert FrameView(encode_frame([noise], codec=codec)).codec == Codec.NONE
        frame = encode_frame([b"a" * 5000], codec=codec)
        assert FrameView(frame).codec == codec and len(frame) < HEADER_BYTES + 200


class _Bytes(bytes):
    pass


def test_subclasses_of_bytes_and_other_sequences_are_taken() -> None:
    payloads = [_Bytes(b"sub"), np.bytes_(b"numpy"), b"plain", None]
    expected = [b"sub", b"numpy", b"plain", None]
    assert FrameView(encode_frame(payloads)).payloads() == expected
    assert FrameView(encode_frame(tuple(payloads), keys=payloads)).keys() == expected
    memory = bytearray(1000)
    assert pack_into(address_of(memory), 1000, payloads)[1] == 4
    assert FrameView(memory).payloads() == expected


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"payloads": [b"a", "b"]}, "payload 1 is str"),
        ({"payloads": [b"a", bytearray(b"b")]}, "payload 1 is bytearray"),
        ({"payloads": b"abc"}, "payloads are one bytes"),
        ({"payloads": []}, "at least one message"),
        ({"payloads": [b"a"], "keys": ["k"]}, "key 0 is str"),
        ({"payloads": [b"a"], "keys": []}, "keys has 0 entries for 1"),
        ({"payloads": [b"a"], "attributes": [{"a": 1}]}, "attributes 0 must map str to str"),
        ({"payloads": [b"a"], "attributes": [{"a": "\ud800"}]}, "attributes 0 must map"),
        ({"payloads": [b"a"], "attributes": ["ab"]}, "attributes 0 must map"),
        ({"payloads": [b"a"], "event_times": [1.5]}, "event_time 0 is float"),
        ({"payloads": [b"a"], "event_times": [True]}, "event_time 0 is bool"),
        ({"payloads": [b"a"], "deliver_at": [2**63]}, "below 2"),
        ({"payloads": [b"a"], "deliver_at": np.array([1.0])}, "int64"),
    ],
)
def test_what_cannot_be_packed(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        encode_frame(**arguments)


def test_pack_into_names_the_index_too() -> None:
    memory = bytearray(1000)
    with pytest.raises(InvalidArgument, match="payload 2 is int"):
        pack_into(address_of(memory), 1000, [b"a", b"b", 7])  # type: ignore[list-item]
    for start in (-1, 2):
        with pytest.raises(InvalidArgument, match="start"):
            pack_into(address_of(memory), 1000, [b"a", b"b"], start)


def test_a_list_that_changes_between_frames_is_noticed() -> None:
    payloads: list[Any] = [b"a", b"b"]
    keys: list[Any] = [b"k", b"l"]
    columns = Columns(payloads, keys=keys)
    payloads[1] = 5
    with pytest.raises(InvalidArgument, match="payload 1 is int"):
        pack_columns_into(0, 1000, columns)
    payloads[1] = b"b"
    keys.pop()
    with pytest.raises(InvalidArgument, match="changed"):
        pack_columns_into(0, 1000, columns)
    payloads.append(b"more than there are keys")
    keys.append(b"l")
    assert pack_columns_into(0, 1000, columns)[1] == 2


def test_reference_counts_are_left_alone() -> None:
    import gc
    import sys

    gc.collect()  # what other tests left would be counted too
    payload = b"counted" * 10
    before, none_before = sys.getrefcount(payload), sys.getrefcount(None)
    for _ in range(100):
        view = FrameView(encode_frame([payload, None], keys=[payload, None]))
        view.payloads(), view.keys()
    assert sys.getrefcount(payload) == before
    assert abs(sys.getrefcount(None) - none_before) < 50


def test_packing_at_any_address() -> None:
    memory = bytearray(4000)
    base = address_of(memory)
    expected = encode_frame(SMALL_PAYLOADS)
    for shift in range(9):
        ctypes.memset(base, 0xA5, len(memory))
        needed, count = pack_into(base + shift, 3000, SMALL_PAYLOADS)
        seal(base + shift, 0, 0, 0, 0, 0, 0)
        assert count == len(SMALL_PAYLOADS)
        assert memory[shift : shift + needed] == expected


@pytest.mark.parametrize("payload", [b"", b"payload", None])
def test_columns_that_hold_one_message_after_the_other(payload: bytes | None) -> None:
    held = OneMessage()
    fields: list[tuple[Any, ...]] = [
        (key, attributes, event_time, deliver_at)
        for key in (None, b"", b"key")
        for attributes in (None, {}, {"a": "b"}, {"zwei": "zw\u00f6lf", "": ""})
        for event_time in (None, -1)
        for deliver_at in (None, 7)
    ]
    for key, attributes, event_time, deliver_at in fields + fields[::-1]:
        made = Columns(
            [payload],
            keys=None if key is None else [key],
            attributes=[attributes] if attributes else None,
            event_times=None if event_time is None else [event_time],
            deliver_at=None if deliver_at is None else [deliver_at],
        )
        held.hold(payload, key, attributes, event_time, deliver_at)
        assert _packed(held, 4096, 0) == _packed(made, 4096, 0)
        assert _packed(held, 8, 0) == _packed(made, 8, 0)
