"""More partitions for a topic that is in use, so that nobody misses a message of the new ones.

    subscriptions of the topic <-- asked of its workers
    partition records          --> metadata, not part of the topic yet
    partitions, with these subscriptions at their earliest message --> workers, durable there
    the topic                  --> metadata: now they are found, published to, consumed
    subscriptions once more: who came meanwhile is given its place on the new ones

A stop before the last but one step leaves partitions without a topic, which are dropped as deleted.
A worker that is down is waited for; if it stays away nothing has changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from danube_fast.broker import messages as m
from danube_fast.broker.admin.registry import AdminContext
from danube_fast.broker.topics.records import PartitionRecord, TopicRecord
from danube_fast.errors import DanubeError, FailedPrecondition, InvalidArgument, Unavailable
from danube_fast.workers.coordinator.placement import Placement

__all__ = ["Growth"]

_log = logging.getLogger(__name__)

WAIT_NS = 10_000_000_000
"""How long each step waits for workers that are down."""

Done = Callable[[TopicRecord | None, DanubeError | None], None]


class GrowthContext(AdminContext, Protocol):
    """What is needed of the coordinator beside what every operation stands on."""

    placement: Placement

    def when_placed(
        self,
        partitions: list[PartitionRecord],
        wait_ns: int,
        on_done: Callable[[DanubeError | None], None],
    ) -> None:
        """Call `on_done` when workers have confirmed all of them, or the time is up."""
        ...

    def unassign(self, partitions: list[PartitionRecord]) -> None:
        """Tell workers to drop partitions."""
        ...


class Growth:
    """One topic on its way to more partitions."""

    def __init__(
        self, coordinator: GrowthContext, record: TopicRecord, count: int, done: Done
    ) -> None:
        """Raises InvalidArgument, FailedPrecondition, AlreadyExists; then nothing was begun."""
        self._coordinator = coordinator
        self._topics = coordinator.topics
        self._record = record
        self._count = count
        self._done = done
        self._old = self._topics.partitions(record)
        self._new: list[PartitionRecord] = []
        self._known: list[m.Inherited] = []
        self._check()

    def _check(self) -> None:
        topic, known, most = self._record.topic, len(self._old), self._topics.partitions_max
        if not self._record.partitioned:
            raise FailedPrecondition(
                f"{topic} has no partitions and never gets any; create a partitioned topic: "
                f"danube-fast topics create NAME --partitions {max(self._count, 1)}"
            )
        if self._count < known:
            raise FailedPrecondition(
                f"{topic} has {known} partitions, and their number never shrinks; leave it, or "
                "create another topic"
            )
        if self._count > most:
            raise InvalidArgument(
                f"{self._count} partitions are more than {most} (partitions_per_topic_max)"
            )
        if any(self._coordinator.moving_to(part.partition_id) is not None for part in self._old):
            raise FailedPrecondition(
                f"{topic} has partitions that are just being moved; try again when they are there"
            )
        self._topics.check_partition_names(topic, range(known, self._count))

    def start(self) -> None:
        """Begin; `done` is called once, maybe at once."""
        if self._count == len(self._old):
            self._done(self._record, None)
            return
        self._topics.growing[self._record.topic] = []  # nothing else may change it from here on
        self._when_placed(self._old, self._ask_first)

    def _when_placed(self, partitions: list[PartitionRecord], then: Callable[[], None]) -> None:
        def placed(error: DanubeError | None) -> None:
            try:
                if error is not None:
                    raise error
                then()
            except DanubeError as failure:
                self._give_up(failure)

        self._coordinator.when_placed(partitions, WAIT_NS, placed)

    def _ask(self, then: Callable[[list[m.Inherited]], None]) -> None:
        """Every subscription of the old partitions, once each."""
        by_worker: dict[int, list[int]] = {}
        for partition in self._old:
            worker = self._coordinator.process_of(partition.log_id)
            by_worker.setdefault(worker, []).append(partition.partition_id)
        left = len(by_worker)
        found: dict[str, m.Inherited] = {}
        failed: DanubeError | None = None

        def got(value: Any, error: DanubeError | None) -> None:
            nonlocal left, failed
            left -= 1
            failed = failed or error
            for sub in value if error is None else ():
                inherited = m.Inherited(sub.subscription, sub.type, sub.failure_policy)
                found.setdefault(sub.subscription, inherited)
            if left:
                return
            try:
                if failed is not None:
                    raise failed
                then(list(found.values()))
            except DanubeError as failure:
                self._give_up(failure)

        for worker, ids in by_worker.items():
            self._coordinator.ask(worker, m.ListSubscriptions(ids), got)

    def _ask_first(self) -> None:
        self._ask(self._make)

    def _make(self, subscriptions: list[m.Inherited]) -> None:
        self._known = subscriptions
        self._new = self._topics.begin_growth(self._record, self._count)
        self._inherit()
        self._when_placed(self._new, self._join)

    def _inherit(self) -> None:
        for partition in self._new:
            self._topics.inherited[partition.partition_id] = self._known

    def _join(self) -> None:
        self._record = self._topics.finish_growth(self._record)
        self._ask(self._make_up)

    def _make_up(self, subscriptions: list[m.Inherited]) -> None:
        """Nobody finds the old partitions alone any more: who is known now are all there are."""
        if all(each in self._known for each in subscriptions):
            self._end(None)
            return
        self._known = subscriptions
        self._inherit()
        self._coordinator.placement.invalidate(self._new)
        self._when_placed(self._new, lambda: self._end(None))

    def _give_up(self, error: DanubeError) -> None:
        joined = self._new and not self._topics.growing.get(self._record.topic)
        if joined:  # what is left to do is only for who came in the last moments
            _log.warning("%s grew, but: %s", self._record.topic, error)
            self._end(None)
            return
        if isinstance(error, Unavailable):
            error = Unavailable(f"{self._record.topic} has as many partitions as before: {error}")
        self._end(error)

    def _end(self, error: DanubeError | None) -> None:
        for partition in self._new:
            self._topics.inherited.pop(partition.partition_id, None)
        dropped = self._topics.end_growth(self._record)
        if dropped:
            self._coordinator.forget(dropped)
            self._coordinator.unassign(dropped)
        self._done(None if error is not None else self._record, error)
