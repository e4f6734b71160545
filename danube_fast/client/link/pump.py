"""The pump: how calling threads share the sockets of one client without a thread between.

A call that must wait becomes the *leader*: it sleeps on the sockets itself, takes the lock, reads
everything there is and resolves the waits. Other threads that must wait are *followers* and
sleep on a condition; when the leader leaves, one of them takes over.

      caller A (leader)      caller B (follower)     timer thread
           |  sleeps in a kernel      | condition.wait       | sleeps until the next deadline
           v  (`lookout.py`)          v                      v
      +-------------------------- one lock ---------------------------+
      | drain(): every connection -> acks, replies, deliveries, events |
      +----------------------------------------------------------------+

ZeroMQ's file descriptor is edge-triggered by commands: any send or receive may swallow the edge.
So no thread sleeps on it before a look, under the lock, at every socket that was used since it was read,
and a thread that sends while a leader sleeps wakes it if something has come in (`after_send`). Rings the kernel
looks at by itself: it hands acks over to the threads that wait for them (`answers.py`), and wakes for all else.

Operations that wait are written once, as `Steps` (`steps.py`). `run` drives them for threads; `aio.py` drives the
same generators for an event loop.
"""

from __future__ import annotations

import collections
import itertools
import logging
import os
import select
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from danube_fast.client.link.answers import Answers, Ticket, is_answered
from danube_fast.client.link.buffers import Sender
from danube_fast.client.link.deadlines import Deadlines, nothing
from danube_fast.client.link.lookout import Lookout
from danube_fast.client.link.parts import Socket
from danube_fast.client.link.steps import Finished, Steps
from danube_fast.client.values.limits import FOREVER_NS, SLICE_NS
from danube_fast.clock import Clock
from danube_fast.errors import DanubeError, FailedPrecondition

__all__ = ["Pump"]

T = TypeVar("T")
_log = logging.getLogger(__name__)


_INTERRUPTING = (
    "a signal handler or a finalizer calls this client in the middle of another call of the same thread, and would "
    "wait for what only that can bring; raise an exception there, hand it to another thread, or use send(), which "
    "is queued"
)


