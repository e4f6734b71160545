"""Arrival of a partition from a log of another worker: the side of the worker that gets it.

    CopyPartition   forget what is left of an earlier stay -> copy frames until nearly all are here
    FinishMove      (closed over there by now) copy the rest and the state -> records -> all durable
    DropCopy        the partition does not come after all

Frames are copied as they are: offsets, times and the producers' own crcs stay; they get a place, a
crc and an index entry in this log. Until the records are durable and the coordinator has recorded
the new owner, all of it is garbage to this log, and a restart forgets it: see `moves.py`.
"""

from __future__ import annotations

import logging
from typing import Any

from danube_fast.broker import messages as m
from danube_fast.broker import records as r
from danube_fast.broker.subscription.consumer import Stored
from danube_fast.errors import DanubeError, Internal, ResourceExhausted, Unavailable
from danube_fast.workers.process.mailbox import Reply, Request
from danube_fast.workers.reports.quota import WorkerQuota
from danube_fast.workers.shard.job import Job
from danube_fast.workers.shard.move.ownership import Ownership
from danube_fast.workers.shard.publish.copies import write_again
from danube_fast.workers.shard.read.frames import frames_of
from danube_fast.workers.shard.state import ShardState

__all__ = ["Arrivals"]

_log = logging.getLogger(__name__)

UNSYNCED_BYTES_MAX = 16 * 1024 * 1024
"""Copying goes on when no more than this waits for the disk: publishers share it."""
READ_TIMEOUT_MS = 5_000
PACE_NS = 20_000_000_000
"""How often the messages that are left to copy must have become fewer."""


class _Arrival:
    """One partition on its way here."""

    def __init__(
        self, request: Request[m.CopyPartition], assigned: r.PartitionAssigned, slot: int
    ) -> None:
        self.request: Request[Any] | None = request
        self.assigned, self.partition_id, self.slot = assigned, assigned.partition_id, slot
        self.source, self.owner_epoch = request.message.source, request.message.owner_epoch
        self.log_epoch = self.start_position = self.next_offset = 0
        self.check_ns = self.left = 0
        """When to look next whether copying catches up; how many messages were left the last time."""
        self.frozen: m.Frozen | None = None
        """Where the partition stood when it was closed; None: it is not."""
        self.state = bytearray()
        self.frames: list[Stored] = []
        """Of a topic that is kept in memory."""
        self.purged = False
        self.waits = True
        """Whether it waits for a turn, not for an answer."""


