r"""Kernels that serve taken frames: look whether they are plain, write them into the log, show, deliver and answer them.

    taken rows --> in memory ---------------------------> DELIVER, PUBLISHED
               \-> group --write--> `os` topics --------> DELIVER, PUBLISHED
                               \--> sync thread --------> DELIVER, PUBLISHED, in a later step

A small group that nothing may be shown of before it is durable, behind a log that is, is not written here: the sync thread
writes it with a call that makes it durable, and until then nothing is written behind it.

A frame is plain if its partition has an outlet. Where one is not, the turn stops in front of it: Python does all that is
left, from the result rows on.
"""

from __future__ import annotations

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
from danube_fast.errors import Status
from danube_fast.frame.kernel import kernel
from danube_fast.frame.layout import HEADER_BYTES, At
from danube_fast.frame.memory import (
    load_i64,
    load_u32,
    load_word,
    memory_copy,
    memory_zero,
    store_u64,
    store_word,
)
from danube_fast.frame.system import clock_ns, pwritev
from danube_fast.ring.duplex_kernel import WAITS, word_of
from danube_fast.ring.layout import WORD_BYTES
from danube_fast.wal.layout import GROUP_ALIGNMENT
from danube_fast.wal.sync import queue_sync, queue_write, synced_of
from danube_fast.wal.writer import stamp_pad
from danube_fast.workers.shard.publish.siblings import (
    QUICK_SYNC_NS,
    SIBLINGS_BYTES_MAX,
    SIBLINGS_MAX,
    SIBLINGS_MIN,
    SIBLINGS_WAIT_NS,
)
from danube_fast.workers.shard.publish.turn_layout import (
    AT_LINKS,
    AT_TAKEN,
    LINK_BYTES,
    STAGING_BYTES,
    TAKEN_BYTES,
    JobWord,
    LinkWord,
    OutletKind,
    OutletWord,
    Stage,
    TakenWord,
)
from danube_fast.workers.shard.ring_out import PLAIN_BYTES_MAX, deliver_one, publish_one

__all__ = ["end_synced", "is_due", "look", "note_sync", "write_group"]

_OK = int(Status.OK)
_DONE, _SHOWN, _DELIVERED = int(Stage.DONE), int(Stage.SHOWN), int(Stage.DELIVERED)
_RESULT_BYTES, _PARTITION_BYTES = RESULT_WORDS * WORD_BYTES, PARTITION_WORDS * WORD_BYTES
_PRODUCER_BYTES, _LOG_BYTES = PRODUCER_WORDS * WORD_BYTES, LOG_WORDS * WORD_BYTES
_AT_SCRATCH = JobWord.SCRATCH * WORD_BYTES
_MEAN_SHIFT = 3
"""The mean of syncs moves an eighth of the way to each."""


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
def look(job: int) -> int:
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
        link = job + AT_LINKS + load_word(row, TakenWord.LINK) * LINK_BYTES
        store_word(link, LinkWord.WAITS_FOR_SYNC, 1 if kind == OutletKind.FSYNC else 0)
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


@kernel("int64(int64,int64)")
def _is_for_one_call(job: int, size: int) -> int:
    """1 if the sync thread may write the group: all before it is durable, and none of it is shown before it is."""
    if size > load_word(job, JobWord.DURABLE_BYTES) or load_word(job, JobWord.HAS_WRITTEN) != 0:
        return 0
    synced = synced_of(load_word(job, JobWord.SYNCS))
    return 1 if synced == load_word(job, JobWord.GROUP_START) else 0


@kernel("void(int64,int64,int64,int64)")
def _queue(job: int, end: int, size: int, one_call: int) -> None:
    """Queue the sync of the group that ends at `end`, or its write, too."""
    syncs, bell = load_word(job, JobWord.SYNCS), load_word(job, JobWord.SYNC_BELL)
    vector = job + _AT_SCRATCH
    if one_call == 0:
        queue_sync(syncs, bell, load_word(job, JobWord.LOG_FD), end, vector)
    else:
        fd, flags = load_word(job, JobWord.DURABLE_FD), load_word(job, JobWord.DURABLE_FLAGS)
        start = end - size
        queue_write(syncs, bell, fd, flags, end, vector, start + load_word(job, JobWord.LOG_DELTA))
        store_word(job, JobWord.DURABLE_START, start)
        store_word(job, JobWord.DURABLE_END, end)
    store_word(job, JobWord.QUEUED_END, end)
    store_word(job, JobWord.SINCE_NS, clock_ns(vector))


