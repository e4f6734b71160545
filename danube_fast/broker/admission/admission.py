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
    PartitionWord,
    ProducerWord,
    ResultWord,
    StateWord,
    WindowWord,
)
from danube_fast.errors import AlreadyExists, InvalidArgument, Status
from danube_fast.frame.bundle import read_bundle
from danube_fast.frame.check import check_frame
from danube_fast.frame.kernel import kernel
from danube_fast.frame.layout import (
    AT_BASE_SEQUENCE,
    AT_CODEC,
    AT_FLAGS,
    AT_FRAME_BYTES,
    AT_MESSAGE_COUNT,
    AT_PRODUCER_EPOCH,
    AT_PRODUCER_ID,
    AT_RAW_BODY_BYTES,
    BUNDLE_ENTRY_BYTES,
    BUNDLE_HEADER_BYTES,
    CLIENT_FLAGS,
    CODEC_NONE,
    FRAME_BYTES_CAP,
    HEADER_BYTES,
    ID_PAYLOAD_OFFSETS,
)
from danube_fast.frame.memory import load_i32, load_i64, load_u8, load_u16, load_u32, store_u64
from danube_fast.frame.stamp import stamp
from danube_fast.frame.unpack_kernels import find_buffer

__all__ = ["NEED_RESERVATION", "NOT_ADMITTED_YET", "admit", "find_producer", "insert_producer"]

# Statuses of a result row, as kernels want them; the last two never leave the worker.
STATUS_OK = int(Status.OK)
STATUS_DUPLICATE = int(Status.DUPLICATE)
STATUS_INVALID = InvalidArgument.code
STATUS_TOO_OLD = AlreadyExists.code
STATUS_OUT_OF_SEQUENCE = int(Status.OUT_OF_SEQUENCE)
STATUS_FENCED = int(Status.FENCED)
STATUS_TOPIC_DELETED = int(Status.TOPIC_DELETED)
STATUS_NOT_OWNER = int(Status.NOT_OWNER)
STATUS_THROTTLED = int(Status.THROTTLED)
NEED_RESERVATION = 100
"""The partition has no reserved offsets left: reserve more and admit the rest again."""
NOT_ADMITTED_YET = 101
OVERLAP = -1001
"""In `base_offset` of an invalid frame: some of its messages were accepted before, some not."""
FRAME_TOO_LARGE = -1002
"""Likewise: more than one message in a frame above FRAME_BYTES_CAP."""
MESSAGE_TOO_LARGE = -1003
"""Likewise: a payload is larger than the topic's policy allows."""
TOO_MANY_FRAMES = -1000
"""Returned by `admit`: the result table has no room for this bundle now."""

