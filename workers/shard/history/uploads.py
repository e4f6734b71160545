"""A worker's side of the upload: which messages are to be uploaded, where they stand, how far they are.

    uploader -- ListBacklogs --> partitions with messages that only the log has
             -- ListLogOnly --> partitions without history
             -- HistoryRuns ---> their frames in the log's files, durable ones only
             -- NameProducers -> the names of those who published them
             -- SetUploaded ---> a record in the log; behind it the log may be trimmed

Asking is pinning: nothing from `uploaded.until` on is trimmed (`segments.py`), and the uploader asks for nothing
else. Frames that are written again meanwhile are found elsewhere: then it asks once more.
"""

from __future__ import annotations

from collections.abc import Callable

from danube_fast.broker import messages as m
from danube_fast.broker import records as r
from danube_fast.broker.partition import Partition
from danube_fast.broker.topics.policy import RetentionPolicy
from danube_fast.errors import DanubeError, FailedPrecondition, Unavailable
from danube_fast.wal.log import Log
from danube_fast.workers.process.mailbox import Request
from danube_fast.workers.shard.history.backlogs import Backlogs
from danube_fast.workers.shard.read.places import first_run, live_runs
from danube_fast.workers.shard.state import ShardState

__all__ = ["Uploads"]

URGENT_PART = 4
"""When a quarter of what may wait for the store waits, all is uploaded at once."""
RUNS_BYTES = 1 << 20
"""Looked up at a time."""
RUNS_MAX = 4096
"""Ranges in one answer."""


