"""Producers of a worker's partitions: opened with an epoch of their own, forgotten when long unused."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np
import numpy.ma
import xxhash

from danube_fast.broker import messages as m
from danube_fast.broker import records as r
from danube_fast.broker.admission.layout import INT64_MAX, ProducerWord, is_passed_on
from danube_fast.clock import MILLISECOND_NS
from danube_fast.errors import DanubeError, InvalidArgument, PermissionDenied
from danube_fast.net import protocol as p
from danube_fast.net.session import Session
from danube_fast.ring.counters import Counter
from danube_fast.types import Permission
from danube_fast.workers.process.access import Access
from danube_fast.workers.shard.deliver.delivery import Delivery
from danube_fast.workers.shard.job import Job
from danube_fast.workers.shard.keep.limits import Limits
from danube_fast.workers.shard.state import ShardState

__all__ = ["NAME_BYTES_MAX", "Opened", "Producers"]

NAME_BYTES_MAX = 256
PRODUCER_ID_MAX = (1 << 63) - 1
"""Producer ids stay positive as int64, for every language and every kernel."""
COUNT_NS = 1000 * MILLISECOND_NS
EXPIRY_NS = 60_000 * MILLISECOND_NS

Opened = Callable[[m.Opened | None, DanubeError | None], None]
"""Called with the id, epoch and next sequence of the producer, or with what prevented it."""


class Producers(Job):
    """Open, close and expire producers of one worker; the admission kernel serves them."""

    def __init__(
        self, state: ShardState, delivery: Delivery, limits: Limits, access: Access | None = None
    ) -> None:
        """`access`: who may take a name from another principal; None: all may."""
        self.access = access
        self._state, self._delivery, self._limits = state, delivery, limits
        self.open_elsewhere: Callable[[Session, p.OpenProducer], None] = self._refuse
        """Opens a producer on a partition of another worker."""
        self.close_elsewhere: Callable[[Session, p.CloseProducer], None] = lambda *_: None
        """Closes such a producer."""
        self.handlers: dict[type, Callable[[Session, Any], None]] = {
            p.OpenProducer: self._open,
            p.CloseProducer: self._close,
        }
        self._next_count_ns = self._next_expiry_ns = 0

    def _refuse(self, session: Session, command: p.OpenProducer) -> None:
        self._state.served(command.partition_id)

    def _open(self, session: Session, command: p.OpenProducer) -> None:
        if self._state.partition(command.partition_id) is None:
            self.open_elsewhere(session, command)
            return
        done = partial(self._delivery.respond, session, command.request)
        principal = session.principal
        self.register(session.number, command.partition_id, command.name, done, principal)

    def register(
        self, session: int, partition_id: int, name: str, done: Opened, principal: str = ""
    ) -> None:
        """Give a producer its id and next epoch; `done` when that is durable. Raises NotOwner,
        InvalidArgument, ResourceExhausted, PermissionDenied for a name that another principal uses."""
        state = self._state
        partition = state.served(partition_id)
        if not 0 < len(name.encode()) <= NAME_BYTES_MAX:
            raise InvalidArgument(f"a producer name has 1 to {NAME_BYTES_MAX} bytes")
        producer_id = xxhash.xxh64_intdigest(name.encode()) & PRODUCER_ID_MAX or 1
        while partition.producer_names.get(producer_id, name) != name:
            producer_id = (producer_id + 1) & PRODUCER_ID_MAX or 1
        if partition.logged:
            state.journals[partition.log_slot].check_takes()
        tables = state.tables
        slot = tables.find_producer(partition_id, producer_id)
        if slot >= 0 and self.access is not None:
            self._check_name(partition.topic, slot, name, principal)
        opener = int(tables.producers[slot, ProducerWord.SESSION]) if slot >= 0 else -1
        if state.sessions.by_number(opener) is None and not is_passed_on(opener):
            self._limits.check_handle(partition, session)
        self._limits.check_producer(partition, producer_id)
        epoch = int(tables.producers[slot, ProducerWord.EPOCH]) + 1 if slot >= 0 else 1
        slot = state.catalog.open_producer(partition, producer_id, name, epoch)
        tables.producers[slot, ProducerWord.SESSION] = session
        tables.producers[slot, ProducerWord.LAST_USED_NS] = state.now_wall_ns

        def durable(error: DanubeError | None) -> None:
            if error is not None:
                done(None, error)
                return
            next_sequence = int(tables.producers[slot, ProducerWord.NEXT_SEQUENCE])
            limits = self._limits.frame_limits(partition)
            done(m.Opened(producer_id, epoch, next_sequence, *limits), None)

        state.record(partition, r.ProducerOpened(partition_id, producer_id, name, epoch), durable)

    def _check_name(self, topic: str, slot: int, name: str, principal: str) -> None:
        """Raise PermissionDenied if another principal publishes under that name, and this one may not take it."""
        opener = int(self._state.tables.producers[slot, ProducerWord.SESSION])
        session = self._state.sessions.by_number(opener)
        access = self.access
        if session is None or access is None or session.principal == principal:
            return
        if not access.permits(principal, Permission.MANAGE_TOPIC, topic):
            raise PermissionDenied(
                f"the producer name {name!r} is in use on {topic} by another user; choose another name"
            )

    def _close(self, session: Session, command: p.CloseProducer) -> None:
        self.release(command.partition_id, command.producer_id, session.number)
        if self._state.partition(command.partition_id) is None:
            self.close_elsewhere(session, command)
        self._delivery.result(session, command.request)

    def release(self, partition_id: int, producer_id: int, session: int) -> None:
        """Close a producer, if that session has it."""
        tables = self._state.tables
        slot = tables.find_producer(partition_id, producer_id)
        if slot >= 0 and tables.producers[slot, ProducerWord.SESSION] == session:
            tables.producers[slot, ProducerWord.SESSION] = -1
            self._limits.namespaces.note_closed()

    def release_all(self, sessions: Collection[int]) -> None:
        """Close the producers of these sessions."""
        tables = self._state.tables
        openers = tables.producers[: tables.producer_count, ProducerWord.SESSION]
        openers[np.isin(openers, list(sessions))] = -1
        self._limits.namespaces.note_closed()

    # ------------------------------------------------------------ by the clock

    def do_work(self, now_ns: int) -> None:
        """Count open producers, and forget unused ones, each when it is time."""
        if now_ns >= self._next_count_ns:
            self._next_count_ns = now_ns + COUNT_NS
            self._state.boot.counters.set(Counter.PRODUCERS, self._open_count())
        if now_ns >= self._next_expiry_ns:
            self._next_expiry_ns = now_ns + EXPIRY_NS
            self._expire()

    def _open_count(self) -> int:
        tables = self._state.tables
        openers = tables.producers[: tables.producer_count, ProducerWord.SESSION]
        living = [session.number for session in self._state.sessions]
        is_open = np.isin(openers, living) | is_passed_on(openers)
        return int(np.count_nonzero(is_open))

    def _expire(self) -> None:
        """Forget producers that were not used for long, and the longest unused above the limit."""
        state, tables, settings = self._state, self._state.tables, self._state.settings
        producers = tables.producers[: tables.producer_count]
        used = producers[:, ProducerWord.LAST_USED_NS]
        live = producers[:, ProducerWord.PARTITION_ID] != 0
        oldest_ns = state.steady_wall_ns - settings.producer_expiry_seconds * 1000 * MILLISECOND_NS
        gone = set(np.flatnonzero(live & (used < oldest_ns)).tolist())
        excess = int(np.count_nonzero(live)) - len(gone) - settings.producers_max
        if excess > 0:
            order = np.argsort(np.where(live, used, INT64_MAX), kind="stable").tolist()
            gone.update([slot for slot in order if slot not in gone][:excess])
        for slot in gone:
            partition = state.partition(int(producers[slot, ProducerWord.PARTITION_ID]))
            if partition is not None:
                producer_id = int(producers[slot, ProducerWord.PRODUCER_ID])
                partition.producer_names.pop(producer_id, None)
                state.record(partition, r.ProducerExpired(partition.partition_id, producer_id))
        tables.remove_producers(list(gone))
