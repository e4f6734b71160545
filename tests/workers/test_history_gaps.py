"""What history has given up is told to consumers, whether the partition's owner was told of it or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.broker import messages as m
from danube_fast.broker import records as r
from danube_fast.frame.crc import crc32c
from danube_fast.workers.process.mailbox import Reply
from danube_fast.workers.shard.read import log_reader
from danube_fast.workers.shard.read.places import live_runs
from tests.history.rig import make_frame
from tests.workers.shard_rig import RawClient, Rig

COUNT, UPLOADED, LOG_START = 12, 10, 8
"""Messages; those that are uploaded; the first one that the log has still."""


class Lagging:
    """A partition in history, whose owner was not told what history has given up."""

    def __init__(self, rig: Rig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rig, self.path = rig, folder / "blocks"
        rig.boot.config.processes = SimpleNamespace(uploader=9, workers=[0])
        rig.assign(1, durability="os", policy={"retention_policy": "forever"})
        self.client = rig.client()
        opened = self.client.open_producer(1)
        for number in range(COUNT):
            frame = self.client.frame(opened, number, [b"%d" % number])
            assert self.client.publish((1, frame)) == [0, number]
        self.upload(0)

        def trimmed(log: Any, partition: Any, offset: int, byte_limit: int) -> Any:
            return live_runs(log, partition, max(offset, LOG_START), byte_limit)

        monkeypatch.setattr(log_reader, "live_runs", trimmed)

    def upload(self, first_offset: int) -> None:
        """Tell the owner how far it is uploaded."""
        self.rig.operation(m.SetUploaded(1, 1, UPLOADED, first_offset, 3, 100))

    def wait_for_fetch(self, offset: int) -> Callable[[Any], None]:
        """Turn the loop until an offset is asked for; what answers."""

        def asked() -> list[Callable[[Any], None]]:
            calls = self.rig.mailbox.calls
            return [on_reply for message, on_reply in calls if is_fetch(message, offset)]

        (on_reply,) = self.rig.turn(asked, f"a fetch of {offset}")
        return on_reply

    def answer(self, offset: int, gone_until: int, *, end: int | None = None) -> None:
        """Answer the fetch of an offset as an uploader whose manifest begins at `gone_until`. `end`: nothing is from the
        offset to there."""
        on_reply = self.wait_for_fetch(offset)
        found = m.FetchedHistory("", [], gone_until, end or 0)
        if end is None and offset >= gone_until:
            frames = [make_frame(1, at, [b"%d" % at]) for at in range(offset, LOG_START)]
            data = b"".join(frames)
            self.path.write_bytes(data)
            block = m.Block(offset, LOG_START, 0, len(data), crc32c(data))
            found = m.FetchedHistory(str(self.path), [block])
        on_reply(Reply(found))


def is_fetch(message: m.Message, offset: int) -> bool:
    return isinstance(message, m.FetchHistory) and message.offset == offset


def gaps(client: RawClient) -> list[tuple[int, int, bool]]:
    client.pump()
    told = [event[3] for event in client.events if event[2] == "gap"]
    return [(detail["start"], detail["end"], detail["lost"]) for detail in told]


@pytest.fixture
def lagging(rigs: Callable[..., Rig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lagging:
    return Lagging(rigs(tail_bytes_max=0, store="file:///store"), tmp_path, monkeypatch)


def test_what_the_store_has_given_up_is_told(lagging: Lagging) -> None:
    """The rest comes from history, then from the log."""
    lagging.client.subscribe(1)
    lagging.answer(0, 5)
    lagging.answer(5, 5)
    got = [offset for offset, _ in lagging.client.receive(COUNT - 5)]
    assert got == list(range(5, COUNT))
    assert gaps(lagging.client) == [(0, 5, True)]


def test_what_the_log_has_still_is_delivered(lagging: Lagging) -> None:
    """Of an older copy: what history has given up, or had behind it, says nothing of the log's messages."""
    lagging.client.subscribe(1)
    lagging.answer(0, UPLOADED + 100)
    got = [offset for offset, _ in lagging.client.receive(COUNT - LOG_START)]
    assert got == list(range(LOG_START, COUNT))
    assert gaps(lagging.client) == [(0, LOG_START, True)]


def test_a_gap_before_history_ends_where_history_begins(lagging: Lagging) -> None:
    """The owner is told what has expired while a subscription is behind."""
    lagging.client.subscribe(1, credit=0)
    lagging.upload(5)
    lagging.client.send(21, 1, 1 << 30, 1 << 30)
    lagging.answer(5, 5)
    got = [offset for offset, _ in lagging.client.receive(COUNT - 5)]
    assert got == list(range(5, COUNT))
    assert gaps(lagging.client) == [(0, 5, True)]


@pytest.mark.parametrize("end", [5, LOG_START, UPLOADED + 100])
def test_a_history_with_nothing_behind_an_offset_is_told_at_once(
    lagging: Lagging, end: int
) -> None:
    """Up to the end of the manifest, as far as the owner knows it to be uploaded; nothing else is passed over."""
    lagging.client.subscribe(1)
    lagging.answer(0, 0, end=end)
    if end < LOG_START:
        lagging.answer(end, 0)
    start = min(end, LOG_START)
    got = [offset for offset, _ in lagging.client.receive(COUNT - start)]
    assert got == list(range(start, COUNT))
    assert gaps(lagging.client) == [(0, start, False)]


def test_an_end_of_history_that_the_owner_was_not_told_of_says_nothing(lagging: Lagging) -> None:
    """What was uploaded since the question may stand there."""
    lagging.client.subscribe(1, credit=0)
    lagging.client.send(21, 1, 1 << 30, 1 << 30)
    lagging.rig.worker.state.catalog.by_id[1].note_uploaded(r.Uploaded(1, 3, 0, 2, 30))
    lagging.wait_for_fetch(0)
    lagging.upload(0)
    lagging.answer(0, 0, end=LOG_START)
    lagging.answer(3, 3)
    got = [offset for offset, _ in lagging.client.receive(COUNT - 3)]
    assert got == list(range(3, COUNT))
    assert gaps(lagging.client) == [(0, 3, False)]
