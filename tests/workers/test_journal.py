"""Groups and records at the ends of segments."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from danube_fast.config import KIB
from danube_fast.workers import upkeep
from tests.workers.shard_rig import Rig

FRAMES = 300
MESSAGES = 40


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    started = Rig(tmp_path / "data", segment_bytes=64 * KIB, group_bytes_max=64 * KIB)
    yield started
    started.stop()


def test_records_that_come_behind_a_reservation(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group has its places when acks of the same turn turn into records, again and again: none of
    both is refused where a segment ends."""
    monkeypatch.setattr(upkeep, "CURSOR_INTERVAL_NS", 0)
    draw = random.Random(3)
    rig.assign(1)
    client = rig.client()
    opened = client.open_producer(1)
    client.subscribe(1)
    holes = range(0, FRAMES * MESSAGES, 7)
    for turn in range(FRAMES):
        payloads = [draw.randbytes(draw.randrange(120)) for _ in range(MESSAGES)]
        frame = client.frame(opened, turn * MESSAGES, payloads)
        assert client.publish((1, frame)) == [0, turn * MESSAGES]
        client.receive(MESSAGES)
        base = turn * MESSAGES
        acked = [i for i in range(base, base + MESSAGES) if i not in holes]
        # unanswered, so that it is read in one turn with the next publish
        client.send(22, 0, [[1, [edge for i in acked for edge in (i, i + 1)]]])
    assert rig.worker.journals[0].refusal == ""
    partition = rig.worker.catalog.by_id[1]
    client.ack(FRAMES * MESSAGES - 1, FRAMES * MESSAGES)
    missing = partition.subscriptions["s"].acked.missing(0, FRAMES * MESSAGES)
    assert [i for low, high in missing for i in range(low, high)] == list(holes)
    assert rig.worker.logs[0].written_position > 10 * 64 * KIB
