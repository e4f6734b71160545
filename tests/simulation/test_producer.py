"""The scripted producer keeps to what WELCOME told it, and tells when it is refused for good."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.config import Settings
from danube_fast.errors import InvalidArgument
from danube_fast.frame.bundle import bundle_entries
from danube_fast.net.greeting import bundle_bytes_max, message_bytes_max
from danube_fast.testing.history_plan import HistoryPlan
from danube_fast.testing.producer import ScriptedProducer
from danube_fast.testing.publishing_model import Violation
from danube_fast.testing.virtual_clock import Schedule, VirtualClock

PARTITION = 2
OPENED = {"producer_id": 7, "producer_epoch": 1, "next_sequence": 0}
STEPS = 40
LARGE = 9_000


class Recorded(ScriptedProducer):
    """Has a session with a broker of small segments, and hears what the test answers."""

    def __init__(self) -> None:
        clock = VirtualClock()
        settings = HistoryPlan(0).settings(Settings())
        host: Any = SimpleNamespace(
            schedule=Schedule(clock), clock=clock, settings=settings, next_number=count().__next__
        )
        nothing: Any = None
        super().__init__("producer", host, nothing, nothing, random.Random(0), [PARTITION], 1000)
        self.begin()
        self.limits = {
            "message_bytes_max": message_bytes_max(settings),
            "bundle_bytes_max": bundle_bytes_max(settings),
        }
        self.bundle_bytes = HistoryPlan(0).bundle_bytes
        self.is_open = self.is_alive = True
        self.lanes[0].opened = OPENED
        self.bundles: list[bytes] = []
        self.answers: list[Callable[[Any], None]] = []

    def ask(self, command: Any, done: Callable[[Any], None], *parts: bytes) -> None:
        self.bundles += parts
        self.answers.append(done)

    def publish(self) -> None:
        for _ in range(STEPS):
            self._publish()


def frames_of(bundles: list[bytes]) -> list[int]:
    return [size for bundle in bundles for _, _, size in bundle_entries(bundle)]


def test_frames_that_are_too_many_for_a_bundle_go_in_two():
    producer = Recorded()
    producer.is_calm = True
    small, large = (b"small" + bytes(4_300), None), (b"large" + bytes(LARGE), None)
    producer.lanes[0].unacked = [[small], [(b"tiny", None)], [large, large, large, small]]
    limit = producer.limits["bundle_bytes_max"]
    producer.publish()
    assert len(producer.bundles) == 2
    assert len(frames_of(producer.bundles)) == 3
    assert sum(frames_of(producer.bundles)) > limit
    assert max(map(len, producer.bundles)) <= limit


def test_no_frame_alone_is_over_the_limit():
    producer = Recorded()
    producer.payload_sizes = (LARGE,)
    for _ in range(STEPS):
        producer.publish()
        producer.on_lost()
        producer.lanes[0].opened = OPENED
        producer.lanes[0].unacked.clear()
    assert max(frames_of(producer.bundles)) > 3 * LARGE
    assert max(map(len, producer.bundles)) <= producer.limits["bundle_bytes_max"]


def test_a_refusal_for_good_is_a_broken_promise():
    producer = Recorded()
    producer.is_calm = True
    producer.lanes[0].unacked = [[(b"message", None)]]
    producer.publish()
    (answer,) = producer.answers
    with pytest.raises(Violation, match="refused whenever"):
        answer([InvalidArgument.code, 0])
