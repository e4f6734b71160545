"""How a child of the supervisor starts: its configuration, its shared memory, its heartbeat.

    supervisor                                   child: main() of its module, in a fork of the fork server
    memfd with BootConfig as JSON     --argv-->  --boot-fd N; read once, closed
    control, counters, mailbox rings  --fds--->  mapped; descriptors closed
    eventfd per process               --fds--->  doorbells, kept
    pipe, write end kept open         --fd---->  read end: EOF means that the supervisor is gone

The child dies with the supervisor by two independent ways: PR_SET_PDEATHSIG, and a thread that
sleeps in a read of that pipe. Signal handlers only record: SIGTERM sets `stop_requested` and rings
the own doorbell, so that a sleeping loop looks; SIGINT is ignored, since a terminal sends it to the
whole group and the supervisor orders the stop.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from danube_fast.clock import SystemClock
from danube_fast.config import Settings
from danube_fast.descriptors import keep_reserve
from danube_fast.errors import DanubeError, Internal
from danube_fast.ring.control import ControlBlock, ProcessState
from danube_fast.ring.counters import CounterBlock
from danube_fast.ring.memory import map_fd, signal_eventfd
from danube_fast.roles import Owner, Processes, Role
from danube_fast.workers.process import logs

if TYPE_CHECKING:
    from danube_fast.workers.process.mailbox import Mailbox

__all__ = ["Boot", "BootConfig", "boot", "die_with_parent"]

_log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
PIPE_READ_BYTES = 64
GC_THRESHOLD = 50_000
"""New containers between two collections."""


class BootConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a child. JSON in the descriptor named by `--boot-fd`."""

    processes: Processes
    process_index: int
    epoch: int
    """1 at the first start of this index, one more with each restart."""
    supervisor_pid: int
    settings: Settings
    data_dir: str
    host_id: str
    """The same for all processes of one boot of one host: clients on it may use ipc."""
    control_fd: int
    counter_fd: int
    bucket_fd: int
    mailbox_fds: list[tuple[int, int, int]]
    """(peer, outbound ring, inbound ring), made by `format_ring`"""
    doorbell_fds: list[int]
    """eventfd by process index"""
    liveness_fd: int
    tcp_host: str
    tcp_port: int
    """0 = let the system choose and report it with `set_state`."""
    admin_fd: int = -1
    """Listening socket of the admin port (coordinator only)."""
    sign_on_fd: int = -1
    """Listening socket of sign-on (its process only)."""
    sign_on_address: str = ""
    """HOST:PORT of it; empty: there is none."""
    advertise: str
    """Host name for clients."""
    ipc_endpoints: list[str]
    """By process index."""
    logs: list[tuple[int, str]]
    """(log id, directory) of this process's logs."""
    accept_rollback: bool = False
    """Go on although logs or metadata are older than the other of the two."""
    owners: list[Owner]
    """Owner of log i, for every log."""

    @property
    def ipc_endpoint(self) -> str:
        """The ipc endpoint that this process binds."""
        return self.ipc_endpoints[self.process_index]

    @property
    def role(self) -> Role:
        """The role of this process."""
        return self.processes.roles[self.process_index]

    @property
    def number(self) -> int:
        """The number of this process among those of its role."""
        return self.processes.number(self.process_index)

    @property
    def worker_count(self) -> int:
        """How many workers there are."""
        return len(self.processes.workers)

    def process_of_log(self, log_id: int) -> int:
        """Process index of the worker that owns a log."""
        return self.processes.workers[self.owners[log_id].worker]


