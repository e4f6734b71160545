"""One connection: a DEALER socket, or rings, to one endpoint of the broker, and the session on it.

    HANDSHAKE --WELCOME--> OPEN --NO_SESSION or silence--> HANDSHAKE ...       FAILED and CLOSED end it

The session outlives the socket: after a lost connection HELLO carries the old session and token.
WELCOME says whether the broker still knew it. Either way everything that was on its way may be
lost, so every user of the connection (producer lanes, consumer attachments) starts over from what
it knows: lanes resend what was not acked (dedup makes that exact), attachments subscribe again.
Requests that are safe to repeat are repeated; others fail with Unavailable.

Queues are bounded by windows and credit, not by ZeroMQ's high-water marks, so both marks are off.
All methods are called under the pump's lock.
"""

from __future__ import annotations

from typing import Any

import zmq

from danube_fast.client.link.bundler import Bundler
from danube_fast.client.link.calls import (
    Call,
    OnLoss,
    Reporter,
    ask_all,
    asks_again,
    unknown_outcome,
)
from danube_fast.client.link.deliveries import (
    Deliveries,
    hand_on,
    take_from_rings,
    take_from_socket,
)
from danube_fast.client.link.dialer import Dialer
from danube_fast.client.link.guarded_port import GuardedPort
from danube_fast.client.link.heartbeat import Heartbeat
from danube_fast.client.link.lookout import Link
from danube_fast.client.link.pump import Pump
from danube_fast.client.link.ring_port import RingPort
from danube_fast.client.link.users import Identity, Receiver, State, User
from danube_fast.client.values.limits import (
    BACKOFF_MIN_NS,
    HANDSHAKE_RETRY_NS,
    HANDSHAKE_RETRY_NS_MAX,
    LOOKUP_AFTER_NS,
    RINGS_RETRY_NS,
)
from danube_fast.clock import MILLISECOND_NS
from danube_fast.errors import DanubeError, Unavailable, error_from_code
from danube_fast.net.port import Port
from danube_fast.net.protocol import (
    Bye,
    ConsumerEvent,
    Deliver,
    Error,
    Ping,
    Pong,
    ProducerNames,
    Published,
    Result,
    Status,
    Welcome,
    decode_server_command,
    encode,
)

__all__ = ["Connection", "Identity", "User"]

_OPEN = State.OPEN
_PRODUCER_NAMES_MAX = 100_000
_BYE_LINGER_MS = 200
"""How long a closing socket may still try to send its BYE."""
_QUICK, _IDLE = ("heartbeat_ms", 500), ("heartbeat_idle_ms", 15_000)
"""Limits of WELCOME, and what they are if it does not say."""


