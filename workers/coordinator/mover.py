"""The coordinator's part of a move: it leads the two workers through the steps, and decides.

    move_here ---------> new worker      copying, for as long as it takes; publishing goes on
    move_freeze -------> old worker      from here on publishers wait
    move_finish -------> new worker
    compare-and-set in the metadata      the decision
    assign ------------> new worker      publishers go on
    move_away ---------> old worker

Before the decision anything that goes wrong ends the move and nothing has changed: both workers are told,
and a worker that was restarted asks. A worker that asks ends the moves that it takes part in first, so what
it hears is not overtaken by a decision. See `moves.py` for what the workers do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from danube_fast.broker import messages as m
from danube_fast.broker.topics.directory import TopicDirectory
from danube_fast.broker.topics.records import PartitionRecord
from danube_fast.clock import MILLISECOND_NS, Clock
from danube_fast.errors import DanubeError, FailedPrecondition, Unavailable
from danube_fast.workers.coordinator.placement import Placement, Workers, assignment
from danube_fast.workers.process.mailbox import Mailbox, Reply

__all__ = ["MoveDone", "Mover"]

_log = logging.getLogger(__name__)

COPY_TIMEOUT_MS = 3_600_000
FREEZE_TIMEOUT_MS = 5_000
FINISH_TIMEOUT_MS = 10_000
"""How long publishers of a partition may have to wait before the move is given up."""
TELL_TIMEOUT_MS = 5_000
PLACE_WAIT_NS = 10_000_000_000

MoveDone = Callable[["dict[str, Any] | None", "DanubeError | None"], None]
"""Called with what was moved, or with what prevented it."""


class MoveContext(Workers, Protocol):
    """The coordinator's attributes for moves."""

    clock: Clock


@dataclass(eq=False)
class _Move:
    """One move that is under way."""

    record: PartitionRecord
    source: int
    target: int
    log_id: int
    done: MoveDone
    began_ns: int
    frozen_ns: int = 0
    is_freezing: bool = False
    """The old worker was asked to close the partition."""


