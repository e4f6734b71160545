"""Look again at what clients have open when rights change, or credentials end.

    change, or a second --> pass: sessions --gone?--> closed, with its rings    all of them in each second
                                  of those whose rights may have changed:
                                  producers, consumers --no right any more?--> closed, the client is told
                                  --what was closed, counted--> audit log
                                  handles that roles permit --> queue --authorizer of another package denies--> closed

A pass goes in slices, so that 10,000 clients do not stop the loop. One that is under way when rights change goes on to its
end, and another one follows: however often they change, each client is looked at within two passes.
It asks the records alone, and waits for no answer: what another package's authorizer is asked about stands in a queue
beside it. A pass enters a handle that stands there already at its place, so that none is lost and none is put back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from danube_fast.broker.admission.layout import SESSION_ARRIVED, ProducerWord
from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.consumer import Consumer, Parting
from danube_fast.clock import MILLISECOND_NS, SECOND_NS
from danube_fast.errors import DanubeError, PermissionDenied
from danube_fast.net.session import Session
from danube_fast.security.changed_rights import Changes
from danube_fast.types import Permission
from danube_fast.undecided import Undecided
from danube_fast.workers.process.access import Access
from danube_fast.workers.process.denials import Closings, Denials
from danube_fast.workers.process.security_copy import SecurityCopy
from danube_fast.workers.shard.deliver.consumers import Consumers
from danube_fast.workers.shard.job import Job
from danube_fast.workers.shard.state import ShardState
from danube_fast.workers.shard.transports import Transports

__all__ = ["AccessChecks", "subscription_resource"]

PASS_SLICES = 60
"""A pass takes about so many slices, one in each tick of 10 ms: two passes end within the 2 s that a change may take."""
SLICE_CHECKS_MIN = 5
"""Few handles are looked at in small slices, so that turns are hardly longer while rights change."""
SLICE_NS = 5 * MILLISECOND_NS
EXPIRY_NS = SECOND_NS
"""How often credentials are looked at that end by themselves."""
UNDECIDED_MAX = 64
"""Handles that wait for answers of another package's authorizer; the queue goes on when there are fewer."""
UNDECIDED_OF_ONE_MAX = 16
"""Those of one principal: as many as its threads serve in time, if an answer takes no longer than 2 s."""
_REVOKED = "the right to do this was taken away; ask an administrator of the broker"


def subscription_resource(topic: str, subscription: str) -> str:
    """Name what a consumer needs its right on."""
    return f"{topic}#{subscription}" if subscription else topic


class _Handle(NamedTuple):
    """A handle that roles permit, and another package's authorizer may deny."""

    session: Session
    permission: Permission
    resource: str
    close: Callable[[DanubeError], None]


