"""The formats, pinned: these bytes must be written and read for ever.

The files under golden/ were made by `python -m tests.frame.test_golden` (it overwrites nothing).
A change here is a change of the format: it needs a version bump and a migration. Files named
`-before-delayed` are from before clients set flag DELAYED: they must be read for ever too.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from danube_fast.frame.bundle import bundle_entries, sealed_bundle
from danube_fast.frame.kernel import address_of
from danube_fast.frame.layout import Codec
from danube_fast.frame.pack import encode_frame
from danube_fast.frame.split import split_frame
from danube_fast.frame.stamp import write_pad
from danube_fast.frame.view import FrameView
from tests.frame.samples import FULL, rows_of, stamped

GOLDEN = Path(__file__).parent / "golden"
COMPRESSED = ("lz4", "zstd")  # other versions of the compressors may write other bytes


def make() -> dict[str, bytes]:
    """Every golden file, made now."""
    full = stamped(encode_frame(**FULL))
    rows = np.array([1, 3, 4], dtype=np.int32)
    split = split_frame(FrameView(full), rows, np.array([1, 2, 0], dtype=np.uint32))
    pad = bytearray(512)
    write_pad(address_of(pad), 512)
    stamped(pad, span=0)
    one = encode_frame([b"hello"], producer_id=1, publish_time_ns=2)
    columns: dict[str, Any] = {**FULL, "payloads": [b"a" * 200] * 5}
    return {
        "one": bytes(one),
        "payloads": bytes(
            stamped(encode_frame([random.Random(1).randbytes(n) for n in range(50)]))
        ),
        "full": bytes(full),
        "split": bytes(split),
        "pad": bytes(pad),
        "lz4": bytes(stamped(encode_frame(**columns, codec=Codec.LZ4))),
        "zstd": bytes(stamped(encode_frame(**columns, codec=Codec.ZSTD))),
        "bundle": sealed_bundle([(3, one), (4, full), (3, split)]),
    }


def _readable(frame: bytes) -> dict[str, Any]:
    """Rows of a frame as JSON can hold them."""
    rows = rows_of(FrameView(frame))
    for name in ("payloads", "keys"):
        if rows[name] is not None:
            rows[name] = [None if item is None else item.hex() for item in rows[name]]
    return rows


@pytest.mark.parametrize("name", sorted(make()))
def test_written_as_ever(name: str) -> None:
    if name not in COMPRESSED:
        assert make()[name] == (GOLDEN / f"{name}.bin").read_bytes()


@pytest.mark.parametrize("name", sorted(set(make()) - {"bundle"}))
def test_read_as_ever(name: str) -> None:
    frame = (GOLDEN / f"{name}.bin").read_bytes()
    FrameView(frame).check(stamped=name != "one")
    assert _readable(frame) == json.loads((GOLDEN / "rows.json").read_text())[name]


@pytest.mark.parametrize("name", ["full", "split", "lz4", "zstd"])
def test_read_from_before_a_flag_said_that_messages_wait(name: str) -> None:
    frame = (GOLDEN / f"{name}-before-delayed.bin").read_bytes()
    FrameView(frame).check(stamped=True)
    rows = json.loads((GOLDEN / "rows-before-delayed.json").read_text())[name]
    assert _readable(frame) == rows


@pytest.mark.parametrize("when", ["", "-before-delayed"])
def test_the_bundle_as_ever(when: str) -> None:
    bundle = (GOLDEN / f"bundle{when}.bin").read_bytes()
    frames = [bundle[place : place + size] for _, place, size in bundle_entries(bundle)]
    names = ("one", f"full{when}", f"split{when}")
    assert frames == [(GOLDEN / f"{name}.bin").read_bytes() for name in names]


def test_one_message_byte_for_byte() -> None:
    """Written out, for whoever implements the format: 168 bytes for `hello`."""
    header = (
        "44465246 01 00 0000 a8000000 01000000 28000000 e7aea287"
        "0100000000000000 0000000000000000 0200000000000000 00000000 00000000 0000 00 0000000000"
        + "00"
        * 64
    )
    body = (
        "02000000 00000000  0200 0000 08000000  0300 0000 05000000"
        "00000000 05000000  68656c6c6f 000000"
    )
    frame = make()["one"]
    assert frame == bytes.fromhex((header + body).replace(" ", ""))


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, content in make().items():
        if (GOLDEN / f"{name}.bin").exists():
            continue
        with (GOLDEN / f"{name}.bin").open("xb") as file:
            file.write(content)
    values = {name: _readable(frame) for name, frame in make().items() if name != "bundle"}
    with (GOLDEN / "rows.json").open("x") as file:
        json.dump(values, file, indent=1)
