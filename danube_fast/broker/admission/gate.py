"""Whether a partition takes publishes, and why not: the one writer of its admission word.

close(cause) ... open(cause)     each cause is opened by the part that closed for it
any cause left                -> CLOSED, with the status of the first of them
none                          -> LOGGED or MEMORY, as the topic's durability asks
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from danube_fast.broker.admission.layout import Mode, PartitionWord
from danube_fast.broker.admission.tables import AdmissionTables
from danube_fast.errors import ResourceExhausted, Status, TopicDeleted

if TYPE_CHECKING:
    from danube_fast.broker.partition import Partition

__all__ = ["Cause", "Gate"]


class Cause(enum.IntEnum):
    """Why publishes are refused; of several, publishers are told the first of this list."""

    DELETED = 0
    MOVE = 1
    DURABILITY = 2
    LOG = 3
    HISTORY = 4
    MEMORY = 5
    BACKLOG = 6
    STORAGE = 7
    NAMESPACE = 8
    RATE = 9


_STATUS = {Cause.DELETED: TopicDeleted.code, Cause.RATE: Status.THROTTLED}


class Gate:
    """Opens and closes partitions for the admission kernel."""

    def __init__(self, tables: AdmissionTables) -> None:
        self._tables = tables

    def close(self, partition: Partition, cause: Cause, text: str) -> None:
        """Refuse publishes for a cause; `text` is what publishers are told."""
        if partition.refusals.get(cause) != text:
            partition.refusals[cause] = text
            self.update(partition)

    def open(self, partition: Partition, cause: Cause) -> None:
        """Take back a cause; publishes are taken again when no other is left."""
        if partition.refusals.pop(cause, None) is not None:
            self.update(partition)

    def set(self, partition: Partition, cause: Cause, text: str) -> None:
        """Close for a cause with a text, open for it without one."""
        if text:
            self.close(partition, cause, text)
        else:
            self.open(partition, cause)

    def update(self, partition: Partition) -> None:
        """Write the partition's admission word, after a change of its causes or of its durability."""
        row = self._tables.partitions[partition.slot]
        if partition.refusals:
            row[PartitionWord.MODE] = Mode.CLOSED
            first = Cause(min(partition.refusals))
            row[PartitionWord.REFUSAL] = _STATUS.get(first, ResourceExhausted.code)
        else:
            row[PartitionWord.MODE] = Mode.LOGGED if partition.logged else Mode.MEMORY
