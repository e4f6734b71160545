r"""The thread that bounds what connections cost which are no sessions yet, and what a session may send without an end.

ZeroMQ hands a message over when it is whole, and a message may have any number of parts: who sends them without an end makes
the process grow, and no command of it is ever seen. So this looks at the connections themselves:

    monitor of the ROUTER --accepted, closed--> connections: stranger --says HELLO--> session
                                                    |                                   |
    the kernel: bytes received  ------------------> too many, too long, too many of     no message came whole, and
                                                    them: cut                           bytes or memory grow: cut

The owner's loop tells who has sent something (`note_sender`), and `follow` where to ask whether that is a session, when it
was last heard, and up to when the loop has taken all that had come. Nothing here is asked for a message.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import select
import struct
import threading
from collections import Counter
from collections.abc import Callable

import zmq

from danube_fast.clock import MILLISECOND_NS, SECOND_NS, Clock
from danube_fast.descriptors import descriptor_limit, lowest_free_descriptor
from danube_fast.errors import Unavailable
from danube_fast.net.failed_handshakes import FailedHandshakes
from danube_fast.net.guarded_connection import (
    BACKLOG_BYTES_MAX,
    BACKLOG_NS_MAX,
    COPIES,
    COPIES_BYTES_MAX,
    FIRST_BYTES_FLOODED,
    FIRST_BYTES_GROWING,
    FIRST_BYTES_MAX,
    GREETING_BYTES,
    GROWTH_BYTES,
    GROWTH_BYTES_MAX,
    SILENT_MAX,
    SILENT_SHARE,
    STRANGERS_MIN,
    STRANGERS_SHARE,
    UNHEARD_BYTES_MIN,
    Connection,
    Limits,
    Reason,
)
from danube_fast.net.peer_socket import cookie_of, cut, host_of, untaken_bytes
from danube_fast.net.turns import in_turns

__all__ = ["ConnectionGuard"]

_log = logging.getLogger(__name__)

LOOK_NS = 10 * MILLISECOND_NS
PAUSE_NS_MIN = 2 * SECOND_NS
"""A look at strangers that comes so late: the process was stopped meanwhile."""
WATCH_NS = 200 * MILLISECOND_NS
SWEEP_NS = SECOND_NS
_SHARE = 20
"""One part in so many of a core at most is used for looking."""
_CALM_NS = SECOND_NS
_LOG_NS = 60 * SECOND_NS
_STOP_SECONDS = 10.0
_RETRY_SECONDS = 0.2
_STATM_BYTES_MAX = 128
CUT_SHARE = 4
"""One stranger in so many goes at once when no descriptor is left."""
_EVENT = struct.Struct("=Hi")
_EVENT_MASK = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


class ConnectionGuard:
    """Watch the connections of one ROUTER. `start`, before it is bound, and `stop` are called by its owner's thread."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], limits: Limits, clock: Clock
    ) -> None:  # fmt: skip
        self._context, self._socket, self._limits, self._clock = context, socket, limits, clock
        self._growth_max = max(GROWTH_BYTES_MAX, 4 * limits.session_bytes)
        self._backlog_max = max(BACKLOG_BYTES_MAX, 2 * limits.session_bytes)
        self._heard: Callable[[bytes], int | None] = lambda identity: None
        self._drained: Callable[[], int] = clock.monotonic_ns
        self._wake: Callable[[], None] = lambda: None
        self._connections: dict[int, Connection] = {}
        self._strangers: dict[int, Connection] = {}
        self._senders: dict[int, bytes] = {}
        """Who has sent the last message over a descriptor; written by the loop."""
        self._spoke: set[int] = set()
        """Descriptors over which a message has come since the last look; added to by the loop."""
        self._ending: dict[bytes, bool] = {}
        """Connections to be cut, by identity; True: only if the peer has not taken what was sent. Written by the loop."""
        self.cuts: Counter[Reason] = Counter()
        """Connections that were cut, by `Reason`."""
        self._told: Counter[Reason] = Counter()
        self.failed = FailedHandshakes(limits.failures_max)
        """Handshakes that failed, by address."""
        self._last_host = ""
        self._logged_ns = -_LOG_NS
        self._next_look_ns = self._next_watch_ns = self._next_sweep_ns = 0
        self._calm_bytes = self._memory_bytes = 0
        self._received = 0
        """Bytes over all sessions, while the process grows."""
        self._is_first_look = True
        """Whether sessions have not been looked at since it grows."""
        self._was_busy = False
        """Whether there were strangers behind the last look."""
        self._calm_since_ns = 0
        self._grows = self._is_flooded = False
        self._has_suspects = self._asks = False
        self._stop_fd = self._statm_fd = -1
        self._monitor: zmq.Socket[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="guard", daemon=True)

    def follow(
        self, heard: Callable[[bytes], int | None], drained: Callable[[], int], wake: Callable[[], None]
    ) -> None:  # fmt: skip
        """Ask these, in the guard's thread: when the session of an identity was last heard, None if it has none; up to
        when the loop has taken all that had come; and to wake the loop."""
        self._heard, self._drained, self._wake = heard, drained, wake

    def note_sender(self, fd: int, identity: bytes) -> None:
        """Note who has sent a message over a descriptor; for the loop, about senders without a session. One without a
        name of its own, `identity` is empty, is cut."""
        self._senders[fd] = identity
        self._spoke.add(fd)

    def end(self, identity: bytes, *, if_untaken: bool = False) -> None:
        """Cut a connection within a look or two, and with it what ZeroMQ has queued for it; `if_untaken`, or if it has a
        session again: unless its peer has taken all that was sent. For the loop."""
        self._ending[identity] = if_untaken and self._ending.get(identity, True)

    def start(self) -> None:
        """Begin to watch, once. Raises Unavailable for want of descriptors or threads; then nothing is left open."""
        try:
            self._open()
            self._thread.start()
        except (OSError, zmq.ZMQError, RuntimeError) as error:
            self.stop()
            raise Unavailable(
                f"connections cannot be guarded, so none are taken ({error}); raise `ulimit -n`, or `ulimit -u` for threads"
            ) from error

    def _open(self) -> None:
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.failed.open()
        self._statm_fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        address = f"inproc://guard-{id(self)}"
        self._socket.monitor(address, _EVENT_MASK)
        self._monitor = monitor = self._context.socket(zmq.PAIR)
        # ZeroMQ's own thread waits for room for an event: it must always have some
        monitor.setsockopt(zmq.RCVHWM, 0)
        monitor.setsockopt(zmq.LINGER, 0)
        monitor.connect(address)

    def stop(self) -> None:
        """Watch no more; call it before the socket is closed."""
        if self._stop_fd < 0:
            return
        os.eventfd_write(self._stop_fd, 1)
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disable_monitor()
        if self._thread.is_alive():
            _log.warning(
                "the thread that guards connections has not ended in %.0f s", _STOP_SECONDS
            )
            return
        if self._monitor is not None:
            self._monitor.close(0)
        for fd in (self._stop_fd, self._statm_fd):
            if fd >= 0:
                os.close(fd)
        self._stop_fd = self._statm_fd = -1
        self._monitor = None
        self.failed.close()

    # ------------------------------------------------------------ in the thread

    def _run(self) -> None:
        logged_ns = -_LOG_NS
        while True:
            try:
                self._serve()
                return
            except zmq.ContextTerminated as error:
                _log.debug("the guard of connections ends: %s", error)
                return
            except Exception:  # memory may be short, and just then connections must be guarded
                now_ns = self._clock.monotonic_ns()
                if now_ns - logged_ns >= _LOG_NS:
                    logged_ns = now_ns
                    _log.exception("a look at connections failed; it is tried again")
            if select.select([self._stop_fd], [], [], _RETRY_SECONDS)[0]:
                return

    def _serve(self) -> None:
        """Look at what is there until `stop`."""
        monitor = self._monitor
        if monitor is None:
            return
        calm, busy = select.poll(), select.poll()  # a fifth of what zmq.Poller costs
        for poller in (calm, busy):
            poller.register(self._stop_fd, select.POLLIN)
        calm.register(self.failed.fd, select.POLLIN)
        # raised once for several events: all are taken before it is slept on
        calm.register(int(monitor.getsockopt(zmq.FD)), select.POLLIN)
        self._take_events(monitor, self._clock.monotonic_ns())
        while True:
            # while there are strangers events wait for the next look: one turn for a thousand of them
            is_busy = self._is_busy
            ready = dict((busy if is_busy else calm).poll(self._pause_ms()))
            if self._stop_fd in ready:
                return
            now_ns = self._clock.monotonic_ns()
            self.failed.do_work(now_ns)
            if is_busy or ready:
                self._take_events(monitor, now_ns)
            if now_ns >= self._next_look_ns:
                self._look(now_ns)
                took_ns = self._clock.monotonic_ns() - now_ns
                self._next_look_ns = now_ns + max(LOOK_NS, _SHARE * took_ns)

    @property
    def _is_busy(self) -> bool:
        return bool(self._strangers) or (self._grows and bool(self._connections))

    def _pause_ms(self) -> int | None:
        """How long to sleep; None: until something connects."""
        due_ns = self.failed.next_ns
        if not self._connections and due_ns is None:
            return None
        wanted_ns = self._next_look_ns if self._is_busy else self._next_watch_ns
        if due_ns is not None:
            wanted_ns = min(wanted_ns, due_ns) if self._connections else due_ns
        return max(1, -((self._clock.monotonic_ns() - wanted_ns) // MILLISECOND_NS))

    def _take_events(self, monitor: zmq.Socket[bytes], now_ns: int) -> None:
        """Take all that ZeroMQ tells of connections."""
        while True:
            try:
                event, value = _EVENT.unpack_from(monitor.recv(zmq.NOBLOCK))
                monitor.recv(zmq.NOBLOCK)  # the endpoint
            except zmq.Again:
                return
            if event == zmq.EVENT_ACCEPTED:
                self._connections[value] = self._strangers[value] = Connection(
                    value, cookie_of(value), now_ns
                )
            else:
                self._forget(value)

    def _forget(self, fd: int) -> None:
        connection = self._connections.pop(fd, None)
        if self._strangers.pop(fd, None) is not None:
            self.failed.note_end()
        if connection is not None and self._senders.get(fd) == connection.identity:
            self._senders.pop(fd, None)

    def _look(self, now_ns: int) -> None:
        """Look at strangers, and at sessions if the process grows."""
        drained_ns = self._drained()  # before sessions are asked when they were heard
        if now_ns >= self._next_watch_ns or self._grows:
            self._next_watch_ns = now_ns + WATCH_NS
            self._weigh(now_ns)
        self._has_suspects = self._asks = False
        if self._ending:
            self._end_connections()
        self._look_at_strangers(now_ns, drained_ns)
        if self._grows:
            self._look_at_sessions(now_ns, drained_ns)
            self._calm_down(now_ns)
        elif now_ns >= self._next_sweep_ns:
            self._next_sweep_ns = now_ns + SWEEP_NS
            self._find_ended(now_ns)
        if self._asks:
            self._wake()  # perhaps it sleeps: let it say that nothing whole is there
        if self.cuts != self._told and now_ns - self._logged_ns >= _LOG_NS:
            self._tell(now_ns)

    def _weigh(self, now_ns: int) -> None:
        """Read how much memory this process has of its own, and whether that grows."""
        _, resident, shared, *_ = os.pread(self._statm_fd, _STATM_BYTES_MAX, 0).split()
        self._memory_bytes = memory = (int(resident) - int(shared)) * mmap.PAGESIZE
        if not self._calm_bytes or memory < self._calm_bytes:
            self._calm_bytes = memory
        grows = memory > self._calm_bytes + GROWTH_BYTES
        if grows and not self._grows:
            self._calm_since_ns, self._is_first_look = now_ns, True
        self._grows, self._is_flooded = grows, memory > self._calm_bytes + self._growth_max

    # ------------------------------------------------------------ strangers

    def _look_at_strangers(self, now_ns: int, drained_ns: int) -> None:
        """Find out who has become a session, and cut who sends too much or waits too long."""
        # what came before the loop's last look at its socket may be a HELLO that it has not read
        heard_until_ns = min(now_ns, max(drained_ns, now_ns - BACKLOG_NS_MAX))
        self._forgive_pause(now_ns)
        too_old_ns, gone = heard_until_ns - self._limits.stranger_ns, []
        for stranger in in_turns(self._strangers.values()):
            fd = stranger.fd
            identity = self._senders.get(fd)
            heard_ns = self._heard(identity) if identity else None
            if not stranger.look():
                self._connections.pop(fd, None)
                self.failed.note_end()
                gone.append(fd)
            elif heard_ns is not None:
                stranger.identity, stranger.is_session = identity or b"", True
                stranger.rebase(heard_ns, self._memory_bytes, self._received)
                gone.append(fd)
            elif stranger.is_cut:
                continue
            elif identity == b"":
                self._cut(stranger, Reason.NAME)
            elif stranger.since_ns < too_old_ns:
                self._cut(stranger, Reason.SILENT)
            elif fd in self._spoke:
                stranger.spoke = True
                stranger.rebase(-1, self._memory_bytes, self._received)
            else:
                self._judge_stranger(stranger, now_ns, drained_ns)
            self._spoke.discard(fd)
        for fd in gone:
            self._strangers.pop(fd)
        self._was_busy = bool(self._strangers)
        self._thin_out()

    def _forgive_pause(self, now_ns: int) -> None:
        """Give strangers the time that the process was stopped for: what they said meanwhile was not read."""
        paused_ns = now_ns - self._next_look_ns
        if self._was_busy and paused_ns > PAUSE_NS_MIN:
            for stranger in self._strangers.values():
                stranger.since_ns += paused_ns

    def _judge_stranger(self, one: Connection, now_ns: int, drained_ns: int) -> None:
        """Cut a stranger that sends too much before a message of it is whole."""
        unheard = one.bytes - one.base
        if self._is_flooded:
            most = hard = FIRST_BYTES_FLOODED
        elif self._grows:
            most, hard = FIRST_BYTES_GROWING, FIRST_BYTES_MAX
        else:
            most = self._limits.session_bytes if one.spoke else FIRST_BYTES_MAX
            hard = 2 * most
        self._has_suspects |= unheard > FIRST_BYTES_FLOODED
        self._judge(one, unheard > most, unheard > hard, now_ns, drained_ns, Reason.BYTES)

    def _judge(
        self, one: Connection, is_suspect: bool, is_guilty: bool, now_ns: int, drained_ns: int, reason: Reason
    ) -> None:  # fmt: skip
        """Cut who is guilty, and who still is a suspect after the loop has taken all that was whole."""
        if is_guilty or (is_suspect and one.accused_ns and drained_ns > one.accused_ns):
            self._cut(one, reason)
        elif is_suspect:
            one.accused_ns = one.accused_ns or now_ns
            self._asks = True

    def _thin_out(self) -> None:
        """Cut strangers if there are too many, or too few descriptors for all who may come."""
        limit, count = descriptor_limit(), len(self._strangers)
        if count < STRANGERS_MIN:
            return
        sessions = len(self._connections) - count
        most = min(limit // STRANGERS_SHARE, self._limits.clients_max - sessions)
        over = count - max(most, STRANGERS_MIN)
        if lowest_free_descriptor() >= limit:  # ZeroMQ tries to accept without a pause now
            over = max(over, count // CUT_SHARE, STRANGERS_MIN)
        strangers = [one for one in self._strangers.values() if not one.is_cut]
        silent = [one for one in strangers if one.bytes <= GREETING_BYTES]
        over = max(over, len(silent) - min(limit // SILENT_SHARE, SILENT_MAX)) - (
            count - len(strangers)
        )
        if over <= 0:
            return
        for one in strangers:
            one.host = one.host or host_of(one.fd)
        crowd = Counter(one.host for one in strangers)
        strangers.sort(key=lambda one: (one.bytes > GREETING_BYTES, -crowd[one.host], one.since_ns))
        for one in strangers[:over]:
            self._cut(one, Reason.CROWD)

    # ------------------------------------------------------------ sessions

    def _look_at_sessions(self, now_ns: int, drained_ns: int) -> None:
        """Cut sessions that send, and of which no message comes whole, while the process grows."""
        memory, most = self._memory_bytes, self._limits.session_bytes
        for one, heard_ns in self._count_received():
            if heard_ns is None:
                self._lose(one, now_ns)
            elif heard_ns != one.heard_ns:
                one.rebase(heard_ns, memory, self._received)
            else:
                unheard = one.bytes - one.base
                sends = unheard >= UNHEARD_BYTES_MIN
                self._has_suspects |= sends
                # honest messages on their way, of all together, are no one's fault
                expected = min(COPIES * (self._received - one.received), COPIES_BYTES_MAX)
                grew = memory - one.memory > self._growth_max + expected
                is_suspect = unheard > most or (sends and grew)
                is_guilty = unheard > self._backlog_max
                self._judge(one, is_suspect, is_guilty, now_ns, drained_ns, Reason.ENDLESS)

    def _count_received(self) -> list[tuple[Connection, int | None]]:
        """Read when each session was heard, how much has come over it, and over all; those whose connection goes on."""
        found, more = [], 0
        for one in in_turns(list(self._connections.values())):
            if one.is_session and not one.is_cut:
                heard_ns, before = self._heard(one.identity), one.bytes  # in this order
                if self._is_first_look:  # how much came before its last message is not known
                    before = one.base if heard_ns == one.heard_ns else -1
                if not one.look():
                    self._forget(one.fd)
                    continue
                more += one.bytes - before if before >= 0 else 0
                found.append((one, heard_ns))
        self._received += more
        self._is_first_look = False
        return found

    def _calm_down(self, now_ns: int) -> None:
        """Take the memory that there is for the ordinary one, if no connection is to blame for a while."""
        if self._has_suspects:
            self._calm_since_ns = now_ns
        elif now_ns - self._calm_since_ns > _CALM_NS:
            self._calm_bytes, self._grows, self._is_flooded = self._memory_bytes, False, False

    def _find_ended(self, now_ns: int) -> None:
        """Find sessions that have ended while their connection goes on."""
        for one in in_turns(list(self._connections.values())):
            if one.is_session and self._heard(one.identity) is None:
                self._lose(one, now_ns)

    def _lose(self, one: Connection, now_ns: int) -> None:
        """Take a connection for a stranger again: its session has ended."""
        one.look()
        one.is_session, one.spoke, one.since_ns = False, True, now_ns
        one.rebase(-1, self._memory_bytes, self._received)
        self._strangers[one.fd] = one

    # ------------------------------------------------------------ cuts

    def _end_connections(self) -> None:
        """Cut connections that are to end."""
        ending: dict[bytes, bool] = {}
        while self._ending:
            identity, if_untaken = self._ending.popitem()
            ending[identity] = if_untaken
        for one in list(self._connections.values()):
            identity = one.identity or self._senders.get(one.fd, b"")
            if identity not in ending or one.is_cut:
                continue
            has_ended = not ending[identity] and self._heard(identity) is None
            if has_ended or untaken_bytes(one.fd) > 0:
                self._cut(one, Reason.RIGHTS)

    def _cut(self, one: Connection, reason: Reason) -> None:
        one.is_cut = True
        one.host = one.host or host_of(one.fd)
        if cut(one.fd, one.cookie):
            self.cuts[reason] += 1
            self._last_host = one.host

    def _tell(self, now_ns: int) -> None:
        """Log what was cut since the last time."""
        for reason, count in (self.cuts - self._told).items():
            _log.warning(
                "%d connections were closed which %s; the last one came from %s",
                count, reason, self._last_host,
            )  # fmt: skip
        self._told, self._logged_ns = self.cuts.copy(), now_ns
