"""A gap, or an error of the log, that a subscription meets among its messages."""

from __future__ import annotations

from typing import NamedTuple

from danube_fast.broker.subscription.consumer import Gap
from danube_fast.broker.subscription.subscription import Subscription
from danube_fast.errors import DanubeError

__all__ = ["Obstacle"]


class Obstacle(NamedTuple):
    """A gap, or an error of the log, at which a subscription did not find a message."""

    subscription: Subscription
    found: Gap | DanubeError
    place: int
    """How many effects of the turn stand before it."""

    @property
    def is_silent(self) -> bool:
        """Whether no consumer hears of it."""
        return isinstance(self.found, Gap) and self.found.is_silent
