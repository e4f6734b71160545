"""Producers that are kept open for whoever names a topic with every message.

Two callers never open two for one topic. One whose topic was deleted, or that a newer producer of its
name has fenced, makes way for a new one. The one used longest ago is closed when there are too many.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from danube_fast.client.link.pump import Steps, Wait
from danube_fast.client.produce.outbox import Outbox
from danube_fast.errors import DanubeError

if TYPE_CHECKING:
    from danube_fast.client.core import Core

__all__ = ["ProducerCache"]


class ProducerCache:
    """Open producers of one client by topic."""

    def __init__(self, core: Core, producers_max: int, *, creates: bool = True) -> None:
        """`creates`: a missing topic is created, where the broker allows that."""
        self._core = core
        self._max = producers_max
        self._creates = creates
        self._cached: collections.OrderedDict[str, Outbox] = collections.OrderedDict()
        self._opening: set[str] = set()
        """Topics whose producer somebody is opening."""

    def take_steps(self, topic: str) -> Steps[Outbox]:
        """The producer of a topic; opened now if there is none."""
        core = self._core
        while True:
            with core.pump.lock:  # looking and claiming are one step: else two would open
                producer = self._cached.get(topic)
                if producer is not None and self._is_usable(producer):
                    self._cached.move_to_end(topic)
                    return producer
                if topic not in self._opening:
                    self._opening.add(topic)
                    break
            yield Wait(lambda: topic not in self._opening)
        try:
            if producer is not None:
                yield from self._drop_steps(topic, producer)
            producer = yield from core.producer_steps(topic, must_exist=not self._creates)
            self._cached[topic] = producer
        finally:
            with core.pump.lock:
                self._opening.discard(topic)
                core.pump.notify()
        if len(self._cached) > self._max:
            oldest, unused = next(iter(self._cached.items()))
            yield from self._drop_steps(oldest, unused)
        return producer

    def _is_usable(self, producer: Outbox) -> bool:
        is_whole = all(lane.failure is None for lane in producer.lanes)
        return is_whole and producer in self._core.opened

    def _drop_steps(self, topic: str, producer: Outbox) -> Steps[None]:
        """Close one. Who waited for its acks has heard what became of them."""
        if self._cached.get(topic) is producer:
            self._cached.pop(topic, None)
        try:
            yield from producer.close_steps()
        except DanubeError:
            pass

    def forget_steps(self, topic: str) -> Steps[None]:
        """Close the producer of a topic, if there is one."""
        producer = self._cached.get(topic)
        if producer is not None:
            yield from self._drop_steps(topic, producer)
