"""The ring in one process: records, wrapping, limits, peers that scribble, plain and fast path."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube_fast.errors import DataLoss, FailedPrecondition, InvalidArgument
from danube_fast.ring import layout, spsc
from danube_fast.ring.layout import record_bytes, ring_bytes
from danube_fast.ring.memory import format_ring, words_of
from danube_fast.ring.spsc import SpscRing
from tests.ring.records import pop_all


def push_all(ring: SpscRing, records: list[bytes]) -> int:
    """How many went in before the ring was full."""
    return sum(1 for _ in itertools.takewhile(ring.try_push, records))


def make(capacity_bytes: int = 1024) -> tuple[SpscRing, np.ndarray[Any, Any]]:
    memory = np.zeros(ring_bytes(capacity_bytes), dtype=np.uint8)
    return SpscRing.create(memory, capacity_bytes), memory


@pytest.fixture(params=["kernel", "plain"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test that names this runs with both ways into the ring."""
    if request.param == "plain":
        monkeypatch.setattr(spsc, "_FAST", False)
    else:
        assert spsc._FAST, "this interpreter should have the fast path"
    return str(request.param)


def test_one_record(path: str) -> None:
    ring, _ = make()
    assert not ring.readable
    assert ring.pop() is None
    assert ring.try_push(b"hello")
    assert ring.readable
    assert ring.used_bytes == record_bytes(5) == 16
    assert ring.pop() == b"hello"
    assert not ring.readable
    assert ring.used_bytes == 0


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (b"",),
        (b"a", b"", b"bc"),
        (bytearray(b"ab"), memoryview(b"xcx")[1:2]),
        (b"a", np.arange(3, dtype=np.int64), np.zeros(0, dtype=np.int64)),
    ],
)
def test_parts_become_one_record(path: str, parts: tuple[Any, ...]) -> None:
    ring, _ = make()
    assert ring.try_push(*parts)
    assert ring.pop() == b"".join(memoryview(part).tobytes() for part in parts)


def test_what_is_no_buffer_is_refused(path: str) -> None:
    ring, _ = make()
    with pytest.raises(TypeError):
        ring.try_push(b"a", "text")  # type: ignore[arg-type]
    assert not ring.readable


def test_full_then_free(path: str) -> None:
    ring, _ = make(64)
    assert [ring.try_push(b"x" * 8) for _ in range(5)] == [True, True, True, True, False]
    assert ring.used_bytes == 64
    assert ring.pop() == b"x" * 8
    assert ring.try_push(b"y" * 8)
    assert pop_all(ring) == [b"x" * 8] * 3 + [b"y" * 8]


def test_largest_record_always_fits_an_empty_ring(path: str) -> None:
    """Wherever head and tail stand, and one byte more never does."""
    for offset in range(64):
        ring, _ = make(512)
        for _ in range(offset):
            assert ring.try_push(b"")
            assert ring.pop() == b""
        largest = bytes(ring.record_bytes_max)
        assert ring.record_bytes_max == 248
        assert ring.try_push(largest)
        assert ring.pop() == largest
        with pytest.raises(InvalidArgument, match="record_bytes_max of 248"):
            ring.try_push(largest, b"x")


def test_thousands_of_records() -> None:
    ring, _ = make(1 << 16)
    wanted = [b"%d" % number for number in range(3000)]
    assert push_all(ring, wanted) == 3000
    assert pop_all(ring, 2000) == wanted[:2000]
    assert pop_all(ring, 0) == []
    assert pop_all(ring, 5000) == wanted[2000:]


def test_in_place() -> None:
    ring, _ = make(64)
    room = ring.reserve(24)
    assert room is not None
    room[:3] = b"abc"
    assert not ring.readable
    ring.publish(3)
    view = ring.peek()
    assert view is not None
    assert bytes(view) == b"abc"
    assert ring.readable
    ring.release()
    assert ring.peek() is None
    assert ring.try_push(bytes(24))
    assert ring.reserve(24) is None
    with pytest.raises(InvalidArgument):
        ring.reserve(25)
    with pytest.raises(InvalidArgument):
        ring.reserve(-1)


def test_misuse_in_place() -> None:
    ring, _ = make()
    with pytest.raises(FailedPrecondition):
        ring.publish(0)
    with pytest.raises(FailedPrecondition):
        ring.release()
    assert ring.reserve(10) is not None
    with pytest.raises(InvalidArgument):
        ring.publish(11)
    assert ring.reserve(10) is not None
    assert ring.try_push(b"between")
    with pytest.raises(FailedPrecondition):
        ring.publish(5)
    assert pop_all(ring) == [b"between"]


def test_both_paths_write_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    images = []
    for fast in (True, False):
        monkeypatch.setattr(spsc, "_FAST", fast)
        ring, memory = make(128)
        for number in range(30):
            assert ring.try_push(b"n", bytes([number]) * (number % 40))
            pop_all(ring)
        images.append(memory.tobytes())
    assert images[0] == images[1]


def test_attach() -> None:
    ring, memory = make()
    ring.try_push(b"first")
    other = SpscRing.attach(memory)
    assert other.capacity_bytes == 1024
    assert other.pop() == b"first"
    assert other.try_push(b"second")
    assert ring.pop() == b"second"


