"""More partitions for a topic that is in use, so that no subscription misses a message of the new ones.

    subscriptions of the topic <-- asked of its workers
    partition records          --> metadata, not part of the topic yet
    partitions, with these subscriptions at their earliest message --> workers, durable there
    the topic                  --> metadata: now they are found, published to, consumed
    subscriptions once more: those that came meanwhile get their positions on the new ones

A stop before the last but one step leaves partitions without a topic, which are dropped as deleted.
A worker that is down is waited for; if it stays away nothing has changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from danube_fast.broker import messages as m
from danube_fast.broker.admin.registry import AdminContext, ask_owners
from danube_fast.broker.topics.records import PartitionRecord, TopicRecord
from danube_fast.countdown import Done
from danube_fast.errors import DanubeError, FailedPrecondition, InvalidArgument, Unavailable
from danube_fast.workers.coordinator.placement import Placement

__all__ = ["Growth", "GrowthDone"]

_log = logging.getLogger(__name__)

WAIT_NS = 10_000_000_000
"""How long each step waits for workers that are down."""

GrowthDone = Callable[[TopicRecord | None, DanubeError | None], None]
"""Called with the topic as it has grown, or with what prevented it."""


class GrowthContext(AdminContext, Protocol):
    """The coordinator's methods for growth, beside those for every operation."""

    placement: Placement

    def when_placed(self, partitions: list[PartitionRecord], wait_ns: int, on_done: Done) -> None:
        """Call `on_done` when workers have confirmed all of them, or the time is up."""

    def unassign(self, partitions: list[PartitionRecord]) -> None:
        """Tell workers to drop partitions."""


class Growth:
    """Give one topic more partitions, step by step."""

    def __init__(
        self, coordinator: GrowthContext, record: TopicRecord, count: int, done: GrowthDone
    ) -> None:
        """Check that the topic can grow. Raises InvalidArgument, FailedPrecondition, AlreadyExists; then nothing was begun."""
        self._coordinator, self._topics, self._record = coordinator, coordinator.topics, record
        self._count, self._done = count, done
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
        self._when_placed(self._old, lambda: self._ask(self._make))

    def _step(self, then: Callable[[], None]) -> Done:
        """Call `then` once the step before it is done; an error ends the growth."""

        def done(error: DanubeError | None) -> None:
            try:
                if error is not None:
                    raise error
                then()
            except DanubeError as failure:
                self._give_up(failure)

        return done

    def _when_placed(self, partitions: list[PartitionRecord], then: Callable[[], None]) -> None:
        self._coordinator.when_placed(partitions, WAIT_NS, self._step(then))

    def _ask(self, then: Callable[[list[m.Inherited]], None]) -> None:
        """Ask for every subscription of the old partitions, once each."""

        def answered(values: list[Any], errors: list[DanubeError]) -> None:
            found: dict[str, m.Inherited] = {}
            for sub in (sub for value in values for sub in value):
                inherited = m.Inherited(
                    sub.subscription, sub.type, sub.failure_policy, sub.policy_setter
                )
                found.setdefault(sub.subscription, inherited)
            self._step(lambda: then(list(found.values())))(errors[0] if errors else None)

        ask_owners(self._coordinator, self._record, self._old, m.ListSubscriptions, answered)

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
        """Make subscriptions that came meanwhile: from here on a client finds the new partitions, too."""
        if all(each in self._known for each in subscriptions):
            self._end(None)
            return
        self._known = subscriptions
        self._inherit()
        self._coordinator.placement.invalidate(self._new)
        self._when_placed(self._new, lambda: self._end(None))

    def _give_up(self, error: DanubeError) -> None:
        joined = self._new and not self._topics.growing.get(self._record.topic)
        if joined:  # only subscriptions of the last moments are missing
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
