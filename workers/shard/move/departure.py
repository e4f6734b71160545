"""Departure of a partition to a log of another worker: the side of the worker that has it so far.

    ReadPartition     frames from an offset on; any number of times, publishing goes on
    FreezePartition   consumers are sent away, and their last acks taken; then the partition is closed, and
                      publishers try again later. Answered when all of it and a record of this are durable
    ReadState         the rest (offsets, producers and their windows, subscriptions), in pieces
    CancelMove        it stays after all           PartitionMoved    the other log has it: forget it

Between freeze and the last two this worker does not know whose it is, also after a restart: see `moves.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from danube_fast.broker import messages as m
from danube_fast.broker import records as r
from danube_fast.broker.admission.layout import PartitionWord
from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.consumer import Consumer, Gap, Parting, Ready
from danube_fast.clock import MILLISECOND_NS
from danube_fast.errors import DanubeError, NotOwner, Unavailable
from danube_fast.workers.process.mailbox import Request
from danube_fast.workers.shard.deliver.consumers import Consumers
from danube_fast.workers.shard.deliver.dispatcher import Dispatcher
from danube_fast.workers.shard.job import Job
from danube_fast.workers.shard.move.ownership import Ownership
from danube_fast.workers.shard.read.log_reader import LogReader
from danube_fast.workers.shard.state import ShardState

__all__ = ["PIECE_BYTES", "Departures"]

PIECE_BYTES = 384 * 1024
"""One answer; a single frame may be larger. Fits a mailbox of the default size in one record."""
SEGMENT_PARTS = 4
"""A piece is no larger than such a part of a segment: it becomes one group of the other log."""


DRAIN_NS = 1_000_000_000
"""How long to wait for the last acks of consumers that were sent away, unless they say that they have left.
Twice a heartbeat: a client whose application is busy reads messages with the next."""


@dataclass(eq=False)
class _Drain:
    """A partition whose consumers were sent away, while their last acks are on the way."""

    request: Request[m.FreezePartition] | None
    """None: the move was given up."""
    partition: Partition
    consumers: list[Consumer]
    began_ns: int

    @property
    def is_over(self) -> bool:
        """Whether all have left."""
        return all(consumer.slot < 0 for consumer in self.consumers)


class Departures(Job):
    """Let partitions of one worker go to another."""

    def __init__(
        self, state: ShardState, ownership: Ownership, reader: LogReader, consumers: Consumers,
        dispatcher: Dispatcher,
    ) -> None:  # fmt: skip
        self._state, self._ownership, self._reader = state, ownership, reader
        self._consumers, self._dispatcher = consumers, dispatcher
        self.drains: dict[int, _Drain] = {}
        """By partition id; publishing goes on, and nothing is delivered."""
        mailbox = state.boot.mailbox
        mailbox.serve(m.ReadPartition, self._read)
        mailbox.serve(m.FreezePartition, self._freeze)
        mailbox.serve(m.ReadState, self._send_state)
        mailbox.serve(m.CancelMove, self._cancel)
        mailbox.serve(m.PartitionMoved, self._away)

    def _require(self, partition_id: int) -> Partition:
        partition = self._state.partition(partition_id)
        if partition is None or partition.moving is r.Moving.ARRIVING:
            raise NotOwner(f"partition {partition_id} is not here")
        return partition

    # ------------------------------------------------------------ messages

    def _read(self, request: Request[m.ReadPartition]) -> None:
        partition = self._require(request.message.partition_id)
        offset = max(request.message.offset, partition.purged_until)
        is_logged, frames = self._frames(partition, offset)
        reached = frames[-1][1] if frames else partition.visible
        body = b"".join(memory for memory, _ in frames)
        end = partition.visible
        request.reply(m.Copied(reached, end, is_end=reached >= end, is_logged=is_logged), body)

    def _frames(self, partition: Partition, offset: int) -> tuple[bool, list[tuple[Any, int]]]:
        """Read about PIECE_BYTES of frames from an offset on, each with its end; whether from the log."""
        piece_bytes = min(PIECE_BYTES, self._state.settings.segment_bytes // SEGMENT_PARTS)
        oldest = partition.oldest_in_tail()
        kept_until = partition.visible if oldest is None else oldest.base_offset
        if partition.reliable and (partition.logged or offset < kept_until):
            found = self._reader.read_log(partition, offset, piece_bytes)
            if isinstance(found, Gap):
                found = self._reader.read_log(partition, found.end, piece_bytes)
            frames = found.frames if isinstance(found, Ready) else []
            if frames or partition.logged:
                return True, [(stored.memory, stored.end_offset) for stored in frames]
        some: list[tuple[Any, int]] = []
        size = 0
        for stored in partition.tail_frames():
            if stored.end_offset > offset and size < piece_bytes:
                some.append((stored.memory, stored.end_offset))
                size += stored.frame_bytes
        return False, some

    # ------------------------------------------------------------ closing

    def _freeze(self, request: Request[m.FreezePartition]) -> None:
        partition = self._require(request.message.partition_id)
        drain = self.drains.get(partition.partition_id)
        if drain is not None:  # of a move that was given up
            drain.request = request
            return
        if partition.is_changing:
            raise Unavailable(f"{partition.topic} is being changed just now; try again")
        consumers = self._ownership.dismiss_consumers(partition)
        drain = _Drain(request, partition, consumers, self._state.now_ns)
        self.drains[partition.partition_id] = drain
        self._state.leaving.add(partition.partition_id)
        if not consumers:
            self._end_drain(drain)

    def give_up_all(self) -> None:
        """Close nothing any more for the coordinator that asked: it is gone."""
        for drain in self.drains.values():
            drain.request = None

    @property
    def is_busy(self) -> bool:
        """Whether last acks are waited for."""
        return bool(self.drains)

    def do_work(self, now_ns: int) -> None:
        """Close partitions that all consumers have left."""
        for drain in list(self.drains.values()):
            if drain.is_over or now_ns - drain.began_ns >= DRAIN_NS:
                self._end_drain(drain)

    def _end_drain(self, drain: _Drain) -> None:
        """End the wait: messages without an ack are delivered again, wherever the partition is then."""
        partition = drain.partition
        del self.drains[partition.partition_id]
        self._state.leaving.discard(partition.partition_id)
        for consumer in drain.consumers:
            session = self._state.sessions.by_number(consumer.session)
            if session is not None and consumer.slot >= 0:
                self._consumers.detach(session, consumer, Parting.LOST)
        request = drain.request
        if request is None:
            return
        if self._state.partition(partition.partition_id) is not partition:
            request.fail(NotOwner(f"{partition.topic} was deleted just now"))
        elif partition.is_changing:
            request.fail(Unavailable(f"{partition.topic} is being changed just now; try again"))
        else:
            drain_ms = (self._state.now_ns - drain.began_ns) // MILLISECOND_NS
            self._close(request, partition, drain_ms)

    def _close(
        self, request: Request[m.FreezePartition], partition: Partition, drain_ms: int
    ) -> None:
        self._ownership.send_consumers_away(partition)
        epoch = request.message.owner_epoch
        self._state.catalog.begin_move(partition, r.Moving.LEAVING, epoch)

        def recorded(error: DanubeError | None) -> None:
            if self._state.partition(partition.partition_id) is not partition:
                request.fail(NotOwner(f"{partition.topic} was deleted just now"))
                return
            self._dispatcher.show_memory_entries()
            row = self._state.tables.partitions[partition.slot]
            if error is None and partition.visible != int(row[PartitionWord.NEXT_OFFSET]):
                error = Unavailable(f"{partition.topic} has messages under way; try again")
            if error is not None or partition.moving is not r.Moving.LEAVING:
                self._ownership.release(partition)
                request.fail(error or Unavailable("the move was given up meanwhile"))
                return
            state = r.encode_snapshot(self._state.catalog.export(partition))
            self._ownership.exports[partition.partition_id] = state
            request.reply(
                m.Frozen(
                    partition.visible, partition.first_offset, len(state),
                    partition.message_count, partition.byte_count, drain_ms,
                )
            )  # fmt: skip

        moving = r.PartitionMoving(partition.partition_id, r.Moving.LEAVING, partition.moving_epoch)
        self._state.record(partition, moving, recorded)

    def _send_state(self, request: Request[m.ReadState]) -> None:
        state = self._ownership.exports.get(request.message.partition_id)
        if state is None:
            raise NotOwner("the move was given up meanwhile")
        at = request.message.at
        request.reply(None, state[at : at + PIECE_BYTES])

    # ------------------------------------------------------------ the decision

    def _cancel(self, request: Request[m.CancelMove]) -> None:
        partition_id = request.message.partition_id
        drain = self.drains.get(partition_id)
        if drain is not None:
            drain.request = None
        partition = self._state.partition(partition_id)
        if partition is not None and partition.moving is r.Moving.LEAVING:
            self._ownership.release(partition)
        request.reply()

    def _away(self, request: Request[m.PartitionMoved]) -> None:
        partition = self._state.partition(request.message.partition_id)
        if partition is not None and partition.moving is r.Moving.LEAVING:
            self._ownership.drop(partition)
        request.reply()
