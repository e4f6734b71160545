"""The shared memory of a broker as values: processes, liveness, counters. Any thread may read it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from danube_fast.admin.faults import taken_text, threads_text
from danube_fast.broker.answers import ProcessStatus
from danube_fast.clock import MILLISECOND_NS, SECOND_NS, Clock
from danube_fast.ring.control import ControlBlock, ProcessState
from danube_fast.ring.counters import Counter, CounterBlock
from danube_fast.roles import COORDINATOR, Processes, Role

__all__ = [
    "BrokerView",
    "Exposure",
    "NamespaceRow",
    "Room",
    "SubscriptionRow",
    "TopicRow",
    "TopicTable",
]

BEAT_AGE_HEALTHY_MS_MAX = 5_000


class TopicRow(enum.IntEnum):
    """Places of the values of a topic; the first `TOTALS` only grow."""

    MESSAGES_IN = 0
    BYTES_IN = 1
    LAG = 2
    """Messages that the subscription furthest behind has to catch up on one partition."""
    VALUES = 3
    TOTALS = LAG


class SubscriptionRow(enum.IntEnum):
    """Places of the values of a subscription; the first `TOTALS` only grow."""

    ACKED = 0
    REDELIVERED = 1
    LOST = 2
    DEAD_LETTERS = 3
    LAG = 4
    UNACKED = 5
    WAITING = 6
    VALUES = 7
    TOTALS = LAG


class TopicTable(NamedTuple):
    """Values of topics and subscriptions; the empty name has the sum of all that have no row."""

    topics: dict[str, list[int]]
    subscriptions: dict[tuple[str, str], list[int]]
    oldest: dict[tuple[str, str], float]
    """When the oldest message that a subscription has not acked came, Unix time in seconds; 0: it has
    acked all."""


class NamespaceRow(NamedTuple):
    """Values of a namespace; its quota by name, as far as there is one."""

    messages_in: int
    bytes_in: int
    topics: int = 0
    storage_bytes: int = 0
    """Counted if its quota bounds them; so are handles."""
    handles: int = 0
    quota: Mapping[str, int] = {}


class Room(NamedTuple):
    """Bytes of the disk that holds the data, and of the quota of all logs."""

    disk: int
    disk_free: int
    quota: int
    quota_left: int


class Exposure(NamedTuple):
    """Whether clients are asked who they are, and the certificate of the HTTPS ports."""

    is_auth_required: bool
    expires_ns: int = 0
    """When the certificate ends, wall clock; 0: there is none."""
    is_stale: bool = False
    """Whether its files have changed and cannot be used."""
    reloads: int = 0
    """How often changed files were taken."""
    crl_expires_ns: int = 0
    """When the first list of revoked client certificates ends, wall clock; 0: never, or there is none."""


class BrokerView:
    """Read-only view of the control and counter blocks, and of what workers reported.

    `topics`, `namespaces` and `room` are called at every scrape, by the thread that answers it; `room` may raise
    OSError.
    """

    def __init__(
        self,
        processes: Processes,
        control: ControlBlock,
        counters: CounterBlock,
        clock: Clock,
        topics: Callable[[], TopicTable] = lambda: TopicTable({}, {}, {}),
        room: Callable[[], Room] | None = None,
        namespaces: Callable[[], Mapping[str, NamespaceRow]] = dict,
        ipc_endpoints: Sequence[str] = (),
    ) -> None:
        """`ipc_endpoints`: of each process, to name those that another process has taken."""
        self.topics = topics
        self.room = room
        self.namespaces = namespaces
        self.exposure: Callable[[], Exposure] | None = None
        """Called at every scrape, too; None: not known here."""
        self.issuers_fault: Callable[[], str] | None = None
        """Says why the newest file of trusted issuers is not in use. Called at every scrape; None: there is no such file."""
        self._processes, self._control, self._endpoints = processes, control, ipc_endpoints
        self.counters = counters
        self._clock = clock

    @property
    def wall_seconds(self) -> float:
        """Unix time."""
        return self._clock.wall_ns() / SECOND_NS

    @property
    def process_count(self) -> int:
        """All processes of the host but the supervisor."""
        return self._control.process_count

    def name(self, process: int) -> str:
        """coordinator, worker-0, worker-1, ..., uploader"""
        return self._processes.name(process)

    @property
    def workers(self) -> list[int]:
        """Process indexes of the workers."""
        return self._processes.workers

    def beat_age_ms(self, process: int) -> int:
        """Milliseconds since the process last showed life."""
        age_ns = self._clock.monotonic_ns() - self._control.heartbeat_time_ns(process)
        return max(age_ns // MILLISECOND_NS, 0)

    def processes(self) -> list[ProcessStatus]:
        """One entry per process, for people and tools."""
        return [self._process(process) for process in range(self.process_count)]

    def _process(self, process: int) -> ProcessStatus:
        status = self._control.status(process)
        return ProcessStatus(
            process=self.name(process), pid=self._control.pid(process),
            state=status.state.name.lower(), epoch=status.epoch,
            restarts=self._control.restarts(process), port=status.port,
            heartbeat_age_ms=self.beat_age_ms(process), fault=self._fault(process),
        )  # fmt: skip

    def _fault(self, process: int) -> str:
        """Say what a process does without, and what to do."""
        if self._control.state(process) != ProcessState.READY:
            return ""  # its counters are those of a life that has ended
        counts = self.counters.snapshot(process)
        endpoint = self._endpoints[process] if process < len(self._endpoints) else ""
        is_sign_on = self._processes.roles[process] is Role.SIGN_ON
        told = [
            taken_text(self.name(process), endpoint, counts),
            threads_text("authenticator" if is_sign_on else "authorizer", counts),
        ]
        return "; besides, ".join(filter(None, told))

    def unready(self) -> list[str]:
        """Names of the processes that clients need and that do not serve just now."""
        return [
            self.name(process)
            for process in self._processes.serving
            if self._control.state(process) != ProcessState.READY
        ]

    def unwritable(self) -> list[str]:
        """Names of the workers with logs that take no messages, for their disk fails."""
        return [
            self.name(process)
            for process in range(self.process_count)
            if self.counters.get(process, Counter.LOGS_FAILING)
        ]

    def is_healthy(self) -> bool:
        """Whether the coordinator's loop turns."""
        return self.beat_age_ms(COORDINATOR) < BEAT_AGE_HEALTHY_MS_MAX
