"""The common ground of a ledger's kernels: words, pages, rows, and a message that leaves one.

All take the address of the head first. A kernel that needs more rows, table or pages says so before
it has changed anything.
"""

from __future__ import annotations

from danube_fast.broker.ledger.layout import (
    ALL_SETTLED_NEW,
    AT_ROUTES,
    AT_STATES,
    BUCKET_BYTES,
    BUCKET_MASK,
    NEED_PAGES,
    NEED_TABLE,
    PAGE_SHIFT,
    ROW_BYTES,
    UNTOUCHED,
    WORD_BYTES,
    BucketWord,
    HeadWord,
    PageWord,
    RowWord,
    State,
)
from danube_fast.frame.kernel import kernel
from danube_fast.frame.memory import (
    load_i64,
    load_u32,
    load_word,
    memory_zero,
    store_u64,
    store_word,
)

__all__ = [
    "add",
    "close_row",
    "count_waiting",
    "drop_page",
    "entry_of",
    "is_unacked_by",
    "leave",
    "open_row",
    "page_of",
    "prepare",
]

_ONCE_FAILED = 0x100
_DELIVERIES, _FAILURES = 0xFF, 0xFF00
"""An entry of the column of attempts: deliveries in the low byte, failures in the high one."""


@kernel("void(int64,int64,int64)")
def add(base: int, word: int, amount: int) -> None:
    """Add to a word."""
    store_word(base, word, load_word(base, word) + amount)


@kernel("int64(int64,int64)")
def entry_of(head: int, offset: int) -> int:
    """Address of the table's entry for an offset; 0 if the table ends before."""
    index = (offset >> PAGE_SHIFT) - load_word(head, HeadWord.FIRST_PAGE)
    if index < 0 or index >= load_word(head, HeadWord.TABLE_PAGES):
        return 0
    return load_word(head, HeadWord.TABLE) + WORD_BYTES * index


@kernel("int64(int64,int64)")
def page_of(head: int, offset: int) -> int:
    """Address of the page of an offset; 0 if there is none."""
    place = entry_of(head, offset)
    entry = load_i64(place) if place else UNTOUCHED
    return entry if entry > ALL_SETTLED_NEW else 0


@kernel("void(int64,int64,int64)")
def drop_page(head: int, place: int, entry: int) -> None:
    """Give the page of a table entry back to the pool; `entry` takes its place."""
    pool = load_word(head, HeadWord.POOL)
    count = load_i64(pool)
    store_u64(load_i64(pool + WORD_BYTES) + WORD_BYTES * count, load_i64(place))
    store_u64(pool, count + 1)
    store_u64(place, entry)


@kernel("int64(int64,int64,int64)")
def prepare(head: int, low: int, high: int) -> int:
    """Have a page wherever nothing is known of [low, high); 0, NEED_TABLE or NEED_PAGES."""
    first, last = low >> PAGE_SHIFT, (high - 1) >> PAGE_SHIFT
    base = load_word(head, HeadWord.FIRST_PAGE)
    if first < base or last - base >= load_word(head, HeadWord.TABLE_PAGES):
        return NEED_TABLE
    place = load_word(head, HeadWord.TABLE) + WORD_BYTES * (first - base)
    missing = 0
    for index in range(last - first + 1):
        if load_i64(place + WORD_BYTES * index) == UNTOUCHED:
            missing += 1
    pool = load_word(head, HeadWord.POOL)
    count = load_i64(pool)
    if missing > count:
        return NEED_PAGES
    for index in range(last - first + 1):
        if missing and load_i64(place + WORD_BYTES * index) == UNTOUCHED:
            count -= 1
            page = load_i64(load_i64(pool + WORD_BYTES) + WORD_BYTES * count)
            memory_zero(page, load_word(head, HeadWord.PAGE_SIZE))
            store_u64(place + WORD_BYTES * index, page)
    store_u64(pool, count)
    return 0


# ---------------------------------------------------------------- rows


