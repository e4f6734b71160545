"""The supervisor: starts the processes of a broker, watches them, restarts the dead, stops all.

      serve()
        lock the data directory, check its format, find its logs
        compile kernels in a short-lived child (skipped when the cache is warm)
        fork coordinator and workers --> all READY --> the ready line, once
        loop:  pidfds      a child ended: mark it FAILED, wake the others, restart it later
               heartbeats  one that does not advance: SIGKILL, then as above
               signals     SIGTERM, SIGINT: workers first, then the coordinator, then SIGKILL

It imports no numba and touches no message. If it dies, by kill -9 too, all children die with it
(see `boot.py`); nothing of it has a name in a file system but the lock, which the kernel gives back.
"""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import TextIO

import msgspec

from danube_fast.children import forbid_core_dumps
from danube_fast.clock import MILLISECOND_NS, Clock, SystemClock
from danube_fast.config import Settings
from danube_fast.descriptors import (
    DESCRIPTORS_NEEDED,
    DESCRIPTORS_PER_RINGS,
    DESCRIPTORS_WANTED,
    IPC_DESCRIPTORS_MIN,
    clients_allowed,
    raise_descriptor_limit,
)
from danube_fast.errors import DanubeError, FailedPrecondition, Internal, Unavailable
from danube_fast.history.stores.opening import check_broker_store
from danube_fast.ring.control import ProcessState
from danube_fast.ring.memory import signal_eventfd
from danube_fast.roles import COORDINATOR
from danube_fast.security.authenticators import check_authenticator
from danube_fast.security.authorizers import check_authorizer
from danube_fast.workers.supervisor.datadir import DataDirectory
from danube_fast.workers.supervisor.exposure import check_exposure
from danube_fast.workers.supervisor.forks import Adoption, Child, ForkServer, Starting
from danube_fast.workers.supervisor.output import Output
from danube_fast.workers.supervisor.precompile import precompile
from danube_fast.workers.supervisor.spawn import Shared, processes_of

__all__ = ["Supervisor", "serve"]

STARTING_LOOK_MS = 10
"""How often the control block is read while a child starts."""
WATCH_LOOK_MS = 500
"""How often heartbeats are read; a child that ends wakes the loop at once."""
QUICK_DEATH_NS = 10_000_000_000
"""A child that dies sooner than this after its start waits for the next one, and longer each time."""
BACKOFF_DOUBLINGS_MAX = 6
ORDERS_MAX = 4
"""Processes that are ordered at a time."""
FIRST_STARTS_MAX = 3
"""A process that cannot be started so often ends a broker that is not ready yet."""
STOP_SHARE_OF_WORKERS = 0.7
"""Part of the stop time that workers get before SIGKILL; the coordinator has the rest."""


class _Child:
    """State of one process index."""

    def __init__(self, process: int, name: str) -> None:
        self.process = process
        self.name = name.replace("-", " ")
        self.starting: Starting | None = None
        """The process while it was ordered and is not there yet."""
        self.running: Child | None = None
        self.epoch = self.started_ns = self.beat_count = self.beat_ns = self.quick_deaths = 0
        self.restart_ns = self.failed_starts = 0

    @property
    def is_alive(self) -> bool:
        return self.running is not None

    @property
    def is_down(self) -> bool:
        """Whether it is neither there nor ordered."""
        return self.running is None and self.starting is None

    @property
    def fileno(self) -> int:
        """A descriptor that is readable once there is news of it, or -1."""
        if self.running is not None:
            return self.running.pidfd
        return -1 if self.starting is None else self.starting.fileno()

    def close(self) -> None:
        if self.starting is not None:
            self.starting.close()
            self.starting = None
        if self.running is not None:
            self.running.close()
            self.running = None


class _Signals:
    """Record SIGTERM and SIGINT; a socket pair wakes the loop."""

    def __init__(self) -> None:
        self.count = 0
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        numbers = signal.SIGTERM, signal.SIGINT
        self._old = {number: signal.signal(number, self._record) for number in numbers}

    def _record(self, signum: int, frame: FrameType | None) -> None:
        self.count += 1

    def fileno(self) -> int:
        return self._read.fileno()

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._read.recv(4096)

    def close(self) -> None:
        signal.set_wakeup_fd(self._old_fd)
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._read.close()
        self._write.close()


