"""How a connection gets its port: rings where they may be, a ZeroMQ socket otherwise.

A connection that had rings waits a while for new ones when the worker ends, as it is about to come back; one
that never had them goes to ZeroMQ at once.

A broker is asked to prove itself (`trust.py`) with every port: by CURVE over tcp, if the client has a key, by the kernel's
word on this host. A client goes by tcp where a process of another user listens on this host, unless it has pinned that
user alone, and one with a key also where the broker does not take its local user for the same principal. A client that signs on has no tcp port before it has, and signs on anew when the broker has forgotten it.
"""

from __future__ import annotations

import enum
import secrets

import zmq

from danube_fast.client.link.guarded_port import GuardedPort
from danube_fast.client.link.handshakes import Handshake, HandshakeWatch
from danube_fast.client.link.ring_port import RingPort
from danube_fast.client.link.trust import Trust
from danube_fast.client.values.limits import (
    FOREVER_NS,
    HANDSHAKE_LOOK_NS,
    HANDSHAKE_PAUSE_NS,
    HANDSHAKE_PAUSE_NS_MAX,
    HANDSHAKE_VERDICT_NS,
    KEY_SETTLE_NS,
    RINGS_WAIT_NS,
    SIGN_ON_KEYS_NS,
    SIGN_ON_REFUSED_NS,
)
from danube_fast.clock import Clock
from danube_fast.errors import DanubeError, PermissionDenied, Unavailable
from danube_fast.net.port import Port
from danube_fast.net.zap import NAME_BYTES
from danube_fast.ring.handover import knock

__all__ = ["Dialer", "Rings"]

_RECONNECT_MS = 25
_RECONNECT_MS_MAX = 50
"""While a worker is away its clients ask again so often: what was due meanwhile comes so much later."""
_HANDSHAKE_MS_MAX = 5000


class Rings(enum.Enum):
    """Whether a connection goes through shared memory."""

    NEVER = 1
    PREFERRED = 2
    REQUIRED = 3


