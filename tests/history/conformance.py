"""What every object store must do. A test module subclasses `Conformance` and gives it a `store`, which is
empty. A store that needs larger parts than a few bytes says so by `part_bytes_min`."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from danube_fast.clock import SECOND_NS
from danube_fast.errors import AlreadyExists, DanubeError, DataLoss, InvalidArgument, NotFound
from danube_fast.history.stores.probe import PROBE_PREFIX, probe_store
from danube_fast.history.stores.store import KEY_BYTES_MAX, ObjectInfo, ObjectStore, Part, Upload

WAIT_SECONDS = 60
"""What a store that has just started may need."""
CLOCK_SECONDS = 300
"""How far a store's clock may be from ours."""

Step = tuple[str, str, bytes]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["create", "delete", "parts"]),
        st.sampled_from(["m/a", "m/ab", "m/a-b/c", "m/b/1", "m/b/2"]),
        st.binary(max_size=40),
    ),
    max_size=12,
)


def parts_of(store: ObjectStore, upload: Upload, *pieces: bytes) -> list[Part]:
    """Send the pieces; all but the last are filled up to what the store takes."""
    parts: list[Part] = []
    offset = 0
    for number, piece in enumerate(pieces, 1):
        data = piece
        if number < len(pieces):
            data = piece * -(-store.part_bytes_min // max(1, len(piece)))
        parts.append(store.put_part(upload, number, offset, data))
        offset += len(data)
    return parts


def keys(store: ObjectStore, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix)]