@kernel("int64(int64)")
def write_group(job: int) -> int:
    """Write the group, and queue its sync if a frame waits for that; or queue both for one call. A write that fails here
    is left to Python, which makes it again from the start."""
    size = _stage_group(job)
    start, vector = load_word(job, JobWord.GROUP_START), job + _AT_SCRATCH
    store_u64(vector, load_word(job, JobWord.STAGING))
    store_u64(vector + WORD_BYTES, size)
    place = start + load_word(job, JobWord.LOG_DELTA)
    fd = load_word(job, JobWord.LOG_FD)
    one_call = _is_for_one_call(job, size)
    if size == 0 or (one_call == 0 and pwritev(fd, vector, 1, place) != size):
        store_word(job, JobWord.IS_TORN, 1 if size != 0 else 0)
        store_word(job, JobWord.IS_STOPPED, 1)
        return 0
    end = start + size
    log = load_word(load_word(job, JobWord.STATE), StateWord.LOGS)
    log += load_word(job, JobWord.LOG_SLOT) * _LOG_BYTES
    store_word(log, LogWord.POSITION, end)
    store_word(log, LogWord.SYNCED_POSITION, synced_of(load_word(job, JobWord.SYNCS)))
    pad = size - load_word(job, JobWord.GROUP_BYTES)
    store_word(job, JobWord.ROOM, load_word(job, JobWord.ROOM) - pad)
    store_word(job, JobWord.GROUP_START, end)
    store_word(job, JobWord.GROUP_BYTES, 0)
    store_word(job, JobWord.GROUPS, load_word(job, JobWord.GROUPS) + 1)
    store_word(job, JobWord.SIBLINGS, load_word(job, JobWord.PENDING))
    store_word(job, JobWord.PENDING, 0)
    store_word(job, JobWord.HAS_WRITTEN, 0)
    waiting = _pass_group(job, end)
    if waiting != 0:
        store_word(job, JobWord.AWAITED, load_word(job, JobWord.AWAITED) + waiting)
        _queue(job, end, size, one_call)
    return size


@kernel("int64(int64)")
def is_due(job: int) -> int:
    """1 if the group is to be written now: it has no frame that waits in vain for a sync that runs, or for more
    frames of clients that publish one by one."""
    pending = load_word(job, JobWord.PENDING)
    if pending == 0 or load_word(job, JobWord.IS_STOPPED) != 0:
        return 0
    if load_word(job, JobWord.HAS_WRITTEN) != 0:
        synced = synced_of(load_word(job, JobWord.SYNCS))
        return 1 if load_word(job, JobWord.DURABLE_END) <= synced else 0
    if load_word(job, JobWord.AWAITED) != 0:
        return 0
    siblings = load_word(job, JobWord.SIBLINGS)
    enough = siblings >> 1 if load_word(job, JobWord.SYNC_NS) < QUICK_SYNC_NS else siblings
    if siblings < SIBLINGS_MIN or pending >= min(enough, SIBLINGS_MAX):
        return 1
    if load_word(job, JobWord.GROUP_BYTES) >= SIBLINGS_BYTES_MAX:
        return 1
    if load_word(job, JobWord.IS_CLOSING) != 0:
        return 1
    waited_ns = clock_ns(job + _AT_SCRATCH) - load_word(job, JobWord.SINCE_NS)
    return 1 if waited_ns >= SIBLINGS_WAIT_NS else 0


@kernel("void(int64,int64)")
def note_sync(job: int, took_ns: int) -> None:
    """Note how long a sync took, or takes already."""
    before_ns = load_word(job, JobWord.SYNC_NS)
    store_word(job, JobWord.SYNC_NS, before_ns + ((took_ns - before_ns) >> _MEAN_SHIFT))


@kernel("int64(int64)")
def end_synced(job: int) -> int:
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
    if awaited == 0:
        now_ns = clock_ns(job + _AT_SCRATCH)
        note_sync(job, now_ns - load_word(job, JobWord.SINCE_NS))
        store_word(job, JobWord.SINCE_NS, now_ns)
    return awaited
