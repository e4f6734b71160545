"""What the shared memory of a broker tells: processes, liveness, counters. Read by any thread."""

from __future__ import annotations

from typing import Any

from danube_fast.clock import Clock
from danube_fast.ring.control import ControlBlock, ProcessState
from danube_fast.ring.counters import Counter, CounterBlock

__all__ = ["BrokerView"]

COORDINATOR = 0
MILLISECOND_NS = 1_000_000
BEAT_AGE_HEALTHY_MS_MAX = 5_000


class BrokerView:
    """Read-only view of the control and counter blocks."""

    def __init__(self, control: ControlBlock, counters: CounterBlock, clock: Clock) -> None:
        self._control = control
        self.counters = counters
        self._clock = clock

    @property
    def process_count(self) -> int:
        """Coordinator and workers."""
        return self._control.process_count

    @staticmethod
    def name(process: int) -> str:
        """coordinator, worker-0, worker-1, ..."""
        return "coordinator" if process == COORDINATOR else f"worker-{process - 1}"

    def beat_age_ms(self, process: int) -> int:
        """Milliseconds since the process last showed life."""
        age_ns = self._clock.monotonic_ns() - self._control.heartbeat_time_ns(process)
        return max(age_ns // MILLISECOND_NS, 0)

    def processes(self) -> list[dict[str, Any]]:
        """One entry per process, for people and tools."""
        entries = []
        for process in range(self.process_count):
            status = self._control.status(process)
            entries.append(
                {
                    "process": self.name(process),
                    "pid": self._control.pid(process),
                    "state": status.state.name.lower(),
                    "epoch": status.epoch,
                    "restarts": self._control.restarts(process),
                    "port": status.port,
                    "heartbeat_age_ms": self.beat_age_ms(process),
                }
            )
        return entries

    def unready(self) -> list[str]:
        """Names of the processes that do not serve just now."""
        return [
            self.name(process)
            for process in range(self.process_count)
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
