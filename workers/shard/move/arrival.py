"""A partition arrives from a log of another worker: what the worker that gets it does.

    move_here     forget what is left of an earlier life -> copy frames until nearly all are here
    move_finish   (closed over there by now) copy the rest and the state -> records -> all durable
    move_drop     it does not come after all

Frames are copied as they are: offsets, times and the producers' own crcs stay; they get a place, a
crc and an index entry in this log. Until the records are durable and the coordinator has recorded
the new owner, all of it is garbage to this log, and a restart forgets it: see `moves.py`.
"""

from __future__ import annotations

import logging
from typing import Any

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
"""Copying goes on when the disk has no more than this to catch up with: publishers share it."""
READ_TIMEOUT_MS = 5_000
PACE_NS = 20_000_000_000
"""In so long the messages that are left to copy must have become fewer."""


class _Arrival:
    """One partition on its way here."""

    __slots__ = ("assigned", "check_ns", "end_offset", "frames", "left", "log_epoch", "next_offset", "owner_epoch",
                 "partition_id", "purged", "request", "slot", "source", "start_position", "state",
                 "state_bytes", "waits")  # fmt: skip

    def __init__(self, request: Request, assigned: r.PartitionAssigned, slot: int) -> None:
        self.request: Request | None = request
        self.assigned = assigned
        self.partition_id = assigned.partition_id
        self.slot = slot
        self.source: int = request.arguments["source"]
        self.owner_epoch: int = request.arguments["owner_epoch"]
        self.log_epoch = 0
        self.start_position = 0
        self.next_offset = 0
        self.check_ns = self.left = 0
        """When to look next whether copying catches up; how many messages were left the last time."""
        self.end_offset = -1
        self.state_bytes = 0
        self.state = bytearray()
        self.frames: list[Stored] = []
        """Of a topic that is kept in memory."""
        self.purged = False
        self.waits = True
        """For a turn, not for an answer."""