class Arrivals(Job):
    """Copy partitions into the logs of one worker."""

    def __init__(self, state: ShardState, ownership: Ownership, quota: WorkerQuota) -> None:
        self._state, self._ownership, self._quota = state, ownership, quota
        self._arriving: dict[int, _Arrival] = {}
        mailbox = state.boot.mailbox
        mailbox.serve(m.CopyPartition, self._begin)
        mailbox.serve(m.FinishMove, self._finish)
        mailbox.serve(m.DropCopy, self._drop)

    @property
    def is_busy(self) -> bool:
        """Whether an arrival goes on in the next turns."""
        return any(arrival.waits for arrival in self._arriving.values())

    def needed_position(self, slot: int) -> int | None:
        """Find the position from which on that log must not be trimmed; None if arrivals need nothing of it."""
        starts = [a.start_position for a in self._arriving.values() if a.slot == slot]
        return min(starts, default=None)

    def do_work(self, now_ns: int) -> None:
        """Go on with arrivals that wait for a turn."""
        for arrival in list(self._arriving.values()):
            if arrival.waits:
                self._proceed(arrival)

    # ------------------------------------------------------------ asked by the coordinator

    def _begin(self, request: Request[m.CopyPartition]) -> None:
        entry = request.message.assignment
        assigned = r.PartitionAssigned.of(entry)
        slot = self._ownership.slot_of(entry.log_id)
        known = self._state.partition(assigned.partition_id)
        if known is not None:
            if known.moving is not r.Moving.ARRIVING:
                raise Internal(f"{known.topic} is in a log of this worker already")
            self._ownership.drop(known)
        self._give_up(assigned.partition_id)
        arrival = _Arrival(request, assigned, slot)
        log = self._state.logs[slot]
        arrival.log_epoch, arrival.start_position = log.epoch, log.written_position
        self._arriving[assigned.partition_id] = arrival
        self._proceed(arrival)

    def _finish(self, request: Request[m.FinishMove]) -> None:
        arrival = self._arriving.get(request.message.partition_id)
        if arrival is None:
            raise Unavailable("the move was given up meanwhile; try again")
        arrival.request, arrival.frozen = request, request.message.frozen
        self._proceed(arrival)

    def _drop(self, request: Request[m.DropCopy]) -> None:
        partition_id = request.message.partition_id
        self._give_up(partition_id)
        partition = self._state.partition(partition_id)
        if partition is not None and partition.moving is r.Moving.ARRIVING:
            self._ownership.drop(partition)
        request.reply()

    def give_up_all(self) -> None:
        """Give up all arrivals: the coordinator that asked for them is gone."""
        for partition_id in list(self._arriving):
            self._give_up(partition_id)

    def _give_up(self, partition_id: int) -> None:
        arrival = self._arriving.pop(partition_id, None)
        if arrival is not None:
            self._state.logs[arrival.slot].drop_partition(partition_id)

    def _fail(self, arrival: _Arrival, error: DanubeError) -> None:
        if self._arriving.get(arrival.partition_id) is not arrival:
            return
        _log.warning("%s does not arrive: %s", arrival.assigned.topic, error)
        self._give_up(arrival.partition_id)
        if arrival.request is not None:
            arrival.request.fail(error)

    # ------------------------------------------------------------ copying

    def _proceed(self, arrival: _Arrival) -> None:
        """Take the next step; an error ends this arrival, and no other."""
        try:
            self._go_on(arrival)
        except DanubeError as error:
            self._fail(arrival, error)

    def _go_on(self, arrival: _Arrival) -> None:
        """Take the next step, now or in a later turn. Raises what prevents it."""
        log = self._state.logs[arrival.slot]
        arrival.waits = True
        if not arrival.purged:
            arrival.purged = log.purge_partition(arrival.partition_id)
            return
        if log.written_position - log.synced_position > UNSYNCED_BYTES_MAX:
            return
        arrival.waits = False
        frozen = arrival.frozen
        if frozen is None or arrival.next_offset < frozen.end_offset:
            self._ask(arrival, m.ReadPartition(arrival.partition_id, arrival.next_offset))
        elif len(arrival.state) < frozen.state_bytes:
            self._ask(arrival, m.ReadState(arrival.partition_id, len(arrival.state)))
        else:
            self._enter(arrival, frozen)

    def _ask(self, arrival: _Arrival, question: m.ReadPartition | m.ReadState) -> None:
        def got(reply: Reply) -> None:
            if self._arriving.get(arrival.partition_id) is not arrival:
                return
            try:
                if isinstance(question, m.ReadState):
                    reply.result()
                    arrival.state += reply.body
                    self._go_on(arrival)
                else:
                    self._take(arrival, reply.result(), reply.body)
            except DanubeError as error:
                self._fail(arrival, error)

        self._state.boot.mailbox.call(
            arrival.source, question, on_reply=got, timeout_ms=READ_TIMEOUT_MS
        )

    def _take(self, arrival: _Arrival, copied: m.Copied, body: Any) -> None:
        """Keep frames that came, while the other worker reads the next. Raises what prevents it."""
        arrival.next_offset = max(arrival.next_offset, copied.next_offset)
        frozen = arrival.frozen
        more = arrival.next_offset < frozen.end_offset if frozen else not copied.is_end
        if more:
            self._check_pace(arrival, copied.end_offset)
            self._go_on(arrival)
        if len(body):
            frames = bytearray(body)
            if copied.is_logged:
                self._write(arrival, frames)
            else:
                arrival.frames += frames_of(arrival.partition_id, frames)
        if more:
            return
        if frozen:
            self._go_on(arrival)
        elif arrival.request is not None:
            request, arrival.request = arrival.request, None
            request.reply()

    def _check_pace(self, arrival: _Arrival, end_offset: int) -> None:
        """Raise ResourceExhausted if copying does not catch up with publishing: there would be no end."""
        now_ns, left = self._state.now_ns, end_offset - arrival.next_offset
        if now_ns < arrival.check_ns:
            return
        if arrival.check_ns and left >= arrival.left:
            raise ResourceExhausted(
                f"{arrival.assigned.topic} is published to faster than it can be copied: {left} "
                "messages are left, and they get no fewer; move it at a quieter time"
            )
        arrival.check_ns, arrival.left = now_ns + PACE_NS, left

    def _write(self, arrival: _Arrival, frames: bytearray) -> None:
        """Write frames to the log, in a group of their own."""
        used = sum(each.bytes_on_disk for each in self._state.logs.values())
        if used > self._quota.allowance_bytes:
            raise ResourceExhausted(
                f"{arrival.assigned.topic} does not fit there: that worker's logs have {used} bytes "
                f"of {self._quota.allowance_bytes} (wal_bytes_max); let them be consumed first"
            )
        self._check_log(arrival)
        write_again(self._state.journals[arrival.slot], frames, self._state.now_ns)

    def _check_log(self, arrival: _Arrival) -> None:
        """Raise Unavailable after a failed sync: it may have taken back frames of this arrival."""
        log = self._state.logs[arrival.slot]
        if log.epoch != arrival.log_epoch or log.sync_fault is not None:
            raise Unavailable("the disk of the other worker's log failed meanwhile; try again")

    # ------------------------------------------------------------ the end

    def _enter(self, arrival: _Arrival, frozen: m.Frozen) -> None:
        """Enter the partition, closed as yet, and answer when all of it is durable."""
        self._check_log(arrival)
        request = arrival.request
        if request is None:
            raise Internal("a partition arrived without a request; report this")
        moving = r.PartitionMoving(
            arrival.partition_id, r.Moving.ARRIVING, arrival.owner_epoch, arrival.assigned
        )
        records = [moving, *r.decode_snapshot(bytes(arrival.state))]
        partition = self._ownership.enter(records, arrival.slot, arrival.frames)
        partition.restore_counts(frozen.message_count, frozen.byte_count)

        def recorded(error: DanubeError | None) -> None:
            current = self._arriving.get(arrival.partition_id) is arrival
            if not current or self._state.partition(arrival.partition_id) is not partition:
                request.fail(Unavailable("the move was given up meanwhile; try again"))
                return
            try:
                if error is not None:
                    raise error
                self._check_log(arrival)
            except DanubeError as failure:
                self._ownership.drop(partition)
                self._fail(arrival, failure)
                return
            del self._arriving[arrival.partition_id]
            request.reply()

        journal = self._state.journals[arrival.slot]
        for record in records[:-1]:
            journal.record(record)
        journal.record(records[-1], recorded)
