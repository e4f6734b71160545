r"""Kernels of a worker's turn over rings: take and admit plain PUBLISHes, write them, show, deliver and answer them.

    step:  rings -- [PUBLISH, request], bundle --> bytes object --admit--> result row, taken row
                 \- anything else, damage, no room --> stays first in its ring: the ordinary way handles it
           taken rows --> in memory ---------------------------> DELIVER, PUBLISHED
                      \-> group --write--> `os` topics --------> DELIVER, PUBLISHED
                                      \--> sync thread --------> DELIVER, PUBLISHED, in a later step
    wait:  sleeps, without the GIL, until a client signals, a sync ends, or something else wants the worker

A link is served one message in a round, as all others are. A frame is plain if its partition has an outlet. Where one
is not, the step stops in front of it: Python does all that is left, from the result rows on. Where a frame is not
simply accepted, or a rate is charged for it, nothing is admitted behind it before Python has dealt with it.
"""

from __future__ import annotations

from danube_fast.broker.admission.admission import admit
from danube_fast.broker.admission.layout import (
    LOG_WORDS,
    PARTITION_WORDS,
    PRODUCER_WORDS,
    RESULT_WORDS,
    LogWord,
    PartitionWord,
    ProducerWord,
    ResultWord,
    StateWord,
)
from danube_fast.clock import MILLISECOND_NS, SECOND_NS
from danube_fast.errors import Status
from danube_fast.frame.cpython import AT_BYTES_DATA
from danube_fast.frame.kernel import direct, kernel
from danube_fast.frame.layout import BUNDLE_ENTRY_BYTES, HEADER_BYTES, At
from danube_fast.frame.memory import (
    load_i32,
    load_i64,
    load_u8,
    load_u16,
    load_u32,
    load_word,
    memory_copy,
    memory_zero,
    store_u64,
    store_word,
)
from danube_fast.frame.system import (
    EPOLL_AT_DATA,
    EPOLL_EVENT_BYTES,
    clock_ns,
    epoll_wait,
    ppoll,
    pwritev,
    read,
    wall_ns,
)
from danube_fast.frame.unpack_kernels import keep_bytes
from danube_fast.net.msgpack_kernel import FIXED_ARRAY, read_unsigned
from danube_fast.net.protocol import Publish, op_code
from danube_fast.ring.duplex_kernel import (
    ENDED,
    PAIR_BODY,
    PAIR_BODY_BYTES,
    PAIR_HEAD,
    PAIR_HEAD_BYTES,
    SESSION,
    WAITS,
    _arm,
    _hear,
    peek_pair,
    release_pair,
    word_of,
)
from danube_fast.ring.layout import WORD_BYTES
from danube_fast.ring.spsc_kernel import EMPTY
from danube_fast.wal.layout import GROUP_ALIGNMENT
from danube_fast.wal.sync import fault_of, queue_sync, synced_of
from danube_fast.wal.writer import stamp_pad
from danube_fast.workers.shard.publish.siblings import (
    SIBLINGS_BYTES_MAX,
    SIBLINGS_MAX,
    SIBLINGS_MIN,
    SIBLINGS_WAIT_NS,
)
from danube_fast.workers.shard.publish.turn_layout import (
    AT_LINKS,
    AT_TAKEN,
    EVENTS_MAX,
    LINK_BYTES,
    STAGING_BYTES,
    TAKEN_BYTES,
    Flag,
    JobWord,
    LinkStatus,
    LinkWord,
    OutletKind,
    OutletWord,
    Stage,
    TakenWord,
)
from danube_fast.workers.shard.ring_out import deliver_one, publish_one

__all__ = ["PLAIN_BYTES_MAX", "pause", "step", "wait"]

