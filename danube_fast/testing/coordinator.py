"""The shipped coordinator on a simulated host: topics, lookups, placement and moves, without its process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from danube_fast.clock import MILLISECOND_NS
from danube_fast.ring.control import ProcessState, ProcessStatus
from danube_fast.roles import Owner
from danube_fast.testing.loopback import LoopbackServer, Tap
from danube_fast.testing.process import Machine, Process, SimulatedEnvironment
from danube_fast.workers.coordinator.coordinator import Coordinator

__all__ = ["SimulatedCoordinator"]


class _Control:
    """The control block as the coordinator reads it."""

    def __init__(self, host: Machine) -> None:
        self._host = host

    def status(self, process: int) -> ProcessStatus:
        """Ready or gone; the port of a worker is its number."""
        peer = self._host.processes[process]
        state = ProcessState.READY if peer.is_up else ProcessState.STOPPED
        return ProcessStatus(state, peer.epoch, process)

    def state(self, process: int) -> ProcessState:
        """Its state."""
        return self.status(process).state

    def port(self, process: int) -> int:
        """Its port."""
        return process


class SimulatedCoordinator(Process):
    """The coordinator over its lives."""

    coordinator: Coordinator | None = None

    @property
    def server(self) -> LoopbackServer | None:
        """The server that clients connect to first; None while it is down."""
        if self.coordinator is None or not self.is_up:
            return None
        server: Any = self.coordinator.connections.server
        return server  # type: ignore[no-any-return]

    def start(self) -> None:
        """A new life over the same metadata."""
        host = self.host
        self.epoch += 1
        self._turn_ns = -1
        self.mailbox = self.make_mailbox()
        processes = host.roles
        count = len(processes.workers)
        config = SimpleNamespace(
            accept_rollback=False,
            data_dir=str(host.directory), host_id="simulated", worker_count=count,
            processes=processes, advertise="worker", ipc_endpoints=[""] * len(processes),
            owners=[Owner("simulated", log_id % count) for log_id in range(host.log_count)],
            process_of_log=lambda log_id: processes.workers[log_id % count],
            admin_fd=-1, logs=[], settings=host.settings, tcp_host="", tcp_port=0, ipc_endpoint="",
            epoch=self.epoch,
        )  # fmt: skip
        boot: Any = SimpleNamespace(
            config=config, settings=host.settings, clock=host.clock, mailbox=self.mailbox,
            control=_Control(host), counters=SimpleNamespace(set=lambda counter, value: None),
            heartbeat=lambda: None, set_state=lambda state, port=0: None, stop_requested=False,
        )  # fmt: skip
        no_context: Any = None
        self.coordinator = Coordinator(boot, no_context, SimulatedEnvironment(self, Tap()))
        self.is_up = True
        self.coordinator.start()
        self.wake()

    def kill(self) -> None:
        """SIGKILL."""
        self.is_up = False
        if self.coordinator is not None:
            self.coordinator.connections.close()
            self.coordinator = None

    def turn(self) -> None:
        """One turn."""
        coordinator = self.coordinator
        if coordinator is None:
            return
        if coordinator.do_work():
            self.wake()
        else:
            self.turn_in(max(1, coordinator.sleep_ms()) * MILLISECOND_NS)
            if not self.mailbox.prepare_sleep():
                self.wake()

    def move(self, partition_id: int, worker: int) -> None:
        """Begin to move a partition to that worker (by index). Raises DanubeError."""
        coordinator = self.coordinator
        record = coordinator.topics.partition(partition_id) if coordinator is not None else None
        if coordinator is None or record is None:
            return
        trace = self.host.trace

        def done(value: Any, error: Any) -> None:
            trace.note(f"move of partition {partition_id}: {error or 'done'}")
            self.host.on_moved(partition_id)

        coordinator.move(record, worker, done)
        self.wake()
