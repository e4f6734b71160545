r"""A leader's view while it sleeps, without the GIL: acks that threads wait for, and all that is for Python.

    rings ---- PUBLISHED or PONG, all its requests have rows, no errors ---> the rows of `answers.py`
          \--- anything else ----> stays in the ring; the leader wakes up with its descriptor
    other descriptors -----------> the leader wakes up with them

One leader at a time reads the rings, and only while it sleeps; awake it reads them in Python, under the pump's lock.
The rings that it looks at are held by the lookout, so they stay mapped until it has left the kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from danube_fast.client.link.answers import is_known
from danube_fast.client.link.published import hand_over
from danube_fast.client.values.limits import SLICE_NS
from danube_fast.clock import MILLISECOND_NS, Clock
from danube_fast.frame.kernel import direct, kernel
from danube_fast.frame.memory import load_i32, load_i64, load_u32, memory_copy, store_u64
from danube_fast.frame.system import EPOLL_AT_DATA, EPOLL_EVENT_BYTES, clock_ns, epoll_wait
from danube_fast.ring.duplex import Duplex
from danube_fast.ring.duplex_kernel import (
    CAPACITY,
    ENDED,
    IN,
    WAITS,
    _answer_room,
    _arm,
    _disarm,
    _hear,
    word_of,
)
from danube_fast.ring.layout import (
    RECORD_HEADER_BYTES,
    RECORD_KIND_SHIFT,
    RECORD_LENGTH_MASK,
    RING_HEADER_BYTES,
    WORD_BYTES,
)
from danube_fast.ring.spsc_kernel import EMPTY, _front, _release

__all__ = ["INTERRUPTED", "Link", "Lookout"]

EPOLL, SPIN_NS, ANSWERS, LINKS, FOUND, NUMBER, CLOCK = range(0, 7 * WORD_BYTES, WORD_BYTES)
FIRST_LINK = CLOCK + 2 * WORD_BYTES
_LINK_BYTES = 3 * WORD_BYTES
_AT_ROW, _AT_NUMBER = WORD_BYTES, 2 * WORD_BYTES
_EVENTS_MAX = 16
_RECORD_BYTES_MAX = 4096
"""A PUBLISHED of so many bytes at most is read here."""
_RECORD_WORDS = _RECORD_BYTES_MAX // WORD_BYTES
_EVENTS_WORDS = _EVENTS_MAX * EPOLL_EVENT_BYTES // WORD_BYTES + 1
_LEAD_BYTES = 8
INTERRUPTED = -1
"""A signal came, which Python may have a handler for."""


@kernel("int64(int64)")
def _record_at(lookout: int) -> int:
    """Where a record is copied to, behind the links."""
    return lookout + FIRST_LINK + load_i64(lookout + LINKS) * _LINK_BYTES


@kernel("int64(int64,int64)")
def _find(lookout: int, fd: int) -> int:
    """Note a descriptor for Python, once."""
    count = load_i64(lookout + FOUND)
    places = _record_at(lookout) + _RECORD_BYTES_MAX + _EVENTS_WORDS * WORD_BYTES
    for index in range(count):
        if load_i64(places + index * WORD_BYTES) == fd:
            return count
    store_u64(places + count * WORD_BYTES, fd)
    store_u64(lookout + FOUND, count + 1)
    return count + 1


@kernel("int64(int64,int64)")
def _take_answers(lookout: int, link: int) -> int:
    """Hand over the acks that lie first in a ring; 1 if what follows is for Python."""
    row = load_i64(link + _AT_ROW)
    ring, capacity = word_of(row, IN), word_of(row, CAPACITY)
    copy = _record_at(lookout)
    while True:
        found = _front(ring, capacity)
        if found < 0:
            return 0 if found == EMPTY else 1
        size = found & RECORD_LENGTH_MASK
        if size > _RECORD_BYTES_MAX or size < _LEAD_BYTES:
            return 1
        place = found >> RECORD_KIND_SHIFT
        memory_copy(copy, ring + RING_HEADER_BYTES + RECORD_HEADER_BYTES + place, size)
        if load_u32(copy) != 1 or load_u32(copy + 4) != size - _LEAD_BYTES:
            return 1
        at, number = copy + _LEAD_BYTES, load_i64(link + _AT_NUMBER)
        answers = load_i64(lookout + ANSWERS)
        if hand_over(answers, number, at, copy + size, lookout + NUMBER) == 0:
            return 1
        _release(ring, capacity, found)
        _answer_room(row)


@kernel("int64(int64)")
def _look(lookout: int) -> int:
    """Look into all rings; how many descriptors are for Python by now."""
    link = lookout + FIRST_LINK
    for _ in range(load_i64(lookout + LINKS)):
        if _take_answers(lookout, link) != 0:
            _find(lookout, load_i64(link))
        link += _LINK_BYTES
    return load_i64(lookout + FOUND)


@kernel("int64(int64)")
def _arm_all(lookout: int) -> int:
    """Ask all workers for signals; 0 if something came meanwhile."""
    link = lookout + FIRST_LINK
    armed = 1
    for _ in range(load_i64(lookout + LINKS)):
        armed &= _arm(load_i64(link + _AT_ROW))
        link += _LINK_BYTES
    return armed


@kernel("int64(int64)")
def _disarm_all(lookout: int) -> int:
    link = lookout + FIRST_LINK
    for _ in range(load_i64(lookout + LINKS)):
        _disarm(load_i64(link + _AT_ROW))
        link += _LINK_BYTES
    return 0


@kernel("int64(int64,int64)")
def _poll(lookout: int, timeout_ms: int) -> int:
    """Sleep on the descriptors, and take the signals of the rings; how many events there were, or less than 0."""
    events = _record_at(lookout) + _RECORD_BYTES_MAX
    count: int = epoll_wait(load_i64(lookout + EPOLL), events, _EVENTS_MAX, timeout_ms)
    for index in range(count):
        fd = load_i32(events + index * EPOLL_EVENT_BYTES + EPOLL_AT_DATA)
        link = lookout + FIRST_LINK
        left = load_i64(lookout + LINKS)
        while left > 0 and load_i64(link) != fd:
            link += _LINK_BYTES
            left -= 1
        if left == 0:
            _find(lookout, fd)
            continue
        row = load_i64(link + _AT_ROW)
        if _hear(row) == ENDED or word_of(row, WAITS) != 0:
            _find(lookout, fd)
    return count


@kernel("int64(int64,int64,int64)", nogil=True)
def _watch(lookout: int, own: int, limit_ns: int) -> int:
    """Sleep until the row `own` (0: none) is answered, something is for Python, or the time is up: how many
    descriptors were found, or INTERRUPTED."""
    store_u64(lookout + FOUND, 0)
    now = clock_ns(lookout + CLOCK)
    end, spin_end = now + limit_ns, now + load_i64(lookout + SPIN_NS)
    while True:
        found = _look(lookout)
        if found > 0 or (own != 0 and is_known(own) != 0):
            return found
        now = clock_ns(lookout + CLOCK)
        if now >= end:
            return 0
        if now < spin_end:
            if _poll(lookout, 0) < 0:
                return INTERRUPTED
            continue
        if _arm_all(lookout) == 0:
            continue
        count = _poll(lookout, (end - now + MILLISECOND_NS - 1) // MILLISECOND_NS)
        _disarm_all(lookout)
        if count < 0:
            return INTERRUPTED


_sleep = direct(_watch)


class Link(NamedTuple):
    """Rings that a leader looks at."""

    descriptor: int
    duplex: Duplex
    number: int
    """Stands in the rows of answers that come this way."""


class Lookout:
    """The memory of one leader's sleep: what it looks at, which does not change, and what it found."""

    def __init__(self, epoll: int, answers: int, spin_ns: int, links: Sequence[Link]) -> None:
        """Over an epoll's descriptor and the table of `Answers`."""
        first = FIRST_LINK // WORD_BYTES
        self._found_at = first + 3 * len(links) + _RECORD_WORDS + _EVENTS_WORDS
        self._memory = np.zeros(self._found_at + len(links) + _EVENTS_MAX, np.int64)
        self._words = self._memory.data
        self._address: int = self._memory.ctypes.data
        self._links = links
        self.sleep: Callable[[int, int], int] = functools.partial(_sleep, self._address)
        """Sleep until a row is answered (0: none), something is there for Python, a signal has come or a time in
        nanoseconds is up; how many descriptors are to be read, or INTERRUPTED. Without the pump's lock, one thread at
        a time."""
        for at, value in (
            (EPOLL, epoll),
            (SPIN_NS, spin_ns),
            (ANSWERS, answers),
            (LINKS, len(links)),
        ):
            self._words[at // WORD_BYTES] = value
        for index, (descriptor, duplex, number) in enumerate(links):
            place = first + 3 * index
            self._words[place], self._words[place + 1] = descriptor, duplex.row
            self._words[place + 2] = number

    def wait(self, limit_ns: int, clock: Clock) -> int:
        """Sleep so without a row, for longer than a kernel may: between its slices Python hears of signals."""
        found, left_ns, end_ns = 0, limit_ns, clock.monotonic_ns() + limit_ns
        for _ in range(0, limit_ns, SLICE_NS):
            found = self.sleep(0, min(left_ns, SLICE_NS))
            left_ns = end_ns - clock.monotonic_ns()
            if found or left_ns <= 0:
                break
        return found

    def found(self, count: int) -> Sequence[int]:
        """Return the descriptors to read that a sleep has found."""
        return self._words[self._found_at : self._found_at + count]
