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

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from danube_fast.broker import messages as m
from danube_fast.broker.admin.registry import Steps
from danube_fast.broker.answers import BrokerStatus, ClientPage, LogStatus
from danube_fast.broker.topics.directory import TopicDirectory
from danube_fast.broker.topics.records import PartitionRecord, TopicRecord
from danube_fast.clock import MILLISECOND_NS, Clock
from danube_fast.config import join_address
from danube_fast.countdown import Done
from danube_fast.errors import DanubeError, NotFound
from danube_fast.net import protocol
from danube_fast.ring.control import ProcessState
from danube_fast.ring.counters import Counter
from danube_fast.roles import Owner, Processes
from danube_fast.security import Authorizer
from danube_fast.security.curve import load_or_make
from danube_fast.security.records import BOOTSTRAP
from danube_fast.version import VERSION
from danube_fast.workers.coordinator import web
from danube_fast.workers.coordinator.administration import Administration
from danube_fast.workers.coordinator.administrators import is_first_key, is_recovery
from danube_fast.workers.coordinator.audit import AuditLog
from danube_fast.workers.coordinator.audit_topic import AuditTopic
from danube_fast.workers.coordinator.change_rates import ChangeRates
from danube_fast.workers.coordinator.connections import Connections
from danube_fast.workers.coordinator.growth import Growth, GrowthDone
from danube_fast.workers.coordinator.lookups import Lookups
from danube_fast.workers.coordinator.marks import MarkRegistry
from danube_fast.workers.coordinator.mover import MoveDone, Mover
from danube_fast.workers.coordinator.placement import Placement
from danube_fast.workers.coordinator.rebalancer import Rebalancer
from danube_fast.workers.coordinator.security import SecurityDirectory
from danube_fast.workers.coordinator.server_key import ServerKeyRotation
from danube_fast.workers.coordinator.sign_ons import SignOnChecks
from danube_fast.workers.coordinator.slices import Slices
from danube_fast.workers.coordinator.uploaders import Uploads
from danube_fast.workers.coordinator.watches import Watches
from danube_fast.workers.process.access import Access
from danube_fast.workers.process.boot import Boot, boot
from danube_fast.workers.process.denials import Denials, is_audited
from danube_fast.workers.process.environment import Environment
from danube_fast.workers.process.idle import IdleStrategy
from danube_fast.workers.process.layout import BOOTSTRAP_KEY, RECOVER_ADMIN
from danube_fast.workers.process.secure_transport import SecureTransport
from danube_fast.workers.reports.clients import client_page
from danube_fast.workers.reports.namespaces import NamespaceUsage
from danube_fast.workers.reports.quota import LogQuotas, room_of
from danube_fast.workers.reports.reply_topics import ReplyTopicExpiry
from danube_fast.workers.reports.storage import StorageQuotas
from danube_fast.workers.reports.topic_reports import TopicReports

__all__ = ["Coordinator", "main"]

_log = logging.getLogger(__name__)

IDLE_POLL_MS = 1000
"""Longest sleep: the heartbeat must advance."""
BUSY_POLL_MS = 2
PLACE_WAIT_MS = 5_000
"""How long a LOOKUP that names no time waits for a worker that is down."""


