"""Runs, the index entries of frames, made of the admission results."""

from __future__ import annotations

import numpy as np

from danube_fast.broker.admission.layout import (
    PARTITION_WORDS,
    RESULT_WORDS,
    WORD_BYTES,
    PartitionWord,
    ResultWord,
    StateWord,
)
from danube_fast.broker.admission.tables import AdmissionTables
from danube_fast.frame.kernel import address_of, direct, kernel
from danube_fast.frame.memory import load_word, store_u32, store_u64
from danube_fast.wal.index import Runs
from danube_fast.wal.layout import RUN_DTYPE

__all__ = ["make_runs"]

_AT = {name: place[1] for name, place in (RUN_DTYPE.fields or {}).items()}
_RUN_BYTES = RUN_DTYPE.itemsize
_AT_PARTITION, _AT_RESERVED = _AT["partition_id"], _AT["reserved"]
_AT_OFFSET, _AT_SPAN = _AT["base_offset"], _AT["offset_span"]
_AT_POSITION, _AT_BYTES, _AT_TIME = _AT["position"], _AT["byte_count"], _AT["append_time_ns"]


@kernel("int64(int64,int64,int64,int64,int64)")
def _make_runs(state: int, log_slot: int, first: int, stop: int, target: int) -> int:
    """Write runs of the rows [first, stop) that were accepted for that log to `target`; their count."""
    partitions, results = (
        load_word(state, StateWord.PARTITIONS),
        load_word(state, StateWord.RESULTS),
    )
    count = 0
    for index in range(first, stop):
        row = results + index * RESULT_WORDS * WORD_BYTES
        if load_word(row, ResultWord.STATUS) != 0 or load_word(row, ResultWord.LOG_POSITION) < 0:
            continue
        partition = (
            partitions + load_word(row, ResultWord.PARTITION_SLOT) * PARTITION_WORDS * WORD_BYTES
        )
        if load_word(partition, PartitionWord.LOG_SLOT) != log_slot:
            continue
        run = target + count * _RUN_BYTES
        store_u64(run + _AT_OFFSET, load_word(row, ResultWord.BASE_OFFSET))
        store_u64(run + _AT_POSITION, load_word(row, ResultWord.LOG_POSITION))
        store_u64(run + _AT_TIME, load_word(row, ResultWord.APPEND_TIME_NS))
        store_u32(run + _AT_PARTITION, load_word(partition, PartitionWord.PARTITION_ID))
        store_u32(run + _AT_SPAN, load_word(row, ResultWord.MESSAGE_COUNT))
        store_u32(run + _AT_BYTES, load_word(row, ResultWord.FRAME_BYTES))
        store_u32(run + _AT_RESERVED, 0)
        count += 1
    return count


_make = direct(_make_runs)


def make_runs(tables: AdmissionTables, log_slot: int, first: int, stop: int) -> Runs:
    """Make the runs of the frames in result rows [first, stop) that go to that log, in their order."""
    runs = np.empty(stop - first, RUN_DTYPE)
    count = _make(tables.address, log_slot, first, stop, address_of(runs))
    return runs[:count] if count < stop - first else runs