class Supervisor:
    """Run the processes of one broker, from the first start to the last stop."""

    def __init__(
        self, settings: Settings, shared: Shared, forks: ForkServer, signals: _Signals, clock: Clock,
        output: Output,
    ) -> None:  # fmt: skip
        self._settings, self._shared, self._signals, self._clock = settings, shared, signals, clock
        self._forks, self._output = forks, output
        self._adoption = Adoption()
        names = map(shared.processes.name, range(shared.process_count))
        self._children = [_Child(process, name) for process, name in enumerate(names)]
        self._was_ready = False

    def run(self) -> None:
        """Start all processes and watch them until a signal asks for the stop.

        Raises Unavailable or Internal if the broker does not come up.
        """
        try:
            while not self._signals.count:
                now_ns = self._clock.monotonic_ns()
                for child in self._children:
                    self._look_after(child, now_ns)
                self._adoption.set(is_on=any(child.starting for child in self._children))
                if (code := self._forks.death()) is not None:
                    text = f"the fork server {_how_ended(code)}; another one starts with the next process"
                    self._output.note(text)
                if not self._was_ready and self._all_ready():
                    self._was_ready = True
                    self._announce_ready()
                self._wait(self._wait_ms(now_ns), self._children)
        finally:
            self._stop()
            self._adoption.set(is_on=False)

    # ---------------------------------------------------------------- one child

    @property
    def _has_room(self) -> bool:
        """Whether one more process may be ordered: the kernel keeps few orders, and few descriptors that are on their way."""
        return sum(child.starting is not None for child in self._children) < ORDERS_MAX

    def _start(self, child: _Child) -> None:
        """Order the process of an index. Raises OSError if that cannot be done."""
        is_first = not child.epoch
        child.epoch += 1
        child.started_ns = self._clock.monotonic_ns()
        if not is_first:
            self._repair_rings(child)
        self._shared.control.set_restarts(child.process, child.epoch - 1)
        self._adoption.set(is_on=True)
        child.starting = self._shared.spawn(self._forks, child.process, child.epoch)

    def _take(self, child: _Child, starting: Starting, now_ns: int) -> None:
        """Let a process begin that was ordered, if it is there."""
        try:
            child.running = starting.take()
        except OSError as error:
            self._fail_start(child, str(error), now_ns)
            return
        if child.running is not None:
            starting.close()
            child.starting = None
            child.failed_starts = 0
            child.beat_ns = now_ns
            child.beat_count = self._shared.control.heartbeat_count(child.process)
            return
        settings = self._settings
        is_prompt = self._was_ready and self._forks.is_ready
        limit_ms = settings.heartbeat_timeout_ms if is_prompt else settings.worker_start_timeout_ms
        if now_ns - child.started_ns > limit_ms * MILLISECOND_NS:
            self._forks.kill()  # it hangs
            self._fail_start(child, f"it was not there within {limit_ms} ms", now_ns)

    def _fail_start(self, child: _Child, why: str, now_ns: int) -> None:
        """Give up a process that cannot be started; the next try comes later."""
        self._mark_dead(child)
        child.failed_starts += 1
        is_needed = not self._was_ready and child.process in self._shared.processes.starting
        if is_needed and child.failed_starts >= FIRST_STARTS_MAX:
            raise Unavailable(f"{child.name} cannot be started: {why}; its reason may stand above")
        self._plan_restart(child, f"cannot be started ({why})", now_ns, quick=True)

    def _is_alive(self, process: int) -> bool:
        return self._children[process].is_alive

    def _repair_rings(self, child: _Child) -> None:
        """Repair the rings of a dead child. The peer of a damaged ring starts anew, too."""
        stuck = self._shared.repair_rings(child.process, self._is_alive)
        for peer in (self._children[process] for process in stuck):
            self._output.note(
                f"a ring between {child.name} and {peer.name} is damaged; both start anew"
            )
            if peer.running is not None:
                peer.running.send_signal(signal.SIGKILL)
                peer.running.wait()
            self._mark_dead(peer)
        if stuck:
            self._shared.repair_rings(child.process, self._is_alive)

    def _look_after(self, child: _Child, now_ns: int) -> None:
        if child.starting is not None:
            self._take(child, child.starting, now_ns)
        elif child.running is None and now_ns >= child.restart_ns and self._has_room:
            try:
                self._start(child)
            except OSError as error:
                self._fail_start(child, str(error), now_ns)
        if child.running is None:
            return
        code = child.running.poll()
        if code is not None:
            self._mark_dead(child)
            how = _how_ended(code)
            is_needed = child.process in self._shared.processes.starting
            if not self._was_ready and code >= 0 and is_needed:
                raise Unavailable(
                    f"{child.name} {how} before it was ready; its reason stands above"
                )
            quick = now_ns - child.started_ns < QUICK_DEATH_NS
            self._plan_restart(child, how, now_ns, quick=quick)
            return
        status = self._shared.control.status(child.process)
        if status.epoch == child.epoch and status.port:
            self._shared.addresses.ports[child.process] = status.port
        self._watch_heartbeat(child, status.state, now_ns)

    def _watch_heartbeat(self, child: _Child, state: ProcessState, now_ns: int) -> None:
        beat_count = self._shared.control.heartbeat_count(child.process)
        if beat_count != child.beat_count:
            child.beat_count, child.beat_ns = beat_count, now_ns
            return
        settings = self._settings
        ready = state == ProcessState.READY
        limit_ms = settings.heartbeat_timeout_ms if ready else settings.worker_start_timeout_ms
        if now_ns - child.beat_ns > limit_ms * MILLISECOND_NS and child.running is not None:
            self._output.note(
                f"{child.name} (pid {child.running.pid}) has not shown life for {limit_ms} ms; it is "
                "killed and started again"
            )
            child.running.send_signal(signal.SIGKILL)
            child.beat_ns = now_ns

    def _mark_dead(self, child: _Child) -> None:
        """Note that a child was reaped, or never came: from here on the supervisor writes its words in the control block."""
        child.close()
        self._shared.control.set_state(child.process, ProcessState.FAILED)
        for eventfd in self._shared.doorbells:
            signal_eventfd(eventfd)

    def _plan_restart(self, child: _Child, how: str, now_ns: int, *, quick: bool) -> None:
        child.quick_deaths = child.quick_deaths + 1 if quick else 0
        doublings = min(max(child.quick_deaths - 1, 0), BACKOFF_DOUBLINGS_MAX)
        delay_ms = self._settings.restart_delay_ms << doublings if quick else 0
        child.restart_ns = now_ns + delay_ms * MILLISECOND_NS
        when = f" in {delay_ms} ms" if delay_ms else ""
        self._output.note(f"{child.name} {how}; it starts again{when}")

    # ---------------------------------------------------------------- all children

    def _all_ready(self) -> bool:
        control = self._shared.control
        needed = [self._children[process] for process in self._shared.processes.starting]
        statuses = [control.status(child.process) for child in needed]
        return all(
            status.state == ProcessState.READY and status.epoch == child.epoch and child.is_alive
            for status, child in zip(statuses, needed, strict=True)
        )

    def _announce_ready(self) -> None:
        addresses = self._shared.addresses
        for child in self._children:
            addresses.ports[child.process] = self._shared.control.port(child.process)
        self._shared.directory.note_used()
        pids = {
            child.process: child.running.pid
            for child in self._children
            if child.running is not None
        }
        worker_pids = [pids[process] for process in self._shared.processes.workers]
        self._output.ready(self._shared, pids[COORDINATOR], worker_pids)

    def _wait_ms(self, now_ns: int) -> int:
        if not self._was_ready:
            return STARTING_LOOK_MS
        wait_ms = WATCH_LOOK_MS
        for child in self._children:
            if child.is_down and self._has_room:
                wait_ms = min(wait_ms, max((child.restart_ns - now_ns) // MILLISECOND_NS + 1, 0))
        return int(wait_ms)

    def _wait(self, timeout_ms: int, children: Sequence[_Child]) -> None:
        """Sleep until a signal, news of one of some children, or the time."""
        poller = select.poll()
        poller.register(self._signals.fileno(), select.POLLIN)
        for child in children:
            if child.fileno >= 0:
                poller.register(child.fileno, select.POLLIN)
        poller.poll(timeout_ms)
        self._signals.drain()

    # ---------------------------------------------------------------- the stop

    def _stop(self) -> None:
        """Stop workers first, so that the coordinator gets their final reports; then SIGKILL."""
        began_ns = self._clock.monotonic_ns()
        total_ns = self._settings.stop_timeout_ms * MILLISECOND_NS
        workers_ns = int(total_ns * STOP_SHARE_OF_WORKERS)
        for child in self._children:
            if child.starting is not None:  # it has not begun
                child.close()
        others = [child for child in self._children if child.process != COORDINATOR]
        self._stop_some(others, began_ns + workers_ns)
        self._stop_some([self._children[COORDINATOR]], began_ns + total_ns)

    def _stop_some(self, children: list[_Child], deadline_ns: int) -> None:
        signals_before = self._signals.count
        for child in children:
            if child.running is not None:
                child.running.send_signal(signal.SIGTERM)
        while any(child.is_alive for child in children):
            for child in children:
                if child.running is not None and child.running.poll() is not None:
                    self._mark_dead(child)
            left_ns = deadline_ns - self._clock.monotonic_ns()
            if left_ns <= 0 or self._signals.count > signals_before:
                break
            if any(child.is_alive for child in children):
                self._wait(min(left_ns // MILLISECOND_NS + 1, WATCH_LOOK_MS), children)
        for child in children:
            if child.running is not None:
                pid = child.running.pid
                self._output.note(f"{child.name} (pid {pid}) did not stop; killing it")
                child.running.send_signal(signal.SIGKILL)
                child.running.wait()
                child.close()


def _how_ended(code: int) -> str:
    """Say how a process has ended, by its exit code or the negative of a signal."""
    if code >= 0:
        return f"ended with {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # one of those without a name
        return f"was killed by signal {-code}"


def _within_descriptors(settings: Settings, lines: Output) -> Settings:
    """Raise the limit of descriptors, which is often 1024, and keep the settings below it."""
    limit = raise_descriptor_limit()
    allowed = clients_allowed(limit, len(processes_of(settings)))
    if limit < DESCRIPTORS_NEEDED:
        lines.note(
            f"warning: {limit} file descriptors are allowed here, enough for {allowed} clients of "
            f"each process; raise the hard limit of `ulimit -n` to {DESCRIPTORS_WANTED}"
        )
    elif limit < IPC_DESCRIPTORS_MIN:
        lines.note(
            f"note: {limit} file descriptors are allowed here, so clients of this host use tcp, not shared "
            f"memory; raise the hard limit of `ulimit -n` to {DESCRIPTORS_WANTED}"
        )
    return msgspec.structs.replace(
        settings,
        sessions_max=min(settings.sessions_max, allowed),
        shm_clients_max=min(settings.shm_clients_max, allowed // DESCRIPTORS_PER_RINGS),
    )


def serve(
    settings: Settings, *, output: str = "text", stream: TextIO | None = None,
    errors: TextIO | None = None, accept_rollback: bool = False,
) -> int:  # fmt: skip
    """Run a broker until SIGTERM or SIGINT; returns the exit code: 0, or 1 with a sentence on
    `errors` (stderr).

    `output` is the form of the ready line on `stream` (stdout): text or json. `accept_rollback`: go
    on although logs or metadata were put back from an older copy. Call from the main thread.
    """
    lines = Output(output, stream or sys.stdout, errors or sys.stderr)
    try:
        _serve(settings, lines, accept_rollback=accept_rollback)
    except DanubeError as error:
        lines.error(error)
        return 1
    return 0


def _serve(settings: Settings, lines: Output, *, accept_rollback: bool) -> None:
    if threading.current_thread() is not threading.main_thread():
        raise FailedPrecondition("serve() must run in the main thread; start a process for it")
    if settings.workers < 1:
        raise FailedPrecondition("a broker needs at least 1 worker; give --workers 1 or more")
    if settings.store:
        check_broker_store(settings.store)
    if settings.authorizer:
        check_authorizer(settings.authorizer, settings.auth)
    if settings.authenticator:
        check_authenticator(settings.authenticator)
    settings = _within_descriptors(settings, lines)
    clock = SystemClock()
    with contextlib.ExitStack() as cleanup:
        if settings.auth != "none":
            forbid_core_dumps()
        signals = _Signals()
        cleanup.callback(signals.close)
        directory = DataDirectory.open(settings.data_dir)
        cleanup.callback(directory.close)
        check_exposure(settings, directory, lines)
        shared = Shared(settings, directory, accept_rollback=accept_rollback)
        cleanup.callback(shared.close)
        logs = shared.logs
        lines.note(f"{len(logs)} logs in {directory.path} for {settings.workers} workers")
        for warning in shared.addresses.warnings():
            lines.note(warning)
        if not precompile(signals.fileno(), lines.note, clock):
            return
        try:
            forks = shared.start_fork_server()
            cleanup.callback(forks.close)
            Supervisor(settings, shared, forks, signals, clock, lines).run()
        except DanubeError:
            raise  # Unavailable is an OSError too
        except OSError as error:
            raise Internal(f"a process could not be started: {error}") from error
