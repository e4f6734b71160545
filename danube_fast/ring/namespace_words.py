"""Words of a namespace in shared memory, by which all workers together keep to its quota.

    row of publishes    rates | level: bytes that all workers may accept, since the broker's start, before it is full
    row of dispatches   rates
    row of each worker  bytes that it accepted since then | handles that it has open, with its epoch

The rows lie in the bucket table. Each word of a worker's row is written by that worker alone, so that a kill leaves
nothing half done: what it accepted stays counted, and its handles end with its epoch.
"""

from __future__ import annotations

import xxhash

from danube_fast.frame.kernel import direct, kernel
from danube_fast.ring.atomics import compare_exchange, load_acquire
from danube_fast.ring.buckets import BucketTable
from danube_fast.ring.control import ControlBlock
from danube_fast.ring.layout import AT_BUCKET_BYTES, AT_BUCKET_LEVEL, AT_BUCKET_MESSAGES

__all__ = ["NamespaceWords"]

_KEY_MASK = (1 << 62) - 1
_COUNT_BITS = 32
_COUNT_MASK = (1 << _COUNT_BITS) - 1


@kernel("int64(int64,int64)")
def _exchange(word: int, value: int) -> int:
    """Store a value before anything else is looked at; what was there."""
    while True:
        before = load_acquire(word)
        if compare_exchange(word, before, value):
            return before


_exchange_direct = direct(_exchange)


class NamespaceWords:
    """The shared words of one namespace, as one process sees them."""

    def __init__(
        self, table: BucketTable, control: ControlBlock, workers: list[int], namespace: str
    ) -> None:
        """`workers`: process indexes. Raises ResourceExhausted if the table has no row left."""
        self._table, self._control = table, control

        def row(what: str) -> int:
            digest = xxhash.xxh64_intdigest(f"namespace\n{namespace}\n{what}".encode())
            return table.address((digest & _KEY_MASK) or 1)

        self.publish_row = row("publish")
        self.dispatch_row = row("dispatch")
        self._rows = {worker: row(f"worker\n{worker}") for worker in workers}

    @property
    def until_address(self) -> int:
        """Where the word of `until` is."""
        return self.publish_row + AT_BUCKET_LEVEL

    @property
    def until(self) -> int:
        """So many bytes may all workers accept together, counted as `accepted` is; 0: not known."""
        return self._table.word(self.until_address)

    def set_until(self, until: int) -> None:
        """Set it; the coordinator does."""
        self._table.set_word(self.until_address, until)

    def clear(self) -> None:
        """Begin anew: what rates owe is forgiven, and it is not known what is kept. The coordinator does it."""
        self.set_until(0)
        for row in (self.publish_row, self.dispatch_row):
            self._table.set_word(row + AT_BUCKET_MESSAGES, 0)
            self._table.set_word(row + AT_BUCKET_BYTES, 0)

    def accepted_address(self, worker: int) -> int:
        """Where the word of `accepted` is."""
        return self._rows[worker] + AT_BUCKET_MESSAGES

    @property
    def accepted_addresses(self) -> list[int]:
        """Those of all workers."""
        return [self.accepted_address(worker) for worker in self._rows]

    def accepted(self, worker: int) -> int:
        """Bytes that a worker accepted for the namespace since the broker's start."""
        return self._table.word(self.accepted_address(worker))

    # ------------------------------------------------------------ handles

    def _handles_address(self, worker: int) -> int:
        return self._rows[worker] + AT_BUCKET_BYTES

    def handles(self, worker: int) -> int:
        """Handles that a worker has open; 0 once it was started again."""
        word = self._table.word(self._handles_address(worker))
        return word & _COUNT_MASK if word >> _COUNT_BITS == self._control.epoch(worker) else 0

    def set_handles(self, worker: int, count: int) -> None:
        """Say how many a worker has; the worker does."""
        epoch = self._control.epoch(worker)
        _exchange_direct(self._handles_address(worker), epoch << _COUNT_BITS | count)

    def take_handle(self, worker: int, limit: int) -> bool:
        """Count one more for a worker, unless all have reached the limit. Of two workers that take the last one at once
        both may be refused, and never both be served."""
        mine = self.handles(worker)
        self.set_handles(worker, mine + 1)
        if self.handles_of_all() <= limit:
            return True
        self.set_handles(worker, mine)
        return False

    def handles_of_all(self) -> int:
        """Handles that all workers have open."""
        return sum(map(self.handles, self._rows))
