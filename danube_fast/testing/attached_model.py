"""Who is attached, as the door of a worker shows it: sessions, consumers, their credit, what they hold."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from danube_fast.testing.virtual_clock import MS

if TYPE_CHECKING:
    from danube_fast.testing.subscription_model import SubscriptionModel

__all__ = ["Attached", "Credit", "Held", "Known", "Policy", "Session"]


@dataclass(frozen=True)
class Policy:
    """The failure policy that the subscription was created with; times in milliseconds."""

    max_redelivery_count: int = 5
    ack_timeout_ms: int = 30_000
    base_redelivery_delay_ms: int = 1_000
    max_redelivery_delay_ms: int = 60_000
    backoff_strategy: str = "exponential"
    poison_policy: str = "block"
    dead_letter_topic: str = ""

    def delay_min_ns(self, failures: int) -> int:
        """A message that failed so often comes again no earlier than this."""
        delay_ms = self.base_redelivery_delay_ms
        if self.backoff_strategy == "exponential":
            delay_ms <<= max(0, failures - 1)
        return min(delay_ms, self.max_redelivery_delay_ms) * MS


@dataclass
class Credit:
    """What a flow was granted, less what was sent on it. The worker may have known less when it handed
    something out, never more."""

    byte_count: int = 0
    messages: int = 0

    def grant(self, byte_count: int, messages: int) -> None:
        """FLOW was read."""
        self.byte_count += byte_count
        self.messages += messages


@dataclass
class Attached:
    """A consumer as the worker's door shows it."""

    session: int
    consumer_id: int
    filters: tuple[str, ...]
    is_confirmed: bool = False
    is_gone: bool = False
    has_received: bool = False
    is_outdated: bool = False
    """Another one has sought since: what it acks may be from before."""
    name: str = ""
    owner: str = ""
    """The name that its client gave it."""
    credit: Credit = field(default_factory=Credit)
    """Of the flow that it draws on."""
    left_with: dict[int, Held] = field(default_factory=dict)
    """What it held when it was sent away."""
    left_ns: int = 0


@dataclass
class Held:
    """A message that a consumer holds."""

    consumer: Attached
    deadline_ns: int
    """When the ack timeout goes by."""


@dataclass
class Known:
    """What is known of one message in this subscription, in this life of its worker."""

    deliveries: int = 0
    failures_min: int = 0
    failures_max: int = 0
    not_before_ns: int = 0
    unseen: int = 0
    """Sessions that ended since the last delivery: something may have been on its way to them."""


@dataclass
class Session:
    """A session as its worker's door shows it."""

    number: int
    token: bytes
    heard_ns: int
    consumers: dict[int, tuple[SubscriptionModel, Attached]] = field(default_factory=dict)
    flows: dict[int, Credit] = field(default_factory=dict)
    leaving: dict[int, tuple[SubscriptionModel, Attached]] = field(default_factory=dict)
    """Sent away because a partition moves, and still heard."""
    is_gone: bool = False
    is_lagging: bool = False

    def ranges(
        self, entries: Any, *, last: bool = False
    ) -> Iterator[tuple[SubscriptionModel, Attached, int, int]]:
        """The [low, high) ranges of an ACK, NACK or EXTEND, with whom they concern. `last`: also of
        those that were sent away."""
        known = {**self.leaving, **self.consumers} if last else self.consumers
        for consumer_id, pairs in entries:
            sub, consumer = known.get(consumer_id, (None, None))
            if sub is None or consumer is None:
                continue
            if isinstance(pairs, bytes):
                pairs = list(struct.unpack(f"<{len(pairs) // 8}q", pairs))
            for low, high in zip(pairs[::2], pairs[1::2], strict=True):
                yield sub, consumer, low, high
