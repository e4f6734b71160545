"""A scripted client: speaks the wire protocol over a loopback connection, and lives as its seed says.

It keeps a session: HELLO, PING every half second, another connection when nothing is heard for too
long. It may be killed, stopped (as by SIGSTOP), or lose its connection at any instant.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from danube_fast.clock import MILLISECOND_NS
from danube_fast.net import protocol as p
from danube_fast.testing.host import SimulatedHost, SimulatedWorker
from danube_fast.testing.loopback import Network, Wire
from danube_fast.testing.virtual_clock import Schedule

__all__ = ["Peer"]

RETRY_NS = 100 * MILLISECOND_NS


class Peer:
    """One client process with one connection, to one worker."""

    def __init__(
        self, name: str, host: SimulatedHost, network: Network, worker: SimulatedWorker,
        draw: random.Random,
    ) -> None:  # fmt: skip
        self.name = name
        self.host = host
        self.network = network
        self.worker = worker
        self.draw = draw
        self.schedule: Schedule = host.schedule
        self.clock = host.clock
        self._beat_ns = host.settings.heartbeat_ms * MILLISECOND_NS
        self._silence_ns = host.settings.session_timeout_ms * MILLISECOND_NS
        self.is_alive = False
        self.is_open = False
        """There is a session."""
        self.is_calm = False
        """No more tricks: the run comes to its end."""
        self.life = 0
        self.stopped_until_ns = 0
        self.wire: Wire | None = None
        self._session, self._token = 0, b""
        self.limits: dict[str, int] = {}
        """What WELCOME told."""
        self._request = 0
        self._calls: dict[int, Callable[[Any], None]] = {}
        self._heard_ns = 0
        self._hello = 0

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """The process begins."""
        self.life += 1
        self.is_alive = True
        self._session, self._token = 0, b""
        self._heard_ns = self.clock.now_ns
        self.connect()
        self._soon(self._beat_ns, self._beat)
        self.begin()

    def begin(self) -> None:
        """Begin as a process does."""

    def kill(self) -> None:
        """SIGKILL: whatever it had in mind is gone."""
        self.is_alive = self.is_open = False
        self.life += 1
        if self.wire is not None:
            self.wire.cut(silently=self.draw.random() < 0.3)
            self.wire = None
        self.forget()

    def forget(self) -> None:
        """Lose what was in the memory of the process."""

    def stop(self, duration_ns: int) -> None:
        """SIGSTOP for so long."""
        self.stopped_until_ns = self.clock.now_ns + duration_ns
        if self.wire is not None:
            self.wire.is_read = False
        life = self.life

        def go_on() -> None:
            if life == self.life and self.wire is not None:
                self.wire.read_again()

        self.schedule.call(duration_ns, go_on)

    def lose_connection(self) -> None:
        """The connection ends; what is on its way is lost."""
        if self.wire is not None:
            self.wire.cut(silently=self.draw.random() < 0.4)

    @property
    def is_stopped(self) -> bool:
        """Under SIGSTOP now."""
        return self.clock.now_ns < self.stopped_until_ns

    def _soon(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Call `action` in this life of the process, when it is not stopped."""
        life = self.life

        def act() -> None:
            if life != self.life:
                return
            if self.is_stopped:
                self.schedule.call(self.stopped_until_ns - self.clock.now_ns, act)
                return
            action()

        self.schedule.call(delay_ns, act)

    later = _soon

    # ------------------------------------------------------------ session

    def connect(self) -> None:
        """A new connection, and a greeting."""
        if self.wire is not None:
            self.wire.cut()
            self.wire = None
        was_open, self.is_open = self.is_open, False
        self._calls.clear()
        if was_open:
            self.on_lost()
        if not self.worker.is_up:
            self._soon(RETRY_NS, self._reconnect)
            return
        wire: Wire | None = None

        def arrived(parts: list[bytes]) -> None:
            if wire is not None and wire is self.wire:
                self._arrived(parts)

        wire = self.wire = self.network.connect(self.worker.server, arrived)
        self._greet()

    def _reconnect(self) -> None:
        if self.wire is None:
            self.connect()

    def _greet(self) -> None:
        was_open, self.is_open = self.is_open, False
        if was_open:
            self.on_lost()
        self._calls.clear()
        self._hello = self.next_request()
        self.send(
            p.Hello(
                self._hello, p.PROTOCOL_VERSION, self.name, {}, "", 0, self._session, self._token
            )
        )

    def _beat(self) -> None:
        self._soon(self._beat_ns, self._beat)
        if self.clock.now_ns - self._heard_ns > self._silence_ns:
            self._heard_ns = self.clock.now_ns
            self.connect()
        elif self.is_open:
            self.send(p.Ping(self.next_request(), self.taken()))

    def next_request(self) -> int:
        """A number that was not used before."""
        self._request += 1
        return self._request

    def send(self, command: Any, *parts: bytes) -> None:
        """Send a command, if there is a connection."""
        if self.wire is not None:
            self.wire.up(p.encode(command), *parts)

    def ask(self, command: Any, done: Callable[[Any], None], *parts: bytes) -> None:
        """Send a request; `done` gets the answer, or nothing if the session is lost."""
        self._calls[command.request] = done
        self.send(command, *parts)

    def _arrived(self, parts: list[bytes]) -> None:
        self._heard_ns = self.clock.now_ns
        command = p.decode_server_command(parts[0])
        if isinstance(command, p.Deliver):
            if self.is_open:
                self.on_deliver(command, parts[1:])
        elif isinstance(command, p.Published):
            for request, outcome in command.entries:
                done = self._calls.pop(request, None)
                if done is not None:
                    done(outcome)
        elif isinstance(command, p.Welcome):
            if command.request == self._hello:
                self._session, self._token = command.session, command.token
                self.limits = command.limits
                self.is_open = True
                self.on_open()
        elif isinstance(command, p.Error) and command.code == p.Status.NO_SESSION:
            if self.is_open:
                self._greet()
        elif isinstance(command, p.Error | p.Result):
            done = self._calls.pop(command.request, None)
            if done is not None:
                done(command)
        elif isinstance(command, p.ConsumerEvent):
            self.on_event(command)

    # ------------------------------------------------------------ what a client does with it

    def taken(self) -> list[tuple[int, int, int]]:
        """Report with a heartbeat how far the application is."""
        return []

    def on_open(self) -> None:
        """There is a session (again)."""

    def on_lost(self) -> None:
        """The session is gone, or in doubt."""

    def on_deliver(self, command: p.Deliver, bundles: list[bytes]) -> None:
        """Messages came."""

    def on_event(self, command: p.ConsumerEvent) -> None:
        """The worker says something of a consumer."""
