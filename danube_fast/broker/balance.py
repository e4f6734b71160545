"""When a partition should move to another worker, and which: decided from loads, without doing anything.

    reports of the workers --> averages --> one worker much busier than another, for long enough?
                                            --> the partition whose move helps most --> Move

A move must leave the busier of the two workers with less to do than before, by a margin; so no partition
goes to and fro, one that is all of a worker's load stays, and with steady loads moves come to an end:
each takes at least 2 * margin**2 off the sum of the squared loads. Besides there are a pause after each
move, a pause for each partition, and a cap for an hour. The same rules serve workers of one host and,
with other names for "worker", the brokers of a cluster.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from danube_fast.clock import SECOND_NS

__all__ = ["RULES", "Balancer", "Move", "Rules", "Share", "Strategy"]

HOUR_NS = 3600 * SECOND_NS
PARTITION_PAUSES = 10
"""A partition that moved rests for so many times the pause after a move."""
STALE_NS = 10 * SECOND_NS
"""Who has not reported for so long has nothing to do."""


class Strategy(enum.StrEnum):
    """How readily partitions move."""

    OFF = "off"
    CONSERVATIVE = "conservative"
    """Only away from a worker that can hardly do more."""
    BALANCED = "balanced"
    AGGRESSIVE = "aggressive"


class Rules(NamedTuple):
    """Loads are shares of what one worker can do: 1.0 is all of it."""

    busy: float
    """A worker below this keeps everything."""
    gap: float
    """By so much it must be busier than the one that gets something."""
    margin: float
    """By so much a move must lower the load of the busier of the two."""
    lasts_ns: int
    """For so long that must have been so; also the pause after a move."""
    moves_per_hour_max: int


RULES = {
    Strategy.CONSERVATIVE: Rules(0.70, 0.40, 0.10, 30 * SECOND_NS, 12),
    Strategy.BALANCED: Rules(0.50, 0.25, 0.07, 15 * SECOND_NS, 60),
    Strategy.AGGRESSIVE: Rules(0.25, 0.15, 0.04, 5 * SECOND_NS, 360),
}


class Share(NamedTuple):
    """One partition's part of its worker's load."""

    load: float
    byte_count: int
    """What a move must copy."""


class Move(NamedTuple):
    """A partition should go from one worker to another."""

    partition_id: int
    source: int
    target: int


class _Worker:
    __slots__ = ("load", "reported_ns", "shares")

    def __init__(self) -> None:
        self.load = 0.0
        self.shares: dict[int, Share] = {}
        self.reported_ns = 0


class Balancer:
    """Averages of what workers report, and the moves that follow."""

    def __init__(self, rules: Rules, *, byte_count_max: int) -> None:
        """`byte_count_max`: partitions with more to copy stay where they are."""
        self.rules = rules
        self._byte_count_max = byte_count_max
        self._workers: dict[int, _Worker] = {}
        self._uneven_since_ns: int | None = None
        self._busiest = 0
        self._rests_until_ns = 0
        self._moved_ns: dict[int, int] = {}
        self._moves: collections.deque[int] = collections.deque()

    def report(self, worker: int, load: float, shares: Mapping[int, Share], now_ns: int) -> None:
        """Take in what a worker did lately, and what its partitions had of it. The average forgets with the
        time that an imbalance must last."""
        state = self._workers.setdefault(worker, _Worker())
        passed_ns = min(now_ns - state.reported_ns, self.rules.lasts_ns)
        weight = passed_ns / self.rules.lasts_ns if state.reported_ns else 1.0
        state.reported_ns = now_ns
        state.load += weight * (load - state.load)
        averaged: dict[int, Share] = {}
        for partition_id in {*shares, *state.shares}:
            before = state.shares.get(partition_id, Share(0.0, 0))
            latest = shares.get(partition_id, Share(0.0, before.byte_count))
            average = before.load + weight * (latest.load - before.load)
            if partition_id in shares or average >= self.rules.margin / 10:
                averaged[partition_id] = Share(average, latest.byte_count)
        state.shares = averaged

    def forget(self, worker: int) -> None:
        """Forget the load of a worker: it was restarted."""
        self._workers.pop(worker, None)

    def load_of(self, worker: int, now_ns: int) -> float:
        """Average load of a worker."""
        state = self._workers.get(worker)
        if state is None or now_ns - state.reported_ns > STALE_NS:
            return 0.0
        return state.load

    def plan(self, workers: Iterable[int], now_ns: int) -> Move | None:
        """The move that should be made now, among workers that are there; None: no move."""
        loads = {worker: self.load_of(worker, now_ns) for worker in workers}
        if len(loads) < 2:
            return None
        rules = self.rules
        source = max(sorted(loads), key=loads.__getitem__)
        target = min(sorted(loads), key=loads.__getitem__)
        uneven = loads[source] >= rules.busy and loads[source] - loads[target] >= rules.gap
        if not uneven:
            self._uneven_since_ns = None
            return None
        if self._uneven_since_ns is None or self._busiest != source:
            self._uneven_since_ns, self._busiest = now_ns, source
        if now_ns - self._uneven_since_ns < rules.lasts_ns or now_ns < self._rests_until_ns:
            return None
        while self._moves and now_ns - self._moves[0] >= HOUR_NS:
            self._moves.popleft()
        if len(self._moves) >= rules.moves_per_hour_max:
            return None
        return self._choose(source, target, loads, now_ns)

    def _choose(
        self, source: int, target: int, loads: Mapping[int, float], now_ns: int
    ) -> Move | None:
        """The partition whose move leaves the busier of the two with the least."""
        rules = self.rules
        best: tuple[float, int, int] | None = None
        pause_ns = PARTITION_PAUSES * rules.lasts_ns
        for partition_id, share in self._workers[source].shares.items():
            moved_ns = self._moved_ns.get(partition_id)
            if moved_ns is not None and now_ns - moved_ns < pause_ns:
                continue
            if share.byte_count > self._byte_count_max or share.load < rules.margin:
                continue
            busier = max(loads[source] - share.load, loads[target] + share.load)
            if busier > loads[source] - rules.margin:
                continue
            rank = busier, share.byte_count, partition_id
            best = rank if best is None else min(best, rank)
        return None if best is None else Move(best[2], source, target)

    def note_moved(self, move: Move, now_ns: int) -> None:
        """Move the load of a partition that was moved: the averages follow at once."""
        source = self._workers.setdefault(move.source, _Worker())
        target = self._workers.setdefault(move.target, _Worker())
        share = source.shares.pop(move.partition_id, Share(0.0, 0))
        source.load = max(0.0, source.load - share.load)
        target.load += share.load
        target.shares[move.partition_id] = share
        target.reported_ns = max(target.reported_ns, now_ns)

    def tried(self, move: Move, now_ns: int) -> None:
        """Note that a move was begun: whatever comes of it, nothing else moves for a while, this partition
        for longer, and it counts for the hour."""
        self._rests_until_ns = now_ns + self.rules.lasts_ns
        self._uneven_since_ns = None
        self._moved_ns[move.partition_id] = now_ns
        self._moves.append(now_ns)
        pause_ns = PARTITION_PAUSES * self.rules.lasts_ns
        self._moved_ns = {
            partition_id: at_ns
            for partition_id, at_ns in self._moved_ns.items()
            if now_ns - at_ns < pause_ns
        }
