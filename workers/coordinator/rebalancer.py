"""The coordinator's rebalancer: workers report their loads, `broker/balance.py` decides, the mover moves.

The rebalancer looks only when a report comes, so an idle broker does nothing. Its moves are ordinary ones:
`topics describe` shows them, and the moves of an administrator go first.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

from danube_fast.broker import messages as m
from danube_fast.broker.admin.registry import AdminContext
from danube_fast.broker.answers import RebalanceStatus
from danube_fast.broker.balance import RULES, Balancer, Move, Share, Strategy
from danube_fast.clock import SECOND_NS
from danube_fast.config import Settings
from danube_fast.errors import DanubeError
from danube_fast.workers.coordinator.placement import Workers
from danube_fast.workers.process.mailbox import Mailbox, Request

__all__ = ["Rebalancer"]

_log = logging.getLogger(__name__)


class RebalanceContext(AdminContext, Workers, Protocol):
    """The coordinator's methods for rebalancing."""


class Rebalancer:
    """Move partitions from busy workers to idle ones. Used by the coordinator's loop only."""

    def __init__(self, mailbox: Mailbox, settings: Settings, coordinator: RebalanceContext) -> None:
        self._coordinator, self._processes = coordinator, coordinator.processes
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

    def status(self) -> RebalanceStatus:
        """Describe strategy, moves and loads, for `danube-fast status`."""
        now_ns = self._coordinator.clock.monotonic_ns()
        loads = []
        if self._balancer is not None:
            loads = [
                round(self._balancer.load_of(worker, now_ns), 3)
                for worker in self._processes.workers
            ]
        return RebalanceStatus(
            strategy=self.strategy.value, moves=self.move_count, worker_loads=loads
        )

    def _restarted(self, worker: int, epoch: int) -> None:
        if self._balancer is not None:
            self._balancer.forget(worker)

    def _reported(self, request: Request[m.LoadReport]) -> None:
        balancer = self._balancer
        if balancer is None:
            return
        now_ns = self._coordinator.clock.monotonic_ns()
        reported = request.message.partitions
        shares = {partition_id: Share(load, size) for partition_id, load, size in reported}
        balancer.report(request.peer, request.message.load, shares, now_ns)
        if self._is_moving:
            return
        ready = [
            worker for worker in self._processes.workers if self._coordinator.ready_epoch(worker)
        ]
        move = balancer.plan(ready, now_ns)
        if move is not None:
            self._move(balancer, move, now_ns)

    def _move(self, balancer: Balancer, move: Move, now_ns: int) -> None:
        record = self._coordinator.topics.partition(move.partition_id)
        balancer.tried(move, now_ns)
        if record is None or self._coordinator.process_of(record.log_id) != move.source:
            return  # it was deleted or moved since it was reported

        def done(value: dict[str, Any] | None, error: DanubeError | None) -> None:
            self._is_moving = False
            if error is None:
                self.move_count += 1
                balancer.note_moved(move, self._coordinator.clock.monotonic_ns())

        number = self._processes.number
        _log.info(
            "worker %d is busy (%.2f), worker %d is not (%.2f): partition %d of %s moves there",
            number(move.source), balancer.load_of(move.source, now_ns),
            number(move.target), balancer.load_of(move.target, now_ns), record.index, record.topic,
        )  # fmt: skip
        self._is_moving = True
        try:
            self._coordinator.move(record, number(move.target), done)
        except DanubeError as error:
            self._is_moving = False
            _log.info("partition %d stays: %s", record.index, error)
