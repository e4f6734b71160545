"""Routes: which connection serves which partition, and the search for one that has moved.

The bootstrap connection answers LOOKUP; each worker named there gets one connection, shared by all
producers and consumers of the client. When a worker says that it does not own a partition, or stays
away, its topics are looked up again with backoff and their lanes and attachments move.

All methods are called under the pump's lock.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from danube_fast.client.limits import BACKOFF_MAX_NS, BACKOFF_MIN_NS, MILLISECOND_NS, SECOND_NS
from danube_fast.client.link.calls import Call, OnLoss
from danube_fast.client.link.connection import Connection
from danube_fast.client.link.pump import Steps, Wait
from danube_fast.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    TopicDeleted,
    Unavailable,
)
from danube_fast.net.protocol import Lookup
from danube_fast.types import parse_topic

if TYPE_CHECKING:
    from danube_fast.client.core import Core

__all__ = ["Partition", "Routes", "Topic", "made_again"]

_ANSWER_MARGIN_NS = 500 * MILLISECOND_NS
"""A LOOKUP that waits for its topic is given up by the broker this long before the caller."""
_PART_MARK = "-part-"
_SETTLED_NS = SECOND_NS
"""What was found so long ago was right: the next search begins without a long wait."""


class Partition(NamedTuple):
    """One partition and the connection to its worker."""

    partition_id: int
    topic: str
    connection: Connection
    parent: str
    """The topic that it is a partition of; itself if that has none."""
    number: int | None
    """Which of them it is."""


def made_again(route: Topic) -> TopicDeleted:
    """LOOKUP finds other partitions under the name: it is another topic. Nobody else may say so, as a
    worker that was away when ours was deleted never knew of it."""
    return TopicDeleted(
        f"{route.name} was deleted and made again meanwhile; open another producer or consumer for "
        "the new one"
    )


class Topic:
    """What LOOKUP said of one topic, for one producer or consumer."""

    def __init__(self, name: str, answer: dict[str, Any], partitions: list[Partition]) -> None:
        self.name = name
        self.dispatch: str = answer["dispatch"]
        self.durability: str = answer["durability"]
        self.is_partitioned: bool = answer["partitioned"]
        self.partitions = partitions
        self.user: weakref.ref[Any] | None = None
        self.refresh: _Refresh | None = None


class _Refresh:
    """A repeated lookup of one topic, until it succeeds."""

    def __init__(self, routes: Routes, topic: Topic) -> None:
        self.routes = routes
        self.topic = topic
        self.backoff_ns = BACKOFF_MIN_NS
        self.found_ns = 0
        """When it succeeded last."""
        self.waiting = False
        self.in_flight = False

    def start(self) -> None:
        """Look up soon, unless that is under way."""
        if not self.waiting and not self.in_flight:
            self.waiting = True
            pump = self.routes.core.pump
            now_ns = pump.clock.monotonic_ns()
            if self.found_ns and now_ns - self.found_ns > _SETTLED_NS:
                self.backoff_ns = BACKOFF_MIN_NS
            self.found_ns = 0
            pump.arm(self, now_ns + self.backoff_ns)
            self.backoff_ns = min(2 * self.backoff_ns, BACKOFF_MAX_NS)

    def on_time(self, now_ns: int) -> None:
        """Keeper: look up now."""
        self.waiting, self.in_flight = False, True
        bootstrap = self.routes.bootstrap
        bootstrap.call(
            Call(
                Lookup(bootstrap.next_request(), self.topic.name),
                OnLoss.REPEAT,
                self.on_answer,
            )
        )

    def on_answer(self, call: Call) -> None:
        """The broker's word on where the topic is."""
        self.in_flight = False
        user = self.topic.user() if self.topic.user is not None else None
        if user is None:
            return
        if isinstance(call.error, NotFound):
            error = TopicDeleted(f"{self.topic.name} was deleted; create it again")
            user.topic_gone(self.topic, error)
        elif call.error is not None:
            self.start()
        else:
            self.found_ns = self.routes.core.pump.clock.monotonic_ns()
            self.topic.partitions[:] = self.routes.partitions_of(call.value)
            user.moved()


