"""Whether a log and the history of its partition have one past, where the history is further than the log's owner knows.

    owner      |---- uploaded ----|---- in the log only ---->
    manifest   |---- uploaded --------------|
                                            ^ the last frame of history: is it the log's, too?

It is if an uploader ended before it could tell the owner. It is not if the log, or all data of the broker, is an older
copy: then other messages have the offsets by now, and what the store has must not take their place.
"""

from __future__ import annotations

import shlex
from functools import partial

from danube_fast.broker import messages as m
from danube_fast.errors import DanubeError, FailedPrecondition
from danube_fast.frame.view import FrameView
from danube_fast.history.manifest import NONE, repair_command
from danube_fast.history.reader import Fetched
from danube_fast.workers.process.tasks import Ask, Do, Task
from danube_fast.workers.uploader.log_files import read_frames
from danube_fast.workers.uploader.state import History, UploaderState

__all__ = ["find_agreement"]

REMEDY = "put back the newest copy of the data directory, or give the broker an empty store"


def find_agreement(state: UploaderState, worker: int, backlog: m.Backlog, history: History) -> Task:
    """Tell whether they agree; False: it cannot be known just now. Raises FailedPrecondition if they do not, and what
    the store raises."""
    manifest = history.manifest
    if manifest.number == NONE:
        return True
    if not manifest.topic:
        raise FailedPrecondition(
            f"a repair has found no record that tells whose history that of partition {backlog.partition_id} is; stop "
            f"the broker and run {repair_command(state.store.url)} --adopt "
            f"{backlog.partition_id}={shlex.quote(backlog.topic)} --yes"
        )
    # a repair that found no record does not know the incarnation
    is_known = manifest.incarnation in (0, backlog.incarnation)
    if manifest.topic != backlog.topic or not is_known:
        raise FailedPrecondition(
            f"the store has history of {manifest.topic} where that of {backlog.topic} is to be: the broker's data are "
            f"an older copy, and the topic has got a number that was in use; {REMEDY}"
        )
    if manifest.end_offset <= backlog.uploaded_until:
        return True
    if manifest.end_offset > backlog.end_offset:
        raise _older_copy(
            backlog, f"up to offset {manifest.end_offset}", f"ends at {backlog.end_offset}"
        )
    end = manifest.sections[-1].end_offset if manifest.sections else 0
    if end <= max(backlog.uploaded_until, backlog.first_offset):
        return True
    fetched: Fetched = yield Do(partial(history.reader.fetch, end - 1, 1))
    frame = _last_frame(fetched.data)
    if frame.base_offset < backlog.first_offset:
        return True
    asked = m.HistoryRuns(state.epoch, backlog.partition_id, frame.base_offset, frame.frame_bytes)
    try:
        runs: m.Runs = yield Ask(worker, asked)
        found: bytes = yield Do(
            partial(read_frames, runs.ranges, frame.base_offset, frame.frame_bytes)
        )
    except DanubeError:  # it moves, or its worker is away
        return False
    if runs.end_offset <= frame.base_offset:
        return False  # it is not synced yet
    if not found or not _are_same(frame, FrameView(found)):
        offsets = f"{frame.base_offset} to {end}"
        raise _older_copy(backlog, f"with offsets {offsets}", "has other messages there")
    return True


def _last_frame(data: bytes) -> FrameView:
    at, frame = 0, FrameView(data)
    while at + frame.frame_bytes < len(data):
        at += frame.frame_bytes
        frame = FrameView(memoryview(data)[at:])
    return frame


def _are_same(one: FrameView, other: FrameView) -> bool:
    return (one.base_offset, one.append_time_ns) == (other.base_offset, other.append_time_ns)


def _older_copy(backlog: m.Backlog, what: str, instead: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"the store has {backlog.topic} {what}, and its log {instead}: the log is an older copy; {REMEDY}"
    )
