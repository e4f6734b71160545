"""The quotas of namespaces on one worker: what all workers together may take, by words that they share.

    quota --partition--> words of the namespace <-- the admission kernel looks at rates and storage
                         gate of its partitions <-- full, says the coordinator (reports/namespaces.py)
                         places of handles      <-- producers and consumers that open

Nothing here looks at a message: the kernel that admits a frame reads the words of its namespace by the address in its
partition's row, and Python charges rates once for each frame, as it does for those of topics.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from danube_fast.broker.admission.gate import Cause
from danube_fast.broker.admission.layout import (
    NamespaceWord,
    PartitionWord,
    ProducerWord,
    StateWord,
    is_passed_on,
)
from danube_fast.broker.partition import Partition
from danube_fast.broker.topics.quota import NO_QUOTA, NamespaceQuota
from danube_fast.clock import MILLISECOND_NS, SECOND_NS
from danube_fast.errors import ResourceExhausted
from danube_fast.ring.buckets import Bucket
from danube_fast.ring.layout import AT_BUCKET_BYTES, AT_BUCKET_MESSAGES
from danube_fast.ring.namespace_words import NamespaceWords
from danube_fast.types import parse_topic
from danube_fast.workers.shard.state import ShardState

__all__ = ["BURST_NS", "Namespace", "Namespaces"]

BURST_NS = 50 * MILLISECOND_NS
"""So much of a second's worth may be taken at once: less than of a topic, for a tenth is the accuracy within a second."""
WATCH_NS = 2 * SECOND_NS
"""So long after a refusal space that becomes free is felt without delay, though the worker has nothing else to do."""
COUNT_COST_PART = 10
"""Counting handles for clients that found no place takes at most this part of a worker's time."""
REAP_NS = SECOND_NS
"""How often sessions are looked at whose connection may have ended, when there is no place for a handle."""


class Namespace:
    """One namespace with a quota, as one worker knows it."""

    def __init__(self, name: str, words: NamespaceWords, worker: int) -> None:
        self.name, self.shared, self._worker = name, words, worker
        self.quota = NO_QUOTA
        self.partitions: dict[int, Partition] = {}
        self.publish: Bucket | None = None
        self.dispatch: Bucket | None = None
        self.full = ""
        """Why its topics take no publishes; empty when they do."""
        addresses = words.accepted_addresses
        # for partitions whose messages stay, and for the others; kernels have the addresses while it has partitions
        self._kept = np.zeros(NamespaceWord.ACCEPTED + len(addresses), np.int64)
        self._passing = self._kept.copy()
        self._kept[NamespaceWord.WORKERS] = len(addresses)
        self._kept[NamespaceWord.ACCEPTED :] = addresses
        for row in (self._kept, self._passing):
            row[NamespaceWord.BURST_NS] = BURST_NS

    def set_quota(self, quota: NamespaceQuota) -> None:
        """Take over other values. New rates forgive what is owed by the old ones."""
        before, self.quota = self.quota, quota
        if quota.publish_rates != before.publish_rates:
            row = self.shared.publish_row
            self.publish = self._bucket(self.publish, row, quota.publish_rates)
        if quota.dispatch_rates != before.dispatch_rates:
            row = self.shared.dispatch_row
            self.dispatch = self._bucket(self.dispatch, row, quota.dispatch_rates)
        messages, byte_count = quota.publish_rates
        at = self.shared.publish_row
        for words in (self._kept, self._passing):
            words[NamespaceWord.MESSAGES] = at + AT_BUCKET_MESSAGES if messages else 0
            words[NamespaceWord.BYTES] = at + AT_BUCKET_BYTES if byte_count else 0
        is_bounded = bool(quota.namespace_storage_bytes_max)
        own, until = self.shared.accepted_address(self._worker), self.shared.until_address
        self._kept[NamespaceWord.OWN] = own if is_bounded else 0
        self._kept[NamespaceWord.UNTIL] = until if is_bounded else 0

    @staticmethod
    def _bucket(before: Bucket | None, row: int, rates: tuple[int, int]) -> Bucket | None:
        if before is not None:
            before.forgive()
        return Bucket(row, *rates, BURST_NS) if any(rates) else None

    def words_for(self, partition: Partition) -> int:
        """Return the address for a partition's row. A non_reliable topic keeps nothing."""
        return int((self._kept if partition.reliable else self._passing).ctypes.data)

    def full_text(self) -> str:
        """Say that it keeps as much as it may."""
        return self.full or (
            f"namespace {self.name} keeps all that its quota allows, namespace_storage_bytes_max "
            f"{self.quota.namespace_storage_bytes_max}; delete or purge a topic, let messages expire, or have the "
            f"quota raised: danube-fast namespaces set-quota {self.name} namespace_storage_bytes_max=N"
        )


