"""The core that Client and AsyncClient share: it composes pump, timers, connections, topics and what opens
producers and consumers; and the guard against forks.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from danube_fast.checks import check_choice, check_names, check_text, check_whole
from danube_fast.client.consume.consumers import Consumers
from danube_fast.client.handle.requests import Requests
from danube_fast.client.link.connection import Connection, Identity
from danube_fast.client.link.dialer import Rings
from danube_fast.client.link.machine import Machine
from danube_fast.client.link.names import unknown_host_steps
from danube_fast.client.link.pump import Pump
from danube_fast.client.link.steps import Steps, Wait, deadline_after, seconds_until
from danube_fast.client.link.timers import TimerThread
from danube_fast.client.link.trust import sign_on_of, trust_of
from danube_fast.client.link.url import parse_url
from danube_fast.client.produce.outgoing import as_payload
from danube_fast.client.produce.producers import ProducerCache, Producers
from danube_fast.client.topics.routes import Routes
from danube_fast.client.topics.watcher import Watcher
from danube_fast.client.values.arguments import PublishArguments
from danube_fast.client.values.limits import PRODUCERS_CACHED_MAX, SPIN_US_MAX
from danube_fast.client.values.message import Message, MessageId
from danube_fast.clock import SystemClock
from danube_fast.errors import DanubeError, FailedPrecondition, Unavailable
from danube_fast.net.allocation import keep_freed_memory
from danube_fast.types import parse_topic

__all__ = ["Core"]

_TRANSPORTS = {
    "auto": Rings.PREFERRED, "shm": Rings.REQUIRED, "zmq": Rings.NEVER, "tcp": Rings.NEVER,
}  # fmt: skip
_FORKED = FailedPrecondition(
    "this process was forked after the client was opened, and neither sockets nor threads survive "
    "that; call danube_fast.connect() again in the child, or start it with spawn"
)
_CLOSED = FailedPrecondition("the client is closed; call danube_fast.connect() again")
_cores: weakref.WeakSet[Core] = weakref.WeakSet()


class Core:
    """The parts of one client, whichever way its callers wait."""

    def __init__(
        self, url: str, *, name: str | None, token: Any, tls: Any, transport: str, spin_us: int = 0,
        server_key: str | Sequence[str] | None = None, key_file: str | Path | None = None,
        server_uid: int | None = None, sign_on: str | None = None, machine: Machine | None = None,
    ) -> None:  # fmt: skip
        check_choice(transport, "transport", _TRANSPORTS)
        check_whole(spin_us, "spin_us", 0, SPIN_US_MAX)
        if name is not None:
            check_text(name, "name")
        endpoints = parse_url(url)
        signs_on = sign_on_of(token, sign_on, tls, server_key, SystemClock())
        self._trust = trust_of(server_key, key_file, server_uid, signs_on)
        keep_freed_memory()
        self.url = url
        self.machine = machine or Machine()
        process_id = self.machine.process_id()
        self.name = name or self.machine.new_name(f"client-{process_id}")
        self.pump = Pump(self.machine.clock)
        self.pump.spin_ns = spin_us * 1000
        self.perform: Callable[[Steps[Any]], Awaitable[Any]] = self.pump.perform
        """Drives an operation to its end: now, or, where an event loop does it, when it is awaited."""
        self._rings = _TRANSPORTS[transport]
        self._identity = Identity(self.name, {}, self.machine.host_id(), process_id)
        self._timers = TimerThread(self.pump, self.name)
        try:
            with self.pump.lock:
                self.routes = Routes(
                    self._connect(endpoints),
                    self._connect_worker,
                    transport,
                    self.machine.host_id(),
                    allows_tcp=self._trust.allows_tcp,
                )
        except DanubeError:
            self.machine.close()
            raise
        self.watcher = Watcher(self.routes)
        self.producers = Producers(
            self.routes, self.watcher, lambda: self.machine.new_name(self.name)
        )
        self.consumers = Consumers(self.routes, self.watcher, self.name, self._reply)
        self.cached = ProducerCache(self.producers, PRODUCERS_CACHED_MAX)
        """Producers of `client.publish`."""
        self.requests = Requests(self.producers, self.consumers, self.cached)
        self.machine.start(self._timers)
        _cores.add(self)
        if signs_on is not None:
            signs_on.start(self._signed_on)

    def _signed_on(self) -> None:
        """Let connections see what came of a sign-on; in its thread."""
        sign_on = self._trust.sign_on
        with self.pump.lock:
            if self.pump.closed:
                return
            if sign_on is not None and sign_on.failure is not None:
                self.routes.fail(sign_on.failure)
            self.pump.notify()

    def _connect(
        self, endpoints: list[str], rings: Rings = Rings.NEVER, tcp: str = ""
    ) -> Connection:
        """Connect to one of these endpoints, or over `tcp` where there are no rings. Under the lock."""
        dialer = self.machine.make_dialer(rings, self._trust)
        dialer.tcp = tcp
        return Connection(self.pump, dialer, endpoints, self._identity)

    def _connect_worker(self, endpoint: str, same_host: bool, tcp: str) -> Connection:
        """Connect to a worker. Under the lock."""
        return self._connect([endpoint], self._rings if same_host else Rings.NEVER, tcp)

    def _reply(
        self, message: Message, payload: bytes | None, attributes: Mapping[str, str] | None
    ) -> Awaitable[None]:
        """Reply to a message that a consumer of this client received."""
        return self.perform(self.requests.reply_steps(message, payload, attributes))

    # ------------------------------------------------------------ operations

    def open_steps(self, timeout: float) -> Steps[None]:
        """Wait for the bootstrap connection. Raises Unavailable."""
        bootstrap = self.routes.bootstrap
        deadline_ns = deadline_after(self.pump.clock, timeout)
        yield Wait(lambda: bootstrap.is_open or bootstrap.failure is not None, deadline_ns)
        if bootstrap.failure is not None:
            raise bootstrap.failure
        if not bootstrap.is_open:
            sign_on = self._trust.sign_on
            if sign_on is not None and (reason := sign_on.late(timeout)) is not None:
                raise reason
            if bootstrap.dialer.is_undecided:
                raise Unavailable(
                    f"the broker at {self.url} cannot tell just now who may come in; try again"
                )
            if unknown := (yield from unknown_host_steps(self.pump, bootstrap.endpoint)):
                raise Unavailable(f"no broker answers at {self.url}: {unknown}; check the name")
            raise Unavailable(
                f"no broker answers at {self.url} within {timeout:g} s; start one with "
                "`danube-fast serve`, or check the address"
            )

    def publish_steps(
        self, topic: str, payload: bytes | None, fields: PublishArguments
    ) -> Steps[MessageId]:
        """Publish one message through a cached producer and wait for its ack."""
        check_names(fields, PublishArguments.__annotations__, "publish()")
        as_payload(payload)
        producer = yield from self.cached.take_steps(str(parse_topic(topic)))
        return (yield from producer.publish_steps(payload, **fields))

    # ------------------------------------------------------------ the end

    def close_users_steps(self, timeout: float) -> Steps[None]:
        """Close producers and consumers in time, then raise the first error."""
        deadline_ns = deadline_after(self.pump.clock, timeout)
        first: DanubeError | None = None
        for user in list(self.routes.users):
            try:
                yield from user.close_steps(seconds_until(self.pump.clock, deadline_ns))
            except DanubeError as error:
                first = first or error
        yield from self.requests.close_steps(seconds_until(self.pump.clock, deadline_ns))
        if first is not None:
            raise first

    def shut(self) -> None:
        """Close sockets and threads without waiting for the broker."""
        if self.pump.refusal is not None:
            return
        self.pump.refusal = _CLOSED
        with self.pump.lock:
            for user in list(self.routes.users):
                user.refuse(_CLOSED)
            self.routes.users.clear()
            self.watcher.close()
            self.routes.close()
            self.pump.close()
        self._timers.stop()
        if self._trust.sign_on is not None:
            self._trust.sign_on.stop()
        self.machine.close()
        _cores.discard(self)

    def after_fork(self) -> None:
        """Refuse everything in the child: the other threads are gone, so is everything that they held."""
        self.pump.after_fork(_FORKED)
        for connection in self.routes.workers.values():
            connection.after_fork()
        for user in list(self.routes.users):
            user.refuse(_FORKED)


def _after_fork_in_child() -> None:
    for core in list(_cores):
        core.after_fork()


_register: Callable[..., None] = os.register_at_fork
_register(after_in_child=_after_fork_in_child)