PLAIN_BYTES_MAX = 16 * 1024
"""A larger bundle is not plain: Python's part of its cost is small."""
_FRAME_BYTES_MIN = HEADER_BYTES + BUNDLE_ENTRY_BYTES
_PUBLISH = op_code(Publish)
_OK = int(Status.OK)
_UNDERWAY, _STOPPED, _FULL, _OTHER, _LATE, _MISSING = map(int, Flag)
_MORE, _ORDINARY = int(LinkStatus.MORE), int(LinkStatus.ORDINARY)
_DONE, _SHOWN, _DELIVERED = int(Stage.DONE), int(Stage.SHOWN), int(Stage.DELIVERED)
_RESULT_BYTES, _PARTITION_BYTES = RESULT_WORDS * WORD_BYTES, PARTITION_WORDS * WORD_BYTES
_PRODUCER_BYTES, _LOG_BYTES = PRODUCER_WORDS * WORD_BYTES, LOG_WORDS * WORD_BYTES
_SYNC_NS_MAX = 2 * MILLISECOND_NS
"""A sync that takes longer is waited for by the ordinary turn."""
_TURN_NS_MAX = 5 * MILLISECOND_NS
_POLLED_ALL, _POLLED_BELL = 3, 1
_POLL_BYTES, _AT_REVENTS = 8, 6
_AT_PAIR = JobWord.PAIR * WORD_BYTES
_AT_NUMBER, _AT_SCRATCH = JobWord.NUMBER * WORD_BYTES, JobWord.SCRATCH * WORD_BYTES
_AT_POLLED, _AT_TIMEOUT = JobWord.POLLED * WORD_BYTES, JobWord.TIMEOUT * WORD_BYTES


# ---------------------------------------------------------------- taking


@kernel("int64(int64)")
def _read_request(job: int) -> int:
    """Request of the PUBLISH whose parts are in the job; 0 if it is no such command."""
    pair = job + _AT_PAIR
    head = pair + PAIR_HEAD
    end = head + load_i64(pair + PAIR_HEAD_BYTES)
    if end < head + 3 or load_u8(head) != FIXED_ARRAY + 2 or load_u8(head + 1) != _PUBLISH:
        return 0
    number = job + _AT_NUMBER
    return load_i64(number) if read_unsigned(head + 2, end, number) == end else 0


