"""Staging: the tasks of a plan, run in the background, and what they say of their files."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from danube_fast.durable import sync_directory
from danube_fast.errors import DataLoss, Internal, Unavailable
from danube_fast.spark.export.destinations import Destination
from danube_fast.spark.export.files import Piece, Work, disk_errors
from danube_fast.spark.export.history import TopicHistory, tasks_of
from danube_fast.spark.export.plan import Checkpoint, Done, ExportPlan
from danube_fast.spark.export.report import Progress, Report
from danube_fast.spark.export.runners import Runner
from danube_fast.spark.export.target import ExportSpec
from danube_fast.spark.failures import translated
from danube_fast.spark.plan import PartitionRange, Snapshot

__all__ = ["Staging", "replace_missing"]

LOOK_SECONDS = 0.1
"""Between two looks at how many tasks have ended."""
CANCEL_SECONDS = 10
_REMEDY = "an overwrite would remove them for good, so nothing was changed; --skip-lost replaces them nevertheless"


class Staging:
    """Runs the tasks of plans."""

    fails_on_loss = True

    def __init__(
        self, spec: ExportSpec, history: TopicHistory, destination: Destination,
        open_runner: Callable[[], Runner] | None, on_progress: Callable[[Progress], None], report: Report,
    ) -> None:  # fmt: skip
        """`open_runner`: None where nothing is run."""
        self._spec, self._history, self._destination = spec, history, destination
        self._open_runner, self._on_progress, self._report = open_runner, on_progress, report
        self._runner: Runner | None = None

    @property
    def runner(self) -> Runner:
        """What runs tasks; Spark starts when it is first asked for."""
        if self._runner is None:
            if self._open_runner is None:
                raise Internal("a run that changes nothing has no tasks")
            self._runner = self._open_runner()
        return self._runner

    def checked_low(self, whole: PartitionRange, offset: int) -> int:
        """The first offset from `offset` on that is there. Raises DataLoss if that is another one, unless losses are
        passed over."""
        if offset >= whole.low:
            return offset
        if self.fails_on_loss:
            raise DataLoss(
                f"offsets {offset} to {whole.low} of {self._spec.topic}, partition {whole.partition}, are gone: "
                "retention or a purge was faster than this export; go on behind them with --skip-lost"
            )
        return whole.low

    def check_replaced(self, wholes: Sequence[PartitionRange], target: Checkpoint) -> None:
        """Raise DataLoss if an overwrite would replace messages of the same life of the topic that cannot be read any
        more, unless losses are passed over."""
        if not self.fails_on_loss or not target.next:
            return
        same = [
            (whole, at) for whole in wholes
            if (at := target.next.get(str(whole.partition))) is not None
            and at.partition_id == whole.partition_id
        ]  # fmt: skip
        known = [target.first.get(str(whole.partition)) for whole, _ in same]
        for (whole, at), first in zip(same, known, strict=True):
            low = whole.low if first is None else first.offset
            if low < min(whole.low, at.offset):
                raise DataLoss(
                    f"the target has offsets {low} to {min(whole.low, at.offset)} of {self._spec.topic}, partition "
                    f"{whole.partition}, which are gone from the topic: {_REMEDY}"
                )
        if not same or None not in known:
            return
        there = target.totals.messages + target.totals.rejected
        left = sum(max(0, min(whole.high, at.offset) - whole.low) for whole, at in same)
        if there > left:
            lows = ", ".join(f"{whole.low} of partition {whole.partition}" for whole, _ in same)
            raise DataLoss(
                f"the target has {there} messages of {self._spec.topic}, of which {there - left} or more are gone from "
                f"the topic, whose first offsets are {lows} now: {_REMEDY}"
            )

    def stage(
        self, plan: ExportPlan, staging: Path, snapshot: Snapshot | None, indexes: Sequence[int]
    ) -> list[Done]:
        """Stage the files of some ranges of a plan; what tasks say of them. Raises DataLoss, ResourceExhausted, and what
        the broker and the store raise."""
        if snapshot is None and indexes:
            with self._history.snapshot() as fresh:
                return self.stage(plan, staging, fresh, indexes)
        with disk_errors(str(staging)):
            staging.mkdir(parents=True, exist_ok=True)
        if not indexes or snapshot is None:
            return []
        runner, spec = self.runner, self._spec
        suffix = f"-g{plan.generation}" if plan.generation else ""
        if self._destination.names_are_hidden:
            suffix += f"-{plan.token}"
        columns = spec.needed(runner.condition_columns(spec))
        work = Work(spec, str(staging), suffix, columns, self.fails_on_loss)
        wholes = {each.partition: each for each in snapshot.ranges}
        pieces = [self._piece(plan, index, snapshot, wholes) for index in indexes]
        self._run_tasks(runner, work, pieces, staging)
        sync_directory(staging)
        results = _results(staging)
        # a condition leaves ranges without rows, which have no file then
        if not spec.where and not {*indexes} <= {each.index for each in results}:
            raise Unavailable(
                f"{staging} does not show yet what tasks have staged there; run the export again, which goes on"
            )
        return results

    def _piece(
        self, plan: ExportPlan, index: int, snapshot: Snapshot, wholes: dict[int, PartitionRange]
    ) -> Piece:
        of = plan.ranges[index]
        whole = wholes.get(of.partition)
        if whole is None or whole.partition_id != of.partition_id:
            raise DataLoss(
                f"{self._spec.topic} was deleted or made again before its export was finished; begin anew with "
                "--mode overwrite, or export to another folder"
            )
        low = self.checked_low(whole, of.low)
        part = whole._replace(low=low, high=max(low, of.high))
        return Piece(index, of, tasks_of(snapshot, part, self._spec.topic))

    def _run_tasks(
        self, runner: Runner, work: Work, pieces: Sequence[Piece], staging: Path
    ) -> None:
        """Run tasks in another thread, and tell how far they are."""
        failures: list[BaseException] = []

        def run() -> None:
            try:
                runner.run(work, pieces)
            except BaseException as error:  # it is raised where the run is waited for
                failures.append(error)

        began = time.monotonic()
        sizes = {piece.number: piece.of.byte_count for piece in pieces}
        thread = threading.Thread(target=run, name="danube-fast export", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(LOOK_SECONDS)
                ended = [int(path.stem) for path in staging.glob("?????.done")]
                done = sum(sizes.get(index, 0) for index in ended)
                seconds = time.monotonic() - began
                self._on_progress(
                    Progress(done, sum(sizes.values()), self._report.messages, seconds)
                )
        except BaseException:
            runner.cancel()
            thread.join(CANCEL_SECONDS)
            raise
        if failures:
            with translated():
                raise failures[0]


def replace_missing(
    plan: ExportPlan, missing: set[tuple[bool, str]], again: Sequence[Done]
) -> None:
    """Take what was staged again in place of what is gone. Raises DataLoss if that has other files."""
    found = {(file.is_rejected, file.name): file for done in again for file in done.files}
    if not missing <= {*found}:
        raise DataLoss(
            f"messages of plan {plan.number} are gone from history, and files that held them from the staging "
            "folder; begin anew with --mode overwrite"
        )
    plan.files = [
        found[key] if (key := (file.is_rejected, file.name)) in missing else file
        for file in plan.files
    ]


def _results(staging: Path) -> list[Done]:
    """What the tasks say, in the order of ranges."""
    return [
        msgspec.json.decode(path.read_bytes(), type=Done)
        for path in sorted(staging.glob("?????*.done"))
    ]
