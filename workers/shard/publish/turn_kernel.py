"""Kernels of a worker's turn: take plain PUBLISHes and serve them, and wait for what comes next.

    step   does all that can be done without waiting
    wait   sleeps, without the GIL, until a client signals, a sync ends, or something else wants the worker
    pause  waits so for what is under way

`wait_and_step` does both in one call.

The parts of a step stand in `take_kernel.py` and `serve_kernel.py`.
"""

from __future__ import annotations

import zmq

from danube_fast.clock import MICROSECOND_NS, MILLISECOND_NS, SECOND_NS
from danube_fast.frame.cpython import enter_gil, leave_gil
from danube_fast.frame.kernel import direct, kernel
from danube_fast.frame.memory import load_i32, load_i64, load_u16, load_word, store_u64, store_word
from danube_fast.frame.system import (
    EPOLL_AT_DATA,
    EPOLL_EVENT_BYTES,
    clock_ns,
    epoll_wait,
    ppoll,
    read,
    sched_yield,
)
from danube_fast.net.port_kernels import get_events
from danube_fast.ring.duplex_kernel import SESSION, WAITS, _arm, word_of
from danube_fast.ring.layout import WORD_BYTES
from danube_fast.wal.sync import fault_of
from danube_fast.workers.shard.publish.serve_kernel import (
    end_synced,
    is_due,
    look,
    note_sync,
    write_group,
)
from danube_fast.workers.shard.publish.siblings import (
    QUICK_SYNC_NS,
    SIBLINGS_MIN,
    SIBLINGS_WAIT_NS,
)
from danube_fast.workers.shard.publish.take_kernel import take_rounds
from danube_fast.workers.shard.publish.turn_layout import (
    AT_LINKS,
    EVENTS_MAX,
    LINK_BYTES,
    Flag,
    JobWord,
    LinkStatus,
    LinkWord,
)

__all__ = ["pause", "step", "wait", "wait_and_step"]

_POLLIN = int(zmq.POLLIN)
_UNDERWAY, _STOPPED, _FULL, _OTHER, _LATE, _MISSING = map(int, Flag)
_MORE, _ORDINARY = int(LinkStatus.MORE), int(LinkStatus.ORDINARY)
_SYNC_NS_MAX = 2 * MILLISECOND_NS
"""A sync that takes longer is waited for by the ordinary turn."""
_TURN_NS_MAX = 5 * MILLISECOND_NS
"""A turn that has waited for so long takes nothing more, and ends what is under way."""
_AWAY_NS_MAX = 500 * MICROSECOND_NS
"""A client that was served needs no longer for its message; what keeps the core for so long is other work."""
_UNHEARD_NS_MAX = MILLISECOND_NS
"""A client whose publish waits for a sync is heard again behind so much of it: it may send something else."""
_YIELD_BACKOFF_MIN, _YIELD_BACKOFF_MAX = 64, 64 * 1024
_POLLED_ALL, _POLLED_BELL = 3, 1
_POLL_BYTES, _AT_REVENTS = 8, 6
_AT_SCRATCH = JobWord.SCRATCH * WORD_BYTES
_AT_POLLED, _AT_TIMEOUT = JobWord.POLLED * WORD_BYTES, JobWord.TIMEOUT * WORD_BYTES


@kernel("void(int64)")
def _yield_core(job: int) -> None:
    """Let clients that were just served run now, if they wait for this core: what follows is the worker's own
    bookkeeping. Where other work takes the core instead, it is not offered for a while, twice as long each time."""
    left = load_word(job, JobWord.YIELD_PAUSE)
    if left > 0:
        store_word(job, JobWord.YIELD_PAUSE, left - 1)
        return
    began_ns = clock_ns(job + _AT_SCRATCH)
    sched_yield()
    following = load_word(job, JobWord.YIELD_BACKOFF)
    if clock_ns(job + _AT_SCRATCH) - began_ns > _AWAY_NS_MAX:
        following = min(max(2 * following, _YIELD_BACKOFF_MIN), _YIELD_BACKOFF_MAX)
        store_word(job, JobWord.YIELD_PAUSE, following)
    else:
        following -= following >> 3
    store_word(job, JobWord.YIELD_BACKOFF, following)


