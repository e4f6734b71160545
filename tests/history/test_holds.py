"""Holds: renewed and released by any of their keys, and never lost to a deletion beside a renewal."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from danube_fast.clock import SECOND_NS
from danube_fast.errors import DataLoss, InvalidArgument, NotFound, Unavailable
from danube_fast.history.holds import (
    HOLDS_PREFIX,
    held_keys,
    list_holds,
    make_hold,
    release_hold,
    renew_hold,
)
from danube_fast.history.stores.memory import MemoryStore
from danube_fast.history.stores.store import ObjectInfo
from danube_fast.testing.virtual_clock import VirtualClock

KEYS = ["objects/00000001/000000000001", "objects/00000001/000000000002"]
WRONG = [
    "",
    "/",
    "holds/",
    "holds/..",
    "holds/../objects/00000001/000000000001",
    "../holds/001767225600000-0123456789abcdef",
    "objects/00000001/000000000001",
    "manifests/0000000001/pruned",
    "holds/1767225600000-0123456789abcdef",
    "holds/001767225600000-0123456789abcdeg",
    "holds/001767225600000-0123456789ABCDEF",
    "holds/001767225600000-0123456789abcdef/x",
    "holds/001767225600000-0123456789abcdef\n",
    "holds/\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660-0123456789abcdef",
    "holds/" + "0" * 100_000,
]


class Store(MemoryStore):
    """A store in which something else happens between two requests."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.behind_list: Callable[[], object] = lambda: None
        self.behind_create: Callable[[], object] = lambda: None

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List what is there, then let the other thing happen."""
        found = [*super().list(prefix)]
        self.behind_list()
        return iter(found)

    def create(self, key: str, data: object) -> None:
        """Make an object, then let the other thing happen."""
        super().create(key, data)  # type: ignore[arg-type]
        self.behind_create()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def store(clock: VirtualClock) -> Store:
    return Store(clock)


def holds(store: MemoryStore) -> list[str]:
    return [info.key for info in store.list(HOLDS_PREFIX)]


def test_a_hold_is_renewed_by_any_of_its_keys(store: Store, clock: VirtualClock) -> None:
    first = make_hold(store, KEYS, 10, clock.wall_ns())
    other = make_hold(store, ["objects/00000001/000000000003"], 1000, clock.wall_ns())
    clock.now_ns += 9 * SECOND_NS
    second = renew_hold(store, first.key, 10, clock)
    assert second.expires_ms == first.expires_ms + 9000 and second.keys == KEYS
    clock.now_ns += 9 * SECOND_NS
    assert held_keys(store, clock.wall_ns()) == {*KEYS, *other.keys}
    # of an answer that was lost, the client knows the first key only
    third = renew_hold(store, first.key, 100, clock)
    assert sorted(holds(store)) == sorted([third.key, other.key])
    sooner = renew_hold(store, third.key, 5, clock)
    assert renew_hold(store, third.key, 5, clock) == sooner
    clock.now_ns += 6 * SECOND_NS
    assert held_keys(store, clock.wall_ns()) == set(other.keys)
    assert holds(store) == [other.key]


def test_a_hold_is_released_by_any_of_its_keys_and_twice(store: Store, clock: VirtualClock) -> None:
    first = make_hold(store, KEYS, 10, clock.wall_ns())
    other = make_hold(store, KEYS[:1], 10, clock.wall_ns())
    renew_hold(store, first.key, 100, clock)
    for _ in range(2):
        release_hold(store, first.key)
        assert holds(store) == [other.key]
    with pytest.raises(NotFound, match="flush the topic again with hold_seconds"):
        renew_hold(store, first.key, 10, clock)
    assert holds(store) == [other.key]


def test_a_hold_that_has_expired_is_not_renewed(store: Store, clock: VirtualClock) -> None:
    hold = make_hold(store, KEYS, 10, clock.wall_ns())
    clock.now_ns += 10 * SECOND_NS
    with pytest.raises(NotFound, match="flush the topic again"):
        renew_hold(store, hold.key, 10, clock)
    assert not held_keys(store, clock.wall_ns())


def test_a_renewal_that_is_too_late_at_its_end_is_none(store: Store, clock: VirtualClock) -> None:
    """The store was slow: a deletion may have looked when the old hold was over and the new one not there yet."""
    hold = make_hold(store, KEYS, 10, clock.wall_ns())

    def wait() -> None:
        clock.now_ns += 10 * SECOND_NS

    store.behind_create = wait
    with pytest.raises(NotFound, match="flush the topic again"):
        renew_hold(store, hold.key, 100, clock)
    assert not held_keys(store, clock.wall_ns())


def test_a_renewal_beside_a_listing_is_seen(store: Store, clock: VirtualClock) -> None:
    """The listing has the old key, which is gone when it is read, and not the new one."""
    hold = make_hold(store, KEYS, 10, clock.wall_ns())

    def renew() -> None:
        store.behind_list = lambda: None
        renew_hold(store, hold.key, 100, clock)

    store.behind_list = renew
    assert held_keys(store, clock.wall_ns()) == set(KEYS)


def test_a_listing_that_stays_late_deletes_nothing(store: Store, clock: VirtualClock) -> None:
    """A caller that cannot tell what is held gets an error, never less than all."""
    key = make_hold(store, KEYS, 10, clock.wall_ns()).key

    def renew() -> None:
        nonlocal key
        store.behind_list = lambda: None
        key = renew_hold(store, key, 10, clock).key
        clock.now_ns += SECOND_NS
        store.behind_list = renew

    store.behind_list = renew
    clock.now_ns += SECOND_NS
    with pytest.raises(Unavailable, match="try again"):
        list_holds(store, clock.wall_ns())


def test_a_hold_that_is_not_listed_yet_is_renewed(store: Store, clock: VirtualClock) -> None:
    hold = make_hold(store, KEYS, 10, clock.wall_ns())
    listed = store.list
    store.list = lambda prefix="": iter(())  # type: ignore[method-assign]
    clock.now_ns += SECOND_NS
    renewed = renew_hold(store, hold.key, 10, clock)
    store.list = listed  # type: ignore[method-assign]
    assert holds(store) == [renewed.key]


def test_damage_is_told(store: Store, clock: VirtualClock) -> None:
    hold = make_hold(store, KEYS, 10, clock.wall_ns())
    store.delete([hold.key])
    store.create(hold.key, b"\xc1")
    with pytest.raises(DataLoss, match="is no hold"):
        renew_hold(store, hold.key, 10, clock)
    release_hold(store, hold.key)
    assert not holds(store)


@pytest.mark.parametrize("key", WRONG, ids=lambda key: repr(key[:60]))
def test_what_is_no_hold_is_refused(store: Store, clock: VirtualClock, key: str) -> None:
    store.create(KEYS[0], b"of history")
    make_hold(store, KEYS, 10, clock.wall_ns())
    before = {info.key for info in store.list()}
    with pytest.raises(InvalidArgument, match="is not a hold; give what a flush") as caught:
        renew_hold(store, key, 10, clock)
    assert len(str(caught.value)) < 400
    with pytest.raises(InvalidArgument, match="is not a hold; give what a flush"):
        release_hold(store, key)
    assert {info.key for info in store.list()} == before


def test_a_hold_of_one_topic_is_none_of_another(store: Store, clock: VirtualClock) -> None:
    hold = make_hold(store, KEYS, 10, clock.wall_ns(), "/shop/orders")
    with pytest.raises(NotFound):
        renew_hold(store, hold.key, 100, clock, "/shop/other")
    release_hold(store, hold.key, "/shop/other")
    renewed = renew_hold(store, hold.key, 100, clock, "/shop/orders")
    assert renewed.topic == "/shop/orders" and held_keys(store, clock.wall_ns()) == {*KEYS}
    release_hold(store, renewed.key, "/shop/other")
    assert held_keys(store, clock.wall_ns()) == {*KEYS}
    release_hold(store, hold.key, "/shop/orders")
    assert held_keys(store, clock.wall_ns()) == set()
    of_reader = make_hold(store, KEYS, 10, clock.wall_ns())
    release_hold(store, of_reader.key, "/shop/orders")
    assert held_keys(store, clock.wall_ns()) == {*KEYS}
