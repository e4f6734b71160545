"""The step that decides a move: one compare-and-set of a partition's record in the metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from danube_fast.broker.topics.records import Extent, PartitionRecord
from danube_fast.broker.topics.store import replace
from danube_fast.errors import FailedPrecondition

if TYPE_CHECKING:
    from danube_fast.broker.topics.store import Store

__all__ = ["move_partition"]


def move_partition(
    store: Store, key: str, record: PartitionRecord, log_id: int, first_offset: int
) -> PartitionRecord:
    """Give all of a partition to another log, from `first_offset` on; the new record.

    Raises FailedPrecondition if `record` is not what stands there, or what the store raises; in both
    cases nothing has changed.
    """
    epoch = record.owner_epoch + 1
    moved = msgspec.structs.replace(
        record, extents=[Extent(log_id, epoch, first_offset)], owner_epoch=epoch
    )
    before, after = msgspec.json.encode(record), msgspec.json.encode(moved)
    entry = store.get(key)
    if entry is None or entry.value != before:
        raise FailedPrecondition(
            f"{record.topic} was changed by another request just now; try again"
        )
    if not replace(store, key, after, entry.revision):
        raise FailedPrecondition(
            f"{record.topic} was changed by another request just now; try again"
        )
    return moved
