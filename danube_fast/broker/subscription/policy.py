"""The failure policy: how late messages that are given back come again, how often, and what becomes of them then."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import msgspec

from danube_fast.checks import in_our_words, parse_amount, unit_of
from danube_fast.clock import MILLISECOND_NS
from danube_fast.errors import InvalidArgument
from danube_fast.types import REPLY_TOPICS, parse_topic

__all__ = ["Backoff", "FailurePolicy", "Poison", "parse_policy"]

REDELIVERIES_MAX = 254
"""Failures of a message are counted in a byte."""
MS_MAX = 7 * 24 * 3600 * 1000
JITTER = 0.2
"""Backoffs are up to so much longer, so that messages that failed together do not come together."""


class Backoff(enum.StrEnum):
    """How the delay grows."""

    FIXED = "fixed"
    EXPONENTIAL = "exponential"


class Poison(enum.StrEnum):
    """The end of a message that failed too often."""

    BLOCK = "block"
    """It stays unacked and is not delivered, until the policy changes or a seek passes it."""
    DROP = "drop"
    """It counts as acked."""
    DEAD_LETTER = "dead_letter"
    """It is published to another topic, then counts as acked."""


class FailurePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Failure policy of a subscription (FEATURES 4). Times in milliseconds; 0 = no ack timeout."""

    max_redelivery_count: int = 5
    """Failures after which a message comes again, up to 254. One more, and it is poison."""
    ack_timeout_ms: int = 30_000
    """An ack that takes longer is a failure. 0: never."""
    base_redelivery_delay_ms: int = 1_000
    """Pause before the first redelivery."""
    max_redelivery_delay_ms: int = 60_000
    """The longest pause."""
    backoff_strategy: Backoff = Backoff.EXPONENTIAL
    """`exponential`: the pause doubles from failure to failure. `fixed`: it does not. Up to a fifth is added, so that
    messages that failed together do not come together."""
    poison_policy: Poison = Poison.BLOCK
    """`block`: poison stays unacked until the policy changes or a seek passes it. `drop`: it counts as acked.
    `dead_letter`: it goes to `dead_letter_topic`, then counts as acked."""
    dead_letter_topic: str = ""
    """A reliable topic other than the subscription's. It is made if it is missing."""

    def delay_ns(self, failures: int, draw: float) -> int:
        """How long a message waits that failed so often; `draw` in [0, 1) chooses the jitter."""
        delay_ms = float(self.base_redelivery_delay_ms)
        if self.backoff_strategy is Backoff.EXPONENTIAL:
            delay_ms *= 2.0 ** min(max(failures, 1) - 1, 60)
        delay_ms *= 1 + JITTER * draw
        return int(min(delay_ms, self.max_redelivery_delay_ms) * MILLISECOND_NS)

    @property
    def ack_timeout_ns(self) -> int:
        """The ack timeout; 0 if there is none."""
        return self.ack_timeout_ms * MILLISECOND_NS


def parse_policy(values: Mapping[str, Any], before: FailurePolicy | None = None) -> FailurePolicy:
    """`before` (or the default) with other values. Raises InvalidArgument that names what is wrong."""
    merged = {**msgspec.to_builtins(before or FailurePolicy()), **values}
    for name, value in values.items():
        if isinstance(value, str) and unit_of(name):  # such as 10s
            merged[name] = value if (amount := parse_amount(name, value)) is None else amount
    try:
        policy = msgspec.convert(merged, FailurePolicy)
    except msgspec.ValidationError as fault:
        words = in_our_words(fault, "failure policy")
        raise InvalidArgument(f"{words}; see tuning.md, 'Failure policy'") from None
    if not 0 <= policy.max_redelivery_count <= REDELIVERIES_MAX:
        raise InvalidArgument(f"max_redelivery_count must be from 0 to {REDELIVERIES_MAX}")
    for name in ("ack_timeout_ms", "base_redelivery_delay_ms", "max_redelivery_delay_ms"):
        if not 0 <= getattr(policy, name) <= MS_MAX:
            raise InvalidArgument(f"{name} must be from 0 to {MS_MAX} (7 days)")
    if policy.dead_letter_topic:
        parse_topic(policy.dead_letter_topic)
        if policy.dead_letter_topic.startswith(REPLY_TOPICS):
            raise InvalidArgument("a reply topic keeps no dead letters; name another topic")
    elif policy.poison_policy is Poison.DEAD_LETTER:
        raise InvalidArgument(
            "poison_policy dead_letter needs a dead_letter_topic, such as /default/dead-letters"
        )
    return policy
