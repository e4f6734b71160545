"""Ages of messages that only history has: the uploader finds them, so that their time to live ends like that of others.

    a subscription is in history --> FindHistoryTime(now - time to live) --> uploader --> first message that is young

It is asked again a part of the time to live later, for as long as a subscription is there. Before the first answer no
subscription reads what only history has: it would get messages that are too old. A worker never waits for a store:
what the log has is delivered meanwhile.
"""

from __future__ import annotations

from danube_fast.broker.partition import Partition
from danube_fast.clock import SECOND_NS
from danube_fast.errors import DanubeError, DataLoss, FailedPrecondition
from danube_fast.workers.shard.history.times import HistoryTimes
from danube_fast.workers.shard.read.places import first_run
from danube_fast.workers.shard.state import ShardState

__all__ = ["HistoryAges"]

ASK_NS_MIN = SECOND_NS
ASK_STEPS = 200
"""Questions in one time to live: each may cost a request to the store."""
RETRY_NS = SECOND_NS
_FINAL = DataLoss, FailedPrecondition
"""Errors that time does not mend: readers are told of them when they read."""


class _Ages:
    """Ages of one partition, as far as they are known."""

    def __init__(self) -> None:
        self.young_from = 0
        """Messages below are too old."""
        self.is_known = False
        self.is_asked = False
        self.ask_at_ns = 0


class HistoryAges:
    """Find the ages of messages in the history of one worker's partitions."""

    def __init__(self, state: ShardState, times: HistoryTimes) -> None:
        self._state, self._times = state, times
        self._ages: dict[int, _Ages] = {}
        """By id of a partition with a time to live and a subscription in history."""
        state.policy_listeners.append(self._apply)
        state.removal_listeners.append(self._forget)

    def young_from(self, partition: Partition, ttl_ns: int) -> int:
        """Tell which messages in history are too old, as far as is known: those below."""
        state = self._state
        time_ns = max(0, state.steady_wall_ns - ttl_ns)
        log_start = self._log_start(partition)
        subs = partition.subscriptions.values()
        if not any(sub.cursor < log_start for sub in subs) or not self._times.may_hold(
            partition, time_ns
        ):
            self._forget(partition)
            return 0
        ages = self._ages.setdefault(partition.partition_id, _Ages())
        interval_ns = max(ttl_ns // ASK_STEPS, ASK_NS_MIN)
        if not ages.is_asked and state.now_ns >= ages.ask_at_ns:
            if state.now_ns >= ages.ask_at_ns + interval_ns:
                ages.is_known = False  # subscriptions were elsewhere for a while
            ages.ask_at_ns = state.now_ns + interval_ns
            self._ask(partition, ages, time_ns)
        partition.await_ages(0 if ages.is_known else log_start)
        return ages.young_from

    def _log_start(self, partition: Partition) -> int:
        """Find where the log begins to have all messages; what is before, only history has."""
        first = partition.first_offset
        if not partition.is_in_history(first):
            return 0
        run = first_run(self._state.logs[partition.log_slot], partition, first)
        until = partition.uploaded.until
        return until if run is None else min(until, run.base_offset)

    def _ask(self, partition: Partition, ages: _Ages, time_ns: int) -> None:
        def found(offset: int, error: DanubeError | None) -> None:
            if self._ages.get(partition.partition_id) is not ages:
                return  # its policy was changed, or it has gone
            ages.is_asked = False
            ages.is_known = error is None or isinstance(error, _FINAL)
            if error is None:
                ages.young_from = max(ages.young_from, offset)
            else:
                ages.ask_at_ns = self._state.now_ns + RETRY_NS
            partition.check_ages_at(0)
            self._state.mark_ready(partition)

        ages.is_asked = True
        try:
            self._times.find(partition, time_ns, found)
        except FailedPrecondition as error:
            found(-1, error)

    def _apply(self, partition: Partition) -> None:
        """Begin anew with a policy that was changed; what waits for an answer asks again."""
        is_waiting = partition.unaged_until > 0
        self._forget(partition)
        if is_waiting:
            self._state.mark_ready(partition)

    def _forget(self, partition: Partition) -> None:
        self._ages.pop(partition.partition_id, None)
        partition.await_ages(0)
