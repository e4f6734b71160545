"""What was deleted is kept by nobody: brokers live long, topics come and go."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from danube_fast.broker import records as r
from danube_fast.broker.admission.tables import AdmissionTables
from danube_fast.broker.subscription.consumer import SubscriptionKind
from danube_fast.broker.subscription.timers import FORGOTTEN_MAX, NEVER, Timers
from danube_fast.config import Settings
from danube_fast.workers.shard.catalog import Catalog
from danube_fast.workers.shard.deliver import tails
from danube_fast.workers.shard.deliver.tails import Tails


class Owner:
    def __init__(self) -> None:
        self.armed_ns = NEVER


def test_timers_keep_few_of_those_who_were_forgotten() -> None:
    timers: Timers[Owner] = Timers()
    kept = [Owner() for _ in range(10)]
    for due, owner in enumerate(kept):
        timers.arm(owner, 1_000_000 + due)
    gone = []
    for number in range(1000):
        owner = Owner()
        timers.arm(owner, 2_000_000 + number)
        timers.arm(owner, 1_500_000 + number)  # earlier: two entries
        timers.forget(owner)
        timers.forget(owner)  # again: nothing
        gone.append(weakref.ref(owner))
    del owner
    assert sum(ref() is not None for ref in gone) < FORGOTTEN_MAX
    assert timers.due(3_000_000) == kept and timers.next_ns == NEVER


class Tail:
    """A partition as `Tails` sees it."""

    keeps_memory = False

    def __init__(self) -> None:
        self.frames: list[int] = []

    @property
    def tail_count(self) -> int:
        return len(self.frames)

    def evict(self) -> int:
        return self.frames.pop(0)


class Frame:
    frame_bytes = 100


def test_tails_forget_partitions_that_were_emptied() -> None:
    kept = Tails(Settings(tail_bytes_max=100 * 3000))
    lasting: Any = Tail()
    frame: Any = Frame()

    def show(partition: Any) -> None:
        partition.frames.append(100)
        kept.count(partition, frame)

    gone = []
    for number in range(3000):
        partition = Tail()
        for _ in range(5):
            show(partition)
        if number % 100 == 0:
            show(lasting)
        kept.empty(partition)  # type: ignore[arg-type]
        gone.append(weakref.ref(partition))
    del partition
    bound = 2 * tails._COMPACT_AT + 2 * lasting.tail_count + 10
    assert len(kept._order) - kept._head <= bound
    assert sum(ref() is not None for ref in gone) <= bound // 5
    assert lasting.tail_count == 30 and kept.byte_count == 3000
    other: Any = Tail()
    for _ in range(3000):
        show(other)
    kept.trim()
    assert lasting.tail_count == 0 and other.tail_count == 3000, "the oldest did not go first"


def test_a_catalog_forgets_partitions_that_were_removed() -> None:
    catalog = Catalog(AdmissionTables())
    gone: list[weakref.ref[Any]] = []
    for number in range(1, 201):
        assigned = r.PartitionAssigned(number, f"/default/t{number}", 0, "reliable", "os", 1)
        partition = catalog.assign(assigned, 0)
        sub, _ = partition.subscribe("s", SubscriptionKind.SHARED, 0)
        catalog.timers.arm(sub, 30_000_000_000)  # as its ack timeout would
        catalog.remove(number)
        gone += [weakref.ref(partition), weakref.ref(sub)]
    del partition, sub
    gc.collect()
    assert not catalog.by_id and not catalog.by_slot
    assert sum(ref() is not None for ref in gone) < FORGOTTEN_MAX
