"""The kernels of key_shared subscriptions: which consumer gets which message of a frame."""

from __future__ import annotations

from danube_fast.broker.ledger.layout import (
    AT_ROUTES,
    AT_STATES,
    BUCKET_BYTES,
    BUCKET_SHIFT,
    BUCKETS,
    NO_SLOT,
    PAGE_MASK,
    PAGE_SHIFT,
    STAYS,
    WORD_BYTES,
    BucketWord,
    HeadWord,
    PageWord,
    RouteWord,
    State,
)
from danube_fast.broker.ledger.pages import count_waiting, page_of, prepare
from danube_fast.frame.kernel import kernel
from danube_fast.frame.memory import (  # fmt: skip
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

__all__ = ["group_rows", "keep_waiting", "next_eligible", "note_routes", "route"]

_SPREAD = -7046029254386353131
"""2**64 / golden ratio, as int64: spreads offsets of messages without a key."""


@kernel("int64(int64,int64,int64)")
def _owner_of(head: int, job: int, route: int) -> int:
    """The slot that a message of this route goes to now, STAYS or NO_SLOT; marks where it stays."""
    bucket = load_word(head, HeadWord.BUCKETS) + BUCKET_BYTES * (route & (BUCKETS - 1))
    number = route >> BUCKET_SHIFT
    if number >= load_word(job, RouteWord.TABLES):
        return STAYS  # of a table that is gone: it waits until it is looked at again
    table = load_i64(load_word(job, RouteWord.OWNERS) + WORD_BYTES * number)
    owner = load_u16(table + 2 * (route & (BUCKETS - 1)))
    if owner == NO_SLOT:
        return NO_SLOT
    stays = 1 if load_word(bucket, BucketWord.MARK) == load_word(job, RouteWord.PASS) else 0
    if load_word(bucket, BucketWord.UNACKED) and load_word(bucket, BucketWord.SLOT) != owner:
        stays = 1
    if load_i64(load_word(job, RouteWord.ALLOWANCE) + WORD_BYTES * owner) <= 0:
        stays = 1
    if stays:
        store_word(bucket, BucketWord.MARK, load_word(job, RouteWord.PASS))
        return STAYS
    return owner


@kernel("int64(int64,int64,int64)")
def next_eligible(head: int, job: int, offset: int) -> int:
    """The first message from `offset` on that waits and need not stay; -1 if there is none."""
    offset = max(offset, load_word(head, HeadWord.FIRST_WAITING))
    end = load_word(head, HeadWord.NEXT)
    while offset < end:
        page = page_of(head, offset)
        stop = min(end, ((offset >> PAGE_SHIFT) + 1) << PAGE_SHIFT)
        if page and load_word(page, PageWord.WAITING) == 0:
            page = 0
        while page and offset < stop:
            if load_u32(page + AT_STATES + 4 * (offset & PAGE_MASK)) == State.WAITING:
                route = load_u32(page + AT_ROUTES + 4 * (offset & PAGE_MASK))
                if _owner_of(head, job, route) != STAYS:
                    return offset
            offset += 1
        offset = stop
    return -1


@kernel("int64(int64,int64,int64)")
def _fresh_route(job: int, row: int, offset: int) -> int:
    """Table and bucket of a message that was not looked at before."""
    hashes, masks = load_word(job, RouteWord.HASHES), load_word(job, RouteWord.MASKS)
    key = load_i64(hashes + WORD_BYTES * row) if hashes else 0
    if key == 0:
        key = offset * _SPREAD
    table = load_u16(masks + 2 * row) if masks else 0
    return table << BUCKET_SHIFT | ((key >> (64 - BUCKET_SHIFT)) & (BUCKETS - 1))


@kernel("int64(int64,int64)")
def route(head: int, job: int) -> int:
    """Write a slot (u16) for each row of the job, STAYS or NO_SLOT. What stays, waits. 0 or NEED_..."""
    base, rows, count = (
        load_word(job, RouteWord.BASE),
        load_word(job, RouteWord.ROWS),
        load_word(job, RouteWord.COUNT),
    )
    end = base + load_i32(rows + 4 * (count - 1)) + 1
    code = prepare(head, base + load_i32(rows), end)
    if code < 0:
        return code
    is_waiting = load_word(job, RouteWord.IS_WAITING)
    for i in range(count):
        row = load_i32(rows + 4 * i)
        offset = base + row
        page, index = page_of(head, offset), (base + row) & PAGE_MASK
        number = load_u32(page + AT_ROUTES + 4 * index)
        if not is_waiting:
            number = _fresh_route(job, row, offset)
            store_u32(page + AT_ROUTES + 4 * index, number)
        bucket = load_word(head, HeadWord.BUCKETS) + BUCKET_BYTES * (number & (BUCKETS - 1))
        slot = STAYS
        if is_waiting or load_word(bucket, BucketWord.WAITING) == 0:
            slot = _owner_of(head, job, number)
        store_u16(load_word(job, RouteWord.SLOTS) + 2 * i, slot)
        if slot < STAYS:
            allowance = load_word(job, RouteWord.ALLOWANCE) + WORD_BYTES * slot
            store_u64(allowance, load_i64(allowance) - 1)
        elif slot == STAYS and not is_waiting:
            store_u32(page + AT_STATES + 4 * index, State.WAITING)
            count_waiting(head, page, index, 1)
            store_word(
                head, HeadWord.FIRST_WAITING, min(offset, load_word(head, HeadWord.FIRST_WAITING))
            )
    store_word(head, HeadWord.NEXT, max(end, load_word(head, HeadWord.NEXT)))
    return 0


@kernel("void(int64,int64,int64,int64)")
def keep_waiting(head: int, base: int, rows: int, count: int) -> None:
    """Let messages base + rows[i] (int32) wait that were routed and whose consumer cannot take them now."""
    for i in range(count):
        offset = base + load_i32(rows + 4 * i)
        page, index = page_of(head, offset), offset & PAGE_MASK
        if load_u32(page + AT_STATES + 4 * index) == State.FRESH:
            store_u32(page + AT_STATES + 4 * index, State.WAITING)
            count_waiting(head, page, index, 1)
            store_word(
                head, HeadWord.FIRST_WAITING, min(offset, load_word(head, HeadWord.FIRST_WAITING))
            )


@kernel("void(int64,int64,int64,int64)")
def group_rows(job: int, ends: int, slots: int, target: int) -> None:
    """Copy the rows that went to some slot, those of slot 0 first; `ends` (int64 for each of `slots` slots,
    all 0) tells where those of each end."""
    rows, count, places = (
        load_word(job, RouteWord.ROWS),
        load_word(job, RouteWord.COUNT),
        load_word(job, RouteWord.SLOTS),
    )
    for i in range(count):
        slot = load_u16(places + 2 * i)
        if slot < slots:
            place = ends + WORD_BYTES * slot
            store_u64(place, load_i64(place) + 1)
    start = 0
    for slot in range(slots):
        place = ends + WORD_BYTES * slot
        mine = load_i64(place)
        store_u64(place, start)
        start += mine
    for i in range(count):
        slot = load_u16(places + 2 * i)
        if slot < slots:
            place = ends + WORD_BYTES * slot
            at = load_i64(place)
            store_u32(target + 4 * at, load_i32(rows + 4 * i))
            store_u64(place, at + 1)


@kernel("int64(int64,int64)")
def note_routes(head: int, job: int) -> int:
    """Write down where each row of the job would go, for later. 0 or NEED_..."""
    base, rows, count = (
        load_word(job, RouteWord.BASE),
        load_word(job, RouteWord.ROWS),
        load_word(job, RouteWord.COUNT),
    )
    code = prepare(head, base + load_i32(rows), base + load_i32(rows + 4 * (count - 1)) + 1)
    if code < 0:
        return code
    for i in range(count):
        row = load_i32(rows + 4 * i)
        place = page_of(head, base + row) + AT_ROUTES + 4 * ((base + row) & PAGE_MASK)
        store_u32(place, _fresh_route(job, row, base + row))
    return 0
