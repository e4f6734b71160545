"""Holds: objects that a reader outside of the broker needs, and until when they must not be deleted.

    holds/<expires, ms since 1970>-<id>        msgpack of Hold

An object of a hold never changes; a hold is renewed by another object with the same id that expires later or sooner,
and any of its keys names it, those before as well. The uploader reads holds again before each deletion, so a hold
counts from the moment when it is made.
"""

from __future__ import annotations

import contextlib
import re
import secrets

import msgspec

from danube_fast.clock import MILLISECOND_NS, SECOND_NS, Clock
from danube_fast.errors import AlreadyExists, DataLoss, InvalidArgument, NotFound, Unavailable
from danube_fast.history.stores.store import ObjectStore

__all__ = [
    "HOLDS_PREFIX",
    "Hold",
    "ensure_hold",
    "held_keys",
    "list_holds",
    "make_hold",
    "release_hold",
    "renew_hold",
]

HOLDS_PREFIX = "holds/"
LOOKS_MAX = 5
"""At holds that go while they are read."""
_KEY = re.compile(r"holds/[0-9]{15}-([0-9a-f]{16})")
_SHOWN_MAX = 80
"""Characters of a wrong key in an error."""


class Hold(msgspec.Struct, frozen=True):
    """Objects that must stay."""

    id: str
    expires_ms: int
    """Unix time, ms."""
    keys: list[str]
    topic: str = ""
    """Topic that was flushed for it; empty: a reader of the store has made it."""

    @property
    def key(self) -> str:
        """Key of the hold itself."""
        return f"{HOLDS_PREFIX}{self.expires_ms:015d}-{self.id}"


def make_hold(
    store: ObjectStore, keys: list[str], hold_seconds: int, wall_ns: int, topic: str = ""
) -> Hold:
    """Hold objects for so many seconds from now on. Raises what the store raises."""
    return _create(store, secrets.token_hex(8), keys, hold_seconds, wall_ns, topic)


def ensure_hold(store: ObjectStore, keys: list[str], hold_seconds: int, wall_ns: int) -> Hold:
    """Hold objects for so many seconds; the same work done again takes the hold that it has made before, if half of the
    time is left. Raises what the store raises."""
    enough_ms = (wall_ns + hold_seconds * SECOND_NS // 2) // MILLISECOND_NS
    try:
        found = list_holds(store, wall_ns)
    except DataLoss:
        found = []  # one of others is damaged
    fitting = [each for each in found if each.expires_ms >= enough_ms and {*keys} <= {*each.keys}]
    if fitting:
        return max(fitting, key=lambda hold: hold.expires_ms)
    return make_hold(store, keys, hold_seconds, wall_ns)


def renew_hold(
    store: ObjectStore, key: str, hold_seconds: int, clock: Clock, topic: str = ""
) -> Hold:
    """Hold the objects of a hold for so many seconds from now on; the new hold. `topic`: one of another topic counts as
    gone.

    Raises what the store raises, InvalidArgument for a key that is none of a hold, NotFound if it was released or has
    expired, DataLoss.
    """
    known = _keys_of(store, key)
    hold = _newest(store, known, clock.wall_ns())
    if hold is None or (topic and hold.topic != topic):
        raise _gone(store, key)
    renewed = _create(store, hold.id, hold.keys, hold_seconds, clock.wall_ns(), hold.topic)
    if _has_expired(hold.key, clock.wall_ns()):  # a deletion may have seen neither of the two
        store.delete([renewed.key])
        raise _gone(store, key)
    store.delete(known - {renewed.key})
    return renewed


def release_hold(store: ObjectStore, key: str, topic: str = "") -> None:
    """Give the objects of a hold back, if it is there still, and of that topic, if one is given. Raises what the store
    raises, InvalidArgument for a key that is none of a hold."""
    keys = _keys_of(store, key)
    if topic:
        hold = _newest(store, keys, 0)
        if hold is None or hold.topic != topic:
            return
    store.delete(keys)


def list_holds(store: ObjectStore, wall_ns: int) -> list[Hold]:
    """Holds that count still; those that have expired are deleted. Raises what the store raises, DataLoss."""
    for _ in range(LOOKS_MAX):
        counting: list[str] = []
        expired: list[str] = []
        for info in store.list(HOLDS_PREFIX):
            if _expires(info.key).isdigit():
                (expired if _has_expired(info.key, wall_ns) else counting).append(info.key)
        try:
            found = [_read(store, key) for key in counting]
        except NotFound:
            continue  # one was renewed just now, and the listing has not its new key; or released
        if expired:
            store.delete(expired)
        return found
    raise Unavailable(f"{store.url}: holds were renewed or released at each look; try again")


def held_keys(store: ObjectStore, wall_ns: int) -> set[str]:
    """Keys of all objects that a hold names. Raises as `list_holds`."""
    return {key for hold in list_holds(store, wall_ns) for key in hold.keys}


def _create(
    store: ObjectStore, hold_id: str, keys: list[str], hold_seconds: int, wall_ns: int, topic: str
) -> Hold:
    hold = Hold(hold_id, (wall_ns + hold_seconds * SECOND_NS) // MILLISECOND_NS, keys, topic)
    try:
        store.create(hold.key, msgspec.msgpack.encode(hold))
    except AlreadyExists:
        pass  # of a try whose answer was lost, or renewed twice within a millisecond
    return hold


def _read(store: ObjectStore, key: str) -> Hold:
    try:
        return msgspec.msgpack.decode(store.read(key), type=Hold)
    except msgspec.MsgspecError as error:
        raise DataLoss(f"{store.url}: {key} is no hold: {error}") from None


def _keys_of(store: ObjectStore, key: str) -> set[str]:
    """List the keys of a hold, one of which is `key`: those of renewals, too. Raises InvalidArgument if it is none."""
    match = _KEY.fullmatch(key)
    if match is None:
        shown = key if len(key) <= _SHOWN_MAX else f"{key[:_SHOWN_MAX]}..."
        raise InvalidArgument(
            f"{shown!r} is not a hold; give what a flush with hold_seconds has answered as `hold`: "
            f"{HOLDS_PREFIX}EXPIRES-ID"
        )
    listed = [info.key for info in store.list(HOLDS_PREFIX)]
    return {key, *(each for each in listed if each.partition("-")[2] == match[1])}


def _newest(store: ObjectStore, keys: set[str], wall_ns: int) -> Hold | None:
    """Read the one of these that expires last; None if all of them have expired or are gone."""
    for key in sorted(keys, reverse=True):
        if not _has_expired(key, wall_ns):
            with contextlib.suppress(NotFound):
                return _read(store, key)
    return None


def _expires(key: str) -> str:
    return key.removeprefix(HOLDS_PREFIX).partition("-")[0]


def _has_expired(key: str, wall_ns: int) -> bool:
    return int(_expires(key)) * MILLISECOND_NS <= wall_ns


def _gone(store: ObjectStore, key: str) -> NotFound:
    return NotFound(
        f"{store.url}: the hold {key} was released or has expired, and its objects may be deleted; flush the topic "
        "again with hold_seconds, and renew that hold in time"
    )
