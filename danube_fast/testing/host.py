"""A simulated host: real workers without processes, and a stand-in for their coordinator.

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

from danube_fast.config import Settings
from danube_fast.errors import DanubeError, NotFound
from danube_fast.net import protocol as p
from danube_fast.net.session import Session
from danube_fast.testing.disk import SimulatedDisk
from danube_fast.testing.loopback import LoopbackBell, LoopbackRing, LoopbackServer, Tap
from danube_fast.testing.virtual_clock import MS, US, Schedule, Trace
from danube_fast.workers.boot import COORDINATOR, worker_of_log
from danube_fast.workers.front import Front
from danube_fast.workers.mailbox import Link, Mailbox, Request
from danube_fast.workers.outside import Outside
from danube_fast.workers.shard import ShardWorker

__all__ = ["SimulatedHost", "SimulatedWorker", "TopicPlan"]

TURNS_WITHOUT_END = 20_000
"""A worker that says so often in a row that there is more to do spins."""


class TopicPlan:
    """One topic as the stand-in for the coordinator knows it."""

    def __init__(
        self, topic: str, partition_ids: list[int], durability: str, log_ids: list[int]
    ) -> None:
        self.topic = topic
        self.partition_ids = partition_ids
        self.durability = durability
        self.log_ids = log_ids

    def where(self, host: SimulatedHost) -> dict[str, Any]:
        """What LOOKUP is answered. It does not say that there are partitions: nobody asks for more."""
        return {
            "topic": self.topic, "dispatch": "reliable", "durability": self.durability,
            "partitioned": False, "host_id": "simulated",
            "partitions": [
                [each, f"{self.topic}-part-{index}", 0, f"tcp://worker-{host.process_of(each)}:1", ""]
                for index, each in enumerate(self.partition_ids)
            ],
        }  # fmt: skip

    def assignments(self) -> list[dict[str, Any]]:
        """What a worker is told of its partitions."""
        return [
            {
                "partition_id": partition_id, "topic": self.topic, "index": index,
                "dispatch": "reliable", "durability": self.durability, "log_id": log_id,
                "incarnation": 1,
            }
            for index, (partition_id, log_id) in enumerate(
                zip(self.partition_ids, self.log_ids, strict=True)
            )
        ]  # fmt: skip


class _SimulatedOutside(Outside):
    """Socket, threads and chance of one life of a worker."""

    def __init__(self, actor: SimulatedWorker) -> None:
        self.background = actor.host.disk
        self._actor = actor

    def boot_id(self) -> str:
        """Another one after each power cut."""
        return f"boot-{self._actor.host.boot_number}"

    def new_token(self) -> bytes:
        """A token that the seed draws."""
        return self._actor.host.draw.randbytes(16)

    def make_server(self, context: Any, settings: Settings) -> Any:
        """A door on the loopback network."""
        actor = self._actor
        return LoopbackServer(actor.tap, actor.wake, actor.host.event_fd)


class _RegistryOutside(Outside):
    """Socket and chance of one life of the stand-in for the coordinator."""

    def __init__(self, registry: _Registry) -> None:
        self._registry = registry

    def new_token(self) -> bytes:
        """A token that the seed draws."""
        return self._registry.host.draw.randbytes(16)

    def make_server(self, context: Any, settings: Settings) -> Any:
        """A door on the loopback network."""
        return LoopbackServer(Tap(), self._registry.wake, self._registry.host.event_fd)


class _Process:
    """A process as its peers see it: an epoch, a mailbox, turns."""

    def __init__(self, host: SimulatedHost, index: int) -> None:
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
        self.turn_in(self.host.draw.randrange(5 * US, 60 * US))

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


class _Registry(_Process):
    """Stands in for the coordinator: it knows all topics and never forgets. Its door is the shipped one."""

    front: Front | None = None

    def start(self) -> None:
        """A new life."""
        self.epoch += 1
        self._turn_ns = -1
        self.is_up = True
        self.mailbox = self.make_mailbox()
        self.mailbox.handlers.update(
            {
                "assignments": self._assignments,
                "owner": self._owner,
                "topic_places": self._places,
                "log_usage": lambda request: None,
                "dropped": lambda request: None,
            }
        )
        outside: Any = _RegistryOutside(self)
        no_context: Any = None
        self.front = Front(
            no_context, self.host.settings, "simulated", {p.Lookup: self._lookup}, outside
        )
        self.wake()

    def kill(self) -> None:
        """It is gone for a while."""
        self.is_up = False
        if self.front is not None:
            self.front.close()

    def turn(self) -> None:
        """One turn."""
        now_ns = self.host.clock.now_ns
        done = self.front.do_work(now_ns) if self.front is not None else 0
        if self.mailbox.do_work(now_ns) + done:
            self.wake()
        else:
            self.turn_in(250 * MS)

    def _lookup(self, session: Session, command: p.Lookup) -> None:
        for topic in self.host.topics:
            if topic.topic == command.topic and self.front is not None:
                answer = p.Result(command.request, topic.where(self.host))
                self.front.reply(session.number, answer)
                return
        raise NotFound("no such topic")

    def _assignments(self, request: Request) -> None:
        mine = set(request.arguments["log_ids"])
        entries = [entry for topic in self.host.topics for entry in topic.assignments()]
        request.reply({"partitions": [x for x in entries if x["log_id"] in mine], "deleted": []})

    def _owner(self, request: Request) -> None:
        request.reply({"process": self.host.process_of(request.arguments["partition_id"])})

    def _places(self, request: Request) -> None:
        for topic in self.host.topics:
            if topic.topic == request.arguments["topic"]:
                ids = topic.partition_ids
                places = [[each, self.host.process_of(each)] for each in ids]
                request.reply({"partitions": places})
                return
        request.fail(DanubeError("no such topic"))


class SimulatedWorker(_Process):
    """One worker over its lives."""

    def __init__(self, host: SimulatedHost, index: int, log_ids: list[int], tap: Tap) -> None:
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
        """The door that clients come to. Only while it is up."""
        server: LoopbackServer = self.worker.server
        return server

    def start(self) -> None:
        """A new life over the same files."""
        host = self.host
        self.epoch += 1
        self._turn_ns = -1
        self.mailbox = self.make_mailbox()
        config = SimpleNamespace(
            logs=[(log_id, str(host.directory / f"log-{log_id}")) for log_id in self.log_ids],
            settings=host.settings, data_dir=str(host.directory), host_id="simulated",
            worker_count=len(host.workers), process_index=self.index, tcp_host="", tcp_port=0,
            ipc_endpoint="",
        )  # fmt: skip
        boot: Any = SimpleNamespace(
            config=config, settings=host.settings, clock=host.clock, mailbox=self.mailbox,
            counters=SimpleNamespace(set=lambda counter, value: None), heartbeat=lambda: None,
            set_state=lambda state, port=0: None, stop_requested=False,
        )  # fmt: skip
        host.disk.wake = self.wake
        no_context: Any = None
        host.disk.is_sound = True  # a start that fails is the supervisor's business
        self.worker = ShardWorker(boot, no_context, _SimulatedOutside(self))
        host.disk.is_sound = False
        self.is_up = True
        self.worker.start()
        for log in self.worker.logs:
            host.disk.settle(log.directory)
        host.trace.note(f"worker {self.index}: started, epoch {self.epoch}")
        self.wake()

    def turn(self) -> None:
        """One turn."""
        clock = self.host.clock
        if clock.now_ns < self.stalled_until_ns:
            self.turn_in(self.stalled_until_ns - clock.now_ns)
            return
        worker = self.worker
        if self._slept and worker.server.readable() and not worker.is_gathering:
            worker.serve_first()
        self._slept = False
        work = worker.do_work()
        self.tap.end_turn()
        pause_ms = 0 if work and not worker.settled else worker.sleep_ms()
        self._turns_in_a_row = 0 if pause_ms else self._turns_in_a_row + 1
        if self._turns_in_a_row > TURNS_WITHOUT_END:
            raise RuntimeError(f"worker {self.index} spins without an end")
        if pause_ms:
            self._slept = True
            self.turn_in(pause_ms * MS)
            if worker.server.readable() or self.mailbox.prepare_sleep() is False:
                self.wake()
        else:
            self.wake()

    def synced_position(self, log_id: int) -> int:
        """Up to where one of its logs is durable."""
        found = (log.synced_position for log in self.worker.logs if log.log_id == log_id)
        return int(next(found))

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
    for log in worker.logs:
        log.abandon()
    for partition in worker.catalog.by_id.values():
        for name in list(partition.subscriptions):
            partition.forget_subscription(name)


class SimulatedHost:
    """Processes, disk and topics of one broker."""

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
        self.topics: list[TopicPlan] = []
        self.boot_number = 1
        self.workers: list[SimulatedWorker] = []
        self.registry = _Registry(self, COORDINATOR)
        self._numbers = itertools.count(1)
        self._rings: dict[tuple[int, int], LoopbackRing] = {}
        self.on_down: Callable[[SimulatedWorker], None] = lambda worker: None
        """Called when a worker is gone."""
        self.on_power_cut: Callable[[], None] = lambda: None

    def add_workers(self, count: int, log_count: int, tap_of: Callable[[int], Tap]) -> None:
        """Workers with logs, not started."""
        for index in range(1, count + 1):
            logs = [i for i in range(log_count) if worker_of_log(i, count) == index]
            self.workers.append(SimulatedWorker(self, index, logs, tap_of(index)))

    def next_number(self) -> int:
        """A number that was not used before."""
        return next(self._numbers)

    @property
    def processes(self) -> list[_Process]:
        """All of them, by index."""
        return [self.registry, *self.workers]

    def ring(self, source: int, target: int) -> LoopbackRing:
        """The ring from one process to another."""
        return self._rings.setdefault((source, target), LoopbackRing())

    def epoch(self, process: int) -> int:
        """Epoch of a process."""
        return self.processes[process].epoch

    def is_down(self, process: int) -> bool:
        """Whether a process is gone."""
        return not self.processes[process].is_up

    def process_of(self, partition_id: int) -> int:
        """Which worker owns a partition."""
        for topic in self.topics:
            if partition_id in topic.partition_ids:
                log_id = topic.log_ids[topic.partition_ids.index(partition_id)]
                return worker_of_log(log_id, len(self.workers))
        raise KeyError(partition_id)

    def worker_of(self, partition_id: int) -> SimulatedWorker:
        """The worker that owns a partition."""
        return self.workers[self.process_of(partition_id) - 1]

    def server_at(self, endpoint: str) -> LoopbackServer | None:
        """The door at a ZeroMQ endpoint; None if nobody is there."""
        place = endpoint.removeprefix("tcp://").partition(":")[0]
        if place == "bootstrap":
            server: Any = self.registry.front.server if self.registry.front is not None else None
            return server if self.registry.is_up else None
        worker = self.workers[int(place.removeprefix("worker-")) - 1]
        return worker.server if worker.is_up else None

    def start(self) -> None:
        """Start everything that is down."""
        for process in (self.registry, *self.workers):
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

    def cut_power(self) -> None:
        """Everything ends, and what was not synced is lost."""
        for worker in self.workers:
            self.kill(worker)
        self.registry.kill()
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
