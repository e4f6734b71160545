"""Records of cursors: where subscriptions stand, written soon after a change."""

from __future__ import annotations

from collections.abc import Iterable

from danube_fast.clock import MILLISECOND_NS
from danube_fast.countdown import Countdown, Done
from danube_fast.workers.shard.state import ShardState

__all__ = ["Cursors"]

INTERVAL_NS = 10 * MILLISECOND_NS
"""Cursors are written at most this often."""
EACH_NS = 100_000
INTERVAL_NS_MAX = 50 * MILLISECOND_NS
"""An ack is durable after 100 ms at the latest: 40 in the client, these, and a sync."""


class Cursors:
    """Record the cursors of one worker that moved."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._written_ns = 0

    @property
    def are_due(self) -> bool:
        """Whether to write moved cursors with the next group: later, the more there are of them."""
        count = len(self._state.moved_cursors)
        if not count:
            return False
        wait_ns = min(INTERVAL_NS + count * EACH_NS, INTERVAL_NS_MAX)
        return self._state.now_ns - self._written_ns >= wait_ns

    def write(self) -> None:
        """Record every cursor that moved, except in logs that have no room for records."""
        state = self._state
        moved, state.moved_cursors = state.moved_cursors, {}
        for partition in moved.values():
            journal = state.journals[partition.log_slot]
            if journal.stuck is not None:
                state.mark_cursor(partition)
                continue
            for record in partition.cursor_records():
                journal.record(record)
        self._written_ns = state.now_ns

    def flush(self, slots: Iterable[int], done: Done) -> None:
        """Record every cursor that moved; `done` when those in the logs `slots` are durable."""
        self.write()
        with Countdown(done) as countdown:
            for slot in slots:
                journal, durable = self._state.journals[slot], countdown.add()
                if journal.stuck is not None:
                    durable(journal.stuck)  # cursors were not even recorded
                else:
                    journal.when_durable(durable)
