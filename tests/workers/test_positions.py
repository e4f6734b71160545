"""Skipping a large part of a backlog: in slices, and with an answer whatever becomes of the topic."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from danube_fast.broker import messages as m
from danube_fast.broker.partition import Partition
from danube_fast.errors import DataLoss, Unavailable
from danube_fast.workers.shard.keep import positions
from tests.workers.shard_rig import FakeRequest, Rig
from tests.workers.test_policies import assign, subscription

FRAMES, EACH = 120, 10


def filled(start: Any, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """A topic of many frames with a subscription; a slice is ten frames."""
    rig: Rig = start()
    monkeypatch.setattr(positions, "SLICE_FRAMES", 10)
    monkeypatch.setattr(positions, "SLICE_NS", 1 << 60)
    assign(rig)
    client = rig.client()
    opened = client.open_producer(1)
    client.subscribe(1, credit=0)
    for i in range(FRAMES):
        assert client.publish((1, client.frame(opened, i * EACH, [b"x"] * EACH))) == [0, i * EACH]
    return rig


def ask_to_skip(rig: Rig, count: int) -> FakeRequest:
    request = FakeRequest(m.SkipMessages([1], "s", count))
    rig.mailbox.handlers[m.SkipMessages](request)
    return request


def test_messages_are_skipped_in_slices(start, monkeypatch):
    rig = filled(start, monkeypatch)
    request = ask_to_skip(rig, 1005)
    seen = [subscription(rig)["cursor"]]
    assert seen == [10 * EACH] and not request.done, "the first slice ends after ten frames"

    def is_done() -> bool:
        seen.append(subscription(rig)["cursor"])
        return request.done

    rig.turn(is_done, "the answer")
    assert request.error is None
    assert request.value == [(1, 1005, 1005)]
    # on a slow machine two slices may lie between two looks
    assert max(b - a for a, b in itertools.pairwise(seen)) <= 20 * EACH
    assert not rig.worker.positions.is_busy


def test_two_wishes_are_met_one_after_the_other(start, monkeypatch):
    rig = filled(start, monkeypatch)
    first, second = ask_to_skip(rig, 300), ask_to_skip(rig, 5000)
    rig.turn(lambda: second.done, "both answers")
    assert first.value == [(1, 300, 300)]
    assert second.value == [(1, 900, 1200)]


def test_a_topic_that_goes_meanwhile_ends_it_with_a_word(start, monkeypatch):
    rig = filled(start, monkeypatch)
    request = ask_to_skip(rig, 1000)
    rig.operation(m.Unassign([1]))
    rig.turn(lambda: request.done, "the answer")
    assert isinstance(request.error, Unavailable)
    assert "after 100 messages were skipped" in str(request.error)


def test_what_cannot_be_read_ends_it_with_a_word(start, monkeypatch):
    rig = filled(start, monkeypatch)
    request = ask_to_skip(rig, 1000)

    def unreadable(*_: Any) -> Any:
        raise DataLoss("it is damaged")

    monkeypatch.setattr(Partition, "frame_at", unreadable)
    rig.turn(lambda: request.done, "the answer")
    assert isinstance(request.error, DataLoss)
    assert not rig.worker.positions.is_busy