class Mover:
    """Lead the moves that are under way. Used by the coordinator's loop only."""

    def __init__(
        self, mailbox: Mailbox, topics: TopicDirectory, placement: Placement, workers: MoveContext
    ) -> None:
        self._mailbox, self._topics, self._placement = mailbox, topics, placement
        self._workers = workers
        self._moves: dict[int, _Move] = {}
        placement.asked.append(self._asked)

    @property
    def moving(self) -> dict[int, int]:
        """Worker (process index) that each moving partition goes to, by partition id."""
        return {partition_id: move.target for partition_id, move in self._moves.items()}

    def start(self, record: PartitionRecord, log_id: int, done: MoveDone) -> None:
        """Move a partition to another worker's log; `done` with what happened. Raises
        FailedPrecondition if it is moving already, Unavailable if one of the workers is down."""
        partition_id = record.partition_id
        if partition_id in self._moves:
            raise FailedPrecondition(
                f"partition {record.index} of {record.topic} is being moved already; wait for that"
            )
        if record.topic in self._topics.growing:
            raise FailedPrecondition(
                f"{record.topic} is just being given more partitions; try again"
            )
        workers = self._workers
        source, target = workers.process_of(record.log_id), workers.process_of(log_id)
        number = workers.processes.number
        for worker in (source, target):
            if not workers.ready_epoch(worker):
                raise Unavailable(
                    f"worker {number(worker)} is down or starting just now; nothing was moved: try again"
                )
        move = _Move(record, source, target, log_id, done, workers.clock.monotonic_ns())
        # first the placement: the old worker must know the partition
        entry = assignment(self._topics, record)
        if entry is None:
            raise FailedPrecondition(f"topic {record.topic} is just being deleted")
        self._moves[partition_id] = move
        self._placement.when_placed(
            [record],
            move.began_ns + PLACE_WAIT_NS,
            lambda error: self._copy(move, msgspec.structs.replace(entry, log_id=log_id), error),
        )

    # ---------------------------------------------------------------- steps

    def _call(
        self, move: _Move, worker: int, message: m.Message, then: Callable[[Any], None],
        timeout_ms: int,
    ) -> None:  # fmt: skip
        """Ask a worker for one step; an error ends the move, and so does silence."""

        def got(reply: Reply) -> None:
            if self._moves.get(move.record.partition_id) is not move:
                return
            if reply.error is not None:
                self._end(move, reply.error)
            else:
                then(reply.value)

        self._mailbox.call(worker, message, on_reply=got, timeout_ms=timeout_ms)

    def _copy(self, move: _Move, entry: m.Assignment, error: DanubeError | None) -> None:
        if self._moves.get(move.record.partition_id) is not move:
            return
        if error is not None:
            self._end(move, error)
            return
        message = m.CopyPartition(entry, move.source, move.record.owner_epoch + 1)
        self._call(move, move.target, message, lambda _: self._freeze(move), COPY_TIMEOUT_MS)

    def _freeze(self, move: _Move) -> None:
        move.is_freezing = True
        move.frozen_ns = self._workers.clock.monotonic_ns()
        partition_id = move.record.partition_id

        def closed(frozen: m.Frozen) -> None:
            move.frozen_ns += frozen.drained_ms * MILLISECOND_NS  # publishing went on
            message = m.FinishMove(partition_id, frozen)
            self._call(
                move, move.target, message, lambda _: self._decide(move, frozen), FINISH_TIMEOUT_MS
            )

        message = m.FreezePartition(partition_id, move.record.owner_epoch + 1)
        self._call(move, move.source, message, closed, FREEZE_TIMEOUT_MS)

    def _decide(self, move: _Move, frozen: m.Frozen) -> None:
        """Record the new owner: all of it is durable in the new log, and the old one is closed."""
        try:
            moved = self._topics.move(move.record, move.log_id, frozen.first_offset)
        except DanubeError as error:
            self._end(move, error)
            return
        del self._moves[move.record.partition_id]
        self._placement.moved(move.record)
        self._tell(move.source, m.PartitionMoved(move.record.partition_id))

        def placed(error: DanubeError | None) -> None:
            # it has moved in any case: a worker that went away just now takes it up when it is back
            now_ns, number = self._workers.clock.monotonic_ns(), self._workers.processes.number
            milliseconds = (now_ns - move.began_ns) // MILLISECOND_NS
            paused_ms = (now_ns - move.frozen_ns) // MILLISECOND_NS
            _log.info(
                "partition %d of %s moved from worker %d to worker %d in %d ms (publishers waited %d ms)",
                moved.index, moved.topic, number(move.source), number(move.target), milliseconds, paused_ms,
            )  # fmt: skip
            move.done(
                {
                    "partition": moved.index,
                    "from_worker": number(move.source),
                    "to_worker": number(move.target),
                    "log_id": moved.log_id,
                    "milliseconds": milliseconds,
                    "paused_ms": paused_ms,
                },
                None,
            )

        deadline_ns = self._workers.clock.monotonic_ns() + PLACE_WAIT_NS
        self._placement.when_placed([moved], deadline_ns, placed)

    # ---------------------------------------------------------------- ends

    def give_up(self, partition_ids: list[int], reason: str) -> None:
        """End the moves of partitions that are to be changed or deleted."""
        for partition_id in partition_ids:
            move = self._moves.get(partition_id)
            if move is not None:
                self._end(move, FailedPrecondition(f"{move.record.topic} was not moved: {reason}"))

    def _asked(self, worker: int, _: m.FindAssignments) -> None:
        """End the moves of a worker that asks for its partitions: its answer must not be overtaken by a decision."""
        number = self._workers.processes.number
        for move in list(self._moves.values()):
            if worker == move.target or (worker == move.source and move.is_freezing):
                text = f"worker {number(worker)} was restarted; nothing was moved: try again"
                self._end(move, Unavailable(text))

    def _end(self, move: _Move, error: DanubeError) -> None:
        """Leave the partition where it is."""
        partition_id = move.record.partition_id
        del self._moves[partition_id]
        _log.warning(
            "partition %d of %s stays on worker %d: %s",
            move.record.index, move.record.topic, self._workers.processes.number(move.source), error,
        )  # fmt: skip
        self._tell(move.source, m.CancelMove(partition_id))
        self._tell(move.target, m.DropCopy(partition_id))
        move.done(None, error)

    def _tell(self, worker: int, message: m.PartitionMoved | m.CancelMove | m.DropCopy) -> None:
        """Repeat a message until it is answered; a worker that is restarted asks by itself."""
        epoch = self._workers.ready_epoch(worker)

        def got(reply: Reply) -> None:
            alive = epoch and self._workers.ready_epoch(worker) == epoch
            if reply.error is not None and alive and message.partition_id not in self._moves:
                self._tell(worker, message)

        self._mailbox.call(worker, message, on_reply=got, timeout_ms=TELL_TIMEOUT_MS)
