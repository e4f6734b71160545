"""Frames for the tests: fixed ones, and random ones from a seed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from danube_fast.frame.kernel import address_of
from danube_fast.frame.layout import Codec
from danube_fast.frame.pack import encode_frame
from danube_fast.frame.split import split_frame
from danube_fast.frame.stamp import stamp
from danube_fast.frame.view import FrameView

FULL: dict[str, Any] = {
    "payloads": [b"first", None, b"", b"fourth message", b"\x00\xff" * 20],
    "keys": [b"UA", None, b"", b"a key of more than thirty-two bytes, so", b"AA"],
    "attributes": [{"a": "1", "b": ""}, None, {}, {"straße": "日本"}, {"": "x"}],
    "event_times": [1_000_000_000, None, -1, 0, 2**62],
    "deliver_at": [1, 2, 3, 4, 5],
    "producer_id": 77,
    "base_sequence": 1000,
    "publish_time_ns": 1_700_000_000_123_456_789,
    "producer_epoch": 3,
    "schema_id": 9,
    "schema_version": 2,
}
COLUMNS = ("keys", "attributes", "event_times", "deliver_at")


def stamped(frame: bytearray, *, base_offset: int = 5000, span: int | None = None) -> bytearray:
    """The frame with a broker half."""
    count = FrameView(frame).message_count
    span = count if span is None else span
    stamp(address_of(frame), 11, 4096, base_offset, 1_700_000_001, 2048, 12, 4, span)
    return frame


def rows_of(view: FrameView) -> dict[str, Any]:
    """Every column of a frame as Python values."""
    counts = view.redelivery_counts()
    return {
        "payloads": view.payloads(),
        "keys": view.keys(),
        "attributes": view.attributes(),
        "event_times": view.event_times(),
        "deliver_at": view.deliver_at(),
        "offsets": view.offsets().tolist(),
        "sequences": view.sequences().tolist(),
        "redelivery_counts": None if counts is None else counts.tolist(),
    }


def _word(chance: random.Random, longest: int) -> bytes:
    return chance.randbytes(chance.randrange(longest + 1))


def random_columns(chance: random.Random) -> dict[str, Any]:
    """Arguments for `encode_frame`: any mixture of columns and nulls."""
    count = chance.choice((1, 1, 2, 3, 7, 8, 9, 30))
    nulls = chance.choice((0.0, 0.0, 0.3, 1.0))

    def maybe(value: Any) -> Any:
        return None if chance.random() < nulls else value

    columns: dict[str, Any] = {"payloads": [maybe(_word(chance, 40)) for _ in range(count)]}
    if chance.random() < 0.5:
        columns["keys"] = [maybe(_word(chance, 70)) for _ in range(count)]
    if chance.random() < 0.5:
        columns["attributes"] = [
            maybe({f"k{i}": "v" * chance.randrange(9) for i in range(chance.randrange(4))})
            for _ in range(count)
        ]
    for name in ("event_times", "deliver_at"):
        if chance.random() < 0.4:
            columns[name] = [maybe(chance.randrange(-(2**63), 2**63)) for _ in range(count)]
    return columns


def random_frame(chance: random.Random) -> bytearray:
    """A sound, stamped frame: plain, compressed or split."""
    codec = chance.choice((Codec.NONE, Codec.NONE, Codec.LZ4, Codec.ZSTD))
    frame = encode_frame(**random_columns(chance), base_sequence=chance.randrange(9), codec=codec)
    stamped(frame)
    view = FrameView(frame)
    if chance.random() < 0.3:
        taken = [row for row in range(view.message_count) if chance.random() < 0.6] or [0]
        counts = np.arange(len(taken), dtype=np.uint32) if chance.random() < 0.5 else None
        return split_frame(view, np.array(taken, dtype=np.int32), counts)
    return frame
