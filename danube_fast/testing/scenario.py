"""A seed as a scenario: which workers, topics, subscriptions and clients there are, and what befalls
them when."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from danube_fast.broker.subscription import delays
from danube_fast.clock import MILLISECOND_NS
from danube_fast.config import Settings
from danube_fast.testing.consumer import TEMPERS
from danube_fast.testing.history_plan import CHAOS_MORE_NS, HistoryPlan
from danube_fast.workers.shard.deliver import dispatcher, lookahead

__all__ = ["FAULTS", "Bounds", "Scenario", "SubscriptionPlan", "TopicShape"]

KIB = 1024
FAULTS = (
    "kill_worker", "kill_worker", "stop_worker", "cut_power", "cut_power", "fail_sync", "fail_sync",
    "slow_disk", "slow_network", "kill_client", "kill_client", "stop_client", "stop_client",
    "lose_connection", "lose_connection", "kill_coordinator", "stall_worker", "move_wall_clock",
    "start_twin",
)  # fmt: skip
KINDS = ("exclusive", "shared", "shared", "failover", "key_shared", "key_shared")
DURABILITIES = ("fsync", "fsync", "fsync", "os", "os", "memory")
DEAD_LETTERS = "/default/dead-letters"
REPEATS_SHARE = 0.2
DELAYS_SHARE = 0.3
BOUNDS_SHARE = 0.5
CROWDS_MAX = 30
RESTARTS_MAX = 4
LATE_POLICY = {
    "max_redelivery_count": 5, "ack_timeout_ms": 0, "base_redelivery_delay_ms": 20,
    "max_redelivery_delay_ms": 500, "backoff_strategy": "fixed", "poison_policy": "block",
}  # fmt: skip


class Bounds(NamedTuple):
    """How much the broker does in one turn: constants of its modules, small enough to be met."""

    read_bytes: int
    """Read of the logs in one turn."""
    ahead_bytes: int
    """Read of a log at once."""
    wake_max: int
    """Delayed messages that are woken at once."""
    frames_at_once: int
    """Looked at for delays, of one subscription."""
    steps: int
    """So often in one turn."""

    @classmethod
    def present(cls) -> Bounds:
        """As they are now."""
        return cls(
            dispatcher.READ_BYTES_PER_TURN, dispatcher.READ_AHEAD_BYTES, delays.WAKE_MAX,
            lookahead.FRAMES_AT_ONCE, lookahead.STEPS_PER_TURN,
        )  # fmt: skip

    def set(self) -> None:
        """Put them in force for every worker of this process."""
        dispatcher.READ_BYTES_PER_TURN, dispatcher.READ_AHEAD_BYTES = (
            self.read_bytes,
            self.ahead_bytes,
        )
        delays.WAKE_MAX = self.wake_max
        lookahead.FRAMES_AT_ONCE, lookahead.STEPS_PER_TURN = self.frames_at_once, self.steps


@dataclass
class SubscriptionPlan:
    """One subscription and its consumers."""

    name: str
    kind: str
    tempers: list[str]
    filters: list[list[str]]
    permits: list[int]
    policy: dict[str, Any]
    late_ns: int = 0
    """Its consumers begin so late; 0: with the others."""


@dataclass
class TopicShape:
    """One topic."""

    topic: str
    durability: str
    partitions: int
    subscriptions: list[SubscriptionPlan] = field(default_factory=list)
    policy: dict[str, Any] = field(default_factory=dict)


@dataclass
class Scenario:
    """Everything that a seed decides beforehand."""

    seed: int
    steps: int
    """Faults."""
    moves_share: float = 0.0
    """Of the runs, those in which partitions move."""
    history_share: float = 0.0
    """Of the runs, those with an uploader, a store, and topics that stay."""

    def __post_init__(self) -> None:
        draw = self.draw = random.Random(f"scenario {self.seed}")
        self.worker_count = draw.choice((1, 1, 1, 2))
        self.log_count = self.worker_count * draw.choice((1, 1, 2))
        self.producers_per_worker = draw.choice((1, 1, 2))
        self.has_shipped = draw.random() < 0.5
        """Some clients are the shipped one."""
        self.messages_max = draw.randrange(60, 300)
        self.chaos_ns = draw.randrange(1500, 4000) * MILLISECOND_NS
        self.has_moves = draw.random() < self.moves_share
        """Partitions move between workers; all clients are the shipped one, which follows them."""
        if self.has_moves:
            self.worker_count = draw.choice((2, 2, 3))
            self.log_count = self.worker_count * draw.choice((1, 2))
            self.has_shipped = True
        self.history: HistoryPlan | None = None
        if random.Random(f"has history {self.seed}").random() < self.history_share:
            self.history = HistoryPlan(self.seed)
            self.chaos_ns += CHAOS_MORE_NS
        own = random.Random(f"repeats {self.seed}")
        self.has_repeats = not self.has_moves and own.random() < REPEATS_SHARE
        """Producers are impatient while the disk is slow, and then the power is cut."""
        later = random.Random(f"delays {self.seed}")
        self.delays_ms = later.choice((50, 1500, 4000)) if later.random() < DELAYS_SHARE else 0
        """Some messages are due later, by so much at most; 0: none is."""
        self.permits_bytes = random.Random(f"permits {self.seed}").choice((1000, 20_000, 1 << 24))
        """Byte credit of each consumer."""
        self.delays_share = later.choice((0.2, 0.4, 0.8))
        """Of the messages, those that are due later."""
        narrow = random.Random(f"bounds {self.seed}")
        self.bounds: Bounds | None = None
        """Those of the modules if it is None."""
        self.tail_bytes_max: int | None = None
        """As the settings draw it if it is None."""
        if narrow.random() < BOUNDS_SHARE:
            self.tail_bytes_max = narrow.choice((0, KIB, 16 * KIB, 64 * KIB * KIB))
            self.bounds = Bounds(
                read_bytes=narrow.choice((1, 2 * KIB, 16 * KIB)),
                ahead_bytes=narrow.choice((1, KIB, 8 * KIB)),
                wake_max=narrow.choice((1, 3)),
                frames_at_once=narrow.choice((1, 8)),
                steps=narrow.choice((1, 32)),
            )
        self.topics = [self._topic(number) for number in range(draw.choice((1, 1, 2)))]
        faults = FAULTS + ("move_partition",) * (len(FAULTS) * self.has_moves)
        self.faults = sorted(
            (draw.randrange(self.chaos_ns), draw.choice(faults))
            for _ in range(draw.randrange(self.steps * (1 + self.has_moves) + 1))
        )
        for _ in range(3 * self.has_repeats):
            self.faults.append((own.randrange(self.chaos_ns), "cut_power_while_slow"))
        if self.bounds is not None:
            more = ["crowd_memory"] * narrow.randrange(CROWDS_MAX)
            more += ["kill_worker"] * narrow.randrange(RESTARTS_MAX) * (self.delays_ms > 0)
            self.faults += [(narrow.randrange(self.chaos_ns), fault) for fault in more]
        if self.history is not None:
            self._add_history(self.history)
        self.faults.sort()

    def _add_history(self, plan: HistoryPlan) -> None:
        """Let topics stay, and let a subscription of each begin when much of it is history only."""
        self.permits_bytes = plan.permits_bytes
        self.tail_bytes_max = None
        self.faults += plan.faults(self.chaos_ns)
        for number, shape in enumerate(self.topics):
            shape.policy = plan.policy(number)
            late = SubscriptionPlan(
                "late", plan.late_kind, ["good"], [[]], [100_000], LATE_POLICY, plan.late_ns
            )
            shape.subscriptions.append(late)

    def settings(self, directory: str) -> Settings:
        """The broker's settings: small and quick, so that much happens in little time."""
        draw = self.draw
        settings = Settings(
            data_dir=directory,
            workers=self.worker_count,
            segment_bytes=draw.choice((128, 128, 256)) * KIB,
            segment_start_bytes=64 * KIB,
            spare_segments=draw.choice((0, 1)),
            wal_bytes_max=64 * KIB * KIB,
            group_bytes_max=draw.choice((64, 1024)) * KIB,
            retention_seconds_min=0,
            index_flush_entries=draw.choice((4, 64)),
            index_map_bytes=KIB * KIB,
            idle_marker_ms=draw.choice((20, 100)),
            heartbeat_ms=120,
            heartbeat_idle_ms=400,
            session_timeout_ms=600,
            tail_bytes_max=draw.choice((0, 4 * KIB, 64 * KIB * KIB)),
            delivery_bytes_max=draw.choice((4, 1024)) * KIB,
        )
        if self.tail_bytes_max is not None:
            settings = msgspec.structs.replace(settings, tail_bytes_max=self.tail_bytes_max)
        return settings if self.history is None else self.history.settings(settings)

    def _topic(self, number: int) -> TopicShape:
        draw = self.draw
        partitions = draw.choice((1, 1, 2, 3))
        shape = TopicShape(
            f"/default/t{number}",
            draw.choice(DURABILITIES),
            partitions,
        )
        for place in range(draw.choice((1, 1, 2))):
            shape.subscriptions.append(self._subscription(f"s{place}"))
        return shape

    def _subscription(self, name: str) -> SubscriptionPlan:
        draw = self.draw
        kind = draw.choice(KINDS)
        count = draw.choice((1, 2)) if kind == "exclusive" else draw.choice((1, 2, 3, 3))
        tempers = [draw.choice(TEMPERS) for _ in range(count)]
        if kind != "shared":
            # no other consumer gets what a silent one holds
            tempers = ["good" if temper == "silent" else temper for temper in tempers]
        elif "silent" in tempers:
            tempers[0] = "good"
        filters: list[list[str]] = [[] for _ in tempers]
        if kind == "key_shared" and draw.random() < 0.3:
            filters = [draw.choice(([], ["a*"], ["a*", "b*"])) for _ in tempers]
        policy = {
            "max_redelivery_count": draw.choice((0, 1, 3, 5)),
            "ack_timeout_ms": draw.choice((0, 300, 700, 5000)),
            "base_redelivery_delay_ms": draw.choice((20, 100, 300)),
            "max_redelivery_delay_ms": 500,
            "backoff_strategy": draw.choice(("fixed", "exponential")),
            "poison_policy": draw.choice(("block", "drop", "dead_letter")),
        }
        if "silent" in tempers:
            policy["ack_timeout_ms"] = 300
        if policy["poison_policy"] == "dead_letter":
            policy["dead_letter_topic"] = DEAD_LETTERS
        permits = [draw.choice((5, 50, 100_000)) for _ in tempers]
        return SubscriptionPlan(name, kind, tempers, filters, permits, policy)
