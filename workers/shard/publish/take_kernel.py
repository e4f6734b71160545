r"""Kernels that take plain PUBLISHes out of rings and from the ROUTER, and admit them: the first part of a worker's turn.

    rings ---------- [PING, request, []] ---------> PONG, once in a turn for each link
    rings, ROUTER -- [PUBLISH, request], bundle --> bytes object --admit--> result row, taken row
           \-------- anything else, damage, no room --> the ordinary way handles it

It stays first in its ring; what comes from the ROUTER was received by then, and is handed over in as many parts as
were. A link is served one message in a round, as all others are, and the ROUTER as many as there are links. Where a frame is not simply accepted, or a rate is charged
for it, nothing is admitted behind it before Python has dealt with it.
"""

from __future__ import annotations

import errno

from danube_fast.broker.admission.admission import admit
from danube_fast.broker.admission.layout import (
    PARTITION_WORDS,
    RESULT_WORDS,
    PartitionWord,
    ResultWord,
    StateWord,
)
from danube_fast.clock import MILLISECOND_NS
from danube_fast.errors import Status
from danube_fast.frame.cpython import AT_BYTES_DATA, AT_LIST_ITEMS, POINTER_BYTES
from danube_fast.frame.kernel import kernel
from danube_fast.frame.layout import BUNDLE_ENTRY_BYTES, HEADER_BYTES
from danube_fast.frame.memory import load_i64, load_u8, load_word, store_u64, store_word
from danube_fast.frame.system import clock_ns, wall_ns
from danube_fast.frame.unpack_kernels import keep_bytes
from danube_fast.net.msgpack_kernel import FIXED_ARRAY, read_unsigned
from danube_fast.net.port_kernels import (
    MORE_SHIFT,
    SIZE_MASK,
    close_message,
    data_of,
    receive_into,
)
from danube_fast.net.protocol import Ping, Publish, op_code
from danube_fast.ring.duplex_kernel import (
    OTHER,
    PAIR_BODY,
    PAIR_BODY_BYTES,
    PAIR_HEAD,
    PAIR_HEAD_BYTES,
    PAIR_HEAD_BYTES_MAX,
    SESSION,
    WAITS,
    peek_pair,
    peek_part,
    release_pair,
    word_of,
)
from danube_fast.ring.layout import WORD_BYTES
from danube_fast.ring.spsc_kernel import EMPTY
from danube_fast.workers.shard.publish.turn_layout import (
    AT_BODY_MESSAGE,
    AT_COMMAND,
    AT_COMMAND_MESSAGE,
    AT_LINKS,
    AT_SENDER,
    AT_TAKEN,
    COMMAND_ROOM,
    LEFT_PLACE,
    LINK_BYTES,
    NOT_RECEIVED,
    SENDER_ROOM,
    TAKEN_BYTES,
    JobWord,
    LinkStatus,
    LinkWord,
    Stage,
    TakenWord,
)
from danube_fast.workers.shard.ring_out import PLAIN_BYTES_MAX, pong_one
from danube_fast.workers.shard.routed_peers import LAST_LINK, LEFT, find_peer

__all__ = ["HEARTBEAT_NS_MIN", "take_rounds"]

_FRAME_BYTES_MIN = HEADER_BYTES + BUNDLE_ENTRY_BYTES
_PUBLISH, _PING = op_code(Publish), op_code(Ping)
HEARTBEAT_NS_MIN = MILLISECOND_NS
"""A client that beats faster is not answered by kernels."""
_LEFT_MAX = 32
"""So many publishes of a peer are left to Python behind a large one, which was copied in vain."""
_OK = int(Status.OK)
_NOTHING = -errno.EAGAIN
_MORE, _ORDINARY = int(LinkStatus.MORE), int(LinkStatus.ORDINARY)
_RESULT_BYTES, _PARTITION_BYTES = RESULT_WORDS * WORD_BYTES, PARTITION_WORDS * WORD_BYTES
_AT_PAIR = JobWord.PAIR * WORD_BYTES
_AT_NUMBER, _AT_SCRATCH = JobWord.NUMBER * WORD_BYTES, JobWord.SCRATCH * WORD_BYTES


@kernel("int64(int64,int64,int64)")
def _read_request(job: int, head: int, size: int) -> int:
    """Request of a PUBLISH, which is kept in the job; 0 if it is no such command."""
    end = head + size
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


@kernel("int64(int64)")
def _is_full(job: int) -> int:
    """1 if this turn takes nothing more."""
    return 1 if load_word(job, JobWord.TAKEN) >= load_word(job, JobWord.TAKEN_LIMIT) else 0


@kernel("int64(int64,int64)")
def _has_room(job: int, size: int) -> int:
    """1 if a bundle of that size may be taken."""
    frames = size // _FRAME_BYTES_MIN + 1  # no bundle of that size has more
    results_max = load_word(load_word(job, JobWord.STATE), StateWord.RESULTS_MAX)
    if size > load_word(job, JobWord.ROOM) or load_word(job, JobWord.RESULT) + frames > results_max:
        return 0
    return 1


