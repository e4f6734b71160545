"""Opens the consumers and readers of one client."""

from __future__ import annotations

from collections.abc import Callable

from danube_fast.client.consume.inbox import Inbox, Reply
from danube_fast.client.link.steps import Steps, deadline_after
from danube_fast.client.topics.routes import Routes, Topic
from danube_fast.client.topics.watcher import Watcher
from danube_fast.client.values.limits import REQUEST_TIMEOUT_SECONDS
from danube_fast.client.values.options import ConsumerOptions
from danube_fast.types import parse_topic

__all__ = ["Consumers"]

_ANSWER_SECONDS_MIN = 1.0
"""An answer that is there already is waited for so long, however short the caller's time is."""
Make = Callable[[Routes, Watcher, Reply, list[Topic], ConsumerOptions], Inbox]


class Consumers:
    """Opens inboxes."""

    def __init__(self, routes: Routes, watcher: Watcher, client_name: str, reply: Reply) -> None:
        """`reply` sends the reply to a message that a consumer received."""
        self.routes = routes
        self.client_name = client_name
        self._watcher = watcher
        self._reply = reply

    def open_steps(
        self,
        topics: list[str],
        options: ConsumerOptions,
        timeout: float = REQUEST_TIMEOUT_SECONDS,
        make: Make = Inbox,
    ) -> Steps[Inbox]:
        """Wait for the topics, subscribe to all their partitions."""
        routes = self.routes
        clock = routes.pump.clock
        deadline_ns = deadline_after(clock, timeout)
        found: list[Topic] = []
        for topic in topics:
            parse_topic(topic)
            wait_ns = max(0, deadline_ns - clock.monotonic_ns())
            # the broker waits for the topic no longer than that; its answer may take a moment
            answer_ns = deadline_after(clock, max(wait_ns / 1e9, _ANSWER_SECONDS_MIN))
            found.append((yield from routes.lookup_steps(topic, None, wait_ns, answer_ns)))
        with routes.pump.lock:
            consumer = make(routes, self._watcher, self._reply, found, options)
            routes.users[consumer] = None
            consumer.partitions.begin()
        try:
            yield from consumer.open_steps(deadline_after(clock, max(timeout, _ANSWER_SECONDS_MIN)))
        except BaseException:
            routes.discard(consumer)
            raise
        return consumer