@kernel("int64(int64)")
def _unheard_ns(job: int) -> int:
    """How long clients whose publishes wait for the sync that runs need not be heard."""
    if load_word(job, JobWord.AWAITED) == 0 or load_word(job, JobWord.SIBLINGS) < SIBLINGS_MIN:
        return 0
    if load_word(job, JobWord.SYNC_NS) >= QUICK_SYNC_NS:
        return 0
    return load_word(job, JobWord.SINCE_NS) + _UNHEARD_NS_MAX - clock_ns(job + _AT_SCRATCH)


@kernel("int64(int64)")
def _ask_for_signals(job: int) -> int:
    """Ask the clients whose rings were found empty to signal what comes; 1 if something has come meanwhile.

    Where many publish one by one, and syncs are quick, those whose publishes wait for syncs are not asked at the
    beginning of one: what they publish waits for its end anyway, and is looked for then. So neither side pays for a signal.
    """
    has_come = not_asked = 0
    waits = _unheard_ns(job) > 0
    for index in range(load_word(job, JobWord.LINKS)):
        link = job + AT_LINKS + index * LINK_BYTES
        if load_word(link, LinkWord.STATUS) != LinkStatus.EMPTY:
            continue
        if waits and load_word(link, LinkWord.WAITS_FOR_SYNC) != 0:
            not_asked = 1
            continue
        if _arm(load_word(link, LinkWord.SIDE)) != 0:
            store_word(link, LinkWord.STATUS, LinkStatus.ARMED)
        else:
            store_word(link, LinkWord.STATUS, LinkStatus.MORE)
            has_come = 1
    store_word(job, JobWord.NOT_ASKED, not_asked)
    return has_come


@kernel("int64(int64)")
def _advance(job: int) -> int:
    """Take, serve and write what there is; flags of what is left."""
    end_synced(job)
    flags = 0
    if load_word(job, JobWord.IS_CLOSING) == 0 and load_word(job, JobWord.IS_STOPPED) == 0:
        if load_word(job, JobWord.LOOKED) == load_word(job, JobWord.TAKEN):
            store_word(job, JobWord.CODE, take_rounds(job))
        if look(job) != 0:
            return _MISSING
        code = load_word(job, JobWord.CODE)
        if code == LinkStatus.STOP:
            store_word(job, JobWord.IS_STOPPED, 1)
        elif code == LinkStatus.ORDINARY:
            flags |= _OTHER
    if is_due(job) != 0:
        write_group(job)
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
def _step(job: int) -> int:
    """Do all that can be done without waiting; flags of what is left."""
    store_word(job, JobWord.STEP_NS, clock_ns(job + _AT_SCRATCH))
    flags: int = _advance(job)
    is_alone = load_word(job, JobWord.TAKEN) == 1 and load_word(job, JobWord.LOOKED) == 1
    if is_alone and flags & (_MISSING | _UNDERWAY | _STOPPED) == 0:
        _yield_core(job)  # it was served
    while flags & _MISSING == 0 and _ask_for_signals(job) != 0:
        flags = _advance(job)
    return flags


