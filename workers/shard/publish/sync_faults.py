"""Repair after a failed sync (DESIGN 6): no unsynced message is acked, no acked message is lost.

    log:    ... synced | cut | os frames      control frames      fsync frames      | written
                              |               |                   +-> taken back, publishers get Internal
                              |               +-> recorded again with the next group
                              +-> open the new segment, same offsets, next epoch

Bytes behind the cut may or may not be on the disk, and a later sync that succeeds would prove nothing
about them: the kernel reports a failed write once. So the log goes on in a new segment. The
`os` frames are in it when it takes its place, in one step: SIGKILL at any moment loses none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import numpy as np

from danube_fast.errors import DanubeError, Internal
from danube_fast.frame.layout import CONTROL_PARTITION_ID, HEADER_DTYPE, Flag
from danube_fast.frame.view import FrameView
from danube_fast.workers.shard.state import ShardState

__all__ = ["repair_failed_sync"]

_log = logging.getLogger(__name__)

REPAIR_PAUSE_NS = 1_000_000_000


def repair_failed_sync(state: ShardState, slot: int) -> None:
    """Bring a log back to service, see the module's drawing; called every turn until it succeeds.

    No frame is taken meanwhile: the acked ones must come first. The log serves again once a sync of its
    new segment has succeeded; a disk on which none does is tried once a second.
    """
    log, journal = state.logs[slot], state.journals[slot]
    fault = log.sync_fault
    if fault is None:
        return
    reason = os.strerror(fault[0])
    journal.void_unsynced(
        Internal(
            f"the disk failed to make this durable ({reason}); it was not accepted: send it again, "
            "and check the disk of the data directory"
        )
    )
    if journal.broken and state.now_ns < journal.repair_due_ns:
        return
    _log.error("log %d: sync failed at position %d: %s", log.log_id, fault[1], reason)
    journal.repair_due_ns = state.now_ns + REPAIR_PAUSE_NS
    try:
        _cut(state, slot)
        log.reserve(0, control=True)
    except DanubeError as error:
        reason = str(error)
    journal.broken = ""
    if log.sync_fault is not None:
        journal.broken = (
            f"log {log.log_id} takes nothing, for its disk makes nothing durable ({reason}); check "
            "the disk of the data directory"
        )
        journal.refuse(journal.broken)
        return
    journal.refresh()
    log.sync()


def _cut(state: ShardState, slot: int) -> None:
    """Keep acked frames, and end the segment. Raises ResourceExhausted, Internal."""
    log, journal = state.logs[slot], state.journals[slot]
    kept = log.read_unsynced()
    records: list[bytes] = []
    log.cut_after_fault(list(_frames_to_keep(state, slot, memoryview(kept), records)))
    journal.record_again(records)
    journal.taken_back.clear()


def _frames_to_keep(
    state: ShardState, slot: int, kept: memoryview, records: list[bytes]
) -> Iterator[memoryview]:
    """Find frames that were not taken back; control records go into `records`."""
    journal = state.journals[slot]
    at = 0
    while at < len(kept):
        header = np.frombuffer(kept, HEADER_DTYPE, 1, at)[0]
        frame = kept[at : at + int(header["frame_bytes"])]
        at += len(frame)
        if header["flags"] & Flag.PAD:
            continue
        if int(header["partition_id"]) == CONTROL_PARTITION_ID:
            records.extend(payload or b"" for payload in FrameView(frame).payloads())
            continue
        shown = int(header["log_position"]) not in journal.taken_back
        partition = state.partition(int(header["partition_id"]))
        if shown and partition is not None and partition.log_slot == slot:
            yield frame
