"""Admission: what happens to a published bundle, in one kernel call.

For each frame: is it whole (lengths, crc, structure), does this worker own its partition, may this
session publish for this producer, is its sequence the next one; then it gets its offsets, its place
in the log and its broker half. Python sees one result row a frame and handles the exceptions.

Dedup: sequences are dense per (producer, partition). Only last + 1 is accepted; at or below last it
is a duplicate and gets the offset it had; a gap is OUT_OF_SEQUENCE until the missing frame comes.
"""

from __future__ import annotations

from danube_fast.broker.admission.layout import (
    DEDUP_BATCHES,
    LOG_WORDS,
    PARTITION_WORDS,
    PRODUCER_WORDS,
    RESULT_WORDS,
    SESSION_ARRIVED,
    WINDOW_WORDS,
    WORD_BYTES,
    LogWord,
    Mode,
    NamespaceWord,
    PartitionWord,
    ProducerWord,
    ResultWord,
    StateWord,
    WindowWord,
)
from danube_fast.errors import AlreadyExists, InvalidArgument, ResourceExhausted, Status
from danube_fast.frame.bundle import read_bundle
from danube_fast.frame.check import check_frame
from danube_fast.frame.kernel import kernel
from danube_fast.frame.layout import (
    BUNDLE_ENTRY_BYTES,
    BUNDLE_HEADER_BYTES,
    CLIENT_FLAGS,
    FRAME_BYTES_CAP,
    HEADER_BYTES,
    At,
    BufferId,
    Codec,
)
from danube_fast.frame.memory import (
    load_i32,
    load_i64,
    load_u8,
    load_u16,
    load_u32,
    load_word,
    store_u64,
    store_word,
)
from danube_fast.frame.stamp import stamp
from danube_fast.frame.unpack_kernels import find_buffer

__all__ = ["NEED_RESERVATION", "NOT_ADMITTED_YET", "admit", "find_producer", "insert_producer"]

# Statuses of a result row, beside those of `Status`. NEED_RESERVATION and NOT_ADMITTED_YET never leave the worker.
STATUS_INVALID = InvalidArgument.code
STATUS_TOO_OLD = AlreadyExists.code
STATUS_EXHAUSTED = ResourceExhausted.code
NEED_RESERVATION = 100
"""The partition has no reserved offsets left: reserve more and admit the rest again."""
NOT_ADMITTED_YET = 101
OVERLAP = -1001
"""In `base_offset` of an invalid frame: some of its messages were accepted before, some not."""
FRAME_TOO_LARGE = -1002
"""Likewise: more than one message in a frame above FRAME_BYTES_CAP."""
MESSAGE_TOO_LARGE = -1003
"""Likewise: a payload is larger than the topic's policy allows."""
NAMESPACE_FULL = -1004
"""Likewise, of a frame that is too much for what its namespace may keep."""
TOO_MANY_FRAMES = -1000
"""Returned by `admit`: the result table has no room for this bundle now."""

_W = WORD_BYTES
_P_ROW = PARTITION_WORDS * _W
_L_ROW = LOG_WORDS * _W
_R_ROW = PRODUCER_WORDS * _W
_B_ROW = WINDOW_WORDS * _W
_O_ROW = RESULT_WORDS * _W
_ARRIVED = SESSION_ARRIVED
_CAP = FRAME_BYTES_CAP
_OVERHEAD = 256
"""Bytes that a message may take in a compressed frame beside its payload."""
_SPREAD = -7046029254386353131  # 2**64 / golden ratio, odd: multiplicative hashing


@kernel("int64(int64,int64,int64)")
def _cell_of(mask: int, partition_id: int, producer_id: int) -> int:
    """First cell to look at for a producer."""
    mixed = (producer_id ^ (partition_id * 0x9E3779B1)) * _SPREAD
    return (mixed >> 20) & mask


@kernel("int64(int64,int64,int64)")
def find_producer(state: int, partition_id: int, producer_id: int) -> int:
    """Slot of a producer, or -1. The table is never full, so an empty cell ends the search."""
    table = load_word(state, StateWord.HASH)
    mask = load_word(state, StateWord.HASH_MASK)
    producers = load_word(state, StateWord.PRODUCERS)
    cell = _cell_of(mask, partition_id, producer_id)
    while True:
        slot = load_i64(table + cell * _W) - 1
        if slot < 0:
            return slot
        row = producers + slot * _R_ROW
        if (
            load_word(row, ProducerWord.PRODUCER_ID) == producer_id
            and load_word(row, ProducerWord.PARTITION_ID) == partition_id
        ):
            return slot
        cell = (cell + 1) & mask


