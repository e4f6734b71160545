"""Death as a branch: a ring's image cut at every byte of a record in progress, and damage."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube_fast.errors import DataLoss
from danube_fast.ring import layout
from danube_fast.ring.layout import ring_bytes
from danube_fast.ring.memory import words_of
from danube_fast.ring.repair import (
    apply_plan,
    plan_consumer,
    plan_producer,
    plan_stopped,
    read_ring,
)
from danube_fast.ring.spsc import SpscRing
from tests.ring.records import pop_all

CAPACITY = 512
TAIL = slice(layout.AT_TAIL, layout.AT_TAIL + 8)


def filled(before: list[bytes], popped: int) -> tuple[np.ndarray[Any, Any], list[bytes]]:
    """A ring whose positions have wrapped, and what is in it."""
    memory = np.zeros(ring_bytes(CAPACITY), dtype=np.uint8)
    ring = SpscRing.create(memory, CAPACITY)
    held: list[bytes] = []
    for record in before:
        while not ring.try_push(record):
            assert ring.pop() == held.pop(0)
        held.append(record)
    for _ in range(min(popped, len(held))):
        assert ring.pop() == held.pop(0)
    return memory, held


def check_cut(image: np.ndarray[Any, Any], held: list[bytes]) -> None:
    """The image reads as exactly `held`, and a new producer and a new consumer go on from it."""
    seen = read_ring(image)
    assert (seen.records, seen.fault, seen.end) == (held, "", seen.tail)
    apply_plan(image, plan_producer(image))
    producer, consumer = SpscRing.attach(image), SpscRing.attach(image)
    left = list(held)
    while not producer.try_push(b"after"):
        assert consumer.pop() == left.pop(0)
    assert pop_all(consumer) == [*left, b"after"]


@settings(max_examples=40, deadline=None)
@given(
    before=st.lists(st.binary(max_size=100), max_size=25),
    popped=st.integers(0, 20),
    last=st.binary(max_size=CAPACITY // 2 - 8),
    shuffled=st.randoms(use_true_random=False),
)
def test_producer_cut_at_every_byte(
    before: list[bytes], popped: int, last: bytes, shuffled: Any
) -> None:
    """Whatever part of the bytes of a record in progress is there, in any order, none of it shows."""
    memory, held = filled(before, popped)
    after = memory.copy()
    ring = SpscRing.attach(after)
    left = list(held)
    while not ring.try_push(last):  # make room on both sides, so that only the push differs
        left.pop(0)
        ring.pop()
        SpscRing.attach(memory).pop()
    changed = [int(at) for at in np.flatnonzero(memory != after)]
    changed = [at for at in changed if not TAIL.start <= at < TAIL.stop]
    if shuffled.random() < 0.5:
        shuffled.shuffle(changed)
    image = memory.copy()
    check_cut(image.copy(), left)
    for at in changed:
        image[at] = after[at]
        check_cut(image.copy(), left)
    image[TAIL] = after[TAIL]
    check_cut(image, [*left, last])


@settings(max_examples=60, deadline=None)
@given(before=st.lists(st.binary(max_size=100), min_size=1, max_size=25), popped=st.integers(0, 20))
def test_consumer_cut_between_copy_and_release(before: list[bytes], popped: int) -> None:
    """A consumer that dies before its release leaves the record to its successor."""
    memory, held = filled(before, popped)
    dead = SpscRing.attach(memory)
    peeked = dead.peek()
    assert (None if peeked is None else bytes(peeked)) == (held[0] if held else None)
    apply_plan(memory, plan_consumer(memory))
    assert pop_all(SpscRing.attach(memory)) == held


@settings(max_examples=100, deadline=None)
@given(
    before=st.lists(st.binary(max_size=60), min_size=1, max_size=6),
    at=st.integers(0, CAPACITY // 8 - 1),
    value=st.integers(-(1 << 63), (1 << 63) - 1),
)
def test_damage_keeps_a_prefix(before: list[bytes], at: int, value: int) -> None:
    """A scribbled word costs at most the records from there on; a stopped ring is usable again."""
    memory, held = filled(before, 0)
    words_of(memory)[layout.RING_HEADER_BYTES // 8 + at] = value
    found = read_ring(memory)
    apply_plan(memory, plan_stopped(memory))
    ring = SpscRing.attach(memory)
    kept = pop_all(ring)
    assert kept == found.records
    place = 0  # nothing was popped, so the records lie one behind the other from 0
    for record, expected in zip(kept, held, strict=False):
        if place + layout.record_bytes(len(expected)) > at * 8:
            break
        assert record == expected
        place += layout.record_bytes(len(expected))
    assert ring.try_push(b"usable")
    assert ring.pop() == b"usable"


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (layout.AT_TAIL, -8),
        (layout.AT_TAIL, 4),
        (layout.AT_TAIL, 1 << 40),
        (layout.AT_HEAD, 1 << 40),
        (layout.AT_HEAD, -(1 << 63)),
        (layout.RING_HEADER_BYTES, 1 << 31),
        (layout.RING_HEADER_BYTES, 7 << 32),
        (layout.RING_HEADER_BYTES, 1 << 32),
        (layout.RING_HEADER_BYTES, -1),
    ],
)
def test_a_living_side_is_not_repaired_over_damage(at: int, value: int) -> None:
    memory, _ = filled([b"one", b"two"], 0)
    words_of(memory)[at // 8] = value
    for plan in (plan_producer, plan_consumer):
        with pytest.raises(DataLoss, match="create the ring again"):
            plan(memory)
    ring = SpscRing.attach(memory)
    with pytest.raises(DataLoss):
        ring.pop()
    with pytest.raises(DataLoss):
        pop_all(ring)
    apply_plan(memory, plan_stopped(memory))
    assert read_ring(memory).fault == ""
    assert pop_all(SpscRing.attach(memory)) in ([], [b"one"], [b"one", b"two"])


def test_no_ring_at_all() -> None:
    for image in (b"", bytes(ring_bytes(64)), b"\xff" * ring_bytes(64)):
        with pytest.raises(DataLoss):
            read_ring(image)