@kernel("int64(int64)")
def _hear_links(job: int) -> int:
    """Take the signals of clients, and list them; OTHER if a client has come or ended, of which epoll tells again. It
    tells of a signal once, so none is taken without room in the list."""
    events, flags = load_word(job, JobWord.EVENTS), 0
    room = load_word(job, JobWord.LINKS_MAX) - load_word(job, JobWord.LINKS)
    if room <= 0:
        return _OTHER
    count = epoll_wait(load_word(job, JobWord.EPOLL), events, min(room, EVENTS_MAX), 0)
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
        if side == 0:
            flags = _OTHER
            continue
        store_word(link, LinkWord.SIDE, side)
        store_word(link, LinkWord.SESSION, word_of(side, SESSION))
        is_open = word_of(side, SESSION) != 0 and word_of(side, WAITS) == 0
        store_word(link, LinkWord.STATUS, _MORE if is_open else _ORDINARY)
        if place == links:
            store_word(link, LinkWord.WAITS_FOR_SYNC, 0)
            store_word(link, LinkWord.HEARTBEAT, 0)
            store_word(job, JobWord.LINKS, links + 1)
    return flags


@kernel("int64(int64)")
def _hear_router(job: int) -> int:
    """1 if the ROUTER has messages that kernels may take. ZeroMQ's descriptor tells only of what comes from now on."""
    router = load_word(job, JobWord.ROUTER)
    if router == 0 or load_word(job, JobWord.ROUTED) == _ORDINARY:
        return 0
    events = get_events(load_word(job, JobWord.FUNCTIONS), router, job + _AT_SCRATCH)
    if events >= 0 and events & _POLLIN == 0:
        return 0
    store_word(job, JobWord.ROUTED, _MORE)
    return 1


@kernel("int64(int64,int64)", nogil=True)
def _wait(job: int, timeout_ns: int) -> int:
    """Sleep until a client signals, a sync ends, or something else wants the worker (OTHER), or the time is up."""
    store_u64(job + _AT_TIMEOUT, timeout_ns // SECOND_NS)
    store_u64(job + _AT_TIMEOUT + WORD_BYTES, timeout_ns % SECOND_NS)
    count = _POLLED_BELL if load_word(job, JobWord.IS_CLOSING) != 0 else _POLLED_ALL
    if count == _POLLED_ALL and _hear_router(job) != 0:  # what was sent may have swallowed the edge
        return 0
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
        if load_u16(polled + 2 * _POLL_BYTES + _AT_REVENTS) != 0 and _hear_router(job) == 0:
            flags |= _OTHER if load_word(job, JobWord.ROUTER) == 0 else 0
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
    waited_ns = now_ns - load_word(job, JobWord.SINCE_NS)
    left_ns = (_SYNC_NS_MAX if is_awaited else SIBLINGS_WAIT_NS) - waited_ns
    if left_ns <= 0:
        if is_awaited:
            note_sync(job, waited_ns)
        return _LATE if is_awaited else 0
    if load_word(job, JobWord.NOT_ASKED) != 0:
        left_ns = min(left_ns, max(_UNHEARD_NS_MAX - waited_ns, 0))
    return _wait(job, left_ns)


@kernel("int64(int64,int64)")
def _wait_and_step(job: int, timeout_ns: int) -> int:
    """Wait as `wait` does, and do a step with the GIL if a client has signalled: flags of both. Behind a step that has
    only answered heartbeats it waits on, and Python hears of them at the end."""
    end_ns, left_ns = clock_ns(job + _AT_SCRATCH) + timeout_ns, timeout_ns
    while True:
        answered = load_word(job, JobWord.HEARTBEATS)
        thread = leave_gil()
        flags: int = _wait(job, left_ns)
        enter_gil(thread)
        is_heard = load_word(job, JobWord.LINKS) != 0 or load_word(job, JobWord.ROUTED) == _MORE
        if not is_heard:
            return flags
        flags |= _step(job)
        if flags != 0 or load_word(job, JobWord.TAKEN) != 0:
            return flags
        if load_word(job, JobWord.HEARTBEATS) == answered:
            return flags
        left_ns = end_ns - clock_ns(job + _AT_SCRATCH)
        # each step looks at all links
        if left_ns <= 0 or load_word(job, JobWord.LINKS) >= EVENTS_MAX:
            return flags


pause, step, wait = direct(_pause), direct(_step), direct(_wait)
wait_and_step = direct(_wait_and_step)
