"""Opens the producers of one client, and keeps some open for callers that name a topic with every message."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable
from typing import Any

from danube_fast.checks import check_names, check_text
from danube_fast.client.link.buffers import Buffers
from danube_fast.client.link.steps import Steps, Wait
from danube_fast.client.produce.publisher import Publisher
from danube_fast.client.topics.routes import Routes
from danube_fast.client.topics.watcher import Watcher
from danube_fast.client.values.arguments import ProducerArguments
from danube_fast.client.values.options import ProducerOptions, checked_settings
from danube_fast.errors import DanubeError
from danube_fast.types import parse_topic

__all__ = ["ProducerCache", "Producers"]


class Producers:
    """Opens publishers."""

    def __init__(self, routes: Routes, watcher: Watcher, new_name: Callable[[], str]) -> None:
        """`new_name` makes a name that no other producer has."""
        self.routes = routes
        self._watcher = watcher
        self._new_name = new_name
        self._buffers = Buffers()

    def open_steps(
        self,
        topic: str,
        *,
        name: str | None = None,
        dispatch: str | None = None,
        durability: str | None = None,
        partitions: int | None = None,
        must_exist: bool = False,
        kind: type[Publisher] = Publisher,
        **options: Any,
    ) -> Steps[Publisher]:
        """Look up or create the topic (unless it `must_exist`) and open a producer of that `kind`."""
        check_names(options, ProducerArguments.__annotations__, "producer()")
        checked = ProducerOptions(**options)
        parse_topic(topic)
        if name is not None:
            check_text(name, "name")
        given = checked_settings(dispatch, durability, partitions)
        create = None if must_exist else given
        routes = self.routes
        deadline_ns = routes.pump.clock.monotonic_ns() + checked.timeout_ns
        route = yield from routes.lookup_steps(topic, create, 0, deadline_ns)
        with routes.pump.lock:
            producer = kind(routes, self._buffers, route, name or self._new_name(), checked)
            route.user = weakref.ref(producer)
            routes.users[producer] = None
            self._watcher.follow(route)
        try:
            yield from producer.open_steps(deadline_ns)
        except BaseException:
            routes.discard(producer)
            raise
        return producer


class ProducerCache:
    """Open producers by topic.

    Two callers never open two for one topic. One whose topic was deleted, or that a newer producer of its
    name has fenced, makes way for a new one. The one used longest ago is closed when there are too many.
    """

    def __init__(self, producers: Producers, producers_max: int, *, creates: bool = True) -> None:
        """`creates`: a missing topic is created, where the broker allows that."""
        self._producers = producers
        self._pump = producers.routes.pump
        self._max = producers_max
        self._creates = creates
        self._cached: collections.OrderedDict[str, Publisher] = collections.OrderedDict()
        self._opening: set[str] = set()
        """Topics whose producer is being opened."""

    def ready(self, topic: str) -> Publisher | None:
        """Return the producer of a topic if that is open. Under the pump's lock."""
        producer = self._cached.get(topic)
        if producer is None or not producer.is_usable:
            return None
        self._cached.move_to_end(topic)
        return producer

    def take_steps(self, topic: str) -> Steps[Publisher]:
        """Return the producer of a topic; opened now if there is none."""
        while True:
            with self._pump.lock:  # looking and claiming are one step: else two would open
                producer = self.ready(topic)
                if producer is not None:
                    return producer
                if topic not in self._opening:
                    self._opening.add(topic)
                    break
            yield Wait(lambda: topic not in self._opening)
        try:
            yield from self.forget_steps(topic)
            producer = yield from self._producers.open_steps(topic, must_exist=not self._creates)
            self._cached[topic] = producer
        finally:
            with self._pump.lock:
                self._opening.discard(topic)
                self._pump.notify()
        if len(self._cached) > self._max:
            oldest, unused = next(iter(self._cached.items()))
            yield from self._drop_steps(oldest, unused)
        return producer

    def _drop_steps(self, topic: str, producer: Publisher) -> Steps[None]:
        """Close one. Callers that waited for its acks have heard what became of them."""
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