class Connection:
    """One endpoint of the broker as this client sees it."""

    def __init__(
        self, pump: Pump, dialer: Dialer, endpoints: list[str], identity: Identity
    ) -> None:
        self.pump = pump
        self.endpoint = endpoints[0]
        self._endpoints = endpoints
        self.state = State.HANDSHAKE
        self.failure: DanubeError | None = None
        self.limits: dict[str, int] = {}
        self.users: dict[User, None] = {}
        self.receivers: dict[int, Receiver] = {}
        """By consumer id."""
        self.reporters: dict[Any, Reporter] = {}
        """By attachment: asked with the next heartbeat how far the application is."""
        self.takes_reports = False
        self.wants_topics = False
        """What is opened on a partition says the topic, too."""
        self.producer_names: dict[tuple[int, int], str] = {}
        self.calls: dict[int, Call] = {}
        self.bundler = Bundler(self)
        self.link_number = pump.next_link_number()
        self._deliveries = Deliveries(pump.answers.address, self.link_number)
        self._is_linked = self._is_cut = False
        self._identity = identity
        self._session, self._token = 0, b""
        self.last_request = 0
        """Numbers of requests are counted up from here."""
        self._hello = 0
        self._opened = False
        self.beats_quickly = False
        self._retry_ns = HANDSHAKE_RETRY_NS
        self._heard_ns = pump.clock.monotonic_ns()
        self._heartbeat = Heartbeat(pump, self.link_number)
        self._lost_ns = self._chosen_ns = self._heard_ns
        self._renew_ns = 0
        self.dialer = dialer
        self._port: Port | RingPort | None = None
        self._connect()
        self._handshake()

    # ------------------------------------------------------------ socket

    def _connect(self) -> None:
        """Open a port, unless none is to be had just now."""
        self._is_linked = self._is_cut = False
        self._port = self.dialer.open(self.endpoint)
        self.has_rings = isinstance(self._port, RingPort)
        """Whether it goes through shared memory now."""
        if self._port is not None:
            self._fd = self._port.fileno()
            self.pump.add(self)

    def fileno(self) -> int:
        """Return the port's descriptor; ZeroMQ's is edge-triggered."""
        return self._fd

    def readable(self) -> bool:
        """Whether a message waits in the port."""
        return self._port is not None and self._port.readable()

    @property
    def free_row(self) -> int:
        """Address of the words of its rings (`duplex_kernel.py`) or socket (`port_row.py`), if the next message may go
        there at once; or 0."""
        port = self._port
        return port.free_row if port is not None and self.state is _OPEN else 0

    @property
    def link(self) -> Link | None:
        """The rings, for a leader to look at, while there are any."""
        port = self._port
        if isinstance(port, RingPort) and (duplex := port.duplex) is not None:
            return Link(self._fd, duplex, self.link_number)
        return None

    @property
    def has_room(self) -> bool:
        """Whether the next message would go out at once, as far as is known."""
        return self._port is None or self._port.has_room

    def reset(self) -> None:
        """Begin anew, so that nothing is lost of a message that was read and perhaps not handled."""
        if self.state is State.OPEN:
            self._lost_ns = self.pump.clock.monotonic_ns()
        if self.state in (State.OPEN, State.HANDSHAKE):
            self._renew()

    def _renew(self) -> None:
        """Open a fresh port: nothing stale in its queue, no waiting for ZeroMQ to reconnect."""
        now_ns = self.pump.clock.monotonic_ns()
        asked_ns = now_ns - max(self._chosen_ns, self._lost_ns)
        was_asked = self._port is not None and (
            not self.dialer.redials or asked_ns >= self._retry_ns
        )
        self._drop_port(0)
        if self.state is State.HANDSHAKE and was_asked:
            self._chosen_ns = now_ns
            self._retry_ns = min(2 * self._retry_ns, HANDSHAKE_RETRY_NS_MAX)
            place = self._endpoints.index(self.endpoint) + 1
            self.endpoint = self._endpoints[place % len(self._endpoints)]
        self._connect()
        self._handshake()

    def _drop_port(self, linger_ms: int) -> None:
        port, self._port, self.has_rings = self._port, None, False
        self.dialer.settle()
        if port is not None:
            self.pump.remove(self)
            self.pump.dispose(lambda: port.close(linger_ms))

    def _on_port_lost(self, port: RingPort | GuardedPort) -> None:
        """Go on with another port, if there is hope: the worker ended, or has no rings for this client."""
        self._drop_port(0)
        if was_open := self.state is State.OPEN:
            self._lost_ns = self.pump.clock.monotonic_ns()
        if (failure := self.dialer.lost(port, was_open=was_open)) is not None:
            self.fail(failure)
            return
        self._connect()
        self._handshake()

    # ------------------------------------------------------------ session

    @property
    def is_open(self) -> bool:
        """Whether commands may be sent now."""
        return self.state is State.OPEN

    def _handshake(self) -> None:
        was_open, self.state = self.state is State.OPEN, State.HANDSHAKE
        if was_open:
            self._drop_calls()
            for user in tuple(self.users):
                user.on_lost()
        if self._port is None:
            self._renew_at(self.pump.clock.monotonic_ns() + RINGS_RETRY_NS)
            return
        self._hello = self.next_request()
        claims = self.dialer.claims
        self.send(self._identity.hello(self._hello, self._session, self._token, claims))
        self._renew_at(self.pump.clock.monotonic_ns() + self._retry_ns)

    def _renew_at(self, monotonic_ns: int) -> None:
        """Give the handshake up at that time; look how it goes before, if there is anything to see."""
        self._renew_ns = monotonic_ns
        self.pump.arm(self, self.dialer.next_look_ns(monotonic_ns))

    def _drop_calls(self) -> None:
        """End calls that were on their way: they may be lost, and this endpoint may never come back."""
        for call in list(self.calls.values()):
            if call.on_loss is OnLoss.FAIL:
                self._finish(call, None, unknown_outcome(self.endpoint))
            elif call.on_loss is OnLoss.FORGET:
                call.on_done = None
                self._finish(call, None, None)

    def _lose(self) -> None:
        """Repeat the handshake: the broker does not know this client any more, or seems gone."""
        if self.state is State.OPEN:
            self._lost_ns = self.pump.clock.monotonic_ns()
            self._handshake()

    def _on_welcome(self, command: Welcome) -> None:
        if command.request != self._hello or self.state is not State.HANDSHAKE:
            return
        self.state = State.OPEN
        self.dialer.settle(is_open=True)
        self._session, self._token = command.session, command.token
        self.limits = command.limits
        self.takes_reports = "unreported_messages" in self.limits
        self.wants_topics = "topics_named" in self.limits
        self._heartbeat.forget()
        self._retry_ns = HANDSHAKE_RETRY_NS
        resumed, self._opened = command.resumed and self._opened, True
        if not resumed:
            self.producer_names.clear()
        self.bundler.clear()
        self._arm_heartbeat()
        for call in list(self.calls.values()):
            self.send(call.command)
        for user in tuple(self.users):
            user.on_session(resumed)

    def fail(self, error: DanubeError) -> None:
        """End: one side refuses the other for good (wrong protocol version, not authorized, a wrong key, ...)."""
        self.state, self.failure = State.FAILED, error
        self._stop(0)
        for user in tuple(self.users):
            user.on_failure(error)
        self.bundler.clear()  # what one let go for another

    # ------------------------------------------------------------ heartbeats

    def limit(self, name: str, default: int) -> int:
        """Return a limit of WELCOME."""
        return self.limits.get(name, default)

    def _arm_heartbeat(self) -> None:
        self.beats_quickly = bool(self.receivers or self.bundler.on_way or self.calls)
        self._beat_after(*_QUICK if self.beats_quickly else _IDLE)

    def _beat_after(self, name: str, default: int) -> None:
        wait_ns = 0 if self._is_cut else self.limit(name, default) * MILLISECOND_NS
        self.pump.arm(self, self.pump.clock.monotonic_ns() + wait_ns)

    def beat_soon(self) -> None:
        """Beat in the quick rhythm from now on: something began that the broker watches."""
        if not self.beats_quickly and self.state is State.OPEN:
            self.beats_quickly = True
            self._beat_after(*_QUICK)

    def on_time(self, now_ns: int) -> bool:
        """Send the next heartbeat, or repeat a HELLO that has gone unanswered."""
        if self.state is State.HANDSHAKE:
            self._repeat_hello(now_ns)
        elif self.state is State.OPEN:
            silent_ns = self._heartbeat.silent_ns(now_ns, self._heard_ns)
            if self._is_cut:
                self.reset()
            elif silent_ns >= self.limit("session_timeout_ms", 2500) * MILLISECOND_NS:
                self._lost_ns = now_ns - silent_ns
                self._renew()
            else:
                reports = ask_all(self.reporters) if self.takes_reports else []
                self._heartbeat.beat(now_ns, request := self.next_request())
                self.send(Ping(request, reports))
                self._arm_heartbeat()
                return False
        return True

    def _repeat_hello(self, now_ns: int) -> None:
        if (verdict := self.dialer.verdict(now_ns)) is not None:
            self.fail(verdict)
        elif now_ns < self._renew_ns and not self.dialer.redials:
            self._renew_at(self._renew_ns)
        else:
            if now_ns - self._lost_ns > LOOKUP_AFTER_NS:
                for user in tuple(self.users):
                    user.on_away()
            self._renew()

    # ------------------------------------------------------------ sending

    def next_request(self) -> int:
        """Return a request number that was not used before on this connection."""
        self.last_request += 1
        return self.last_request

    def send(self, command: Any) -> None:
        """Send one command of one part."""
        self._post(encode(command))

    def send_bundle(self, command: bytes, bundle: memoryview) -> None:
        """Send an encoded PUBLISH and its bundle; the bundle is copied."""
        self._post(command, bundle)

    def _post(self, *parts: Any) -> None:
        if self._port is None:
            return
        try:
            self._port.post(*parts)
        except zmq.Again:  # there is no high-water mark: the broker refused this socket for good
            self._is_cut = True
            self.pump.arm(self, self.pump.clock.monotonic_ns())
            return
        self.pump.after_send(self)

    def call(self, call: Call) -> Call:
        """Send a request now, or as soon as the session is open."""
        if self.failure is not None:
            call.finish(None, self.failure)
            return call
        self.calls[call.request] = call
        if self.state is State.OPEN:
            self.send(call.command)
            self.beat_soon()  # or a caller of a process that dies hears of it late
        return call

    def abandon(self, call: Call) -> None:
        """Forget a request whose reply is not wanted any more."""
        self.calls.pop(call.request, None)

    def _finish(self, call: Call, value: Any, error: DanubeError | None) -> None:
        self.calls.pop(call.request, None)
        call.finish(value, error)

    # ------------------------------------------------------------ receiving

    def drain(self, lazily: bool = False) -> int:
        """Read until nothing is left (credit and windows bound it); how many commands there were. `lazily`: rings are not
        armed, as a leader does that."""
        port, count, deliveries = self._port, 0, self._deliveries
        if lazily and self.has_rings and port is not None and port.free_row:
            count = deliveries.take_all(take_from_rings, port.free_row, self.receivers)
            if count and deliveries.are_all and port.free_row:
                self._heard_ns = self.pump.clock.monotonic_ns()
                return count
        if isinstance(port, Port) and port.free_row:
            return self._drain_socket(port)
        rings = port if isinstance(port, RingPort) else None
        if rings is not None:
            rings.arms = not lazily
        had_room = port is None or port.has_room
        while port is not None and port is self._port:
            if rings is not None and (duplex := rings.duplex) is not None:
                count += deliveries.take_all(take_from_rings, duplex.row, self.receivers)
            head = port.receive_head()
            if head is not None:
                self._handle(head, port)
                count += 1
            elif not (isinstance(port, GuardedPort) and port.has_more()):
                break
        if count:
            self._heard_ns = self.pump.clock.monotonic_ns()
        if isinstance(port, RingPort | GuardedPort) and port is self._port:
            if port.lost is not None:
                self._on_port_lost(port)
                count += 1
            elif type(port) is RingPort and not self._is_linked and port.duplex is not None:
                self._is_linked = True
                self.pump.remove(self)
                self._fd = port.fileno()
                self.pump.add(self)
        return count + (self.has_room and not had_room)  # a call may wait for that

    def _drain_socket(self, port: Port) -> int:
        """Do the same with a socket. Acks that went to their rows do not count: the threads there are awake already."""
        count, deliveries = 0, self._deliveries
        while port is self._port:
            count += deliveries.take_all(take_from_socket, port.row, self.receivers)
            head = None if deliveries.are_all else port.receive_head()
            if head is not None:
                self._handle(head, port)
                count += 1
            elif not (isinstance(port, GuardedPort) and port is self._port and port.has_more()):
                break
        if count:
            self._heard_ns = self.pump.clock.monotonic_ns()
        if isinstance(port, GuardedPort) and port is self._port and port.lost is not None:
            self._on_port_lost(port)
            count += 1
        return count

    def _handle(self, head: memoryview | bytes, port: Port | RingPort) -> None:
        command = decode_server_command(head)
        kind = type(command)
        parts = port.receive_rest() if port.more else []
        if kind is Deliver:
            hand_on(command.consumer_ids, parts, self.receivers)
            return
        if kind is Published:
            self.bundler.settle(command.entries, command.texts)
        elif kind is Result or kind is Pong:
            call = self.calls.get(command.request)
            if call is not None:
                self._finish(call, getattr(command, "value", None), None)
        elif kind is Error:
            self._on_error(command)
        elif kind is Welcome:
            self._on_welcome(command)
        elif kind is ConsumerEvent:
            receiver = self.receivers.get(command.consumer_id)
            if receiver is not None:
                receiver.on_event(command)
        elif kind is ProducerNames:
            if len(self.producer_names) > _PRODUCER_NAMES_MAX:
                self.producer_names.clear()
            names = command.names.items()
            self.producer_names.update({(command.partition_id, each): n for each, n in names})
        else:
            raise TypeError(f"a command of kind {kind.__name__} has no meaning for a client")

    def _on_error(self, command: Error) -> None:
        if command.code == Status.NO_SESSION:
            self._lose()
            return
        if command.request == self._hello and self.state is State.HANDSHAKE:
            error = error_from_code(command.code, command.text)
            now_ns = self.pump.clock.monotonic_ns()
            if asks_again(error, now_ns - self._lost_ns, was_open=self._opened):
                self._renew_at(now_ns + BACKOFF_MIN_NS)
            elif (failure := self.dialer.denied(error)) is not None:
                self.fail(failure)
            else:
                self._renew()
            return
        call = self.calls.get(command.request)
        if call is not None:
            self._finish(call, None, error_from_code(command.code, command.text))
            return
        self.bundler.on_published(command.request, [command.code, 0], {command.code: command.text})

    # ------------------------------------------------------------ the end

    def say_bye(self) -> None:
        """End the session at the broker, without waiting for the answer."""
        if self.state is State.OPEN:
            self.send(Bye(self.next_request()))

    def close(self) -> None:
        """Close the socket; every open request ends with Unavailable."""
        if self.state is State.CLOSED:
            return
        self.state, self.failure = State.CLOSED, Unavailable("the client was closed; connect again")
        self._stop(_BYE_LINGER_MS)
        self.bundler.clear()

    def _stop(self, linger_ms: int) -> None:
        """Close the port; requests end, and nothing is waited for any more."""
        self._heartbeat.forget()
        self.pump.disarm(self)
        self._drop_port(linger_ms)
        for call in list(self.calls.values()):
            self._finish(call, None, self.failure)

    def after_fork(self) -> None:
        """Let the worker see the end of the parent, in a forked child."""
        if isinstance(self._port, RingPort):
            self._port.close(0)
