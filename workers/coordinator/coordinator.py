"""The coordinator: the bootstrap endpoint, the metadata, the administrative operations.

    clients --ROUTER--> LOOKUP --> topic directory (LMDB) --> placement --mailbox--> workers
            <-- RESULT: partitions and endpoints <--------------- confirmed <-------'
                        ADMIN  --> broker/admin.py ---- asks workers, answers later

One plain poll loop in one thread; it is the only writer of the metadata. A LOOKUP that has to wait,
for a missing topic or for a worker that is down, is parked until its time is up. Workers serve the
topics they know while this process is down. /healthz, /readyz and /metrics are served by a thread
that is started when everything is ready and reads shared memory only.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from danube_fast.broker import admin
from danube_fast.broker import messages as m
from danube_fast.broker.topics.directory import TopicDirectory
from danube_fast.broker.topics.records import PartitionRecord, TopicOptions, TopicRecord
from danube_fast.clock import Clock
from danube_fast.errors import DanubeError, NotFound, ResourceExhausted
from danube_fast.net import protocol
from danube_fast.net.session import Session
from danube_fast.ring.control import ProcessState
from danube_fast.ring.counters import Counter
from danube_fast.security.authorization import Permission, authorize
from danube_fast.types import parse_topic
from danube_fast.version import VERSION
from danube_fast.workers.coordinator import web
from danube_fast.workers.coordinator.front import Front
from danube_fast.workers.coordinator.growth import Growth
from danube_fast.workers.coordinator.mark_keeper import MarkKeeper
from danube_fast.workers.coordinator.mover import MoveDone, Mover
from danube_fast.workers.coordinator.placement import Placement
from danube_fast.workers.coordinator.rebalancer import Rebalancer
from danube_fast.workers.coordinator.watches import Watches
from danube_fast.workers.process.boot import Boot, boot
from danube_fast.workers.process.mailbox import Reply, Request
from danube_fast.workers.process.outside import Outside
from danube_fast.workers.process.sleeper import Sleeper
from danube_fast.workers.reports.clients import client_page
from danube_fast.workers.reports.quota import QuotaKeeper, room_of
from danube_fast.workers.reports.reply_topics import ReplyTopicKeeper
from danube_fast.workers.reports.storage import StorageKeeper
from danube_fast.workers.reports.topic_metrics import TopicReports

__all__ = ["Coordinator", "main"]

_log = logging.getLogger(__name__)

IDLE_POLL_MS = 1000
"""Longest sleep: the heartbeat must advance."""
BUSY_POLL_MS = 2
PLACE_WAIT_MS = 5_000
"""How long a LOOKUP that names no time waits for a worker that is down."""
WAIT_MS_MAX = 600_000
PARKED_MAX = 100_000
"""LOOKUPs that wait for missing topics."""
MILLISECOND_NS = 1_000_000


class _Parked:
    """A LOOKUP that waits for its topic to appear."""

    __slots__ = ("command", "deadline_ns", "session")

    def __init__(self, session: int, command: protocol.Lookup, deadline_ns: int) -> None:
        self.session = session
        self.command = command
        self.deadline_ns = deadline_ns


class Coordinator:
    """The coordinator without its process: `do_work` can be driven by a test.

    Is the `AdminContext` of the operations and the `Workers` of the placement.
    """

    def __init__(
        self, booted: Boot, context: zmq.Context[zmq.Socket[bytes]], outside: Outside | None = None
    ) -> None:
        outside = outside or Outside()
        self._boot = booted
        self._config = booted.config
        self._settings = booted.settings
        self.clock: Clock = booted.clock
        data_dir, accept = Path(self._config.data_dir), self._config.accept_rollback
        self._store = outside.make_store(data_dir, self.clock, accept_rollback=accept)
        self.topics = TopicDirectory(
            self._store,
            log_count=len(self._config.log_workers),
            partitions_per_topic_max=self._settings.partitions_per_topic_max,
        )
        self.placement = Placement(booted.mailbox, self.topics, self)
        self.placement.revision = lambda: self._store.sealed_revision
        self.marks = MarkKeeper(booted.mailbox, booted.config, outside, self._store, self.topics)
        self.placement.asked.append(lambda worker, asked: self.marks.hear(asked.marks))
        self.watches = Watches(self.topics)
        self.mover = Mover(booted.mailbox, self.topics, self.placement, self)
        self.rebalancer = Rebalancer(
            booted.mailbox, self._settings, self._config.worker_count, self
        )
        self.quota = QuotaKeeper(booted.mailbox, booted.config)
        self.storage = StorageKeeper(booted.mailbox, self.topics)
        self.reply_topics = ReplyTopicKeeper(booted.mailbox, self)
        self.topic_reports = TopicReports(booted.mailbox, self.clock)
        self.front = Front(
            context,
            self._settings,
            self._config.host_id,
            {
                protocol.Lookup: self._lookup,
                protocol.Admin: self._admin,
                protocol.Watch: lambda session, command: self.watches.watch(
                    self.front, session, command, self._now_ns
                ),
            },
            outside,
        )
        booted.mailbox.serve(m.FindLetterTopic, self._topic_places)
        self._parked: dict[str, list[_Parked]] = {}
        self._parked_deadlines: list[tuple[int, int, str]] = []
        self._order = itertools.count()
        self._now_ns = self.clock.monotonic_ns()
        self._web: web.WebThread | None = None

    # ---------------------------------------------------------------- life

    def start(self) -> None:
        """Bind and say ready. Raises Unavailable if the address is taken."""
        config = self._config
        port = self.front.server.bind(config.tcp_host, config.tcp_port, config.ipc_endpoint)
        self._sleeper = Sleeper(
            [self.front.server.fileno()],
            self.front.server.readable,
            self._boot.mailbox,
            self._boot.clock,
        )
        self._boot.set_state(ProcessState.READY, port)

    def run(self) -> None:
        """The loop, until a stop is requested."""
        while not self._boot.stop_requested:
            if not self.do_work():
                self._sleeper.sleep(self.sleep_ms())

    def stop(self) -> None:
        """Orderly end: no request is answered from here on."""
        self._boot.set_state(ProcessState.STOPPING)
        if self._web is not None:
            self._web.stop()
        self.marks.finish(self.clock.monotonic_ns())
        self.front.close()
        self._store.close()
        self._boot.set_state(ProcessState.STOPPED)

    def do_work(self) -> int:
        """One bounded turn; the number of things done."""
        now_ns = self._now_ns = self.clock.monotonic_ns()
        self._boot.heartbeat()
        work = self._boot.mailbox.do_work(now_ns)
        work += self.front.do_work(now_ns)
        for record, partitions, error in self.topics.commit():
            _log.error("topic %s could not be created: %s", record.topic, error)
            self.placement.forget(partitions, error)
        work += self.placement.do_work(now_ns)
        work += self.watches.do_work(self.front, now_ns)
        self.marks.do_work(now_ns, self.quota.cursors)
        self._expire_parked(now_ns)
        self._publish_counters()
        if self._web is None and self._config.admin_fd >= 0 and self._all_ready():
            boot = self._boot
            view = web.BrokerView(
                boot.control, boot.counters, self.clock, self.topic_reports.table,
                lambda: room_of(boot.config, boot.counters),
            )  # fmt: skip
            self._web = web.WebThread(view, self._config.admin_fd)
            self._web.start()
        return work

    def sleep_ms(self) -> int:
        """How long to sleep, unless somebody has something to say."""
        if self.front.is_waiting:
            return BUSY_POLL_MS
        deadline_ns = min(self._boot.mailbox.next_deadline_ns(), self.placement.next_deadline_ns())
        deadline_ns = min(deadline_ns, self.watches.next_deadline_ns())
        if self._parked_deadlines:
            deadline_ns = min(deadline_ns, self._parked_deadlines[0][0])
        left_ms = (deadline_ns - self.clock.monotonic_ns()) // MILLISECOND_NS + 1
        return int(max(min(left_ms, IDLE_POLL_MS), 0))

    def _publish_counters(self) -> None:
        counters = self._boot.counters
        counters.set(Counter.SESSIONS, len(self.front.sessions))

    def _all_ready(self) -> bool:
        control = self._boot.control
        states = (control.state(process) for process in range(self._config.process_count))
        return all(state == ProcessState.READY for state in states)

    # ---------------------------------------------------------------- LOOKUP

    def _lookup(self, session: Session, command: protocol.Lookup) -> None:
        name = parse_topic(command.topic)
        authorize(session.principal, Permission.LOOKUP, name)
        record, index = self.topics.topic(name), None
        if record is None:
            part = self.topics.partition_of(name)
            if part is not None:
                record, index = part
        options = TopicOptions.parse(command.create) if command.create is not None else None
        if record is None:
            record = self._create_or_park(session, command, options)
            if record is None:
                return
        elif options is not None and index is None:
            self.topics.check_options(record, options)
        self._answer_when_placed(session.number, command, record, index)

    def _create_or_park(
        self, session: Session, command: protocol.Lookup, options: TopicOptions | None
    ) -> TopicRecord | None:
        """The new topic; None if the LOOKUP was parked. Raises NotFound otherwise."""
        if options is not None and self._settings.auto_create_topics:
            authorize(session.principal, Permission.PRODUCE, command.topic)
            record = self.topics.create(command.topic, options, self.clock.wall_ns())
            self._unpark(command.topic)
            return record
        if command.wait_ms <= 0:
            self.topics.require(command.topic)  # raises NotFound with the remedy
        if len(self._parked_deadlines) >= PARKED_MAX:
            raise ResourceExhausted(
                f"{PARKED_MAX} lookups wait for topics already; create the topic first"
            )
        wait_ns = min(command.wait_ms, WAIT_MS_MAX) * MILLISECOND_NS
        parked = _Parked(session.number, command, self._now_ns + wait_ns)
        self._parked.setdefault(command.topic, []).append(parked)
        heapq.heappush(
            self._parked_deadlines, (parked.deadline_ns, next(self._order), command.topic)
        )
        return None

    def _unpark(self, topic: str) -> None:
        """The topic exists now: go on with everybody who waited for it."""
        for parked in self._parked.pop(topic, []):
            session = self.front.sessions.by_number(parked.session)
            if session is None:
                continue
            try:
                self._lookup(session, parked.command)
            except DanubeError as error:
                self._fail(parked.session, parked.command.request, error)

    def _expire_parked(self, now_ns: int) -> None:
        while self._parked_deadlines and self._parked_deadlines[0][0] <= now_ns:
            _, _, topic = heapq.heappop(self._parked_deadlines)
            waiting = self._parked.get(topic, [])
            late = [parked for parked in waiting if parked.deadline_ns <= now_ns]
            left = [parked for parked in waiting if parked.deadline_ns > now_ns]
            if left:
                self._parked[topic] = left
            else:
                self._parked.pop(topic, None)
            for parked in late:
                text = (
                    f"topic {topic} did not appear in {parked.command.wait_ms} ms; create it "
                    f"with: danube-fast topics create {topic}"
                )
                self._fail(parked.session, parked.command.request, NotFound(text))

    def _answer_when_placed(
        self, session: int, command: protocol.Lookup, record: TopicRecord, index: int | None
    ) -> None:
        partitions = self.topics.partitions(record)
        if index is not None:
            partitions = [partitions[index]]

        def placed(error: DanubeError | None) -> None:
            if error is not None:
                self._fail(session, command.request, error)
                return
            result = self._where(
                record, partitions, partitioned=record.partitioned and index is None
            )
            self.front.reply(session, protocol.Result(command.request, result))

        wait_ms = min(command.wait_ms, WAIT_MS_MAX) if command.wait_ms > 0 else PLACE_WAIT_MS
        self.placement.when_placed(partitions, self._now_ns + wait_ms * MILLISECOND_NS, placed)

    def _where(
        self, record: TopicRecord, partitions: list[PartitionRecord], *, partitioned: bool
    ) -> dict[str, Any]:
        """RESULT of a LOOKUP."""
        rows = []
        for partition in partitions:
            worker = self.worker_of(partition.log_id)
            rows.append(
                [
                    partition.partition_id,
                    record.partition_topic(partition.index),
                    worker - 1,
                    f"tcp://{self._config.advertise}:{self._boot.control.port(worker)}",
                    self._config.ipc_endpoints[worker],
                ]
            )
        return {
            "topic": record.topic,
            "dispatch": record.dispatch,
            "durability": record.durability,
            "partitioned": partitioned,
            "partitions": rows,
            "host_id": self._config.host_id,
        }

    def _topic_places(self, request: Request[m.FindLetterTopic]) -> None:
        try:
            name = parse_topic(request.message.topic)
            record = self.topics.topic(name)
            self.topics.check_takes_letters(name)
            if not request.message.create:
                request.reply(m.TopicPlaces([]))
                return
            if record is None:
                record = self.topics.create(name, TopicOptions.parse({}), self.clock.wall_ns())
                self._unpark(name)
        except DanubeError as error:
            request.fail(error)
            return
        partitions = self.topics.partitions(record)

        def placed(error: DanubeError | None) -> None:
            if error is not None:
                request.fail(error)
                return
            places = [(part.partition_id, self.worker_of(part.log_id)) for part in partitions]
            request.reply(m.TopicPlaces(places))

        deadline_ns = self._now_ns + PLACE_WAIT_MS * MILLISECOND_NS
        self.placement.when_placed(partitions, deadline_ns, placed)

    def _fail(self, session: int, request: int, error: DanubeError) -> None:
        self.front.reply(session, protocol.Error(request, error.code, str(error)))

    # ---------------------------------------------------------------- ADMIN

    def _admin(self, session: Session, command: protocol.Admin) -> None:
        number = session.number

        def on_end(value: Any, error: DanubeError | None) -> None:
            if error is not None:
                self._fail(number, command.request, error)
            else:
                self.front.reply(number, protocol.Result(command.request, value))

        answer = admin.Answer(on_end)
        admin.run(self, authorize, session.principal, command.operation, command.arguments, answer)

    def ask(
        self,
        worker: int,
        message: m.Message,
        on_reply: Callable[[Any, DanubeError | None], None],
    ) -> None:
        """Call a worker; see `AdminContext`."""

        def got(reply: Reply) -> None:
            on_reply(reply.value, reply.error)

        self._boot.mailbox.call(worker, message, on_reply=got)

    def worker_of(self, log_id: int) -> int:
        """Process index of the worker that owns a log."""
        return self._config.log_workers[log_id]

    def ready_epoch(self, worker: int) -> int:
        """Epoch of a worker that is ready, else 0."""
        status = self._boot.control.status(worker)
        return status.epoch if status.state == ProcessState.READY else 0

    def place(self, record: TopicRecord, on_done: Callable[[DanubeError | None], None]) -> None:
        """Hand a new or changed topic to its workers; see `AdminContext`."""
        partitions = self.topics.partitions(record)
        self.mover.give_up(record.partition_ids, "its settings were changed meanwhile; try again")
        self.placement.invalidate(partitions)
        deadline_ns = self._now_ns + PLACE_WAIT_MS * MILLISECOND_NS
        self.placement.when_placed(partitions, deadline_ns, on_done)
        self._unpark(record.topic)

    def when_placed(
        self,
        partitions: list[PartitionRecord],
        wait_ns: int,
        on_done: Callable[[DanubeError | None], None],
    ) -> None:
        """Call `on_done` when workers have confirmed all of them, or the time is up."""
        self.placement.when_placed(partitions, self._now_ns + wait_ns, on_done)

    def grow(
        self,
        record: TopicRecord,
        count: int,
        on_done: Callable[[TopicRecord | None, DanubeError | None], None],
    ) -> None:
        """Give a topic more partitions; see `AdminContext`."""
        Growth(self, record, count, on_done).start()

    def unassign(self, partitions: list[PartitionRecord]) -> None:
        """Tell workers to drop partitions; who cannot be told now asks when it is back."""
        for partition in partitions:
            ids, revision = [partition.partition_id], self._store.sealed_revision
            message = m.Unassign(ids, revision=revision)
            self.ask(self.worker_of(partition.log_id), message, lambda *_: None)

    def forget(self, partitions: list[PartitionRecord]) -> None:
        """Partitions were deleted."""
        ids = [partition.partition_id for partition in partitions]
        self.mover.give_up(ids, "it was deleted meanwhile")
        self.placement.forget(partitions)

    def move(self, partition: PartitionRecord, worker: int, on_done: MoveDone) -> None:
        """Move a partition to another worker (by index); see `AdminContext`."""
        count = self._config.worker_count
        if not 0 <= worker < count:
            raise NotFound(
                f"there is no worker {worker}; this broker has {count}, from 0 to {count - 1}: see "
                "danube-fast status"
            )
        loads = self.topics.log_loads()
        logs = [log for log, owner in enumerate(self._config.log_workers) if owner == worker + 1]
        self.mover.start(partition, min(logs, key=loads.__getitem__), on_done)

    def moving_to(self, partition_id: int) -> int | None:
        """Index of the worker that a partition is being moved to."""
        target = self.mover.moving.get(partition_id)
        return None if target is None else target - 1

    @property
    def worker_count(self) -> int:
        """Workers."""
        return self._config.worker_count

    def clients(self, after: int, limit: int) -> dict[str, Any]:
        """Who is connected to the coordinator; see `AdminContext`."""
        return client_page(self.front.sessions, after, limit, self._now_ns, None)

    def status(self) -> dict[str, Any]:
        """Everything for `danube-fast status`."""
        boot, config, cursors = self._boot, self._config, self.quota.cursors
        return {
            "version": VERSION,
            "supervisor_pid": config.supervisor_pid,
            "data_dir": config.data_dir,
            "topics": len(self.topics.topics()),
            "partitions": self.topics.partition_count,
            "rebalance": self.rebalancer.status(),
            "processes": web.BrokerView(boot.control, boot.counters, self.clock).processes(),
            "logs": [
                {
                    "log_id": log_id,
                    "worker": worker - 1,
                    **(cursors[log_id]._asdict() if log_id in cursors else {}),
                }
                for log_id, worker in enumerate(config.log_workers)
            ],
            "counters": {counter.name.lower(): boot.counters.total(counter) for counter in Counter},
        }


def main() -> int:
    """Run as `python -m danube_fast.workers.coordinator.coordinator --boot-fd N`; the exit code."""
    booted = boot()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    try:
        coordinator = Coordinator(booted, context)
        booted.settle()
        coordinator.start()
        coordinator.run()
        coordinator.stop()
    except DanubeError as error:
        _log.error("%s", error)  # one sentence is enough: it says what to do
        booted.set_state(ProcessState.FAILED)
        return 1
    finally:
        context.destroy(linger=0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