class Coordinator:
    """The coordinator without its process: `do_work` can be driven by a test.

    The `AdminContext` of the operations, and the context of its own parts.
    """

    def __init__(
        self, booted: Boot, context: zmq.Context[zmq.Socket[bytes]],
        environment: Environment | None = None,
    ) -> None:  # fmt: skip
        environment = environment or Environment()
        self._boot, self._config, self._settings = booted, booted.config, booted.settings
        self.clock: Clock = booted.clock
        data_dir, accept = Path(self._config.data_dir), self._config.accept_rollback
        self._store = environment.make_store(data_dir, self.clock, accept_rollback=accept)
        self._secured = SecureTransport.make(self._settings, data_dir, context, self.clock)
        access = self._secured.access if self._secured is not None else None
        self.security = SecurityDirectory(
            self._store, booted.mailbox, self.clock, access, self._told_before()
        )
        self.topics = TopicDirectory(
            self._store,
            log_count=len(self._config.owners),
            partitions_per_topic_max=self._settings.partitions_per_topic_max,
        )
        self.placement = Placement(booted.mailbox, self.topics, self)
        self.placement.revision = lambda: self._store.sealed_revision
        self.marks = MarkRegistry(booted, environment, self._store, self.topics)
        self.placement.asked.append(lambda worker, asked: self.marks.hear(asked.marks))
        self.uploads = Uploads(booted, self._store, self.topics)
        self.mover = Mover(booted.mailbox, self.topics, self.placement, self)
        self.rebalancer = Rebalancer(booted.mailbox, self._settings, self)
        self.quota = LogQuotas(booted.mailbox, booted.config)
        self.storage = StorageQuotas(booted.mailbox, self.topics)
        self.namespaces = NamespaceUsage(booted, self.topics, self._workers_of)
        self.reply_topics = ReplyTopicExpiry(booted.mailbox, self)
        self.topic_reports = TopicReports(booted.mailbox, self.clock)
        self._authorizer: Authorizer = access or environment.authorizer
        self.connections = Connections(
            context, self._settings, self._config.host_id, environment, self._secured
        )
        self.server_key = ServerKeyRotation(
            self._secured, booted.mailbox, self.connections.server, self
        )
        denials = self._secured.denials if self._secured else Denials(self.clock)
        self.audit = AuditLog(booted, denials) if is_audited(self._settings) else None
        self.sign_ons = SignOnChecks(self._store, self.security, booted.mailbox, self.clock, self.audit)  # fmt: skip
        if access is not None:
            access.owner_of = self._owner_of
            access.serve_from(booted.mailbox.run_soon)
            self._begin_sign_ons(access)
            self._begin_security(data_dir / BOOTSTRAP_KEY)
        rates = ChangeRates(
            self._settings.admin_changes_per_second_max, self.clock, self._authorizer, denials
        )
        self.lookups = Lookups(
            booted, self.connections, self.topics, self.placement, self._authorizer, self.audit,
            rates,
        )  # fmt: skip
        self._now_ns = self.clock.monotonic_ns()
        self.slices = Slices(self.clock)
        self.watches = Watches(
            self.topics, self.connections, self._authorizer, self.clock, self.in_slices
        )
        self.audit_topic = None
        if self.audit is not None and access is not None:  # else all who come in could write it
            self.audit_topic = AuditTopic(self, self.audit)
        administration = Administration(
            self, self._authorizer, self.audit, self.connections.reply, rates
        )
        self.connections.commands.handlers[protocol.Admin] = administration.handle
        self._web: web.WebThread | None = None
        self._address = ""
        """Where clients begin, from `start` on."""
        self._admin_address = web.address_of(self._config.admin_fd)

    # ---------------------------------------------------------------- life

    def start(self) -> None:
        """Bind and report READY. Raises Unavailable if the address is taken."""
        config = self._config
        if self._secured is not None:
            self._secured.open(self.connections.server)
        connections, wake = self.connections, self._boot.mailbox.wake
        connections.server.follow(connections.sessions, lambda: connections.drained_ns, wake)
        port = self.connections.server.bind(config.tcp_host, config.tcp_port, config.ipc_endpoint)
        self._address = join_address(config.tcp_host, port)
        self._idle = IdleStrategy(
            [self.connections.server.fileno()],
            self.connections.server.readable,
            self._boot.mailbox,
            self._boot.clock,
        )
        self._boot.set_state(ProcessState.READY, port)

    def run(self) -> None:
        """Run the loop until a stop is requested."""
        while not self._boot.stop_requested:
            if not self.do_work():
                self._idle.sleep(self.sleep_ms())

    def stop(self) -> None:
        """End in order: no request is answered from here on."""
        self._boot.set_state(ProcessState.STOPPING)
        if self._web is not None:
            self._web.stop()
        self.marks.finish(self.clock.monotonic_ns())
        self.connections.close()
        if self.audit is not None:
            self.audit.close()
        if self.audit_topic is not None:
            self.audit_topic.close()
        if self._secured is not None:
            self._secured.close()
        self._store.close()
        self._boot.set_state(ProcessState.STOPPED)

    def do_work(self) -> int:
        """Do one bounded turn; the number of things done."""
        now_ns = self._now_ns = self.clock.monotonic_ns()
        self._boot.heartbeat()
        work = self._boot.mailbox.do_work(now_ns)
        work += self.connections.do_work(now_ns)
        if self.audit is not None:
            work += self.audit.do_work(now_ns)
        for record, partitions, error in self.topics.commit():
            _log.error("topic %s could not be created: %s", record.topic, error)
            self.placement.forget(partitions, error)
        work += self.placement.do_work(now_ns)
        work += self.watches.do_work(now_ns)
        work += self.slices.do_work()
        self.marks.do_work(now_ns, self.quota.cursors)
        self.lookups.do_work(now_ns)
        self.namespaces.do_work(now_ns)
        if self.audit_topic is not None:
            self.audit_topic.do_work(now_ns)
        self.security.do_work(now_ns)
        counters = self._boot.counters
        if self._secured is not None:
            self._secured.access.do_work(now_ns)
            counters.set(Counter.THREADS_LOST, self._secured.access.threads_lost)
        self.server_key.do_work(now_ns)
        counters.set(Counter.SESSIONS, len(self.connections.sessions))
        counters.set(Counter.IPC_TAKEN, self.connections.server.ipc_is_taken)
        if self._web is None and self._config.admin_fd >= 0 and self._all_ready():
            boot = self._boot
            view = web.BrokerView(
                self.processes, boot.control, boot.counters, self.clock, self.topic_reports.table,
                lambda: room_of(boot.config, boot.counters),
                lambda: self.namespaces.table(
                    self.topic_reports.published(), self._settings.metrics_topics_max
                ),
                self._config.ipc_endpoints,
            )  # fmt: skip
            if self._settings.tokens:
                view.issuers_fault = lambda: self.sign_ons.issuers_fault
            access = self._secured.access if self._secured is not None else None
            denials = self.audit.denials if self.audit is not None else None
            fd = self._config.admin_fd
            self._web = web.WebThread(view, fd, self.clock, self._settings, access, denials)
            self._web.start()
        return work

    def sleep_ms(self) -> int:
        """How long to sleep, unless a client or a worker wakes the loop."""
        if self.connections.is_waiting or (self.audit is not None and self.audit.is_waiting):
            return BUSY_POLL_MS
        waiting = self._boot.mailbox, self.placement, self.watches, self.lookups, self.server_key
        deadline_ns = min(part.next_deadline_ns() for part in waiting)
        left_ms = (deadline_ns - self.clock.monotonic_ns()) // MILLISECOND_NS + 1
        return int(max(min(left_ms, IDLE_POLL_MS), 0))

    def _all_ready(self) -> bool:
        control = self._boot.control
        states = (control.state(process) for process in self.processes.serving)
        return all(state == ProcessState.READY for state in states)

    def _told_before(self) -> list[int]:
        """Find the processes that have copies of the records, from another start of this one."""
        return self.processes.workers if self._config.epoch > 1 else []

    def _begin_sign_ons(self, access: Access) -> None:
        """Refuse no key before all sign-ons are told again, behind another start of this process."""
        self._boot.mailbox.serve(m.SignOnsTold, lambda _: access.settle())
        if self._settings.sign_on and self._config.epoch > 1:
            access.begin_again()

    def _begin_security(self, key_file: Path) -> None:
        """Make the key of a first administrator, in a broker whose records let no administrator in; it ends at its first
        use. A recovery has made one already."""
        directory, recovery = self.security, key_file.with_name(RECOVER_ADMIN)
        if is_recovery(recovery, key_file) or not directory.has_administrator():
            public = load_or_make(key_file).public
            directory.begin(public)
            self._record("make_bootstrap_key", f"curve:{public}")
        _remove(recovery)
        counters = self._boot.counters
        counters.set(Counter.FIRST_KEYS, is_first_key(directory.policy, key_file))

        def entered(principal: str, proof: str) -> None:
            if principal == BOOTSTRAP:
                self._record("end_bootstrap_key", proof)
                directory.used(principal, proof)
                _remove(key_file)

        directory.on_first_key_gone = lambda: counters.set(Counter.FIRST_KEYS, 0)
        self.connections.on_entry = entered

    def _record(self, action: str, proof: str) -> None:
        if self.audit is not None:
            self.audit.record(action, principal=BOOTSTRAP, proof=proof)

    # ---------------------------------------------------------------- for operations

    def ask(
        self, worker: int, message: m.Message, on_reply: Callable[[Any, DanubeError | None], None],
        timeout_ms: int = 5000,
    ) -> None:  # fmt: skip
        """Call a worker; see `AdminContext`."""
        self._boot.mailbox.call(
            worker, message, on_reply=lambda reply: on_reply(reply.value, reply.error),
            timeout_ms=timeout_ms,
        )  # fmt: skip

    @property
    def processes(self) -> Processes:
        """The processes of this host."""
        return self._config.processes

    def owner_of(self, log_id: int) -> Owner:
        """Host and number of the worker that owns a log."""
        return self._config.owners[log_id]

    def _workers_of(self, namespace: str) -> set[int]:
        """Find the workers with partitions of a namespace."""
        found: set[int] = set()
        for record in self.topics.topics(namespace):
            found |= {self.process_of(part.log_id) for part in self.topics.partitions(record)}
            if len(found) == self._config.worker_count:
                break
        return found

    def _owner_of(self, topic: str) -> str | None:
        """Find the principal that made a reply topic."""
        record = self.topics.topic(topic)
        return None if record is None else record.owner or None

    def process_of(self, log_id: int) -> int:
        """Process index of the worker that owns a log."""
        return self._config.process_of_log(log_id)

    def ready_epoch(self, worker: int) -> int:
        """Epoch of a worker that is ready, else 0."""
        status = self._boot.control.status(worker)
        return status.epoch if status.state == ProcessState.READY else 0

    def place(self, record: TopicRecord, on_done: Done) -> None:
        """Assign a new or changed topic to its workers; see `AdminContext`."""
        partitions = self.topics.partitions(record)
        self.mover.give_up(record.partition_ids, "its settings were changed meanwhile; try again")
        self.placement.invalidate(partitions)
        deadline_ns = self._now_ns + PLACE_WAIT_MS * MILLISECOND_NS
        self.placement.when_placed(partitions, deadline_ns, on_done)
        self.lookups.appeared(record.topic)

    def when_placed(self, partitions: list[PartitionRecord], wait_ns: int, on_done: Done) -> None:
        """Call `on_done` when workers have confirmed all of them, or the time is up."""
        self.placement.when_placed(partitions, self._now_ns + wait_ns, on_done)

    def grow(self, record: TopicRecord, count: int, on_done: GrowthDone) -> None:
        """Give a topic more partitions; see `AdminContext`."""
        Growth(self, record, count, on_done).start()

    def unassign(self, partitions: list[PartitionRecord]) -> None:
        """Tell workers to drop partitions; a worker that is down asks when it is back."""
        for partition in partitions:
            ids, revision = [partition.partition_id], self._store.sealed_revision
            message = m.Unassign(ids, revision=revision)
            self.ask(self.process_of(partition.log_id), message, lambda *_: None)

    def forget(self, partitions: list[PartitionRecord]) -> None:
        """Hand out these partitions no more: they were deleted."""
        ids = [partition.partition_id for partition in partitions]
        self.mover.give_up(ids, "it was deleted meanwhile")
        self.placement.forget(partitions)

    def move(self, partition: PartitionRecord, worker: int, on_done: MoveDone) -> None:
        """Move a partition to another worker (by index); see `AdminContext`."""
        count = len(self.processes.workers)
        if not 0 <= worker < count:
            raise NotFound(
                f"there is no worker {worker}; this broker has {count}, from 0 to {count - 1}: see "
                "danube-fast status"
            )
        loads = self.topics.log_loads()
        logs = [log for log, owner in enumerate(self._config.owners) if owner.worker == worker]
        self.mover.start(partition, min(logs, key=loads.__getitem__), on_done)

    def moving_to(self, partition_id: int) -> int | None:
        """Index of the worker that a partition is being moved to, if it is."""
        target = self.mover.moving.get(partition_id)
        return None if target is None else self.processes.number(target)

    def namespace_usage(self, namespace: str) -> tuple[int, int]:
        """Return the bytes and the handles of a namespace; see `AdminContext`."""
        return self.namespaces.of(namespace)

    def in_slices(self, principal: str, steps: Steps) -> None:
        """Take steps for a principal, a slice in each turn; see `AdminContext`."""
        self.slices.add(principal, steps)

    def clients(self, after: int, limit: int) -> ClientPage:
        """List connections to the coordinator; see `AdminContext`."""
        return client_page(self.connections.sessions, after, limit, self._now_ns, None)

    def status(self) -> BrokerStatus:
        """Describe processes, logs and counters, for `danube-fast status`."""
        boot, config, cursors = self._boot, self._config, self.quota.cursors
        logs = [
            LogStatus(
                worker=owner.worker,
                **(cursors[log_id]._asdict() if log_id in cursors else {"log_id": log_id}),
            )
            for log_id, owner in enumerate(config.owners)
        ]
        return BrokerStatus(
            version=VERSION, supervisor_pid=config.supervisor_pid, data_dir=config.data_dir,
            topics=len(self.topics.by_name), partitions=self.topics.partition_count,
            rebalance=self.rebalancer.status(),
            processes=web.BrokerView(
                self.processes, boot.control, boot.counters, self.clock, ipc_endpoints=config.ipc_endpoints
            ).processes(),
            logs=logs,
            counters={counter.name.lower(): boot.counters.total(counter) for counter in Counter},
            auth=self._settings.auth, server_keys=self.server_key.keys,
            audit="off" if self.audit is None else self.audit.fault or "on",
            audit_topic_fault=self.audit_topic.fault if self.audit_topic is not None else "",
            listen=self._address, admin=self._admin_address, sign_on=config.sign_on_address,
            tls=bool(self._settings.tls_certificate),
            tls_fault=self._web.tls_fault if self._web is not None else "", issuers_fault=self.sign_ons.issuers_fault,
            sign_on_fault=self.sign_ons.fault,
            history=self.uploads.status(),
        )  # fmt: skip


def _remove(path: Path) -> None:
    """Remove a file that is good for nothing any more."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s is good for nothing any more: %s", path, error)


def main() -> int:
    """Run as `python -m danube_fast.workers.coordinator.coordinator --boot-fd N`; the exit code."""
    booted = boot()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))

    def run() -> None:
        coordinator = Coordinator(booted, context)
        booted.freeze_heap()
        coordinator.start()
        coordinator.run()
        coordinator.stop()

    try:
        return booted.exit_code_of(run)
    finally:
        context.destroy(linger=0)


if __name__ == "__main__":
    sys.exit(main())