@kernel("int64(int64,int64)")
def insert_producer(state: int, slot: int) -> int:
    """Enter `producers[slot]`, which is filled in already, into the hash table."""
    table = load_word(state, StateWord.HASH)
    mask = load_word(state, StateWord.HASH_MASK)
    row = load_word(state, StateWord.PRODUCERS) + slot * _R_ROW
    cell = _cell_of(
        mask, load_word(row, ProducerWord.PARTITION_ID), load_word(row, ProducerWord.PRODUCER_ID)
    )
    while load_i64(table + cell * _W) != 0:
        cell = (cell + 1) & mask
    store_u64(table + cell * _W, slot + 1)
    return cell


@kernel("int64(int64,int64,int64,int64,int64)")
def remember_batch(
    state: int, slot: int, base_sequence: int, message_count: int, base_offset: int
) -> int:
    """Put a batch into a producer's window and move its next sequence behind it."""
    row = load_word(state, StateWord.PRODUCERS) + slot * _R_ROW
    batches = load_word(row, ProducerWord.BATCH_COUNT)
    entry = (
        load_word(state, StateWord.WINDOWS)
        + (slot * DEDUP_BATCHES + batches % DEDUP_BATCHES) * _B_ROW
    )
    store_word(entry, WindowWord.BASE_SEQUENCE, base_sequence)
    store_word(entry, WindowWord.MESSAGE_COUNT, message_count)
    store_word(entry, WindowWord.BASE_OFFSET, base_offset)
    store_word(row, ProducerWord.BATCH_COUNT, batches + 1)
    store_word(row, ProducerWord.NEXT_SEQUENCE, base_sequence + message_count)
    return 0


@kernel("int64(int64,int64,int64)")
def original_offset(state: int, slot: int, base_sequence: int) -> int:
    """Offset that a duplicate's first message got, or -1 if its batch is no longer remembered."""
    row = load_word(state, StateWord.PRODUCERS) + slot * _R_ROW
    batches = load_word(row, ProducerWord.BATCH_COUNT)
    known = min(batches, DEDUP_BATCHES)
    for back in range(1, known + 1):
        place = slot * DEDUP_BATCHES + (batches - back) % DEDUP_BATCHES
        entry = load_word(state, StateWord.WINDOWS) + place * _B_ROW
        behind = base_sequence - load_word(entry, WindowWord.BASE_SEQUENCE)
        if 0 <= behind < load_word(entry, WindowWord.MESSAGE_COUNT):
            return load_word(entry, WindowWord.BASE_OFFSET) + behind
    return -1


@kernel("int64(int64,int64,int64,int64,int64)")
def _find_sender(state: int, frame: int, partition_row: int, session: int, result: int) -> int:
    """Find the sender of a frame, and whether it is its turn: fills producer, sequence and, for a duplicate, the
    offset into `result`; returns a status."""
    partition_id = load_word(partition_row, PartitionWord.PARTITION_ID)
    slot = find_producer(state, partition_id, load_i64(frame + At.PRODUCER_ID))
    store_word(result, ResultWord.PRODUCER_SLOT, slot)
    sequence = load_i64(frame + At.BASE_SEQUENCE)
    store_word(result, ResultWord.BASE_SEQUENCE, sequence)
    if slot < 0:
        return Status.FENCED
    row = load_word(state, StateWord.PRODUCERS) + slot * _R_ROW
    opener = load_word(row, ProducerWord.SESSION)
    if load_u32(frame + At.PRODUCER_EPOCH) != load_word(row, ProducerWord.EPOCH):
        return Status.FENCED
    if opener != session:
        return Status.NOT_OWNER if opener == _ARRIVED else Status.FENCED
    expected = load_word(row, ProducerWord.NEXT_SEQUENCE)
    if sequence == expected:
        return Status.OK
    if sequence > expected or sequence < 0:
        return Status.OUT_OF_SEQUENCE
    if sequence + load_u32(frame + At.MESSAGE_COUNT) > expected:
        store_word(result, ResultWord.BASE_OFFSET, OVERLAP)
        return STATUS_INVALID
    offset = original_offset(state, slot, sequence)
    store_word(result, ResultWord.BASE_OFFSET, offset)
    return Status.DUPLICATE if offset >= 0 else STATUS_TOO_OLD