class Pump(Deadlines):
    """Lock, sockets, deadlines and waiters of one client. All state is guarded by `lock`."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.lock = threading.RLock()
        self.acquire, self.release = self.lock.acquire, self.lock.release
        """The same two objects for all: a `with` looks them up each time."""
        self.is_inside: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]
        """Whether the calling thread holds the lock. At the start of a call of the application that tells: a signal
        handler, or a finalizer, has interrupted another one."""
        self.calls_later = 0
        """Calls that wait for the end of the one that they have interrupted."""
        self.callbacks: collections.deque[tuple[Callable[..., Any], tuple[Any, ...]]] = (
            collections.deque()
        )
        self._link_numbers = itertools.count(1)
        self.unacked_bytes = 0
        """Of all producers."""
        self.on_progress: Callable[[], None] | None = None
        """An event loop that shares this pump hears here that states changed."""
        self.push_later: Callable[[Sender], None] | None = None
        """An event loop sends batches that calls wait for at the end of its iteration, many in one frame."""
        self.answers = Answers()
        self._condition = threading.Condition(self.lock)
        self._sockets: list[Socket] = []
        self._by_fd: dict[int, Socket] = {}
        self._unread: dict[Socket, None] = {}
        """Sockets that were used since they were read, or that woke the leader."""
        self._lookout: Lookout | None = None
        """Made anew when a connection has come, gone, or got its rings."""
        self._disposals: list[Callable[[], None]] = []
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self.leader = 0
        """Thread that reads the sockets, or sleeps on them; 0: none does."""
        self._asleep = False
        self._caller = 0
        """Thread that calls the application back just now."""
        self._followers = 0
        self.closed = False
        self.refusal: DanubeError | None = None
        """Why the client cannot be used any more: closed, or forked."""
        self.spin_ns = 0
        """How long a waiting thread looks on before it sleeps."""

    # ------------------------------------------------------------ sockets

    def fileno(self) -> int:
        """Return one descriptor that is readable when any socket may be (for event loops)."""
        return self._epoll.fileno()

    def add(self, connection: Socket) -> None:
        """Watch a connection's descriptor. Under the lock."""
        self._lookout = None
        self._sockets.append(connection)
        self._by_fd[connection.fileno()] = connection
        self._epoll.register(connection.fileno(), select.EPOLLIN)

    def remove(self, connection: Socket) -> None:
        """Forget a connection, before its socket is closed. Under the lock."""
        self._unread.pop(connection, None)
        self._lookout = None
        if connection in self._sockets:
            self._sockets.remove(connection)
            self._by_fd.pop(connection.fileno(), None)
            try:
                self._epoll.unregister(connection.fileno())
            except (OSError, ValueError):
                pass  # the epoll itself is closed already

    def drain(self) -> int:
        """Read every socket. Under the lock. How many messages were read."""
        return self._drain(tuple(self._sockets))

    def next_link_number(self) -> int:
        """Return a number that no connection of this client has had."""
        return next(self._link_numbers)

    def dispose(self, close: Callable[[], None]) -> None:
        """Under the lock: close a descriptor, or memory, when no leader looks at it any more."""
        if not self._asleep:
            close()
            return
        self._disposals.append(close)
        self._wake_leader()

    def _drain(self, connections: Iterable[Socket], lazily: bool = False) -> int:
        self._unread = {}
        count = 0
        connection: Socket | None = None
        try:
            for connection in connections:
                if connection in self._sockets:  # reading another may have closed it
                    count += connection.drain(lazily)
        except BaseException:  # an interrupt: it is unknown what was read
            if connection is not None:
                connection.reset()
            self._unread = dict.fromkeys(self._sockets)
            raise
        if count and (self._followers or self._asleep or self.on_progress is not None):
            self.notify()
        return count

    def after_send(self, connection: Socket) -> None:
        """Under the lock, behind a send: wake a leader whose edge the send may have swallowed.

        The leader is woken instead of reading here, so that no handler runs inside another. Rings
        lose no edge: a reader that has come to their end is signalled.
        """
        if connection.has_rings:
            return
        self._unread[connection] = None
        if (self._asleep or self.on_progress is not None) and connection.readable():
            self._wake_leader()

    # ------------------------------------------------------------ waiting

    def notify(self) -> None:
        """Under the lock: let every waiting thread look, as states changed."""
        if self._followers:
            self._condition.notify_all()
        if self._asleep:
            self._wake_leader()
        if self.on_progress is not None:
            self.on_progress()

    def _wake_leader(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    @property
    def leads(self) -> bool:
        """Whether the calling thread reads the sockets, in a call that this one has interrupted."""
        return self.leader == threading.get_ident()

    def run(self, steps: Steps[T]) -> T:
        """Drive an operation to its end in the calling thread. Raises what makes the client unusable, and
        FailedPrecondition in the middle of another call of this thread."""
        if self.is_inside() or (self.leader and self.leads):
            steps.close()
            raise FailedPrecondition(_INTERRUPTING)
        if self.refusal is not None:
            steps.close()
            raise self.refusal
        try:
            wait = next(steps)
            while True:
                with self.lock:
                    ready = self.wait_inside(wait.ready, wait.deadline_ns, wait.look_ns)
                wait = steps.send(ready)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        finally:
            steps.close()

    def call_later(self, function: Callable[..., object], *arguments: Any) -> None:
        """Do what a call asks for that has interrupted another one, when that is over."""
        self.calls_later += 1
        self.callbacks.append((self._call_now, (function, arguments)))
        self._wake_timers()

    def _call_now(self, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        try:
            function(*arguments)
        finally:
            self.calls_later -= 1

    def end(self, steps: Steps[None]) -> None:
        """Drive a close; a client that cannot be used any more has closed everything."""
        if self.refusal is None:
            self.run(steps)
        steps.close()

    def perform(self, steps: Steps[T]) -> Awaitable[T]:
        """Drive an operation to its end now; its outcome, to be awaited or not."""
        return Finished(self.run(steps))

    def wait(self, ready: Callable[[], bool], deadline_ns: int = FOREVER_NS) -> bool:
        """Block until `ready()`, reading the sockets meanwhile. False when the time is up."""
        with self.lock:
            return self.wait_inside(ready, deadline_ns)

    def wait_inside(
        self, ready: Callable[[], bool], deadline_ns: int, look_ns: int = SLICE_NS
    ) -> bool:
        """Do the same for a caller that holds the lock, once. `look_ns`: how often to ask without being woken."""
        while not ready():
            if self.leader:
                now = self.clock.monotonic_ns()
                if now >= deadline_ns:
                    return False
                self._follow(min(deadline_ns - now, SLICE_NS))
            elif (is_ready := self._lead(ready, deadline_ns, 0, look_ns)) is not None:
                if is_ready:
                    break
                return ready()
        if self.answers.sleeping:
            self._pass_on()
        return True

    def await_answer(self, ticket: Ticket) -> None:
        """Block until the ticket, which has a row, is answered or the client is closed. The caller holds the lock,
        once."""
        row = ticket.row
        while True:
            if self.leader:
                self._follow_row(ticket)
            elif self._lead(nothing, FOREVER_NS, row, SLICE_NS):
                break
            if is_answered(row) or self.closed:
                break
        if self.answers.sleeping:
            self._pass_on()

    def _pass_on(self) -> None:
        """Leave the lead to a thread that sleeps on its row: this one was perhaps told to lead, and is ready."""
        if not self.leader:
            self.answers.hand_over()

    def _lead(
        self, ready: Callable[[], object], deadline_ns: int, row: int, look_ns: int
    ) -> bool | None:
        """Be the leader until `ready()`, or that row (0: none) is answered: True; callbacks were called: None; or the
        time is up: False."""
        self.leader = threading.get_ident()
        try:
            while True:
                # of all others the descriptor would tell: only use of a socket swallows its edge
                if self._unread:
                    self._drain(self._unread, lazily=True)
                is_ready = None
                if self.callbacks and self._may_call_back:
                    break
                if is_answered(row) if row else ready():
                    is_ready = True
                    break
                if self._unread:
                    continue
                limit_ns = look_ns
                if deadline_ns != FOREVER_NS:
                    limit_ns = min(look_ns, deadline_ns - self.clock.monotonic_ns())
                if limit_ns <= 0 or self.closed:
                    is_ready = False
                    break
                self._sleep(row, limit_ns)
        finally:
            self.leader = 0
            if self._followers:
                self._condition.notify()
            elif self.answers.sleeping:
                self.answers.hand_over()
        if self.callbacks and self._may_call_back:
            self.run_callbacks()
            return None
        return is_ready

    @property
    def _may_call_back(self) -> bool:
        """Whether no event loop and no other thread is to call the callbacks that wait."""
        return not self._caller and self.on_progress is None

    def _follow(self, limit_ns: int) -> None:
        self._followers += 1
        try:
            self._condition.wait(limit_ns / 1e9)
        finally:
            self._followers -= 1

    def _follow_row(self, ticket: Ticket) -> None:
        """Sleep on the ticket's row, without the lock."""
        answers = self.answers
        answers.sleeping[ticket] = None
        try:
            self.lock.release()
            answers.sleep(ticket, SLICE_NS)
        finally:
            try:
                self._own_again()
            finally:
                self._own_again()  # an interrupt may strike as the first call begins
                del answers.sleeping[ticket]

    def free_rows(self) -> None:
        """Under the lock: let rows that were given up be used again, if no leader may answer them yet."""
        if not self._asleep:
            self.answers.no_leader_looks()

    def _look_out(self) -> Lookout:
        links = [link for each in self._sockets if (link := each.link) is not None]
        self._lookout = Lookout(self._epoll.fileno(), self.answers.address, self.spin_ns, links)
        return self._lookout

    def _sleep(self, row: int, limit_ns: int) -> None:
        """Sleep until that row is answered or there is something to read, without the lock. The caller has just found
        nothing."""
        lookout = self._lookout or self._look_out()
        if self.answers.given_up:
            self.answers.no_leader_looks()
        found = 0
        self._asleep = True
        try:
            self.release()
            if limit_ns <= SLICE_NS:
                found = lookout.sleep(row, limit_ns)
            else:
                found = lookout.wait(limit_ns, self.clock)
            self.acquire()
        except BaseException:
            try:
                self._own_again()
            finally:
                self._own_again()  # an interrupt may strike as the first call begins
            raise
        finally:
            self._asleep = False
            while self._disposals:
                self._disposals.pop()()
            if self.closed:
                self._close_descriptors()
        for fd in lookout.found(found) if found > 0 else ():
            if fd == self._wake_fd:
                self.clear_wake()
            elif fd in self._by_fd:
                self._unread[self._by_fd[fd]] = None

    def _own_again(self) -> None:
        """Take the lock again, wherever an interrupt struck; it is raised once the lock is taken."""
        interrupt: KeyboardInterrupt | None = None
        while not self.lock._is_owned():  # type: ignore[attr-defined]
            try:
                self.lock.acquire()
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def clear_wake(self) -> None:
        """Take back a wake-up that was signalled."""
        try:
            os.eventfd_read(self._wake_fd)
        except OSError:
            pass  # no signal was given, or the pump was closed

    def try_drain(self) -> None:
        """Under the lock: read the sockets unless a leader does so anyway."""
        if not self.leader:
            self.drain()

    def run_callbacks(self) -> None:
        """Call the application back without the lock. The caller holds it exactly once.

        One thread at a time does, so that calls keep their order and never run side by side.
        """
        if self.on_progress is not None:
            self.on_progress()  # the event loop calls back
            return
        if self._caller:
            return  # so does the thread that is at it
        self._caller = threading.get_ident()
        try:
            while self.callbacks:
                function, arguments = self.callbacks.popleft()
                try:
                    self.lock.release()
                    function(*arguments)
                except Exception:
                    # the application's own fault must not stop the pump
                    _log.exception("a callback of the application failed")
                finally:
                    try:
                        self._own_again()
                    finally:
                        self._own_again()  # an interrupt may strike as the first call begins
        finally:
            self._caller = 0
            self.notify()

    def is_called_back(self) -> bool:
        """Under the lock: whether no callback is left, or the calling thread is inside one."""
        if self.on_progress is not None or self._caller == threading.get_ident():
            return True
        return not self.callbacks and not self._caller

    # ------------------------------------------------------------ the end

    def after_fork(self, refusal: DanubeError) -> None:
        """Refuse everything in a forked child: no other thread exists that could hold the lock or be woken."""
        self.refusal = refusal
        self.lock._at_fork_reinit()  # type: ignore[attr-defined]
        self.closed = True
        self.armed.clear()
        self._wake_timers = nothing
        self._followers = 0
        self._asleep = False
        self.leader = 0

    def close(self) -> None:
        """Under the lock: end every wait. The sockets were removed before."""
        if self.closed:
            return
        self.closed = True
        self.notify()
        self.answers.wake_all()
        if not self._asleep:
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        self._epoll.close()
        os.close(self._wake_fd)