@kernel("int64(int64,int64,int64,int64,int64,int64)")
def open_row(head: int, low: int, high: int, slot: int, time_ns: int, frame: int) -> int:
    """Take the first free row, which there is; with a time it is the newest of the list."""
    index = load_word(head, HeadWord.FREE_ROW)
    row = load_word(head, HeadWord.ROWS) + ROW_BYTES * index
    store_word(head, HeadWord.FREE_ROW, load_word(row, RowWord.FOLLOWING))
    store_word(row, RowWord.START, low)
    store_word(row, RowWord.END, high)
    store_word(row, RowWord.SLOT, slot)
    store_word(row, RowWord.TIME_NS, time_ns)
    store_word(row, RowWord.LEFT, 0)
    store_word(row, RowWord.FRAME, frame)
    store_word(row, RowWord.FOLLOWING, -1)
    if time_ns < 0:
        return index
    newest = load_word(head, HeadWord.NEWEST)
    store_word(row, RowWord.BEFORE, newest)
    store_word(head, HeadWord.NEWEST, index)
    if newest >= 0:
        store_word(load_word(head, HeadWord.ROWS) + ROW_BYTES * newest, RowWord.FOLLOWING, index)
    else:
        store_word(head, HeadWord.OLDEST, index)
    return index


@kernel("void(int64,int64)")
def close_row(head: int, index: int) -> None:
    """Free the row of a delivery of which nothing is unacked any more."""
    rows = load_word(head, HeadWord.ROWS)
    row = rows + ROW_BYTES * index
    if load_word(row, RowWord.TIME_NS) >= 0:
        before, following = load_word(row, RowWord.BEFORE), load_word(row, RowWord.FOLLOWING)
        if before >= 0:
            store_word(rows + ROW_BYTES * before, RowWord.FOLLOWING, following)
        else:
            store_word(head, HeadWord.OLDEST, following)
        if following >= 0:
            store_word(rows + ROW_BYTES * following, RowWord.BEFORE, before)
        else:
            store_word(head, HeadWord.NEWEST, before)
    store_word(row, RowWord.SLOT, -1)
    store_word(row, RowWord.FOLLOWING, load_word(head, HeadWord.FREE_ROW))
    store_word(head, HeadWord.FREE_ROW, index)


@kernel("void(int64,int64,int64)")
def leave(head: int, page: int, index: int) -> None:
    """Release a message of a page from its consumer; the caller sets its state and counts."""
    number = load_u32(page + AT_STATES + 4 * index) - State.UNACKED
    row = load_word(head, HeadWord.ROWS) + ROW_BYTES * number
    left = load_word(row, RowWord.LEFT) - 1
    store_word(row, RowWord.LEFT, left)
    if left == 0:
        close_row(head, number)
    buckets = load_word(head, HeadWord.BUCKETS)
    if buckets:
        route = load_u32(page + AT_ROUTES + 4 * index)
        bucket = buckets + BUCKET_BYTES * (route & BUCKET_MASK)
        unacked = load_word(bucket, BucketWord.UNACKED) - 1
        store_word(bucket, BucketWord.UNACKED, unacked)
        if unacked == 0 and load_word(bucket, BucketWord.WAITING):
            store_word(head, HeadWord.UNBLOCKED, 1)


@kernel("void(int64,int64,int64,int64)")
def count_waiting(head: int, page: int, index: int, amount: int) -> None:
    """Count a message that begins (1) or ends (-1) to wait."""
    add(head, HeadWord.WAITING, amount)
    add(page, PageWord.WAITING, amount)
    buckets = load_word(head, HeadWord.BUCKETS)
    if buckets:
        route = load_u32(page + AT_ROUTES + 4 * index)
        add(buckets + BUCKET_BYTES * (route & BUCKET_MASK), BucketWord.WAITING, amount)


@kernel("int64(int64,int64,int64,int64)")
def is_unacked_by(head: int, state: int, slot: int, row: int) -> int:
    """1 if that state says: unacked in the delivery `row`, or if that is negative by `slot`."""
    if state < State.UNACKED:
        return 0
    if row >= 0:
        return 1 if state == State.UNACKED + row else 0
    consumer = load_word(
        load_word(head, HeadWord.ROWS) + ROW_BYTES * (state - State.UNACKED), RowWord.SLOT
    )
    return 1 if consumer == slot else 0
