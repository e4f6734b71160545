"""The coordinator's rebalancer: workers report their loads, `broker/balance.py` decides, the mover moves.

It only looks when a report comes, so an idle broker does nothing. A move that it has begun is an ordinary
one: `topics describe` shows it, and a person's own moves go before it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from danube_fast.broker import messages as m
from danube_fast.broker.balance import RULES, Balancer, Move, Share, Strategy
from danube_fast.broker.topics.directory import TopicDirectory
from danube_fast.broker.topics.records import PartitionRecord
from danube_fast.clock import SECOND_NS, Clock
from danube_fast.config import Settings
from danube_fast.errors import DanubeError
from danube_fast.roles import Processes
from danube_fast.workers.process.mailbox import Mailbox, Request

__all__ = ["Rebalancer"]

_log = logging.getLogger(__name__)


class Hands(Protocol):
    """What it needs of the coordinator."""

    clock: Clock
    topics: TopicDirectory

    def ready_epoch(self, worker: int) -> int:
        """Epoch of a worker (by process index) that is ready, else 0."""
        ...

    def process_of(self, log_id: int) -> int:
        """Process index of the worker that owns a log."""
        ...

    def move(
        self,
        partition: PartitionRecord,
        worker: int,
        on_done: Callable[[dict[str, Any] | None, DanubeError | None], None],
    ) -> None:
        """Begin a move to a worker (by index)."""
        ...


class Rebalancer:
    """Used by the coordinator's loop only."""

    def __init__(
        self, mailbox: Mailbox, settings: Settings, processes: Processes, hands: Hands
    ) -> None:
        self._hands = hands
        self._processes = processes
        self.strategy = Strategy(settings.rebalance)
        self._balancer: Balancer | None = None
        self._is_moving = False
        self.move_count = 0
        """Moves made since the coordinator started."""
        rules = RULES.get(self.strategy)
        if rules is not None:
            if settings.rebalance_seconds:
                rules = rules._replace(lasts_ns=settings.rebalance_seconds * SECOND_NS)
            if settings.rebalance_moves_per_hour:
                rules = rules._replace(moves_per_hour_max=settings.rebalance_moves_per_hour)
            self._balancer = Balancer(rules, byte_count_max=settings.rebalance_bytes_max)
        mailbox.serve(m.LoadReport, self._reported)
        mailbox.epoch_watchers.append(self._restarted)

    def status(self) -> dict[str, Any]:
        """For `danube-fast status`."""
        now_ns = self._hands.clock.monotonic_ns()
        loads = []
        if self._balancer is not None:
            loads = [
                round(self._balancer.load_of(worker, now_ns), 3)
                for worker in self._processes.workers
            ]
        return {"strategy": self.strategy.value, "moves": self.move_count, "worker_loads": loads}

    def _restarted(self, worker: int, epoch: int) -> None:
        if self._balancer is not None:
            self._balancer.forget(worker)

    def _reported(self, request: Request[m.LoadReport]) -> None:
        balancer = self._balancer
        if balancer is None:
            return
        now_ns = self._hands.clock.monotonic_ns()
        shares = {
            partition_id: Share(load, size)
            for partition_id, load, size in request.message.partitions
        }
        balancer.report(request.peer, request.message.load, shares, now_ns)
        if self._is_moving:
            return
        ready = [worker for worker in self._processes.workers if self._hands.ready_epoch(worker)]
        move = balancer.plan(ready, now_ns)
        if move is not None:
            self._move(balancer, move, now_ns)

    def _move(self, balancer: Balancer, move: Move, now_ns: int) -> None:
        record = self._hands.topics.partition(move.partition_id)
        balancer.tried(move, now_ns)
        if record is None or self._hands.process_of(record.log_id) != move.source:
            return  # it was deleted or moved since it was reported

        def done(value: dict[str, Any] | None, error: DanubeError | None) -> None:
            self._is_moving = False
            if error is None:
                self.move_count += 1
                balancer.note_moved(move, self._hands.clock.monotonic_ns())

        number = self._processes.number
        _log.info(
            "worker %d is busy (%.2f), worker %d is not (%.2f): partition %d of %s moves there",
            number(move.source), balancer.load_of(move.source, now_ns),
            number(move.target), balancer.load_of(move.target, now_ns), record.index, record.topic,
        )  # fmt: skip
        self._is_moving = True
        try:
            self._hands.move(record, number(move.target), done)
        except DanubeError as error:
            self._is_moving = False
            _log.info("it does not: %s", error)
