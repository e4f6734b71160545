"""Everything that anybody ever saw of a set of topics, and the rules that it must obey.

    producers' acks, consumers' deliveries  --note-->  one payload per offset, for ever
    a reader over the whole topic           --settle-> each message once, dense offsets,
                                                       every ack at its very offset, order kept
    consumers' durable acks                 --cursor-> never delivered again; all the rest is

An offset that ever had one payload must never have another, whoever tells of it and however many
times the broker died in between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy.typing as npt

from tests.crash.payloads import (
    ACK_SENT,
    ACKED,
    DAMAGED,
    DURABLE,
    FAILED,
    RECEIVED,
    ident_of,
    ident_text,
    number_of,
    partition_of,
    producer_of,
    read_records,
)

__all__ = ["History", "Place", "Sight"]

NOTICED_NS = 15_000_000_000
"""So long after a kill at most a consumer goes on with what it has: five times what it takes."""

Place = tuple[str, int, int]
"""(topic, partition index, offset)"""
Sight = tuple[int, int, int]
"""(partition index, offset, ident)"""


class History:
    """One payload per offset, for ever."""

    def __init__(self, about: str) -> None:
        self.about = about
        """Seed and circumstances, named in every failure."""
        self.kills_ns: list[int] = []
        """When a process was killed that ends sessions."""
        self.noticed_ns = NOTICED_NS
        self.excused = 0
        """Messages that came again although acked, sent by a process that was dead by then."""
        self.seen: dict[Place, int] = {}
        self.acked: dict[Place, int] = {}
        self.content: dict[str, dict[tuple[int, int], int]] = {}
        """Topic -> what its log holds, once `settle` was called."""
        self._firsts: dict[str, dict[int, int]] = {}

    def fail(self, text: str) -> AssertionError:
        """The error of a broken rule."""
        return AssertionError(f"{text}\n({self.about})")

    # ------------------------------------------------------------ what was seen

    def note(self, topic: str, partition: int, offset: int, ident: int, who: str) -> None:
        """Somebody saw a message at an offset."""
        if ident == DAMAGED:
            raise self.fail(f"{who}: damaged payload at {topic} {partition}@{offset}")
        before = self.seen.setdefault((topic, partition, offset), ident)
        if before != ident:
            raise self.fail(
                f"{topic} {partition}@{offset} was {ident_text(before)}, and {who} says it is "
                f"{ident_text(ident)}: the offset was used twice"
            )

    def note_ack(self, topic: str, partition: int, offset: int, ident: int, who: str) -> None:
        """The broker acked a message at an offset."""
        self.note(topic, partition, offset, ident, who)
        self.acked[topic, partition, offset] = ident

    def read_producer(self, topic: str, path: Path) -> npt.NDArray[Any]:
        """Take a producer's record in; returns it."""
        records = read_records(path)
        failed = records[records["kind"] == FAILED]
        if len(failed):
            raise self.fail(f"{path.name}: {len(failed)} messages were given up")
        acks = records[records["kind"] == ACKED]
        columns = (acks[name].tolist() for name in ("partition", "offset", "ident"))
        for partition, offset, ident in zip(*columns, strict=True):
            self.note_ack(topic, partition, offset, ident, f"the ack in {path.name}")
        return acks

    def read_consumer(self, topic: str, path: Path, *, ordered: bool) -> npt.NDArray[Any]:
        """Take a consumer's record in; with `ordered` its deliveries must ascend between two
        (re)connects."""
        records = read_records(path)
        came = records[records["kind"] == RECEIVED]
        names = ("partition", "generation", "offset", "ident")
        last: dict[tuple[int, int], int] = {}
        for partition, generation, offset, ident in zip(
            *(came[name].tolist() for name in names), strict=True
        ):
            self.note(topic, partition, offset, ident, path.name)
            if ordered and last.get((partition, generation), -1) >= offset:
                raise self.fail(
                    f"{path.name}: {topic} {partition}@{offset} came after "
                    f"{last[partition, generation]} in one subscription"
                )
            last[partition, generation] = offset
        return records

    # ------------------------------------------------------------ what the log holds

    def settle(self, topic: str, messages: Iterable[Any], *, trimmed: bool = False) -> None:
        """`messages`: the whole topic as a reader gives it. Nothing is missing, nothing is twice; with
        `trimmed` the beginnings of partitions may be gone."""
        content: dict[tuple[int, int], int] = {}
        places: dict[int, Sight] = {}
        ends: dict[int, int] = {}
        numbers: dict[tuple[int, int], int] = {}
        for message in messages:
            partition, offset = partition_of(message.topic), message.offset
            ident = ident_of(message.payload)
            self.note(topic, partition, offset, ident, "the reader")
            expected = ends.get(partition, offset if trimmed else 0)
            if offset != expected:
                raise self.fail(f"{topic} {partition}@{offset} was read where {expected} should be")
            ends[partition] = offset + 1
            if ident in places:
                where = f"{places[ident][0]}@{places[ident][1]} and {partition}@{offset}"
                raise self.fail(f"{topic}: {ident_text(ident)} is there twice, at {where}")
            places[ident] = (partition, offset, ident)
            content[partition, offset] = ident
            producer, number = producer_of(ident), number_of(ident)
            if numbers.get((producer, partition), -1) >= number:
                raise self.fail(
                    f"{topic} {partition}@{offset}: {ident_text(ident)} stands behind number "
                    f"{numbers[producer, partition]} of the same producer"
                )
            numbers[producer, partition] = number
        self.content[topic] = content
        self._firsts.pop(topic, None)
        for (name, partition, offset), ident in self.seen.items():
            if name != topic or (trimmed and offset < self.first_offset(topic, partition)):
                continue
            if content.get((partition, offset)) != ident:
                what = "acked" if (name, partition, offset) in self.acked else "delivered"
                raise self.fail(
                    f"{topic} {partition}@{offset} ({ident_text(ident)}) was {what} and is gone; "
                    f"the partition ends at {ends.get(partition, 0)}"
                )

    def first_offset(self, topic: str, partition: int) -> int:
        """First offset that a partition still has."""
        firsts = self._firsts.get(topic)
        if firsts is None:
            firsts = self._firsts[topic] = {}
            for place, offset in self.content[topic]:  # in order of offset
                firsts.setdefault(place, offset)
        return firsts.get(partition, 1 << 62)

    def trimmed(self, topic: str) -> set[tuple[int, int]]:
        """Places that were acked to a producer and are trimmed away."""
        return {
            (partition, offset)
            for name, partition, offset in self.acked
            if name == topic and offset < self.first_offset(topic, partition)
        }

    def complete(self, topic: str, producer: int, count: int) -> None:
        """Every message of a producer that closed in peace is there, or was until it was trimmed."""
        gone = (self.acked[topic, *place] for place in self.trimmed(topic))
        there = {
            number_of(ident)
            for ident in (*self.content[topic].values(), *gone)
            if producer_of(ident) == producer
        }
        missing = set(range(count)) - there
        if missing or len(there) != count:
            raise self.fail(
                f"{topic}: producer {producer} sent {count} messages, {len(there)} are there, "
                f"missing {sorted(missing)[:5]}"
            )

    # ------------------------------------------------------------ cursors

    def unacked_count(self, topic: str, records: list[npt.NDArray[Any]]) -> int:
        """How many messages of a topic nobody ever tried to ack."""
        sent: set[tuple[int, int]] = set()
        for record in records:
            chosen = record[record["kind"] == ACK_SENT]
            sent |= set(zip(chosen["partition"].tolist(), chosen["offset"].tolist(), strict=True))
        return len(self.content[topic].keys() - sent)

    def _cut_short(self, record: npt.NDArray[Any]) -> dict[tuple[int, int], int]:
        """(partition, generation) -> the kill that ended this subscription of a consumer.

        Whatever comes under it was sent before the kill, so it is innocent if its ack became durable
        after the kill: then the next process gave it to another consumer, before this one noticed.
        A subscription that goes on for long was not ended by the kill, nor was one that no other
        follows.
        """
        received = record[record["kind"] == RECEIVED]
        cut: dict[tuple[int, int], int] = {}
        for partition in set(received["partition"].tolist()):
            mine = received[received["partition"] == partition]
            runs: dict[int, int] = {}
            for generation, at_ns in zip(
                mine["generation"].tolist(), mine["at_ns"].tolist(), strict=True
            ):
                runs[generation] = at_ns
            for generation, end_ns in list(runs.items())[:-1]:
                kills = [at for at in self.kills_ns if end_ns - self.noticed_ns < at < end_ns]
                if kills:
                    cut[partition, generation] = min(kills)
        return cut

    def cursor(
        self,
        topic: str,
        records: list[npt.NDArray[Any]],
        rest: list[tuple[int, int]],
    ) -> int:
        """One subscription: `records` of its consumers, and `rest`, all that came to a consumer
        that was attached last. Returns how many messages were durably acked."""
        durable: dict[tuple[int, int], int] = {}
        sent: set[tuple[int, int]] = set()
        for record in records:
            done = record[record["kind"] == DURABLE]
            columns = (done[name].tolist() for name in ("partition", "offset", "at_ns"))
            for partition, offset, at_ns in zip(*columns, strict=True):
                place = partition, offset
                durable[place] = min(at_ns, durable.get(place, at_ns))
        last: dict[tuple[int, int], int] = defaultdict(int)
        for record in records:
            cut = self._cut_short(record)
            names = ("kind", "partition", "offset", "at_ns", "generation")
            for kind, partition, offset, at_ns, generation in zip(
                *(record[name].tolist() for name in names), strict=True
            ):
                place = partition, offset
                if kind == ACK_SENT:
                    sent.add(place)
                elif kind == RECEIVED:
                    kill_ns = cut.get((partition, generation), at_ns)
                    if kill_ns < durable.get(place, at_ns) < at_ns:
                        self.excused += 1
                    else:
                        last[place] = max(at_ns, last[place])
        back = [place for place, at_ns in durable.items() if last[place] > at_ns]
        if back:
            place = min(back)
            kills = [round((at - durable[place]) / 1e9, 3) for at in self.kills_ns]
            raise self.fail(
                f"{topic}: {len(back)} came again although acked: {sorted(back)[:5]}; the first "
                f"{(last[place] - durable[place]) / 1e9:.3f} s after its ack was durable, the kills "
                f"were at {kills} s"
            )
        came = set(rest)
        back = sorted(came & durable.keys())
        if back:
            raise self.fail(f"{topic}: durable acks were forgotten: {len(back)}, {back[:5]}")
        lost = sorted(self.content[topic].keys() - came - sent)
        if lost:
            raise self.fail(f"{topic}: {len(lost)} are unacked and did not come back: {lost[:5]}")
        early = sorted(self.trimmed(topic) - sent)
        if early:
            raise self.fail(f"{topic}: {len(early)} were trimmed although unacked: {early[:5]}")
        return len(durable)