class Boot:
    """Map the memory and the descriptors that a child shares with the others."""

    def __init__(self, config: BootConfig) -> None:
        from danube_fast.ring.buckets import BucketTable
        from danube_fast.ring.doorbell import Doorbell
        from danube_fast.ring.spsc import SpscRing
        from danube_fast.workers.process.mailbox import Link, Mailbox

        self.config = config
        self.settings: Settings = config.settings
        self.process_index = config.process_index
        self.clock = SystemClock()
        self.stop_requested = False
        """True once the supervisor asked for a stop."""
        self.control: ControlBlock = ControlBlock.attach(config.control_fd)
        self.control.announce(config.process_index, ProcessState.STARTING, epoch=config.epoch)
        self.counters: CounterBlock = CounterBlock.attach(config.counter_fd, config.process_index)
        self.counters.clear()
        self.buckets = BucketTable(config.bucket_fd)
        bells = [
            Doorbell(fd, self.control.doorbell_address(process))
            for process, fd in enumerate(config.doorbell_fds)
        ]
        self.doorbell = bells[config.process_index]
        self._other_bells = [bell for bell in bells if bell is not self.doorbell]
        links = []
        for peer, outbound_fd, inbound_fd in config.mailbox_fds:
            outbound = SpscRing.attach(map_fd(outbound_fd))
            inbound = SpscRing.attach(map_fd(inbound_fd))
            links.append(Link(peer, outbound, inbound, bells[peer]))
            os.close(outbound_fd)
            os.close(inbound_fd)
        self.mailbox: Mailbox = Mailbox(
            config.process_index, config.epoch, links, self.doorbell, _ControlPeers(self.control),
            self.clock,
        )  # fmt: skip

    def exit_code_of(self, run: Callable[[], None]) -> int:
        """Run the process to its end; its exit code, 1 behind an error that says what to do: one sentence is enough."""
        try:
            run()
        except DanubeError as error:
            _log.error("%s", error)
            self.set_state(ProcessState.FAILED)
            return 1
        return 0

    def freeze_heap(self) -> None:
        """Keep the garbage collector from all that exists now, and let it run less often. Call once the
        long-lived objects are there. Messages make no cycles, only connections do."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)

    def pin(self) -> None:
        """Bind this process to one core: worker i to core i, modulo the number of cores."""
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[self.config.number % len(cores)]})

    def heartbeat(self) -> None:
        """Show life; call once a turn and at least once a second, also during long work."""
        self.control.beat(self.process_index, self.clock.monotonic_ns())

    def set_state(self, state: ProcessState, port: int = 0) -> None:
        """Publish this process's state (and its tcp port), and wake the others to see it."""
        if port:
            self.control.announce(self.process_index, state, epoch=self.config.epoch, port=port)
        else:
            self.control.set_state(self.process_index, state)
        for bell in self._other_bells:
            bell.ring()

    def request_stop(self) -> None:
        """Record a request to stop, and wake the loop. SIGTERM does so."""
        self.stop_requested = True
        signal_eventfd(self.doorbell.fileno())


class _ControlPeers:
    """The control block as the `Peers` of a mailbox."""

    _GONE = (ProcessState.STOPPED, ProcessState.FAILED)

    def __init__(self, control: ControlBlock) -> None:
        self._control = control

    def epoch(self, process: int) -> int:
        return self._control.epoch(process)

    def is_down(self, process: int) -> bool:
        return self._control.state(process) in self._GONE


def read_config(boot_fd: int) -> BootConfig:
    """Read and close the boot descriptor."""
    with os.fdopen(boot_fd, "rb") as file:
        file.seek(0)
        return msgspec.json.decode(file.read(), type=BootConfig)


def boot(arguments: list[str] | None = None) -> Boot:
    """Set this process up as a child of the supervisor. Call first thing, in the main thread."""
    parser = argparse.ArgumentParser(description="internal: started by danube-fast serve")
    parser.add_argument("--boot-fd", type=int, required=True)
    config = read_config(parser.parse_args(arguments).boot_fd)
    name = config.processes.name(config.process_index).replace("-", " ")
    logs.configure(name, config.settings.log_format)
    keep_reserve()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # a client may close its end of a pipe at any time
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    die_with_parent(config.supervisor_pid)
    _watch_liveness(config.liveness_fd)
    booted = Boot(config)

    def on_terminate(signum: int, frame: FrameType | None) -> None:
        booted.request_stop()

    signal.signal(signal.SIGTERM, on_terminate)
    return booted


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the parent ends; end at once if it has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise Internal(f"prctl failed: {os.strerror(ctypes.get_errno())}; is this Linux?")
    if os.getppid() != parent_pid:
        os._exit(1)  # it died before the request was in force


def _watch_liveness(liveness_fd: int) -> None:
    def wait_for_the_end() -> None:
        # os.read retries after signals by itself; b"" is the end: the supervisor holds the only
        # write end and never writes.
        while os.read(liveness_fd, PIPE_READ_BYTES):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_for_the_end, name="liveness", daemon=True).start()
