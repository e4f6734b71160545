"""Whether a log and the history of its partition have one past, where the history is further than the log's owner knows.

    owner      |---- uploaded ----|---- in the log only ---->
    manifest   |---- uploaded -------------------|-- none --|
                                  1              2          3

It is if an uploader ended before it could tell the owner. It is not if the log, or all data of the broker, is an older
copy: then other messages have the offsets by now, and what the store has must not take their place. So two things must
hold, as all messages from 1 on are in the log, or were given up there, too:

    the last frame of history, before 2, is the log's       two pasts part once, and never come together again
    from 2 to 3 the log has no message                      sections go only when the owner has been told of them

The second one holds for histories whose sections have all gone, too: they end at 1 then.
"""

from __future__ import annotations

import logging
import shlex
from functools import partial

from danube_fast.broker import messages as m
from danube_fast.errors import DataLoss, FailedPrecondition
from danube_fast.frame.view import FrameView
from danube_fast.history.manifest import NONE, Manifest, Section, repair_command
from danube_fast.history.reader import Fetched
from danube_fast.workers.process.tasks import Do, Task
from danube_fast.workers.uploader.log_frames import Unknown, first_frame, is_in_log
from danube_fast.workers.uploader.rewrite import restore_section
from danube_fast.workers.uploader.state import History, UploaderState

__all__ = ["check_life", "find_agreement"]

_log = logging.getLogger(__name__)

REMEDY = "put back the newest copy of the data directory, or give the broker an empty store"


def find_agreement(state: UploaderState, worker: int, backlog: m.Backlog, history: History) -> Task:
    """Tell whether they agree; False: it cannot be known just now. Raises FailedPrecondition if they do not, DataLoss
    if what could tell is lost, and what the store raises."""
    manifest = history.manifest
    if manifest.number == NONE:
        return True
    check_life(state, backlog, manifest)
    if manifest.end_offset <= backlog.uploaded_until:
        return True
    try:
        yield from _compare(state, worker, backlog, history)
    except Unknown:
        return False
    return True


def check_life(state: UploaderState, backlog: m.Backlog, manifest: Manifest) -> None:
    """Check that a manifest is of this life of a topic, and no longer than its log. Raises FailedPrecondition."""
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
    if manifest.end_offset > max(backlog.end_offset, backlog.uploaded_until):
        raise _older_copy(
            backlog, f"up to offset {manifest.end_offset}", f"ends at {backlog.end_offset}"
        )


def _compare(state: UploaderState, worker: int, backlog: m.Backlog, history: History) -> Task:
    """Compare what the log has of the offsets that the owner was not told of; upload again what is lost of them. Raises
    as `find_agreement`, and Unknown."""
    manifest, partition_id = history.manifest, backlog.partition_id
    told = max(backlog.uploaded_until, backlog.first_offset)
    untold = [section for section in manifest.sections if section.end_offset > told]
    end = max([told, *(section.end_offset for section in untold)])
    lost: list[tuple[Section, DataLoss]] = []
    while untold:
        try:
            yield from _compare_last_frame(state, worker, backlog, history, untold[-1])
        except DataLoss as error:
            lost.append((untold.pop(), error))
        else:
            break
    for section, loss in lost:
        if not (yield from is_in_log(state, worker, section, partition_id)):
            raise DataLoss(
                f"{loss}; the log of {backlog.topic} has not the same messages there, so it cannot be told whether it "
                "is an older copy: put the object back from a copy of the store, or purge the topic"
            )
    if end < manifest.end_offset:
        last = manifest.end_offset
        found = yield from first_frame(state, worker, partition_id, end, last)
        if found is not None:
            raise _older_copy(
                backlog,
                f"up to offset {last}, and what was behind {end} has expired",
                "has it still",
            )
    for section, loss in reversed(lost):
        yield from restore_section(state, worker, backlog, history, section)
        _log.warning("history: %s; the log has them, and they were uploaded again", loss)


def _compare_last_frame(
    state: UploaderState, worker: int, backlog: m.Backlog, history: History, section: Section
) -> Task:
    """Compare the last frame of a section. Raises FailedPrecondition if the log has another one, DataLoss if the section
    has it no more, Unknown, and what the store raises."""
    end = section.end_offset
    fetched: Fetched = yield Do(partial(history.reader.fetch, end - 1, 1))
    frame = _last_frame(fetched.data)
    base = frame.base_offset
    found = yield from first_frame(state, worker, backlog.partition_id, base, end)
    if found is None or (found.base_offset, found.append_time_ns) != (base, frame.append_time_ns):
        raise _older_copy(backlog, f"with offsets {base} to {end}", "has other messages there")


def _last_frame(data: bytes) -> FrameView:
    at, frame = 0, FrameView(data)
    while at + frame.frame_bytes < len(data):
        at += frame.frame_bytes
        frame = FrameView(memoryview(data)[at:])
    return frame


def _older_copy(backlog: m.Backlog, what: str, instead: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"the store has {backlog.topic} {what}, and its log {instead}: the log is an older copy; {REMEDY}"
    )
