"""The core that Client and AsyncClient share: pump, keeper, connections, what is open, fork guard."""

from __future__ import annotations

import os
import weakref
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, TypeVar

from danube_fast.checks import check_choice, check_names, check_text, check_whole
from danube_fast.client.arguments import ProducerArguments, PublishArguments
from danube_fast.client.consume.inbox import Inbox
from danube_fast.client.handle.requests import Desk
from danube_fast.client.limits import (
    PRODUCERS_CACHED_MAX,
    REQUEST_TIMEOUT_SECONDS,
    SPIN_US_MAX,
)
from danube_fast.client.link.buffers import BufferPool
from danube_fast.client.link.calls import Call
from danube_fast.client.link.connection import Connection, Identity
from danube_fast.client.link.dialer import Rings
from danube_fast.client.link.keeper import Keeper
from danube_fast.client.link.machine import Machine
from danube_fast.client.link.pump import Pump, Steps, Wait, deadline_after
from danube_fast.client.link.url import parse_url
from danube_fast.client.message import MessageId
from danube_fast.client.options import ConsumerOptions, ProducerOptions, checked_settings
from danube_fast.client.produce.outbox import Outbox
from danube_fast.client.produce.outgoing import as_payload
from danube_fast.client.produce.producer_cache import ProducerCache
from danube_fast.client.topics.routes import Routes, Topic
from danube_fast.client.topics.watcher import Watcher
from danube_fast.errors import (
    DanubeError,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    Unavailable,
)
from danube_fast.net.allocation import keep_freed_memory
from danube_fast.net.protocol import Admin, encode
from danube_fast.types import parse_topic

__all__ = ["Core", "Finished"]

T = TypeVar("T")
C = TypeVar("C", bound=Inbox)
_TRANSPORTS = {
    "auto": Rings.PREFERRED, "shm": Rings.REQUIRED, "zmq": Rings.NEVER, "tcp": Rings.NEVER,
}  # fmt: skip
_ANSWER_SECONDS_MIN = 1.0
"""An answer that is there already is waited for so long, however short the caller's time is."""
_FORKED = FailedPrecondition(
    "this process was forked after the client was opened, and neither sockets nor threads survive "
    "that; call danube_fast.connect() again in the child, or start it with spawn"
)
_CLOSED = FailedPrecondition("the client is closed; call danube_fast.connect() again")
_cores: weakref.WeakSet[Core] = weakref.WeakSet()


class Finished(Generic[T]):
    """The outcome of what has been done already; who awaits it has it at once."""

    def __init__(self, outcome: T) -> None:
        self._outcome = outcome

    def __await__(self) -> Generator[None, None, T]:
        return self._outcome
        yield


