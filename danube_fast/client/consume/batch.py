"""Batches: messages that an application takes together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from danube_fast.client.consume.delivery import Delivery
from danube_fast.client.values.message import Message

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Batch", "Piece"]

Piece = tuple[Delivery, int, int]
"""A frame, and which of its messages: from, to."""


class Batch:
    """Messages received together, in order per partition. Empty when nothing came in time.

    Has a length, may be iterated over and indexed, and keeps its bytes for as long as it lives.

        batch = consumer.receive_batch(timeout=1)
        total = sum(len(payload or b"") for payload in batch.payloads())
        consumer.ack(batch)

    The columns (payloads, keys, ...) are read much faster than message by message.
    """

    __slots__ = ("_count", "_pieces")

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = pieces
        self._count = sum(stop - start for _, start, stop in pieces)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Message]:
        for delivery, start, stop in self._pieces:
            yield from delivery.messages(start, stop)

    def __getitem__(self, index: int) -> Message:
        place = index + self._count if index < 0 else index
        if place < 0:
            raise IndexError(f"a batch of {self._count} messages has no message {index}")
        for delivery, start, stop in self._pieces:
            if place < stop - start:
                return next(delivery.messages(start + place, start + place + 1))
            place -= stop - start
        raise IndexError(f"a batch of {self._count} messages has no message {index}")

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Offset of every message, int64."""
        import numpy as np

        if not self._pieces:
            return np.empty(0, dtype=np.int64)
        return np.concatenate(
            [delivery.offsets()[start:stop] for delivery, start, stop in self._pieces]
        )

    def payloads(self) -> list[bytes | None]:
        """Return every payload; None of a message without one."""
        payloads: list[bytes | None] = [None] * len(self)
        at = 0
        for delivery, start, stop in self._pieces:
            delivery.view.fill_payloads(payloads, at, start, stop)
            at += stop - start
        return payloads

    def keys(self) -> list[bytes | None]:
        """Return every key; None where there is none."""
        return self._column("keys")

    def attributes(self) -> list[dict[str, str] | None]:
        """Return the attributes of every message; None where there are none."""
        return self._column("attributes")

    def event_times(self) -> list[int | None]:
        """Return event times, nanoseconds since the epoch; None where there is none."""
        return self._column("event_times")

    def _column(self, name: str) -> list[Any]:
        if len(self._pieces) == 1:
            delivery, start, stop = self._pieces[0]
            return delivery.column(name, start, stop)
        values: list[Any] = []
        for delivery, start, stop in self._pieces:
            values += delivery.column(name, start, stop)
        return values

    def to_arrow(self) -> Any:
        """Return a pyarrow.Table over the received bytes. Needs `danube-fast[arrow]`."""
        return _table(self._pieces)

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame. Needs `danube-fast[arrow]` and pandas."""
        return self.to_arrow().to_pandas()

    def __repr__(self) -> str:
        return f"<Batch of {self._count} messages in {len(self._pieces)} frames>"


def _table(pieces: list[Piece]) -> Any:
    """A pyarrow.Table of slices of frames: the columns of `frame/arrow.py`, and the topic. Payloads are
    not copied where frames are aligned.

    Raises ImportError that names the extra if pyarrow is not installed.
    """
    from danube_fast.frame.arrow import batch_schema, to_record_batch

    schema = batch_schema()
    import pyarrow as pa

    field = pa.field("topic", pa.dictionary(pa.int32(), pa.string()), nullable=False)
    schema = schema.insert(0, field)
    batches = []
    for delivery, start, stop in pieces:
        batch = to_record_batch(delivery.view).slice(start, stop - start)
        indices = pa.array([0] * len(batch), pa.int32())
        names = pa.DictionaryArray.from_arrays(indices, pa.array([delivery.topic]))
        batches.append(pa.RecordBatch.from_arrays([names, *batch.columns], schema=schema))
    return pa.Table.from_batches(batches, schema=schema)
