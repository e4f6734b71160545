r"""The ledger of a subscription: what is the case with each message that is not settled and below
`next_offset`. IO-free; kernels do what is done message by message.

    FRESH -> UNACKED -> SETTLED         handed out, acked
              |  \-> DELAYED | BLOCKED  given back: waits for its time, or for a decision
              v             |
             WAITING <------+ -> UNACKED   its consumer is gone, or the time has come

A message costs 6 bytes while its page is in use (10 with routes), a page 2,048 messages, a run of
settled ones nothing. Each delivery has a row: who has it, since when, how much of it is left.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from danube_fast.broker.ledger import kernels as k
from danube_fast.broker.ledger import records as ledger_records
from danube_fast.broker.ledger.layout import (
    ALL_SETTLED_NEW,
    HEAD_WORDS,
    NEED_PAGES,
    NEED_ROWS,
    NEED_TABLE,
    PAGE_MESSAGES,
    PAGE_SHIFT,
    ROW_WORDS,
    HeadWord,
    RowWord,
    State,
)
from danube_fast.broker.ledger.page_pool import PagePool
from danube_fast.errors import Internal, InvalidArgument
from danube_fast.frame.kernel import address_of, direct

__all__ = [
    "EVERYTHING",
    "Failed",
    "Ledger",
    "Rows",
    "Taken",
    "as_offsets",
    "runs_of",
]

_deliver, _extend = direct(k.deliver), direct(k.extend)
_select, _next_waiting, _attempts = (
    direct(k.select),
    direct(k.next_waiting),
    direct(k.read_attempts),
)
_settle, _collect, _wake = direct(k.settle), direct(ledger_records.collect), direct(k.wake)
_give_back, _take_back = direct(k.give_back), direct(k.take_back)
_state_at, _next_fresh = direct(k.state_at), direct(k.next_fresh)
_list_settled, _rewind = direct(ledger_records.list_settled), direct(k.rewind)
_list_attempts, _set_attempts = (
    direct(ledger_records.list_attempts),
    direct(ledger_records.set_attempts),
)

ROWS_AT_FIRST = 16
TABLE_AT_FIRST = 8
RANGES_AT_ONCE = 1024
MESSAGES_AT_ONCE = 4096
PAIR_BYTES = 16
"""Start and end of a range, int64 each."""
PAGES_PER_JUMP = 1 << 15
"""A long range is settled in steps, so that the table stays small."""
_FAR = 1 << 62

_scratch = np.zeros(4 * (MESSAGES_AT_ONCE + 1), np.int64)
"""Where kernels write runs and ranges, read at once: one for all ledgers, which belong to one thread."""
_SCRATCH_AT = int(_scratch.ctypes.data)

Rows = NDArray[np.int32]
Failed = tuple[int, int, int, bool]
"""Low, high, how often these messages failed, whether that was too often."""


class Taken(NamedTuple):
    """How far the application behind a consumer is in what that was sent: it has taken the messages of
    the first `frames` frames, and those below `offset` of the next."""

    frames: int
    offset: int


EVERYTHING = Taken(_FAR, 0)
"""Of a consumer that does not say."""

_CURSOR, _NEXT = int(HeadWord.CURSOR), int(HeadWord.NEXT)
_UNACKED, _WAITING, _SETTLED = int(HeadWord.UNACKED), int(HeadWord.WAITING), int(HeadWord.SETTLED)


class Ledger:
    """The messages of one subscription. Offsets below `cursor` are settled, those from `next_offset`
    on fresh, unless they were settled ahead of their time."""

    __slots__ = ("_head", "_pool", "_rows", "_table", "address", "words")

    def __init__(self, pool: PagePool, cursor: int) -> None:
        """`pool` has pages of ROUTED_PAGE_BYTES if messages are routed by key."""
        self._pool = pool
        self._head = np.zeros(HEAD_WORDS, np.int64)
        self.words = self._head.data
        self.address = int(self._head.ctypes.data)
        self._table = np.zeros(0, np.int64)
        self._rows = np.zeros((0, ROW_WORDS), np.int64)
        self.restart(cursor)
        self.words[HeadWord.RECORDED] = cursor

    def restart(self, offset: int) -> None:
        """Forget everything: all below `offset` is settled, the rest fresh."""
        self._free_pages()
        words = self.words
        buckets = words[HeadWord.BUCKETS]
        self._head[:] = 0
        words[_CURSOR] = words[_NEXT] = words[HeadWord.FIRST_WAITING] = offset
        words[HeadWord.RECORDED] = offset
        words[HeadWord.PAGE_SIZE] = self._pool.page_bytes
        words[HeadWord.DIRTY_LOW] = _FAR
        words[HeadWord.OLDEST] = words[HeadWord.NEWEST] = words[HeadWord.FREE_ROW] = -1
        words[HeadWord.BUCKETS] = buckets
        words[HeadWord.POOL] = self._pool.address
        self._table = np.zeros(0, np.int64)
        self._rows = np.zeros((0, ROW_WORDS), np.int64)

    def _free_pages(self) -> None:
        """Give every page back to the pool."""
        used = self._table[self._table > ALL_SETTLED_NEW]
        if len(used):
            self._pool.take_back(used)

    def move_to(self, offset: int) -> None:
        """Settle all below `offset`, in a ledger without unacked messages."""
        words = self.words
        words[_CURSOR] = words[_NEXT] = words[HeadWord.RECORDED] = offset

    # ------------------------------------------------------------ what is the case

    @property
    def cursor(self) -> int:
        """All below is settled."""
        return self.words[_CURSOR]

    @property
    def next_offset(self) -> int:
        """Nothing from here on was handed out."""
        return self.words[_NEXT]

    @next_offset.setter
    def next_offset(self, offset: int) -> None:
        self.words[_NEXT] = offset

    @property
    def unacked(self) -> int:
        """Messages that consumers have and have not acked."""
        return self.words[_UNACKED]

    @property
    def waiting(self) -> int:
        """Messages to be handed out before anything fresh."""
        return self.words[_WAITING]

    @property
    def delayed(self) -> int:
        """Messages that were given back and whose time has not come."""
        return self.words[HeadWord.DELAYED]

    @property
    def blocked(self) -> int:
        """Messages that failed too often."""
        return self.words[HeadWord.BLOCKED]

    @property
    def settled_ahead(self) -> int:
        """Messages above the cursor that are settled."""
        return self.words[_SETTLED]

    @property
    def is_plain(self) -> bool:
        """Nothing waits and nothing is settled ahead: what comes next goes out whole."""
        words = self.words
        return not words[_WAITING] and not words[_SETTLED]

    @property
    def is_dirty(self) -> bool:
        """`collect` has something to tell."""
        words = self.words
        return words[_CURSOR] > words[HeadWord.RECORDED] or bool(words[HeadWord.DIRTY_HIGH])

    def unacked_of(self, slot: int) -> int:
        """The same of one consumer."""
        mine = self._rows[:, RowWord.SLOT] == slot
        return int(self._rows[mine, RowWord.LEFT].sum())

    def state_of(self, offset: int) -> tuple[State, int]:
        """State of a message, and the slot that it is with if it is UNACKED (else -1)."""
        if offset < self.cursor:
            return State.SETTLED, -1
        state = int(_state_at(self.address, offset))
        if state < State.UNACKED:
            return State(state), -1
        return State.UNACKED, int(self._rows[state - State.UNACKED, RowWord.SLOT])

    def oldest(self) -> tuple[int, int] | None:
        """The row of the delivery that is unacked longest, and since when; None if there is none."""
        row = self.words[HeadWord.OLDEST]
        return None if row < 0 else (row, int(self._rows[row, RowWord.TIME_NS]))

    def slot_of(self, row: int) -> int:
        """Whom a delivery went to; -1: it is over."""
        return int(self._rows[row, RowWord.SLOT])

    def overdue(self, now_ns: int) -> tuple[list[int], int | None]:
        """Rows of deliveries that were extended and whose deadline is over, and the next deadline."""
        rows = self._rows
        extended = np.flatnonzero((rows[:, RowWord.SLOT] >= 0) & (rows[:, RowWord.TIME_NS] < 0))
        deadlines = rows[extended, RowWord.DEADLINE_NS]
        late = deadlines <= now_ns
        left = deadlines[~late]
        return extended[late].tolist(), int(left.min()) if len(left) else None

    # ------------------------------------------------------------ memory

    def _grow(self, code: int, low: int, high: int) -> None:
        """Make room for what a kernel asked for, about offsets [low, high)."""
        words = self.words
        if code == NEED_ROWS:
            self._grow_rows()
        elif code == NEED_PAGES:
            self._pool.grow((high - low) // PAGE_MESSAGES + 2)
        elif code == NEED_TABLE:
            first = words[_CURSOR] >> PAGE_SHIFT
            used = max(0, words[HeadWord.TABLE_PAGES] - (first - words[HeadWord.FIRST_PAGE]))
            wanted = max((high >> PAGE_SHIFT) + 1 - first, used)
            table = np.zeros(max(TABLE_AT_FIRST, 2 * wanted), np.int64)
            if used:
                table[:used] = self._table[len(self._table) - used :]
            self._table = table
            words[HeadWord.TABLE] = int(table.ctypes.data)
            words[HeadWord.FIRST_PAGE], words[HeadWord.TABLE_PAGES] = first, len(table)
        else:
            raise Internal(f"a kernel of the ledger returned {code}; please report this")

    def _grow_rows(self) -> None:
        used = len(self._rows)
        rows = np.zeros((max(ROWS_AT_FIRST, 2 * used), ROW_WORDS), np.int64)
        rows[:used] = self._rows
        rows[used:, RowWord.SLOT] = -1
        rows[used:, RowWord.FOLLOWING] = np.arange(used + 1, len(rows) + 1)
        rows[-1, RowWord.FOLLOWING] = self.words[HeadWord.FREE_ROW]
        self._rows = rows
        self.words[HeadWord.ROWS] = int(rows.ctypes.data)
        self.words[HeadWord.FREE_ROW] = used

    def call(self, kernel: Any, low: int, high: int, *arguments: int) -> int:
        """Call a kernel until it has all that it needs for offsets [low, high)."""
        while True:
            code: int = kernel(self.address, *arguments)
            if code >= 0:
                return code
            self._grow(code, low, high)

    # ------------------------------------------------------------ hand out

    def deliver(self, low: int, high: int, slot: int, time_ns: int, frame: int = 0) -> int:
        """Hand all of [low, high) to `slot`, in its frame number `frame`. The row of the
        delivery."""
        return self.call(_deliver, low, high, low, 0, high - low, slot, time_ns, frame)

    def deliver_rows(self, base: int, rows: Rows, slot: int, time_ns: int, frame: int = 0) -> int:
        """Hand messages base + rows (rising) to `slot`. The row of the delivery."""
        low, high = base + int(rows[0]), base + int(rows[-1]) + 1
        return self.call(
            _deliver, low, high, base, address_of(rows), len(rows), slot, time_ns, frame
        )

    def extend(self, low: int, high: int, slot: int, deadline_ns: int) -> None:
        """Give what is with `slot` of a range a deadline of its own."""
        low, high = max(low, self.cursor), min(high, self.next_offset)
        while low < high:
            low = self.call(_extend, low, high, low, high, slot, deadline_ns)

    def select(self, base: int, low: int, high: int, state: int) -> Rows:
        """Messages of [low, high) in that state, int32 less `base`."""
        rows = np.empty(max(0, high - low), np.int32)
        if not len(rows):
            return rows
        return rows[: _select(self.address, base, low, high, state, address_of(rows))]

    def rewind(self) -> int:
        """Make what waits fresh again. The first of it, or `next_offset` if nothing waits."""
        return int(_rewind(self.address))

    def first_fresh(self, low: int, high: int) -> int:
        """The first message of [low, high) that is fresh; `high` if there is none."""
        return int(_next_fresh(self.address, max(low, self.cursor), high))

    def first_waiting(self) -> int | None:
        """The first message that waits."""
        offset = _next_waiting(self.address)
        return None if offset < 0 else int(offset)

    def attempts(self, base: int, rows: Rows) -> NDArray[np.uint32] | None:
        """How often each message was delivered before (at most 255 is counted); None: none was."""
        counts = np.empty(len(rows), np.uint32)
        place = address_of(rows)
        largest = _attempts(self.address, base, place, len(rows), address_of(counts))
        return counts if largest else None

    def all_attempts(self, end: int) -> list[int]:
        """Flat [start, end, entry] of what is known of the attempts of messages below `end` that are not settled;
        the entry has deliveries in its low byte, failures in the next."""
        runs: list[int] = []
        low = self.cursor
        while count := _list_attempts(self.address, low, end, _SCRATCH_AT, RANGES_AT_ONCE):
            runs += _scratch[: 3 * count].tolist()
            low = runs[-2]
        return runs

    def set_attempts(self, runs: list[int]) -> None:
        """Note attempts of messages, which are fresh here, as `all_attempts` gave them elsewhere."""
        for low, high, entry in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
            self.call(_set_attempts, low, high, low, high, entry)

    # ------------------------------------------------------------ settle

    def ack(self, slot: int, pairs: list[int] | bytes) -> None:
        """Settle what is with `slot` of flat [start, end) pairs."""
        if not pairs:
            return
        ranges = as_offsets(pairs)
        _settle(self.address, address_of(ranges), len(ranges) // 2, slot)

    def settle(self, low: int, high: int) -> int:
        """Settle all of [low, high), with a consumer or not. How much of it was not settled."""
        words = self.words
        low = max(low, words[_CURSOR])
        before = words[HeadWord.EVER_SETTLED]
        while low < high:
            stop = min(high, ((low >> PAGE_SHIFT) + PAGES_PER_JUMP) << PAGE_SHIFT)
            ranges = np.array([low, stop], np.int64)
            self.call(_settle, low, stop, address_of(ranges), 1, -1)
            low = stop
        return words[HeadWord.EVER_SETTLED] - before

    def collect(self) -> list[int]:
        """Flat [start, end) pairs of what was settled since the last call, RANGES_AT_ONCE at most;
        empty: that was all."""
        count = _collect(self.address, _SCRATCH_AT, RANGES_AT_ONCE)
        pairs: list[int] = _scratch[: 2 * count].tolist()
        return pairs

    def settled_pairs(self) -> list[int]:
        """Flat [start, end) pairs of all that is settled above the cursor."""
        pairs: list[int] = []
        low = self.cursor
        end = (self.words[HeadWord.FIRST_PAGE] + len(self._table)) << PAGE_SHIFT
        while low < end:
            count = _list_settled(self.address, low, end, _SCRATCH_AT, RANGES_AT_ONCE)
            if not count:
                break
            pairs += _scratch[: 2 * count].tolist()
            low = pairs[-1]
        return pairs

    # ------------------------------------------------------------ give back

    def give_back(self, slot: int, taken: Taken = EVERYTHING) -> None:
        """Let all that is with `slot` wait; what its application has taken, once more delivered."""
        _give_back(self.address, slot, len(self._rows), *taken)

    def fail_taken(self, slot: int, taken: Taken, failures_max: int) -> list[Failed]:
        """Let what is with `slot` and its application has taken fail, as in `fail`."""
        runs: list[Failed] = []
        for row, frame in self._rows_of(slot, 0, taken.frames):
            low, high = self._rows[row, RowWord.START : RowWord.END + 1].tolist()
            if frame == taken.frames:
                high = min(high, taken.offset)
            runs += self._fail(low, high, -1, row, failures_max)
        return runs

    def taken_next(self, slot: int, taken: Taken, count: int) -> Taken:
        """Where an application would be that has taken the next `count` messages that are with `slot`."""
        rows = self._rows_of(slot, taken.frames, _FAR)
        for frame, group in itertools.groupby(rows, key=lambda each: each[1]):
            parts = []
            for row, _ in group:
                low, high = self._rows[row, RowWord.START : RowWord.END + 1].tolist()
                low = max(low, self.cursor, taken.offset if frame == taken.frames else 0)
                parts.append(low + self.select(low, low, high, State.UNACKED + row))
            offsets = np.sort(np.concatenate(parts))
            if len(offsets) >= count:
                return Taken(frame, int(offsets[count - 1]) + 1) if count else taken
            count -= len(offsets)
            taken = Taken(frame + 1, 0)
        return taken

    def _rows_of(self, slot: int, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Row and frame of the deliveries of frames from `first` to `last` that went to `slot`, in the order
        of the frames."""
        frames, slots = self._rows[:, RowWord.FRAME], self._rows[:, RowWord.SLOT]
        mine = np.flatnonzero((slots == slot) & (frames >= first) & (frames <= last))
        order = mine[np.argsort(frames[mine], kind="stable")]
        return ((int(row), int(self._rows[row, RowWord.FRAME])) for row in order)

    def wake(self, low: int, high: int, state: State = State.DELAYED) -> int:
        """Let what is in that state in [low, high) wait for delivery; how much that is."""
        return int(_wake(self.address, low, high, state))

    def fail(self, slot: int, pairs: list[int], failures_max: int) -> list[Failed]:
        """Let what is with `slot` of flat [start, end) pairs fail: DELAYED, or BLOCKED if it failed more
        than `failures_max` times."""
        runs: list[Failed] = []
        for at in range(0, len(pairs) - 1, 2):
            runs += self._fail(pairs[at], pairs[at + 1], slot, -1, failures_max)
        return runs

    def fail_row(self, row: int, failures_max: int) -> list[Failed]:
        """Let all that is unacked of one delivery fail."""
        low, high = self._rows[row, RowWord.START : RowWord.END + 1].tolist()
        return self._fail(low, high, -1, row, failures_max)

    def _fail(self, low: int, high: int, slot: int, row: int, failures_max: int) -> list[Failed]:
        runs = []
        low, high = max(low, self.cursor), min(high, self.next_offset)
        for at in range(low, high, MESSAGES_AT_ONCE):
            stop = min(high, at + MESSAGES_AT_ONCE)
            count = _take_back(self.address, at, stop, slot, row, failures_max, _SCRATCH_AT)
            for start, end, failures, blocked in _scratch[: 4 * count].reshape(-1, 4).tolist():
                runs.append((start, end, failures, bool(blocked)))
        return runs


def as_offsets(pairs: list[int] | bytes) -> NDArray[np.int64]:
    """Flat pairs that a client sent, as numbers or as the bytes of int64, for kernels. Raises
    InvalidArgument."""
    if isinstance(pairs, bytes):
        if len(pairs) % PAIR_BYTES:
            raise InvalidArgument(
                f"{len(pairs)} bytes are no pairs of offsets, which have {PAIR_BYTES}; send [start, end) as int64"
            )
        return np.frombuffer(pairs, np.int64)
    try:
        return np.array(pairs, np.int64)
    except OverflowError:
        raise InvalidArgument("an offset is at most 2**63 - 1; ack what was delivered") from None


def runs_of(rows: Rows, base: int) -> list[tuple[int, int]]:
    """Rising rows of a frame as ranges [start, end) of offsets."""
    if not len(rows):
        return []
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    starts = base + rows[np.concatenate(([0], breaks))].astype(np.int64)
    ends = base + rows[np.concatenate((breaks - 1, [len(rows) - 1]))].astype(np.int64) + 1
    return list(zip(starts.tolist(), ends.tolist(), strict=True))
