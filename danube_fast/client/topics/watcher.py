r"""The watcher: hears from the coordinator when topics come, go or get more partitions.

    WATCH(cursor, patterns) ... waits at the broker ... RESULT --> members of patterns: topics
                                                              \-> routes of grown topics: look up again

One request of a client waits, whatever it consumes and produces; clients that use neither patterns
nor partitioned topics never ask. After a restart of the coordinator its cursor is unknown and the
answer holds all topics that match.

All methods are called under the pump's lock.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from danube_fast.client.link.calls import Call, OnLoss
from danube_fast.client.topics.routes import Routes, Topic
from danube_fast.client.values.limits import (
    BACKOFF_MAX_NS,
    BACKOFF_MIN_NS,
    WATCH_PROBE_NS,
    WATCH_WAIT_NS,
)
from danube_fast.clock import MILLISECOND_NS
from danube_fast.errors import DanubeError
from danube_fast.net.protocol import Ping, Watch

__all__ = ["Watcher"]

_GROWN_KEPT_MAX = 10_000


class Listener(Protocol):
    """The topics that match one pattern, as they come and go."""

    pattern: str

    def on_topics(self, topics: list[str]) -> None:
        """Take the list of all topics there are now, of all patterns of the client."""

    def on_change(self, change: str, topic: str) -> None:
        """Take one topic that was created or deleted."""

    def refused(self, error: DanubeError) -> None:
        """Take the error with which the broker refuses to be watched."""


class Watcher:
    """The one WATCH of a client."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._pump = routes.pump
        self._cursor = ""
        self._listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
        self._call: Call | None = None
        self._watches = False
        self._backoff_ns = BACKOFF_MIN_NS
        self._grown: dict[str, None] = {}
        """Topics that grew of late: a user may have looked them up just before."""

    # ------------------------------------------------------------ listeners

    def add(self, listener: Listener) -> None:
        """Tell this listener all topics that match, then what changes."""
        self._listeners.add(listener)
        self._begin_anew()

    def remove(self, listener: Listener) -> None:
        """Tell this listener nothing more."""
        self._listeners.discard(listener)

    def follow(self, route: Topic) -> None:
        """Look a partitioned topic up again whenever it grows."""
        if not route.is_partitioned:
            return
        if not self._watches:
            self._begin_anew()
        elif route.name in self._grown:
            self._routes.refresh(route)

    def _begin_anew(self) -> None:
        self._watches = True
        self._cursor = ""
        self._ask()

    # ------------------------------------------------------------ asking

    def _ask(self) -> None:
        bootstrap = self._routes.bootstrap
        if self._call is not None:
            bootstrap.abandon(self._call)
        patterns = sorted({listener.pattern for listener in self._listeners})
        wait_ms = WATCH_WAIT_NS // MILLISECOND_NS
        command = Watch(bootstrap.next_request(), self._cursor, patterns, wait_ms)
        self._call = Call(command, OnLoss.REPEAT, self._on_answer)
        self._pump.arm(self, self._pump.clock.monotonic_ns() + WATCH_PROBE_NS)
        bootstrap.call(self._call)

    def _on_answer(self, call: Call) -> None:
        if call is not self._call:
            return
        self._call = None
        if call.error is not None:
            for listener in tuple(self._listeners):
                listener.refused(call.error)
            self._pump.arm(self, self._pump.clock.monotonic_ns() + self._backoff_ns)
            self._backoff_ns = min(2 * self._backoff_ns, BACKOFF_MAX_NS)
            return
        self._backoff_ns = BACKOFF_MIN_NS
        answer = call.value
        self._cursor = answer["cursor"]
        self._ask()
        if "topics" in answer:
            for listener in tuple(self._listeners):
                listener.on_topics(answer["topics"])
            self._refresh(None)
        for change, topic in answer.get("changes", ()):
            self._on_change(change, topic)

    def _on_change(self, change: str, topic: str) -> None:
        if change == "grown":
            self._grown[topic] = None
            if len(self._grown) > _GROWN_KEPT_MAX:
                del self._grown[next(iter(self._grown))]
            self._refresh(topic)
            return
        self._grown.pop(topic, None)
        for listener in tuple(self._listeners):
            listener.on_change(change, topic)

    def _refresh(self, topic: str | None) -> None:
        """Look a topic up again for all its users; None: every topic that may have grown."""
        for user in tuple(self._routes.users):
            for route in user.routes():
                if route.is_partitioned and topic in (None, route.name):
                    self._routes.refresh(route)

    def on_time(self, now_ns: int) -> None:
        """Ask again after an error, or probe the connection if the answer is late."""
        if self._call is None:
            self._ask()
            return
        self._pump.try_drain()  # it may be here, unread
        bootstrap = self._routes.bootstrap
        if self._call is not None and bootstrap.is_open:
            # a coordinator that is new answers any command with that
            bootstrap.send(Ping(bootstrap.next_request()))
            self._pump.arm(self, now_ns + WATCH_PROBE_NS)

    def close(self) -> None:
        """Stop asking."""
        self._pump.disarm(self)
        self._call = None
