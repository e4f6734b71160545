"""SIGKILL of a worker, again and again, under single publishes over rings.

    load: 2 processes of producers, each thread with a message on its way: fsync, os, memory, non_reliable
          consumers of each topic over rings in this process
    round: wait for acks of all, SIGKILL at any moment, go on
    end:   read everything back, and hold it against what was acked and what was received

DANUBE_RING_KILLS=n makes it n rounds, DANUBE_CRASH_SEED other moments.
"""

from __future__ import annotations

import json
import os
import random
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.crash.payloads import ACKED, FAILED, RECORD_DTYPE, ident_text, producer_of, read_records
from tests.crash.rig import Member, Server
from tests.faults.ring_rig import ALL, FLEETING, FSYNC, MEMORY, OS, RingTaker, check_log
from tests.workers.broker import wait_until

KILLS = int(os.environ.get("DANUBE_RING_KILLS", "5"))
SEED = int(os.environ.get("DANUBE_CRASH_SEED", "20240917"))
ACKS = 50
"""Of each producer between two kills, at least."""
DELAY_SECONDS_MAX = 0.05
TOPICS = [[FSYNC, FSYNC, OS, FLEETING], [FSYNC, OS, MEMORY, "/default/ring-alone"]]
"""Of the producers, by process."""
OPTIONS = {**ALL, "/default/ring-alone": {"durability": "fsync"}}
DURABLE = (FSYNC, OS, "/default/ring-alone")


class Producers:
    """Processes of producers that publish one by one, and what they wrote down."""

    def __init__(self, folder: Path, server: Server, stack: ExitStack) -> None:
        self.topics: dict[int, str] = {}
        self.records: dict[int, Path] = {}
        self.members = [
            self._member(folder, server, stack, number, topics)
            for number, topics in enumerate(TOPICS)
        ]
        for member in self.members:
            member.wait_ready()

    def _member(
        self, folder: Path, server: Server, stack: ExitStack, number: int, topics: list[str]
    ) -> Member:
        plans: list[dict[str, Any]] = []
        for topic in topics:
            index = len(self.topics) + 1
            self.topics[index], self.records[index] = topic, folder / f"p{index}.acks"
            plans.append(
                {"topic": topic, "name": f"p{index}", "index": index, "style": "single",
                 "options": OPTIONS[topic], "record": str(self.records[index]), "pause": 0.0}
            )  # fmt: skip
        plan = {"url": server.url, "producers": plans, "transport": "shm"}
        return stack.enter_context(Member("producer_process", plan, folder / f"member{number}"))

    def counts(self) -> dict[int, int]:
        """Answers by producer, so far."""
        return {
            index: path.stat().st_size // RECORD_DTYPE.itemsize
            for index, path in self.records.items()
        }

    def wait_acks(self) -> None:
        """Until each has so many more."""
        marks = {index: count + ACKS for index, count in self.counts().items()}

        def missing() -> dict[str, int]:
            return {
                f"p{index} of {self.topics[index]}": count
                for index, count in self.counts().items()
                if count < marks[index]
            }

        try:
            wait_until("acks", lambda: not missing())
        except AssertionError:
            said = [member.error_text() for member in self.members]
            raise AssertionError(f"no {ACKS} acks more: {missing()} {said}") from None

    def finish(self) -> dict[int, int]:
        """End them; how many messages each has sent."""
        sent: dict[str, int] = {}
        for member in self.members:
            sent |= json.loads(member.finish())
        return {int(name[1:]): count for name, count in sent.items()}

    def acked(self, topic: str) -> dict[int, int]:
        """Ident by offset of what was acked on a topic."""
        found: dict[int, int] = {}
        for index, path in self.records.items():
            if self.topics[index] != topic:
                continue
            for record in read_records(path):
                assert record["kind"] != FAILED, f"{ident_text(int(record['ident']))} was given up"
                assert record["kind"] == ACKED
                offset, ident = int(record["offset"]), int(record["ident"])
                assert offset not in found, f"{topic}@{offset} was acked for two messages"
                found[offset] = ident
        return found


@pytest.mark.timeout(240 + 5 * KILLS)
def test_a_worker_killed_under_ring_publishes(tmp_path: Path) -> None:
    draw = random.Random(SEED)
    with (
        Server(tmp_path / "data", workers=1, segment_bytes=4 << 20, restart_delay_ms=0) as server,
        server.client(transport="shm") as client,
        ExitStack() as stack,
    ):
        for topic, options in OPTIONS.items():
            client.admin.create_topic(topic, **options)
        takers = {topic: RingTaker(client, topic) for topic in OPTIONS}
        for taker in takers.values():
            taker.start()
            stack.callback(taker.stopping.set)
        producers = Producers(tmp_path, server, stack)
        for _ in range(KILLS):
            producers.wait_acks()
            time.sleep(draw.uniform(0.0, DELAY_SECONDS_MAX))  # any moment will do
            server.kill("worker", 1)
        producers.wait_acks()
        sent = producers.finish()
        check(producers, takers, client, sent)
        assert server.status()["processes"][1]["restarts"] == KILLS


def check(
    producers: Producers, takers: dict[str, RingTaker], client: Any, sent: dict[int, int]
) -> None:
    """Nothing acked is lost, nothing is there twice, consumers got everything in order."""
    about = f"after {KILLS} kills"
    for topic in DURABLE:
        acked = producers.acked(topic)
        found = check_log(client, topic, acked, about)
        expected = sum(sent[index] for index, name in producers.topics.items() if name == topic)
        assert len(found) == len(acked) == expected, f"{topic} {about}: not all calls ended acked"
        taker = takers[topic]
        wait_until(
            f"all {len(found)} messages of {topic} at its consumer",
            lambda f=found, t=taker: f.keys() <= t.seen.keys() or t.failure,
        )
    for taker in takers.values():
        taker.stopping.set()
    for topic, taker in takers.items():
        taker.stop()
        if topic in DURABLE:
            assert not taker.wrong, taker.wrong[:5]
            assert list(taker.seen) == sorted(taker.seen), f"{topic}: offsets came out of order"
            taker.check_order()
        else:  # offsets of what a killed worker had in memory may be given again
            assert {producer_of(ident) for ident in taker.seen.values()}, f"{topic}: nothing came"
