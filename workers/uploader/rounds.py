"""Rounds of upload: which partitions are due, one object of their frames, their manifests, their frontiers.

    backlogs --> due --> object, frames of one partition after the other --> a record for each manifest
             --> SetUploaded to each owner: its log may be trimmed

A round that is cut short leaves a checkpoint, which the next one goes on from, or a manifest that its owner does
not know: the next round tells the owner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from danube_fast.broker import messages as m
from danube_fast.clock import SECOND_NS
from danube_fast.errors import DanubeError, DataLoss, FailedPrecondition, NotOwner, Unavailable
from danube_fast.history.manifest import Manifest, Section, lost_section
from danube_fast.history.objects import ObjectWriter, OutgoingPart
from danube_fast.ring.counters import Counter
from danube_fast.workers.process.tasks import Ask, Do, Fork, Join, Pause, Task
from danube_fast.workers.uploader.agreement import find_agreement
from danube_fast.workers.uploader.checkpoint import Checkpoints, Inside
from danube_fast.workers.uploader.log_files import add_ranges
from danube_fast.workers.uploader.resumption import VOID, Made, Outgoing, Resumption, new_object
from danube_fast.workers.uploader.retention import first_kept, keys_below
from danube_fast.workers.uploader.sender import Sender
from danube_fast.workers.uploader.state import History, UploaderState

__all__ = ["Rounds"]

READ_BYTES = 4 << 20
"""Read from a log at a time."""
COMMITS_MAX = 16
"""Manifests that are written at the same time."""
ASIDE_NS = 60 * SECOND_NS
"""How long a partition is left alone whose messages cannot be uploaded."""


class _Owned(NamedTuple):
    """A backlog and the process that has it."""

    worker: int
    backlog: m.Backlog


class _Taken(NamedTuple):
    """A partition whose frames are in the object."""

    owned: _Owned
    history: History
    until: int
    """All below is in the object, or in those before."""
    has_frames: bool
    producers: list[int]
    """Ids of those who published its frames."""


class Rounds:
    """Upload what is due, again and again."""

    def __init__(self, state: UploaderState, checkpoints: Checkpoints) -> None:
        self._state, self._checkpoints = state, checkpoints
        self._resumption = Resumption(state, checkpoints)
        self._wanted: dict[int, int] = {}
        """By partition id: up to where it is to be uploaded at once."""
        self.wake: Callable[[], None] = lambda: None
        """Ends the pause between two rounds."""
        self._aside: dict[int, tuple[int, DanubeError]] = {}
        """By partition id: until when it is left alone, and why."""
        self._budget_ns = 0
        """When the next part may be sent, if uploads are throttled."""

    def want(self, partition_id: int, until: int) -> None:
        """Upload a partition up to an offset at once."""
        self._wanted[partition_id] = max(until, self._wanted.get(partition_id, 0))
        self.wake()

    @property
    def fault(self) -> DanubeError | None:
        """Why a partition is left alone just now; None: none is."""
        now_ns = self._state.clock.monotonic_ns()
        return next((error for until_ns, error in self._aside.values() if until_ns > now_ns), None)

    def round(self) -> Task:
        """Upload one object, if anything is due; whether anything was. Raises DanubeError."""
        owned: list[_Owned] = yield from self._backlogs()
        ahead = yield from self._tell_what_is_known(owned)
        ahead |= yield from self._give_up_old(owned)
        if ahead:
            return True
        by_id = {each.backlog.partition_id: each for each in owned}
        found: Outgoing | Made | None = yield from self._resumption.resume(by_id)
        due = [each for each in owned if self._is_due(each.backlog)]
        if self._resumption.is_waiting or not (found or due):
            return False
        outgoing = found or new_object(self._state, self._checkpoints)
        key = outgoing.progress.key
        self._state.writing.add(key)
        try:
            return (yield from self._upload(outgoing, due, by_id))
        finally:
            if not outgoing.progress.is_kept:
                self._state.writing.discard(key)

    def _upload(
        self, outgoing: Outgoing | Made, due: Sequence[_Owned], by_id: Mapping[int, _Owned]
    ) -> Task:
        """Make an object, and name it in the manifests; whether anything was uploaded. Raises DanubeError."""
        taken = [
            _Taken(
                by_id[each.partition_id],
                outgoing.histories[each.partition_id],
                each.until,
                has_frames=True,
                producers=each.producers,
            )
            for each in outgoing.inside
        ]
        if isinstance(outgoing, Made):
            sections = outgoing.sections
        else:
            sections = yield from self._make_object(outgoing, due, taken)
        yield from self._commit_all(taken, sections)
        if outgoing.progress.is_kept:
            yield from outgoing.progress.drop()
        return bool(taken)

    # ------------------------------------------------------------ what is due

    def _backlogs(self) -> Task:
        """Ask all workers; one that is away has its turn later."""
        state = self._state
        owned: list[_Owned] = []
        lag_bytes = lag_ns = 0
        named = [*self._wanted, *self._resumption.partition_ids()]
        for worker in state.boot.config.processes.workers:
            try:
                found: m.Listed = yield Ask(
                    worker, m.ListBacklogs(state.epoch, state.fault, named, are_others=True)
                )
            except Unavailable:
                continue
            owned += [_Owned(worker, backlog) for backlog in found.backlogs]
            lag_bytes += found.bytes
            lag_ns = max(lag_ns, found.age_ns)
        state.boot.counters.set(Counter.HISTORY_LAG_BYTES, lag_bytes)
        state.boot.counters.set(Counter.HISTORY_LAG_SECONDS, lag_ns // SECOND_NS)
        return owned

    def _tell_what_is_known(self, owned: Sequence[_Owned]) -> Task:
        """Tell owners of manifests that are further than they know; whether there were any."""
        told = False
        for each in owned:
            worker, backlog = each
            history = self._state.known(backlog.partition_id)
            if history is None or not (yield from self._agrees(each, history)):
                continue
            if history.manifest.end_offset > backlog.uploaded_until:
                told |= yield from self._tell(worker, backlog.partition_id, history.manifest)
        return told

    def _agrees(self, owned: _Owned, history: History) -> Task:
        """Whether the history of a partition is that of its log; if it is not, the partition is put aside."""
        if history.agrees:
            return True
        if self._is_aside(owned.backlog):
            return False
        try:
            agrees = yield from find_agreement(self._state, *owned, history)
        except (DataLoss, FailedPrecondition) as error:
            self._put_aside(owned.backlog, error)
            return False
        if agrees:
            history.note_agreement()
        return agrees

    def _give_up_old(self, owned: Sequence[_Owned]) -> Task:
        """Take sections out of the manifests that no policy keeps, and tell their owners of all that have gone; whether
        there were any."""
        done = False
        for each in owned:
            worker, backlog = each
            history = self._state.known(backlog.partition_id)
            expires = backlog.retention_seconds or backlog.retention_bytes
            is_unknown = history is None and expires and backlog.uploaded_until
            if is_unknown and not self._is_aside(backlog):
                history = yield from self._load(each)
            if history is None or not history.agrees:
                continue
            if history.manifest.end_offset != backlog.uploaded_until:
                continue  # what its owner is not told of stays: it tells an older copy of the log (`agreement.py`)
            first = first_kept(history.manifest, backlog, self._state.clock.wall_ns())
            keys = keys_below(history.manifest, first)
            if keys:
                changes = {"first_offset": first, "removed": keys}
                yield from self.commit_changes(history, backlog, changes)
            elif history.manifest.gone_until <= backlog.first_offset:
                continue
            # else an uploader before has ended when the record was made, or the log is older than that
            done |= yield from self._tell(worker, backlog.partition_id, history.manifest)
        return done

    def _is_aside(self, backlog: m.Backlog) -> bool:
        number = backlog.partition_id
        if number in self._state.deleting or number in self._state.copying:
            return True
        until_ns, _ = self._aside.get(number, (0, None))
        return self._state.clock.monotonic_ns() < until_ns

    def _is_due(self, backlog: m.Backlog) -> bool:
        settings = self._state.settings
        if self._is_aside(backlog):
            return False
        if _is_behind(self._state.known(backlog.partition_id), backlog):
            return True
        return backlog.end_offset > max(backlog.uploaded_until, backlog.first_offset) and (
            backlog.bytes >= settings.history_object_bytes
            or backlog.age_ns >= settings.history_flush_seconds * SECOND_NS
            or backlog.is_urgent
            or backlog.partition_id in self._wanted
        )

    def _load(self, owned: _Owned) -> Task:
        """The history of a partition; None if it cannot be gone on with, and it is put aside if its manifest is wrong."""
        backlog = owned.backlog
        try:
            history: History = yield from self._state.history(
                backlog.partition_id, backlog.manifest
            )
        except (DataLoss, FailedPrecondition) as error:
            self._put_aside(backlog, error)
            return None
        return history if (yield from self._agrees(owned, history)) else None

    def _put_aside(self, backlog: m.Backlog, error: DanubeError) -> None:
        if backlog.topic not in str(error):
            error = type(error)(f"{backlog.topic}: {error}")
        until_ns = self._state.clock.monotonic_ns() + ASIDE_NS
        self._aside[backlog.partition_id] = until_ns, error
        self._state.forget(backlog.partition_id)
        self._state.note_fault(error)

    # ------------------------------------------------------------ one object

    def _make_object(self, outgoing: Outgoing, due: Sequence[_Owned], taken: list[_Taken]) -> Task:
        """Send one object with frames of the partitions that are due; its sections, by partition."""
        state, (writer, sender) = self._state, outgoing[:2]
        try:
            yield from self._fill(outgoing, due, taken)
            parts, sections = writer.finish()
            if sections:
                for part in parts[:-1]:
                    yield from self.send(sender, part)
                yield from sender.finish(parts[-1:], sections, outgoing.inside)
                state.boot.counters.add(Counter.HISTORY_OBJECTS, 1)
                state.boot.counters.add(Counter.HISTORY_BYTES, writer.size)
        except DanubeError as error:
            if outgoing.progress.is_kept and not isinstance(error, VOID):
                yield from sender.settle()  # the next round goes on
            else:
                yield from sender.abort()
            raise
        return sections

    def _fill(self, outgoing: Outgoing, due: Sequence[_Owned], taken: list[_Taken]) -> Task:
        """Add the rest of the partition that an object ends with, then the other ones that are due."""
        known = {each.partition_id for each in outgoing.inside}
        if taken:
            last = taken.pop()
            inside = outgoing.inside.pop()
            yield from self._add_frames(outgoing, last.owned, last.history, inside, taken)
        for owned in due:
            if outgoing.writer.size >= self._state.settings.history_object_bytes:
                break
            if owned.backlog.partition_id in known:
                continue
            history = yield from self._load(owned)
            if history is not None:
                at = max(history.manifest.end_offset, owned.backlog.first_offset)
                # a frame may begin before the first message that may be read
                outgoing.writer.begin(owned.backlog.partition_id, history.manifest.end_offset)
                inside = Inside(owned.backlog.partition_id, owned.backlog.incarnation, at, at)
                yield from self._add_frames(outgoing, owned, history, inside, taken)

    def _add_frames(
        self,
        outgoing: Outgoing,
        owned: _Owned,
        history: History,
        inside: Inside,
        taken: list[_Taken],
    ) -> Task:
        """Add frames of a partition; those `inside` are in the object."""
        at, known = inside.until, set(inside.producers)
        backlog, object_bytes = owned.backlog, self._state.settings.history_object_bytes
        writer, sender, progress, before, _ = outgoing
        while writer.size < object_bytes:
            asked = m.HistoryRuns(self._state.epoch, backlog.partition_id, at, READ_BYTES)
            try:
                runs: m.Runs = yield Ask(owned.worker, asked)
            except (NotOwner, FailedPrecondition, Unavailable):
                break  # it moves, or its worker is away: what was taken counts
            parts = yield from self._read(backlog, writer, runs, at)
            producers = sorted(known | writer.producers)
            inside = replace(inside, until=runs.end_offset, producers=producers)
            if parts:
                progress.hold(writer.state(), [*before, inside])
            for part in parts:
                yield from self.send(sender, part)
            if runs.end_offset <= at:
                break
            at = runs.end_offset
        if writer.end():
            before.append(replace(inside, until=at))
            taken.append(_Taken(owned, history, at, has_frames=True, producers=inside.producers))
        elif at > history.manifest.end_offset or at > backlog.uploaded_until:
            taken.append(_Taken(owned, history, at, has_frames=False, producers=[]))

    def _read(self, backlog: m.Backlog, writer: ObjectWriter, runs: m.Runs, at: int) -> Task:
        """Add ranges of the log; a partition whose frames are damaged is put aside."""
        if not runs.ranges:
            return []
        try:
            return (yield Do(partial(add_ranges, writer, runs.ranges, at), is_gentle=True))
        except DataLoss as error:
            self._put_aside(backlog, error)
            raise

    def send(self, sender: Sender, part: OutgoingPart) -> Task:
        """Send a part, not before the throttle allows. Raises what the store raises."""
        limit = self._state.settings.history_throttle_bytes_per_s
        if limit:
            now_ns = self._state.clock.monotonic_ns()
            if self._budget_ns > now_ns:
                yield Pause(self._budget_ns - now_ns)
            self._budget_ns = max(self._budget_ns, now_ns) + len(part.data) * SECOND_NS // limit
        yield from sender.send(part)

    # ------------------------------------------------------------ manifests and frontiers

    def _commit_all(self, taken: Sequence[_Taken], sections: Sequence[Section]) -> Task:
        """Name the object in the manifests, and tell the owners. Raises the first error of them."""
        rest = iter(sections)
        pairs = [(each, next(rest) if each.has_frames else None) for each in taken]
        running = []
        fault: DanubeError | None = None
        for place, (each, section) in enumerate(pairs):
            running.append((yield Fork(self._commit(each, section))))
            if len(running) < COMMITS_MAX and place < len(pairs) - 1:
                continue
            for commit in running:
                try:
                    yield Join(commit)
                except DanubeError as error:
                    fault = fault or error
            running.clear()
        if fault is not None:
            raise fault

    def _commit(self, taken: _Taken, section: Section | None) -> Task:
        (worker, backlog), history = taken.owned, taken.history
        manifest = history.manifest
        if taken.until > manifest.end_offset:
            added = _lost_sections(manifest, backlog, section, taken.until)
            added += [section] if section is not None else []
            names = yield from self.names(worker, backlog.partition_id, history, taken.producers)
            changes = {
                "first_offset": backlog.first_offset, "end_offset": taken.until, "added": added,
                "producers": names,
            }  # fmt: skip
            manifest = yield from self.commit_changes(history, backlog, changes)
        if manifest.end_offset >= self._wanted.get(backlog.partition_id, 0):
            self._wanted.pop(backlog.partition_id, None)
        yield from self._tell(worker, backlog.partition_id, manifest)

    def names(
        self, worker: int, partition_id: int, history: History, producers: Sequence[int]
    ) -> Task:
        """Ask the owner for the names of producers that the manifest does not know. Raises Unavailable while it is away.
        Where the partition has moved, or is deleted, the record goes without them: names wait for the next one."""
        unknown = sorted({*producers, *history.unnamed} - {*history.manifest.producers})
        if not unknown:
            return {}
        try:
            names = yield Ask(worker, m.NameProducers(self._state.epoch, partition_id, unknown))
        except NotOwner:
            history.unnamed.update(unknown)
            return {}
        history.unnamed.clear()
        return names

    def commit_changes(self, history: History, backlog: m.Backlog, changes: dict[str, Any]) -> Task:
        """Make the next record of a manifest. Raises DanubeError; the manifest is read anew then."""
        try:
            manifest: Manifest = yield Do(
                partial(history.commit, backlog.topic, backlog.incarnation, **changes)
            )
        except DanubeError:
            self._state.forget(backlog.partition_id)  # it may have been made
            raise
        return manifest

    def _tell(self, worker: int, partition_id: int, manifest: Manifest) -> Task:
        """Tell the owner of a partition how far it is uploaded; whether it has taken note."""
        message = m.SetUploaded(
            self._state.epoch,
            partition_id,
            manifest.end_offset,
            manifest.gone_until,
            manifest.number,
            manifest.byte_count,
        )
        try:
            yield Ask(worker, message)
        except (NotOwner, Unavailable):
            return False  # it moves, or its worker is away; the next round tells its owner
        return True


def _is_behind(history: History | None, backlog: m.Backlog) -> bool:
    """Whether a manifest ends before offsets that were uploaded: it was repaired, and their objects are gone, too."""
    return history is not None and history.manifest.end_offset < backlog.uploaded_until


def _lost_sections(
    manifest: Manifest, backlog: m.Backlog, section: Section | None, until: int
) -> list[Section]:
    """Tell as lost what was uploaded once, but is behind the end of the manifest and before the next section."""
    start = max(manifest.end_offset, backlog.first_offset)
    end = min(backlog.uploaded_until, until if section is None else section.base_offset)
    if start >= end:
        return []
    time_ns = max((each.append_max_ns for each in manifest.sections), default=0)
    return [lost_section(backlog.partition_id, start, end, time_ns)]