class Core:
    """Everything of a client that does not depend on how its callers wait."""

    def __init__(
        self, url: str, *, name: str | None, token: str | None, tls: Any, transport: str,
        spin_us: int = 0, machine: Machine | None = None,
    ) -> None:  # fmt: skip
        check_choice(transport, "transport", _TRANSPORTS)
        check_whole(spin_us, "spin_us", 0, SPIN_US_MAX)
        if name is not None:
            check_text(name, "name")
        if tls is not None:
            raise FailedPrecondition(
                "TLS is not served yet; connect without tls= on a trusted network"
            )
        if token is not None:
            raise FailedPrecondition(
                "token= is not served yet and would protect nothing; connect without it, on a "
                "trusted network"
            )
        keep_freed_memory()
        self.url = url
        self.machine = machine or Machine()
        process_id = self.machine.process_id()
        self.name = name or self.machine.new_name(f"client-{process_id}")
        self.transport = transport
        self.refusal: DanubeError | None = None
        self.pump = Pump(self.machine.clock)
        self.pump.spin_ns = spin_us * 1000
        self.opened: dict[Outbox | Inbox, None] = {}
        self.cached = ProducerCache(self, PRODUCERS_CACHED_MAX)
        """What `client.publish` uses."""
        self.desk = Desk(self)
        self._buffers: dict[int, BufferPool] = {}
        self._identity = Identity(self.name, {}, self.machine.host_id(), process_id)
        self._keeper = Keeper(self.pump, self.name)
        try:
            with self.pump.lock:
                self.routes = Routes(self, self.connect(parse_url(url)))
                self.watcher = Watcher(self)
        except DanubeError:
            self.machine.close()
            raise
        self.machine.start(self._keeper)
        _cores.add(self)

    def connect(self, endpoints: list[str], rings: Rings = Rings.NEVER) -> Connection:
        """A connection to one of these endpoints. Under the lock."""
        return Connection(self.pump, self.machine.make_dialer(rings), endpoints, self._identity)

    def connect_worker(self, endpoint: str, *, same_host: bool) -> Connection:
        """A connection to a worker. Under the lock."""
        rings = _TRANSPORTS[self.transport] if same_host else Rings.NEVER
        return self.connect([endpoint], rings)

    def buffers(self, batch_bytes: int) -> BufferPool:
        """Send buffers for batches of that size. Under the lock."""
        pool = self._buffers.get(batch_bytes)
        if pool is None:
            pool = self._buffers[batch_bytes] = BufferPool(batch_bytes)
        return pool

    def run(self, steps: Steps[T]) -> T:
        """Drive an operation in the calling thread. Raises what makes the client unusable."""
        if self.refusal is not None:
            steps.close()
            raise self.refusal
        return self.pump.run(steps)

    def end(self, steps: Steps[None]) -> None:
        """Drive a close; a client that is closed has closed everything."""
        if self.refusal is None:
            self.pump.run(steps)
        steps.close()

    def perform(self, steps: Steps[T]) -> Awaitable[T]:
        """Drive an operation to its end: now, or, where an event loop does it, when it is awaited."""
        return Finished(self.run(steps))

    # ------------------------------------------------------------ opening things

    def open_steps(self, timeout: float) -> Steps[None]:
        """Wait for the bootstrap connection. Raises Unavailable."""
        bootstrap = self.routes.bootstrap
        deadline_ns = deadline_after(self.pump.clock, timeout)
        yield Wait(lambda: bootstrap.is_open or bootstrap.failure is not None, deadline_ns)
        if bootstrap.failure is not None:
            raise bootstrap.failure
        if not bootstrap.is_open:
            raise Unavailable(
                f"no broker answers at {self.url} within {timeout:g} s; start one with "
                "`danube-fast serve`, or check the address"
            )

    def producer_steps(
        self,
        topic: str,
        *,
        name: str | None = None,
        dispatch: str | None = None,
        durability: str | None = None,
        partitions: int | None = None,
        must_exist: bool = False,
        **options: Any,
    ) -> Steps[Outbox]:
        """Look up or create the topic (unless it `must_exist`) and open a producer."""
        check_names(options, ProducerArguments.__annotations__, "producer()")
        checked = ProducerOptions(**options)
        parse_topic(topic)
        if name is not None:
            check_text(name, "name")
        given = checked_settings(dispatch, durability, partitions)
        create = None if must_exist else given
        deadline_ns = self.pump.clock.monotonic_ns() + checked.timeout_ns
        route = yield from self.routes.lookup_steps(topic, create, 0, deadline_ns)
        with self.pump.lock:
            producer = Outbox(self, route, name or self.machine.new_name(self.name), checked)
            route.user = weakref.ref(producer)
            self.opened[producer] = None
            self.watcher.follow(route)
        try:
            yield from producer.open_steps(deadline_ns)
        except BaseException:
            self.discard(producer)
            raise
        return producer

    def consumer_steps(
        self, kind: type[C], topics: list[str], options: ConsumerOptions, timeout: float
    ) -> Steps[C]:
        """Wait for the topics, subscribe to all their partitions."""
        deadline_ns = deadline_after(self.pump.clock, timeout)
        routes: list[Topic] = []
        for topic in topics:
            parse_topic(topic)
            wait_ns = max(0, deadline_ns - self.pump.clock.monotonic_ns())
            # the broker waits for the topic no longer than that; its answer may take a moment
            answer_ns = deadline_after(self.pump.clock, max(wait_ns / 1e9, _ANSWER_SECONDS_MIN))
            routes.append((yield from self.routes.lookup_steps(topic, None, wait_ns, answer_ns)))
        with self.pump.lock:
            consumer = kind(self, routes, options)
            self.opened[consumer] = None
            consumer.roster.begin()
        try:
            yield from consumer.open_steps(
                deadline_after(self.pump.clock, max(timeout, _ANSWER_SECONDS_MIN))
            )
        except BaseException:
            self.discard(consumer)
            raise
        return consumer

    def discard(self, user: Outbox | Inbox) -> None:
        """Close something without waiting: it never opened, or somebody was cancelled."""
        with self.pump.lock:
            steps = user.close_steps(0)
            try:
                next(steps)
            except (StopIteration, DanubeError):
                pass
            finally:
                steps.close()

    def forget(self, user: Outbox | Inbox) -> None:
        """It was closed."""
        self.opened.pop(user, None)

    def publish_steps(
        self, topic: str, payload: bytes | None, fields: PublishArguments
    ) -> Steps[MessageId]:
        """`client.publish` as steps."""
        check_names(fields, PublishArguments.__annotations__, "publish()")
        as_payload(payload)
        producer = yield from self.cached.take_steps(str(parse_topic(topic)))
        return (yield from producer.publish_steps(payload, **fields))

    def admin_steps(
        self, operation: str, arguments: dict[str, Any], timeout: float = REQUEST_TIMEOUT_SECONDS
    ) -> Steps[Any]:
        """One administrative operation."""
        bootstrap = self.routes.bootstrap
        deadline_ns = deadline_after(self.pump.clock, timeout)
        with self.pump.lock:
            command = Admin(bootstrap.next_request(), operation, arguments)
            try:
                encode(command)
            except (TypeError, ValueError, OverflowError) as fault:
                raise InvalidArgument(
                    f"{operation}: an argument is none that can be sent ({fault}); use text, numbers, "
                    f"lists and dicts: {arguments!r:.200}"
                ) from None
            call = bootstrap.call(Call(command))
        try:
            ready = yield Wait(lambda: call.done, deadline_ns)
        finally:
            with self.pump.lock:
                bootstrap.abandon(call)
        if not ready:
            raise DeadlineExceeded(
                f"no answer to {operation} within {timeout:g} s; it may have happened, look before you "
                "repeat it"
            )
        return call.result()

    # ------------------------------------------------------------ the end

    def close_users_steps(self, timeout: float) -> Steps[None]:
        """Close producers and consumers in time, then raise the first error."""
        if self.refusal is not None:
            return
        deadline_ns = deadline_after(self.pump.clock, timeout)
        first: DanubeError | None = None
        for user in list(self.opened):
            left = max(0.0, (deadline_ns - self.pump.clock.monotonic_ns()) / 1e9)
            try:
                yield from user.close_steps(left)
            except DanubeError as error:
                first = first or error
        left = max(0.0, (deadline_ns - self.pump.clock.monotonic_ns()) / 1e9)
        yield from self.desk.close_steps(left)
        if first is not None:
            raise first

    def shut(self) -> None:
        """Close sockets and threads without waiting for anybody."""
        if self.refusal is not None:
            return
        self.refusal = _CLOSED
        with self.pump.lock:
            for user in list(self.opened):
                user.refuse(_CLOSED)
            self.opened.clear()
            self.watcher.close()
            self.routes.close()
            self.pump.close()
        self._keeper.stop()
        self.machine.close()
        _cores.discard(self)

    def after_fork(self) -> None:
        """In the child: the other threads are gone, so is everything that they held."""
        self.refusal = _FORKED
        self.pump.after_fork()
        for connection in self.routes.workers.values():
            connection.after_fork()
        for user in list(self.opened):
            user.refuse(_FORKED)


def _after_fork_in_child() -> None:
    for core in list(_cores):
        core.after_fork()


_register: Callable[..., None] = os.register_at_fork
_register(after_in_child=_after_fork_in_child)