class Routes:
    """Connections of one client, by endpoint."""

    def __init__(self, core: Core, bootstrap: Connection) -> None:
        self.core = core
        self.bootstrap = bootstrap
        self.workers: dict[str, Connection] = {}

    def lookup_steps(
        self, topic: str, create: dict[str, Any] | None, wait_ns: int, deadline_ns: int
    ) -> Steps[Topic]:
        """Find a topic; `create` it with these options, or wait for it, if it is missing. While the
        worker that is to have it is down or busy, ask again."""
        topic = str(parse_topic(topic))
        clock, backoff_ns = self.core.pump.clock, BACKOFF_MIN_NS
        while True:
            call = yield from self._ask_steps(topic, create, wait_ns, deadline_ns)
            again_ns = clock.monotonic_ns() + backoff_ns
            if not isinstance(call.error, Unavailable) or again_ns >= deadline_ns:
                break
            yield Wait(lambda: False, again_ns)
            backoff_ns = min(2 * backoff_ns, BACKOFF_MAX_NS)
            wait_ns = wait_ns and deadline_ns - clock.monotonic_ns()
        answer = call.result()
        with self.core.pump.lock:
            return self.topic_of(topic, answer)

    def _ask_steps(
        self, topic: str, create: dict[str, Any] | None, wait_ns: int, deadline_ns: int
    ) -> Steps[Call]:
        """One LOOKUP and its answer."""
        lock = self.core.pump.lock
        wait_ms = max(0, wait_ns - _ANSWER_MARGIN_NS) // MILLISECOND_NS if wait_ns else 0
        with lock:
            bootstrap = self.bootstrap
            call = bootstrap.call(
                Call(
                    Lookup(bootstrap.next_request(), topic, create, wait_ms),
                    OnLoss.REPEAT,
                )
            )
        try:
            ready = yield Wait(lambda: call.done, deadline_ns)
        finally:
            with lock:
                bootstrap.abandon(call)
        if not ready:
            raise DeadlineExceeded(
                f"no answer from {bootstrap.endpoint} about {topic} in time; is the broker running? "
                "Try `danube-fast status`"
            )
        return call

    def topic_of(self, topic: str, answer: dict[str, Any]) -> Topic:
        """What LOOKUP answered. Raises FailedPrecondition for rings on another host."""
        if self.core.transport == "shm" and answer.get("host_id") != self.core.machine.host_id():
            raise FailedPrecondition(
                "transport='shm' works on the broker's own host only; use transport='auto', which "
                "takes shared memory where it can"
            )
        return Topic(topic, answer, self.partitions_of(answer))

    def partitions_of(self, answer: dict[str, Any]) -> list[Partition]:
        """Partitions of a LOOKUP answer, with connections to their workers."""
        same_host = (
            answer.get("host_id") == self.core.machine.host_id() and self.core.transport != "tcp"
        )
        partitions = []
        parent: str = answer["topic"]
        for partition_id, topic, _, tcp, ipc in answer["partitions"]:
            near = same_host and bool(ipc)
            if self.core.transport == "shm" and not ipc:
                raise FailedPrecondition(
                    "transport='shm' is not offered by this broker, which has few file descriptors; "
                    "use transport='auto', or raise its `ulimit -n`"
                )
            connection = self._worker(ipc if near else tcp, near)
            # only the broker knows whether "-part-" is a mark or part of somebody's name
            number = None if topic == parent else int(topic[len(parent) + len(_PART_MARK) :])
            partitions.append(Partition(partition_id, topic, connection, parent, number))
        return partitions

    def _worker(self, endpoint: str, same_host: bool) -> Connection:
        connection = self.workers.get(endpoint)
        if connection is None:
            connection = self.core.connect_worker(endpoint, same_host=same_host)
            self.workers[endpoint] = connection
        return connection

    def refresh(self, topic: Topic) -> None:
        """Something went wrong there: look the topic up again."""
        if topic.refresh is None:
            topic.refresh = _Refresh(self, topic)
        topic.refresh.start()

    def close(self) -> None:
        """Say goodbye everywhere."""
        for connection in (*self.workers.values(), self.bootstrap):
            connection.say_bye()
            connection.close()