_W = WORD_BYTES
_P_NEXT_OFFSET = int(PartitionWord.NEXT_OFFSET) * _W
_P_APPEND_TIME = int(PartitionWord.APPEND_TIME_NS) * _W
_P_ID = int(PartitionWord.PARTITION_ID) * _W
_P_MODE = int(PartitionWord.MODE) * _W
_P_REFUSAL = int(PartitionWord.REFUSAL) * _W
_P_LOG = int(PartitionWord.LOG_SLOT) * _W
_P_RESERVED = int(PartitionWord.RESERVED_UNTIL) * _W
_P_MESSAGE_MAX = int(PartitionWord.MESSAGE_BYTES_MAX) * _W
_P_ROW = PARTITION_WORDS * _W
_L_ID = int(LogWord.LOG_ID) * _W
_L_POSITION = int(LogWord.POSITION) * _W
_L_EPOCH = int(LogWord.EPOCH) * _W
_L_SYNCED = int(LogWord.SYNCED_POSITION) * _W
_L_ROW = LOG_WORDS * _W
_R_PARTITION = int(ProducerWord.PARTITION_ID) * _W
_R_PRODUCER = int(ProducerWord.PRODUCER_ID) * _W
_R_EPOCH = int(ProducerWord.EPOCH) * _W
_R_SESSION = int(ProducerWord.SESSION) * _W
_R_NEXT = int(ProducerWord.NEXT_SEQUENCE) * _W
_R_BATCHES = int(ProducerWord.BATCH_COUNT) * _W
_R_USED = int(ProducerWord.LAST_USED_NS) * _W
_R_ROW = PRODUCER_WORDS * _W
_B_SEQUENCE = int(WindowWord.BASE_SEQUENCE) * _W
_B_COUNT = int(WindowWord.MESSAGE_COUNT) * _W
_B_OFFSET = int(WindowWord.BASE_OFFSET) * _W
_B_ROW = WINDOW_WORDS * _W
_O_STATUS = int(ResultWord.STATUS) * _W
_O_PARTITION = int(ResultWord.PARTITION_SLOT) * _W
_O_OFFSET = int(ResultWord.BASE_OFFSET) * _W
_O_COUNT = int(ResultWord.MESSAGE_COUNT) * _W
_O_START = int(ResultWord.FRAME_START) * _W
_O_BYTES = int(ResultWord.FRAME_BYTES) * _W
_O_POSITION = int(ResultWord.LOG_POSITION) * _W
_O_PRODUCER = int(ResultWord.PRODUCER_SLOT) * _W
_O_SEQUENCE = int(ResultWord.BASE_SEQUENCE) * _W
_O_TIME = int(ResultWord.APPEND_TIME_NS) * _W
_O_FLAGS = int(ResultWord.FLAGS) * _W
_O_ROW = RESULT_WORDS * _W
_S_PARTITIONS = int(StateWord.PARTITIONS) * _W
_S_SLOT_OF = int(StateWord.SLOT_OF) * _W
_S_SLOT_OF_COUNT = int(StateWord.SLOT_OF_COUNT) * _W
_S_LOGS = int(StateWord.LOGS) * _W
_S_PRODUCERS = int(StateWord.PRODUCERS) * _W
_S_WINDOWS = int(StateWord.WINDOWS) * _W
_S_HASH = int(StateWord.HASH) * _W
_S_HASH_MASK = int(StateWord.HASH_MASK) * _W
_S_RESULTS = int(StateWord.RESULTS) * _W
_S_RESULTS_MAX = int(StateWord.RESULTS_MAX) * _W
_ARRIVED = SESSION_ARRIVED
_MODE_CLOSED = int(Mode.CLOSED)
_MODE_LOGGED = int(Mode.LOGGED)
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
    table = load_i64(state + _S_HASH)
    mask = load_i64(state + _S_HASH_MASK)
    producers = load_i64(state + _S_PRODUCERS)
    cell = _cell_of(mask, partition_id, producer_id)
    while True:
        slot = load_i64(table + cell * _W) - 1
        if slot < 0:
            return slot
        row = producers + slot * _R_ROW
        if (
            load_i64(row + _R_PRODUCER) == producer_id
            and load_i64(row + _R_PARTITION) == partition_id
        ):
            return slot
        cell = (cell + 1) & mask


@kernel("int64(int64,int64)")
def insert_producer(state: int, slot: int) -> int:
    """Enter `producers[slot]`, which is filled in already, into the hash table."""
    table = load_i64(state + _S_HASH)
    mask = load_i64(state + _S_HASH_MASK)
    row = load_i64(state + _S_PRODUCERS) + slot * _R_ROW
    cell = _cell_of(mask, load_i64(row + _R_PARTITION), load_i64(row + _R_PRODUCER))
    while load_i64(table + cell * _W) != 0:
        cell = (cell + 1) & mask
    store_u64(table + cell * _W, slot + 1)
    return cell


@kernel("int64(int64,int64,int64,int64,int64)")
def remember_batch(
    state: int, slot: int, base_sequence: int, message_count: int, base_offset: int
) -> int:
    """Put a batch into a producer's window and move its next sequence behind it."""
    row = load_i64(state + _S_PRODUCERS) + slot * _R_ROW
    batches = load_i64(row + _R_BATCHES)
    entry = load_i64(state + _S_WINDOWS) + (slot * DEDUP_BATCHES + batches % DEDUP_BATCHES) * _B_ROW
    store_u64(entry + _B_SEQUENCE, base_sequence)
    store_u64(entry + _B_COUNT, message_count)
    store_u64(entry + _B_OFFSET, base_offset)
    store_u64(row + _R_BATCHES, batches + 1)
    store_u64(row + _R_NEXT, base_sequence + message_count)
    return 0