class Namespaces:
    """The namespaces with a quota on one worker. Used by its loop only."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._by_name: dict[str, Namespace] = {}
        self._of_partition: dict[int, Namespace] = {}
        self.changed: dict[str, Namespace] = {}
        """Those with other partitions, or another quota: what they use is to be counted at once."""
        self._reap_at_ns = self._count_at_ns = 0
        self._refused_ns = -WATCH_NS
        state.removal_listeners.append(self._forget)

    @property
    def is_watched(self) -> bool:
        """Whether what is used is to be counted without delay: publishers wait for room."""
        return bool(self.changed) or self._state.now_ns - self._refused_ns < WATCH_NS

    def apply(self, partition: Partition) -> Namespace | None:
        """Put a partition under the quota that it comes with; its namespace, if that has one."""
        number, quota = partition.partition_id, partition.quota
        name = parse_topic(partition.topic).namespace
        namespace = self._by_name.get(name)
        row = self._state.tables.partitions[partition.slot]
        if quota == NO_QUOTA:
            if namespace is not None and self._of_partition.pop(number, None) is not None:
                del namespace.partitions[number]
                self.changed[name] = namespace
            row[PartitionWord.NAMESPACE] = 0
            self._state.gate.open(partition, Cause.NAMESPACE)
            return None
        if namespace is None:
            namespace = self._by_name[name] = self._make(name)
        if namespace.quota != quota or not namespace.partitions:
            namespace.set_quota(quota)
            self.changed[name] = namespace
        namespace.partitions[number] = partition
        self._of_partition[number] = namespace
        row[PartitionWord.NAMESPACE] = namespace.words_for(partition)
        self._close_if_full(namespace, partition)
        return namespace

    def _make(self, name: str) -> Namespace:
        boot = self._state.boot
        workers = boot.config.processes.workers
        words = NamespaceWords(boot.buckets, boot.control, workers, name)
        return Namespace(name, words, boot.config.process_index)

    def _forget(self, partition: Partition) -> None:
        namespace = self._of_partition.get(partition.partition_id)
        if namespace is None or namespace.partitions.get(partition.partition_id) is not partition:
            return
        del namespace.partitions[partition.partition_id], self._of_partition[partition.partition_id]
        self._state.tables.partitions[partition.slot, PartitionWord.NAMESPACE] = 0
        self.changed[namespace.name] = namespace

    def drop(self, namespace: Namespace) -> None:
        """Forget a namespace that has no partitions here any more."""
        worker, shared = self._state.boot.config.process_index, namespace.shared
        if shared.handles(worker):
            shared.set_handles(worker, 0)
        del self._by_name[namespace.name]

    def of(self, partition: Partition) -> Namespace | None:
        """Return the namespace of a partition, if it has a quota."""
        return self._of_partition.get(partition.partition_id)

    def with_quota(self) -> list[Namespace]:
        """List the namespaces with a quota and partitions here, and those that had such until now."""
        return list(self._by_name.values())

    def begin_turn(self, now_ns: int) -> None:
        """Tell the admission kernel the time, if it is to look at a rate."""
        if self._by_name:
            self._state.tables.state[StateWord.NOW_NS] = now_ns

    # ------------------------------------------------------------ storage

    def set_full(self, full: dict[str, str]) -> None:
        """Close the namespaces that are full, by name, and open those with an empty text."""
        for name, text in full.items():
            namespace = self._by_name.get(name)
            if namespace is not None and text != namespace.full:
                namespace.full = text
                for partition in namespace.partitions.values():
                    self._close_if_full(namespace, partition)

    def _close_if_full(self, namespace: Namespace, partition: Partition) -> None:
        is_bounded = namespace.quota.namespace_storage_bytes_max and partition.reliable
        text = namespace.full if is_bounded else ""
        self._state.gate.set(partition, Cause.NAMESPACE, text)

    def is_unknown(self, partition: Partition) -> bool:
        """Whether it is not known yet how much the namespace of a partition keeps: publishers have to wait for that."""
        namespace = self.of(partition)
        if namespace is None or not namespace.quota.namespace_storage_bytes_max:
            return False
        return not namespace.shared.until

    def full_text(self, partition: Partition) -> str:
        """Say why the kernel refuses a frame for a partition that is open."""
        self._refused_ns = self._state.now_ns
        namespace = self.of(partition)
        return "" if namespace is None else namespace.full_text()

    # ------------------------------------------------------------ handles

    def take_handle(self, partition: Partition, reap: Callable[[set[int]], None]) -> None:
        """Count one more handle. Raises ResourceExhausted if it is too many; `reap` closes those of these sessions whose
        connection has ended."""
        namespace = self.of(partition)
        limit = 0 if namespace is None else namespace.quota.namespace_handles_max
        if namespace is None or not limit:
            return
        worker, shared = self._state.boot.config.process_index, namespace.shared
        if shared.take_handle(worker, limit):
            return
        self._count_for_room()
        if shared.take_handle(worker, limit):
            return
        if self._state.now_ns >= self._reap_at_ns:
            self._reap_at_ns = self._state.now_ns + REAP_NS
            reap({session for each, session in self._open_handles() if each is namespace})
            self.count_handles()
            if shared.take_handle(worker, limit):
                return
        raise ResourceExhausted(
            f"namespace {namespace.name} has {shared.handles_of_all()} producers and consumers open, each counted for each "
            f"partition, and its quota is namespace_handles_max {limit}; close one, or have the quota raised: "
            f"danube-fast namespaces set-quota {namespace.name} namespace_handles_max=N"
        )

    def note_closed(self) -> None:
        """Note that a client closed a handle: there may be room at once."""
        self._count_at_ns = 0

    def _count_for_room(self) -> None:
        """Count anew, as a handle may have been closed; clients that ask in vain must not keep the loop busy by it."""
        began_ns = self._state.clock.monotonic_ns()
        if began_ns >= self._count_at_ns:
            self.count_handles()
            ended_ns = self._state.clock.monotonic_ns()
            self._count_at_ns = ended_ns + COUNT_COST_PART * (ended_ns - began_ns)

    def count_handles(self) -> None:
        """Count what is open anew, for all namespaces that bound it."""
        counts = {
            name: 0 for name, each in self._by_name.items() if each.quota.namespace_handles_max
        }
        if not counts:
            return
        for namespace, _ in self._open_handles():
            if namespace.name in counts:
                counts[namespace.name] += 1
        worker = self._state.boot.config.process_index
        for name, count in counts.items():
            shared = self._by_name[name].shared
            if shared.handles(worker) != count:
                shared.set_handles(worker, count)

    def _open_handles(self) -> list[tuple[Namespace, int]]:
        """List the open handles: namespace and session of each."""
        tables, sessions = self._state.tables, list(self._state.sessions)
        producers = tables.producers[: tables.producer_count]
        living = [session.number for session in sessions]
        openers = producers[:, ProducerWord.SESSION]
        is_open = np.isin(openers, living) | is_passed_on(openers)
        is_open &= producers[:, ProducerWord.PARTITION_ID] != 0
        columns = [int(ProducerWord.PARTITION_ID), int(ProducerWord.SESSION)]
        handles = producers[is_open][:, columns].tolist()
        for session in sessions:
            for consumer in session.consumers.values():
                handles.append([consumer.subscription.partition_id, session.number])
        of = self._of_partition
        return [(of[number], session) for number, session in handles if number in of]
