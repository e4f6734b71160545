"""Whether a partition takes publishes as far as room is concerned; rates, moves and changes of durability close it
elsewhere as yet."""

from __future__ import annotations

from danube_fast.broker.admission.layout import Mode, PartitionWord
from danube_fast.broker.admission.tables import AdmissionTables
from danube_fast.broker.partition import Partition
from danube_fast.errors import ResourceExhausted

__all__ = ["Gate"]


class Gate:
    """Writes what the admission kernel reads of a partition's state."""

    def __init__(self, tables: AdmissionTables) -> None:
        self._tables = tables

    def refuse(self, partition: Partition, cause: str, text: str) -> None:
        """Refuse publishes for a cause, or with an empty text for that cause no more."""
        if partition.refusals.get(cause, "") == text:
            return
        partition.refusals.pop(cause, None)
        if text:
            partition.refusals[cause] = text
        if partition.switching:
            return
        row = self._tables.partitions[partition.slot]
        mode = Mode.LOGGED if partition.logged else Mode.MEMORY
        row[PartitionWord.MODE] = Mode.CLOSED if partition.refusals else mode
        row[PartitionWord.REFUSAL] = ResourceExhausted.code
