"""The interface of every metadata store: small values under path-like keys, with revisions, watches, leases.

Metadata is what the broker knows about topics, subscriptions and owners: read often, written seldom,
never on the path of a message. One Protocol has several homes (memory, LMDB, a cluster's etcd); one
conformance suite, tests/metadata/conformance.py, runs over each.

Keys look like `/topics/default/flights`: they begin with '/', and no segment is empty. A prefix ends
in '/', so that `/topics/default/a/` can never match `/topics/default/ab`.

Every change gets the next revision of its store; a key carries the revision of its last change. All
calls are synchronous and may come from any thread; when one that changes something returns, the change
is as durable as the store ever makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from danube_fast.errors import InvalidArgument

__all__ = [
    "CHANGES_MAX",
    "KEY_BYTES_MAX",
    "VALUE_BYTES_MAX",
    "Entry",
    "Event",
    "Lease",
    "MetadataStore",
    "Watch",
    "check_key",
    "check_prefix",
    "check_value",
]

KEY_BYTES_MAX = 480
"""Longest key, UTF-8 bytes. LMDB allows 511; two name segments of 128 and a path fit easily."""

CHANGES_MAX = 100
"""Changes in one `transact`. etcd refuses more than 128 operations unless it is told otherwise."""

VALUE_BYTES_MAX = 1024 * 1024
"""Longest value. etcd allows 1.5 MiB; a larger value is a sign that data was stored as metadata."""


class Entry(NamedTuple):
    """A value and the revision of the change that wrote it (1 or more)."""

    value: bytes
    revision: int


class Event(NamedTuple):
    """One change: `value` is None when the key vanished. `revision` is that of the change."""

    key: str
    value: bytes | None
    revision: int


class Watch(Protocol):
    """The changes under one prefix, from the moment the watch was made."""

    @property
    def initial(self) -> list[tuple[str, Entry]]:
        """All entries under the prefix at that moment, in key order: nothing falls between both."""
        ...

    def take(self) -> list[Event]:
        """Take the events since the last call, in revision order; never waits.

        Raises ResourceExhausted once if more piled up than the store keeps: watch anew and start
        from its `initial`.
        """
        ...

    def cancel(self) -> None:
        """End the watch; `take` then returns nothing. May be called twice."""
        ...


class Lease(Protocol):
    """A promise to keep calling: keys put under it vanish when the calls stop."""

    @property
    def lease_id(self) -> int:
        """Number of the lease, unique in its store, never reused."""
        ...

    def keep_alive(self) -> None:
        """Start the time to live anew. Raises NotFound if it had run out: take a new lease."""
        ...

    def revoke(self) -> None:
        """End the lease now; its keys vanish. Does nothing if it had ended."""
        ...


class MetadataStore(Protocol):
    """Small values under path-like keys. Every method may raise Unavailable or ResourceExhausted."""

    @property
    def revision(self) -> int:
        """Revision of the newest change; 0 in a new store."""
        ...

    @property
    def sealed_revision(self) -> int:
        """Revision that the store will surely tell of when it is opened the next time."""
        ...

    @property
    def identity(self) -> bytes:
        """16 bytes that no other store has: the broker's name in an object store."""
        ...

    def raise_revision(self, revision: int) -> None:
        """Make the next change have a revision above that; nothing if it has already."""
        ...

    def get(self, key: str) -> Entry | None:
        """The entry of `key`, or None."""
        ...

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        """Write `key` whatever it holds; returns the revision. Without `lease` the key outlives any
        lease it was under. Raises NotFound if the lease has ended."""
        ...

    def cas(
        self, key: str, value: bytes, expected_revision: int, lease: Lease | None = None
    ) -> int | None:
        """Write `key` only if its revision is the expected one; 0: only if it does not exist.

        Returns the new revision, or None if the key was different.
        """
        ...

    def delete(self, key: str, expected_revision: int | None = None) -> bool:
        """Remove `key` (only at that revision, if one is given); False if there was nothing to do."""
        ...

    def transact(
        self,
        changes: Sequence[tuple[str, bytes | None]],
        expected: Mapping[str, int] | None = None,
    ) -> int | None:
        """Make all changes (None deletes) in order and at once, or none: a crash leaves no half.

        `expected` names revisions that keys must have (0: missing); None is returned if one has
        not. Each change has a revision of its own; the newest is returned. No key twice, at most
        CHANGES_MAX of them: InvalidArgument. The keys outlive any lease they were under.
        """
        ...

    def list(self, prefix: str) -> list[tuple[str, Entry]]:
        """Every entry under `prefix`, which ends in '/', in the order of the keys' UTF-8 bytes."""
        ...

    def watch(self, prefix: str, notify: Callable[[], None] | None = None) -> Watch:
        """Follow the changes under `prefix`. `notify` is called, on the thread of the change, when
        `take` has something new; it must be quick and must not call the store."""
        ...

    def lease(self, ttl_seconds: float) -> Lease:
        """A new lease that ends `ttl_seconds` after its last `keep_alive`."""
        ...

    def tick(self) -> None:
        """Let leases end whose time is up. Every other call does so first; an idle loop calls this,
        so that watchers hear of it in time."""
        ...

    def close(self) -> None:
        """Give everything back; watches end. May be called twice."""
        ...


def check_key(key: str) -> str:
    """`key` itself. Raises InvalidArgument if it is not a path of non-empty segments."""
    if (
        not key.startswith("/")
        or key.endswith("/")
        or "//" in key
        or "\0" in key
        or len(key.encode()) > KEY_BYTES_MAX
    ):
        raise InvalidArgument(
            f"{key!r} is not a metadata key; write /segment/segment of at most {KEY_BYTES_MAX} "
            "bytes, with no empty segment and no slash at the end"
        )
    return key


def check_prefix(prefix: str) -> str:
    """`prefix` itself. Raises InvalidArgument unless it begins and ends with '/'."""
    if not prefix.startswith("/") or not prefix.endswith("/") or "//" in prefix:
        raise InvalidArgument(
            f"{prefix!r} is not a metadata prefix; it begins and ends with '/', so that it never "
            "matches half a name"
        )
    return prefix


def check_value(value: bytes) -> bytes:
    """`value` itself. Raises InvalidArgument if it is too long."""
    if len(value) > VALUE_BYTES_MAX:
        raise InvalidArgument(
            f"a metadata value of {len(value)} bytes is over the limit of {VALUE_BYTES_MAX}; "
            "store the data in a topic and its name here"
        )
    return value
