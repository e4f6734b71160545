"""What waits for the store on a worker with many partitions: all are listed, a part at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.clock import MILLISECOND_NS, SECOND_NS
from danube_fast.workers.shard.history.backlogs import (
    BYTES_PER_NS,
    LOOK_NS,
    LOOK_NS_MAX,
    MANY_LOOK_NS,
    PAGE,
    Backlogs,
)

OBJECT_BYTES = 1000
COUNT = 2 * PAGE + 50


class Rig:
    """Backlogs of partitions that take bytes when told."""

    def __init__(self, count: int, bytes_max: int = 1 << 40) -> None:
        self.partitions = {
            number: SimpleNamespace(
                partition_id=number, byte_count=0, visible=0, first_offset=0, log_slot=0,
                uploaded=SimpleNamespace(until=0),
            )
            for number in range(count)
        }  # fmt: skip
        listeners: list[Any] = []
        self.refused: dict[int, str] = {}

        def refuse(partition: Any, cause: Any, text: str) -> None:
            self.refused[partition.partition_id] = text

        state: Any = SimpleNamespace(
            catalog=SimpleNamespace(by_id=self.partitions),
            settings=SimpleNamespace(
                history_object_bytes=OBJECT_BYTES, history_backlog_bytes_max=bytes_max, store="x:"
            ),
            policy_listeners=listeners, removal_listeners=[], logs={0: None},
            keeps_history=lambda partition: True,
            clock=SimpleNamespace(monotonic_ns=lambda: 0), gate=SimpleNamespace(set=refuse),
        )  # fmt: skip
        self.backlogs = Backlogs(state, SimpleNamespace(allowance_bytes=1 << 40))  # type: ignore[arg-type]
        for partition in self.partitions.values():
            listeners[0](partition)

    def some(self, *named: int) -> list[int]:
        """Ids that are listed now."""
        return [partition.partition_id for partition in self.backlogs.some_partitions(named)]


def test_few_partitions_are_all_listed() -> None:
    rig = Rig(PAGE)
    assert rig.some() == rig.some() == list(range(PAGE))


def test_many_are_listed_in_turn() -> None:
    rig = Rig(COUNT)
    seen: list[int] = []
    while len(seen) < COUNT:
        listed = rig.some()
        assert 0 < len(listed) <= PAGE
        seen += listed
    assert seen == list(range(COUNT))
    assert rig.some() == list(range(PAGE)), "and again"


def test_those_that_are_named_or_have_an_object_are_always_listed() -> None:
    rig = Rig(COUNT)
    rig.partitions[COUNT - 1].byte_count = OBJECT_BYTES
    rig.partitions[COUNT - 2].byte_count = OBJECT_BYTES - 1
    for _ in range(2):
        listed = rig.some(PAGE * 2 + 7, COUNT + 1)
        assert {COUNT - 1, PAGE * 2 + 7} <= set(listed)
        assert COUNT - 2 not in listed
        assert len(set(listed)) == len(listed) == PAGE + 2


def test_the_greatest_age_is_of_all_lists_of_a_turn() -> None:
    backlogs = Rig(COUNT).backlogs
    assert [backlogs.oldest_ns(ages) for ages in ([7, 3], [1], [], [2], [])] == [7, 7, 7, 2, 2]
    few = Rig(3).backlogs
    assert [few.oldest_ns(ages) for ages in ([7], [1], [])] == [7, 1, 0]


@pytest.mark.parametrize(
    "left", [0, LOOK_NS * BYTES_PER_NS // 2, 10 * LOOK_NS * BYTES_PER_NS, 1 << 39]
)
def test_no_rate_passes_the_limit_between_two_looks(left: int) -> None:
    limit = 1 << 40
    rig = Rig(3, limit)
    now_ns = 0
    for _ in range(3):  # what is in the log is counted first
        rig.backlogs.do_work(now_ns)
        now_ns += LOOK_NS
    rig.partitions[1].byte_count = limit - left
    now_ns += LOOK_NS_MAX
    rig.backlogs.do_work(now_ns)
    rig.partitions[1].byte_count += left + 1
    quiet_ns = min(max(left // BYTES_PER_NS, LOOK_NS), LOOK_NS_MAX)
    rig.backlogs.do_work(now_ns + quiet_ns - MILLISECOND_NS)
    assert not rig.refused, "there is no need to look before"
    rig.backlogs.do_work(now_ns + quiet_ns)
    assert set(rig.refused) == {0, 1, 2}
    rig.partitions[1].byte_count = 0
    rig.backlogs.do_work(now_ns + quiet_ns + SECOND_NS)
    assert not any(rig.refused.values())


@pytest.mark.parametrize(
    ("count", "look_ns"), [(PAGE - 1, LOOK_NS), (PAGE, 2 * LOOK_NS), (10 * PAGE, MANY_LOOK_NS)]
)
def test_of_many_partitions_bytes_are_counted_less_often(count: int, look_ns: int) -> None:
    rig = Rig(count, 1 << 40)
    now_ns = 0
    for _ in range(3):
        rig.backlogs.do_work(now_ns)
        now_ns += MANY_LOOK_NS
    rig.partitions[1].byte_count = 1 << 40
    now_ns += LOOK_NS_MAX
    rig.backlogs.do_work(now_ns)
    rig.partitions[1].byte_count += 1
    rig.backlogs.do_work(now_ns + look_ns - MILLISECOND_NS)
    assert not rig.refused
    rig.backlogs.do_work(now_ns + look_ns)
    assert len(rig.refused) == count
