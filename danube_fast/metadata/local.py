"""Revisions, watches and leases for stores that live in one process; a home adds only its storage.

    put/cas/delete --> lock --> end due leases --> _write(changes) --> watchers
                                                   durable here        told only after that

A lease lives in this process: when a durable store is opened again, no process can hold one of its leases,
so the home drops the keys that stood under them.
"""

from __future__ import annotations

import abc
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from danube_fast.clock import SECOND_NS, Clock
from danube_fast.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from danube_fast.metadata.store import (
    CHANGES_MAX,
    Entry,
    Event,
    Lease,
    check_key,
    check_prefix,
    check_value,
)

__all__ = ["PENDING_EVENTS_MAX", "LocalLease", "LocalStore", "LocalWatch"]

PENDING_EVENTS_MAX = 100_000
"""Events that wait for one watcher's `take`; enough for every topic of a host to change twice."""

_Events = list[Event]  # LocalStore has a method `list`, which hides the type inside the class
_RAISED_KEY = "/revision/raised"


class LocalWatch:
    """See `Watch`. Filled under the store's lock, drained by its owner."""

    def __init__(
        self,
        store: LocalStore,
        prefix: str,
        initial: list[tuple[str, Entry]],
        notify: Callable[[], None] | None,
    ) -> None:
        self.initial = initial
        self._store = store
        self._prefix = prefix
        self._notify = notify
        self._pending: deque[Event] = deque()
        self._lost = False

    def take(self) -> list[Event]:
        """Take the events since the last call, in revision order."""
        with self._store.lock:
            self._store.end_due_leases()
            if self._lost:
                self._lost = False
                self._store.forget_watch(self)
                raise ResourceExhausted(
                    f"more than {PENDING_EVENTS_MAX} changes under {self._prefix} waited for this "
                    "watcher; watch again and start from what stands there"
                )
            events = list(self._pending)
            self._pending.clear()
            return events

    def cancel(self) -> None:
        """End the watch."""
        with self._store.lock:
            self._store.forget_watch(self)
            self._pending.clear()

    def offer(self, events: Iterable[Event]) -> None:
        """Called by the store, under its lock, with every change."""
        mine = [event for event in events if event.key.startswith(self._prefix)]
        if not mine or self._lost:
            return
        if len(self._pending) + len(mine) > PENDING_EVENTS_MAX:
            self._pending.clear()
            self._lost = True
        else:
            self._pending.extend(mine)
        if self._notify is not None:
            self._notify()


class LocalLease:
    """See `Lease`."""

    def __init__(self, store: LocalStore, lease_id: int, ttl_ns: int, deadline_ns: int) -> None:
        self.lease_id = lease_id
        self.ttl_ns = ttl_ns
        self.deadline_ns = deadline_ns
        self._store = store

    def keep_alive(self) -> None:
        """Start the time to live anew."""
        self._store.renew(self)

    def revoke(self) -> None:
        """End the lease now."""
        self._store.end_lease(self)