@kernel("int64(int64,int64,int64,int64,int64)")
def _accept(state: int, frame: int, partition_row: int, result: int, now_ns: int) -> int:
    """Give the frame its offsets, its place and its broker half; returns a status."""
    count = load_u32(frame + At.MESSAGE_COUNT)
    offset = load_word(partition_row, PartitionWord.NEXT_OFFSET)
    if offset + count > load_word(partition_row, PartitionWord.RESERVED_UNTIL):
        return NEED_RESERVATION
    log = (
        load_word(state, StateWord.LOGS) + load_word(partition_row, PartitionWord.LOG_SLOT) * _L_ROW
    )
    position = -1
    if load_word(partition_row, PartitionWord.MODE) == Mode.LOGGED:
        position = load_word(log, LogWord.POSITION)
        if position < 0:
            return -position
        store_word(log, LogWord.POSITION, position + load_word(result, ResultWord.FRAME_BYTES))
    append_time = max(now_ns, load_word(partition_row, PartitionWord.APPEND_TIME_NS))
    stamp(
        frame,
        load_word(log, LogWord.LOG_ID),
        max(position, 0),
        offset,
        append_time,
        load_word(log, LogWord.SYNCED_POSITION),
        load_word(partition_row, PartitionWord.PARTITION_ID),
        load_word(log, LogWord.EPOCH),
        count,
    )
    store_word(partition_row, PartitionWord.NEXT_OFFSET, offset + count)
    store_word(partition_row, PartitionWord.APPEND_TIME_NS, append_time)
    store_word(result, ResultWord.BASE_OFFSET, offset)
    store_word(result, ResultWord.MESSAGE_COUNT, count)
    store_word(result, ResultWord.LOG_POSITION, position)
    store_word(result, ResultWord.APPEND_TIME_NS, append_time)
    store_word(result, ResultWord.FLAGS, load_u16(frame + At.FLAGS))
    store_word(result, ResultWord.PRODUCER_ID, load_i64(frame + At.PRODUCER_ID))
    slot = load_word(result, ResultWord.PRODUCER_SLOT)
    remember_batch(state, slot, load_word(result, ResultWord.BASE_SEQUENCE), count, offset)
    producer = load_word(state, StateWord.PRODUCERS) + slot * _R_ROW
    store_word(producer, ProducerWord.LAST_USED_NS, now_ns)
    return Status.OK


@kernel("int64(int64,int64)")
def _has_larger(frame: int, limit: int) -> int:
    """1 if a payload of the frame has more than `limit` bytes. Those of a compressed frame are only
    looked at together: the mean must be within the limit."""
    raw, count = load_u32(frame + At.RAW_BODY_BYTES), load_u32(frame + At.MESSAGE_COUNT)
    if raw <= limit:
        return 0
    if load_u8(frame + At.CODEC) != Codec.NONE:
        return 1 if raw > (limit + _OVERHEAD) * count else 0
    offsets = frame + HEADER_BYTES + find_buffer(frame + HEADER_BYTES, BufferId.PAYLOAD_OFFSETS)
    for i in range(count):
        if load_i32(offsets + 4 * (i + 1)) - load_i32(offsets + 4 * i) > limit:
            return 1
    return 0


@kernel("int64(int64,int64,int64,int64)")
def _check_namespace(state: int, namespace: int, frame_bytes: int, result: int) -> int:
    """Whether the quota of a namespace lets a frame in, by what all workers have taken; a status."""
    now_ns = load_word(state, StateWord.NOW_NS) + load_word(namespace, NamespaceWord.BURST_NS)
    messages = load_word(namespace, NamespaceWord.MESSAGES)
    if messages != 0 and load_i64(messages) > now_ns:
        return Status.THROTTLED
    paid = load_word(namespace, NamespaceWord.BYTES)
    if paid != 0 and load_i64(paid) > now_ns:
        return Status.THROTTLED
    limit = load_word(namespace, NamespaceWord.UNTIL)
    if limit != 0:
        until = load_i64(limit)
        if until == 0:
            return Status.THROTTLED
        accepted = frame_bytes
        for worker in range(load_word(namespace, NamespaceWord.WORKERS)):
            accepted += load_i64(load_word(namespace, NamespaceWord.ACCEPTED + worker))
        if accepted > until:
            store_word(result, ResultWord.BASE_OFFSET, NAMESPACE_FULL)
            return STATUS_EXHAUSTED
    return Status.OK


@kernel("int64(int64,int64)")
def _count_accepted(namespace: int, frame_bytes: int) -> int:
    """Count a frame for its namespace; a worker writes its own word only."""
    own = load_word(namespace, NamespaceWord.OWN)
    if own != 0:
        store_u64(own, load_i64(own) + frame_bytes)
    return 0