@kernel("int64(int64,int64,int64)")
def original_offset(state: int, slot: int, base_sequence: int) -> int:
    """Offset that a duplicate's first message got, or -1 if its batch is no longer remembered."""
    row = load_i64(state + _S_PRODUCERS) + slot * _R_ROW
    batches = load_i64(row + _R_BATCHES)
    known = min(batches, DEDUP_BATCHES)
    for back in range(1, known + 1):
        place = slot * DEDUP_BATCHES + (batches - back) % DEDUP_BATCHES
        entry = load_i64(state + _S_WINDOWS) + place * _B_ROW
        behind = base_sequence - load_i64(entry + _B_SEQUENCE)
        if 0 <= behind < load_i64(entry + _B_COUNT):
            return load_i64(entry + _B_OFFSET) + behind
    return -1


@kernel("int64(int64,int64,int64,int64,int64)")
def _find_sender(state: int, frame: int, partition_row: int, session: int, result: int) -> int:
    """Find the sender of a frame, and whether it is its turn: fills producer, sequence and, for a duplicate, the
    offset into `result`; returns a status."""
    partition_id = load_i64(partition_row + _P_ID)
    slot = find_producer(state, partition_id, load_i64(frame + AT_PRODUCER_ID))
    store_u64(result + _O_PRODUCER, slot)
    sequence = load_i64(frame + AT_BASE_SEQUENCE)
    store_u64(result + _O_SEQUENCE, sequence)
    if slot < 0:
        return STATUS_FENCED
    row = load_i64(state + _S_PRODUCERS) + slot * _R_ROW
    opener = load_i64(row + _R_SESSION)
    if load_u32(frame + AT_PRODUCER_EPOCH) != load_i64(row + _R_EPOCH):
        return STATUS_FENCED
    if opener != session:
        return STATUS_NOT_OWNER if opener == _ARRIVED else STATUS_FENCED
    expected = load_i64(row + _R_NEXT)
    if sequence == expected:
        return STATUS_OK
    if sequence > expected or sequence < 0:
        return STATUS_OUT_OF_SEQUENCE
    if sequence + load_u32(frame + AT_MESSAGE_COUNT) > expected:
        store_u64(result + _O_OFFSET, OVERLAP)
        return STATUS_INVALID
    offset = original_offset(state, slot, sequence)
    store_u64(result + _O_OFFSET, offset)
    return STATUS_DUPLICATE if offset >= 0 else STATUS_TOO_OLD


@kernel("int64(int64,int64,int64,int64,int64)")
def _accept(state: int, frame: int, partition_row: int, result: int, now_ns: int) -> int:
    """Give the frame its offsets, its place and its broker half; returns a status."""
    count = load_u32(frame + AT_MESSAGE_COUNT)
    offset = load_i64(partition_row + _P_NEXT_OFFSET)
    if offset + count > load_i64(partition_row + _P_RESERVED):
        return NEED_RESERVATION
    log = load_i64(state + _S_LOGS) + load_i64(partition_row + _P_LOG) * _L_ROW
    position = -1
    if load_i64(partition_row + _P_MODE) == _MODE_LOGGED:
        position = load_i64(log + _L_POSITION)
        if position < 0:
            return -position
        store_u64(log + _L_POSITION, position + load_i64(result + _O_BYTES))
    append_time = max(now_ns, load_i64(partition_row + _P_APPEND_TIME))
    stamp(
        frame,
        load_i64(log + _L_ID),
        max(position, 0),
        offset,
        append_time,
        load_i64(log + _L_SYNCED),
        load_i64(partition_row + _P_ID),
        load_i64(log + _L_EPOCH),
        count,
    )
    store_u64(partition_row + _P_NEXT_OFFSET, offset + count)
    store_u64(partition_row + _P_APPEND_TIME, append_time)
    store_u64(result + _O_OFFSET, offset)
    store_u64(result + _O_COUNT, count)
    store_u64(result + _O_POSITION, position)
    store_u64(result + _O_TIME, append_time)
    store_u64(result + _O_FLAGS, load_u16(frame + AT_FLAGS))
    slot = load_i64(result + _O_PRODUCER)
    remember_batch(state, slot, load_i64(result + _O_SEQUENCE), count, offset)
    producer = load_i64(state + _S_PRODUCERS) + slot * _R_ROW
    store_u64(producer + _R_USED, now_ns)
    return STATUS_OK


