"""A simulated host, and its processes: an epoch, a mailbox, and turns that come when something would wake it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from danube_fast.clock import MICROSECOND_NS, Clock
from danube_fast.config import Settings
from danube_fast.metadata.memory import MemoryStore
from danube_fast.metadata.store import MetadataStore
from danube_fast.roles import Processes
from danube_fast.testing.disk import SimulatedDisk
from danube_fast.testing.loopback import LoopbackBell, LoopbackRing, LoopbackServer, Tap
from danube_fast.testing.virtual_clock import Schedule, Trace
from danube_fast.workers.process.environment import Environment
from danube_fast.workers.process.log_marks import LogMark
from danube_fast.workers.process.mailbox import Link, Mailbox

__all__ = ["Machine", "Process", "SimulatedEnvironment"]


class Machine:
    """The common ground of the processes of one simulated host: clock, disk, rings, metadata."""

    def __init__(
        self,
        directory: Path,
        settings: Settings,
        schedule: Schedule,
        draw: random.Random,
        trace: Trace,
    ) -> None:
        self.directory = directory
        self.settings = settings
        self.schedule = schedule
        self.clock = schedule.clock
        self.draw = draw
        self.trace = trace
        self.disk = SimulatedDisk(directory, schedule, draw, trace)
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.store = MemoryStore(self.clock)
        self.log_marks: dict[int, LogMark] = {}
        self.log_count = 1
        self.boot_number = 1
        self.processes: list[Process] = []
        """All of them, by index."""
        self.has_uploader = False
        """The last of them is an uploader."""
        self._rings: dict[tuple[int, int], LoopbackRing] = {}
        self.on_moved: Callable[[int], None] = lambda partition_id: None
        """Called when a partition has moved."""

    @property
    def roles(self) -> Processes:
        """The role of each process."""
        count = len(self.processes) - 1 - self.has_uploader
        return Processes.with_workers(count, uploader=self.has_uploader)

    def ring(self, source: int, target: int) -> LoopbackRing:
        """The ring from one process to another."""
        return self._rings.setdefault((source, target), LoopbackRing())

    def epoch(self, process: int) -> int:
        """Epoch of a process."""
        return self.processes[process].epoch

    def is_down(self, process: int) -> bool:
        """Whether a process is gone."""
        return not self.processes[process].is_up


class SimulatedEnvironment(Environment):
    """Socket, threads, metadata and chance of one life of a process."""

    def __init__(self, process: Process, tap: Tap) -> None:
        self.background = process.host.disk
        self._process = process
        self._tap = tap

    def boot_id(self) -> str:
        """Another one after each power cut."""
        return f"boot-{self._process.host.boot_number}"

    def new_token(self) -> bytes:
        """A token that the seed draws."""
        return self._process.host.draw.randbytes(16)

    def make_server(self, context: Any, settings: Settings, secured: Any = None) -> Any:
        """Make a server on the loopback network."""
        return LoopbackServer(self._tap, self._process.wake, self._process.host.event_fd)

    def make_store(
        self, data_dir: Path, clock: Clock, *, accept_rollback: bool = False
    ) -> MetadataStore:
        """Metadata, which outlives everything: what was committed is durable."""
        return self._process.host.store

    def sealed_revision(self, data_dir: Path) -> int | None:
        """As the metadata is."""
        return self._process.host.store.revision

    def read_marks(self, data_dir: Path) -> dict[int, LogMark]:
        """Read the marks of the logs."""
        return dict(self._process.host.log_marks)

    def write_marks(self, data_dir: Path, marks: Mapping[int, LogMark]) -> bool:
        """Note it."""
        self._process.host.log_marks = dict(marks)
        return True

    def finish_marks(self) -> None:
        """Wait for nothing: marks are durable at once."""


class Process:
    """A process as its peers see it: an epoch, a mailbox, turns."""

    def __init__(self, host: Machine, index: int) -> None:
        self.host = host
        self.index = index
        self.epoch = 0
        self.mailbox: Any = None
        self.is_up = False
        self._turn_ns = -1
        """When the next turn is due; -1: no turn is."""

    def make_mailbox(self) -> Mailbox:
        """A new life's mailbox over the rings that are there."""
        host = self.host
        links = [
            Link(
                peer.index,
                host.ring(self.index, peer.index),
                host.ring(peer.index, self.index),
                LoopbackBell(peer.wake, host.event_fd),
            )
            for peer in host.processes
            if peer is not self
        ]
        bell = LoopbackBell(self.wake, host.event_fd)
        return Mailbox(self.index, self.epoch, links, bell, host, host.clock)

    def wake(self) -> None:
        """Something happened: a turn comes soon."""
        self.turn_in(self.host.draw.randrange(5 * MICROSECOND_NS, 60 * MICROSECOND_NS))

    def turn_in(self, delay_ns: int) -> None:
        """A turn comes so much later, unless one comes before."""
        due_ns = self.host.clock.now_ns + delay_ns
        if not self.is_up or 0 <= self._turn_ns <= due_ns:
            return
        self._turn_ns = due_ns
        epoch = self.epoch

        def turn() -> None:
            if self.is_up and epoch == self.epoch and self._turn_ns == due_ns:
                self._turn_ns = -1
                self.turn()

        self.host.schedule.call(delay_ns, turn)

    def start(self) -> None:
        """A new life."""

    def turn(self) -> None:
        """One turn."""
