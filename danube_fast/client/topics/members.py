"""Members: the topics of a consumer that was opened with a pattern, as they come and go.

    told by the watcher --> looked up, some at a time --> joined: from the consumer's own position if
                                                          they were there when it was opened, else
                                                          from their first message

A topic that is deleted leaves without a word. One that is made again under its name is another.
All methods are called under the pump's lock.
"""

from __future__ import annotations

import collections
import functools
import logging
from typing import Any, Protocol

from danube_fast.client.link.calls import RETRYABLE, Call, OnLoss
from danube_fast.client.topics.routes import Routes, Topic
from danube_fast.client.values.limits import BACKOFF_MAX_NS, BACKOFF_MIN_NS, LOOKUPS_MAX
from danube_fast.client.values.options import Position
from danube_fast.errors import DanubeError, NotFound, PermissionDenied
from danube_fast.net.protocol import Lookup
from danube_fast.types import TopicPattern

__all__ = ["Members"]

_log = logging.getLogger(__name__)


class Joins(Protocol):
    """The part of a consumer that topics join and leave."""

    def join(self, route: Topic, position: Position) -> None:
        """Consume one topic more, from that position on."""

    def part(self, route: Topic) -> None:
        """Stop consuming a topic, and drop what came of it and is still here."""

    def moved(self) -> None:
        """Follow topics that were looked up again."""

    def refuse(self, error: DanubeError) -> None:
        """Raise that error from now on: nothing of the pattern can be had."""


class Members:
    """Topics that match one pattern, for one consumer."""

    def __init__(self, routes: Routes, joins: Joins, pattern: str, position: Position) -> None:
        """`position`: where topics begin that are there already. Raises InvalidArgument."""
        self.pattern = pattern
        self.failure: DanubeError | None = None
        self._routes = routes
        self._pump = routes.pump
        self._joins = joins
        self._position = position
        self._matches = TopicPattern(pattern).matches
        self._known: dict[str, Topic | None] = {}
        """Topics that joined, or are on their way."""
        self._is_listed = False
        self._positions: dict[str, Position] = {}
        """Where those begin that are on their way."""
        self._queue: collections.deque[str] = collections.deque()
        self._asked: dict[str, Call] = {}
        self._backoff_ns = BACKOFF_MIN_NS
        self._closed = False

    @property
    def is_complete(self) -> bool:
        """Whether all topics that are known of have joined."""
        return self._is_listed and not self._queue and not self._asked

    # ------------------------------------------------------------ what the watcher tells

    def on_topics(self, topics: list[str]) -> None:
        """Join and leave, so that these, as far as they match, are the topics."""
        matching = [topic for topic in topics if self._matches(topic)]
        first, self._is_listed = not self._is_listed, True
        for topic in set(self._known).difference(matching):
            self._leave(topic)
        for topic in matching:
            # it may have been deleted and made again unheard: look again
            self._look_up(topic, self._position if first else "earliest")
        self._go_on()
        self._pump.notify()

    def on_change(self, change: str, topic: str) -> None:
        """Join a topic that was created, or leave one that was deleted, if it matches."""
        if not self._matches(topic):
            return
        if change == "deleted":
            self._leave(topic)
        else:
            self._look_up(topic, "earliest")
            self._go_on()

    def refused(self, error: DanubeError) -> None:
        """End the consumer if the broker does not let this client watch."""
        if not isinstance(error, RETRYABLE):
            self.failure = error
            self._joins.refuse(error)

    # ------------------------------------------------------------ lookups

    def _look_up(self, topic: str, position: Position) -> None:
        call = self._asked.pop(topic, None)
        if call is not None:  # its answer may be from before what was told now
            self._routes.bootstrap.abandon(call)
        self._known.setdefault(topic, None)
        self._positions.setdefault(topic, position)
        self._queue.append(topic)

    def _go_on(self) -> None:
        bootstrap = self._routes.bootstrap
        while self._queue and len(self._asked) < LOOKUPS_MAX and not self._closed:
            topic = self._queue.popleft()
            if topic in self._asked or topic not in self._known:
                continue
            call = Call(
                Lookup(bootstrap.next_request(), topic),
                OnLoss.REPEAT,
                functools.partial(self._on_found, topic),
            )
            self._asked[topic] = call
            bootstrap.call(call)

    def _on_found(self, topic: str, call: Call) -> None:
        if self._closed or self._asked.get(topic) is not call:
            return
        del self._asked[topic]
        if isinstance(call.error, NotFound):
            self._leave(topic)
        elif isinstance(call.error, PermissionDenied) and self._known.get(topic) is None:
            _log.warning(
                "a pattern passes over %s, which may not be looked up: %s", topic, call.error
            )
            self._leave(topic)  # lists may show more than may be looked up
        elif isinstance(call.error, RETRYABLE):
            self._queue.append(topic)
            self._pump.arm(self, self._pump.clock.monotonic_ns() + self._backoff_ns)
            self._backoff_ns = min(2 * self._backoff_ns, BACKOFF_MAX_NS)
            return
        elif call.error is not None:
            self.failure = call.error
            self._joins.refuse(call.error)
        else:
            self._backoff_ns = BACKOFF_MIN_NS
            self._found(topic, self._positions.pop(topic, "earliest"), call.value)
        self._go_on()
        if self.is_complete:
            self._pump.notify()

    def _found(self, topic: str, position: Position, answer: dict[str, Any]) -> None:
        try:
            route = self._routes.topic_of(topic, answer)
        except DanubeError as error:
            self.failure = error
            self._joins.refuse(error)
            return
        known = self._known.get(topic)
        if known is not None:
            ids = {partition.partition_id for partition in known.partitions}
            if ids & {partition.partition_id for partition in route.partitions}:
                known.partitions[:] = route.partitions
                self._joins.moved()
                return
            self._joins.part(known)
        self._known[topic] = route
        self._joins.join(route, position)

    def on_time(self, now_ns: int) -> None:
        """Look up again what could not be found for now."""
        self._go_on()

    # ------------------------------------------------------------ leaving

    def _leave(self, topic: str) -> None:
        call = self._asked.pop(topic, None)
        if call is not None:
            self._routes.bootstrap.abandon(call)
        self._positions.pop(topic, None)
        route = self._known.pop(topic, None)
        if route is not None:
            self._joins.part(route)

    def gone(self, route: Topic) -> None:
        """Leave a topic that was deleted, as its worker says."""
        if self._known.get(route.name) is route:
            self._leave(route.name)

    def close(self) -> None:
        """Stop looking topics up."""
        self._closed = True
        self._pump.disarm(self)
        for call in self._asked.values():
            self._routes.bootstrap.abandon(call)
        self._asked.clear()
        self._queue.clear()
