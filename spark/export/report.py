"""What an export has done, or would do."""

from __future__ import annotations

import msgspec

from danube_fast.spark.export.plan import ExportPlan, Totals

__all__ = ["PartitionReport", "Progress", "Report"]


class PartitionReport(msgspec.Struct):
    """Offsets of one partition."""

    partition: int
    start: int
    end: int
    """Offsets are below."""
    messages: int
    """Of a dry run: offsets."""


class Report(msgspec.Struct):
    """The result of a run."""

    topic: str
    target: str
    dry_run: bool = False
    messages: int = 0
    payload_bytes: int = 0
    files: int = 0
    file_bytes: int = 0
    """Of a dry run: of history, about."""
    rejected: int = 0
    checksum: int | None = None
    """The sum of the crc32 of all payloads, as `sum(crc32(payload))` of Spark SQL; None: payloads were not read."""
    replaced: int | None = None
    """Messages of the target that an overwrite replaces, or would replace; None: nothing, or it is not known."""
    plans: int = 0
    recovered: bool = False
    """Whether a plan of a run before was finished first."""
    partitions: list[PartitionReport] = []
    seconds: float = 0.0
    messages_per_second: float = 0.0

    def add(self, plan: ExportPlan, *, has_payloads: bool) -> None:
        """Count a plan that is done."""
        totals: Totals = plan.totals
        self.messages += totals.messages
        self.payload_bytes += totals.payload_bytes
        self.files += totals.files
        self.file_bytes += totals.file_bytes
        self.rejected += totals.rejected
        if has_payloads:
            self.checksum = (self.checksum or 0) + totals.checksum
        self.plans += 1
        rows = [0] * len(plan.ranges)
        for file in plan.files:
            if not file.is_rejected:
                rows[file.range_index] += file.rows
        for each, count in zip(plan.ranges, rows, strict=True):
            self.extend(each.partition, each.low, each.high, count)

    def extend(self, partition: int, low: int, high: int, messages: int) -> None:
        """Count offsets of a partition."""
        for known in self.partitions:
            if known.partition == partition:
                known.start, known.end = min(known.start, low), max(known.end, high)
                known.messages += messages
                return
        self.partitions.append(PartitionReport(partition, low, high, messages))
        self.partitions.sort(key=lambda each: each.partition)

    def finish(self, seconds: float) -> None:
        """Note how long it took."""
        self.seconds = round(seconds, 3)
        self.messages_per_second = round(self.messages / seconds) if seconds else 0.0


class Progress(msgspec.Struct, frozen=True):
    """How far a run is."""

    done_bytes: int
    total_bytes: int
    """Of the plan under way, uncompressed; 0: it waits."""
    messages: int
    """Staged and published by this run."""
    seconds: float = 0.0
    """Since the tasks of the plan began."""
    pending: int = 0
    """Messages that are waited for to become enough."""