@kernel("int64(int64,int64,int64,int64)")
def _admit_taken(job: int, link: int, bundle: int, byte_count: int) -> int:
    """Admit a bundle and enter it into the taken rows; MORE, or STOP if Python is needed before the next one."""
    taken, first = load_word(job, JobWord.TAKEN), load_word(job, JobWord.RESULT)
    state, session = load_word(job, JobWord.STATE), load_word(link, LinkWord.SESSION)
    now_ns = load_word(job, JobWord.NOW_NS)
    if now_ns == 0:
        now_ns = wall_ns(job + _AT_SCRATCH)
    count = admit(state, bundle, byte_count, session, first, 0, now_ns)
    row = job + AT_TAKEN + taken * TAKEN_BYTES
    store_word(row, TakenWord.LINK, (link - job - AT_LINKS) // LINK_BYTES)
    store_word(row, TakenWord.REQUEST, load_word(job, JobWord.NUMBER))
    store_word(row, TakenWord.COUNT, count)
    store_word(row, TakenWord.FIRST, first)
    store_word(row, TakenWord.BUNDLE, bundle)
    store_word(row, TakenWord.BUNDLE_BYTES, byte_count)
    store_word(row, TakenWord.STAGE, Stage.ADMITTED)
    store_word(row, TakenWord.END, 0)
    store_word(job, JobWord.TAKEN, taken + 1)
    store_word(job, JobWord.ROOM, load_word(job, JobWord.ROOM) - byte_count)
    if count < 0:
        return LinkStatus.STOP
    store_word(job, JobWord.RESULT, first + count)
    results = load_word(state, StateWord.RESULTS)
    partitions = load_word(state, StateWord.PARTITIONS)
    for index in range(first, first + count):
        result = results + index * _RESULT_BYTES
        if load_word(result, ResultWord.STATUS) != _OK:
            return LinkStatus.STOP
        slot = load_word(result, ResultWord.PARTITION_SLOT)
        if load_word(partitions + slot * _PARTITION_BYTES, PartitionWord.IS_PACED) != 0:
            return LinkStatus.STOP
    return LinkStatus.MORE


@kernel("int64(int64,int64)")
def _take_one(job: int, link: int) -> int:
    """Take the oldest message of a link: MORE or STOP if it was taken, else ARMED or ORDINARY."""
    side, pair = load_word(link, LinkWord.SIDE), job + _AT_PAIR
    found = peek_pair(side, pair)
    if found == EMPTY and word_of(side, WAITS) == 0:
        return LinkStatus.ARMED if _arm(side) != 0 else LinkStatus.MORE
    if found < 0 or _read_request(job) == 0:
        return LinkStatus.ORDINARY
    size = load_i64(pair + PAIR_BODY_BYTES)
    frames = size // _FRAME_BYTES_MIN + 1  # no bundle of that size has more
    results_max = load_word(load_word(job, JobWord.STATE), StateWord.RESULTS_MAX)
    if size > load_word(job, JobWord.ROOM) or load_word(job, JobWord.RESULT) + frames > results_max:
        return LinkStatus.ORDINARY
    place = load_word(job, JobWord.TAKEN)
    holder = keep_bytes(
        load_word(job, JobWord.HOLDERS), place, load_i64(pair + PAIR_BODY), size,
        load_word(job, JobWord.NONE),
    )  # fmt: skip
    if holder == 0:
        return LinkStatus.ORDINARY  # which meets it again, and raises MemoryError
    release_pair(side, found)
    return _admit_taken(job, link, holder + AT_BYTES_DATA, size)


@kernel("int64(int64)")
def _take_rounds(job: int) -> int:
    """Take messages of all links in turn, until nothing is left but what the ordinary way has to look at; MORE, STOP
    behind one that Python has to look at, or ORDINARY if one was left."""
    is_busy, code_of_all = True, _MORE
    while is_busy:
        is_busy = False
        for index in range(load_word(job, JobWord.LINKS)):
            link = job + AT_LINKS + index * LINK_BYTES
            status = load_word(link, LinkWord.STATUS)
            if status == LinkStatus.ORDINARY:
                code_of_all = _ORDINARY
            if status != LinkStatus.MORE:
                continue
            if load_word(job, JobWord.TAKEN) >= load_word(job, JobWord.TAKEN_LIMIT):
                return code_of_all
            code = _take_one(job, link)
            if code == LinkStatus.STOP:
                return code
            store_word(link, LinkWord.STATUS, code)
            is_busy = is_busy or code == LinkStatus.MORE
            if code == LinkStatus.ORDINARY:
                code_of_all = code
    return code_of_all


# ---------------------------------------------------------------- plain frames


@kernel("int64(int64,int64)")
def _result_of(job: int, row: int) -> int:
    """The result row of a taken row."""
    results = load_word(load_word(job, JobWord.STATE), StateWord.RESULTS)
    return results + load_word(row, TakenWord.FIRST) * _RESULT_BYTES


@kernel("int64(int64,int64)")
def _outlet_of(job: int, result: int) -> int:
    """The outlet of an accepted frame's partition; 0: it is not made yet, less than 0: it has none."""
    slot = load_word(result, ResultWord.PARTITION_SLOT)
    partitions = load_word(load_word(job, JobWord.STATE), StateWord.PARTITIONS)
    return load_word(partitions + slot * _PARTITION_BYTES, PartitionWord.OUTLET)


@kernel("int64(int64,int64,int64)")
def _has_taker(job: int, result: int, outlet: int) -> int:
    """1 if the outlet's consumer has credit for the frame, which is charged, and knows its producer."""
    bytes_left = load_word(outlet, OutletWord.BYTES)
    messages_left = load_word(outlet, OutletWord.MESSAGES)
    size = load_word(result, ResultWord.FRAME_BYTES)
    count = load_word(result, ResultWord.MESSAGE_COUNT)
    if bytes_left <= 0 or messages_left <= 0:
        return 0
    if load_word(outlet, OutletWord.COVERS) != 0 and (bytes_left < size or messages_left < count):
        return 0
    producers = load_word(load_word(job, JobWord.STATE), StateWord.PRODUCERS)
    producer = producers + load_word(result, ResultWord.PRODUCER_SLOT) * _PRODUCER_BYTES
    if load_word(producer, ProducerWord.ANNOUNCED) != load_word(outlet, OutletWord.CONSUMER):
        return 0
    store_word(outlet, OutletWord.BYTES, bytes_left - size)
    store_word(outlet, OutletWord.MESSAGES, messages_left - count)
    return 1


@kernel("int64(int64,int64)")
def _kind_of(job: int, row: int) -> int:
    """The kind of its outlet if a taken bundle is plain, and charge the credit; 0 if Python has to look at it, less
    than 0 if Python has to make the outlet."""
    result = _result_of(job, row)
    if load_word(row, TakenWord.COUNT) != 1 or load_word(result, ResultWord.STATUS) != _OK:
        return 0
    outlet = _outlet_of(job, result)
    size = load_word(row, TakenWord.BUNDLE_BYTES)
    if outlet < 0 or load_word(result, ResultWord.FLAGS) != 0 or size > PLAIN_BYTES_MAX:
        return 0
    if outlet == 0:
        return -1
    kind = load_word(outlet, OutletWord.KIND)
    if (kind == OutletKind.MEMORY) != (load_word(result, ResultWord.LOG_POSITION) < 0):
        return 0
    end = load_word(result, ResultWord.BASE_OFFSET) + load_word(result, ResultWord.MESSAGE_COUNT)
    if kind != OutletKind.FSYNC and end > load_word(outlet, OutletWord.SAFE_UNTIL):
        return 0
    if kind != OutletKind.MEMORY:
        bytes_after = load_word(job, JobWord.GROUP_BYTES) + load_word(
            result, ResultWord.FRAME_BYTES
        )
        group_end = (
            load_word(job, JobWord.GROUP_START) + bytes_after + GROUP_ALIGNMENT + HEADER_BYTES
        )
        if bytes_after > STAGING_BYTES or group_end > load_word(job, JobWord.LOG_END):
            return 0
    if load_word(outlet, OutletWord.SIDE) != 0 and _has_taker(job, result, outlet) == 0:
        return 0
    return kind


@kernel("int64(int64,int64)")
def _serve(job: int, row: int) -> int:
    """Deliver and answer a taken bundle that is visible now; how far that came. Nothing may overtake what waits for
    room in a ring: then Python does the rest, and the turn ends."""
    result = _result_of(job, row)
    outlet = _outlet_of(job, result)
    side = load_word(outlet, OutletWord.SIDE)
    stopped = load_word(job, JobWord.IS_STOPPED)
    stage = _DONE
    if side != 0:
        bundle, size = load_word(row, TakenWord.BUNDLE), load_word(row, TakenWord.BUNDLE_BYTES)
        consumer = load_word(outlet, OutletWord.CONSUMER_ID)
        if (
            stopped != 0
            or word_of(side, WAITS) != 0
            or deliver_one(side, consumer, bundle, size) < 0
        ):
            stage = _SHOWN
    if stage == _DONE:
        link = job + AT_LINKS + load_word(row, TakenWord.LINK) * LINK_BYTES
        own, request = load_word(link, LinkWord.SIDE), load_word(row, TakenWord.REQUEST)
        offset = load_word(result, ResultWord.BASE_OFFSET)
        if word_of(own, WAITS) != 0 or publish_one(own, request, _OK, offset) < 0:
            stage = _DELIVERED
    if stage != _DONE:
        store_word(job, JobWord.IS_STOPPED, 1)
    store_word(row, TakenWord.STAGE, stage)
    return stage


@kernel("int64(int64)")
def _look(job: int) -> int:
    """Look at the bundles that were taken since the last look: serve those that stay in memory, and enter the others
    into the group. Stops at one that is not plain, or whose outlet is missing: then 1."""
    number = load_word(job, JobWord.LOOKED)
    while number < load_word(job, JobWord.TAKEN) and load_word(job, JobWord.IS_STOPPED) == 0:
        row = job + AT_TAKEN + number * TAKEN_BYTES
        kind = _kind_of(job, row)
        if kind < 0:
            return 1
        if kind == 0:
            store_word(job, JobWord.IS_STOPPED, 1)
            break
        if kind == OutletKind.MEMORY:
            _serve(job, row)
        else:
            size = load_word(_result_of(job, row), ResultWord.FRAME_BYTES)
            if load_word(job, JobWord.PENDING) == 0 and load_word(job, JobWord.AWAITED) == 0:
                store_word(job, JobWord.SINCE_NS, clock_ns(job + _AT_SCRATCH))
            store_word(job, JobWord.PENDING, load_word(job, JobWord.PENDING) + 1)
            store_word(job, JobWord.GROUP_BYTES, load_word(job, JobWord.GROUP_BYTES) + size)
            if kind == OutletKind.OS:
                store_word(job, JobWord.HAS_WRITTEN, 1)
        number += 1
        store_word(job, JobWord.LOOKED, number)
    return 0


# ---------------------------------------------------------------- the log


@kernel("int64(int64)")
def _stage_group(job: int) -> int:
    """Copy the frames of the group, and a PAD frame behind them, into the staging memory; how many bytes, 0 if they
    are not stamped for this place."""
    staging, at = load_word(job, JobWord.STAGING), 0
    start = load_word(job, JobWord.GROUP_START)
    log = load_word(load_word(job, JobWord.STATE), StateWord.LOGS)
    log += load_word(job, JobWord.LOG_SLOT) * _LOG_BYTES
    epoch = load_word(log, LogWord.EPOCH)
    for number in range(load_word(job, JobWord.LOOKED)):
        row = job + AT_TAKEN + number * TAKEN_BYTES
        result = _result_of(job, row)
        position = load_word(result, ResultWord.LOG_POSITION)
        if position < 0 or load_word(row, TakenWord.STAGE) != Stage.ADMITTED:
            continue
        frame = load_word(row, TakenWord.BUNDLE) + load_word(result, ResultWord.FRAME_START)
        size = load_word(result, ResultWord.FRAME_BYTES)
        if position != start + at or load_i64(frame + At.LOG_POSITION) != position:
            return 0
        if load_u32(frame + At.EPOCH) != epoch:
            return 0
        memory_copy(staging + at, frame, size)
        at += size
    if at != load_word(job, JobWord.GROUP_BYTES):
        return 0
    pad = -at % GROUP_ALIGNMENT
    if pad != 0:
        if pad < HEADER_BYTES:
            pad += GROUP_ALIGNMENT
        synced = synced_of(load_word(job, JobWord.SYNCS))
        log_id = load_word(log, LogWord.LOG_ID)
        memory_zero(staging + at, pad)
        stamp_pad(staging + at, pad, log_id, start + at, epoch, synced, 0)
    return at + pad


@kernel("int64(int64,int64)")
def _pass_group(job: int, end: int) -> int:
    """Serve the frames of a group that was written, those of `os` topics; how many others wait for its sync."""
    waiting = 0
    for number in range(load_word(job, JobWord.LOOKED)):
        row = job + AT_TAKEN + number * TAKEN_BYTES
        result = _result_of(job, row)
        if load_word(result, ResultWord.LOG_POSITION) < 0:
            continue
        if load_word(row, TakenWord.STAGE) != Stage.ADMITTED:
            continue
        store_word(row, TakenWord.END, end)
        if load_word(_outlet_of(job, result), OutletWord.KIND) == OutletKind.OS:
            _serve(job, row)
        else:
            store_word(row, TakenWord.STAGE, Stage.WRITTEN)
            waiting += 1
    return waiting


@kernel("int64(int64)")
def _write_group(job: int) -> int:
    """Write the group, and queue its sync if a frame waits for that. A write that fails is left to Python, which makes
    it again from the start."""
    size = _stage_group(job)
    start, vector = load_word(job, JobWord.GROUP_START), job + _AT_SCRATCH
    store_u64(vector, load_word(job, JobWord.STAGING))
    store_u64(vector + WORD_BYTES, size)
    place = start + load_word(job, JobWord.LOG_DELTA)
    fd = load_word(job, JobWord.LOG_FD)
    if size == 0 or pwritev(fd, vector, 1, place) != size:
        store_word(job, JobWord.IS_TORN, 1 if size != 0 else 0)
        store_word(job, JobWord.IS_STOPPED, 1)
        return 0
    end = start + size
    log = load_word(load_word(job, JobWord.STATE), StateWord.LOGS)
    log += load_word(job, JobWord.LOG_SLOT) * _LOG_BYTES
    syncs = load_word(job, JobWord.SYNCS)
    store_word(log, LogWord.POSITION, end)
    store_word(log, LogWord.SYNCED_POSITION, synced_of(syncs))
    store_word(job, JobWord.GROUP_START, end)
    store_word(job, JobWord.GROUP_BYTES, 0)
    store_word(job, JobWord.GROUPS, load_word(job, JobWord.GROUPS) + 1)
    store_word(job, JobWord.SIBLINGS, load_word(job, JobWord.PENDING))
    store_word(job, JobWord.PENDING, 0)
    store_word(job, JobWord.HAS_WRITTEN, 0)
    waiting = _pass_group(job, end)
    if waiting != 0:
        queue_sync(syncs, load_word(job, JobWord.SYNC_BELL), fd, end, vector)
        store_word(job, JobWord.AWAITED, load_word(job, JobWord.AWAITED) + waiting)
        store_word(job, JobWord.QUEUED_END, end)
        store_word(job, JobWord.SINCE_NS, clock_ns(job + _AT_SCRATCH))
    return size


@kernel("int64(int64)")
def _is_due(job: int) -> int:
    """1 if the group is to be written now: it has no frame that waits in vain for a sync that runs, or for more
    frames of clients that publish one by one."""
    pending = load_word(job, JobWord.PENDING)
    if pending == 0 or load_word(job, JobWord.IS_STOPPED) != 0:
        return 0
    if load_word(job, JobWord.HAS_WRITTEN) != 0:
        return 1
    if load_word(job, JobWord.AWAITED) != 0:
        return 0
    siblings = load_word(job, JobWord.SIBLINGS)
    if siblings < SIBLINGS_MIN or pending >= min(siblings, SIBLINGS_MAX):
        return 1
    if load_word(job, JobWord.GROUP_BYTES) >= SIBLINGS_BYTES_MAX:
        return 1
    if load_word(job, JobWord.IS_CLOSING) != 0:
        return 1
    waited_ns = clock_ns(job + _AT_SCRATCH) - load_word(job, JobWord.SINCE_NS)
    return 1 if waited_ns >= SIBLINGS_WAIT_NS else 0


@kernel("int64(int64)")
def _end_synced(job: int) -> int:
    """Serve the frames that are durable now; how many still wait."""
    awaited = load_word(job, JobWord.AWAITED)
    if awaited == 0:
        return 0
    synced = synced_of(load_word(job, JobWord.SYNCS))
    for number in range(load_word(job, JobWord.LOOKED)):
        row = job + AT_TAKEN + number * TAKEN_BYTES
        if load_word(row, TakenWord.STAGE) != Stage.WRITTEN:
            continue
        if load_word(row, TakenWord.END) > synced:
            break
        _serve(job, row)
        awaited -= 1
    store_word(job, JobWord.AWAITED, awaited)
    if awaited == 0 and load_word(job, JobWord.PENDING) != 0:
        store_word(job, JobWord.SINCE_NS, clock_ns(job + _AT_SCRATCH))
    return awaited


# ---------------------------------------------------------------- entries


@kernel("int64(int64)")
def _step(job: int) -> int:
    """Do all that can be done without waiting; flags of what is left."""
    _end_synced(job)
    flags = 0
    if load_word(job, JobWord.IS_CLOSING) == 0 and load_word(job, JobWord.IS_STOPPED) == 0:
        if load_word(job, JobWord.LOOKED) == load_word(job, JobWord.TAKEN):
            store_word(job, JobWord.CODE, _take_rounds(job))
        if _look(job) != 0:
            return _MISSING
        code = load_word(job, JobWord.CODE)
        if code == LinkStatus.STOP:
            store_word(job, JobWord.IS_STOPPED, 1)
        elif code == LinkStatus.ORDINARY:
            flags |= _OTHER
    if _is_due(job) != 0:
        _write_group(job)
    if load_word(job, JobWord.IS_STOPPED) != 0:
        flags |= _STOPPED
    if load_word(job, JobWord.TAKEN) >= load_word(job, JobWord.TAKEN_LIMIT):
        flags |= _FULL
    if load_word(job, JobWord.PENDING) != 0 or load_word(job, JobWord.AWAITED) != 0:
        flags |= _UNDERWAY
        syncs = load_word(job, JobWord.SYNCS)
        if fault_of(syncs) != 0:
            flags |= _STOPPED
    return flags


@kernel("int64(int64)")
def _hear_links(job: int) -> int:
    """Take the signals of clients, and list them; OTHER if one of them, or someone who knocks, is for Python."""
    events, flags = load_word(job, JobWord.EVENTS), 0
    count = epoll_wait(load_word(job, JobWord.EPOLL), events, EVENTS_MAX, 0)
    for index in range(count):
        fd = load_i32(events + index * EPOLL_EVENT_BYTES + EPOLL_AT_DATA)
        side = 0
        if fd < load_word(job, JobWord.SIDES_COUNT):
            side = load_i64(load_word(job, JobWord.SIDES) + fd * WORD_BYTES)
        links = load_word(job, JobWord.LINKS)
        link, place = job + AT_LINKS, 0
        while place < links and load_word(link, LinkWord.SIDE) != side:
            link += LINK_BYTES
            place += 1
        if side == 0 or place >= load_word(job, JobWord.LINKS_MAX) or _hear(side) == ENDED:
            flags = _OTHER
            continue
        store_word(link, LinkWord.SIDE, side)
        store_word(link, LinkWord.SESSION, word_of(side, SESSION))
        is_open = word_of(side, SESSION) != 0 and word_of(side, WAITS) == 0
        store_word(link, LinkWord.STATUS, _MORE if is_open else _ORDINARY)
        if place == links:
            store_word(job, JobWord.LINKS, links + 1)
    return flags


@kernel("int64(int64,int64)", nogil=True)
def _wait(job: int, timeout_ns: int) -> int:
    """Sleep until a client signals, a sync ends, or something else wants the worker (OTHER), or the time is up."""
    store_u64(job + _AT_TIMEOUT, timeout_ns // SECOND_NS)
    store_u64(job + _AT_TIMEOUT + WORD_BYTES, timeout_ns % SECOND_NS)
    count = _POLLED_BELL if load_word(job, JobWord.IS_CLOSING) != 0 else _POLLED_ALL
    polled = job + _AT_POLLED
    found = ppoll(polled, count, job + _AT_TIMEOUT, 0)
    if found <= 0:
        return _OTHER if found < 0 else 0
    flags = 0
    if load_u16(polled + _AT_REVENTS) != 0:
        if load_word(job, JobWord.AWAITED) == 0:
            flags |= _OTHER
        else:
            read(load_word(job, JobWord.BELL), job + _AT_SCRATCH, WORD_BYTES)
            store_word(job, JobWord.BELL_RANG, 1)
    if count == _POLLED_ALL:
        if load_u16(polled + _POLL_BYTES + _AT_REVENTS) != 0:
            flags |= _hear_links(job)
        if load_u16(polled + 2 * _POLL_BYTES + _AT_REVENTS) != 0:
            flags |= _OTHER
    return flags


@kernel("int64(int64)", nogil=True)
def _pause(job: int) -> int:
    """Wait for what is under way: flags as `wait` tells them; LATE if a sync takes too long. A group that waits for
    more frames is waited for as long as it may; a turn that has lasted long takes nothing more."""
    if load_word(job, JobWord.AWAITED) == 0 and load_word(job, JobWord.IS_CLOSING) != 0:
        return 0
    now_ns = clock_ns(job + _AT_SCRATCH)
    if load_word(job, JobWord.BEGAN_NS) == 0:
        store_word(job, JobWord.BEGAN_NS, now_ns)
    elif now_ns - load_word(job, JobWord.BEGAN_NS) > _TURN_NS_MAX:
        store_word(job, JobWord.IS_CLOSING, 1)
    is_awaited = load_word(job, JobWord.AWAITED) != 0
    limit_ns = _SYNC_NS_MAX if is_awaited else SIBLINGS_WAIT_NS
    left_ns = load_word(job, JobWord.SINCE_NS) + limit_ns - now_ns
    if left_ns <= 0:
        return _LATE if is_awaited else 0
    return _wait(job, left_ns)


pause, step, wait = direct(_pause), direct(_step), direct(_wait)