@kernel("int64(int64,int64)")
def _answer_heartbeat(job: int, link: int) -> int:
    """Take a PING that reports nothing and answer it: MORE. ORDINARY for every other message, without room for the
    answer, and for a second PING in a step, or within a millisecond: clients that send nothing else would keep the kernel
    for ever."""
    side, pair = load_word(link, LinkWord.SIDE), job + _AT_PAIR
    found = peek_part(side, pair)
    if found < 0 or word_of(side, WAITS) != 0:
        return LinkStatus.ORDINARY
    now_ns, last_ns = clock_ns(job + _AT_SCRATCH), load_word(link, LinkWord.HEARTBEAT)
    if last_ns >= load_word(job, JobWord.STEP_NS) or now_ns - last_ns < HEARTBEAT_NS_MIN:
        return LinkStatus.ORDINARY
    head, number = pair + PAIR_HEAD, job + _AT_NUMBER
    end = head + load_i64(pair + PAIR_HEAD_BYTES)
    if end < head + 4 or load_u8(head) != FIXED_ARRAY + 3 or load_u8(head + 1) != _PING:
        return LinkStatus.ORDINARY
    if read_unsigned(head + 2, end - 1, number) != end - 1 or load_u8(end - 1) != FIXED_ARRAY:
        return LinkStatus.ORDINARY
    if pong_one(side, load_i64(number)) < 0:
        return LinkStatus.ORDINARY
    release_pair(side, found)
    store_word(link, LinkWord.HEARTBEAT, now_ns)
    store_word(job, JobWord.HEARTBEATS, load_word(job, JobWord.HEARTBEATS) + 1)
    return LinkStatus.MORE


@kernel("int64(int64,int64)")
def _take_one(job: int, link: int) -> int:
    """Take the oldest message of a link: MORE or STOP if it was taken, else EMPTY or ORDINARY."""
    side, pair = load_word(link, LinkWord.SIDE), job + _AT_PAIR
    found = peek_pair(side, pair)
    if found == EMPTY and word_of(side, WAITS) == 0:
        return LinkStatus.EMPTY
    if found == OTHER:
        return _answer_heartbeat(job, link)
    head_bytes = load_i64(pair + PAIR_HEAD_BYTES)
    if found < 0 or _read_request(job, pair + PAIR_HEAD, head_bytes) == 0:
        return LinkStatus.ORDINARY
    size = load_i64(pair + PAIR_BODY_BYTES)
    if _has_room(job, size) == 0:
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
def _peer_in_hand(job: int) -> int:
    """The row of the peer whose message is in hand; 0 if it has none."""
    size = load_word(job, JobWord.SENDER_FOUND) & SIZE_MASK
    sender = load_word(job, JobWord.MESSAGE) + AT_SENDER
    return find_peer(load_word(job, JobWord.PEERS), sender, size)


@kernel("int64(int64)")
def _receive_command(job: int) -> int:
    """Receive who sends the next message of the ROUTER, and its command: MORE, and both are in hand; ARMED if there is
    none, or ORDINARY if ZeroMQ has failed, or the command is not to be received here."""
    functions, router = load_word(job, JobWord.FUNCTIONS), load_word(job, JobWord.ROUTER)
    message = load_word(job, JobWord.MESSAGE)
    store_u64(message + AT_SENDER, 0)
    found = receive_into(functions, router, message, SENDER_ROOM)
    if found < 0:
        return LinkStatus.ARMED if found == _NOTHING else LinkStatus.ORDINARY
    store_word(job, JobWord.SENDER_FOUND, found)
    store_word(job, JobWord.IN_HAND, 1)
    if load_word(job, JobWord.PROVES) != 0 and _peer_in_hand(job) == 0:
        store_word(job, JobWord.COMMAND_FOUND, NOT_RECEIVED)
        return LinkStatus.ORDINARY
    found = receive_into(functions, router, message + AT_COMMAND_MESSAGE, COMMAND_ROOM)
    store_word(job, JobWord.COMMAND_FOUND, found)
    if found < 0:
        return LinkStatus.ORDINARY
    store_word(job, JobWord.IN_HAND, 2)
    return LinkStatus.MORE


@kernel("int64(int64)")
def _sender_in_hand(job: int) -> int:
    """The row of the peer whose PUBLISH is in hand; 0 if its body is not to be received here."""
    message, found = load_word(job, JobWord.MESSAGE), load_word(job, JobWord.COMMAND_FOUND)
    size = found & SIZE_MASK
    if found >> MORE_SHIFT == 0 or size > PAIR_HEAD_BYTES_MAX:
        return 0
    if _read_request(job, message + AT_COMMAND, size) == 0:
        return 0
    peer = _peer_in_hand(job)
    if peer == 0:
        return 0
    left = word_of(peer, LEFT)
    if left != 0:
        store_u64(peer + LEFT * WORD_BYTES, left - 1)
        return 0
    return peer if load_word(job, JobWord.LINKS) < load_word(job, JobWord.LINKS_MAX) else 0


