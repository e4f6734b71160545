"""Routes: which connection serves which partition, and the search for one that has moved.

The bootstrap connection answers LOOKUP; each worker named there gets one connection, shared by all
producers and consumers of the client. When a worker says that it does not own a partition, or stays
away, its topics are looked up again with backoff and their lanes and attachments move.

All methods are called under the pump's lock.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from danube_fast.client.link.calls import Call, OnLoss, tell_wait
from danube_fast.client.link.connection import Connection
from danube_fast.client.link.steps import Steps, Wait
from danube_fast.client.values.limits import BACKOFF_MAX_NS, BACKOFF_MIN_NS
from danube_fast.clock import MILLISECOND_NS, SECOND_NS
from danube_fast.errors import (
    DanubeError,
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    PermissionDenied,
    TopicDeleted,
    Unavailable,
)
from danube_fast.net.protocol import Lookup
from danube_fast.types import PART_MARK, parse_topic

__all__ = ["Partition", "Routes", "Topic", "TopicUser", "made_again"]

_ANSWER_MARGIN_NS = 500 * MILLISECOND_NS
"""A LOOKUP that waits for its topic is given up by the broker this long before the caller."""
_STEADY_NS = SECOND_NS
"""A place that was found so long ago was right: the next search begins without a long wait."""


class TopicUser(Protocol):
    """A producer or a consumer that is open, as the topics see it."""

    def routes(self) -> list[Topic]:
        """Return what was looked up for it."""

    def moved(self) -> None:
        """Follow a topic that was looked up again."""

    def topic_gone(self, route: Topic, error: DanubeError) -> None:
        """Give up a topic that does not exist any more."""

    def close_steps(self, timeout: float) -> Steps[None]:
        """Close it within `timeout` seconds."""

    def refuse(self, error: DanubeError) -> None:
        """Raise that error from now on: the client is closed, or its process was forked."""


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
    """Return the error for a topic under whose name LOOKUP finds other partitions. Only LOOKUP may say so: a
    worker that was away when the first was deleted never knew of it."""
    return TopicDeleted(
        f"{route.name} was deleted and made again meanwhile; open another producer or consumer for "
        "the new one"
    )


class Topic:
    """One topic as LOOKUP described it, for one producer or consumer."""

    def __init__(self, name: str, answer: dict[str, Any], partitions: list[Partition]) -> None:
        self.name = name
        self.dispatch: str = answer["dispatch"]
        self.durability: str = answer["durability"]
        self.is_partitioned: bool = answer["partitioned"]
        self.partitions = partitions
        self.user: weakref.ref[TopicUser] | None = None
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
            pump = self.routes.pump
            now_ns = pump.clock.monotonic_ns()
            if self.found_ns and now_ns - self.found_ns > _STEADY_NS:
                self.backoff_ns = BACKOFF_MIN_NS
            self.found_ns = 0
            pump.arm(self, now_ns + self.backoff_ns)
            self.backoff_ns = min(2 * self.backoff_ns, BACKOFF_MAX_NS)

    def on_time(self, now_ns: int) -> None:
        """Look up now."""
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
        """Follow the topic to where the broker says it is, or give it up."""
        self.in_flight = False
        user = self.topic.user() if self.topic.user is not None else None
        if user is None:
            return
        if isinstance(call.error, PermissionDenied):
            user.topic_gone(self.topic, call.error)
        elif isinstance(call.error, NotFound):
            error = TopicDeleted(f"{self.topic.name} was deleted; create it again")
            user.topic_gone(self.topic, error)
        elif call.error is not None:
            self.start()
        else:
            self.found_ns = self.routes.pump.clock.monotonic_ns()
            self.topic.partitions[:] = self.routes.partitions_of(call.value)
            user.moved()


class Routes:
    """Connections of one client, and which of its producers and consumers use them."""

    def __init__(
        self,
        bootstrap: Connection,
        connect_worker: Callable[[str, bool, str], Connection],
        transport: str,
        host_id: str,
        *,
        allows_tcp: bool = False,
    ) -> None:
        """`connect_worker` opens a connection to an endpoint, which may be on this host, or else to the one over tcp.
        `allows_tcp`: that will do where it is not known on this host, or a process of another user listens there."""
        self.pump = bootstrap.pump
        self.bootstrap = bootstrap
        self.workers: dict[str, Connection] = {}
        """By endpoint."""
        self.users: dict[TopicUser, None] = {}
        """Producers and consumers that are open."""
        self._connect_worker = connect_worker
        self._transport = transport
        self._host_id = host_id
        self._allows_tcp = allows_tcp

    def lookup_steps(
        self, topic: str, create: dict[str, Any] | None, wait_ns: int, deadline_ns: int
    ) -> Steps[Topic]:
        """Find a topic; `create` it with these options, or wait for it, if it is missing. While the
        worker that is to have it is down or busy, ask again."""
        topic = str(parse_topic(topic))
        clock, backoff_ns = self.pump.clock, BACKOFF_MIN_NS
        said: DanubeError | None = None
        began_ns, is_told = clock.monotonic_ns(), False
        while True:
            call = yield from self._ask_steps(topic, create, wait_ns, deadline_ns, said)
            said = call.error
            now_ns = clock.monotonic_ns()
            again_ns = now_ns + backoff_ns
            if not isinstance(call.error, Unavailable) or again_ns >= deadline_ns:
                break
            is_told = tell_wait(topic, call.error, now_ns - began_ns, is_told=is_told)
            yield Wait(lambda: False, again_ns)
            backoff_ns = min(2 * backoff_ns, BACKOFF_MAX_NS)
            wait_ns = wait_ns and deadline_ns - clock.monotonic_ns()
        answer = call.result()
        with self.pump.lock:
            return self.topic_of(topic, answer)

    def _ask_steps(
        self, topic: str, create: dict[str, Any] | None, wait_ns: int, deadline_ns: int,
        said: DanubeError | None,
    ) -> Steps[Call]:  # fmt: skip
        """Send one LOOKUP and wait for its answer. `said` is what the last one was answered."""
        lock = self.pump.lock
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
        if not ready and said is not None:
            raise DeadlineExceeded(f"{topic} was not found in time: {said}") from said
        if not ready:
            raise DeadlineExceeded(
                f"no answer from {bootstrap.endpoint} about {topic} in time; is the broker running? "
                "Try `danube-fast status`"
            )
        return call

    def topic_of(self, topic: str, answer: dict[str, Any]) -> Topic:
        """Make a topic of the answer to LOOKUP. Raises FailedPrecondition for rings on another host."""
        if self._transport == "shm" and answer.get("host_id") != self._host_id:
            raise FailedPrecondition(
                "transport='shm' works on the broker's own host only; use transport='auto', which "
                "takes shared memory where it can"
            )
        return Topic(topic, answer, self.partitions_of(answer))

    def partitions_of(self, answer: dict[str, Any]) -> list[Partition]:
        """Return the partitions of a LOOKUP answer, with connections to their workers."""
        same_host = answer.get("host_id") == self._host_id and self._transport != "tcp"
        partitions = []
        parent: str = answer["topic"]
        for partition_id, topic, _, tcp, ipc in answer["partitions"]:
            near = same_host and bool(ipc)
            if self._transport == "shm" and not ipc:
                raise FailedPrecondition(
                    "transport='shm' is not offered by this broker, which has few file descriptors; "
                    "use transport='auto', or raise its `ulimit -n`"
                )
            connection = self._worker(ipc if near else tcp, near, tcp if self._allows_tcp else "")
            # only the broker knows whether "-part-" is a mark or part of a name
            number = None if topic == parent else int(topic[len(parent) + len(PART_MARK) :])
            partitions.append(Partition(partition_id, topic, connection, parent, number))
        return partitions

    def _worker(self, endpoint: str, same_host: bool, tcp: str = "") -> Connection:
        connection = self.workers.get(endpoint)
        if connection is None or connection.failure is not None:
            connection = self.workers[endpoint] = self._connect_worker(endpoint, same_host, tcp)
        connection.dialer.tcp = tcp  # a worker that started again may have another port
        return connection

    def refresh(self, topic: Topic) -> None:
        """Look a topic up again, as something went wrong with its worker."""
        if topic.refresh is None:
            topic.refresh = _Refresh(self, topic)
        topic.refresh.start()

    def discard(self, user: TopicUser) -> None:
        """Close a producer or consumer that did not open, or whose opening was cancelled, without waiting."""
        with self.pump.lock:
            steps = user.close_steps(0)
            try:
                next(steps)
            except (StopIteration, DanubeError):
                pass
            finally:
                steps.close()

    def fail(self, error: DanubeError) -> None:
        """End every connection for good."""
        for connection in (*self.workers.values(), self.bootstrap):
            connection.fail(error)

    def close(self) -> None:
        """End the session on every connection, and close it."""
        for connection in (*self.workers.values(), self.bootstrap):
            connection.say_bye()
            connection.close()
