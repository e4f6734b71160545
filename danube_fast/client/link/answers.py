"""Answers that threads wait for: a row of words for each publish, in memory that the leader fills without the GIL. The
heartbeat of a connection has one too.

    thread: KEY, push ------------------> worker -----> leader: STATUS, OFFSET, then STATE
            sleeps on STATE <----------- futex -------- ANSWERED

A thread sleeps on the state of its own row, so none wakes for the answer of another.

    STATE     WAITING --thread--> ASLEEP --leader--> ANSWERED
              TOLD: Python took the answer in another way        LEAD: no thread reads the sockets, be the leader

KEY, the request and its link in one word, is written by the thread, under the pump's lock and before the frame is
pushed; STATUS and OFFSET by the leader alone. A row is used again when its thread has read it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from danube_fast.client.values.message import MessageId
from danube_fast.clock import SECOND_NS
from danube_fast.errors import DanubeError
from danube_fast.frame.kernel import direct, kernel
from danube_fast.frame.memory import store_u64
from danube_fast.frame.system import futex_wait, futex_wake
from danube_fast.ring.atomics import compare_exchange, load_acquire, load_relaxed, store_relaxed
from danube_fast.ring.layout import WORD_BYTES

__all__ = [
    "ANSWERED",
    "REQUEST_BITS",
    "Answers",
    "Ticket",
    "answer",
    "find_row",
    "is_answered",
    "is_known",
]

ROWS = 256
"""Threads of one client that wait for an ack of their own; more wait for those of all."""
ROW_WORDS = 8
_ROW_BYTES = ROW_WORDS * WORD_BYTES
STATE, KEY, STATUS, OFFSET, SECONDS, NANOSECONDS = range(0, 6 * WORD_BYTES, WORD_BYTES)
REQUEST_BITS = 44
"""Low bits of a KEY, above them the link's number: requests and links that do not fit have no rows."""
_REQUESTS, _LINKS = 1 << REQUEST_BITS, 1 << (63 - REQUEST_BITS)
WAITING, ASLEEP, LEAD, ANSWERED, TOLD = range(5)


@kernel("int64(int64)")
def is_known(row: int) -> int:
    """1 if the answer is there. Pairs with the exchange in _set_state."""
    return 1 if load_acquire(row + STATE) >= ANSWERED else 0


@kernel("int64(int64,int64)")
def _set_state(row: int, state: int) -> int:
    """Set the state, and wake the thread if it sleeps. What was stored in the row before comes before it."""
    while True:
        old = load_relaxed(row + STATE)
        if compare_exchange(row + STATE, old, state) != 0:
            return futex_wake(row + STATE) if old == ASLEEP else 0


@kernel("int64(int64,int64,int64)")
def answer(row: int, status: int, offset: int) -> int:
    """Leader: hand an answer over."""
    store_u64(row + STATUS, status)
    store_u64(row + OFFSET, offset)
    return _set_state(row, ANSWERED)


@kernel("int64(int64,int64,int64)")
def find_row(table: int, link: int, request: int) -> int:
    """The row that waits for that request of that link, 0 if none does."""
    row, key = table + WORD_BYTES, (link << REQUEST_BITS) + request
    if request <= 0 or request >= _REQUESTS:
        return 0
    for _ in range(load_relaxed(table)):
        if load_relaxed(row + KEY) == key:
            return row
        row += _ROW_BYTES
    return 0


@kernel("int64(int64,int64)")
def _expect(row: int, key: int) -> int:
    """Thread: wait for that answer from now on; 0 = for none."""
    store_relaxed(row + STATE, WAITING)
    # the frame that is pushed next reaches the leader only as its answer, so behind this
    store_relaxed(row + KEY, key)
    return row