@kernel("int64(int64,int64)")
def _has_larger(frame: int, limit: int) -> int:
    """1 if a payload of the frame has more than `limit` bytes. Those of a compressed frame are only
    looked at together: the mean must be within the limit."""
    raw, count = load_u32(frame + AT_RAW_BODY_BYTES), load_u32(frame + AT_MESSAGE_COUNT)
    if raw <= limit:
        return 0
    if load_u8(frame + AT_CODEC) != CODEC_NONE:
        return 1 if raw > (limit + _OVERHEAD) * count else 0
    offsets = frame + HEADER_BYTES + find_buffer(frame + HEADER_BYTES, ID_PAYLOAD_OFFSETS)
    for i in range(count):
        if load_i32(offsets + 4 * (i + 1)) - load_i32(offsets + 4 * i) > limit:
            return 1
    return 0


@kernel("int64(int64,int64,int64,int64,int64,int64)")
def _admit_frame(
    state: int, frame: int, partition_id: int, session: int, result: int, now_ns: int
) -> int:
    """One whole, checked frame; returns its status."""
    slot = -1
    if 0 < partition_id < load_i64(state + _S_SLOT_OF_COUNT):
        slot = load_i64(load_i64(state + _S_SLOT_OF) + partition_id * _W)
    store_u64(result + _O_PARTITION, slot)
    if slot < 0:
        return STATUS_NOT_OWNER
    if load_u32(frame + AT_MESSAGE_COUNT) > 1 and load_u32(frame + AT_FRAME_BYTES) > _CAP:
        store_u64(result + _O_OFFSET, FRAME_TOO_LARGE)
        return STATUS_INVALID
    row = load_i64(state + _S_PARTITIONS) + slot * _P_ROW
    closed = load_i64(row + _P_MODE) == _MODE_CLOSED
    if closed and load_i64(row + _P_REFUSAL) == STATUS_TOPIC_DELETED:
        return STATUS_TOPIC_DELETED  # its producers are forgotten
    status = _find_sender(state, frame, row, session, result)
    if status != STATUS_OK:
        return status
    if closed:
        return load_i64(row + _P_REFUSAL)
    limit = load_i64(row + _P_MESSAGE_MAX)
    if limit and _has_larger(frame, limit):
        store_u64(result + _O_OFFSET, MESSAGE_TOO_LARGE)
        return STATUS_INVALID
    return _accept(state, frame, row, result, now_ns)


@kernel("int64(int64,int64,int64,int64,int64)")
def _begin_result(result: int, start: int, frame_bytes: int, status: int, fault: int) -> int:
    """Fill a row for a frame that was not looked at yet."""
    store_u64(result + _O_STATUS, status)
    store_u64(result + _O_OFFSET, fault)
    store_u64(result + _O_COUNT, 0)
    store_u64(result + _O_START, start)
    store_u64(result + _O_BYTES, frame_bytes)
    store_u64(result + _O_POSITION, -1)
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
    if count >= 0 and result_index + count > load_i64(state + _S_RESULTS_MAX):
        return TOO_MANY_FRAMES
    start = BUNDLE_HEADER_BYTES + count * BUNDLE_ENTRY_BYTES
    stopped = False
    for i in range(count):
        entry = bundle + BUNDLE_HEADER_BYTES + i * BUNDLE_ENTRY_BYTES
        size = load_u32(entry + 4)
        result = load_i64(state + _S_RESULTS) + (result_index + i) * _O_ROW
        if i >= skip:
            _begin_result(result, start, size, NOT_ADMITTED_YET, 0)
            if not stopped:
                frame = bundle + start
                checked = check_frame(frame, size, CLIENT_FLAGS, 1)
                status = STATUS_INVALID
                if checked == size:
                    status = _admit_frame(state, frame, load_u32(entry), session, result, now_ns)
                else:
                    store_u64(result + _O_OFFSET, checked)
                store_u64(result + _O_STATUS, status)
                stopped = status == NEED_RESERVATION
        start += size
    return count


@kernel("int64(int64,int64)")
def undo(state: int, result: int) -> int:
    """Take an accepted frame back (its write failed). Call in reverse order of admission."""
    row = load_i64(state + _S_PARTITIONS) + load_i64(result + _O_PARTITION) * _P_ROW
    store_u64(row + _P_NEXT_OFFSET, load_i64(result + _O_OFFSET))
    slot = load_i64(result + _O_PRODUCER)
    producer = load_i64(state + _S_PRODUCERS) + slot * _R_ROW
    if load_i64(producer + _R_PARTITION) != load_i64(row + _P_ID):
        return 0  # it was forgotten meanwhile
    store_u64(producer + _R_NEXT, load_i64(result + _O_SEQUENCE))
    store_u64(producer + _R_BATCHES, load_i64(producer + _R_BATCHES) - 1)
    return 0
