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
from danube_fast.frame.memory import load_i64, store_u32, store_u64
from danube_fast.wal.index import Runs
from danube_fast.wal.layout import RUN_DTYPE

__all__ = ["make_runs"]

_AT = {name: place[1] for name, place in (RUN_DTYPE.fields or {}).items()}
_RUN_BYTES = RUN_DTYPE.itemsize
_AT_PARTITION, _AT_RESERVED = _AT["partition_id"], _AT["reserved"]
_AT_OFFSET, _AT_SPAN = _AT["base_offset"], _AT["offset_span"]
_AT_POSITION, _AT_BYTES, _AT_TIME = _AT["position"], _AT["byte_count"], _AT["append_time_ns"]

_W = WORD_BYTES
_S_PARTITIONS, _S_RESULTS = int(StateWord.PARTITIONS) * _W, int(StateWord.RESULTS) * _W
_P_ID, _P_LOG, _P_ROW = int(PartitionWord.PARTITION_ID) * _W, int(PartitionWord.LOG_SLOT) * _W, PARTITION_WORDS * _W  # fmt: skip
_R_STATUS, _R_SLOT = int(ResultWord.STATUS) * _W, int(ResultWord.PARTITION_SLOT) * _W
_R_OFFSET, _R_COUNT = int(ResultWord.BASE_OFFSET) * _W, int(ResultWord.MESSAGE_COUNT) * _W
_R_BYTES, _R_POSITION = int(ResultWord.FRAME_BYTES) * _W, int(ResultWord.LOG_POSITION) * _W
_R_TIME, _R_ROW = int(ResultWord.APPEND_TIME_NS) * _W, RESULT_WORDS * _W


@kernel("int64(int64,int64,int64,int64,int64)")
def _make_runs(state: int, log_slot: int, first: int, stop: int, target: int) -> int:
    """Write runs of the rows [first, stop) that were accepted for that log to `target`; their count."""
    partitions, results = load_i64(state + _S_PARTITIONS), load_i64(state + _S_RESULTS)
    count = 0
    for index in range(first, stop):
        row = results + index * _R_ROW
        if load_i64(row + _R_STATUS) != 0 or load_i64(row + _R_POSITION) < 0:
            continue
        partition = partitions + load_i64(row + _R_SLOT) * _P_ROW
        if load_i64(partition + _P_LOG) != log_slot:
            continue
        run = target + count * _RUN_BYTES
        store_u64(run + _AT_OFFSET, load_i64(row + _R_OFFSET))
        store_u64(run + _AT_POSITION, load_i64(row + _R_POSITION))
        store_u64(run + _AT_TIME, load_i64(row + _R_TIME))
        store_u32(run + _AT_PARTITION, load_i64(partition + _P_ID))
        store_u32(run + _AT_SPAN, load_i64(row + _R_COUNT))
        store_u32(run + _AT_BYTES, load_i64(row + _R_BYTES))
        store_u32(run + _AT_RESERVED, 0)
        count += 1
    return count


_make = direct(_make_runs)


def make_runs(tables: AdmissionTables, log_slot: int, first: int, stop: int) -> Runs:
    """Make the runs of the frames in result rows [first, stop) that go to that log, in their order."""
    runs = np.empty(stop - first, RUN_DTYPE)
    count = _make(tables.address, log_slot, first, stop, address_of(runs))
    return runs[:count] if count < stop - first else runs
