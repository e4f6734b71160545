"""Messages that are due again: delayed redeliveries, and acks that are overdue."""

from __future__ import annotations

from danube_fast.workers.shard.deliver.consumers import Consumers
from danube_fast.workers.shard.job import Job
from danube_fast.workers.shard.state import ShardState

__all__ = ["Redeliveries"]


class Redeliveries(Job):
    """Run the timers of one worker's subscriptions."""

    def __init__(self, state: ShardState, consumers: Consumers) -> None:
        self._state, self._consumers = state, consumers

    def do_work(self, now_ns: int) -> None:
        """Wake the subscriptions whose timer is due."""
        timers = self._state.catalog.timers
        if timers.next_ns <= now_ns:
            for sub in timers.due(now_ns):
                sub.on_time(now_ns)
                self._consumers.touch(sub)
