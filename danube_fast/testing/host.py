"""A simulated host: the real workers and their coordinator, without processes.

A worker's turns come when something happened that would wake it, or when it would wake by itself.
`kill` drops it as SIGKILL would: what it wrote stays. `SimulatedHost.cut_power` drops all, and what
was not synced.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from danube_fast.broker.topics.directory import TopicDirectory
from danube_fast.broker.topics.records import TopicOptions
from danube_fast.clock import MILLISECOND_NS
from danube_fast.config import Settings
from danube_fast.roles import COORDINATOR
from danube_fast.testing.coordinator import SimulatedCoordinator
from danube_fast.testing.faulty_store import FaultyStore
from danube_fast.testing.loopback import LoopbackServer, Tap
from danube_fast.testing.process import Machine, Process, SimulatedEnvironment
from danube_fast.testing.uploader import SimulatedUploader
from danube_fast.testing.virtual_clock import Schedule, Trace
from danube_fast.workers.shard.worker import ShardWorker

__all__ = ["SimulatedHost", "SimulatedWorker"]

ELSEWHERE = 1 << 62
"""Durable, as far as this worker is concerned: the frame came from another log."""
TURNS_WITHOUT_END = 20_000
"""A worker that says so often in a row that there is more to do spins."""


class SimulatedWorker(Process):
    """One worker over its lives."""

    def __init__(self, host: Machine, index: int, log_ids: list[int], tap: Tap) -> None:
        super().__init__(host, index)
        self.log_ids = log_ids
        self.tap = tap
        self.worker: Any = None
        self.stalled_until_ns = 0
        """It stands still until then, as under SIGSTOP."""
        self._slept = True
        self._turns_in_a_row = 0

    @property
    def server(self) -> LoopbackServer:
        """The server that clients connect to. Only while it is up."""
        server: LoopbackServer = self.worker.server
        return server

    def start(self) -> None:
        """A new life over the same files."""
        host = self.host
        self.epoch += 1
        self._turn_ns = -1
        self.mailbox = self.make_mailbox()
        config = SimpleNamespace(
            accept_rollback=False,
            logs=[(log_id, str(host.directory / f"log-{log_id}")) for log_id in self.log_ids],
            settings=host.settings, data_dir=str(host.directory), host_id="simulated",
            worker_count=len(host.roles.workers), processes=host.roles, process_index=self.index, tcp_host="", tcp_port=0,
            ipc_endpoint="",
        )  # fmt: skip
        boot: Any = SimpleNamespace(
            config=config, settings=host.settings, clock=host.clock, mailbox=self.mailbox,
            counters=SimpleNamespace(set=lambda counter, value: None, get=lambda *_: 0), heartbeat=lambda: None,
            set_state=lambda state, port=0: None, stop_requested=False,
        )  # fmt: skip
        host.disk.wake = self.wake
        no_context: Any = None
        host.disk.is_sound = True  # a start that fails is the supervisor's business
        self.worker = ShardWorker(boot, no_context, SimulatedEnvironment(self, self.tap))
        host.disk.is_sound = False
        self.is_up = True
        self.worker.start()
        for log in self.worker.state.logs.values():
            host.disk.note_synced(log.directory)
        host.trace.note(f"worker {self.index}: started, epoch {self.epoch}")
        self.wake()

    def turn(self) -> None:
        """One turn."""
        clock = self.host.clock
        if clock.now_ns < self.stalled_until_ns:
            self.turn_in(self.stalled_until_ns - clock.now_ns)
            return
        worker = self.worker
        woken, self._slept = self._slept and worker.server.readable(), False
        work = worker.do_work(woken=woken)
        self.tap.end_turn()
        pause_ms = 0 if work and not worker.settled else worker.sleep_ms()
        self._turns_in_a_row = 0 if pause_ms else self._turns_in_a_row + 1
        if self._turns_in_a_row > TURNS_WITHOUT_END:
            raise RuntimeError(f"worker {self.index} spins without an end")
        if pause_ms:
            self._slept = True
            self.turn_in(pause_ms * MILLISECOND_NS)
            if worker.server.readable() or self.mailbox.prepare_sleep() is False:
                self.wake()
        else:
            self.wake()

    def synced_position(self, log_id: int) -> int:
        """Up to where one of its logs is durable."""
        found = [
            log.synced_position for log in self.worker.state.logs.values() if log.log_id == log_id
        ]
        return int(found[0]) if found else ELSEWHERE

    def kill(self) -> None:
        """As SIGKILL."""
        self.is_up = False
        worker, self.worker = self.worker, None
        self.host.trace.note(f"worker {self.index}: killed")
        release(worker)

    def stop(self) -> None:
        """As SIGTERM."""
        self.is_up = False
        worker, self.worker = self.worker, None
        self.host.trace.note(f"worker {self.index}: stopped in order")
        worker.stop()
        release(worker)


def release(worker: ShardWorker) -> None:
    """Give back what a worker that is gone had of this process."""
    worker.server.close()
    for log in worker.state.logs.values():
        log.abandon()
    for partition in worker.state.catalog.by_id.values():
        for name in list(partition.subscriptions):
            partition.forget_subscription(name)


class SimulatedHost(Machine):
    """Processes and topics of one broker."""

    def __init__(
        self,
        directory: Path,
        settings: Settings,
        schedule: Schedule,
        draw: random.Random,
        trace: Trace,
    ) -> None:
        super().__init__(directory, settings, schedule, draw, trace)
        self.workers: list[SimulatedWorker] = []
        self.coordinator = SimulatedCoordinator(self, COORDINATOR)
        self.processes.append(self.coordinator)
        self.uploader: SimulatedUploader | None = None
        """None: there is no history."""
        self._numbers = itertools.count(1)
        self.on_down: Callable[[SimulatedWorker], None] = lambda worker: None
        """Called when a worker is gone."""
        self.on_power_cut: Callable[[], None] = lambda: None

    def add_workers(self, count: int, log_count: int, tap_of: Callable[[int], Tap]) -> None:
        """Workers with logs, not started."""
        self.log_count = log_count
        for index in range(1, count + 1):
            logs = [i for i in range(log_count) if i % count == index - 1]
            self.workers.append(SimulatedWorker(self, index, logs, tap_of(index)))
        self.processes += self.workers

    def add_uploader(self, store: FaultyStore) -> None:
        """Add the uploader behind all workers, not started."""
        self.uploader = SimulatedUploader(self, len(self.processes), store)
        self.processes.append(self.uploader)
        self.has_uploader = True

    def next_number(self) -> int:
        """A number that was not used before."""
        return next(self._numbers)

    def metadata(self) -> TopicDirectory:
        """The metadata as the coordinator has it now, or would find it."""
        living = self.coordinator.coordinator
        if living is not None:
            return living.topics
        maximum = self.settings.partitions_per_topic_max
        return TopicDirectory(
            self.store, log_count=self.log_count, partitions_per_topic_max=maximum
        )

    def create_topic(
        self, topic: str, durability: str, partitions: int, policy: dict[str, Any]
    ) -> list[int]:
        """Before the first start: a topic; the ids of its partitions."""
        directory = self.metadata()
        options = TopicOptions(durability=durability, partitions=partitions)
        record = directory.create(topic, options, self.clock.wall_ns())
        directory.commit()
        if policy:
            directory.set_policy(topic, policy)
        return record.partition_ids

    def process_of(self, partition_id: int) -> int:
        """Which worker owns a partition."""
        record = self.metadata().partition(partition_id)
        if record is None:
            raise KeyError(partition_id)
        return 1 + record.log_id % len(self.workers)

    def worker_of(self, partition_id: int) -> SimulatedWorker:
        """The worker that owns a partition."""
        return self.workers[self.process_of(partition_id) - 1]

    def server_at(self, endpoint: str) -> LoopbackServer | None:
        """The server at a ZeroMQ endpoint; None if none listens there."""
        place, _, port = endpoint.removeprefix("tcp://").partition(":")
        if place == "bootstrap":
            return self.coordinator.server
        worker = self.workers[int(port) - 1]
        return worker.server if worker.is_up else None

    def start(self) -> None:
        """Start everything that is down."""
        for process in self.processes:
            if not process.is_up:
                process.start()

    def kill(self, worker: SimulatedWorker) -> None:
        """SIGKILL."""
        if worker.is_up:
            worker.kill()
            self.on_down(worker)

    def stop(self, worker: SimulatedWorker) -> None:
        """SIGTERM."""
        if worker.is_up:
            worker.stop()
            self.on_down(worker)

    def kill_uploader(self) -> None:
        """SIGKILL, if there is an uploader."""
        if self.uploader is not None and self.uploader.is_up:
            self.uploader.kill()

    def cut_power(self) -> None:
        """Everything ends, and what was not synced is lost."""
        for worker in self.workers:
            self.kill(worker)
        self.kill_uploader()
        self.coordinator.kill()
        self.trace.note("host: power cut")
        self.disk.cut_power()
        self.boot_number += 1
        self.on_power_cut()

    def close(self) -> None:
        """The end of the simulation."""
        for worker in self.workers:
            if worker.is_up:
                worker.kill()
        os.close(self.event_fd)
