"""Metrics of topics and subscriptions, which workers report to the coordinator for `/metrics`.

    /metrics --Counter.SCRAPES (shared memory)--> workers
    worker --TopicMetrics {rows of the largest, sums of the rest}--> coordinator --> the next scrape

A worker looks at its partitions in slices of its loop, every few seconds while /metrics is read, and
never otherwise. At most `metrics_topics_max` topics, and as many subscriptions, have rows of their own: half of
them the busiest since the last look, the others those with the most to catch up. Each worker names its
part of them. The others are added up in one row, whose totals never shrink.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from danube_fast.admin.view import SubscriptionRow, TopicRow
from danube_fast.broker import messages as m
from danube_fast.clock import SECOND_NS
from danube_fast.ring.counters import Counter
from danube_fast.roles import COORDINATOR
from danube_fast.types import REPLY_TOPICS
from danube_fast.workers.reports.namespace_metrics import NamespaceTotals
from danube_fast.workers.reports.topic_reports import WANTED_NS, add_rows
from danube_fast.workers.shard.job import Job
from danube_fast.workers.shard.read.times import lag_seconds
from danube_fast.workers.shard.state import ShardState

if TYPE_CHECKING:
    from danube_fast.broker.partition import Partition
    from danube_fast.broker.subscription.subscription import Subscription

__all__ = ["TopicMetrics"]

REPORT_NS = 5 * SECOND_NS
COST_PART = 50
"""Looks take at most this part of a worker's time: with many partitions they come less often."""
SLICE = 256
"""Partitions and subscriptions in one turn of the loop."""
AGED_SLICE = 16
"""Subscriptions in one turn whose oldest message is looked up, maybe in the index."""

_REPLY_TOPICS = f"{REPLY_TOPICS}*"
"""All reply topics together: /metrics asks no one who they are, and their names are rights."""

Rows = dict[Any, list[int]]