class Arrivals(Job):
    """Handlers of one worker, and the copying."""

    def __init__(self, state: ShardState, ownership: Ownership, quota: WorkerQuota) -> None:
        self._state, self._ownership, self._quota = state, ownership, quota
        self._arriving: dict[int, _Arrival] = {}
        state.boot.mailbox.handlers.update(
            {"move_here": self._begin, "move_finish": self._finish, "move_drop": self._drop}
        )

    @property
    def is_busy(self) -> bool:
        """Something is to be done in the next turns."""
        return any(arrival.waits for arrival in self._arriving.values())

    def needed_position(self, slot: int) -> int | None:
        """What lies behind it in that log is not to be trimmed; None: anything may be."""
        starts = [a.start_position for a in self._arriving.values() if a.slot == slot]
        return min(starts, default=None)

    def do_work(self, now_ns: int) -> None:
        """Go on with what waits for a turn."""
        for arrival in list(self._arriving.values()):
            if arrival.waits:
                self._proceed(arrival)

    # ------------------------------------------------------------ asked by the coordinator

    def _begin(self, request: Request) -> None:
        """{"assignment", "source", "owner_epoch"} -> {} when nearly all messages are here."""
        assigned = r.PartitionAssigned.of(request.arguments["assignment"])
        slot = self._ownership.slot_of(request.arguments["assignment"]["log_id"])
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

    def _finish(self, request: Request) -> None:
        """{"partition_id", "end_offset", "state_bytes", counts} -> {} when all of it is durable."""
        arrival = self._arriving.get(request.arguments["partition_id"])
        if arrival is None:
            raise Unavailable("the move was given up meanwhile; try again")
        arrival.request = request
        arrival.end_offset = request.arguments["end_offset"]
        arrival.state_bytes = request.arguments["state_bytes"]
        self._proceed(arrival)

    def _drop(self, request: Request) -> None:
        """{"partition_id"}: it does not come."""
        partition_id = request.arguments["partition_id"]
        self._give_up(partition_id)
        partition = self._state.partition(partition_id)
        if partition is not None and partition.moving is r.Moving.ARRIVING:
            self._ownership.drop(partition)
        request.reply({})

    def give_up_all(self) -> None:
        """Who asked for them is gone."""
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
        """The next step; what prevents it is the end of this arrival, and of nothing else."""
        try:
            self._go_on(arrival)
        except DanubeError as error:
            self._fail(arrival, error)

    def _go_on(self, arrival: _Arrival) -> None:
        """The next step, now or in a later turn. Raises what prevents it."""
        log = self._state.logs[arrival.slot]
        arrival.waits = True
        if not arrival.purged:
            arrival.purged = log.purge_partition(arrival.partition_id)
            return
        if log.written_position - log.synced_position > UNSYNCED_BYTES_MAX:
            return
        arrival.waits = False
        if arrival.end_offset < 0 or arrival.next_offset < arrival.end_offset:
            arguments = {"partition_id": arrival.partition_id, "offset": arrival.next_offset}
            self._ask(arrival, "move_read", arguments)
        elif len(arrival.state) < arrival.state_bytes:
            arguments = {"partition_id": arrival.partition_id, "at": len(arrival.state)}
            self._ask(arrival, "move_state", arguments)
        else:
            self._settle(arrival)

    def _ask(self, arrival: _Arrival, operation: str, arguments: dict[str, Any]) -> None:
        def got(reply: Reply) -> None:
            if self._arriving.get(arrival.partition_id) is not arrival:
                return
            try:
                if operation == "move_state":
                    reply.result()
                    arrival.state += reply.body
                    self._go_on(arrival)
                else:
                    self._take(arrival, reply.result(), reply.body)
            except DanubeError as error:
                self._fail(arrival, error)

        self._state.boot.mailbox.call(
            arrival.source, operation, arguments, on_reply=got, timeout_ms=READ_TIMEOUT_MS
        )

    def _take(self, arrival: _Arrival, value: dict[str, Any], body: Any) -> None:
        """Keep what was read, while the other worker reads what follows. Raises what prevents it."""
        arrival.next_offset = max(arrival.next_offset, value["next_offset"])
        is_closed = arrival.end_offset >= 0
        more = arrival.next_offset < arrival.end_offset if is_closed else not value["is_end"]
        if more:
            self._check_pace(arrival, value["end_offset"])
            self._go_on(arrival)
        if len(body):
            frames = bytearray(body)
            if value["is_logged"]:
                self._write(arrival, frames)
            else:
                arrival.frames += frames_of(arrival.partition_id, frames)
        if more:
            return
        if is_closed:
            self._go_on(arrival)
        elif arrival.request is not None:
            request, arrival.request = arrival.request, None
            request.reply({})

    def _check_pace(self, arrival: _Arrival, end_offset: int) -> None:
        """Copying must catch up with publishing, or there is no end to it."""
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
        used = sum(each.bytes_on_disk for each in self._state.logs)
        if used > self._quota.allowance_bytes:
            raise ResourceExhausted(
                f"{arrival.assigned.topic} does not fit there: that worker's logs have {used} bytes "
                f"of {self._quota.allowance_bytes} (wal_bytes_max); let them be consumed first"
            )
        self._check_log(arrival)
        write_again(self._state.journals[arrival.slot], frames, self._state.now_ns)

    def _check_log(self, arrival: _Arrival) -> None:
        """A sync that failed may have taken frames back that nobody else here knows of."""
        log = self._state.logs[arrival.slot]
        if log.epoch != arrival.log_epoch or log.sync_fault is not None:
            raise Unavailable("the disk of the other worker's log failed meanwhile; try again")

    # ------------------------------------------------------------ the end

    def _settle(self, arrival: _Arrival) -> None:
        """All is here: enter it, closed as yet, and answer when it is durable."""
        self._check_log(arrival)
        request = arrival.request
        if request is None:
            raise Internal("a partition arrived that nobody waits for; report this")
        moving = r.PartitionMoving(
            arrival.partition_id, r.Moving.ARRIVING, arrival.owner_epoch, arrival.assigned
        )
        records = [moving, *r.decode_snapshot(bytes(arrival.state))]
        partition = self._ownership.enter(records, arrival.slot, arrival.frames)
        partition.message_count = request.arguments["message_count"]
        partition.byte_count = request.arguments["byte_count"]

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
            request.reply({})

        journal = self._state.journals[arrival.slot]
        for record in records[:-1]:
            journal.record(record)
        journal.record(records[-1], recorded)
