"""Frames on their way from visible to handed out: a slice of each partition in a turn.

written, synced or kept in memory -> show: to the tail, or at once to a consumer that waits
ready partitions -> dispatch: from the tail, or from the log, which is read for all by turns
"""

from __future__ import annotations

import operator

from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.consumer import PENDING, Deliver, Gap, Read, Stored
from danube_fast.broker.subscription.fairness import dispatch_fairly
from danube_fast.broker.subscription.obstacle import Obstacle
from danube_fast.workers.shard.deliver.delivery import Delivery
from danube_fast.workers.shard.deliver.gaps import Gaps
from danube_fast.workers.shard.deliver.tails import Tails
from danube_fast.workers.shard.keep.retention import Retention
from danube_fast.workers.shard.publish.intake import Intake
from danube_fast.workers.shard.read.log_reader import LogReader
from danube_fast.workers.shard.state import ShardState

__all__ = ["Dispatcher"]

_PLACE = operator.attrgetter("place")
READ_AHEAD_BYTES = 1024 * 1024
READ_BYTES_PER_TURN = 4 * 1024 * 1024
"""Bytes that one turn reads of the logs for consumers behind the tail, about."""


class Dispatcher:
    """Deliver messages of partitions of one worker to their subscriptions."""

    def __init__(
        self, state: ShardState, intake: Intake, delivery: Delivery, tails: Tails,
        reader: LogReader, gaps: Gaps, retention: Retention,
    ) -> None:  # fmt: skip
        self._state = state
        self._intake = intake
        self._delivery = delivery
        self._tails = tails
        self._reader = reader
        self._gaps = gaps
        self._retention = retention
        self._read_until = 0
        self._reading: set[int] = set()
        self._unread: dict[int, Partition] = {}
        """Partitions that wait for their turn to read the log."""
        state.removal_listeners.append(self._forget)

    def _forget(self, partition: Partition) -> None:
        self._unread.pop(partition.partition_id, None)

    def show_memory_entries(self) -> None:
        """Make frames that are kept in memory visible."""
        entries, self._intake.memory_entries = self._intake.memory_entries, []
        self.show(entries)

    def show(self, entries: list[tuple[Partition, Stored]]) -> None:
        """Make frames visible to consumers."""
        state = self._state
        effects: list[Deliver] = []
        for partition, stored in entries:
            partition.append(stored)
            if not partition.pass_on(stored, state.now_ns, effects):
                state.mark_ready(partition)
            if not partition.keeps_memory:
                self._tails.count(partition, stored)
        if effects:
            self._delivery.add(state.catalog.by_id, effects)

    def dispatch(self) -> int:
        """Deliver what can be delivered; 1 if some partitions wait for their turn to read the log."""
        state = self._state
        if self._reader.fetches:
            self._reader.collect()
        if state.ready:
            ready, state.ready = state.ready, {}
            self._read_until = self._reader.bytes_read + READ_BYTES_PER_TURN
            self._reading.clear()
            effects: list[Deliver] = []
            met: list[tuple[Partition, Obstacle]] = []
            for partition in ready.values():
                if partition.policy.message_ttl_ms:
                    self._retention.expire_old(partition)
                found, again = dispatch_fairly(partition, self._read_log, state.now_ns, effects)
                if again:
                    state.mark_ready(partition)
                met += [(partition, each) for each in sorted(found, key=_PLACE)]
            done = 0
            for partition, each in met:
                if not each.is_silent:
                    self._delivery.add(state.catalog.by_id, effects[done : each.place])
                    done = max(done, each.place)
                self._tell(partition, each)
            if done < len(effects):
                self._delivery.add(state.catalog.by_id, effects[done:])
        self._tails.trim()
        if not self._unread:
            return 0
        # those that could not read at all go before those that were cut short
        unread, self._unread = self._unread, {}
        first = {pid: part for pid, part in unread.items() if pid not in self._reading}
        state.ready = {**first, **unread, **state.ready}
        return 1

    def _tell(self, partition: Partition, met: Obstacle) -> None:
        """Tell consumers of a gap, or of what cannot be read, behind what stands before it: a reader ends at a gap that
        reaches its stop."""
        if not met.is_silent:
            self._delivery.flush()
        if isinstance(met.found, Gap):
            self._gaps.tell(partition, met.subscription, met.found)
        else:
            self._gaps.refuse(met.subscription, met.found)

    def _read_log(self, partition: Partition, offset: int) -> Read:
        """Frames behind the tail; PENDING, and the partition's turn comes again, when enough was read."""
        if self._reader.bytes_read >= self._read_until:
            self._unread[partition.partition_id] = partition
            return PENDING
        self._reading.add(partition.partition_id)
        return self._reader.read(partition, offset, READ_AHEAD_BYTES)