@kernel("int64(int64,int64)", nogil=True)
def _follow(row: int, limit_ns: int) -> int:
    """Thread: sleep until the state changes or the time is up; the state."""
    if compare_exchange(row + STATE, WAITING, ASLEEP) != 0:
        store_u64(row + SECONDS, limit_ns // SECOND_NS)
        store_u64(row + NANOSECONDS, limit_ns % SECOND_NS)
        futex_wait(row + STATE, ASLEEP, row + SECONDS)
        compare_exchange(row + STATE, ASLEEP, WAITING)
    state = load_acquire(row + STATE)
    if state == LEAD:
        compare_exchange(row + STATE, LEAD, WAITING)
    return state


@kernel("int64(int64)")
def _hand_over(row: int) -> int:
    """Tell a thread to be the leader, in its sleep or on its way there; 0 if its answer is known."""
    if compare_exchange(row + STATE, ASLEEP, LEAD) != 0:
        futex_wake(row + STATE)
        return 1
    compare_exchange(row + STATE, WAITING, LEAD)
    return 1 if load_relaxed(row + STATE) == LEAD else 0


is_answered, _tell, _wait_for = direct(is_known), direct(_set_state), direct(_expect)
_sleep, _wake = direct(_follow), direct(_hand_over)
_KEY, _STATUS, _OFFSET = (at // WORD_BYTES for at in (KEY, STATUS, OFFSET))
_WORD_SHIFT = WORD_BYTES.bit_length() - 1


class Ticket(msgspec.Struct, eq=False):
    """Stands among the callbacks for a call that waits for one message's ack."""

    done: bool = False
    row: int = 0
    """Address of the row of its thread, if that sleeps on one."""
    listener: Callable[[], object] | None = None
    """Called when the outcome is known."""
    message_id: MessageId | None = None
    _error: DanubeError | None = None

    def complete(self, message_id: MessageId | None, error: DanubeError | None) -> None:
        """Note the outcome. Under the pump's lock."""
        self.message_id, self._error, self.done = message_id, error, True
        if self.row:
            _tell(self.row, TOLD)
        if self.listener is not None:
            self.listener()

    def is_complete(self) -> bool:
        """Whether the outcome is known."""
        return self.done

    def result(self) -> MessageId:
        """Return the id, or raise the error."""
        if self.message_id is None:
            raise self.failure()
        return self.message_id

    def failure(self) -> Exception:
        """Return the error, a fresh one: several may wait for one frame."""
        error = self._error
        return (
            TypeError("the outcome is not known yet") if error is None else type(error)(str(error))
        )


class Answers:
    """The rows of one client. Under the pump's lock, but for `sleep`."""

    def __init__(self) -> None:
        self._memory = np.zeros(1 + ROWS * ROW_WORDS, np.int64)
        self._words = self._memory.data
        self.address: int = self._memory.ctypes.data
        """Of the table: how many rows were ever used, then the rows. It stays as long as the client."""
        self._free: list[int] = []
        self.given_up: list[int] = []
        """Rows without an answer: a leader in its kernel may have found one, and answer it yet."""
        self.sleeping: dict[Ticket, None] = {}
        """Tickets whose threads sleep on their rows, in the order in which they came."""

    def expect(self, ticket: Ticket, link: int, request: int) -> bool:
        """Give the ticket a row for the answer to that request; False if there is none left."""
        if request >= _REQUESTS or link >= _LINKS:
            return False
        if self._free:
            row = self._free.pop()
        else:
            used = self._words[0]
            if used == ROWS:
                return False
            row = self.address + WORD_BYTES + used * _ROW_BYTES
            _wait_for(row, 0)
            self._words[0] = used + 1
        ticket.row = _wait_for(row, (link << REQUEST_BITS) + request)
        return True

    def take(self, ticket: Ticket) -> tuple[int, int, int] | None:
        """Take the row back: request, status and offset, if the leader has filled them in."""
        row, ticket.row = ticket.row, 0
        place = (row - self.address) >> _WORD_SHIFT
        words = self._words
        if words[place] != ANSWERED:
            self.given_up.append(row)
            _wait_for(row, 0)
            return None
        answer = words[place + _KEY] % _REQUESTS, words[place + _STATUS], words[place + _OFFSET]
        self._free.append(row)
        _wait_for(row, 0)
        return answer

    def no_leader_looks(self) -> None:
        """Let all rows that were taken back be used again."""
        self._free += self.given_up
        self.given_up = []

    def sleep(self, ticket: Ticket, limit_ns: int) -> None:
        """Sleep until the answer is there, the thread shall lead, or the time is up. Without the lock."""
        _sleep(ticket.row, limit_ns)

    def hand_over(self) -> None:
        """Tell one of the threads that sleep to be the leader, unless one was told already."""
        for ticket in self.sleeping:
            if _wake(ticket.row):
                return

    def wake_all(self) -> None:
        """Wake all of them: the client was closed."""
        for ticket in self.sleeping:
            _wake(ticket.row)
