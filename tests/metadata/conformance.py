"""What every metadata store must do. A test module subclasses `Conformance` and gives it a `store`.

`clock` is a clock that the test moves; a store under test takes its time from it.
"""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube_fast.errors import FailedPrecondition, InvalidArgument, NotFound
from danube_fast.metadata.store import Entry, Event, MetadataStore

NS = 1_000_000_000


class ManualClock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now_ns = 1_000 * NS

    def wall_ns(self) -> int:
        return self.now_ns

    def monotonic_ns(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * NS)


Step = tuple[str, str, bytes, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "cas", "delete"]),
        st.sampled_from(["/m/a", "/m/ab", "/m/a/b", "/m/ü"]),
        st.binary(max_size=8),
        st.integers(0, 6),
    ),
    max_size=25,
)


def check_against_a_dict(store: MetadataStore, steps: list[Step]) -> None:
    """The same steps on the store and on a dict that counts revisions: both end alike."""
    for key, _ in store.list("/m/"):
        store.delete(key)
    base = store.revision
    model: dict[str, Entry] = {}
    revision = base
    watch = store.watch("/m/")
    expected_events = []
    for verb, key, value, guess in steps:
        expected = base + guess if guess else 0
        current = model[key].revision if key in model else 0
        if verb == "delete":
            done = store.delete(key)
            assert done == (key in model)
            if done:
                revision += 1
                del model[key]
                expected_events.append(Event(key, None, revision))
            continue
        if verb == "cas":
            outcome = store.cas(key, value, expected)
            assert outcome == (revision + 1 if expected == current else None)
        else:
            outcome = store.put(key, value)
            assert outcome == revision + 1
        if outcome is not None:
            revision += 1
            model[key] = Entry(value, revision)
            expected_events.append(Event(key, value, revision))
    assert store.list("/m/") == sorted(model.items(), key=lambda item: item[0].encode())
    assert watch.take() == expected_events
    watch.cancel()
    assert store.revision == revision


