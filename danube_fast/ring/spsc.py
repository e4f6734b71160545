"""SpscRing: records from one producer to one consumer through shared memory (see `layout.py`).

    producer                          memory                         consumer
    copy parts behind the tail   -->  [head ........ tail)      -->  copy the record out
    store_release(tail)               pairs with                     load_acquire(tail)
    load_acquire(head)                pairs with                     store_release(head)

One process (and in it one thread at a time) pushes, one pops; either may die at any instant and be
replaced by one that attaches to the same memory. What was published is whole; a record that was
being written is not there; one that was popped but whose release was not reached is there again.

The peer is not trusted: every position and length read from the memory is checked against a capacity
kept outside it, so a peer that scribbles gets DataLoss for its own ring and nothing else. A length
is read once, and what is handed out is a copy.

A push of `bytes` objects is one kernel call that walks the argument tuple by its address, where the
layout of CPython objects is the known one (checked at import); other buffers, and other
interpreters, go through a memoryview, with the same bytes in the ring.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from danube_fast.errors import DataLoss, FailedPrecondition, InvalidArgument
from danube_fast.frame.cpython import AT_ITEM_COUNT, BYTES_TYPE, OBJECTS_READABLE, word_at
from danube_fast.ring import layout, spsc_kernel
from danube_fast.ring.memory import address_of_memory, words_of, write_ring_header
from danube_fast.ring.spsc_kernel import DAMAGED, EMPTY, FULL, TOO_LARGE

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["SpscRing"]

_push_tuple = spsc_kernel.push_tuple
_front = spsc_kernel.front
_release = spsc_kernel.release
_readable = spsc_kernel.readable
_AT_PAYLOAD = layout.RING_HEADER_BYTES + layout.RECORD_HEADER_BYTES
_PLACE_SHIFT = layout.RECORD_KIND_SHIFT
_LENGTH_MASK = layout.RECORD_LENGTH_MASK


def _tuples_look_right() -> bool:
    """Whether a tuple's items lie where `_push_tuple` reads them."""
    probe = (b"first", None, b"third")
    if not OBJECTS_READABLE or word_at(id(probe) + AT_ITEM_COUNT) != len(probe):
        return False
    items = id(probe) + spsc_kernel.AT_TUPLE_ITEMS
    return all(
        word_at(items + layout.WORD_BYTES * index) == id(item) for index, item in enumerate(probe)
    )


_FAST = _tuples_look_right()


def _bytes_view(part: Buffer) -> memoryview:
    """The bytes of any contiguous buffer. Raises TypeError for what is none."""
    view = memoryview(part)
    return view.cast("B") if view.nbytes else memoryview(b"")


