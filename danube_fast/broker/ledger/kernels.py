"""The kernels of a ledger: states of messages, by the page, in the memory of `layout.py`.

All take the address of the head first. Ranges are [low, high) of offsets.
"""

from __future__ import annotations

from danube_fast.broker.ledger.layout import (
    ALL_SETTLED_NEW,
    AT_ATTEMPTS,
    AT_ROUTES,
    AT_STATES,
    BUCKET_BYTES,
    BUCKET_MASK,
    NEED_ROWS,
    PAGE_MASK,
    PAGE_MESSAGES,
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
from danube_fast.broker.ledger.pages import (
    add,
    close_row,
    count_waiting,
    drop_page,
    entry_of,
    is_unacked_by,
    leave,
    open_row,
    page_of,
    prepare,
)
from danube_fast.frame.kernel import kernel
from danube_fast.frame.memory import (
    load_i32,
    load_i64,
    load_u16,
    load_u32,
    load_word,
    store_u16,
    store_u32,
    store_u64,
    store_word,
)

__all__ = [
    "deliver",
    "extend",
    "give_back",
    "next_fresh",
    "next_waiting",
    "read_attempts",
    "rewind",
    "select",
    "settle",
    "state_at",
    "take_back",
    "wake",
]

_ONCE_FAILED = 0x100
_DELIVERIES, _FAILURES = 0xFF, 0xFF00
"""An entry of the column of attempts: deliveries in the low byte, failures in the high one."""


# ---------------------------------------------------------------- hand out


@kernel("int64(int64,int64,int64,int64)")
def _count_delivered(head: int, row: int, left: int, high: int) -> int:
    """A delivery of so many messages has begun."""
    store_word(load_word(head, HeadWord.ROWS) + ROW_BYTES * row, RowWord.LEFT, left)
    add(head, HeadWord.UNACKED, left)
    if left == 0:
        close_row(head, row)
    if high > load_word(head, HeadWord.NEXT):
        store_word(head, HeadWord.NEXT, high)
    return row


@kernel("int64(int64,int64,int64,int64,int64,int64,int64)")
def deliver(
    head: int, base: int, rows: int, count: int, slot: int, time_ns: int, frame: int
) -> int:
    """Messages base + rows[i] (int32; every one of `count` if `rows` is 0), in rising order, are with
    `slot` from now on, in its frame number `frame`; they are fresh or waiting. The row of the
    delivery, or NEED_..."""
    if load_word(head, HeadWord.FREE_ROW) < 0:
        return NEED_ROWS
    low, high = base, base + count
    if rows:
        low, high = base + load_i32(rows), base + load_i32(rows + 4 * (count - 1)) + 1
    code = prepare(head, low, high)
    if code < 0:
        return code
    row = open_row(head, low, high, slot, time_ns, frame)
    buckets = load_word(head, HeadWord.BUCKETS)
    page, number, left = 0, -1, 0
    for i in range(count):
        offset = base + (load_i32(rows + 4 * i) if rows else i)
        if offset >> PAGE_SHIFT != number:
            number = offset >> PAGE_SHIFT
            page = page_of(head, offset)
        place = page + AT_STATES + 4 * (offset & PAGE_MASK)
        if not page or (load_u32(place) != State.FRESH and load_u32(place) != State.WAITING):
            continue
        if load_u32(place) == State.WAITING:
            count_waiting(head, page, offset & PAGE_MASK, -1)
        store_u32(place, State.UNACKED + row)
        left += 1
        if buckets:
            route = load_u32(page + AT_ROUTES + 4 * (offset & PAGE_MASK))
            bucket = buckets + BUCKET_BYTES * (route & BUCKET_MASK)
            store_word(bucket, BucketWord.SLOT, slot)
            add(bucket, BucketWord.UNACKED, 1)
    return _count_delivered(head, row, left, high)


@kernel("int64(int64,int64,int64,int64,int64)")
def extend(head: int, low: int, high: int, slot: int, deadline_ns: int) -> int:
    """Make what is with `slot` of a range deliveries with a deadline of their own, one for each frame that
    it came in. Where to go on: `high`, or less when rows ran out; or NEED_ROWS at once."""
    row, mine, frame = -1, 0, 0
    for offset in range(low, high):
        page = page_of(head, offset)
        place = page + AT_STATES + 4 * (offset & PAGE_MASK)
        if not page or not is_unacked_by(head, load_u32(place), slot, -1):
            continue
        number = load_u32(place) - State.UNACKED
        old = load_word(head, HeadWord.ROWS) + ROW_BYTES * number
        if row < 0 or load_word(old, RowWord.FRAME) != frame:
            if load_word(head, HeadWord.FREE_ROW) < 0:
                return NEED_ROWS if row < 0 else offset
            frame = load_word(old, RowWord.FRAME)
            row = open_row(head, offset, high, slot, -1, frame)
            mine = load_word(head, HeadWord.ROWS) + ROW_BYTES * row
            store_word(mine, RowWord.DEADLINE_NS, deadline_ns)
        add(old, RowWord.LEFT, -1)
        if load_word(old, RowWord.LEFT) == 0:
            close_row(head, number)
        store_u32(place, State.UNACKED + row)
        add(mine, RowWord.LEFT, 1)
        store_word(mine, RowWord.END, offset + 1)
    return high


@kernel("int64(int64,int64)")
def state_at(head: int, offset: int) -> int:
    """State of a message above the cursor."""
    place = entry_of(head, offset)
    entry = load_i64(place) if place else UNTOUCHED
    if entry > ALL_SETTLED_NEW:
        return load_u32(entry + AT_STATES + 4 * (offset & PAGE_MASK))
    return State.FRESH if entry == UNTOUCHED else State.SETTLED


@kernel("int64(int64,int64,int64,int64,int64,int64)")
def select(head: int, base: int, low: int, high: int, state: int, rows: int) -> int:
    """Write (int32) offset - base of every message of that state; how many there are."""
    count = 0
    for offset in range(low, high):
        if state_at(head, offset) == state:
            store_u32(rows + 4 * count, offset - base)
            count += 1
    return count


@kernel("int64(int64,int64,int64)")
def next_fresh(head: int, low: int, high: int) -> int:
    """The first message of [low, high) that was never handed out nor put aside; `high` if there is none."""
    offset = low
    while offset < high:
        place = entry_of(head, offset)
        entry = load_i64(place) if place else UNTOUCHED
        if entry == UNTOUCHED:
            return offset
        stop = min(high, ((offset >> PAGE_SHIFT) + 1) << PAGE_SHIFT)
        while entry > ALL_SETTLED_NEW and offset < stop:
            if load_u32(entry + AT_STATES + 4 * (offset & PAGE_MASK)) == State.FRESH:
                return offset
            offset += 1
        offset = stop
    return high


@kernel("int64(int64)")
def next_waiting(head: int) -> int:
    """The first message that waits, -1 if none does."""
    if load_word(head, HeadWord.WAITING) == 0:
        return -1
    offset = max(load_word(head, HeadWord.FIRST_WAITING), load_word(head, HeadWord.CURSOR))
    end = load_word(head, HeadWord.NEXT)
    while offset < end:
        page = page_of(head, offset)
        stop = ((offset >> PAGE_SHIFT) + 1) << PAGE_SHIFT
        if page and load_word(page, PageWord.WAITING) == 0:
            page = 0
        while page and offset < min(stop, end):
            if load_u32(page + AT_STATES + 4 * (offset & PAGE_MASK)) == State.WAITING:
                store_word(head, HeadWord.FIRST_WAITING, offset)
                return offset
            offset += 1
        offset = stop
    return -1


@kernel("int64(int64,int64,int64,int64,int64)")
def read_attempts(head: int, base: int, rows: int, count: int, target: int) -> int:
    """Write (u32) how often each message was delivered before; the largest of them."""
    largest = 0
    for i in range(count):
        offset = base + load_i32(rows + 4 * i)
        page = page_of(head, offset)
        deliveries = 0
        if page:
            deliveries = load_u16(page + AT_ATTEMPTS + 2 * (offset & PAGE_MASK)) & _DELIVERIES
        store_u32(target + 4 * i, deliveries)
        largest = max(largest, deliveries)
    return largest


# ---------------------------------------------------------------- settle


@kernel("void(int64)")
def _advance(head: int) -> None:
    """Move the cursor to the first message that is not settled; pages that it passes are free."""
    cursor, settled = load_word(head, HeadWord.CURSOR), load_word(head, HeadWord.SETTLED)
    while True:
        place = entry_of(head, cursor)
        entry = load_i64(place) if place else UNTOUCHED
        if entry == UNTOUCHED:
            break
        stop = ((cursor >> PAGE_SHIFT) + 1) << PAGE_SHIFT
        end = stop
        if entry > ALL_SETTLED_NEW:
            end = cursor
            while end < stop:
                state = load_u32(entry + AT_STATES + 4 * (end & PAGE_MASK))
                if state not in (State.SETTLED, State.SETTLED_NEW):
                    break
                end += 1
            if end == stop:
                drop_page(head, place, ALL_SETTLED_NEW)
        settled -= end - cursor
        cursor = end
        if end < stop:
            break
    store_word(head, HeadWord.CURSOR, cursor)
    store_word(head, HeadWord.SETTLED, settled)
    if cursor > load_word(head, HeadWord.NEXT):
        store_word(head, HeadWord.NEXT, cursor)


@kernel("int64(int64,int64,int64,int64,int64)")
def _settle_in_page(head: int, page: int, low: int, high: int, slot: int) -> int:
    """Settle what is with `slot` of a range within one page, with -1 all that is not; how many."""
    settled, unacked = 0, 0
    known, is_mine = -1, 0
    for index in range(low & PAGE_MASK, (low & PAGE_MASK) + high - low):
        place = page + AT_STATES + 4 * index
        state = load_u32(place)
        if state in (State.SETTLED, State.SETTLED_NEW):
            continue
        if slot >= 0:
            if state != known:
                known, is_mine = state, is_unacked_by(head, state, slot, -1)
            if not is_mine:
                continue
        if state >= State.UNACKED:
            leave(head, page, index)
            unacked += 1
        elif state == State.WAITING:
            count_waiting(head, page, index, -1)
        elif state == State.DELAYED:
            add(head, HeadWord.DELAYED, -1)
        elif state == State.BLOCKED:
            add(head, HeadWord.BLOCKED, -1)
        store_u32(place, State.SETTLED_NEW)
        settled += 1
    add(head, HeadWord.UNACKED, -unacked)
    add(head, HeadWord.SETTLED, settled)
    add(head, HeadWord.EVER_SETTLED, settled)
    add(page, PageWord.SETTLED, settled)
    add(page, PageWord.SETTLED_NEW, settled)
    return settled


@kernel("int64(int64,int64,int64,int64)")
def _settle_range(head: int, low: int, high: int, slot: int) -> int:
    """0, or NEED_...: what was settled by then is not settled twice."""
    low = max(low, load_word(head, HeadWord.CURSOR))
    if slot >= 0:
        high = min(high, load_word(head, HeadWord.NEXT))
    if low < high:
        store_word(head, HeadWord.DIRTY_LOW, min(low, load_word(head, HeadWord.DIRTY_LOW)))
        store_word(head, HeadWord.DIRTY_HIGH, max(high, load_word(head, HeadWord.DIRTY_HIGH)))
    while low < high:
        stop = min(high, ((low >> PAGE_SHIFT) + 1) << PAGE_SHIFT)
        place = entry_of(head, low)
        if slot < 0 and (not place or load_i64(place) == UNTOUCHED):
            if place and stop - low == PAGE_MESSAGES:
                store_u64(place, ALL_SETTLED_NEW)
                add(head, HeadWord.SETTLED, PAGE_MESSAGES)
                add(head, HeadWord.EVER_SETTLED, PAGE_MESSAGES)
            else:
                code = prepare(head, low, stop)
                if code < 0:
                    return code
        page = page_of(head, low)
        if page:
            _settle_in_page(head, page, low, stop, slot)
            if load_word(page, PageWord.SETTLED) == PAGE_MESSAGES:
                drop_page(head, place, ALL_SETTLED_NEW)
        low = stop
    return 0


@kernel("int64(int64,int64,int64,int64)")
def settle(head: int, pairs: int, count: int, slot: int) -> int:
    """Settle what is with `slot` of so many ranges (int64 low, high), with -1 all that is in them."""
    code = 0
    for index in range(count):
        pair = pairs + 2 * WORD_BYTES * index
        code = _settle_range(head, load_i64(pair), load_i64(pair + WORD_BYTES), slot)
        if code < 0:
            break
    _advance(head)
    return code


# ---------------------------------------------------------------- give back


@kernel("int64(int64,int64,int64,int64)")
def wake(head: int, low: int, high: int, state: int) -> int:
    """Messages of that state (DELAYED, BLOCKED) wait from now on; how many."""
    woken = 0
    low, high = (
        max(low, load_word(head, HeadWord.CURSOR)),
        min(high, load_word(head, HeadWord.NEXT)),
    )
    for offset in range(low, high):
        page = page_of(head, offset)
        place = page + AT_STATES + 4 * (offset & PAGE_MASK)
        if page and load_u32(place) == state:
            store_u32(place, State.WAITING)
            count_waiting(head, page, offset & PAGE_MASK, 1)
            woken += 1
    if woken:
        store_word(head, HeadWord.FIRST_WAITING, min(low, load_word(head, HeadWord.FIRST_WAITING)))
        add(head, HeadWord.DELAYED if state == State.DELAYED else HeadWord.BLOCKED, -woken)
    return woken


@kernel("int64(int64)")
def rewind(head: int) -> int:
    """Make everything that waits fresh again; the first of it, or what comes next if nothing waits."""
    offset, end = load_word(head, HeadWord.CURSOR), load_word(head, HeadWord.NEXT)
    first = end
    while offset < end and load_word(head, HeadWord.WAITING):
        page = page_of(head, offset)
        place = page + AT_STATES + 4 * (offset & PAGE_MASK)
        if page and load_u32(place) == State.WAITING:
            store_u32(place, State.FRESH)
            count_waiting(head, page, offset & PAGE_MASK, -1)
            first = min(first, offset)
        offset = offset + 1 if page else ((offset >> PAGE_SHIFT) + 1) << PAGE_SHIFT
    return first


@kernel("void(int64,int64,int64)")
def _give_back_row(head: int, number: int, taken: int) -> None:
    """Let what is unacked of one delivery wait; below offset `taken` it was delivered once more."""
    row = load_word(head, HeadWord.ROWS) + ROW_BYTES * number
    low, high = load_word(row, RowWord.START), load_word(row, RowWord.END)
    store_word(head, HeadWord.FIRST_WAITING, min(low, load_word(head, HeadWord.FIRST_WAITING)))
    for offset in range(low, high):
        page = page_of(head, offset)
        place = page + AT_STATES + 4 * (offset & PAGE_MASK)
        if not page or load_u32(place) != State.UNACKED + number:
            continue
        at = page + AT_ATTEMPTS + 2 * (offset & PAGE_MASK)
        if offset < taken and load_u16(at) & _DELIVERIES < _DELIVERIES:
            store_u16(at, load_u16(at) + 1)
        leave(head, page, offset & PAGE_MASK)
        store_u32(place, State.WAITING)
        count_waiting(head, page, offset & PAGE_MASK, 1)
        add(head, HeadWord.UNACKED, -1)


@kernel("void(int64,int64,int64,int64,int64)")
def give_back(head: int, slot: int, row_count: int, frames: int, offset: int) -> None:
    """Let all that is with `slot` wait. Its first `frames` frames, and what lies below `offset` in
    the next one, were delivered once more; the rest was never taken out of its queue."""
    for number in range(row_count):
        row = load_word(head, HeadWord.ROWS) + ROW_BYTES * number
        if load_word(row, RowWord.SLOT) == slot:
            frame = load_word(row, RowWord.FRAME)
            end = load_word(row, RowWord.END)
            _give_back_row(
                head, number, end if frame < frames else offset if frame == frames else 0
            )


@kernel("int64(int64,int64,int64,int64,int64)")
def _add_run(runs: int, count: int, offset: int, failures: int, blocked: int) -> int:
    """The last run grows by a message, or another begins; how many there are."""
    last = runs + 4 * WORD_BYTES * (count - 1)
    if (
        count
        and load_i64(last + WORD_BYTES) == offset
        and load_i64(last + 2 * WORD_BYTES) == failures
    ):
        store_u64(last + WORD_BYTES, offset + 1)
        return count
    store_u64(last + 4 * WORD_BYTES, offset)
    store_u64(last + 5 * WORD_BYTES, offset + 1)
    store_u64(last + 6 * WORD_BYTES, failures)
    store_u64(last + 7 * WORD_BYTES, blocked)
    return count + 1


@kernel("int64(int64,int64,int64,int64,int64,int64,int64)")
def take_back(
    head: int, low: int, high: int, slot: int, row: int, failures_max: int, runs: int
) -> int:
    """Let what the delivery `row`, or if that is negative `slot`, has unacked of a range fail: it is
    DELAYED from now on, or BLOCKED if it failed more often than `failures_max`. Writes runs (int64)
    of low, high, failures, 1 if blocked; how many. There is room for one a message."""
    count = 0
    low, high = (
        max(low, load_word(head, HeadWord.CURSOR)),
        min(high, load_word(head, HeadWord.NEXT)),
    )
    for offset in range(low, high):
        page = page_of(head, offset)
        place = page + AT_STATES + 4 * (offset & PAGE_MASK)
        if not page or not is_unacked_by(head, load_u32(place), slot, row):
            continue
        at = page + AT_ATTEMPTS + 2 * (offset & PAGE_MASK)
        attempts = load_u16(at)
        attempts += 1 if attempts & _DELIVERIES < _DELIVERIES else 0
        attempts += _ONCE_FAILED if attempts & _FAILURES < _FAILURES else 0
        store_u16(at, attempts)
        failures = attempts >> 8
        blocked = 1 if failures > failures_max else 0
        leave(head, page, offset & PAGE_MASK)
        store_u32(place, State.BLOCKED if blocked else State.DELAYED)
        add(head, HeadWord.BLOCKED if blocked else HeadWord.DELAYED, 1)
        add(head, HeadWord.UNACKED, -1)
        count = _add_run(runs, count, offset, failures, blocked)
    return count
