"""Cost of a message in the codec: packed, sealed, checked, unpacked, split. 100 B, one core.

Every function verifies what came out. `ns_per_message` stands in the extra info of the report.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from danube_fast.frame.check import check_frame
from danube_fast.frame.columns import Columns
from danube_fast.frame.kernel import address_of, direct
from danube_fast.frame.layout import FRAME_BYTES_CAP
from danube_fast.frame.pack import pack_columns_into, pack_into
from danube_fast.frame.split import split_frame
from danube_fast.frame.stamp import seal, stamp
from danube_fast.frame.view import FrameView

MESSAGE_BYTES = 100

_seal = direct(seal)
_stamp = direct(stamp)
_check_frame = direct(check_frame)


class _Sample:
    """Messages and memory for one frame of them."""

    def __init__(self, count: int) -> None:
        chance = random.Random(1)
        self.payloads = [chance.randbytes(MESSAGE_BYTES) for _ in range(count)]
        self.memory = bytearray(2 * FRAME_BYTES_CAP)
        self.address = address_of(self.memory)
        self.count = count

    def pack(self) -> FrameView:
        """A sealed and stamped frame of all messages."""
        frame_bytes, count = pack_into(self.address, len(self.memory), self.payloads)
        assert count == self.count
        _seal(self.address, 1, 0, 0, 0, 0, 0)
        _stamp(self.address, 1, 0, 0, 0, 0, 1, 1, count)
        return FrameView(memoryview(self.memory)[:frame_bytes])


@pytest.fixture
def sample(full_size: bool) -> _Sample:
    return _Sample(2000 if full_size else 50)


def _measure(benchmark: Any, sample: _Sample, call: Callable[[], Any]) -> Any:
    """Run `call` and note what it costs for each message."""
    result = benchmark(call)
    if benchmark.stats:
        nanoseconds = benchmark.stats.stats.min * 1e9 / sample.count
        benchmark.extra_info["ns_per_message"] = round(nanoseconds, 2)
    return result


def test_pack(benchmark: Any, sample: _Sample) -> None:
    def run() -> tuple[int, int]:
        return pack_into(sample.address, len(sample.memory), sample.payloads)

    assert _measure(benchmark, sample, run)[1] == sample.count
    assert FrameView(sample.memory).payloads() == sample.payloads


def test_pack_and_seal(benchmark: Any, sample: _Sample) -> None:
    def run() -> None:
        pack_into(sample.address, len(sample.memory), sample.payloads)
        _seal(sample.address, 1, 0, 0, 0, 0, 0)

    _measure(benchmark, sample, run)
    FrameView(sample.memory).check()


def test_pack_keys_attributes_and_times(benchmark: Any, sample: _Sample) -> None:
    columns = Columns(
        sample.payloads,
        keys=[b"key-%d" % (index % 50) for index in range(sample.count)],
        attributes=[{"a": "1"}] * sample.count,
        event_times=list(range(sample.count)),
    )

    def run() -> tuple[int, int]:
        return pack_columns_into(sample.address, len(sample.memory), columns)

    assert _measure(benchmark, sample, run)[1] == sample.count
    view = FrameView(sample.memory)
    assert view.keys() == columns.keys
    assert view.attributes() == [{"a": "1"}] * sample.count


def test_check(benchmark: Any, sample: _Sample) -> None:
    view = sample.pack()

    def run() -> int:
        result: int = _check_frame(sample.address, len(sample.memory), 0, 1)
        return result

    assert _measure(benchmark, sample, run) == view.frame_bytes


def test_unpack(benchmark: Any, sample: _Sample) -> None:
    view = sample.pack()
    kept: list[Any] = [None]

    def run() -> None:
        kept[0] = FrameView(view.memory).payloads()  # the list before it is freed here, too

    _measure(benchmark, sample, run)
    assert kept[0] == sample.payloads


def test_split_every_other(benchmark: Any, sample: _Sample) -> None:
    view = sample.pack()
    rows = np.arange(0, sample.count, 2, dtype=np.int32)
    frame = _measure(benchmark, sample, lambda: split_frame(view, rows))
    part = FrameView(frame)
    part.check(stamped=True)
    assert part.payloads() == sample.payloads[::2]