class LocalStore(abc.ABC):
    """See `MetadataStore`. A home implements `_read`, `_scan` and `_write`."""

    def __init__(self, clock: Clock, revision: int = 0) -> None:
        self.lock = threading.RLock()
        self._clock = clock
        self._revision = revision
        self._watches: list[LocalWatch] = []
        self._leases: dict[int, LocalLease] = {}
        self._lease_of_key: dict[str, int] = {}
        self._last_lease_id = 0
        self._closed = False

    @abc.abstractmethod
    def _read(self, key: str) -> Entry | None:
        """The entry of `key`, or None."""

    @abc.abstractmethod
    def _scan(self, prefix: str) -> list[tuple[str, Entry]]:
        """Every entry under `prefix`, in key order."""

    @abc.abstractmethod
    def _write(self, events: _Events, leased: frozenset[str]) -> None:
        """Make `events` durable, all or none. `leased` are the keys that end with this process."""

    @property
    def revision(self) -> int:
        """Revision of the newest change."""
        with self.lock:
            return self._revision

    @property
    def sealed_revision(self) -> int:
        """Revision that the store will surely tell of when it is opened the next time."""
        return self.revision

    @property
    def identity(self) -> bytes:
        """16 bytes that no other store has."""
        return bytes(16)

    def raise_revision(self, revision: int) -> None:
        """Make the next change have a revision above that; nothing if it has already."""
        with self.lock:
            self._enter()
            if self._revision < revision:
                self._commit([Event(_RAISED_KEY, b"", revision + 1)])

    def get(self, key: str) -> Entry | None:
        """The entry of `key`, or None."""
        check_key(key)
        with self.lock:
            self._enter()
            return self._read(key)

    def list(self, prefix: str) -> list[tuple[str, Entry]]:
        """Every entry under `prefix`, in key order."""
        check_prefix(prefix)
        with self.lock:
            self._enter()
            return self._scan(prefix)

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        """Write `key`; returns the revision."""
        check_key(key)
        check_value(value)
        with self.lock:
            self._enter()
            return self._put(key, value, lease)

    def cas(
        self, key: str, value: bytes, expected_revision: int, lease: Lease | None = None
    ) -> int | None:
        """Write `key` only at the expected revision (0: absent); None if it was different."""
        check_key(key)
        check_value(value)
        with self.lock:
            self._enter()
            found = self._read(key)
            if (found.revision if found else 0) != expected_revision:
                return None
            return self._put(key, value, lease)

    def delete(self, key: str, expected_revision: int | None = None) -> bool:
        """Remove `key`; False if there was nothing to do."""
        check_key(key)
        with self.lock:
            self._enter()
            found = self._read(key)
            if found is None or expected_revision not in (None, found.revision):
                return False
            self._commit([Event(key, None, self._revision + 1)])
            self._lease_of_key.pop(key, None)
            return True

    def transact(
        self,
        changes: Sequence[tuple[str, bytes | None]],
        expected: Mapping[str, int] | None = None,
    ) -> int | None:
        """Make all changes at once, or none if a key has not its expected revision."""
        _check_changes(changes)
        with self.lock:
            self._enter()
            for key, revision in (expected or {}).items():
                found = self._read(check_key(key))
                if (found.revision if found else 0) != revision:
                    return None
            real = [(k, v) for k, v in changes if v is not None or self._read(k) is not None]
            first = self._revision + 1
            events = [
                Event(key, None if value is None else bytes(value), first + i)
                for i, (key, value) in enumerate(real)
            ]
            if events:
                self._commit(events)
            for event in events:
                self._lease_of_key.pop(event.key, None)
            return self._revision

    def watch(self, prefix: str, notify: Callable[[], None] | None = None) -> LocalWatch:
        """Follow the changes under `prefix`."""
        check_prefix(prefix)
        with self.lock:
            self._enter()
            watch = LocalWatch(self, prefix, self._scan(prefix), notify)
            self._watches.append(watch)
            return watch

    def lease(self, ttl_seconds: float) -> LocalLease:
        """A new lease."""
        if not ttl_seconds > 0:
            raise InvalidArgument(
                f"a lease of {ttl_seconds} s ends at once; give it a second or more"
            )
        with self.lock:
            self._enter()
            self._last_lease_id += 1
            ttl_ns = int(ttl_seconds * SECOND_NS)
            lease = LocalLease(
                self, self._last_lease_id, ttl_ns, self._clock.monotonic_ns() + ttl_ns
            )
            self._leases[lease.lease_id] = lease
            return lease

    def tick(self) -> None:
        """Let leases end whose time is up."""
        with self.lock:
            self.end_due_leases()

    def close(self) -> None:
        """Give everything back."""
        with self.lock:
            self._closed = True
            self._watches.clear()
            self._leases.clear()

    # ------------------------------------------------------------ for leases and watches

    def renew(self, lease: LocalLease) -> None:
        """Let a lease's time start anew. Raises NotFound if it had run out."""
        with self.lock:
            self._enter()
            self._require(lease)
            lease.deadline_ns = self._clock.monotonic_ns() + lease.ttl_ns

    def end_lease(self, lease: LocalLease) -> None:
        """End a lease; its keys vanish in key order."""
        with self.lock:
            if self._closed or lease.lease_id not in self._leases:
                return
            keys = sorted(x for x, owner in self._lease_of_key.items() if owner == lease.lease_id)
            if keys:
                first = self._revision + 1
                self._commit([Event(key, None, first + i) for i, key in enumerate(keys)])
            for key in keys:
                del self._lease_of_key[key]
            del self._leases[lease.lease_id]

    def end_due_leases(self) -> None:
        """End every lease whose time is up. Call under the lock."""
        if not self._leases:
            return
        now_ns = self._clock.monotonic_ns()
        due = [lease for lease in self._leases.values() if lease.deadline_ns <= now_ns]
        for lease in sorted(due, key=lambda x: (x.deadline_ns, x.lease_id)):
            self.end_lease(lease)

    def forget_watch(self, watch: LocalWatch) -> None:
        """Give a watch no more events. Call under the lock."""
        if watch in self._watches:
            self._watches.remove(watch)

    # ------------------------------------------------------------ inside the lock

    def _enter(self) -> None:
        if self._closed:
            raise FailedPrecondition("this metadata store was closed; open it again")
        self.end_due_leases()

    def _require(self, lease: Lease) -> None:
        if self._leases.get(lease.lease_id) is not lease:
            raise NotFound(
                f"lease {lease.lease_id} has ended; take a new one and put its keys again"
            )

    def _put(self, key: str, value: bytes, lease: Lease | None) -> int:
        if lease is not None:
            self._require(lease)
        leased = frozenset() if lease is None else frozenset([key])
        self._commit([Event(key, bytes(value), self._revision + 1)], leased)
        if lease is None:
            self._lease_of_key.pop(key, None)
        else:
            self._lease_of_key[key] = lease.lease_id
        return self._revision

    def _commit(self, events: _Events, leased: frozenset[str] = frozenset()) -> None:
        self._write(events, leased)
        self._revision = events[-1].revision
        for watch in tuple(self._watches):
            watch.offer(events)


def _check_changes(changes: Sequence[tuple[str, bytes | None]]) -> None:
    """Raise InvalidArgument unless `transact` may take them."""
    keys = {check_key(key) for key, _ in changes}
    if len(keys) != len(changes) or len(changes) > CHANGES_MAX:
        raise InvalidArgument(
            f"{len(changes)} changes of {len(keys)} keys in one transaction; each key may stand in "
            f"it once, and at most {CHANGES_MAX} of them"
        )
    for _, value in changes:
        if value is not None:
            check_value(value)
