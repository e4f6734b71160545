"""The kernels of a ledger that tell what is settled, for records and snapshots."""

from __future__ import annotations

from danube_fast.broker.ledger.layout import (
    ALL_SETTLED,
    ALL_SETTLED_NEW,
    AT_ATTEMPTS,
    AT_STATES,
    PAGE_MASK,
    PAGE_SHIFT,
    UNTOUCHED,
    WORD_BYTES,
    HeadWord,
    PageWord,
    State,
)
from danube_fast.broker.ledger.pages import add, entry_of, page_of, prepare
from danube_fast.frame.kernel import kernel
from danube_fast.frame.memory import (
    load_i64,
    load_u16,
    load_u32,
    load_word,
    store_u16,
    store_u32,
    store_u64,
    store_word,
)

__all__ = ["collect", "list_attempts", "list_settled", "set_attempts"]


@kernel("int64(int64,int64,int64,int64)")
def _extend(pair: int, low: int, offset: int, is_new: int) -> int:
    """1 if the range that began at `low` ends here: then it is written."""
    if low < 0 or is_new:
        return 0
    store_u64(pair, low)
    store_u64(pair + WORD_BYTES, offset)
    return 1


@kernel("int64(int64,int64,int64)")
def collect(head: int, pairs: int, count_max: int) -> int:
    """Write the ranges that were settled since the last call, and call them recorded; how many. A full
    buffer asks for another call."""
    count, cursor, low = 0, load_word(head, HeadWord.CURSOR), -1
    if cursor > load_word(head, HeadWord.RECORDED):
        store_u64(pairs, load_word(head, HeadWord.RECORDED))
        store_u64(pairs + WORD_BYTES, cursor)
        store_word(head, HeadWord.RECORDED, cursor)
        count = 1
    offset, end = (
        max(cursor, load_word(head, HeadWord.DIRTY_LOW)),
        load_word(head, HeadWord.DIRTY_HIGH),
    )
    while offset < end and count < count_max:
        place = entry_of(head, offset)
        entry = load_i64(place) if place else UNTOUCHED
        is_new, step = 0, 1
        if entry > ALL_SETTLED_NEW and load_word(entry, PageWord.SETTLED_NEW):
            at = entry + AT_STATES + 4 * (offset & PAGE_MASK)
            if load_u32(at) == State.SETTLED_NEW:
                is_new = 1
                store_u32(at, State.SETTLED)
                add(entry, PageWord.SETTLED_NEW, -1)
        else:
            step = (((offset >> PAGE_SHIFT) + 1) << PAGE_SHIFT) - offset
            if entry == ALL_SETTLED_NEW:
                is_new = 1
                store_u64(place, ALL_SETTLED)
        count += _extend(pairs + 2 * WORD_BYTES * count, low, offset, is_new)
        low = -1 if not is_new else offset if low < 0 else low
        offset += step
    if low >= 0:
        store_u64(pairs + 2 * WORD_BYTES * count, low)
        store_u64(pairs + 2 * WORD_BYTES * count + WORD_BYTES, offset)
        count += 1
    store_word(head, HeadWord.DIRTY_LOW, offset if offset < end else (1 << 62))
    if offset >= end:
        store_word(head, HeadWord.DIRTY_HIGH, 0)
    return count


@kernel("int64(int64,int64,int64,int64,int64)")
def list_settled(head: int, low: int, high: int, pairs: int, count_max: int) -> int:
    """Write the ranges of [low, high) that are settled; how many. A full buffer asks to go on behind
    the last of them."""
    count, begun, offset = 0, -1, low
    while offset < high and count < count_max:
        place = entry_of(head, offset)
        entry = load_i64(place) if place else UNTOUCHED
        stop = ((offset >> PAGE_SHIFT) + 1) << PAGE_SHIFT
        is_settled, step = 1 if entry != UNTOUCHED else 0, stop - offset
        if entry > ALL_SETTLED_NEW:
            state, step = load_u32(entry + AT_STATES + 4 * (offset & PAGE_MASK)), 1
            is_settled = 1 if state in (State.SETTLED, State.SETTLED_NEW) else 0
        count += _extend(pairs + 2 * WORD_BYTES * count, begun, offset, is_settled)
        begun = -1 if not is_settled else offset if begun < 0 else begun
        offset += step
    if begun >= 0:
        store_u64(pairs + 2 * WORD_BYTES * count, begun)
        store_u64(pairs + 2 * WORD_BYTES * count + WORD_BYTES, min(offset, high))
        count += 1
    return count


@kernel("int64(int64,int64)")
def _attempts_at(head: int, offset: int) -> int:
    """The entry of a message in the column of attempts; 0 if it is settled or was never delivered."""
    page = page_of(head, offset)
    if not page or load_u32(page + AT_STATES + 4 * (offset & PAGE_MASK)) in (
        State.SETTLED,
        State.SETTLED_NEW,
    ):
        return 0
    return load_u16(page + AT_ATTEMPTS + 2 * (offset & PAGE_MASK))


@kernel("int64(int64,int64,int64,int64,int64)")
def list_attempts(head: int, low: int, high: int, runs: int, count_max: int) -> int:
    """Write (int64) start, end and entry of runs of messages of [low, high) with the same attempts, that are
    not settled; how many. A full buffer asks to go on behind the last of them."""
    count, last = 0, runs - 3 * WORD_BYTES
    for offset in range(low, high):
        entry = _attempts_at(head, offset)
        if entry == 0:
            continue
        goes_on = count > 0 and load_i64(last + WORD_BYTES) == offset
        if goes_on and load_i64(last + 2 * WORD_BYTES) == entry:
            store_u64(last + WORD_BYTES, offset + 1)
            continue
        if count == count_max:
            break
        last += 3 * WORD_BYTES
        store_u64(last, offset)
        store_u64(last + WORD_BYTES, offset + 1)
        store_u64(last + 2 * WORD_BYTES, entry)
        count += 1
    return count


@kernel("int64(int64,int64,int64,int64)")
def set_attempts(head: int, low: int, high: int, entry: int) -> int:
    """Note what is known of the attempts of [low, high); 0, or NEED_..."""
    low = max(low, load_word(head, HeadWord.CURSOR))
    if low >= high:
        return 0
    code = prepare(head, low, high)
    if code < 0:
        return code
    for offset in range(low, high):
        page = page_of(head, offset)
        if page:
            store_u16(page + AT_ATTEMPTS + 2 * (offset & PAGE_MASK), entry)
    return 0