class AccessChecks(Job):
    """Check the sessions, producers and consumers of one worker against its copy of the records."""

    def __init__(
        self, state: ShardState, access: Access, copy: SecurityCopy, consumers: Consumers,
        transports: Transports, denials: Denials,
    ) -> None:  # fmt: skip
        """`denials`: where the audit log hears of what was closed."""
        self._closings = Closings(denials)
        self._state, self._access, self._copy = state, access, copy
        self._consumers, self._transports = consumers, transports
        access.owner_of = state.catalog.owners.get
        self._checked = (-1, 0, 0)
        self._next_ns = 0
        self._slice_checks = SLICE_CHECKS_MIN
        """Of the pass under way."""
        self._pass: Iterator[None] | None = None
        self._queue: dict[tuple[Permission, int, int], _Handle] = {}
        """Handles that another package's authorizer is to be asked about; by permission, session and number."""
        self._undecided: Counter[str] = Counter()
        """Handles that wait for answers, by principal."""

    @property
    def is_busy(self) -> bool:
        """Whether a pass is under way, or handles wait for another package's authorizer."""
        waits = bool(self._queue) or self._undecided.total() > 0
        return waits or self._pass is not None or self._checked != self._newest

    @property
    def _newest(self) -> tuple[int, int, int]:
        """Return which rights there are."""
        return self._access.version

    def do_work(self, now_ns: int) -> None:
        """Do a slice of the pass that is under way, or begin one if it is time."""
        self._copy.do_work(now_ns)
        self._access.do_work(now_ns)
        version, is_due = self._newest, now_ns >= self._next_ns
        if self._pass is None and (is_due or version != self._checked):
            changed = self._access.take_changed(self._checked)
            self._checked = version
            if is_due:
                self._next_ns = now_ns + EXPIRY_NS
            self._pass = self._check_all(changed, of_all=is_due)
            is_open = changed is None or changed.fronts
            count = self._count_open() if is_open else len(self._state.sessions)
            self._slice_checks = max(SLICE_CHECKS_MIN, -(-count // PASS_SLICES))
        if self._pass is not None:
            until_ns = self._access.clock.monotonic_ns() + SLICE_NS
            for _ in range(self._slice_checks):
                if next(self._pass, self) is self:
                    self._pass = None
                    break
                if self._access.clock.monotonic_ns() > until_ns:
                    break
        if self._queue:
            self._ask_queue()

    def _ask_queue(self) -> None:
        """Ask another package's authorizer about a slice of the handles that stand in the queue."""
        until_ns = self._access.clock.monotonic_ns() + SLICE_NS
        for key in list(islice(self._queue, max(UNDECIDED_MAX, len(self._queue) // PASS_SLICES))):
            if self._undecided.total() >= UNDECIDED_MAX:
                return
            handle = self._queue.pop(key)
            if self._undecided[handle.session.principal] >= UNDECIDED_OF_ONE_MAX:
                self._queue[key] = handle  # behind those of others
            else:
                self._judge(handle)
            if self._access.clock.monotonic_ns() > until_ns:
                return

    def _count_open(self) -> int:
        """Number of sessions, consumers and producers."""
        sessions = self._state.sessions
        consumers = sum([len(session.consumers) for session in sessions])
        (producers,) = (self._state.tables.producers[:, ProducerWord.SESSION] > 0).nonzero()
        return len(sessions) + consumers + len(producers)

    def _check_all(self, changed: Changes | None, *, of_all: bool) -> Iterator[None]:
        """Check sessions, those `of_all` or of principals whose rights may have changed, and what these have open where that may
        be; one thing with each step."""
        ended: dict[int, Session] = {}
        concerned: dict[int, tuple[str, ...]] = {}
        """By session, how the names of such topics begin."""
        for session in self._state.sessions:
            fronts = self._access.changed_fronts(session.principal, changed)
            if (fronts or of_all) and self._has_ended(session):
                self._revoke(session)
                ended[session.number] = session
            elif fronts:
                concerned[session.number] = fronts
                yield from self._check_consumers(session, fronts)
            yield
        if concerned or ended:  # a session that came since opens with the rights of now
            yield from self._check_producers(ended, concerned)
        self._closings.tell()

    def _has_ended(self, session: Session) -> bool:
        """Whether the principal of an open session is not what its proof names."""
        return not session.closed and self._access.principal_of(session.proof) != session.principal

    def _check_consumers(self, session: Session, fronts: tuple[str, ...]) -> Iterator[None]:
        for number in list(session.consumers):
            consumer = session.consumers.get(number)
            if consumer is None:
                continue
            resource = self._resource_of(consumer)
            if resource is None:
                continue
            if resource.startswith(fronts):
                close = partial(self._close_consumer, session, consumer, resource)
                self._check(number, _Handle(session, Permission.CONSUME, resource, close))
            yield

    def _check(self, number: int, handle: _Handle) -> None:
        """Close a handle unless its principal has its right still by the records; let the authorizer be asked then."""
        session, permission, resource, close = handle
        try:
            self._access.check(session.principal, permission, resource, outer=False)
        except DanubeError as error:
            close(error)
            return
        if self._access.has_outer:
            self._queue[permission, session.number, number] = handle

    def _judge(self, handle: _Handle) -> None:
        """Close a handle, now or when it is decided, unless the principal has its right still."""
        session, permission, resource, close = handle
        if session.closed:
            return
        principal = session.principal
        try:
            self._access.check(principal, permission, resource, is_open=True)
        except Undecided as undecided:
            self._undecided[principal] += 1

            def again() -> None:
                self._undecided[principal] -= 1
                if not self._undecided[principal]:
                    del self._undecided[principal]
                self._judge(handle)

            undecided.then(again)
        except DanubeError as error:
            close(error)

    def _close_consumer(
        self, session: Session, consumer: Consumer, resource: str, error: DanubeError
    ) -> None:
        if session.consumers.get(consumer.consumer_id) is not consumer:
            return  # it has gone meanwhile
        text = _REVOKED if isinstance(error, PermissionDenied) else str(error)
        self._consumers.close(session, consumer, code=error.code, text=text)
        self._transports.drop_queued(session.identity)
        self._closings.note(session, "consumer", resource)

    def _resource_of(self, consumer: Consumer) -> str | None:
        """Name what a consumer needs its right on; None: the partition is not here any more."""
        partition = self._state.partition(consumer.subscription.partition_id)
        if partition is None:
            return None
        return subscription_resource(partition.topic, consumer.subscription.name)

    def _check_producers(
        self, ended: dict[int, Session], concerned: dict[int, tuple[str, ...]]
    ) -> Iterator[None]:
        """Close producers whose session may not publish to their topic any more: with its next publish the client opens it
        again, and is refused. Those of sessions that have `ended` are closed already, and counted."""
        tables = self._state.tables
        asked = np.array(sorted([*ended, *concerned]), np.int64)
        sessions = tables.producers[:, ProducerWord.SESSION]
        is_asked = asked.take(asked.searchsorted(sessions), mode="clip") == sessions
        for slot in is_asked.nonzero()[0].tolist():
            number = int(tables.producers[slot, ProducerWord.SESSION])
            session = ended.get(number) or self._state.sessions.by_number(number)
            partition = self._state.partition(
                int(tables.producers[slot, ProducerWord.PARTITION_ID])
            )
            if session is None or partition is None:
                continue
            if number in ended:
                self._closings.note(session, "producer", partition.topic)
            elif partition.topic.startswith(concerned.get(number, ())):
                close = partial(self._close_producer, session, slot, partition)
                self._check(slot, _Handle(session, Permission.PRODUCE, partition.topic, close))
            yield

    def _close_producer(
        self, session: Session, slot: int, partition: Partition, error: DanubeError
    ) -> None:
        row = self._state.tables.producers[slot]
        opened = row[ProducerWord.SESSION], row[ProducerWord.PARTITION_ID]
        if opened == (session.number, partition.partition_id):  # it has not gone meanwhile
            row[ProducerWord.SESSION] = SESSION_ARRIVED
            self._closings.note(session, "producer", partition.topic)

    def _revoke(self, session: Session) -> None:
        """End a session whose principal is not what its proof names: what was queued for it is dropped."""
        for consumer in session.consumers.values():
            self._closings.note(session, "consumer", self._resource_of(consumer) or "")
        self._closings.note(session, "session")
        self._consumers.close_session(session, Parting.LOST)
        self._transports.revoke(session.identity)
