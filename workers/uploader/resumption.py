"""Going on with the object of a checkpoint, whether this uploader began it or one before.

    the writer had ended      its parts are joined, or were; what manifests do not name yet, they name now
    it had not                the frames behind the last part are read again and must be the same bytes

Begins anew, with another object, where that cannot be: a partition is gone or uploaded further, its frames stand
elsewhere by now, the store has dropped the upload. And where the log is an older copy than the checkpoint, or than the
manifest: what is in the object are other messages than those of the log then.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from danube_fast.broker import messages as m
from danube_fast.errors import (
    AlreadyExists,
    DanubeError,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
)
from danube_fast.history.layout import ObjectHeader
from danube_fast.history.manifest import Section
from danube_fast.history.objects import Frames, ObjectWriter, WriterState
from danube_fast.roles import COORDINATOR
from danube_fast.workers.process.tasks import Ask, Do, Task
from danube_fast.workers.uploader.agreement import find_agreement
from danube_fast.workers.uploader.checkpoint import Checkpoint, Checkpoints, Inside, Progress
from danube_fast.workers.uploader.log_files import read_frames
from danube_fast.workers.uploader.log_frames import Unknown, is_last_frame
from danube_fast.workers.uploader.sender import Sender, complete
from danube_fast.workers.uploader.state import History, UploaderState

__all__ = ["VOID", "Made", "Outgoing", "Owners", "Resumption", "new_object"]

_log = logging.getLogger(__name__)

TRIES = 30
"""Looks, a second apart, until all partitions are back whose workers are started again, too, or which move."""

VOID = AlreadyExists, DataLoss, InvalidArgument, NotFound
"""Errors after which an object cannot be gone on with; after others it may be, later."""

Owners = Mapping[int, tuple[int, m.Backlog]]
"""By partition id: the worker that has it, and its backlog."""


class Outgoing(NamedTuple):
    """An object on its way."""

    writer: ObjectWriter
    sender: Sender
    progress: Progress
    inside: list[Inside]
    """Partitions whose frames are all in the object; the frames of the last one go on in a resumed object."""
    histories: dict[int, History]
    """Of these partitions, in a resumed object."""


def new_object(state: UploaderState, checkpoints: Checkpoints | None) -> Outgoing:
    """Begin an object. `checkpoints` None: it is not gone on with after a stop."""
    header = ObjectHeader(state.identity, state.epoch, state.next_number(), state.clock.wall_ns())
    part_bytes = max(state.store.part_bytes_min, state.settings.history_part_bytes)
    writer = ObjectWriter(header, part_bytes)
    checkpoint = Checkpoint(
        url=state.store.url, header=header, key=writer.key, part_bytes=part_bytes
    )
    progress = Progress(checkpoints, checkpoint)
    return Outgoing(writer, Sender(state.store, writer.key, progress), progress, [], {})


class Made(NamedTuple):
    """An object that is made, and that manifests do not name yet."""

    progress: Progress
    inside: list[Inside]
    """Partitions whose manifests are to name it."""
    histories: dict[int, History]
    sections: list[Section]
    """One of each."""


class _Lost(Exception):
    """Raised if the object cannot be gone on with."""


class _Away(Exception):
    """Raised while a partition or its worker is away."""


class Resumption:
    """Go on with the object of the checkpoint, if there is one."""

    def __init__(self, state: UploaderState, checkpoints: Checkpoints) -> None:
        self._state, self._checkpoints = state, checkpoints
        self._tries = 0
        self.is_waiting = False
        """Whether the last `resume` has to be tried again."""

    def partition_ids(self) -> list[int]:
        """Ids of the partitions in the object of the checkpoint."""
        checkpoint = self._checkpoints.current
        return [] if checkpoint is None else [each.partition_id for each in checkpoint.inside]

    def resume(self, owners: Owners) -> Task:
        """Give the object of the checkpoint, Outgoing or Made; None if there is none, or this `is_waiting`. Raises what
        the store raises."""
        self.is_waiting = False
        checkpoint = self._checkpoints.current
        if checkpoint is None:
            return None
        try:
            found: Outgoing | Made = yield from self._go_on(checkpoint, owners)
        except _Away as error:
            self._tries += 1
            if self._tries < TRIES:
                self.is_waiting = True
                return None
            yield from self._begin_anew(checkpoint, error)
        except _Lost as error:
            yield from self._begin_anew(checkpoint, error)
        else:
            self._tries = 0
            return found
        self._tries = 0
        return None

    def _begin_anew(self, checkpoint: Checkpoint, reason: Exception) -> Task:
        _log.info("history: %s begins anew: %s", checkpoint.key, reason)
        store = self._state.store
        if checkpoint.upload_id and checkpoint.url == store.url:
            with contextlib.suppress(DanubeError):
                yield Do(partial(store.abort, checkpoint.upload))
        yield from self._checkpoints.drop()
        self._state.writing.discard(checkpoint.key)

    def _go_on(self, checkpoint: Checkpoint, owners: Owners) -> Task:
        state = self._state
        if checkpoint.url != state.store.url or checkpoint.header.identity != state.identity:
            raise _Lost(f"the upload is one to {checkpoint.url}")
        progress = Progress(self._checkpoints, checkpoint)
        sender = Sender(state.store, checkpoint.key, progress, checkpoint.upload)
        if checkpoint.state is None:
            return (yield from self._go_on_ended(checkpoint, owners, progress))
        histories = yield from self._check_all(checkpoint, checkpoint.state, owners)
        frames: list[bytes] = []
        for some in checkpoint.state.frames_again():
            frames.append((yield from self._read(owners[some.partition_id][0], some)))
        again = partial(
            ObjectWriter.resume, checkpoint.header, checkpoint.part_bytes, checkpoint.state
        )
        try:
            writer: ObjectWriter = yield Do(lambda: again(b"".join(frames)))
        except DataLoss as error:
            raise _Lost(error) from None
        _log.info(
            "history: going on with %s behind %d bytes", checkpoint.key, checkpoint.state.sent
        )
        return Outgoing(writer, sender, progress, list(checkpoint.inside), histories)

    # ------------------------------------------------------------ the writer has not ended

    def _check_all(self, checkpoint: Checkpoint, state: WriterState, owners: Owners) -> Task:
        """Load the histories of the partitions inside, none of which may be further than it was, and whose logs must
        have what is in the object."""
        histories: dict[int, History] = {}
        again = {frames.partition_id for frames in state.frames_again()}  # these are compared whole
        for inside in checkpoint.inside:
            owned = owners.get(inside.partition_id)
            if owned is None:
                if (yield from self._is_unwanted(inside.partition_id)):
                    raise _Lost(f"partition {inside.partition_id} has no history any more")
                raise _Away(f"partition {inside.partition_id} is not there")
            history = yield from self._load(*owned)
            if not _fits(inside, owned[1], history):
                raise _Lost(f"{owned[1].topic} was changed meanwhile")
            if inside.partition_id not in again:
                rows = state.table()
                own = rows[rows["partition_id"] == inside.partition_id]
                end, time_ns = int(own["end_offset"][-1]), int(own["append_max_ns"].max())
                if not (yield from self._ends_with(*owned, end, time_ns)):
                    raise _Lost(f"the log of {owned[1].topic} has other messages by now")
            histories[inside.partition_id] = history
        return histories

    def _is_unwanted(self, partition_id: int) -> Task:
        """Ask whether a partition that no worker has was deleted, or is to have no history any more."""
        try:
            found: list[int] = yield Ask(COORDINATOR, m.FindWithoutHistory([partition_id]))
        except DanubeError as error:
            raise _Away(error) from None
        return bool(found)

    def _load(self, worker: int, backlog: m.Backlog) -> Task:
        """Give the history of a partition, which the log agrees with."""
        try:
            history: History = yield from self._state.history(
                backlog.partition_id, backlog.manifest
            )
            if not history.agrees:
                if not (yield from find_agreement(self._state, worker, backlog, history)):
                    raise _Away(f"the log of {backlog.topic} cannot be compared just now")
                history.note_agreement()
        except (DataLoss, FailedPrecondition) as error:
            raise _Lost(error) from None
        return history

    def _ends_with(self, worker: int, backlog: m.Backlog, end: int, time_ns: int) -> Task:
        """Whether a frame that came at this time ends there in the log, as the last one does that is in the object."""
        partition_id = backlog.partition_id
        try:
            return (yield from is_last_frame(self._state, worker, partition_id, end, time_ns))
        except Unknown as error:
            raise _Away(error) from None

    def _read(self, worker: int, frames: Frames) -> Task:
        """Read frames from the log again."""
        found, offset = b"", frames.base_offset
        while len(found) < frames.byte_count:
            left = frames.byte_count - len(found)
            asked = m.HistoryRuns(self._state.epoch, frames.partition_id, offset, left)
            try:
                runs: m.Runs = yield Ask(worker, asked)
                found += yield Do(partial(read_frames, runs.ranges, offset, left))
            except (
                DanubeError
            ) as error:  # it moves, or its worker is away, or a file was given back just now
                raise _Away(error) from None
            if runs.end_offset <= offset:
                raise _Lost(
                    f"frames of partition {frames.partition_id} are not in its log any more"
                )
            offset = runs.end_offset
        return found

    # ------------------------------------------------------------ the writer has ended

    def _go_on_ended(self, checkpoint: Checkpoint, owners: Owners, progress: Progress) -> Task:
        """Make the object, if it is not made yet, and find out which manifests do not name it."""
        upload, store = checkpoint.upload, self._state.store
        try:
            header, size = checkpoint.header, checkpoint.size
            yield Do(partial(complete, store, upload, checkpoint.parts, header, size))
        except VOID as error:
            raise _Lost(error) from None
        left: list[Inside] = []
        sections: list[Section] = []
        histories: dict[int, History] = {}
        for inside, section in zip(checkpoint.inside, checkpoint.sections, strict=True):
            try:
                history = yield from self._find_left(inside, section, owners)
            except _Away:
                if self._tries < TRIES - 1:
                    raise
                continue  # the other ones do not wait for it
            except _Lost:
                continue  # the round that it is due in says why
            if history is not None:
                histories[inside.partition_id] = history
                left.append(inside)
                sections.append(section)
        return Made(progress, left, histories, sections)

    def _find_left(self, inside: Inside, section: Section, owners: Owners) -> Task:
        """Give the history of a partition whose manifest is to name the object; None if it is not."""
        owned = owners.get(inside.partition_id)
        if owned is None:
            if (yield from self._is_unwanted(inside.partition_id)):
                return None
            raise _Away(f"partition {inside.partition_id} is not there")
        history: History = yield from self._load(*owned)
        if not _fits(inside, owned[1], history):
            return None
        end, time_ns = section.end_offset, section.append_max_ns
        return history if (yield from self._ends_with(*owned, end, time_ns)) else None


def _fits(inside: Inside, backlog: m.Backlog, history: History) -> bool:
    """Whether a partition's history still ends where the frames in an object begin."""
    return (
        backlog.incarnation == inside.incarnation
        and backlog.uploaded_until <= history.manifest.end_offset <= inside.start
        and backlog.first_offset < inside.until <= backlog.end_offset
    )
