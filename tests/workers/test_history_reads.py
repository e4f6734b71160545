"""Reads of history by a worker: a partition that leaves and comes back gets what its new readers ask for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.broker import messages as m
from danube_fast.broker.subscription.consumer import PENDING, Read, Ready
from danube_fast.errors import Unavailable
from danube_fast.frame.crc import crc32c
from danube_fast.workers.process.mailbox import Reply
from danube_fast.workers.shard.history.fetches import HistoryReads
from tests.history.rig import make_frame

PARTITION, UPLOADER = 5, 9
PAYLOADS = [b"one", b"two"]


class Worker:
    """A worker that has one partition, or not; the uploader answers when the test says so."""

    def __init__(self, directory: Path) -> None:
        self.calls: list[tuple[m.FetchHistory, Any]] = []
        self.ready: list[Any] = []
        data = bytes(make_frame(PARTITION, 0, PAYLOADS))
        path = directory / "piece"
        path.write_bytes(data)
        self.state: Any = SimpleNamespace(
            now_ns=0, removal_listeners=[], partition=lambda number: self.partition,
            mark_ready=self.ready.append,
            boot=SimpleNamespace(
                config=SimpleNamespace(processes=SimpleNamespace(uploader=UPLOADER)),
                mailbox=SimpleNamespace(call=self._call),
            ),
        )  # fmt: skip
        self.reads = HistoryReads(self.state)
        self.arrive()
        block = m.Block(0, len(PAYLOADS), 0, len(data), crc32c(data))
        self.fetched = Reply(m.FetchedHistory(str(path), [block]))

    def _call(self, peer: int, message: m.FetchHistory, *, on_reply: Any, timeout_ms: int) -> None:
        self.calls.append((message, on_reply))

    def arrive(self) -> None:
        """Have the partition, anew."""
        self.partition: Any = SimpleNamespace(
            partition_id=PARTITION, topic="/default/t", visible=1 << 20,
            uploaded=SimpleNamespace(until=0, manifest=0),
        )  # fmt: skip

    def leave(self) -> None:
        """Have it no more: it has moved."""
        left, self.partition = self.partition, None
        for listener in self.state.removal_listeners:
            listener(left)

    def read(self) -> Read:
        return self.reads.read(self.partition, 0, len(PAYLOADS), 1)

    def answer(self, place: int, reply: Reply) -> None:
        self.calls[place][1](reply)


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    worker = Worker(tmp_path)
    assert worker.read() is PENDING
    return worker


def comes_back(worker: Worker) -> None:
    worker.leave()
    worker.arrive()
    assert worker.read() is PENDING
    assert len(worker.calls) == 2, "it asks anew"


def test_a_partition_that_comes_back_asks_anew_and_is_woken(worker: Worker) -> None:
    """Nothing may happen to it for hours but the answer: it waits for the first one as little as for others."""
    comes_back(worker)
    worker.answer(0, worker.fetched)
    assert worker.ready == [], "it was for another life"
    worker.answer(1, worker.fetched)
    assert worker.ready == [worker.partition]
    assert isinstance(worker.read(), Ready)
    worker.leave()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_fetch_that_fails_after_a_move_is_no_fault_of_the_next_one(
    worker: Worker, *, is_first: bool
) -> None:
    comes_back(worker)
    late = Reply(error=Unavailable("the uploader has ended"))
    for place in (0, 1) if is_first else (1, 0):
        worker.answer(place, late if place == 0 else worker.fetched)
    assert worker.ready == [worker.partition]
    assert isinstance(worker.read(), Ready)
    worker.leave()


def test_readers_of_one_life_share_a_fetch(worker: Worker) -> None:
    assert worker.read() is PENDING
    assert len(worker.calls) == 1
    worker.answer(0, worker.fetched)
    assert worker.ready == [worker.partition]
    worker.leave()


def test_an_answer_for_a_partition_that_is_elsewhere_wakes_nothing(worker: Worker) -> None:
    worker.leave()
    worker.answer(0, worker.fetched)
    assert worker.ready == []
