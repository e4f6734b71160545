"""The state that the parts of a shard worker share: the clocks of the turn, partitions, logs, sessions.

worker      composes the parts and owns the turn
parts       get the state, and the siblings that they name
state       knows none of them
"""

from __future__ import annotations

from collections.abc import Callable

from danube_fast.broker.admission.tables import AdmissionTables
from danube_fast.broker.partition import Partition
from danube_fast.broker.records import PartitionRemoved, Record
from danube_fast.config import Settings
from danube_fast.countdown import Done
from danube_fast.errors import NotOwner
from danube_fast.net.session import Sessions
from danube_fast.wal.log import Log
from danube_fast.workers.process.boot import Boot
from danube_fast.workers.process.environment import Environment
from danube_fast.workers.shard.catalog import Catalog
from danube_fast.workers.shard.keep.pins import Pins
from danube_fast.workers.shard.publish.journal import Journal

__all__ = ["ShardState", "not_here"]


def not_here(partition_id: int) -> NotOwner:
    """The error for a partition that this worker does not serve, as far as the client may know."""
    return NotOwner(f"partition {partition_id} is not here; look the topic up again")


class ShardState:
    """State of one worker; the parts do the work with it."""

    def __init__(self, boot: Boot, environment: Environment) -> None:
        settings = boot.settings
        self.boot, self.settings, self.clock = boot, settings, boot.clock
        self.now_ns = self.clock.monotonic_ns()
        """When the turn began, monotonic."""
        self.now_wall_ns = self.clock.wall_ns()
        """The same by the wall clock."""
        self._wall_at_zero_ns = self.now_wall_ns - self.now_ns
        self.drained_ns = self.now_ns
        """When all that clients had sent was read."""
        self.boot_id = environment.boot_id()
        self.tables = AdmissionTables()
        self.catalog = Catalog(self.tables)
        self.gate = self.catalog.gate
        self.logs: dict[int, Log] = {}
        """By slot; they are opened and closed by `logs.py`."""
        self.journals: dict[int, Journal] = {}
        """Of each log."""
        self.sessions = Sessions(settings, environment.new_token)
        self.ready: dict[int, Partition] = {}
        """Partitions whose subscriptions may have messages to deliver."""
        self.pins = Pins()
        """Claims on parts of the logs."""
        self.moved_cursors: dict[int, Partition] = {}
        """Partitions with cursors that moved since they were recorded."""
        self.leaving: set[int] = set()
        """Ids of partitions that are about to move, and take no new producers and consumers."""
        self.policy_listeners: list[Callable[[Partition], None]] = []
        """Called when a partition is new on this worker or its policy changed."""
        self.removal_listeners: list[Callable[[Partition], None]] = []
        """Called when a partition was removed from this worker."""
        self.settings_listeners: list[Callable[[Settings], None]] = [self.sessions.apply]
        """Called when settings change while the worker runs; the other readers of `settings` look each time."""

    def begin_turn(self) -> None:
        """Read the clocks."""
        self.now_ns = self.clock.monotonic_ns()
        self.now_wall_ns = self.clock.wall_ns()
        self.catalog.timers.wall_ahead_ns = self.now_wall_ns - self.now_ns

    @property
    def steady_wall_ns(self) -> int:
        """The wall clock at the start plus the time since then: setting the clock forward makes no message
        older."""
        return self._wall_at_zero_ns + self.now_ns

    def keeps_history(self, partition: Partition) -> bool:
        """Whether a partition's messages are uploaded to the object store."""
        return bool(self.settings.store) and partition.logged and partition.policy.stays

    def partition(self, partition_id: int) -> Partition | None:
        """Find a partition of this worker, None if it has none of that id."""
        return self.catalog.by_id.get(partition_id)

    def served(self, partition_id: int) -> Partition:
        """Find a partition that takes producers and consumers. Raises NotOwner."""
        partition = self.partition(partition_id)
        if partition is None or partition.moving or partition_id in self.leaving:
            raise not_here(partition_id)
        return partition

    def apply_settings(self, settings: Settings) -> None:
        """Let all parts take over settings that may change while the worker runs."""
        self.settings = settings
        for listener in self.settings_listeners:
            listener(settings)

    def apply_policy(self, partition: Partition) -> None:
        """Let all parts look at the policy of a partition."""
        for listener in self.policy_listeners:
            listener(partition)

    def forget(self, partition: Partition) -> None:
        """Let all parts drop what they keep of a partition that was removed."""
        self.ready.pop(partition.partition_id, None)
        self.moved_cursors.pop(partition.partition_id, None)
        for listener in self.removal_listeners:
            listener(partition)

    def record(self, partition: Partition, record: Record, done: Done | None = None) -> None:
        """Write a record into the log of a partition; `done` when it is durable."""
        self.journals[partition.log_slot].record(record, done)

    def record_removal(
        self, partition: Partition, done: Done | None = None, *, moved: bool = False
    ) -> None:
        """Record that a partition was removed, or has `moved`, and drop it from the index of its log."""
        self.record(partition, PartitionRemoved(partition.partition_id, moved=moved), done)
        self.logs[partition.log_slot].drop_partition(partition.partition_id)

    def mark_ready(self, partition: Partition) -> None:
        """Deliver messages of a partition in this turn, or the next."""
        self.ready[partition.partition_id] = partition

    def mark_cursor(self, partition: Partition) -> None:
        """Record the cursors of a partition soon."""
        self.moved_cursors[partition.partition_id] = partition