@kernel("int64(int64)")
def _receive_body(job: int) -> int:
    """Receive the bundle in hand as a bytes object: its address, or 0."""
    functions, router = load_word(job, JobWord.FUNCTIONS), load_word(job, JobWord.ROUTER)
    message = load_word(job, JobWord.MESSAGE) + AT_BODY_MESSAGE
    found = receive_into(functions, router, message, -1)
    if found < 0:
        return 0
    store_word(job, JobWord.BODY_FOUND, found)
    store_word(job, JobWord.IN_HAND, 3)
    holder = keep_bytes(
        load_word(job, JobWord.HOLDERS), load_word(job, JobWord.TAKEN),
        data_of(functions, message), found & SIZE_MASK, load_word(job, JobWord.NONE),
    )  # fmt: skip
    close_message(functions, message)
    return holder


@kernel("int64(int64)")
def _leave_body(job: int) -> int:
    """Put the bundle in hand behind the taken ones, which may become more: ORDINARY."""
    items = load_i64(load_word(job, JobWord.HOLDERS) + AT_LIST_ITEMS)
    holder = items + load_word(job, JobWord.TAKEN) * POINTER_BYTES
    left = items + LEFT_PLACE * POINTER_BYTES
    none = load_i64(left)
    store_u64(left, load_i64(holder))
    store_u64(holder, none)
    return LinkStatus.ORDINARY


@kernel("int64(int64,int64)")
def _link_of(job: int, peer: int) -> int:
    """The link of a peer of the ROUTER in this turn."""
    links, number = load_word(job, JobWord.LINKS), word_of(peer, LAST_LINK)
    link = job + AT_LINKS + number * LINK_BYTES
    if number < links and load_word(link, LinkWord.SIDE) == peer:
        return link
    link = job + AT_LINKS + links * LINK_BYTES
    store_word(link, LinkWord.SIDE, peer)
    store_word(link, LinkWord.SESSION, word_of(peer, SESSION))
    store_word(link, LinkWord.STATUS, LinkStatus.ARMED)  # the ROUTER tells of what comes
    store_word(link, LinkWord.WAITS_FOR_SYNC, 0)
    store_word(link, LinkWord.HEARTBEAT, 0)
    store_u64(peer + LAST_LINK * WORD_BYTES, links)
    store_word(job, JobWord.LINKS, links + 1)
    return link


@kernel("int64(int64)")
def _take_routed(job: int) -> int:
    """Take the next message of the ROUTER: MORE or STOP if it was taken, ARMED if there is none, or ORDINARY if it is
    in hand, for Python."""
    code = _receive_command(job)
    if code != _MORE:
        return code
    peer = _sender_in_hand(job)
    if peer == 0:
        return _ORDINARY
    holder = _receive_body(job)
    found = load_word(job, JobWord.BODY_FOUND)
    size = found & SIZE_MASK
    if size > PLAIN_BYTES_MAX:
        store_u64(peer + LEFT * WORD_BYTES, _LEFT_MAX)
    if holder == 0 or found >> MORE_SHIFT != 0 or _has_room(job, size) == 0:
        return _leave_body(job)
    store_word(job, JobWord.IN_HAND, 0)
    return _admit_taken(job, _link_of(job, peer), holder + AT_BYTES_DATA, size)


@kernel("int64(int64)")
def _take_share(job: int) -> int:
    """Take as many messages of the ROUTER as there are links, or fewer: what `_take_routed` said of the last one."""
    code = load_word(job, JobWord.ROUTED)
    for _ in range(max(load_word(job, JobWord.LINKS), 1)):
        if code != _MORE or _is_full(job) != 0:
            break
        code = _take_routed(job)
        if code != LinkStatus.STOP:
            store_word(job, JobWord.ROUTED, code)
    return code


@kernel("int64(int64)")
def take_rounds(job: int) -> int:
    """Take messages of all links in turn, until nothing is left but what the ordinary way has to look at; MORE, STOP
    behind one that Python has to look at, or ORDINARY if one was left."""
    is_busy, is_first, code_of_all = True, True, _MORE
    while is_busy:
        is_busy = False
        for index in range(load_word(job, JobWord.LINKS)):
            link = job + AT_LINKS + index * LINK_BYTES
            status = load_word(link, LinkWord.STATUS)
            if status == LinkStatus.ORDINARY:
                code_of_all = _ORDINARY
            if status != LinkStatus.MORE and (status != LinkStatus.EMPTY or not is_first):
                continue
            if _is_full(job) != 0:
                return code_of_all
            code = _take_one(job, link)
            if code == LinkStatus.STOP:
                return code
            store_word(link, LinkWord.STATUS, code)
            is_busy = is_busy or code == LinkStatus.MORE
            if code == LinkStatus.ORDINARY:
                code_of_all = code
        code = _take_share(job)
        if code == LinkStatus.STOP:
            return code
        if code == LinkStatus.ORDINARY:
            code_of_all = code
        if _is_full(job) != 0:
            return code_of_all
        is_busy, is_first = is_busy or code == LinkStatus.MORE, False
    return code_of_all
