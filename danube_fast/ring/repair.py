"""Repairs a ring when one side, or both, died: pure functions over the ring's bytes.

    head           whole records           tail      a record in progress
     |--- data ---|--- data ---|--- data ---|/////////- - - - -|
                                            ^ nothing behind here exists

A record exists once the tail has passed it, and the tail is one aligned word, stored last. So a
producer that dies leaves a whole prefix, and the bytes of its last, unfinished record lie in free
space. A consumer that dies leaves the record that it had not released; its successor gets it again.
Neither needs more than to forget what the dead side had cached.

Bytes that cannot be (a peer that scribbled, not one that died) are told apart by walking from head
to tail. `plan_producer` and `plan_consumer` refuse them, because the living side may hold the same
positions; `plan_stopped`, for a ring without users, keeps the whole records and cuts the rest.

A plan is a tuple of (byte offset, word) stores; `apply_plan` makes them. The caller is the only
writer of those words: the dead process has been reaped, its successor has not attached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from danube_fast.errors import DataLoss
from danube_fast.ring import layout
from danube_fast.ring.memory import words_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["RingImage", "apply_plan", "plan_consumer", "plan_producer", "plan_stopped", "read_ring"]

Plan = tuple[tuple[int, int], ...]


class RingImage(NamedTuple):
    """The positions and records that a ring's bytes show."""

    capacity_bytes: int
    head: int
    tail: int
    records: list[bytes]
    """The whole records from head on, oldest first."""
    end: int
    """Position behind the last whole record; equals tail unless `fault` says why not."""
    fault: str
    """Empty, or what cannot be."""


def _word(image: memoryview, at: int) -> int:
    return int.from_bytes(image[at : at + layout.WORD_BYTES], "little", signed=True)


def read_ring(memory: Buffer) -> RingImage:
    """Read a ring's bytes without changing or trusting them. Raises DataLoss if it is no ring."""
    image = memoryview(memory).cast("B")
    if len(image) < layout.RING_HEADER_BYTES:
        raise DataLoss(f"{len(image)} bytes are less than a ring's header; create the ring again")
    capacity = _word(image, layout.AT_CAPACITY)
    power_of_two = capacity > 0 and capacity & (capacity - 1) == 0
    fits = power_of_two and layout.ring_bytes(capacity) <= len(image)
    if _word(image, layout.AT_VERSION) != layout.RING_VERSION_WORD or not fits:
        raise DataLoss("these bytes are no ring of this version; create the ring again")
    # The head first: a consumer that lives moves it towards a tail that stands still.
    head, tail = _word(image, layout.AT_HEAD), _word(image, layout.AT_TAIL)
    aligned = (head | tail) % layout.RECORD_ALIGNMENT == 0
    if head < 0 or not aligned or not 0 <= tail - head <= capacity:
        fault = f"head {head} and tail {tail} cannot be in a ring of {capacity} bytes"
        return RingImage(capacity, head, tail, [], head, fault)
    data = image[layout.RING_HEADER_BYTES : layout.ring_bytes(capacity)]
    records, end, fault = _walk(data, head, tail)
    return RingImage(capacity, head, tail, records, end, fault)


def _walk(data: memoryview, head: int, tail: int) -> tuple[list[bytes], int, str]:
    """Whole records in [head, tail), the position behind them, and what stopped the walk early."""
    records: list[bytes] = []
    position = end = head
    while position < tail:
        place = position & (len(data) - 1)
        header = _word(data, place)
        length, kind = header & layout.RECORD_LENGTH_MASK, header >> layout.RECORD_KIND_SHIFT
        need = layout.record_bytes(length)
        to_edge = len(data) - place
        if need > min(tail - position, to_edge):
            return records, end, f"record at {position} of {length} bytes does not fit"
        position += need
        if kind == layout.RECORD_PAD and need == to_edge and position < tail:
            continue  # a pad counts only with the record behind it: both came with one tail
        if kind != layout.RECORD_DATA:
            return records, end, f"record at {position - need} has kind {kind}"
        start = place + layout.RECORD_HEADER_BYTES
        records.append(bytes(data[start : start + length]))
        end = position
    return records, end, ""


def _whole(memory: Buffer) -> RingImage:
    """The image of a ring that has no fault; raises DataLoss with the fault otherwise."""
    image = read_ring(memory)
    if image.fault:
        raise DataLoss(
            f"{image.fault}: a process wrote where it must not; stop both sides and create the "
            "ring again"
        )
    return image


def plan_producer(memory: Buffer) -> Plan:
    """After the producer died, the consumer may live. Raises DataLoss for a ring with a fault."""
    image = _whole(memory)
    return ((layout.AT_CACHED_HEAD, image.head),)


def plan_consumer(memory: Buffer) -> Plan:
    """After the consumer died, the producer may live. Raises DataLoss for a ring with a fault.

    The oldest record may have been handled already: who must not do it twice numbers its records.
    """
    image = _whole(memory)
    return ((layout.AT_CACHED_TAIL, image.head),)


def plan_stopped(memory: Buffer) -> Plan:
    """Keep the whole records of a ring that is not in use, and cut what cannot be.

    Positions that cannot be make the ring empty. Raises DataLoss if it is no ring at all.
    """
    image = read_ring(memory)
    head, end = image.head, image.end
    if image.fault and not image.records:
        head = end = 0
    return (
        (layout.AT_HEAD, head),
        (layout.AT_CACHED_TAIL, head),
        (layout.AT_TAIL, end),
        (layout.AT_CACHED_HEAD, head),
    )


def apply_plan(memory: Buffer, plan: Plan) -> None:
    """Store the words of a plan."""
    with words_of(memory) as words:
        for at, word in plan:
            words[at // layout.WORD_BYTES] = word
