"""The gate of a partition: every cause closes it, and only its own end takes a cause back."""

import random

import pytest

from danube_fast.broker.admission.gate import Cause, Gate
from danube_fast.broker.admission.layout import Mode, PartitionWord
from danube_fast.broker.admission.tables import AdmissionTables
from danube_fast.broker.partition import Partition
from danube_fast.broker.records import PartitionAssigned
from danube_fast.errors import ResourceExhausted, Status, TopicDeleted


def closed_as(cause):
    if cause is Cause.DELETED:
        return TopicDeleted.code
    return Status.THROTTLED if cause is Cause.RATE else ResourceExhausted.code


@pytest.mark.parametrize("durability", ["fsync", "os", "memory"])
def test_any_sequence_of_causes(durability):
    draw = random.Random(durability)
    tables = AdmissionTables()
    gate = Gate(tables)
    slot = tables.add_partition(1, 0, Mode.CLOSED)
    assigned = PartitionAssigned(1, "/default/t", 0, "reliable", durability, 1)
    partition = Partition(assigned, 0, slot)
    gate.update(partition)
    row = tables.partitions[slot]
    causes = {}
    for _ in range(3000):
        cause = draw.choice(list(Cause))
        text = draw.choice(["", f"{cause.name} {draw.random()}"])
        gate.set(partition, cause, text)
        causes.pop(cause, None)
        if text:
            causes[cause] = text
        if not causes:
            assert row[PartitionWord.MODE] == (
                Mode.MEMORY if durability == "memory" else Mode.LOGGED
            )
            assert partition.refusal == ""
            continue
        first = min(causes)
        assert row[PartitionWord.MODE] == Mode.CLOSED
        assert row[PartitionWord.REFUSAL] == closed_as(first), causes
        assert partition.refusal == causes[first]