@kernel("int64(int64,int64,int64,int64,int64,int64)")
def _admit_frame(
    state: int, frame: int, partition_id: int, session: int, result: int, now_ns: int
) -> int:
    """One whole, checked frame; returns its status."""
    slot = -1
    if 0 < partition_id < load_word(state, StateWord.SLOT_OF_COUNT):
        slot = load_i64(load_word(state, StateWord.SLOT_OF) + partition_id * _W)
    store_word(result, ResultWord.PARTITION_SLOT, slot)
    if slot < 0:
        return Status.NOT_OWNER
    if load_u32(frame + At.MESSAGE_COUNT) > 1 and load_u32(frame + At.FRAME_BYTES) > _CAP:
        store_word(result, ResultWord.BASE_OFFSET, FRAME_TOO_LARGE)
        return STATUS_INVALID
    row = load_word(state, StateWord.PARTITIONS) + slot * _P_ROW
    closed = load_word(row, PartitionWord.MODE) == Mode.CLOSED
    if closed and load_word(row, PartitionWord.REFUSAL) == Status.TOPIC_DELETED:
        return Status.TOPIC_DELETED  # its producers are forgotten
    status = _find_sender(state, frame, row, session, result)
    if status != Status.OK:
        return status
    if closed:
        return load_word(row, PartitionWord.REFUSAL)
    limit = load_word(row, PartitionWord.MESSAGE_BYTES_MAX)
    if limit and _has_larger(frame, limit):
        store_word(result, ResultWord.BASE_OFFSET, MESSAGE_TOO_LARGE)
        return STATUS_INVALID
    namespace = load_word(row, PartitionWord.NAMESPACE)
    if namespace == 0:
        return _accept(state, frame, row, result, now_ns)
    size = load_u32(frame + At.FRAME_BYTES)
    status = _check_namespace(state, namespace, size, result)
    if status == Status.OK:
        status = _accept(state, frame, row, result, now_ns)
        if status == Status.OK:
            _count_accepted(namespace, size)
    return status


@kernel("int64(int64,int64,int64,int64,int64)")
def _begin_result(result: int, start: int, frame_bytes: int, status: int, fault: int) -> int:
    """Fill a row for a frame that was not looked at yet."""
    store_word(result, ResultWord.STATUS, status)
    store_word(result, ResultWord.BASE_OFFSET, fault)
    store_word(result, ResultWord.MESSAGE_COUNT, 0)
    store_word(result, ResultWord.FRAME_START, start)
    store_word(result, ResultWord.FRAME_BYTES, frame_bytes)
    store_word(result, ResultWord.LOG_POSITION, -1)
    return 0


@kernel("int64(int64,int64,int64,int64,int64,int64,int64)")
def admit(
    state: int,
    bundle: int,
    bundle_bytes: int,
    session: int,
    result_index: int,
    skip: int,
    now_ns: int,
) -> int:
    """Admit every frame of a bundle, from frame number `skip` on.

    Writes result rows from `result_index` on, one a frame (rows before `skip` are left alone), and
    returns the number of frames; or TOO_MANY_FRAMES, or a negative `Fault` of the bundle itself,
    with nothing admitted. A damaged frame refuses only itself, with status 3 and the fault in
    `base_offset`. At NEED_RESERVATION it stops: the rows behind are NOT_ADMITTED_YET.
    """
    count = read_bundle(bundle, bundle_bytes)
    if count >= 0 and result_index + count > load_word(state, StateWord.RESULTS_MAX):
        return TOO_MANY_FRAMES
    start = BUNDLE_HEADER_BYTES + count * BUNDLE_ENTRY_BYTES
    stopped = False
    for i in range(count):
        entry = bundle + BUNDLE_HEADER_BYTES + i * BUNDLE_ENTRY_BYTES
        size = load_u32(entry + 4)
        result = load_word(state, StateWord.RESULTS) + (result_index + i) * _O_ROW
        if i >= skip:
            _begin_result(result, start, size, NOT_ADMITTED_YET, 0)
            if not stopped:
                frame = bundle + start
                checked = check_frame(frame, size, CLIENT_FLAGS, 1)
                status = STATUS_INVALID
                if checked == size:
                    status = _admit_frame(state, frame, load_u32(entry), session, result, now_ns)
                else:
                    store_word(result, ResultWord.BASE_OFFSET, checked)
                store_word(result, ResultWord.STATUS, status)
                stopped = status == NEED_RESERVATION
        start += size
    return count


@kernel("int64(int64,int64)")
def undo(state: int, result: int) -> int:
    """Take an accepted frame back (its write failed). Call in reverse order of admission."""
    row = (
        load_word(state, StateWord.PARTITIONS)
        + load_word(result, ResultWord.PARTITION_SLOT) * _P_ROW
    )
    store_word(row, PartitionWord.NEXT_OFFSET, load_word(result, ResultWord.BASE_OFFSET))
    slot = load_word(result, ResultWord.PRODUCER_SLOT)
    producer = load_word(state, StateWord.PRODUCERS) + slot * _R_ROW
    if load_word(producer, ProducerWord.PARTITION_ID) != load_word(row, PartitionWord.PARTITION_ID):
        return 0  # it was forgotten meanwhile
    store_word(producer, ProducerWord.NEXT_SEQUENCE, load_word(result, ResultWord.BASE_SEQUENCE))
    store_word(
        producer, ProducerWord.BATCH_COUNT, load_word(producer, ProducerWord.BATCH_COUNT) - 1
    )
    return 0
