"""Copies of topics without history, for readers that have the store alone: what can be read now, until their holds end.

    flush with a hold --> frames of the log --> objects --> a record of the manifest --> hold
                                                                   behind it: deleted (`sweep.py`)

The owner is told nothing: its log keeps and gives up messages as if there were no copy. A second flush goes on where
the first one ended, if what that uploaded is still held.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import partial

from danube_fast.broker import messages as m
from danube_fast.clock import MILLISECOND_NS
from danube_fast.errors import DanubeError, DeadlineExceeded, NotOwner, Unavailable
from danube_fast.history.manifest import NONE, Manifest, Section
from danube_fast.ring.counters import Counter
from danube_fast.workers.process.tasks import Ask, Do, Pause, Task
from danube_fast.workers.uploader.agreement import check_life
from danube_fast.workers.uploader.log_files import add_ranges
from danube_fast.workers.uploader.resumption import Outgoing, new_object
from danube_fast.workers.uploader.retention import keys_below
from danube_fast.workers.uploader.rounds import READ_BYTES, Rounds
from danube_fast.workers.uploader.state import History, UploaderState

__all__ = ["Copies"]

LOOK_NS = 20 * MILLISECOND_NS


class _Copying:
    """One partition, on its way into the store."""

    def __init__(self, worker: int, backlog: m.Backlog, history: History, deadline_ns: int) -> None:
        self.worker, self.backlog, self.history = worker, backlog, history
        self.deadline_ns = deadline_ns
        self.before = history.manifest.end_offset
        self.goes_on = history.agrees
        """Whether this process has uploaded what there is, so that it is known to be of this log."""
        self.next_offset = self.before if self.goes_on else 0
        """No frame that is added begins before it."""
        self.at = max(self.next_offset, backlog.first_offset)
        """All below is in the store, or cannot be read any more."""
        self.sections: list[Section] = []
        self.producers: set[int] = set()


class Copies:
    """Copy partitions into the store."""

    def __init__(self, state: UploaderState, rounds: Rounds) -> None:
        self._state, self._rounds = state, rounds

    def begin(self, partition_ids: Sequence[int], deadline_ns: int) -> Task:
        """Let neither another copy nor a deletion of these partitions begin before `end`. Raises DeadlineExceeded."""
        state = self._state
        while not (state.copying | state.deleting).isdisjoint(partition_ids):
            self._check_time(deadline_ns)
            yield Pause(LOOK_NS)
        state.copying.update(partition_ids)

    def end(self, partition_ids: Sequence[int], keys: Set[str]) -> None:
        """Let others copy these partitions, and the sweep delete what no hold names. `keys`: of the objects made."""
        self._state.copying.difference_update(partition_ids)
        self._state.writing.difference_update(keys)

    def copy(self, worker: int, backlog: m.Backlog, deadline_ns: int, keys: set[str]) -> Task:
        """Upload what the log of a partition has, up to now; the manifest. Objects that are made on the way are added
        to `keys`: they are not deleted before `end`. Raises DanubeError."""
        state = self._state
        history: History = yield from state.history(backlog.partition_id, backlog.manifest)
        if history.manifest.number != NONE:
            check_life(state, backlog, history.manifest)
        copying = _Copying(worker, backlog, history, deadline_ns)
        while copying.at < backlog.end_offset:
            outgoing = new_object(state, None)
            keys.add(outgoing.progress.key)
            state.writing.add(outgoing.progress.key)
            try:
                yield from self._fill(outgoing, copying)
            except DanubeError:
                yield from outgoing.sender.abort()
                raise
        if history.manifest.end_offset != copying.before:
            raise Unavailable(f"{backlog.topic} is being changed just now; try again")
        manifest: Manifest = yield from self._name(copying)
        history.note_agreement()
        return manifest

    def _fill(self, outgoing: Outgoing, copying: _Copying) -> Task:
        """Make one object of frames from `copying.at` on."""
        state, backlog = self._state, copying.backlog
        writer, sender = outgoing.writer, outgoing.sender
        writer.begin(backlog.partition_id, copying.next_offset)
        object_bytes = state.settings.history_object_bytes
        while writer.size < object_bytes and copying.at < backlog.end_offset:
            asked = m.HistoryRuns(state.epoch, backlog.partition_id, copying.at, READ_BYTES)
            try:
                runs: m.Runs = yield Ask(copying.worker, asked)
            except NotOwner:
                raise Unavailable(f"{backlog.topic} is being moved just now; try again") from None
            if runs.end_offset <= copying.at:  # not durable yet
                self._check_time(copying.deadline_ns)
                yield Pause(LOOK_NS)
                continue
            read = partial(add_ranges, writer, runs.ranges, copying.at)
            for part in (yield Do(read, is_gentle=True)):
                yield from self._rounds.send(sender, part)
            copying.at = runs.end_offset
            self._check_time(copying.deadline_ns)
        copying.next_offset = copying.at
        copying.producers |= writer.producers
        writer.end()
        parts, sections = writer.finish()
        if sections:
            for part in parts[:-1]:
                yield from self._rounds.send(sender, part)
            yield from sender.finish(parts[-1:], sections, [])
            copying.sections += sections
            state.boot.counters.add(Counter.HISTORY_OBJECTS, 1)
            state.boot.counters.add(Counter.HISTORY_BYTES, writer.size)

    def _name(self, copying: _Copying) -> Task:
        """Name the objects in the manifest, and give up what cannot be read any more, or is of an uploader before."""
        backlog, history = copying.backlog, copying.history
        manifest = history.manifest
        first = backlog.first_offset if copying.goes_on else copying.at
        gone = keys_below(manifest, first)
        if copying.goes_on and not (copying.sections or gone or copying.at > copying.before):
            return manifest
        names = yield from self._rounds.names(
            copying.worker, backlog.partition_id, history, sorted(copying.producers)
        )
        changes = {
            "first_offset": backlog.first_offset, "end_offset": copying.at, "added": copying.sections,
            "removed": gone, "producers": names,
        }  # fmt: skip
        return (yield from self._rounds.commit_changes(history, backlog, changes))

    def _check_time(self, deadline_ns: int) -> None:
        if self._state.clock.monotonic_ns() >= deadline_ns:
            raise DeadlineExceeded(
                f"the topic was not copied in time: {self._state.fault or 'it is large, or the store slow'}; give the "
                "flush more time"
            )
