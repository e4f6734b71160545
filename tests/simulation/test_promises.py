"""Promises with a number, on the simulated host: exact shares, and how soon a standby takes over."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from danube_fast.clock import MILLISECOND_NS, SECOND_NS
from danube_fast.frame.bundle import bundle_entries
from danube_fast.frame.view import FrameView
from danube_fast.net import protocol as p
from danube_fast.testing.consumer import ScriptedConsumer
from danube_fast.testing.scenario import Scenario, SubscriptionPlan, TopicShape
from danube_fast.testing.simulation import Simulation

PROMOTION_NS = 3 * SECOND_NS


class Plain(Scenario):
    """One worker, one topic, one subscription, no faults; sessions end as they do by default."""

    def __init__(self, seed: int, kind: str, consumers: int) -> None:
        super().__init__(seed, 0)
        self.worker_count = self.log_count = 1
        self.has_shipped = self.has_moves = self.has_repeats = False
        self.delays_ms = 0
        self.faults = []
        self.producers_per_worker = 1
        self.messages_max = 1_500
        plan = SubscriptionPlan(
            "s0", kind, ["good"] * consumers, [[]] * consumers, [100_000] * consumers,
            {"ack_timeout_ms": 30_000},
        )  # fmt: skip
        self.topics = [TopicShape("/default/t0", "fsync", 1, [plan])]

    def settings(self, directory: str) -> Any:
        changed = {"heartbeat_ms": 500, "heartbeat_idle_ms": 15_000, "session_timeout_ms": 2500}
        return msgspec.structs.replace(super().settings(directory), **changed)


class Counted(ScriptedConsumer):
    """Remembers what came, and when."""

    def begin(self) -> None:
        super().begin()
        self.seen: list[tuple[int, int]] = []
        self.is_calm = True  # takes and acks, and nothing else

    def on_deliver(self, command: p.Deliver, bundles: list[bytes]) -> None:
        super().on_deliver(command, bundles)
        for bundle in bundles:
            for _, start, _ in bundle_entries(bundle):
                for offset in FrameView(bundle, start).offsets().tolist():
                    self.seen.append((self.clock.now_ns, offset))


@pytest.fixture
def simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = []

    def make(scenario: Scenario) -> Simulation:
        monkeypatch.setattr("danube_fast.testing.simulation.ScriptedConsumer", Counted)
        simulation = Simulation(scenario, tmp_path / f"data-{len(made)}")
        simulation.host.directory.mkdir()
        made.append(simulation)
        simulation.host.start()
        return simulation

    yield make
    for simulation in made:
        simulation.close()


def consumers_of(simulation: Simulation) -> list[Counted]:
    return [x for x in simulation.peers if isinstance(x, Counted) and x.subscription == "s0"]


@pytest.mark.parametrize("seed", range(2))
def test_36_messages_over_3_shared_consumers_are_12_each(simulated, seed):
    simulation = simulated(Plain(seed, "shared", 3))
    consumers = consumers_of(simulation)
    for consumer in consumers:
        consumer.start()
    simulation.schedule.run(1 * SECOND_NS)
    producer = simulation.peers[0]
    producer.is_calm = True  # begins nothing of its own
    producer.start()
    simulation.schedule.run(1 * SECOND_NS)
    lane = producer.lanes[0]
    for number in range(36):
        lane.unacked.append([(b"message %d" % number, None)])
        simulation.schedule.run(200 * MILLISECOND_NS)
    counts = Counter(len(consumer.seen) for consumer in consumers)
    assert counts == {12: 3}
    everything = sorted(offset for consumer in consumers for _, offset in consumer.seen)
    assert everything == list(range(36))


@pytest.mark.parametrize("end", ["kill", "stop"])
@pytest.mark.parametrize("seed", range(3))
def test_a_standby_takes_over_within_3_seconds(simulated, seed, end):
    simulation = simulated(Plain(seed, "failover", 3))
    for peer in simulation.peers:
        peer.start()
        simulation.schedule.run(100 * MILLISECOND_NS)
    simulation.schedule.run(1 * SECOND_NS + random.Random(seed).randrange(1000) * MILLISECOND_NS)
    consumers = consumers_of(simulation)
    (active,) = [consumer for consumer in consumers if consumer.seen]
    ended_ns = simulation.clock.now_ns
    if end == "kill":
        active.kill()
    else:
        active.stop(60 * SECOND_NS)
    simulation.schedule.run(4 * SECOND_NS)
    others = [consumer for consumer in consumers if consumer is not active and consumer.seen]
    assert len(others) == 1, "one standby, and only one, is promoted"
    offsets = [offset for _, offset in others[0].seen]
    assert offsets == list(range(offsets[0], offsets[0] + len(offsets))), "no gap, no reordering"
    assert offsets[0] <= max(offset for _, offset in active.seen) + 1
    assert others[0].seen[0][0] - ended_ns <= PROMOTION_NS
