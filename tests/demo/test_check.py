"""The judgement finds every kind of wrong, and only what is wrong."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube_fast.demo.check import Catalogue, Kill, Subscription, judge, problems_of
from danube_fast.demo.dataset import Flights
from danube_fast.demo.records import RECORD, Records, fingerprint, partition_number, ranges_of

COUNT = 600
PRODUCERS = 3
PARTITIONS = 4
SECOND_NS = 1_000_000_000

CARRIERS = [b"AA", b"B6", b"UA"]
FLIGHTS = Flights(
    [b"row %d" % i for i in range(COUNT)], [CARRIERS[i // 5 % 3] for i in range(COUNT)]
)
CATALOGUE = Catalogue(FLIGHTS)


def everything() -> Records:
    """Every flight once, in order, a message a millisecond, received 5 ms later."""
    records = np.empty(COUNT, RECORD)
    numbers = np.arange(COUNT)
    records["partition"] = numbers % PARTITIONS
    records["offset"] = numbers // PARTITIONS
    records["row"] = fingerprint(FLIGHTS.rows)
    records["key"] = FLIGHTS.carriers
    records["publish_ns"] = numbers * 1_000_000
    records["receive_ns"] = records["publish_ns"] + 5_000_000
    return records


def judged(*parts: Records, kill: Kill | None = None) -> Subscription:
    return judge(
        CATALOGUE, parts, name="billing", type_name="shared", producers=PRODUCERS, kill=kill
    )


def test_everything_in_order_is_right() -> None:
    result = judged(everything())
    assert problems_of(CATALOGUE, result) == []
    assert (result.received, result.distinct, result.redelivered) == (COUNT, COUNT, 0)
    assert result.latency.p50_ms == result.latency.p99_ms == pytest.approx(5.0)
    assert result.messages_per_s == pytest.approx(COUNT / 0.604, rel=1e-3)
    assert result.carriers == CATALOGUE.carriers
    assert result.silence_seconds is None


def test_redelivered_messages_are_no_fault_and_count_once() -> None:
    records = everything()
    again = records[100:150].copy()
    again["receive_ns"] += SECOND_NS
    result = judged(records, again)
    assert problems_of(CATALOGUE, result) == []
    assert (result.received, result.redelivered, result.distinct) == (COUNT + 50, 50, COUNT)
    assert result.received_by_consumer == [COUNT, 50]
    assert result.latency.max_ms == pytest.approx(5.0), "the first arrival counts"


def test_a_lost_flight() -> None:
    result = judged(np.delete(everything(), 77))
    assert result.lost == 1
    assert any("never came" in text for text in problems_of(CATALOGUE, result))
    assert any("flights of" in text for text in problems_of(CATALOGUE, result))


def test_nothing_at_all() -> None:
    result = judged(np.empty(0, RECORD))
    assert (result.lost, result.received, result.messages_per_s) == (COUNT, 0, 0.0)
    assert len(problems_of(CATALOGUE, result)) == 1 + len(CATALOGUE.carriers)


def test_a_flight_at_two_offsets() -> None:
    records = everything()
    twin = records[-1:].copy()
    twin["offset"] += 1
    result = judged(np.concatenate((records, twin)))
    assert (result.duplicated, result.redelivered, result.lost) == (1, 0, 0)
    assert any("twice in the log" in text for text in problems_of(CATALOGUE, result))


@pytest.mark.parametrize(("field", "value"), [("row", 12345), ("key", b"ZZ")])
def test_altered_messages(field: str, value: Any) -> None:
    records = everything()
    records[field][5] = value
    result = judged(records)
    assert (result.foreign, result.lost) == (1, 1)
    assert any("not what was published" in text for text in problems_of(CATALOGUE, result))


def test_a_message_that_changes_between_deliveries() -> None:
    records = everything()
    again = records[10:11].copy()
    again["row"] = records["row"][11]
    again["receive_ns"] += SECOND_NS
    assert judged(records, again).foreign == 1


def test_two_flights_of_one_producer_exchanged() -> None:
    records = everything()
    step = PRODUCERS * PARTITIONS  # the same producer and the same partition
    for field in ("row", "key"):
        records[field][[30, 30 + step]] = records[field][[30 + step, 30]]
    result = judged(records)
    assert (result.out_of_order, result.lost, result.foreign) == (1, 0, 0)
    assert any("out of order" in text for text in problems_of(CATALOGUE, result))


def test_flights_of_different_producers_may_change_places() -> None:
    records = everything()
    for field in ("row", "key"):
        records[field][[30, 34]] = records[field][[34, 30]]
    assert judged(records).out_of_order == 0


def test_unacked_messages() -> None:
    import msgspec

    result = msgspec.structs.replace(judged(everything()), unacked=3)
    assert problems_of(CATALOGUE, result) == ["billing: 3 messages are not acked"]


def test_the_silence_after_the_kill() -> None:
    """Partitions 1 and 3 fall silent at 300 ms for 2 s; a message that the consumer had fetched
    before comes right after the kill and does not end the silence."""
    records = everything()
    kill = Kill(worker=1, pid=1, kill_ns=300_000_000, partitions=[1, 3])
    dead = np.isin(records["partition"], kill.partitions)
    late = dead & (records["receive_ns"] > kill.kill_ns + 2_000_000)
    records["receive_ns"][late] += 2 * SECOND_NS
    result = judged(records, kill=kill)
    assert result.silence_seconds == pytest.approx(2.0, abs=0.01)
    assert result.published_before_kill == 300
    assert result.received_before_kill == 295
    assert result.latency.p99_ms > 1900
    assert result.latency_undisturbed.max_ms == pytest.approx(5.0)


def test_partitions_that_stay_silent() -> None:
    records = everything()
    kill = Kill(worker=0, pid=1, kill_ns=300_000_000, partitions=[0])
    gone = (records["partition"] == 0) & (records["receive_ns"] > kill.kill_ns)
    result = judged(records[~gone], kill=kill)
    assert result.silence_seconds is None
    assert result.lost == int(np.count_nonzero(gone))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), max_size=30))
def test_ranges_stand_for_exactly_what_was_received(pairs: list[tuple[int, int]]) -> None:
    records = np.zeros(len(pairs), RECORD)
    for index, (partition, offset) in enumerate(pairs):
        records[index]["partition"], records[index]["offset"] = partition, offset
    ranges = ranges_of(records)
    assert [(p, o) for p, start, stop in ranges for o in range(start, stop)] == pairs
    for before, after in itertools.pairwise(ranges):
        assert (before[0], before[2]) != after[:2], "neighbours are one range"


def test_partition_numbers() -> None:
    assert partition_number("/default/flights-part-12") == 12
    assert partition_number("/default/flights") == 0
