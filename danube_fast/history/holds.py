"""Holds: objects that a reader outside of the broker needs, and until when they must not be deleted.

    holds/<expires, ms since 1970>-<id>        msgpack of Hold

A hold never changes; it is renewed by another one with the same id that expires later. The uploader reads them again
before each deletion, so a hold counts from the moment when it is made.
"""

from __future__ import annotations

import secrets

import msgspec

from danube_fast.clock import MILLISECOND_NS, SECOND_NS
from danube_fast.errors import AlreadyExists, DataLoss, NotFound
from danube_fast.history.stores.store import ObjectStore

__all__ = [
    "HOLDS_PREFIX",
    "Hold",
    "held_keys",
    "list_holds",
    "make_hold",
    "release_hold",
    "renew_hold",
]

HOLDS_PREFIX = "holds/"


class Hold(msgspec.Struct, frozen=True):
    """Objects that must stay."""

    id: str
    expires_ms: int
    """Unix time, ms."""
    keys: list[str]

    @property
    def key(self) -> str:
        """Key of the hold itself."""
        return f"{HOLDS_PREFIX}{self.expires_ms:015d}-{self.id}"


def make_hold(store: ObjectStore, keys: list[str], lease_seconds: int, wall_ns: int) -> Hold:
    """Hold objects for so many seconds from now on. Raises what the store raises."""
    return _create(store, secrets.token_hex(8), keys, lease_seconds, wall_ns)


def renew_hold(store: ObjectStore, hold: Hold, lease_seconds: int, wall_ns: int) -> Hold:
    """Hold the same objects for so many seconds from now on; the new hold. Raises what the store raises."""
    renewed = _create(store, hold.id, hold.keys, lease_seconds, wall_ns)
    if renewed.key != hold.key:
        store.delete([hold.key])
    return renewed


def release_hold(store: ObjectStore, hold: Hold) -> None:
    """Give the objects back. Raises what the store raises."""
    store.delete([hold.key])


def _create(
    store: ObjectStore, hold_id: str, keys: list[str], lease_seconds: int, wall_ns: int
) -> Hold:
    hold = Hold(hold_id, (wall_ns + lease_seconds * SECOND_NS) // MILLISECOND_NS, keys)
    try:
        store.create(hold.key, msgspec.msgpack.encode(hold))
    except AlreadyExists:
        pass  # of a try whose answer was lost, or renewed twice within a millisecond
    return hold


def list_holds(store: ObjectStore, wall_ns: int) -> list[Hold]:
    """Holds that count still; those that have expired are deleted. Raises what the store raises, DataLoss."""
    found, expired = [], []
    for info in store.list(HOLDS_PREFIX):
        expires = info.key.removeprefix(HOLDS_PREFIX).partition("-")[0]
        if not expires.isdigit():
            continue
        if int(expires) * MILLISECOND_NS <= wall_ns:
            expired.append(info.key)
            continue
        try:
            found.append(msgspec.msgpack.decode(store.read(info.key), type=Hold))
        except NotFound:
            continue  # released just now
        except msgspec.MsgspecError as error:
            raise DataLoss(f"{store.url}: {info.key} is no hold: {error}") from None
    if expired:
        store.delete(expired)
    return found


def held_keys(store: ObjectStore, wall_ns: int) -> set[str]:
    """Keys of all objects that a hold names. Raises as `list_holds`."""
    return {key for hold in list_holds(store, wall_ns) for key in hold.keys}