class TopicMetrics(Job):
    """Report topics and subscriptions of one worker. Used by its loop only."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._next_ns = self._wanted_until_ns = self._scrapes = 0
        self._look: Iterator[None] | None = None
        self._took_ns = 0
        most = state.settings.metrics_topics_max
        self._namespaces = NamespaceTotals(most)
        most = most and max(1, most // max(1, state.boot.config.worker_count))
        self._topics = _Share(most, TopicRow.VALUES, TopicRow.TOTALS, TopicRow.LAG)
        self._subscriptions = _Share(
            most, SubscriptionRow.VALUES, SubscriptionRow.TOTALS, SubscriptionRow.LAG
        )

    @property
    def is_busy(self) -> bool:
        """Whether a look is under way."""
        return self._look is not None

    def do_work(self, now_ns: int) -> None:
        """Go on with a look that is under way, or begin one if it is time and /metrics is read."""
        state = self._state
        if self._look is None:
            if now_ns < self._next_ns:
                return
            scrapes = state.boot.counters.get(COORDINATOR, Counter.SCRAPES)
            if scrapes != self._scrapes:
                self._scrapes, self._wanted_until_ns = scrapes, now_ns + WANTED_NS
            if now_ns >= self._wanted_until_ns:
                self._next_ns = now_ns + SECOND_NS
                return
            self._took_ns = 0
            self._look = self._steps()
        began_ns = state.clock.monotonic_ns()
        is_over = next(self._look, True)
        self._took_ns += state.clock.monotonic_ns() - began_ns
        if is_over:
            self._look = None
            self._next_ns = now_ns + max(REPORT_NS, COST_PART * self._took_ns)

    def _steps(self) -> Iterator[None]:
        topics: Rows = {}
        subscriptions: Rows = {}
        found: dict[Any, list[tuple[Partition, Subscription]]] = {}
        left = SLICE
        for partition in list(self._state.catalog.by_id.values()):
            topic = partition.topic
            if topic.startswith(REPLY_TOPICS):
                topic = _REPLY_TOPICS
            row = topics.setdefault(topic, [0] * TopicRow.VALUES)
            row[TopicRow.MESSAGES_IN] += partition.message_count
            row[TopicRow.BYTES_IN] += partition.byte_count
            self._namespaces.add(partition)
            for sub in partition.subscriptions.values():
                key = topic, sub.name
                values = _values(partition, sub)
                row[TopicRow.LAG] = max(row[TopicRow.LAG], values[SubscriptionRow.LAG])
                known = subscriptions.get(key)
                subscriptions[key] = values if known is None else add_rows(known, values)
                found.setdefault(key, []).append((partition, sub))
            left -= 1 + len(partition.subscriptions)
            if left <= 0:
                left = SLICE
                yield
        yield from self._topics.divide(topics)
        yield from self._subscriptions.divide(subscriptions)
        rows = []
        for number, key in enumerate(self._subscriptions.named, 1):
            age = max(self._age(partition, sub) for partition, sub in found[key])
            oldest = self._state.now_wall_ns / SECOND_NS - age if age else 0.0
            rows.append((*key, subscriptions[key], oldest))
            if number % AGED_SLICE == 0:
                yield
        named = [(topic, topics[topic]) for topic in self._topics.named]
        others = self._topics.others, self._subscriptions.others
        report = m.TopicMetrics(named, rows, *others, self._namespaces.finish())
        self._state.boot.mailbox.notify(COORDINATOR, report)

    def _age(self, partition: Partition, sub: Subscription) -> float:
        """Count the seconds since the oldest unacked message came; 0 without any, or if it is gone."""
        gone = self._state.partition(partition.partition_id) is not partition
        if gone or partition.subscriptions.get(sub.name) is not sub:
            return 0.0
        return lag_seconds(self._state, partition, sub)


def _values(partition: Partition, sub: Subscription) -> list[int]:
    ledger = sub.ledger
    settled = sub.cursor + ledger.settled_ahead if sub.tracks else sub.next_offset
    values = [0] * SubscriptionRow.VALUES
    values[SubscriptionRow.ACKED] = settled
    values[SubscriptionRow.REDELIVERED] = sub.redelivered_count
    values[SubscriptionRow.LOST] = sub.dropped_count + sub.lost_count
    values[SubscriptionRow.DEAD_LETTERS] = sub.dead_letter_count
    values[SubscriptionRow.LAG] = max(0, partition.visible - settled)
    values[SubscriptionRow.UNACKED] = ledger.unacked
    values[SubscriptionRow.WAITING] = ledger.waiting
    return values


class _Share:
    """Divide rows into those with a name of their own, and the rest as one row.

    The first `totals` values of a row only grow; so do those of the rest, whichever rows are in it: each
    adds what it counted while it was there.
    """

    def __init__(self, most: int, width: int, totals: int, lag: int) -> None:
        self._most, self._width, self._totals, self._lag = most, width, totals, lag
        self._before: Rows = {}
        self.named: list[Any] = []
        self.others = [0] * width

    def divide(self, rows: Rows) -> Iterator[None]:
        """Set `named` and `others`, in slices."""
        before = self._before

        def grown(key: Any) -> tuple[int, int]:
            return rows[key][0] - (before[key][0] if key in before else 0), rows[key][self._lag]

        def behind(key: Any) -> tuple[int, ...]:
            return grown(key)[::-1]

        half = self._most // 2
        busiest: list[Any] = []
        slowest: list[Any] = []
        for keys in _slices(rows):
            busiest = _largest(self._most - half, [*busiest, *keys], grown)
            slowest = _largest(self._most, [*slowest, *keys], behind)
            yield
        named = dict.fromkeys(busiest)
        more = (key for key in slowest if key not in named)
        named.update(dict.fromkeys(itertools.islice(more, self._most - len(named))))
        others = self.others[: self._totals] + [0] * (self._width - self._totals)
        for keys in _slices(rows):
            for key in keys:
                if key in named:
                    continue
                row = list(rows[key])
                for place in range(self._totals):
                    row[place] = max(0, row[place] - (before[key][place] if key in before else 0))
                others = add_rows(others, row)
            yield
        self._before = rows
        self.named, self.others = list(named), others


def _slices(rows: Rows) -> Iterator[list[Any]]:
    keys = iter(rows)
    while some := list(itertools.islice(keys, SLICE)):
        yield some


def _largest(most: int, keys: list[Any], size: Callable[[Any], tuple[int, ...]]) -> list[Any]:
    return heapq.nlargest(most, keys, key=size)