class Conformance:
    """Run over each implementation; `store` and `clock` are fixtures of the subclass's module."""

    def test_a_new_store_is_empty(self, store: MetadataStore) -> None:
        assert store.revision == 0
        assert store.get("/a") is None
        assert store.list("/") == []
        assert not store.delete("/a")

    def test_put_and_get(self, store: MetadataStore) -> None:
        first = store.put("/a", b"one")
        second = store.put("/a", b"two")
        assert (first, second) == (1, 2)
        assert store.get("/a") == Entry(b"two", 2)
        assert store.revision == 2

    def test_empty_and_binary_values(self, store: MetadataStore) -> None:
        store.put("/empty", b"")
        store.put("/binary", bytes(range(256)))
        assert store.get("/empty") == Entry(b"", 1)
        assert store.get("/binary") == Entry(bytes(range(256)), 2)

    def test_a_buffer_that_changes_later_does_not_change_what_was_put(
        self, store: MetadataStore
    ) -> None:
        buffer = bytearray(b"before")
        store.put("/a", buffer)
        buffer[:] = b"after!"
        assert store.get("/a") == Entry(b"before", 1)

    def test_transact_makes_all_changes_in_order(self, store: MetadataStore) -> None:
        store.put("/t/old", b"1")
        watch = store.watch("/t/")
        changes = [("/t/b", b"2"), ("/t/old", None), ("/t/none", None), ("/t/a", b"3")]
        assert store.transact(changes, {"/t/b": 0, "/t/old": 1}) == 4
        assert watch.take() == [
            Event("/t/b", b"2", 2),
            Event("/t/old", None, 3),
            Event("/t/a", b"3", 4),
        ]
        assert store.list("/t/") == [("/t/a", Entry(b"3", 4)), ("/t/b", Entry(b"2", 2))]
        assert store.transact([]) == store.revision == 4

    def test_transact_makes_none_if_one_expectation_fails(self, store: MetadataStore) -> None:
        store.put("/t/a", b"1")
        for wrong in ({"/t/a": 0}, {"/t/a": 1, "/t/b": 1}, {"/t/a": 2}):
            assert store.transact([("/t/a", b"2"), ("/t/b", b"2")], wrong) is None
        assert store.list("/t/") == [("/t/a", Entry(b"1", 1))]
        assert store.revision == 1

    def test_transact_refuses_what_it_could_not_do_at_once(self, store: MetadataStore) -> None:
        with pytest.raises(InvalidArgument):
            store.transact([("/t/a", b"1"), ("/t/a", None)])
        with pytest.raises(InvalidArgument):
            store.transact([(f"/t/{i}", b"") for i in range(101)])
        with pytest.raises(InvalidArgument):
            store.transact([("/t/a", b"1"), ("bad", b"1")])
        assert store.transact([(f"/t/{i}", b"") for i in range(100)]) == 100

    def test_cas_makes_only_what_is_missing(self, store: MetadataStore) -> None:
        assert store.cas("/a", b"mine", 0) == 1
        assert store.cas("/a", b"other", 0) is None
        assert store.get("/a") == Entry(b"mine", 1)

    def test_cas_replaces_only_the_expected_revision(self, store: MetadataStore) -> None:
        revision = store.put("/a", b"1")
        assert store.cas("/a", b"2", revision) == 2
        assert store.cas("/a", b"3", revision) is None
        assert store.cas("/missing", b"x", 7) is None
        assert store.get("/a") == Entry(b"2", 2)
        assert store.revision == 2  # refused changes take no revision

    def test_a_key_made_again_has_a_new_revision(self, store: MetadataStore) -> None:
        old = store.put("/a", b"old life")
        store.delete("/a")
        new = store.cas("/a", b"new life", 0)
        assert new is not None
        assert new > old + 1  # the deletion took one too
        assert store.cas("/a", b"x", old) is None

    def test_delete_with_an_expected_revision(self, store: MetadataStore) -> None:
        revision = store.put("/a", b"1")
        store.put("/a", b"2")
        assert not store.delete("/a", revision)
        assert store.delete("/a", revision + 1)
        assert store.get("/a") is None
        assert not store.delete("/a")

    def test_list_is_in_key_order_and_only_under_the_prefix(self, store: MetadataStore) -> None:
        keys = ["/t/b", "/t/a/2", "/t/a/10", "/t/é", "/t/a-", "/s", "/u/x", "/t/a"]
        for key in keys:
            store.put(key, key.encode())
        listed = [key for key, _ in store.list("/t/")]
        assert listed == sorted((k for k in keys if k.startswith("/t/")), key=str.encode)
        assert [key for key, _ in store.list("/")] == sorted(keys, key=str.encode)
        assert store.list("/nothing/") == []

    def test_a_and_ab_are_never_confused(self, store: MetadataStore) -> None:
        store.put("/topics/default/a", b"a")
        store.put("/topics/default/ab", b"ab")
        store.put("/topics/default/a/x", b"below a")
        assert [key for key, _ in store.list("/topics/default/a/")] == ["/topics/default/a/x"]
        watch = store.watch("/topics/default/a/")
        store.put("/topics/default/ab", b"changed")
        store.put("/topics/default/a", b"changed")
        assert watch.take() == []
        for careless in ("/topics/default/a", "/topics", "", "topics/"):
            with pytest.raises(InvalidArgument, match="prefix"):
                store.list(careless)
            with pytest.raises(InvalidArgument, match="prefix"):
                store.watch(careless)

    @pytest.mark.parametrize("key", ["", "a", "/", "/a/", "//a", "/a//b", "/a\0", "/" + "k" * 480])
    def test_bad_keys_are_refused(self, store: MetadataStore, key: str) -> None:
        for call in (store.get, store.delete):
            with pytest.raises(InvalidArgument, match="metadata key"):
                call(key)
        with pytest.raises(InvalidArgument, match="metadata key"):
            store.put(key, b"")
        with pytest.raises(InvalidArgument, match="metadata key"):
            store.cas(key, b"", 0)
        assert store.revision == 0

    def test_the_longest_key_and_value(self, store: MetadataStore) -> None:
        key, value = "/" + "k" * 479, b"v" * (1024 * 1024)
        store.put(key, value)
        assert store.get(key) == Entry(value, 1)
        with pytest.raises(InvalidArgument, match="limit"):
            store.put(key, value + b"v")

    def test_watch_sees_every_change_in_order(self, store: MetadataStore) -> None:
        store.put("/w/old", b"0")
        calls = []
        watch = store.watch("/w/", notify=lambda: calls.append(1))
        assert watch.initial == [("/w/old", Entry(b"0", 1))]
        assert watch.take() == []
        store.put("/w/a", b"1")
        store.put("/elsewhere", b"")
        store.cas("/w/a", b"2", 2)
        store.delete("/w/old")
        assert watch.take() == [
            Event("/w/a", b"1", 2),
            Event("/w/a", b"2", 4),
            Event("/w/old", None, 5),
        ]
        assert len(calls) == 3
        assert watch.take() == []

    def test_a_cancelled_watch_is_quiet(self, store: MetadataStore) -> None:
        watch, other = store.watch("/w/"), store.watch("/w/")
        store.put("/w/a", b"1")
        watch.cancel()
        watch.cancel()
        store.put("/w/b", b"2")
        assert watch.take() == []
        assert [event.key for event in other.take()] == ["/w/a", "/w/b"]

    def test_nothing_falls_between_list_and_watch(self, store: MetadataStore) -> None:
        """Watches made while another thread writes: initial + events = the whole history."""
        count = 200
        writer = threading.Thread(
            target=lambda: [store.put(f"/n/{number:03}", b"x") for number in range(count)]
        )
        writer.start()
        watches = []
        while writer.is_alive() and len(watches) < 50:
            watches.append(store.watch("/n/"))
        writer.join(timeout=60)
        assert not writer.is_alive(), "200 puts took more than a minute"
        watches.append(store.watch("/n/"))
        for watch in watches:
            events = watch.take()
            assert [event.revision for event in events] == sorted(e.revision for e in events)
            seen = [key for key, _ in watch.initial] + [event.key for event in events]
            assert seen == [f"/n/{number:03}" for number in range(count)]

    def test_only_one_of_many_threads_wins_a_cas(self, store: MetadataStore) -> None:
        wins: list[int] = []
        start = threading.Barrier(8)

        def race(number: int) -> None:
            start.wait(timeout=60)
            for key in range(20):
                if store.cas(f"/race/{key}", bytes([number]), 0) is not None:
                    wins.append(key)

        threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert sorted(wins) == list(range(20))
        assert store.revision == 20

    def test_keys_vanish_with_their_lease(self, store: MetadataStore, clock: ManualClock) -> None:
        lease = store.lease(5)
        store.put("/l/b", b"1", lease)
        store.cas("/l/a", b"2", 0, lease)
        store.put("/l/stays", b"3")
        watch = store.watch("/l/")
        clock.advance(4.9)
        assert store.get("/l/a") is not None
        clock.advance(0.1)
        assert store.get("/l/a") is None
        assert [key for key, _ in store.list("/l/")] == ["/l/stays"]
        assert watch.take() == [Event("/l/a", None, 4), Event("/l/b", None, 5)]

    def test_keep_alive_starts_the_time_anew(
        self, store: MetadataStore, clock: ManualClock
    ) -> None:
        lease = store.lease(5)
        store.put("/l/a", b"1", lease)
        for _ in range(4):
            clock.advance(4)
            lease.keep_alive()
        assert store.get("/l/a") is not None
        clock.advance(5)
        with pytest.raises(NotFound, match="lease"):
            lease.keep_alive()
        with pytest.raises(NotFound, match="lease"):
            store.put("/l/a", b"1", lease)
        assert store.get("/l/a") is None

    def test_tick_ends_leases_without_other_calls(
        self, store: MetadataStore, clock: ManualClock
    ) -> None:
        calls = []
        lease = store.lease(1)
        store.put("/l/a", b"1", lease)
        store.watch("/l/", notify=lambda: calls.append(1))
        clock.advance(2)
        assert not calls
        store.tick()
        assert len(calls) == 1

    def test_revoke(self, store: MetadataStore) -> None:
        lease, other = store.lease(5), store.lease(5)
        assert lease.lease_id != other.lease_id
        store.put("/l/a", b"1", lease)
        store.put("/l/b", b"1", other)
        lease.revoke()
        lease.revoke()
        assert [key for key, _ in store.list("/l/")] == ["/l/b"]

    def test_a_put_without_the_lease_frees_the_key_from_it(self, store: MetadataStore) -> None:
        lease, other = store.lease(5), store.lease(5)
        store.put("/l/free", b"1", lease)
        store.put("/l/free", b"2")
        store.put("/l/moved", b"1", lease)
        store.put("/l/moved", b"2", other)
        store.put("/l/again", b"1", lease)
        store.delete("/l/again")
        store.put("/l/again", b"2")
        lease.revoke()
        assert [key for key, _ in store.list("/l/")] == ["/l/again", "/l/free", "/l/moved"]
        other.revoke()
        assert [key for key, _ in store.list("/l/")] == ["/l/again", "/l/free"]

    @pytest.mark.parametrize("ttl_seconds", [0, -1, float("nan")])
    def test_a_lease_needs_time(self, store: MetadataStore, ttl_seconds: float) -> None:
        with pytest.raises(InvalidArgument, match="lease"):
            store.lease(ttl_seconds)

    def test_a_closed_store_says_so(self, store: MetadataStore) -> None:
        lease = store.lease(5)
        store.close()
        store.close()
        lease.revoke()
        with pytest.raises(FailedPrecondition, match="closed"):
            store.get("/a")
        with pytest.raises(FailedPrecondition, match="closed"):
            store.put("/a", b"")

    def test_it_behaves_like_a_dict_with_revisions(self, store: MetadataStore) -> None:
        @settings(max_examples=15, deadline=None)
        @given(steps=STEPS)
        def compare(steps: list[Step]) -> None:
            check_against_a_dict(store, steps)

        compare()
