"""The export itself: plan, stage, publish, note; again, until nothing is left, or for ever.

    history.py    what there is                     runners.py        tasks that stage files
    plan.py       what is planned and done          destinations.py   where files become visible

At the fail points of POINTS a test kills the process. Whatever happens there, the next run finishes what was planned.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from danube_fast.clock import SECOND_NS, SystemClock
from danube_fast.errors import DeadlineExceeded, FailedPrecondition, Internal, Unavailable
from danube_fast.spark.export.destinations import (
    Committed,
    Destination,
    Folder,
    missing_files,
    place_files,
)
from danube_fast.spark.export.files import disk_errors
from danube_fast.spark.export.history import (
    FILE_BYTES,
    FILE_BYTES_MIN,
    TopicHistory,
    cut,
    open_history,
)
from danube_fast.spark.export.patience import Patience, Trouble
from danube_fast.spark.export.plan import (
    Checkpoint,
    ExportPlan,
    Next,
    PlannedRange,
    StateFolder,
    TargetRecord,
    locked,
)
from danube_fast.spark.export.report import Progress, Report
from danube_fast.spark.export.runners import Runner
from danube_fast.spark.export.staging import Staging, replace_missing
from danube_fast.spark.export.target import ExportSpec, Target
from danube_fast.spark.options import ReadOptions
from danube_fast.spark.plan import PartitionRange, Snapshot

__all__ = ["FOLLOW_BYTES", "FOLLOW_SECONDS", "POINTS", "ExportJob", "Hooks", "run_export"]

POINTS = ("planned", "staged", "sealed", "renamed", "placed", "committed", "checkpointed")
FOLLOW_BYTES = 64 * 1024 * 1024
FOLLOW_SECONDS = 60.0
PLAN_BYTES = 16 * 1024 * 1024 * 1024
"""Of one plan, about: what is staged and not visible yet takes room."""
PIECES_MAX = 1024
POLL_SECONDS = 1.0
"""Between two looks at a topic that is followed."""


class ExportJob(NamedTuple):
    """What is to be done."""

    target: Target
    spec: ExportSpec
    read: ReadOptions
    checkpoint: Path | None = None
    mode: Literal["append", "overwrite"] = "append"
    is_dry: bool = False
    follows: bool = False
    follow_bytes: int = FOLLOW_BYTES
    follow_seconds: float = FOLLOW_SECONDS


class Hooks(NamedTuple):
    """What a caller sees of a run."""

    on_progress: Callable[[Progress], None] = lambda progress: None
    on_point: Callable[[str], None] = lambda name: None
    """A fail point was reached."""
    on_trouble: Callable[[Trouble], None] = lambda error: None
    """A run that follows waits for what is away."""


def run_export(
    job: ExportJob,
    open_runner: Callable[[], contextlib.AbstractContextManager[Runner]],
    hooks: Hooks,
    report: Report,
) -> None:
    """Export what is new, and count it in `report`. `open_runner` is called once something is to be read.

    Raises NotFound, FailedPrecondition for a target of others or one in use, DataLoss for messages that are gone,
    ResourceExhausted for a full disk, InvalidArgument, and what the broker, the store and the catalogue raise.
    """  # fmt: skip
    began = time.monotonic()
    try:
        with contextlib.ExitStack() as at_end:
            history = at_end.enter_context(open_history(job.read))
            destination = _destination(job)
            state = StateFolder(destination.folder, job.checkpoint)
            if state.record() is None:
                destination.check_new(is_dry=True)
            if job.is_dry:
                _Run(job, history, destination, state, hooks, report).rehearse()
                return
            state.make()
            at_end.enter_context(locked(state))
            at_end.callback(state.forget_unused)  # while it is locked
            run = _Run(
                job, history, destination, state, hooks, report, lambda: at_end.enter_context(open_runner())
            )  # fmt: skip
            run.begin()
            run.go_on()
    finally:
        report.finish(time.monotonic() - began)


def _destination(job: ExportJob) -> Destination:
    if job.target.form == "delta":
        from danube_fast.spark.export.tables import DeltaTarget

        return DeltaTarget(job.target, job.spec)
    if job.target.form == "iceberg":
        from danube_fast.spark.export.tables import IcebergTarget

        return IcebergTarget(job.target, job.spec, is_dry=job.is_dry)
    return Folder(job.target, job.spec)


class _Run:
    """One run of an export."""

    def __init__(
        self, job: ExportJob, history: TopicHistory, destination: Destination, state: StateFolder, hooks: Hooks,
        report: Report, open_runner: Callable[[], Runner] | None = None,
    ) -> None:  # fmt: skip
        self._job, self._history, self._destination = job, history, destination
        self._state, self._hooks, self._report = state, hooks, report
        self._staging = Staging(
            job.spec, history, destination, open_runner, hooks.on_progress, report
        )
        self._staging.fails_on_loss = job.read.fails_on_loss
        self._checkpoint = Checkpoint()
        self._ends: dict[int, int] = {}
        """Where this run ends, by partition; a run that follows has no end."""
        self._overwrites = job.mode == "overwrite"
        self._generation = 0
        self._given_up: ExportPlan | None = None
        """A plan of a run before that is overwritten, too."""
        self._committing: ExportPlan | None = None
        """A plan whose commit is under way, or has failed: it may be there."""
        self._patience = Patience(hooks.on_trouble)
        self._waiting_since_ns: int | None = None
        """When something new was seen first, that is not exported yet."""
        self._new_record: TargetRecord | None = None
        """Of a target that is not known yet."""

    # ------------------------------------------------------------ begin

    def begin(self) -> None:
        """Check the target, and finish what a run before has planned. Raises as `run_export`."""
        self._check_record()
        pending = self._load()
        if pending is not None and not self._overwrites:
            self._report.recovered = True
            self._finish(pending)
        if self._overwrites:
            self._given_up = pending
        else:
            self._state.sweep()

    def _check_record(self) -> None:
        job, state = self._job, self._state
        record = state.record()
        folder = "" if job.checkpoint is None else str(job.checkpoint.absolute())
        mine = TargetRecord(job.spec, folder)
        if record is None:
            self._new_record = mine
            return
        if difference := job.spec.different(record.spec):
            raise FailedPrecondition(
                f"{job.target.place} is an export of {record.spec.topic} with something else for {difference}; export "
                "to another folder, or as before"
            )
        if record.checkpoint != mine.checkpoint:
            raise FailedPrecondition(
                f"the checkpoint of {job.target.place} is in {record.checkpoint or 'the target itself'}; say so with "
                "--checkpoint, or without it, or export to another folder"
            )

    def _load(self) -> ExportPlan | None:
        """Load how far the target is; the plan that was not finished."""
        state = self._state
        found = state.checkpoint()
        pending = state.plan()
        committed = self._destination.committed()
        if found is None and pending is None and committed is None and not self._overwrites:
            data = self._destination.data
            if not self._job.target.is_table and next(data.rglob("part-*-offsets-*"), None):
                raise FailedPrecondition(
                    f"{state.checkpoint_folder} has no checkpoint any more of what is in {data}; restore it, or begin "
                    "anew with --mode overwrite"
                )
        checkpoint = found or Checkpoint()
        if self._destination.names_are_hidden and found is not None and committed is None:
            raise FailedPrecondition(
                f"{self._job.target.text} has an export's record and no table any more; put the table back, or remove "
                f"{state.checkpoint_folder} and {state.own} to export anew"
            )
        if self._destination.names_are_hidden:  # the table is right, whatever the checkpoint says
            known = committed or Committed(0, {})
            checkpoint.number = max(known.number, checkpoint.number)
            checkpoint.next = known.next
            if found is None and pending is None:  # it may have begun anywhere
                checkpoint.first = {
                    index: Next(at.partition_id, 0) for index, at in known.next.items()
                }
        self._checkpoint = checkpoint
        self._generation = max(checkpoint.generation, pending.generation if pending else 0)
        is_other = (  # an overwrite, whose number is that of a plan which it has given up
            pending is not None and committed is not None
            and committed.number == pending.number and not committed.has(pending)
        )  # fmt: skip
        if pending is not None and pending.number <= checkpoint.number and not is_other:
            if found is None or found.number < pending.number:  # killed behind the commit
                self._save_checkpoint(pending)
            if not self._job.is_dry:
                state.drop_plan()
            return None
        return pending

    # ------------------------------------------------------------ rounds

    def go_on(self) -> None:
        """Export until nothing is left, or for ever. Raises as `run_export`."""
        is_waiting = is_cut_short = False
        while True:
            try:
                if is_waiting:
                    self._wait()
                    is_waiting = False
                if is_cut_short:
                    self._recover()
                    is_cut_short = False
                is_last = self._round()
                if not self._job.follows and is_last:
                    return
                is_waiting = self._job.follows
                self._patience.end()
            except (Unavailable, DeadlineExceeded) as error:
                if not self._job.follows:
                    raise
                is_cut_short |= not is_waiting
                self._patience.wait(error)

    def _round(self) -> bool:
        """Export what there is now, at most one plan; whether nothing is left."""
        with self._history.snapshot() as snapshot:
            limited = self._history.limited(snapshot)
            if not self._ends and not self._job.follows:
                self._ends = {each.partition: each.high for each in limited.values()}
            ranges = self._open_ranges(snapshot, limited)
            if self._overwrites:
                self._replace(snapshot)
                self._state.sweep()
            # an empty one notes where the export begins
            has_passed = self._has_passed(snapshot)
            if ranges or has_passed or self._overwrites or not self._checkpoint.next:
                self._export(snapshot, limited, ranges)
        return not ranges or (not self._job.follows and self._is_complete())

    def _recover(self) -> None:
        """Finish the plan that was cut short, as after a kill."""
        pending = self._load()
        if pending is not None:
            self._finish(pending)
        elif self._committing is not None:  # the commit that has failed is there
            self._note_committed(self._committing)
        self._state.sweep()

    def _note_committed(self, plan: ExportPlan) -> None:
        has_payloads = bool(self._job.spec.fields) or "payload" in self._job.spec.columns
        self._report.add(plan, has_payloads=has_payloads)
        self._committing = None
        self._overwrites = False

    def _has_passed(self, snapshot: Snapshot) -> bool:
        """Whether messages are gone that were not exported, and may be passed over."""
        known = self._checkpoint.next
        return not self._job.read.fails_on_loss and any(
            known[index].offset < whole.low
            for whole in snapshot.ranges
            if (index := str(whole.partition)) in known
        )

    def _replace(self, snapshot: Snapshot) -> None:
        """Count what is overwritten. Raises DataLoss for what would be lost by that."""
        target, given_up = self._checkpoint, self._given_up
        if given_up is not None and given_up.state == "sealed" and given_up.mode == "append":
            # some of its files may be in their places
            target = self._with(given_up)
        self._staging.check_replaced(snapshot.ranges, target)
        self._report.replaced = target.totals.messages or None

    def _is_complete(self) -> bool:
        """Whether all is exported that was there when this began."""
        known = self._checkpoint.next
        return all(known[str(index)].offset >= end for index, end in self._ends.items())

    def rehearse(self) -> None:
        """Count what would be exported."""
        report = self._report
        report.dry_run = True
        self._check_record()
        pending = self._load()
        report.recovered = pending is not None
        if pending is not None and not self._overwrites:
            self._checkpoint.next = pending.next
            for each in pending.ranges:
                report.extend(each.partition, each.low, each.high, each.high - each.low)
                report.messages += each.high - each.low
                report.file_bytes += each.byte_count
                report.files += 1
        with self._history.snapshot(is_dry=True) as snapshot:
            if self._overwrites:
                self._given_up = pending
                self._replace(snapshot)
            for of in self._open_ranges(snapshot, self._history.limited(snapshot)):
                parts = list(cut(of, FILE_BYTES))
                report.extend(of.partition, of.low, of.high, of.high - of.low)
                report.messages += of.high - of.low
                report.file_bytes += sum(size for _, _, size in parts)
                report.files += len(parts)

    def _open_ranges(
        self, snapshot: Snapshot, limited: dict[int, PartitionRange]
    ) -> list[PartitionRange]:
        """What is not exported yet. Raises FailedPrecondition for another topic, DataLoss."""
        known = {} if self._overwrites else self._checkpoint.next
        ranges = []
        for whole in snapshot.ranges:
            if self._ends and whole.partition not in self._ends:
                continue  # made while this ran
            at = known.get(str(whole.partition))
            high = min(limited[whole.partition].high, self._ends.get(whole.partition, whole.high))
            if at is None:
                low = whole.low if known else limited[whole.partition].low
            elif at.partition_id != whole.partition_id:
                raise FailedPrecondition(
                    f"{self._job.spec.topic} was deleted and made again since {self._job.target.place} was exported; "
                    "export to another folder, or begin anew with --mode overwrite"
                )
            else:
                low = self._staging.checked_low(whole, at.offset)
            if low < high:
                ranges.append(whole._replace(low=low, high=high))
        return ranges

    def _export(
        self, snapshot: Snapshot, limited: dict[int, PartitionRange], ranges: Sequence[PartitionRange]
    ) -> None:  # fmt: skip
        """Plan some ranges, and do it."""
        known = {} if self._overwrites else dict(self._checkpoint.next)
        for whole in limited.values() if not known else snapshot.ranges:
            at = known.setdefault(str(whole.partition), Next(whole.partition_id, whole.low))
            if not self._job.read.fails_on_loss and at.offset < whole.low:
                known[str(whole.partition)] = Next(whole.partition_id, whole.low)
        there = {} if self._overwrites else self._checkpoint.next
        first = {index: at for index, at in known.items() if index not in there}
        plan = self._make_plan(ranges, known)
        plan.first = first
        if self._new_record is not None:
            self._destination.check_new(is_dry=False)
            with disk_errors(str(self._state.own)):
                self._state.save_record(self._new_record)
            self._new_record = None
        self._save_plan(plan)
        self._hooks.on_point("planned")
        self._finish(plan, snapshot)

    def _make_plan(self, ranges: Sequence[PartitionRange], known: dict[str, Next]) -> ExportPlan:
        total = sum(size for each in ranges for _, _, size in cut(each, FILE_BYTES))
        parallelism = self._staging.runner.parallelism if ranges else 1
        wanted = max(FILE_BYTES_MIN, min(FILE_BYTES, total // parallelism))
        planned: list[PlannedRange] = []
        planned_bytes = 0
        for each in ranges:
            for low, high, size in cut(each, wanted):
                if planned and (planned_bytes + size > PLAN_BYTES or len(planned) >= PIECES_MAX):
                    break
                planned.append(PlannedRange(each.partition, each.partition_id, low, high, size))
                planned_bytes += size
                known[str(each.partition)] = Next(each.partition_id, high)
        generation = self._generation + 1 if self._overwrites else self._generation
        mode: Literal["append", "overwrite"] = "overwrite" if self._overwrites else "append"
        number = self._checkpoint.number + 1
        return ExportPlan(number, generation, secrets.token_hex(4), mode, planned, known)

    # ------------------------------------------------------------ one plan

    def _finish(self, plan: ExportPlan, snapshot: Snapshot | None = None) -> None:
        """Do what is left of a plan."""
        staging = self._state.staging / plan.staging_name
        if plan.state == "staging":
            shutil.rmtree(staging, ignore_errors=True)
            self._seal(plan, staging, snapshot)
        elif missing := missing_files(plan, self._destination, staging):
            indexes = sorted({file.range_index for file in missing})
            again = self._staging.stage(plan, staging, snapshot, indexes)
            replace_missing(plan, {(file.is_rejected, file.name) for file in missing}, again)
            self._save_plan(plan)
        self._hooks.on_point("sealed")
        place_files(plan, self._destination, staging, lambda: self._hooks.on_point("renamed"))
        self._hooks.on_point("placed")
        self._committing = plan
        with disk_errors(str(self._destination.folder)):
            self._destination.commit(plan)
        self._note_committed(plan)
        self._hooks.on_point("committed")
        self._save_checkpoint(plan)
        self._hooks.on_point("checkpointed")
        self._state.drop_plan()
        shutil.rmtree(staging, ignore_errors=True)

    def _seal(self, plan: ExportPlan, staging: Path, snapshot: Snapshot | None) -> None:
        """Stage the files of a plan, and make their names durable. Where that fails, nothing is left behind."""
        try:
            done = self._staging.stage(plan, staging, snapshot, range(len(plan.ranges)))
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            if not self._checkpoint.number:  # a first run that fails binds the target to nothing
                self._state.drop_plan()
                self._new_record = self._state.record()
                self._state.drop_record()
                self._destination.drop_new()
            raise
        self._hooks.on_point("staged")
        names = [(file.is_rejected, file.name) for each in done for file in each.files]
        if len({*names}) != len(names):
            raise Internal(f"two files of plan {plan.number} have one name")
        totals = plan.totals
        for each in done:
            plan.files += each.files
            totals.messages += each.messages
            totals.payload_bytes += each.payload_bytes
            totals.checksum += each.checksum
            totals.rejected += each.rejected
        totals.files = len(plan.files)
        totals.file_bytes = sum(file.byte_count for file in plan.files)
        if plan.mode == "overwrite":
            plan.removed = self._destination.removed_by(plan)
        plan.state = "sealed"
        self._save_plan(plan)

    def _save_plan(self, plan: ExportPlan) -> None:
        with disk_errors(str(self._state.checkpoint_folder)):
            self._state.save_plan(plan)

    def _save_checkpoint(self, plan: ExportPlan) -> None:
        self._checkpoint = self._with(plan)
        self._generation = plan.generation
        if not self._job.is_dry:
            with disk_errors(str(self._state.checkpoint_folder)):
                self._state.save_checkpoint(self._checkpoint)

    def _with(self, plan: ExportPlan) -> Checkpoint:
        """How far the target is with a plan."""
        before = self._checkpoint
        if plan.mode == "overwrite":
            return Checkpoint(plan.number, plan.generation, plan.next, plan.totals, plan.first)
        totals = msgspec.structs.replace(before.totals)
        totals.add(plan.totals)
        known, first = {**before.next, **plan.next}, {**plan.first, **before.first}
        return Checkpoint(plan.number, plan.generation, known, totals, first)

    # ------------------------------------------------------------ following

    def _wait(self) -> None:
        """Wait until there is enough that is new, or it has waited long enough. Raises what the broker raises."""
        clock = SystemClock()
        while True:
            pending = self._history.pending(self._checkpoint.next)
            self._patience.end()
            now = clock.monotonic_ns()
            if pending.messages and self._waiting_since_ns is None:
                self._waiting_since_ns = now
            since = self._waiting_since_ns
            is_old = since is not None and (now - since) / SECOND_NS >= self._job.follow_seconds
            if pending.messages and (pending.byte_count >= self._job.follow_bytes or is_old):
                self._waiting_since_ns = None
                return
            self._hooks.on_progress(Progress(0, 0, self._report.messages, pending=pending.messages))
            time.sleep(POLL_SECONDS)