class Dialer:
    """Opens the ports of one connection, one after the other."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        rings: Rings,
        clock: Clock,
        trust: Trust,
    ) -> None:
        self._context = context
        self._rings = rings
        self._clock = clock
        self._trust = trust
        self._watch = HandshakeWatch()
        self._refusal: DanubeError | None = None
        """Why the last port was not opened, when another attempt has no hope."""
        self.tcp = ""
        """Endpoint where the other one, which is on this host, will not do; empty: it has to."""
        self._far_until_ns = 0
        """Until then only that one is used."""
        self._wait_until_ns = 0
        """Until then only what is on this host will do."""
        self.redials = False
        """Whether `open` is to be called now: for another key, or another sign-on."""
        self._waits_for_rings = False
        """Whether it is rings that are waited for."""
        self._rests = False
        """Whether nothing is opened the next time: what listened over ipc is ending, and may answer no more."""
        self._is_local = False
        """Whether the last port stays on this host, where the kernel proves both sides."""
        self._pause_until_ns = 0
        """No tcp before that time, as the last one was refused."""
        self._key = ""
        """The server key that the last port was opened for."""
        self._endpoint = ""
        """Where that is."""
        self._generation = 0
        """The sign-on that it was opened with; 0: with none."""
        self._failures = 0
        """Failed handshakes that a port was given up for."""
        self._was_open = False
        """Whether there ever was a session."""
        self._refused_ns = 0
        """When a key was refused first that another process knows."""
        self._refusals = 0
        """How often it was since."""
        self._served = 0
        """The sign-on by which the last session was opened here."""
        self._unproved: tuple[int, frozenset[str]] = (0, frozenset())
        """A sign-on, and the keys that it brought, none of which the broker has."""

    def open(self, endpoint: str) -> Port | RingPort | None:
        """Open a port; None while rings are not to be had and nothing else will do, while a sign-on is under way, or
        `verdict` says why not.

        Raises Unavailable for an endpoint that makes no sense, or without descriptors.
        """
        port = self._open(endpoint)
        self._is_local = isinstance(port, RingPort | GuardedPort)
        return port

    def _open(self, endpoint: str) -> Port | RingPort | None:
        self.redials, self._generation = False, 0
        try:
            if self._rings is not Rings.NEVER:
                try:
                    port = RingPort.dial(endpoint, self._trust.users)
                except PermissionDenied:
                    if self._rings is Rings.REQUIRED:
                        raise
                    # a broker of another user has no rings for this one; a socket looks who listens, too
                    self._rings = Rings.NEVER
                    return self._open_socket(endpoint)
                waits = self._waits and self._waits_for_rings
                if port is not None or waits or self._rings is Rings.REQUIRED:
                    return port
            return self._open_socket(endpoint)
        except PermissionDenied as error:
            self._refusal = error.with_traceback(None)
            return None

    @property
    def claims(self) -> dict[str, str]:
        """Return what HELLO says on this host: the client's key. The kernel proves a local user there, and the broker
        refuses one that is not the same principal."""
        return {"key": self._trust.public} if self._is_local and self._trust.has_key else {}

    @property
    def is_undecided(self) -> bool:
        """Whether the broker answers, and cannot say who may come in."""
        return self._watch.is_undecided

    def next_look_ns(self, limit_ns: int) -> int:
        """Return when to ask for a verdict, before that time at the latest."""
        if self._refusal is not None:
            return self._clock.monotonic_ns()
        if self._watch.is_open:
            return min(limit_ns, self._clock.monotonic_ns() + HANDSHAKE_LOOK_NS)
        return limit_ns

    def verdict(self, now_ns: int) -> DanubeError | None:
        """Return why there is no hope of a handshake; None while there is. Afterwards `redials` counts."""
        trust = self._trust
        if self._refusal is not None:
            return self._refusal
        if trust.sign_on is not None and trust.sign_on.failure is not None:
            return trust.sign_on.failure
        # keys that can be asked for anew are asked for soon; only then is it the verdict
        is_first = trust.sign_on is not None and not self._unproved[0]
        wait_ns = SIGN_ON_KEYS_NS if is_first else HANDSHAKE_VERDICT_NS
        keys = max(1, len(trust.server_keys))
        found = self._watch.look(now_ns, keys, wait_ns)
        if found is Handshake.KEYLESS:
            return PermissionDenied(
                f"the broker at {self._endpoint} asks who you are, and no key is given: pass server_key= and key_file=, or "
                "sign_on= and token= (commands: set DANUBE_SERVER_KEY and DANUBE_KEY_FILE, or DANUBE_SIGN_ON and "
                "DANUBE_TOKEN_FILE)"
            )
        if found is Handshake.REFUSED and self._is_heard_of_soon(now_ns):
            return None
        if found is Handshake.REFUSED:
            return self._refused(
                PermissionDenied(
                    f"this key is not registered with the broker at {self._endpoint} (or it has expired, or its user is "
                    "disabled); have "
                    "the public key of key_file= registered there"
                )
            )
        if found is Handshake.UNPROVED:
            return self._unproved_by_all()
        self._back_off(now_ns, keys)
        return None

    def _is_heard_of_soon(self, now_ns: int) -> bool:
        """Whether a process refuses a key that it may not have heard of yet, as another one knows it: it is tried again."""
        if self._was_open or not self._trust.was_let_in or self._trust.sign_on is not None:
            return False
        self._refused_ns = self._refused_ns or now_ns
        if now_ns - self._refused_ns >= KEY_SETTLE_NS:
            return False
        pause_ns = SIGN_ON_REFUSED_NS << self._refusals
        self._refusals += 1
        self.redials, self._pause_until_ns = True, now_ns + pause_ns
        self._watch.forget()
        return True

    def _back_off(self, now_ns: int, keys: int) -> None:
        """Give the port up when its handshake has failed, for another key, and pause when each has failed once more."""
        failures, before = self._watch.failures, self._failures
        self._failures = failures
        if failures <= before:
            return
        if keys > 1:
            self._key = self._trust.key_behind(self._key)
        rounds = failures // keys
        if rounds > before // keys:
            pause_ns = min(HANDSHAKE_PAUSE_NS << min(rounds - 1, 10), HANDSHAKE_PAUSE_NS_MAX)
            self._pause_until_ns = now_ns + pause_ns
        self.redials = True

    def denied(self, error: DanubeError) -> DanubeError | None:
        """Return why there is no hope behind a HELLO that was answered with that error; None: `open` again."""
        if not isinstance(error, PermissionDenied):
            return error
        if self._is_local and self.tcp and self._rings is not Rings.REQUIRED:
            # the key may do what the local user may not
            self._rings, self._far_until_ns, self.redials = Rings.NEVER, FOREVER_NS, True
            return None
        if not self._generation:
            return error
        return self._refused(error)

    def _refused(self, error: PermissionDenied, *, settles: bool = True) -> DanubeError | None:
        """Have the client signed on anew, if it signs on: the broker may have forgotten that."""
        sign_on = self._trust.sign_on
        if sign_on is None or not self._generation:
            return error
        self.redials = True
        self._watch.forget()
        self._pause_until_ns = self._clock.monotonic_ns() + SIGN_ON_REFUSED_NS
        settles = settles and self._served != self._generation
        return sign_on.refused(self._generation, error, settles=settles)

    def _unproved_by_all(self) -> DanubeError | None:
        """Ask for the keys anew, if they came with a sign-on; not behind another one that brought the same."""
        keys = frozenset(self._trust.server_keys)
        error = PermissionDenied(
            f"wrong server key, or the broker at {self._endpoint} does not speak CURVE; compare "
            "server_key= with the key that the broker shows"
        )
        generation, known = self._unproved
        if keys == known and self._generation > generation:
            return error
        self._unproved = self._generation, keys
        return self._refused(error, settles=False)

    def settle(self, *, is_open: bool = False) -> None:
        """Note that the handshake over the last port is done, or given up; before that is closed."""
        self._was_open = self._was_open or is_open
        self._trust.was_let_in = self._trust.was_let_in or is_open
        if is_open and self._key and not self._is_local:
            self._trust.prefer(self._key)
            self._key, self._served = "", self._generation
            self._unproved = 0, frozenset()
            self._watch.forget()  # or they would count when the connection is lost one day
        self._failures = self._watch.failures
        self._watch.detach()

    def lost(self, port: RingPort | GuardedPort, *, was_open: bool) -> DanubeError | None:
        """Note that a port has ended or was refused; why there is no hope, None if `open` may be tried again."""
        if was_open:
            self._wait_until_ns = self._clock.monotonic_ns() + RINGS_WAIT_NS
            self._waits_for_rings = isinstance(port, RingPort)
        if isinstance(port, GuardedPort):
            is_stranger = isinstance(port.lost, PermissionDenied)
            # with a key it may be that the local user is not registered
            is_back_soon = was_open or (self._waits and not self._trust.has_key) or not self.tcp
            if is_back_soon and not is_stranger:
                self._rests = True
            elif self.tcp:
                self._go_far()
            else:
                return port.lost
            return None
        if port.refused:
            if self._rings is Rings.REQUIRED:
                return Unavailable(f"{port.lost}; use transport='auto', or 'zmq'")
            self._rings = Rings.NEVER
        return None

    def _open_socket(self, endpoint: str) -> Port | None:
        """Open a socket; None if it would be guarded, and nothing listens there just now."""
        endpoint = self._chosen(endpoint)
        if not endpoint:
            return None
        trust, is_ipc = self._trust, endpoint.startswith("ipc://")
        is_curve = trust.has_key and not is_ipc
        if is_curve and not endpoint.startswith("tcp://"):
            raise PermissionDenied(
                f"{endpoint} is an endpoint of neither tcp nor ipc, over which this broker cannot prove "
                "its server_key; check what the broker advertises"
            )
        if is_curve and not self._take_key(endpoint):
            return None
        socket = self._new_socket()
        if is_ipc:
            socket.setsockopt(zmq.RECONNECT_IVL, -1)
            socket.setsockopt(zmq.ROUTING_ID, b"\0" + secrets.token_bytes(NAME_BYTES - 1))
        if endpoint.startswith("tcp://["):
            socket.setsockopt(zmq.IPV6, 1)
        try:
            if is_curve:
                socket.setsockopt_string(zmq.CURVE_SERVERKEY, self._key)
                socket.setsockopt_string(zmq.CURVE_PUBLICKEY, trust.public)
                socket.setsockopt_string(zmq.CURVE_SECRETKEY, trust.secret)
            # a broker that has taken this client once without a key may do so again
            if is_curve or not (is_ipc or self._was_open):
                self._watch.attach(socket, endpoint, has_key=is_curve)
                self._endpoint, self._failures = endpoint, self._watch.failures
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._watch.detach()
            socket.close(0)
            raise Unavailable(f"cannot connect to {endpoint} ({error}); check it") from error
        return GuardedPort(socket, endpoint, trust.users) if is_ipc else Port(socket)

    @property
    def _waits(self) -> bool:
        """Whether only what is on this host will do: the worker had it, and is about to come back."""
        return self._clock.monotonic_ns() < self._wait_until_ns

    def _go_far(self) -> None:
        """Go by tcp for a while: what stands in the way on this host may pass."""
        self._far_until_ns = self._clock.monotonic_ns() + RINGS_WAIT_NS

    def _chosen(self, endpoint: str) -> str:
        """Return where a socket is to go now: to that endpoint, or the one over tcp; empty: nowhere, as nothing listens.
        Raises PermissionDenied."""
        is_far = self._clock.monotonic_ns() < self._far_until_ns
        if is_far or not endpoint.startswith("ipc://"):
            return self.tcp or endpoint
        if self._rests:
            self._rests = False
            return ""
        try:
            if knock(endpoint, self._trust.users):
                return endpoint
        except PermissionDenied:
            if not self.tcp:
                raise
            self._go_far()
            return self.tcp
        return "" if self._waits else self.tcp

    def _take_key(self, endpoint: str) -> bool:
        """Choose the server key to ask for; whether there is one, no pause, and the client is signed on if it must be."""
        trust = self._trust
        is_paused = self._clock.monotonic_ns() < self._pause_until_ns and endpoint == self._endpoint
        if not trust.is_ready() or is_paused:
            return False
        if self._key not in trust.server_keys:
            self._key = trust.server_keys[0]
        self._generation = trust.sign_on.generation if trust.sign_on is not None else 0
        return True

    def _new_socket(self) -> zmq.Socket[bytes]:
        try:
            socket = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise Unavailable(
                f"no more sockets in this process ({error}); close clients, or raise `ulimit -n`"
            ) from error
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS_MAX)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS_MAX)
        return socket
