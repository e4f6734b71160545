"""Received frames as one pyarrow.Table: the columns of `frame/arrow.py`, and the topic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from danube_fast.client.consume.delivery import Delivery

__all__ = ["table"]


def table(pieces: list[tuple[Delivery, int, int]]) -> Any:
    """A table of slices of frames; payloads are not copied where frames are aligned.

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