def test_attach_refuses_what_is_no_ring() -> None:
    with pytest.raises(FailedPrecondition, match="no ring of version 1"):
        SpscRing.attach(np.zeros(ring_bytes(64), dtype=np.uint8))
    with pytest.raises(FailedPrecondition, match="cannot hold"):
        SpscRing.attach(np.zeros(64, dtype=np.uint8))
    for capacity in (0, -64, 63, 96, 128, 1 << 40):
        _, memory = make(64)
        words_of(memory)[layout.AT_CAPACITY // 8] = capacity
        with pytest.raises(DataLoss, match="does not fit"):
            SpscRing.attach(memory)


@pytest.mark.parametrize("capacity_bytes", [0, -8, 32, 96, 1 << 31])
def test_capacity_is_checked(capacity_bytes: int) -> None:
    with pytest.raises(InvalidArgument, match="power of two"):
        format_ring(np.zeros(4096, dtype=np.uint8), capacity_bytes)


def test_memory_is_checked() -> None:
    with pytest.raises(InvalidArgument, match="needs 1536 bytes"):
        SpscRing.create(np.zeros(1535, dtype=np.uint8), 1024)
    with pytest.raises(InvalidArgument, match="multiple of 8"):
        SpscRing.create(memoryview(bytearray(4096))[1:], 1024)


@settings(max_examples=150, deadline=None)
@given(
    capacity_shift=st.integers(6, 10),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.lists(st.binary(max_size=60), max_size=3)),
            st.tuples(st.just("pop"), st.integers(1, 4)),
            st.tuples(st.just("all"), st.integers(0, 20)),
        ),
        max_size=60,
    ),
    start=st.integers(0, 1 << 40),
)
def test_ring_is_a_queue(capacity_shift: int, steps: list[tuple[str, Any]], start: int) -> None:
    """Any mixture of calls from any position behaves as a queue that is sometimes full."""
    ring, memory = make(1 << capacity_shift)
    words = words_of(memory)
    for at in (layout.AT_TAIL, layout.AT_HEAD, layout.AT_CACHED_HEAD, layout.AT_CACHED_TAIL):
        words[at // 8] = start * 8
    model: deque[bytes] = deque()
    for step, argument in steps:
        if step == "push":
            record = b"".join(argument)
            if len(record) > ring.record_bytes_max:
                continue
            room = (
                ring.capacity_bytes - ring.used_bytes >= 2 * record_bytes(len(record)) or not model
            )
            pushed = ring.try_push(*argument)
            assert pushed or not room
            model.extend([record] * pushed)
        elif step == "pop":
            for _ in range(argument):
                assert ring.pop() == (model.popleft() if model else None)
        else:
            wanted = [model.popleft() for _ in range(min(argument, len(model)))]
            assert pop_all(ring, argument) == wanted
        assert ring.readable == bool(model)
    assert pop_all(ring, 1000) == list(model)
    assert ring.used_bytes == 0


def test_record_over_the_edge_is_damage() -> None:
    """A length that ends before the tail but behind the data is never followed."""
    ring, memory = make(1024)
    for _ in range(2):
        assert push_all(ring, [bytes(56)] * 15) == 15
        assert len(pop_all(ring)) == 15 or not ring.readable
    words = words_of(memory)
    place = words[layout.AT_HEAD // 8] % 1024
    assert push_all(ring, [bytes(56)] * 16) in (15, 16)
    words[(layout.RING_HEADER_BYTES + place) // 8] = 1024 - place  # 8 bytes over the edge
    with pytest.raises(DataLoss):
        ring.pop()
    with pytest.raises(DataLoss):
        pop_all(ring)


word = st.one_of(
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.integers(-64, 1100),
    st.integers(0, 140).map(lambda value: value * 8),
)


@settings(max_examples=300, deadline=None)
@given(
    scribbles=st.lists(
        st.tuples(
            st.one_of(
                st.sampled_from(
                    [layout.AT_TAIL, layout.AT_HEAD, layout.AT_CACHED_HEAD, layout.AT_CACHED_TAIL]
                ),
                st.integers(0, 127).map(lambda index: layout.RING_HEADER_BYTES + index * 8),
            ),
            word,
        ),
        min_size=1,
        max_size=6,
    )
)
def test_scribbles_stay_inside_the_ring(scribbles: list[tuple[int, int]]) -> None:
    """Whatever a peer writes: a record, nothing, or DataLoss; no byte outside is touched."""
    guard, capacity = 4096, 1024
    memory = np.full(2 * guard + ring_bytes(capacity), 0xA5, dtype=np.uint8)
    inside = memory[guard : guard + ring_bytes(capacity)]
    ring = SpscRing.create(inside, capacity)
    push_all(ring, [bytes(index * 9) for index in range(12)])
    pop_all(ring, 3)
    words = words_of(inside)
    for at, value in scribbles:
        words[at // 8] = value
        for call in (
            lambda: ring.try_push(b"z" * 100, b"z"),
            lambda: ring.reserve(200),
            ring.pop,
            lambda: pop_all(ring, 4),
            ring.peek,
        ):
            try:
                call()
            except DataLoss:
                pass
    assert (memory[:guard] == 0xA5).all()
    assert (memory[guard + len(inside) :] == 0xA5).all()