class SpscRing:
    """One direction of records between two processes. Made by `create` or `attach`.

    The ring keeps its memory alive. `record_bytes_max` is the largest record, half the capacity.
    """

    __slots__ = (
        "_base",
        "_capacity",
        "_position",
        "_reserved",
        "_shown",
        "_view",
    )

    def __init__(self, memory: Buffer) -> None:
        """Attach to the ring at the start of `memory` (mmap, ndarray, ...; writable).

        Raises FailedPrecondition if there is no ring, or one of another version.
        """
        self._view = memoryview(memory).cast("B")
        self._base = address_of_memory(memory)
        if self._base % layout.WORD_BYTES:
            raise InvalidArgument("ring memory must start at a multiple of 8; use map_fd()")
        if len(self._view) < layout.RING_HEADER_BYTES:
            raise FailedPrecondition(f"{len(self._view)} bytes of memory cannot hold a ring")
        found = spsc_kernel.version(self._base)
        if found != layout.RING_VERSION_WORD:
            raise FailedPrecondition(
                f"no ring of version {layout.RING_VERSION} here (version word {found:#x}); create "
                "it first, and run the same danube-fast on both sides"
            )
        # Read once, checked, and kept outside the shared memory from here on.
        self._capacity = words_of(memory)[layout.AT_CAPACITY // layout.WORD_BYTES]
        power_of_two = self._capacity > 0 and self._capacity & (self._capacity - 1) == 0
        if not power_of_two or layout.ring_bytes(self._capacity) > len(self._view):
            raise DataLoss(
                f"ring capacity {self._capacity} does not fit its {len(self._view)} bytes of "
                "memory; create the ring again"
            )
        self._position = EMPTY
        self._reserved = 0
        self._shown = EMPTY

    @classmethod
    def create(cls, memory: Buffer, capacity_bytes: int) -> SpscRing:
        """Make an empty ring of `capacity_bytes` (a power of two) in `memory` and attach to it.

        `memory` holds at least `ring_bytes(capacity_bytes)`. Raises InvalidArgument.
        """
        write_ring_header(memory, capacity_bytes)
        spsc_kernel.seal_version(address_of_memory(memory), layout.RING_VERSION_WORD)
        return cls(memory)

    @classmethod
    def attach(cls, memory: Buffer) -> SpscRing:
        """Attach to a ring that exists. Raises FailedPrecondition or DataLoss if there is none."""
        return cls(memory)

    @property
    def address(self) -> int:
        """Where the ring's header begins, for kernels; the ring must outlive its use."""
        return self._base

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the data part."""
        return self._capacity

    @property
    def record_bytes_max(self) -> int:
        """Largest record that can be pushed, bytes."""
        return layout.record_payload_bytes_max(self._capacity)

    @property
    def readable(self) -> bool:
        """Whether `pop` would find a record. For the consumer."""
        return bool(_readable(self._base))

    @property
    def used_bytes(self) -> int:
        """Bytes of published records, headers and pads that were not popped yet."""
        return int(spsc_kernel.used(self._base))

    # ------------------------------------------------------------ producer

    def try_push(self, *parts: Buffer) -> bool:
        """Push one record made of all `parts`, in order. False if there is no room just now.

        Raises InvalidArgument for a record over `record_bytes_max`, DataLoss for a damaged ring.
        """
        if _FAST:
            code = _push_tuple(self._base, self._capacity, id(parts), BYTES_TYPE)
            if code >= 0:
                return True
            if code == FULL:
                return False
        return self._push_views([_bytes_view(part) for part in parts])

    def _push_views(self, views: list[memoryview]) -> bool:
        """Push one record through memoryviews: any buffer, any interpreter."""
        target = self.reserve(sum(map(len, views)))
        if target is None:
            return False
        start = 0
        for view in views:
            target[start : start + len(view)] = view
            start += len(view)
        self.publish(start)
        return True

    def reserve(self, byte_count: int) -> memoryview | None:
        """Room for one record of at most `byte_count`, to be filled in place; None if full.

        Follow with `publish`; a second `reserve` forgets the first. Raises as `try_push`.
        """
        if byte_count < 0:
            raise InvalidArgument(f"a record cannot have {byte_count} bytes")
        code = spsc_kernel.reserve(self._base, self._capacity, byte_count)
        if code == FULL:
            return None
        self._position = self._checked(code, byte_count)
        self._reserved = byte_count
        start = _AT_PAYLOAD + (self._position & (self._capacity - 1))
        return self._view[start : start + byte_count]

    def publish(self, byte_count: int) -> None:
        """Let the consumer see the record in `reserve`'s memory, cut to `byte_count` bytes."""
        position, self._position = self._position, EMPTY
        if not 0 <= byte_count <= self._reserved:
            raise InvalidArgument(f"{byte_count} bytes are not in the {self._reserved} reserved")
        # The same room again, unless something was pushed since.
        again = spsc_kernel.reserve(self._base, self._capacity, self._reserved)
        if position < 0 or again != position:
            raise FailedPrecondition("nothing is reserved; call reserve() and fill it first")
        spsc_kernel.publish(self._base, self._capacity, position, byte_count)

    # ------------------------------------------------------------ consumer

    def pop(self, size_max: int = _LENGTH_MASK) -> bytes | None:
        """Take the oldest record; None if there is none, or if it is larger than `size_max` bytes.

        Raises DataLoss if the ring is damaged.
        """
        base, capacity = self._base, self._capacity
        found = _front(base, capacity)
        if found < 0:
            if found == EMPTY:
                return None
            self._checked(found)
        size = found & _LENGTH_MASK
        if size > size_max:
            return None
        start = (found >> _PLACE_SHIFT) + _AT_PAYLOAD
        record = self._view[start : start + size].tobytes()
        _release(base, capacity, found)
        return record

    def peek(self) -> memoryview | None:
        """The oldest record where it lies, or None. It stays the oldest until `release`.

        The producer can still write to this memory: copy before trusting what it says.
        """
        found = self._shown = int(_front(self._base, self._capacity))
        if found == EMPTY:
            return None
        self._checked(found)
        start = (found >> _PLACE_SHIFT) + _AT_PAYLOAD
        return self._view[start : start + (found & _LENGTH_MASK)]

    def release(self) -> None:
        """Give the record that `peek` showed back to the producer; nothing was popped since."""
        found, self._shown = self._shown, EMPTY
        if found < 0:
            raise FailedPrecondition("nothing to release; call peek() first")
        _release(self._base, self._capacity, found)

    def _checked(self, code: int, byte_count: int = 0) -> int:
        """`code` if it is none of the kernels' complaints, else the error for it."""
        if code == DAMAGED:
            raise DataLoss(
                "the ring's positions or lengths cannot be right: the process on the other side "
                "wrote where it must not; drop the ring, or discard() what it holds"
            )
        if code == TOO_LARGE:
            raise InvalidArgument(
                f"a record of {byte_count} bytes is over this ring's record_bytes_max of "
                f"{self.record_bytes_max}; split it or make the ring larger"
            )
        return code
