"""The ledger against a model of one state a message, by random histories; and its memory."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube_fast.broker.ledger.layout import PAGE_MESSAGES, State
from danube_fast.broker.ledger.ledger import Ledger
from danube_fast.broker.ledger.page_pool import PagePool
from danube_fast.errors import InvalidArgument

SPAN = 3 * PAGE_MESSAGES
SLOTS = 3
FAILURES_MAX = 2


class Model:
    """One state a message: ("held", slot), "settled", "waiting", "delayed", "blocked" or fresh."""

    def __init__(self, cursor: int) -> None:
        self.cursor = self.next = self.recorded = cursor
        self.state: dict[int, object] = {}
        self.attempts: dict[int, int] = {}
        self.failures: dict[int, int] = {}
        self.told: set[int] = set()

    def count(self, state: str) -> int:
        return sum(1 for found in self.state.values() if found == state)

    def held_by(self, slot: int) -> list[int]:
        return [offset for offset, state in self.state.items() if state == ("held", slot)]

    def hold(self, offsets: list[int], slot: int) -> None:
        for offset in offsets:
            self.state[offset] = ("held", slot)
        self.next = max(self.next, offsets[-1] + 1)

    def settle(self, offsets: list[int]) -> None:
        for offset in offsets:
            if offset >= self.cursor:
                self.state[offset] = "settled"
        while self.state.get(self.cursor) == "settled":
            self.cursor += 1
        self.next = max(self.next, self.cursor)

    def settled_ahead(self) -> list[int]:
        return [o for o, s in self.state.items() if s == "settled" and o >= self.cursor]


def in_pairs(pairs: list[int]) -> list[int]:
    return [n for low, high in zip(pairs[::2], pairs[1::2], strict=True) for n in range(low, high)]


def assert_alike(ledger: Ledger, model: Model) -> None:
    assert (ledger.cursor, ledger.next_offset) == (model.cursor, model.next)
    assert in_pairs(ledger.settled_pairs()) == sorted(model.settled_ahead())
    assert ledger.settled_ahead == len(model.settled_ahead())
    counts = (ledger.waiting, ledger.delayed, ledger.blocked)
    assert counts == (model.count("waiting"), model.count("delayed"), model.count("blocked"))
    assert [ledger.unacked_of(slot) for slot in range(SLOTS)] == [
        len(model.held_by(slot)) for slot in range(SLOTS)
    ]
    assert ledger.unacked == sum(len(model.held_by(slot)) for slot in range(SLOTS))
    waiting = [offset for offset, state in model.state.items() if state == "waiting"]
    assert ledger.first_waiting() == (min(waiting) if waiting else None)
    if waiting:
        rows = ledger.select(0, model.cursor, model.next, State.WAITING)
        assert rows.tolist() == sorted(waiting)
        counts_seen = ledger.attempts(0, rows)
        wanted = [model.attempts.get(offset, 0) for offset in sorted(waiting)]
        assert (counts_seen.tolist() if counts_seen is not None else [0] * len(wanted)) == wanted


ranges = st.tuples(st.integers(0, SPAN), st.integers(1, PAGE_MESSAGES + 300))
actions = st.one_of(
    st.tuples(st.just("hold"), st.integers(0, SLOTS - 1), st.integers(1, 3000), st.integers(1, 4)),
    st.tuples(st.just("again"), st.integers(0, SLOTS - 1), st.just(0), st.just(0)),
    st.tuples(st.just("ack"), st.integers(0, SLOTS - 1), ranges, st.integers(1, 3)),
    st.tuples(st.just("fail"), st.integers(0, SLOTS - 1), ranges, st.just(0)),
    st.tuples(st.just("fail row"), st.just(0), st.just(0), st.just(0)),
    st.tuples(st.just("wake"), st.sampled_from([State.DELAYED, State.BLOCKED]), ranges, st.just(0)),
    st.tuples(st.just("give back"), st.integers(0, SLOTS - 1), st.just(0), st.just(0)),
    st.tuples(st.just("settle"), st.just(0), ranges, st.just(0)),
    st.tuples(st.just("extend"), st.integers(0, SLOTS - 1), ranges, st.just(0)),
    st.tuples(st.just("collect"), st.just(0), st.just(0), st.just(0)),
)  # fmt: skip


def apply(ledger: Ledger, model: Model, action: tuple, start: int) -> None:
    what, slot, detail, step = action
    if isinstance(detail, tuple):
        low, high = start + detail[0], start + detail[0] + detail[1]
    if what == "hold":
        base, end = model.next, model.next + detail
        rows = ledger.select(base, base, end, State.FRESH)[::step].copy()
        offsets = [base + row for row in rows.tolist()]
        assert all(model.state.get(offset) is None for offset in offsets)
        if offsets:
            whole = step == 1 and len(offsets) == detail
            if whole:
                ledger.deliver(base, end, slot, 5)
            else:
                ledger.deliver_rows(base, rows, slot, 5)
            model.hold(offsets, slot)
        # what nobody took does not exist
        lost = [offset for offset in range(base, end) if offset not in model.state]
        assert ledger.settle(base, end) == detail - sum(1 for o in range(base, end) if model.state.get(o) == "settled") if not offsets else True  # fmt: skip
        if offsets and step > 1:
            for offset in lost:
                assert ledger.settle(offset, offset + 1) == 1
        model.settle(lost if offsets else list(range(base, end)))
    elif what == "again":
        waiting = sorted(o for o, s in model.state.items() if s == "waiting")[:700]
        if waiting:
            base = waiting[0]
            rows = np.array([offset - base for offset in waiting], np.int32)
            ledger.deliver_rows(base, rows, slot, 6)
            model.hold(waiting, slot)
    elif what == "ack":
        pairs = [edge for i in range(low, high, 2 * step) for edge in (i, i + step)]
        mine = set(model.held_by(slot)) & set(in_pairs(pairs))
        ledger.ack(slot, pairs)
        model.settle(sorted(mine))
    elif what == "fail":
        failed = [o for o in model.held_by(slot) if low <= o < high]
        check_failed(model, failed, ledger.fail(slot, [low, high], FAILURES_MAX))
    elif what == "fail row":
        oldest = ledger.oldest()
        if oldest is not None:
            check_failed(model, None, ledger.fail_row(oldest[0], FAILURES_MAX))
    elif what == "wake":
        name = "delayed" if slot == State.DELAYED else "blocked"
        woken = [o for o, s in model.state.items() if s == name and low <= o < high]
        assert ledger.wake(low, high, slot) == len(woken)
        model.state.update(dict.fromkeys(woken, "waiting"))
    elif what == "give back":
        for offset in model.held_by(slot):
            model.state[offset] = "waiting"
            model.attempts[offset] = model.attempts.get(offset, 0) + 1
        ledger.give_back(slot)
    elif what == "settle":
        model.settle(list(range(low, high)))
        ledger.settle(low, high)
    elif what == "extend":
        ledger.extend(low, high, slot, 9)
    else:
        collect(ledger, model)


def check_failed(model: Model, failed: list[int] | None, runs: list) -> None:
    told = {o: (n, bad) for low, high, n, bad in runs for o in range(low, high)}
    if failed is not None:
        assert sorted(told) == sorted(failed)
    for offset, (failures, blocked) in told.items():
        model.attempts[offset] = model.attempts.get(offset, 0) + 1
        model.failures[offset] = model.failures.get(offset, 0) + 1
        assert (failures, blocked) == (model.failures[offset], failures > FAILURES_MAX)
        assert model.state[offset][0] == "held"
        model.state[offset] = "blocked" if blocked else "delayed"


def collect(ledger: Ledger, model: Model) -> None:
    told: set[int] = set()
    while pairs := ledger.collect():
        told |= set(in_pairs(pairs))
    settled = {o for o, s in model.state.items() if s == "settled"}
    assert told <= settled, "told as settled and is not"
    assert settled - model.told <= told, "settled and never told"
    model.told |= told
    assert not ledger.is_dirty


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 5000), st.lists(actions, max_size=40))
def test_every_history_leaves_what_the_model_says(start, history):
    pool = PagePool()
    ledger, model = Ledger(pool, start), Model(start)
    for action in history:
        apply(ledger, model, action, start)
        assert_alike(ledger, model)
    collect(ledger, model)
    ledger.restart(ledger.cursor)
    assert pool.free_count == pool._count, "a page is lost"


def test_the_cursor_frees_pages_and_a_settled_run_costs_nothing():
    pool = PagePool()
    ledger = Ledger(pool, 10)
    ledger.deliver(10, 11, 0, 1)
    for low in range(11, 3_000_000, 10_000):
        ledger.deliver(low, low + 10_000, 1, 2)
        ledger.ack(1, [low, low + 10_000])
    assert ledger.cursor == 10 and ledger.settled_ahead > 2_900_000
    assert pool._count - pool.free_count <= 3
    assert len(ledger.settled_pairs()) == 2
    ledger.ack(0, [10, 11])
    assert ledger.cursor == ledger.next_offset and ledger.unacked == 0


def test_a_gap_of_billions_is_settled_in_steps():
    ledger = Ledger(PagePool(), 5)
    assert ledger.settle(5, 1 << 33) == (1 << 33) - 5
    assert (ledger.cursor, ledger.next_offset) == (1 << 33, 1 << 33)


def test_the_delivery_that_is_held_longest_comes_first():
    ledger = Ledger(PagePool(), 0)
    first = ledger.deliver(0, 10, 0, 100)
    ledger.deliver(10, 20, 1, 200)
    assert ledger.oldest() == (first, 100)
    ledger.extend(3, 5, 0, 400)
    ledger.extend(7, 8, 0, 500)
    assert ledger.oldest() == (first, 100)
    assert ledger.overdue(399) == ([], 400)
    ledger.ack(0, [0, 3, 5, 10])
    assert ledger.oldest()[1] == 200
    ([row], following) = ledger.overdue(450)
    assert following is None, "what was extended longest is acked"
    assert ledger.fail_row(row, 5) == [(3, 5, 1, False)]
    assert ledger.overdue(450) == ([], None)


def test_an_ack_may_have_its_numbers_as_bytes():
    ledger = Ledger(PagePool(), 0)
    ledger.deliver(0, 100, 1, 0)
    ranges = np.array([(at, at + 1) for at in range(0, 100, 2)], "<i8")
    ledger.ack(1, ranges.tobytes())
    assert (ledger.cursor, ledger.unacked) == (1, 50)
    ledger.ack(2, ranges.tobytes())
    ledger.ack(1, [1, 2])
    assert (ledger.cursor, ledger.unacked) == (3, 49)
    for torn in (b"1234567", bytes(8), bytes(24)):
        with pytest.raises(InvalidArgument, match="pairs of offsets"):
            ledger.ack(1, torn)
    assert ledger.unacked == 49


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32))
def test_the_first_that_is_fresh(seed: int) -> None:
    draw = random.Random(seed)
    start = draw.randrange(3 * PAGE_MESSAGES)
    ledger = Ledger(PagePool(), start)
    end = start + 4 * PAGE_MESSAGES
    for _ in range(draw.randrange(5)):
        low = draw.randrange(start, end)
        high = min(end, low + draw.choice([1, 10, PAGE_MESSAGES, 2 * PAGE_MESSAGES]))
        if draw.random() < 0.5:
            ledger.settle(low, high)
        elif low >= ledger.cursor:
            ledger.deliver(low, high, 1, 0)
    low = draw.randrange(ledger.cursor, end + 1)
    fresh = ledger.select(low, low, end, State.FRESH)
    assert ledger.first_fresh(low, end) == (low + int(fresh[0]) if len(fresh) else end)
    assert ledger.first_fresh(0, end) >= ledger.cursor
