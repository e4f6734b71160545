"""A shard worker: owns logs and the partitions in them; sequencing, durability, dispatch.

    clients --ROUTER--> commands, PUBLISH --> intake --> journal (log) --> sync thread
            <---------- acks, DELIVER    <-- dispatch <----- written / synced

One plain loop in one thread; `do_work` is one bounded turn and says how much it did. Besides it run
one ZeroMQ I/O thread and one sync thread per log, neither of which needs the GIL. The loop never
waits for a disk: it writes to the page cache and lets the sync thread tell when that is durable.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import msgspec
import zmq

from danube_fast.broker.subscription.consumer import Parting
from danube_fast.clock import MILLISECOND_NS
from danube_fast.errors import InvalidArgument
from danube_fast.net import protocol as p
from danube_fast.net.allocation import keep_freed_memory
from danube_fast.net.greeting import NO_SESSION_TEXT, Greeter
from danube_fast.ring.control import ProcessState
from danube_fast.ring.handover import RingServer
from danube_fast.security.authorization import AllowAll
from danube_fast.workers.process.access import Access
from danube_fast.workers.process.boot import Boot, boot
from danube_fast.workers.process.commands import OWN_SESSION, Commands
from danube_fast.workers.process.environment import Environment
from danube_fast.workers.process.idle import IdleStrategy
from danube_fast.workers.process.secure_transport import SecureTransport
from danube_fast.workers.process.security_copy import SecurityCopy
from danube_fast.workers.reports.counters import CounterReports
from danube_fast.workers.reports.denials import DenialReports
from danube_fast.workers.reports.load import LoadReports
from danube_fast.workers.reports.namespaces import storage_jobs
from danube_fast.workers.reports.quota import WorkerQuota
from danube_fast.workers.reports.reply_topics import ReplyTopics
from danube_fast.workers.reports.topic_metrics import TopicMetrics
from danube_fast.workers.shard.access_checks import AccessChecks
from danube_fast.workers.shard.assignments import Assignments
from danube_fast.workers.shard.commands import PERMISSIONS, SessionCommands, limits_of_sessions
from danube_fast.workers.shard.deliver.consumer_commands import ConsumerCommands
from danube_fast.workers.shard.deliver.consumers import Consumers
from danube_fast.workers.shard.deliver.dead_letters import DeadLetters
from danube_fast.workers.shard.deliver.delivery import Delivery
from danube_fast.workers.shard.deliver.dispatcher import Dispatcher
from danube_fast.workers.shard.deliver.gaps import Gaps
from danube_fast.workers.shard.deliver.lookahead import Lookahead
from danube_fast.workers.shard.deliver.redeliveries import Redeliveries
from danube_fast.workers.shard.deliver.subscriptions import Subscriptions
from danube_fast.workers.shard.deliver.tails import Tails
from danube_fast.workers.shard.history.ages import HistoryAges
from danube_fast.workers.shard.history.backlogs import Backlogs
from danube_fast.workers.shard.history.fetches import HistoryReads
from danube_fast.workers.shard.history.sizes import HistorySizes
from danube_fast.workers.shard.history.times import HistoryTimes
from danube_fast.workers.shard.history.uploads import Uploads
from danube_fast.workers.shard.job import Job
from danube_fast.workers.shard.keep.checkpoints import Checkpoints
from danube_fast.workers.shard.keep.cursors import Cursors
from danube_fast.workers.shard.keep.limits import Limits
from danube_fast.workers.shard.keep.passed import PassedPages
from danube_fast.workers.shard.keep.positions import Positions
from danube_fast.workers.shard.keep.retention import Retention
from danube_fast.workers.shard.keep.rewrites import Rewrites
from danube_fast.workers.shard.keep.segments import Segments
from danube_fast.workers.shard.keep.touched import TouchedPartitions
from danube_fast.workers.shard.keep.trimming import Trimming
from danube_fast.workers.shard.logs import Logs
from danube_fast.workers.shard.move.arrival import Arrivals
from danube_fast.workers.shard.move.departure import Departures
from danube_fast.workers.shard.move.log_changes import LogChanges
from danube_fast.workers.shard.move.moves import Moves
from danube_fast.workers.shard.move.ownership import Ownership
from danube_fast.workers.shard.operations import Operations
from danube_fast.workers.shard.publish.durability import DurabilityChanges
from danube_fast.workers.shard.publish.forward import Forwarder
from danube_fast.workers.shard.publish.intake import Intake
from danube_fast.workers.shard.publish.journal import Group, Journal, Publication
from danube_fast.workers.shard.publish.outlets import Outlets
from danube_fast.workers.shard.publish.producers import Producers
from danube_fast.workers.shard.publish.ring_intake import RingIntake
from danube_fast.workers.shard.publish.siblings import SIBLINGS_WAIT_NS
from danube_fast.workers.shard.publish.sync_faults import repair_failed_sync
from danube_fast.workers.shard.read.log_reader import LogReader
from danube_fast.workers.shard.rollback import Restored
from danube_fast.workers.shard.routed_peers import RoutedPeers
from danube_fast.workers.shard.session_checks import SessionChecks
from danube_fast.workers.shard.state import ShardState
from danube_fast.workers.shard.transports import Transports
from danube_fast.workers.shard.upkeep import Upkeep

__all__ = ["ShardWorker", "main"]

_log = logging.getLogger(__name__)

MESSAGES_PER_TURN_MAX = 256
BUSY_POLL_MS = 2
GATHERING_POLL_MS = SIBLINGS_WAIT_NS // MILLISECOND_NS


class ShardWorker:
    """One worker process without its process: `do_work` can be driven by a test."""

    def __init__(
        self,
        boot: Boot,
        context: zmq.Context[zmq.Socket[bytes]],
        environment: Environment | None = None,
    ) -> None:
        """`environment`: socket, threads and chance of the machine by default."""
        self._environment = environment or Environment()
        self.secured = SecureTransport.make(
            boot.settings, Path(boot.config.data_dir), context, boot.clock
        )
        access = self.secured.access if self.secured else None
        self._authenticator = access or self._environment.authenticator
        self._authorizer = access or self._environment.authorizer
        state = self.state = ShardState(boot, self._environment)
        self.logs = Logs(state, self._environment.background)
        for log in boot.config.logs:
            self.logs.load(*log)
        self.settled = False  # the last turn took all that clients had sent and nothing else
        self._compose_ends(context)
        self._compose_keeping()
        self._compose_moving()
        self._compose_commands()
        self._compose_jobs()
        self.log_changes.begin(*state.logs)

    # ------------------------------------------------------------ composition

    def _compose_ends(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Compose the parts that take messages in and send them out."""
        state, settings = self.state, self.state.settings
        self.intake = Intake(state.tables, state.journals, settings)
        self.intake.partitions_by_slot = state.catalog.by_slot
        self.intake.partitions_by_id = state.catalog.by_id
        self.server = self._environment.make_server(context, settings, self.secured)
        self.transports = Transports(self.server)
        self.delivery = Delivery(self.transports, state.sessions, settings)
        self.consumers = Consumers(state, self.delivery)
        self.tails = Tails(settings)
        state.removal_listeners += [self.intake.forget, self.tails.empty]
        parts = self.intake, self.delivery, self.tails
        state.settings_listeners += [part.apply for part in parts]
        self.history = HistoryReads(state)
        self.reader = LogReader(state, self._environment.background, self.history)

    def _compose_keeping(self) -> None:
        """Compose the parts that keep messages, and give them up."""
        state = self.state
        self.cursors = Cursors(state)
        self.checkpoints = Checkpoints(state)
        self.quota = WorkerQuota(state.boot.mailbox, state.boot.config)
        self.limits = Limits(state, self.delivery, self.consumers)
        self.limits.attach(self.intake)
        self.gaps = Gaps(state, self.delivery, self.consumers)
        self.subscriptions = Subscriptions(state, self.consumers, self.gaps)
        self.times = HistoryTimes(state)
        ages = HistoryAges(state, self.times)
        sizes = HistorySizes(state)
        self.retention = Retention(state, self.gaps, self.subscriptions, ages, sizes)
        self.segments = Segments(state, self.checkpoints, self.retention)
        self.rewrites = Rewrites(state, self.segments)
        self.backlogs = Backlogs(state, self.quota)
        self.uploads = Uploads(state, self.backlogs)
        self.trimming = Trimming(state, self.quota, self.segments, self.rewrites)
        self.uploads.after_upload = self.trimming.trim_soon
        self.dispatcher = Dispatcher(
            state, self.intake, self.delivery, self.tails, self.reader, self.gaps, self.retention
        )

    def _compose_moving(self) -> None:
        """Compose the parts for partitions that come, go, and change."""
        state = self.state
        self.lookahead = Lookahead(state, self.reader)
        self.ownership = Ownership(
            state, self.delivery, self.consumers, self.intake, self.tails, self.lookahead
        )
        self.arrivals = Arrivals(state, self.ownership, self.quota)
        self.departures = Departures(
            state, self.ownership, self.reader, self.consumers, self.dispatcher
        )
        self.moves = Moves(state, self.ownership, self.arrivals)
        self.restored = Restored(state, self._environment)
        self.log_changes = LogChanges(
            state, self.logs, self.restored, self.ownership, self.cursors, self.checkpoints,
            self.segments, self.lookahead, self.reader,
        )  # fmt: skip
        self.assignments = Assignments(
            state, self.restored, self.intake, self.consumers,
            DurabilityChanges(state, self.intake, self.tails, self.dispatcher),
            self.moves, self.arrivals, self.departures,
        )  # fmt: skip

    def _compose_commands(self) -> None:
        """Compose the handlers of clients, other workers and administrators."""
        state, delivery, consumers = self.state, self.delivery, self.consumers
        self.greeter = Greeter(
            state.sessions, state.settings, state.boot.config.host_id,
            self._authenticator.authenticate,
            consumers.close_session,
        )  # fmt: skip
        access = self.secured.access if self.secured else None
        self.greeter.limits |= limits_of_sessions(access)
        producers = self.producers = Producers(state, delivery, self.limits, access)
        self.forwarder = Forwarder(state, delivery, self.intake, producers, access is None)
        self.dead_letters = DeadLetters(state, consumers, producers, self.intake, self.reader)
        self.commands = Commands(
            state.sessions, self.greeter, self._authorizer, delivery.reply,
            unknown="this is the port of a worker, which serves only what is published and consumed; "
            "connect to the address that `danube-fast serve` prints",
        )  # fmt: skip
        self.commands.address_of = self.transports.address_of
        self.commands.denials = self.secured.denials if self.secured else None
        self.commands.is_administrator = access.rules if access else lambda principal: False
        SessionCommands(state, self.commands, delivery, consumers, access)
        self.commands.handlers |= producers.handlers
        self.commands.handlers |= ConsumerCommands(
            state, delivery, consumers, self.cursors, self.limits, self.gaps, self.subscriptions,
            self.dead_letters, self.times, self.commands.run,
        ).handlers  # fmt: skip
        self.operations = Operations(
            state, consumers, self.subscriptions, self.gaps, self.dead_letters
        )
        self.positions = Positions(
            state, self.reader, self.tails, consumers, self.cursors, self.gaps, self.retention,
            self.trimming,
        )  # fmt: skip

    def _compose_jobs(self) -> None:
        """Compose the jobs by the clock, in this order."""
        state = self.state
        self.session_checks = SessionChecks(
            state, self.consumers, self.transports, self.assignments
        )
        self.touched = TouchedPartitions(self.intake, self.retention)
        access = self.secured.access if self.secured is not None else None
        jobs: list[Job] = [
            Redeliveries(state, self.consumers),
            self.dead_letters,
            self.retention,
            *storage_jobs(state, self.retention, self.limits.namespaces),
            ReplyTopics(state),
            TopicMetrics(state),
            self.arrivals,
            self.departures,
            self.rewrites,
            self.history,
            self.backlogs,
            self.log_changes,
            self.positions,
            LoadReports(state, self.intake, self.delivery),
            self.checkpoints,
            self.assignments,
            self.session_checks,
            self.touched,
            CounterReports(state, self.intake, self.delivery, self.transports, access),
            self.trimming,
            PassedPages(state),
            self.producers,
            self.forwarder,
        ]
        if self.secured is not None and access is not None:
            ends, denials = (self.consumers, self.transports), self.secured.denials
            self.security = SecurityCopy(state.boot, access)
            jobs.append(AccessChecks(state, access, self.security, *ends, denials))
            jobs.append(DenialReports(state.boot.mailbox, denials))
        self.upkeep = Upkeep(state, self.lookahead, self.session_checks, jobs)

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Bind, report READY, and ask the coordinator for assignments."""
        config, mailbox = self.state.boot.config, self.state.boot.mailbox
        wait = admits = None
        self.server.follow(self.state.sessions, lambda: self.state.drained_ns, mailbox.wake)
        if self.secured is not None:
            admits = self.secured.admits_user
            self.security.load_and_wait()
            self.secured.open(self.server, mailbox)
        port = self.server.bind(config.tcp_host, config.tcp_port, config.ipc_endpoint)
        self.transports.open_rings(config.ipc_endpoint, self.state.settings, admits)
        rings, peers = self.transports.rings, self.transports.peers
        is_free = isinstance(self._authorizer, AllowAll | Access)  # asked when a handle opens
        if is_free and rings is not None and peers is not None:
            taking = self._compose_ring_intake(rings, peers)
            self.transports.take_plain, wait = taking.take, taking.sleep
        self._idle = IdleStrategy(
            self.transports.filenos(), self.transports.readable, mailbox, self.state.clock,
            self.state.settings.spin_us, wait,
        )  # fmt: skip
        self.assignments.ask()
        self.state.boot.set_state(ProcessState.READY, port)

    def _compose_ring_intake(self, rings: RingServer, peers: RoutedPeers) -> RingIntake:
        state = self.state
        outlets = Outlets(state, self.transports, self.delivery, self.tails, self.intake)
        bell = state.boot.mailbox.fileno()
        return RingIntake(state, rings, self.server, peers, self.intake, outlets, bell)

    def run(self) -> None:
        """Run the loop until a stop is requested."""
        woken = False
        while not self.state.boot.stop_requested:
            work, woken = self.do_work(woken=woken), False
            if (not work or self.settled) and (timeout_ms := self.sleep_ms()):
                woken = self._idle.sleep(timeout_ms)
        self.stop()

    def sleep_ms(self) -> int:
        """How long to sleep, unless a client or a process wakes the loop; 0: there is more to do."""
        if self.state.ready or self.intake.answered or self.lookahead.is_busy or self.upkeep.is_due:
            return 0
        for journal in self.state.journals.values():
            if journal.siblings.gather and journal.waits:
                return GATHERING_POLL_MS
        if self.delivery.waiting or self.intake.put_off:
            return BUSY_POLL_MS
        return self.upkeep.idle_poll_ms

    def stop(self) -> None:
        """End in order: sync all that is written, and save a clean snapshot that says so."""
        self.state.boot.set_state(ProcessState.STOPPING)
        self.cursors.write()
        for slot in self.state.logs:
            self.logs.save(slot, self.checkpoints)
        self.restored.send_report()
        self.delivery.flush()
        self.transports.close()
        if self.secured is not None:
            self.secured.close()
        self.state.boot.set_state(ProcessState.STOPPED)

    # ------------------------------------------------------------ one turn

    def do_work(self, *, woken: bool = False) -> int:
        """Do one bounded turn; the number of things done. `woken`: a client ended the worker's sleep."""
        self._begin_turn()
        # where many clients publish one by one, to serve the first of them alone would delay all
        if woken and not any(j.siblings.gather for j in self.state.journals.values()):
            self._serve_first()
            self._begin_turn()  # it took time, and what it answered frees its result rows
        work = self.state.boot.mailbox.do_work(self.state.now_ns)
        work += self._complete()
        alone = not work
        self.delivery.flush()  # before clients say anything that would make it stale
        self._answer()
        work += self._receive()
        self._commit()
        work += self.dispatcher.dispatch()
        work += self.delivery.flush()
        if self.intake.put_off:
            self.intake.answer_put_off()
        self._answer()
        self.upkeep.do_work(self.state.now_ns, is_free=not work)
        for session in self.delivery.drained:
            self.consumers.resume(session)
        self.delivery.drained.clear()
        for identity, lives in self.transports.take_gone():
            if (ended := self.state.sessions.by_identity(identity)) is not None:
                self.consumers.close_session(ended, Parting.LOST if lives else Parting.DIED)
        while self.delivery.gone:
            self.consumers.close_session(self.delivery.gone.pop(0), Parting.DIED)
        self.settled = alone and self.transports.drained
        return work

    def _serve_first(self) -> None:
        """Serve the message that woke an idle worker before all else."""
        if self._receive(1):
            if [journal for journal in self.state.journals.values() if journal.has_open_group]:
                self._commit()
            else:
                self.dispatcher.show_memory_entries()
            if self.state.ready:
                self.dispatcher.dispatch()
            self.delivery.flush()
            self._answer()

    def _answer(self) -> None:
        """Answer the publications that are done."""
        if self.intake.answered:
            self.delivery.answer(*self.intake.take_answers())

    def _begin_turn(self) -> None:
        self.state.begin_turn()
        self.intake.begin_turn(self.state.now_ns)
        self.limits.let_in_again(self.state.now_ns)

    def _receive(self, count_max: int = MESSAGES_PER_TURN_MAX) -> int:
        """Take messages of clients, up to one group."""
        taken = size = 0
        limit = self.state.settings.group_bytes_max
        for identity, head, parts in self.transports.receive(count_max):
            taken += 1
            try:
                command = p.decode_client_command(head)
            except msgspec.DecodeError as fault:
                text = f"not a command: {fault}; see docs/protocol.md"
                self.delivery.reply(identity, p.Error(0, InvalidArgument.code, text))
                continue
            if type(command) is p.Publish:
                if len(parts) != 1:
                    text = f"PUBLISH comes with one bundle part, this one came with {len(parts)}"
                    error = p.Error(command.request, InvalidArgument.code, text)
                    self.delivery.reply(identity, error)
                    continue
                size += len(parts[0])
                self._publish(identity, command, parts[0])
                if size >= limit:
                    break
            else:
                proof = self.transports.proof_of(identity) if type(command) is p.Hello else ""
                self.commands.handle(identity, command, self.state.now_ns, proof)
            if taken == count_max:
                break
        taken += self.transports.plain_count
        if self.transports.drained:
            self.state.drained_ns = self.state.now_ns
        return taken

    def _publish(self, identity: bytes, command: p.Publish, part: zmq.Frame | bytes) -> None:
        session = self.state.sessions.by_identity(identity)
        if session is None:
            error = p.Error(command.request, p.Status.NO_SESSION, NO_SESSION_TEXT)
            self.delivery.reply(identity, error)
            return
        session.last_seen_ns = self.state.now_ns
        # Admission takes only producers that this session opened, authorized for their topics.
        self._authorizer.authorize(session.principal, PERMISSIONS[p.Publish], OWN_SESSION)
        publication = Publication(session.number, command.request)
        self.intake.publish(publication, part, self.state.now_wall_ns)

    def _commit(self) -> None:
        if self.cursors.are_due:
            self.cursors.write()
        for journal in self.state.journals.values():
            journal.commit(self.state.now_ns)
            for group in journal.just_written():
                if group.written_entries:
                    self.dispatcher.show(group.written_entries)
                if group.on_written:
                    self.intake.answer(group, group.on_written)
        if self.intake.memory_entries:
            self.dispatcher.show_memory_entries()

    def _complete(self) -> int:
        """Show the frames of groups that became durable, and release their acks."""
        done = 0
        for slot, journal in self.state.journals.items():
            # Asked first: behind a fault the synced position stands still.
            failed = self.state.logs[slot].syncs.fault is not None
            done += self._finish_all(journal)
            if failed:
                repair_failed_sync(self.state, slot)
                done += self._finish_all(journal)
        return done

    def _finish_all(self, journal: Journal) -> int:
        groups = journal.completed()
        for group in groups:
            self._finish(group)
        return len(groups)

    def _finish(self, group: Group) -> None:
        if group.synced_entries:
            self.dispatcher.show(group.synced_entries)
        if group.on_synced:
            self.intake.answer(group, group.on_synced)
        for callback in group.callbacks:
            callback(None)


def main() -> int:
    """Process entry."""
    keep_freed_memory()
    booted = boot()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(1)

    def run() -> None:
        worker = ShardWorker(booted, context)
        booted.freeze_heap()
        if booted.settings.pin:
            booted.pin()
        worker.start()
        worker.run()

    code = booted.exit_code_of(run)
    if not code:
        context.destroy(linger=0)
    return code


if __name__ == "__main__":
    sys.exit(main())
