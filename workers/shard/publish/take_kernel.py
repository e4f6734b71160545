r"""Kernels that take plain PUBLISHes out of rings, and admit them: the first part of a worker's turn.

    rings -- [PUBLISH, request], bundle --> bytes object --admit--> result row, taken row
         \- anything else, damage, no room --> stays first in its ring: the ordinary way handles it

A link is served one message in a round, as all others are. Where a frame is not simply accepted, or a rate is charged
for it, nothing is admitted behind it before Python has dealt with it.
"""

from __future__ import annotations

from danube_fast.broker.admission.admission import admit
from danube_fast.broker.admission.layout import (
    PARTITION_WORDS,
    RESULT_WORDS,
    PartitionWord,
    ResultWord,
    StateWord,
)
from danube_fast.errors import Status
from danube_fast.frame.cpython import AT_BYTES_DATA
from danube_fast.frame.kernel import kernel
from danube_fast.frame.layout import BUNDLE_ENTRY_BYTES, HEADER_BYTES
from danube_fast.frame.memory import load_i64, load_u8, load_word, store_word
from danube_fast.frame.system import wall_ns
from danube_fast.frame.unpack_kernels import keep_bytes
from danube_fast.net.msgpack_kernel import FIXED_ARRAY, read_unsigned
from danube_fast.net.protocol import Publish, op_code
from danube_fast.ring.duplex_kernel import (
    PAIR_BODY,
    PAIR_BODY_BYTES,
    PAIR_HEAD,
    PAIR_HEAD_BYTES,
    WAITS,
    _arm,
    peek_pair,
    release_pair,
    word_of,
)
from danube_fast.ring.layout import WORD_BYTES
from danube_fast.ring.spsc_kernel import EMPTY
from danube_fast.workers.shard.publish.turn_layout import (
    AT_LINKS,
    AT_TAKEN,
    LINK_BYTES,
    TAKEN_BYTES,
    JobWord,
    LinkStatus,
    LinkWord,
    Stage,
    TakenWord,
)

__all__ = ["take_rounds"]

_FRAME_BYTES_MIN = HEADER_BYTES + BUNDLE_ENTRY_BYTES
_PUBLISH = op_code(Publish)
_OK = int(Status.OK)
_MORE, _ORDINARY = int(LinkStatus.MORE), int(LinkStatus.ORDINARY)
_RESULT_BYTES, _PARTITION_BYTES = RESULT_WORDS * WORD_BYTES, PARTITION_WORDS * WORD_BYTES
_AT_PAIR = JobWord.PAIR * WORD_BYTES
_AT_NUMBER, _AT_SCRATCH = JobWord.NUMBER * WORD_BYTES, JobWord.SCRATCH * WORD_BYTES


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
def take_rounds(job: int) -> int:
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
