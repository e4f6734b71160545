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
from typing import TYPE_CHECKING

from danube_fast.client.limits import (
    BACKOFF_MAX_NS,
    BACKOFF_MIN_NS,
    MILLISECOND_NS,
    WATCH_PROBE_NS,
    WATCH_WAIT_NS,
)
from danube_fast.client.link.calls import Call, OnLoss
from danube_fast.net.protocol import Ping, Watch

if TYPE_CHECKING:
    from danube_fast.client.core import Core
    from danube_fast.client.topics.members import Members
    from danube_fast.client.topics.routes import Topic

__all__ = ["Watcher"]

_GROWN_KEPT_MAX = 10_000


class Watcher:
    """The one WATCH of a client."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._cursor = ""
        self._members: weakref.WeakSet[Members] = weakref.WeakSet()
        self._call: Call | None = None
        self._watches = False
        self._backoff_ns = BACKOFF_MIN_NS
        self._grown: dict[str, None] = {}
        """Topics that grew of late: somebody may have looked them up just before."""

    # ------------------------------------------------------------ who wants to hear

    def add(self, members: Members) -> None:
        """Keep these members up to date; they are told all topics that match first."""
        self._members.add(members)
        self._begin_anew()

    def remove(self, members: Members) -> None:
        """Its consumer is closed."""
        self._members.discard(members)

    def follow(self, route: Topic) -> None:
        """Somebody uses that topic: hear of its growth."""
        if not route.is_partitioned:
            return
        if not self._watches:
            self._begin_anew()
        elif route.name in self._grown:
            self._core.routes.refresh(route)

    def _begin_anew(self) -> None:
        self._watches = True
        self._cursor = ""
        self._ask()

    # ------------------------------------------------------------ asking

    def _ask(self) -> None:
        bootstrap = self._core.routes.bootstrap
        if self._call is not None:
            bootstrap.abandon(self._call)
        patterns = sorted({members.pattern for members in self._members})
        wait_ms = WATCH_WAIT_NS // MILLISECOND_NS
        command = Watch(bootstrap.next_request(), self._cursor, patterns, wait_ms)
        self._call = Call(command, OnLoss.REPEAT, self._on_answer)
        self._core.pump.arm(self, self._core.pump.clock.monotonic_ns() + WATCH_PROBE_NS)
        bootstrap.call(self._call)

    def _on_answer(self, call: Call) -> None:
        if call is not self._call:
            return
        self._call = None
        if call.error is not None:
            for members in tuple(self._members):
                members.refused(call.error)
            self._core.pump.arm(self, self._core.pump.clock.monotonic_ns() + self._backoff_ns)
            self._backoff_ns = min(2 * self._backoff_ns, BACKOFF_MAX_NS)
            return
        self._backoff_ns = BACKOFF_MIN_NS
        answer = call.value
        self._cursor = answer["cursor"]
        self._ask()
        if "topics" in answer:
            for members in tuple(self._members):
                members.on_topics(answer["topics"])
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
        for members in tuple(self._members):
            members.on_change(change, topic)

    def _refresh(self, topic: str | None) -> None:
        """Look a topic up again for all who use it; None: every topic that may have grown."""
        for user in tuple(self._core.opened):
            for route in user.routes():
                if route.is_partitioned and topic in (None, route.name):
                    self._core.routes.refresh(route)

    def on_time(self, now_ns: int) -> None:
        """Keeper: the answer is late, or it is time to ask again after an error."""
        if self._call is None:
            self._ask()
            return
        self._core.pump.try_drain()  # it may be here, with nobody to read it
        bootstrap = self._core.routes.bootstrap
        if self._call is not None and bootstrap.is_open:
            # a coordinator that is new says so to whoever speaks to it
            bootstrap.send(Ping(bootstrap.next_request()))
            self._core.pump.arm(self, now_ns + WATCH_PROBE_NS)

    def close(self) -> None:
        """The client ends."""
        self._core.pump.disarm(self)
        self._call = None