class Conformance:
    """Run over each implementation; `store` is a fixture of the subclass's module."""

    ended: tuple[type[DanubeError], ...] = (NotFound,)
    """What is raised for an upload that has ended."""
    knows_begin = True
    """Whether uploads have the time when they began."""

    def test_a_new_store_is_empty(self, store: ObjectStore) -> None:
        assert keys(store) == []
        assert list(store.uploads()) == []
        assert store.head("a") is None
        with pytest.raises(NotFound, match="a/b"):
            store.read("a/b")
        with pytest.raises(NotFound, match="a/b"):
            store.read("a/b", 1, 2)
        store.delete(["a", "a/b"])

    def test_create_and_read(self, store: ObjectStore) -> None:
        before = time.time_ns()
        store.create("t/a/0.obj", b"0123456789")
        assert store.read("t/a/0.obj") == b"0123456789"
        assert store.read("t/a/0.obj", 3) == b"3456789"
        assert store.read("t/a/0.obj", 3, 4) == b"3456"
        assert store.read("t/a/0.obj", 9, 1) == b"9"
        assert store.read("t/a/0.obj", 0, 10) == b"0123456789"
        info = store.head("t/a/0.obj")
        assert info is not None
        assert info[:2] == ("t/a/0.obj", 10)
        assert abs(info.modified_ns - before) < CLOCK_SECONDS * SECOND_NS
        assert [found[:2] for found in store.list()] == [info[:2]]

    def test_nothing_is_overwritten(self, store: ObjectStore) -> None:
        store.create("k", b"first")
        for other in (b"second", b"first", b""):
            with pytest.raises(AlreadyExists, match="k"):
                store.create("k", other)
        assert store.read("k") == b"first"
        store.delete(["k"])
        store.create("k", b"third")
        assert store.read("k") == b"third"

    def test_empty_and_binary_objects(self, store: ObjectStore) -> None:
        store.create("empty", b"")
        store.create("binary", bytes(range(256)))
        assert store.read("empty") == b""
        assert store.read("binary") == bytes(range(256))
        assert store.read("binary", 255, 1) == b"\xff"
        assert sorted(found[:2] for found in store.list()) == [("binary", 256), ("empty", 0)]

    def test_a_buffer_that_changes_later_does_not_change_the_object(
        self, store: ObjectStore
    ) -> None:
        buffer = bytearray(b"before")
        store.create("a", buffer)
        store.create("b", memoryview(buffer)[2:4])
        buffer[:] = b"after!"
        assert store.read("a") == b"before"
        assert store.read("b") == b"fo"

    def test_a_range_that_is_not_there_is_a_loss(self, store: ObjectStore) -> None:
        store.create("short", b"0123456789")
        for start, count in ((0, 11), (9, 2), (10, 1), (500, 5)):
            with pytest.raises(DataLoss, match="short"):
                store.read("short", start, count)

    def test_list_is_in_order_and_by_prefix(self, store: ObjectStore) -> None:
        wanted = ["a-b", "a/1", "a/2/x", "a/2/y", "a/3", "a=b", "ab/1", "b", "b.c", "b_c", "c%20d"]
        for key in reversed(wanted):
            store.create(key, key.encode())
        assert sorted(keys(store)) == sorted(wanted), "across folders the order is the store's own"
        assert keys(store, "a/") == ["a/1", "a/2/x", "a/2/y", "a/3"]
        assert keys(store, "a/2/") == ["a/2/x", "a/2/y"]
        assert keys(store, "none/") == []
        with pytest.raises(InvalidArgument, match="prefix"):
            list(store.list("a"))

    def test_delete_takes_many(self, store: ObjectStore) -> None:
        for number in range(30):
            store.create(f"many/{number:03d}", b"x")
        store.delete(f"many/{number:03d}" for number in range(25))
        assert keys(store) == [f"many/{number:03d}" for number in range(25, 30)]
        store.delete([])

    @pytest.mark.parametrize(
        "key",
        ["", "/a", "a/", "a//b", "..", "a/../b", "a/.b", ".uploads/x", "a b", "ä", "a\0", "a\\b",
         "x" * (KEY_BYTES_MAX + 1)],
    )  # fmt: skip
    def test_wrong_keys_are_refused(self, store: ObjectStore, key: str) -> None:
        calls = [
            lambda: store.create(key, b""),
            lambda: store.head(key),
            lambda: store.read(key),
            lambda: store.delete([key]),
            lambda: store.begin(key),
        ]
        for call in calls:
            with pytest.raises(InvalidArgument, match="key"):
                call()
        assert keys(store) == []

    def test_the_longest_key(self, store: ObjectStore) -> None:
        key = "/".join(["k" * 69] * (KEY_BYTES_MAX // 70))
        store.create(key, b"there")
        assert store.read(key) == b"there"
        assert keys(store) == [key]

    def test_of_many_writers_one_wins(self, store: ObjectStore) -> None:
        outcomes: list[tuple[int, bool]] = []
        barrier = threading.Barrier(8)

        def write(number: int) -> None:
            barrier.wait(WAIT_SECONDS)
            try:
                store.create("race/x", b"%d" % number * 1000)
            except AlreadyExists:
                outcomes.append((number, False))
            else:
                outcomes.append((number, True))

        threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        winners = [number for number, won in outcomes if won]
        assert len(outcomes) == 8
        assert len(winners) == 1
        assert store.read("race/x") == b"%d" % winners[0] * 1000

    def test_an_object_in_parts(self, store: ObjectStore) -> None:
        upload = store.begin("big/1")
        assert [found for found, _ in store.uploads()] == [upload]
        began_ns = next(store.uploads("big/"))[1]
        assert abs(began_ns - time.time_ns()) < CLOCK_SECONDS * SECOND_NS or not self.knows_begin
        parts = parts_of(store, upload, b"one", b"two", b"three")
        assert keys(store) == []
        assert store.head("big/1") is None
        store.complete(upload, parts)
        size = sum(part.size for part in parts)
        whole = store.read("big/1")
        assert len(whole) == size
        assert whole.startswith(b"oneoneone" if store.part_bytes_min > 3 else b"onetwo")
        assert whole.endswith(b"twothree")
        assert store.read("big/1", parts[1].offset - 1, 2) == b"et"
        assert [found[:2] for found in store.list()] == [("big/1", size)]
        assert list(store.uploads()) == []

    def test_a_part_that_is_sent_again_replaces_the_first(self, store: ObjectStore) -> None:
        upload = store.begin("again")
        parts_of(store, upload, b"xx", b"a longer end")
        parts = parts_of(store, upload, b"yy", b"end")
        store.complete(upload, parts)
        whole = store.read("again")
        assert whole.startswith(b"yy")
        assert whole.endswith(b"yyend")

    def test_parts_do_not_replace_an_object(self, store: ObjectStore) -> None:
        upload = store.begin("taken")
        parts = parts_of(store, upload, b"late")
        store.create("taken", b"early")
        with pytest.raises(AlreadyExists, match="taken"):
            store.complete(upload, parts)
        assert store.read("taken") == b"early"
        store.abort(upload)
        assert list(store.uploads()) == []

    def test_two_uploads_of_one_key(self, store: ObjectStore) -> None:
        first, second = store.begin("twice"), store.begin("twice")
        assert first != second
        first_parts = parts_of(store, first, b"first")
        second_parts = parts_of(store, second, b"second")
        store.complete(second, second_parts)
        with pytest.raises(AlreadyExists, match="twice"):
            store.complete(first, first_parts)
        assert store.read("twice") == b"second"

    def test_an_upload_that_has_ended(self, store: ObjectStore) -> None:
        upload = store.begin("gone")
        parts = parts_of(store, upload, b"x")
        store.abort(upload)
        store.abort(upload)
        assert list(store.uploads()) == []
        with pytest.raises(self.ended, match="gone"):
            store.put_part(upload, 1, 0, b"x")
        with pytest.raises(self.ended, match="gone"):
            store.complete(upload, parts)
        assert store.head("gone") is None

    def test_complete_twice_never_makes_two(self, store: ObjectStore) -> None:
        """The answer of the first was lost: the second succeeds, or says that it ended, or that the object is
        there."""
        upload = store.begin("once")
        parts = parts_of(store, upload, b"x")
        store.complete(upload, parts)
        before = store.head("once")
        with contextlib.suppress(NotFound, AlreadyExists):
            store.complete(upload, parts)
        assert store.read("once") == b"x"
        assert store.head("once") == before

    def test_parts_must_follow_each_other(self, store: ObjectStore) -> None:
        upload = store.begin("holes")
        parts = parts_of(store, upload, b"a", b"b")
        for wrong in ([], parts[1:], parts[::-1], [parts[0], parts[1]._replace(offset=1 << 40)]):
            with pytest.raises(InvalidArgument, match="holes"):
                store.complete(upload, wrong)
        store.complete(upload, parts)
        assert keys(store) == ["holes"]

    def test_uploads_by_prefix(self, store: ObjectStore) -> None:
        first, second = store.begin("u/a"), store.begin("v/b")
        assert [found for found, _ in store.uploads("u/")] == [first]
        assert {found for found, _ in store.uploads()} == {first, second}

    def test_uploads_outlive_their_client(self, store: ObjectStore) -> None:
        """What another process does with the ids that the first one wrote down."""
        upload = store.begin("resumed")
        parts = parts_of(store, upload, b"first", b"last")
        again = Upload(*tuple(upload))
        named = [Part(*tuple(part)) for part in parts]
        store.complete(again, named)
        assert store.read("resumed").endswith(b"firstlast")

    def test_the_probe_leaves_nothing(self, store: ObjectStore) -> None:
        probe_store(store)
        assert keys(store, PROBE_PREFIX) == []

    @settings(
        max_examples=12,
        deadline=None,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.differing_executors,
        ],
    )
    @given(STEPS)
    def test_like_a_dict(self, store: ObjectStore, steps: list[Step]) -> None:
        store.delete(keys(store))
        model: dict[str, bytes] = {}
        for verb, key, data in steps:
            if verb == "delete":
                store.delete([key])
                model.pop(key, None)
                continue
            try:
                if verb == "create":
                    store.create(key, data)
                else:
                    upload = store.begin(key)
                    try:
                        store.complete(upload, [store.put_part(upload, 1, 0, data or b"-")])
                    finally:
                        store.abort(upload)
                assert key not in model
                model[key] = data if verb == "create" else data or b"-"
            except AlreadyExists:
                assert key in model
        found = [(info.key, info.size) for info in store.list("m/")]
        assert sorted(found) == [(key, len(model[key])) for key in sorted(model)]
        assert {info.key: store.read(info.key) for info in store.list()} == model
        assert all(isinstance(info, ObjectInfo) for info in store.list())

    def test_closing_twice(self, store: ObjectStore) -> None:
        store.close()
        store.close()
