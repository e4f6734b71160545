"""Arrow: the batch shares the frame's memory, holds the same values, and survives bad text."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from danube_fast.frame.kernel import address_of
from danube_fast.frame.layout import BufferId, Codec
from danube_fast.frame.pack import encode_frame
from danube_fast.frame.split import split_frame
from danube_fast.frame.stamp import write_pad
from danube_fast.frame.view import FrameView
from tests.frame.samples import FULL, rows_of, stamped
from tests.frame.test_check import ATTRIBUTES, GOOD, build

arrow = pytest.importorskip("pyarrow")
from danube_fast.frame.arrow import batch_schema, to_record_batch  # noqa: E402

ROOT = Path(__file__).parents[2]


def _values(batch: Any) -> dict[str, Any]:
    """Columns as Python values, times as int."""
    columns = {name: batch.column(name) for name in batch.schema.names}
    for name in ("publish_time", "event_time", "deliver_at"):
        columns[name] = columns[name].cast(arrow.int64())
    return {name: column.to_pylist() for name, column in columns.items()}


def test_values_are_those_of_the_view() -> None:
    source = stamped(encode_frame(**FULL))
    split = split_frame(FrameView(source), np.array([1, 3], np.int32), np.array([4, 5], np.uint32))
    for frame in (source, split, stamped(encode_frame(**FULL, codec=Codec.ZSTD))):
        view = FrameView(frame)
        batch = to_record_batch(view)
        batch.validate(full=True)
        assert batch.schema.equals(batch_schema())
        rows, values = rows_of(view), _values(batch)
        assert values["payload"] == rows["payloads"] and values["key"] == rows["keys"]
        assert [dict(pairs) for pairs in values["attributes"]] == rows["attributes"]
        assert values["event_time"] == rows["event_times"]
        assert values["deliver_at"] == rows["deliver_at"]
        assert values["offset"] == rows["offsets"] and values["sequence"] == rows["sequences"]
        assert set(values["publish_time"]) == {FULL["publish_time_ns"]}
        counts = rows["redelivery_counts"] or [None] * view.message_count
        assert values["redelivery_count"] == counts


def test_missing_columns_are_null() -> None:
    values = _values(to_record_batch(FrameView(encode_frame([b"a", b"b"]))))
    for name in ("key", "attributes", "event_time", "deliver_at", "redelivery_count"):
        assert values[name] == [None, None]


def test_an_aligned_frame_is_not_copied() -> None:
    memory = np.zeros(4096, dtype=np.uint64).view(np.uint8)
    frame = stamped(encode_frame(**FULL))
    memory[: len(frame)] = np.frombuffer(frame, np.uint8)
    view = FrameView(memory)
    body = view.address + 128
    batch = to_record_batch(view)
    shared = {
        "payload": [BufferId.PAYLOAD_VALIDITY, BufferId.PAYLOAD_OFFSETS, BufferId.PAYLOAD_DATA],
        "key": [BufferId.KEY_VALIDITY, BufferId.KEY_OFFSETS, BufferId.KEY_DATA],
        "event_time": [BufferId.EVENT_TIME_VALIDITY, BufferId.EVENT_TIME],
        "deliver_at": [None, BufferId.DELIVER_AT],
        "attributes": [
            None, BufferId.ATTRIBUTE_OFFSETS, None, None, BufferId.ATTRIBUTE_KEY_OFFSETS,
            BufferId.ATTRIBUTE_KEY_DATA, None, BufferId.ATTRIBUTE_VALUE_OFFSETS,
            BufferId.ATTRIBUTE_VALUE_DATA,
        ],
    }  # fmt: skip
    for name, buffer_ids in shared.items():
        found = [buffer and buffer.address for buffer in batch.column(name).buffers()]
        wanted = [None if i is None else body + view.place(i) for i in buffer_ids]
        assert found == wanted, name


def test_an_unaligned_frame_is_copied_once_and_right() -> None:
    frame = bytes(stamped(encode_frame(**FULL)))
    expected = _values(to_record_batch(FrameView(frame)))
    for shift in range(1, 9):
        memory = np.zeros(1 << 12, dtype=np.uint8)
        memory[shift : shift + len(frame)] = np.frombuffer(frame, np.uint8)
        batch = to_record_batch(FrameView(memory, shift))
        for name in ("payload", "key", "event_time"):
            for buffer in batch.column(name).buffers():
                assert buffer is None or buffer.address % 8 == 0
        assert _values(batch) == expected


def test_the_batch_keeps_the_memory() -> None:
    batches = [to_record_batch(FrameView(encode_frame(**FULL, codec=codec))) for codec in (0, 1, 2)]
    gc.collect()
    rubbish = [bytes(600) for _ in range(1000)]
    assert all(batch.column("payload").to_pylist() == FULL["payloads"] for batch in batches)
    assert rubbish


def test_bad_text_is_replaced() -> None:
    bad = {**ATTRIBUTES, BufferId.ATTRIBUTE_VALUE_DATA: b"\xff\xfe"}
    batch = to_record_batch(FrameView(build({**GOOD, **bad})))
    batch.validate(full=True)
    assert batch.column("attributes").to_pylist() == [[("a", "��")], []]


def test_a_pad_frame_is_an_empty_batch() -> None:
    frame = bytearray(256)
    write_pad(address_of(frame), 256)
    batch = to_record_batch(FrameView(frame))
    assert batch.num_rows == 0 and batch.schema.equals(batch_schema())


def test_without_pyarrow_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from danube_fast.frame.arrow import batch_schema\n"
        "try:\n    batch_schema()\nexcept ImportError as error:\n    print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert "danube-fast[arrow]" in result.stdout, result.stderr