class Uploads:
    """Answer the uploader on one worker."""

    def __init__(self, state: ShardState, backlogs: Backlogs) -> None:
        self._state, self._backlogs = state, backlogs
        self._uploader_epoch = 0
        self.after_upload: Callable[[Partition], None] = lambda partition: None
        """Called when all of a partition is uploaded: its log may be trimmed, though nothing more is written."""
        state.policy_listeners.append(self._apply)
        mailbox = state.boot.mailbox
        mailbox.serve(m.HistoryReport, self._hear)
        mailbox.serve(m.ListBacklogs, self._list)
        mailbox.serve(m.ListLogOnly, self._list_log_only)
        mailbox.serve(m.HistoryRuns, self._runs)
        mailbox.serve(m.NameProducers, self._names)
        mailbox.serve(m.SetUploaded, self._set)

    def _apply(self, partition: Partition) -> None:
        """Give up the history of a topic whose policy wants none any more. Raises FailedPrecondition without a
        store."""
        if not partition.uploaded.until or self._state.keeps_history(partition):
            return
        if not self._state.settings.store:
            raise FailedPrecondition(
                f"{partition.topic} has messages in an object store, and the broker was started without "
                "one; start it with --store and the URL that it had"
            )
        log = self._log(partition)
        run = first_run(log, partition, partition.first_offset)
        first = run.base_offset if run is not None else partition.visible
        self._note(partition, r.Uploaded(partition.partition_id, 0, first, -1))
        self._state.record(partition, partition.uploaded)

    def _check(self, uploader_epoch: int) -> None:
        """Believe the newest uploader only. Raises FailedPrecondition."""
        if uploader_epoch < self._uploader_epoch:
            raise FailedPrecondition(
                f"uploader {uploader_epoch} has ended: {self._uploader_epoch} has begun after it"
            )
        self._uploader_epoch = uploader_epoch

    def _partition(self, partition_id: int) -> Partition:
        partition = self._state.served(partition_id)
        if not partition.logged:
            raise FailedPrecondition(f"{partition.topic} is not in the log")
        if partition.is_changing:
            raise Unavailable(f"{partition.topic} is being changed just now; try again")
        return partition

    def _hear(self, request: Request[m.HistoryReport]) -> None:
        self._backlogs.fault = request.message.fault

    # ------------------------------------------------------------ backlogs

    def _list(self, request: Request[m.ListBacklogs]) -> None:
        self._check(request.message.uploader_epoch)
        backlogs, asked = self._backlogs, request.message
        backlogs.fault = request.message.fault
        waiting = backlogs.bytes
        is_urgent = waiting * URGENT_PART > backlogs.bytes_max
        if asked.named is None:
            some = backlogs.partitions()
        elif asked.are_others:
            some = backlogs.some_partitions(asked.named)
        else:
            some = backlogs.partitions_of(asked.named)
        listed = [
            self._backlog(partition, is_urgent=is_urgent)
            for partition in some
            if not partition.is_changing
        ]
        ages_ns = [backlog.age_ns for backlog in listed]
        oldest_ns = backlogs.oldest_ns(ages_ns) if asked.are_others else max(ages_ns, default=0)
        request.reply(m.Listed(listed, waiting, oldest_ns))

    def _list_log_only(self, request: Request[m.ListLogOnly]) -> None:
        self._check(request.message.uploader_epoch)
        found = [self._state.partition(number) for number in request.message.partition_ids]
        request.reply(
            [
                self._backlog(partition, is_urgent=False)
                for partition in found
                if partition is not None
                and partition.logged
                and not self._state.keeps_history(partition)
                and not partition.uploaded.until
                and not partition.is_changing
            ]
        )

    def _backlog(self, partition: Partition, *, is_urgent: bool) -> m.Backlog:
        uploaded, policy = partition.uploaded, partition.policy
        expires = policy.retention_policy is RetentionPolicy.UNTIL_EXPIRED
        return m.Backlog(
            partition.partition_id, partition.topic, partition.assigned.incarnation,
            partition.first_offset, uploaded.until, uploaded.manifest, partition.visible,
            self._backlogs.size_of(partition), self._backlogs.age_ns(partition),
            policy.retention_seconds if expires else 0, policy.retention_bytes if expires else 0, self._bytes_in_log(partition),
            is_urgent,
        )  # fmt: skip

    @staticmethod
    def _bytes_in_log(partition: Partition) -> int:
        """Count what is not uploaded, exactly, for a policy on sizes; 0 if that is not known."""
        if partition.sizes is None:
            return 0
        start = max(partition.uploaded.until, partition.first_offset)
        return partition.sizes.between(start, partition.visible)

    def _log(self, partition: Partition) -> Log:
        return self._state.logs[partition.log_slot]

    # ------------------------------------------------------------ frames

    def _runs(self, request: Request[m.HistoryRuns]) -> None:
        asked = request.message
        self._check(asked.uploader_epoch)
        partition = self._partition(asked.partition_id)
        log = self._log(partition)
        ranges: list[m.FileRange] = []
        at, left = max(asked.offset, partition.first_offset), asked.bytes_max
        while at < partition.visible and left > 0 and len(ranges) < RUNS_MAX:
            runs = live_runs(log, partition, at, min(left, RUNS_BYTES))
            if not runs:
                at = partition.visible
                break
            for run in runs:
                end = run.position + run.byte_count
                if run.end_offset > partition.visible or end > log.synced_position:
                    request.reply(m.Runs(ranges, max(at, min(run.base_offset, partition.visible))))
                    return
                files = log.files(run)
                if len(files) != 1:
                    raise Unavailable(f"a run of {partition.topic} is in several files; try again")
                path, place, size = files[0]
                _extend(ranges, m.FileRange(path, place, size, run.end_offset))
                at = run.end_offset
                left -= size
        request.reply(m.Runs(ranges, at))

    def _names(self, request: Request[m.NameProducers]) -> None:
        asked = request.message
        self._check(asked.uploader_epoch)
        known = self._state.served(asked.partition_id).producer_names
        request.reply({each: known[each] for each in asked.producer_ids if each in known})

    # ------------------------------------------------------------ how far it is

    def _set(self, request: Request[m.SetUploaded]) -> None:
        asked = request.message
        self._check(asked.uploader_epoch)
        partition = self._partition(asked.partition_id)
        if not self._state.keeps_history(partition):
            raise FailedPrecondition(f"{partition.topic} has no history any more")
        if asked.until > partition.visible:
            raise FailedPrecondition(
                f"the store has {partition.topic} up to offset {asked.until}, but its log ends at "
                f"{partition.visible}: the log is older than the history; put back its newest copy, or "
                "give the broker an empty store"
            )
        record = r.Uploaded(
            asked.partition_id, asked.until, asked.first_offset, asked.manifest, asked.byte_count
        )
        journal = self._state.journals[partition.log_slot]
        journal.changing += 1  # a snapshot behind the record would not know of it

        def recorded(error: DanubeError | None) -> None:
            journal.changing -= 1
            if error is None and self._state.partition(partition.partition_id) is partition:
                self._note(partition, record)
            request.respond(None, error)

        self._state.record(partition, record, recorded)

    def _note(self, partition: Partition, record: r.Uploaded) -> None:
        before = max(partition.uploaded.until, partition.first_offset)
        partition.note_uploaded(record)
        partition.trim(record.first_offset)
        self._backlogs.note_uploaded(partition, before)
        if record.until >= partition.visible:
            self.after_upload(partition)


def _extend(ranges: list[m.FileRange], found: m.FileRange) -> None:
    """Add a range, to the last one if they stand back to back."""
    if ranges:
        last = ranges[-1]
        if last.path == found.path and last.position + last.byte_count == found.position:
            ranges[-1] = m.FileRange(
                last.path, last.position, last.byte_count + found.byte_count, found.end_offset
            )
            return
    ranges.append(found)
