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

import msgspec
import zmq

from danube_fast.broker import records as r
from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.consumer import (
    UNREPORTED_MESSAGES,
    Consumer,
    Deliver,
    Gap,
    Parting,
    Stored,
    SubscriptionKind,
)
from danube_fast.broker.subscription.fairness import dispatch_fairly
from danube_fast.broker.subscription.subscription import Subscription
from danube_fast.errors import DanubeError, InvalidArgument
from danube_fast.net import protocol as p
from danube_fast.net.allocation import keep_freed_memory
from danube_fast.net.greeting import NO_SESSION_TEXT, Greeter, bundle_bytes_max
from danube_fast.net.session import Session
from danube_fast.ring.control import ProcessState
from danube_fast.security.authorization import authorize
from danube_fast.wal.log import Log
from danube_fast.workers.process.boot import Boot, boot
from danube_fast.workers.process.outside import Outside
from danube_fast.workers.process.sleeper import Sleeper
from danube_fast.workers.reports.quota import WorkerQuota
from danube_fast.workers.shard.commands import OWN_SESSION, PERMISSIONS, Commands
from danube_fast.workers.shard.deliver.dead_letters import DeadLetters
from danube_fast.workers.shard.deliver.delivery import Delivery
from danube_fast.workers.shard.deliver.gaps import Gaps
from danube_fast.workers.shard.deliver.tails import Tails
from danube_fast.workers.shard.doors import Doors
from danube_fast.workers.shard.keep.limits import Limits
from danube_fast.workers.shard.keep.retention import Retention
from danube_fast.workers.shard.move.moves import Moves
from danube_fast.workers.shard.operations import Operations
from danube_fast.workers.shard.publish.forward import Forwarder
from danube_fast.workers.shard.publish.intake import Intake
from danube_fast.workers.shard.publish.journal import SIBLINGS_WAIT_NS, Group, Journal, Publication
from danube_fast.workers.shard.publish.sync_faults import repair_failed_sync
from danube_fast.workers.shard.read.log_reader import LogReader
from danube_fast.workers.shard.rollback import Restored
from danube_fast.workers.shard.state import ShardState
from danube_fast.workers.shard.upkeep import Upkeep

__all__ = ["ShardWorker", "main"]

_log = logging.getLogger(__name__)

MESSAGES_PER_TURN_MAX = 256
BUSY_POLL_MS = 2
GATHERING_POLL_MS = SIBLINGS_WAIT_NS // 1_000_000
READ_AHEAD_BYTES = 1024 * 1024
READ_BYTES_PER_TURN = 4 * 1024 * 1024
"""What one turn reads of the logs for consumers behind the tail, about."""


class ShardWorker:
    """One worker process without its process: `do_work` can be driven by a test."""

    def __init__(
        self, boot: Boot, context: zmq.Context[zmq.Socket[bytes]], outside: Outside | None = None
    ) -> None:
        """`outside`: socket, threads and chance of the machine by default."""
        self._outside = outside or Outside()
        state = self.state = ShardState(boot, self._outside)
        settings = state.settings
        for slot, log in enumerate(boot.config.logs):
            state.logs.append(self._open_log(slot, *log))
        for slot, opened in enumerate(state.logs):
            state.journals.append(Journal(opened, slot, state.tables, settings))
        self.intake = Intake(state.tables, state.journals, bundle_bytes_max(settings))
        self.intake.partitions_by_slot = state.catalog.by_slot
        self.intake.partitions_by_id = state.catalog.by_id
        self.intake.lag_bytes_hopeless = settings.tail_bytes_max // 4 * 3
        self.server = self._outside.make_server(context, settings)
        self.greeter = Greeter(state.sessions, settings, boot.config.host_id, self.close_session)
        self.greeter.limits["unreported_messages"] = UNREPORTED_MESSAGES
        self.doors = Doors(self.server)
        self.delivery = Delivery(self.doors, state.sessions, settings.delivery_bytes_max)
        self.commands = Commands(self)
        self.tails = Tails(settings.tail_bytes_max)
        self.reader = LogReader(state)
        self.settled = False  # the last turn took all that clients had sent and nothing else
        self._read_until = 0
        self._reading: set[int] = set()
        self._unread: dict[int, Partition] = {}
        """Partitions that wait for their turn to read the log."""
        self.retention = Retention(self)
        self.gaps = Gaps(self)
        self.dead_letters = DeadLetters(self)
        self.operations = Operations(self)
        self.moves = Moves(self)
        self.forwarder = Forwarder(self)
        self.intake.forward = self.forwarder.publish
        self.limits = Limits(self)
        self.upkeep = Upkeep(self)
        self.restored = Restored(state, self._outside)
        for slot, older in enumerate(self.restored.older_since_ns):
            self._begin_epoch(
                slot, self.state.catalog.finish_restore(slot, self.state.boot_id, older)
            )
            self.retention.find_first_offsets(slot)
        self.limits.apply_all()
        self.upkeep.foresight.look_at(*self.state.catalog.by_id.values())
        self.quota = WorkerQuota(boot.mailbox, boot.config)

    # ------------------------------------------------------------ life

    def _open_log(self, slot: int, log_id: int, path: str) -> Log:
        """Open and replay one log."""
        log = Log.open(
            path, log_id=log_id, settings=self.state.settings, clock=self.state.clock,
            wake_fd=self.state.boot.mailbox.fileno(), background=self._outside.background,
        )  # fmt: skip
        if log.snapshot is not None:
            self.state.catalog.apply_snapshot(r.decode_snapshot(log.snapshot[1]), slot)
        for block in log.replay():
            self.state.boot.heartbeat()
            self.state.catalog.apply_block(block, slot)
        return log

    def _begin_epoch(self, slot: int, skipped: list[r.PartitionState]) -> None:
        """Write the epoch's record. `skipped`: where partitions stand that skip offsets. Until that
        is durable too, the log's last boot is unknown, so that the next start skips them again."""
        log, journal = self.state.logs[slot], self.state.journals[slot]
        boot_id, now = "" if skipped else self.state.boot_id, self.state.now_wall_ns
        log.begin_epoch(
            [r.encode_record(self.state.catalog.epoch_started(log.epoch + 1, now, boot_id))]
        )
        for state in skipped:
            journal.record(state)
        if skipped:
            journal.record(self.state.catalog.epoch_started(log.epoch, now, self.state.boot_id))
        self.state.journals[slot].refresh()

    def start(self) -> None:
        """Bind, say ready, and ask the coordinator what else is ours."""
        config = self.state.boot.config
        port = self.server.bind(config.tcp_host, config.tcp_port, config.ipc_endpoint)
        self.doors.open_gate(config.ipc_endpoint, self.state.settings)
        self._sleeper = Sleeper(
            self.doors.filenos(),
            self.doors.readable,
            self.state.boot.mailbox,
            self.state.clock,
            self.state.settings.spin_us,
        )
        self.operations.ask_assignments()
        self.state.boot.mailbox.epoch_watchers.append(self.operations.peer_restarted)
        self.state.boot.set_state(ProcessState.READY, port)

    def run(self) -> None:
        """The loop, until a stop is requested."""
        while not self.state.boot.stop_requested:
            if not self.do_work() or self.settled:
                timeout_ms = self.sleep_ms()
                if timeout_ms and self._sleeper.sleep(timeout_ms) and not self.is_gathering:
                    self.serve_first()
        self.stop()

    def sleep_ms(self) -> int:
        """How long to sleep, unless somebody has something to say; 0: there is more to do."""
        if self.state.ready or self.intake.answered or self.upkeep.foresight.is_busy:
            return 0
        if any(journal.gathers and journal.waits for journal in self.state.journals):
            return GATHERING_POLL_MS
        if self.delivery.waiting or self.intake.held:
            return BUSY_POLL_MS
        return self.upkeep.idle_poll_ms

    @property
    def is_gathering(self) -> bool:
        """Many publish one by one: what the first of them alone would get costs all of them."""
        return any(journal.gathers for journal in self.state.journals)

    def serve_first(self) -> None:
        """One message, handed on at once: who wakes an idle worker waits for nothing else."""
        self._begin_turn()
        if self._receive(1):
            if [journal for journal in self.state.journals if journal.has_open_group]:
                self._commit()
            else:
                self.show_memory_entries()
            if self.state.ready:
                self._dispatch()
            self.delivery.flush()

    def stop(self) -> None:
        """Orderly end: everything written is synced, a clean snapshot says so."""
        self.state.boot.set_state(ProcessState.STOPPING)
        self.write_cursors()
        for slot, journal in enumerate(self.state.journals):
            journal.write(self.state.now_ns)
            journal.snapshot = None
            try:
                self.state.logs[slot].close(self.snapshot_state(slot, clean=True))
            except DanubeError as error:
                _log.error("log %d did not end in order: %s", self.state.logs[slot].log_id, error)
        self.restored.last_words()
        self.delivery.flush()
        self.doors.close()
        self.state.boot.set_state(ProcessState.STOPPED)

    # ------------------------------------------------------------ one turn

    def do_work(self) -> int:
        """One bounded turn; the number of things done."""
        self._begin_turn()
        work = self.state.boot.mailbox.do_work(self.state.now_ns)
        work += self._complete()
        alone = not work
        self.delivery.flush()  # before clients say anything that would make it stale
        work += self._receive()
        self._commit()
        work += self._dispatch()
        work += self.delivery.flush()
        self.intake.release_held()
        self.delivery.answer(*self.intake.take_answers())
        work += self.upkeep.do_work(self.state.now_ns)
        for session in self.delivery.drained:
            self.resume(session)
        self.delivery.drained.clear()
        for identity, lives in self.doors.take_gone():
            if (ended := self.state.sessions.by_identity(identity)) is not None:
                self.close_session(ended, Parting.LOST if lives else Parting.DIED)
        while self.delivery.gone:
            self.close_session(self.delivery.gone.pop(0), Parting.DIED)
        self.settled = alone and self.doors.drained
        return work

    def _begin_turn(self) -> None:
        self.state.begin_turn()
        self.intake.begin_turn(self.state.now_ns)
        self.limits.let_in_again(self.state.now_ns)

    def _receive(self, count_max: int = MESSAGES_PER_TURN_MAX) -> int:
        """Take what clients sent, up to one group."""
        taken = size = 0
        limit = self.state.settings.group_bytes_max
        for identity, head, parts in self.doors.receive(count_max):
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
                self.commands.handle(identity, command)
            if taken == count_max:
                break
        if self.doors.drained:
            self.state.drained_ns = self.state.now_ns
        return taken

    def _publish(self, identity: bytes, command: p.Publish, part: zmq.Frame | bytes) -> None:
        session = self.state.sessions.by_identity(identity)
        if session is None:
            error = p.Error(command.request, p.Status.NO_SESSION, NO_SESSION_TEXT)
            self.delivery.reply(identity, error)
            return
        session.last_seen_ns = self.state.now_ns
        # Admission takes only producers that this session opened under `authorize` for their topics.
        authorize(session.principal, PERMISSIONS[p.Publish], OWN_SESSION)
        publication = Publication(session.number, command.request)
        self.intake.publish(publication, part, self.state.now_wall_ns)

    def _commit(self) -> None:
        if self.state.moved_cursors and self.upkeep.cursors_due(self.state.now_ns):
            self.write_cursors()
        for journal in self.state.journals:
            journal.commit(self.state.now_ns)
            for group in journal.just_written():
                self._show(group.written_entries)
                self.intake.answer(group, group.on_written)
        self.show_memory_entries()

    def _complete(self) -> int:
        """Groups that became durable: show their frames, release their acks."""
        done = 0
        for slot, journal in enumerate(self.state.journals):
            # Asked first: behind a fault the synced position stands still.
            failed = self.state.logs[slot].sync_fault is not None
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
        self._show(group.synced_entries)
        self.intake.answer(group, group.on_synced)
        for callback in group.callbacks:
            callback(None)

    def release(self, publication: Publication) -> None:
        """One of the things a publication waited for is done."""
        publication.pending -= 1
        if publication.pending == 0:
            self.intake.answered.append(publication)

    def show_memory_entries(self) -> None:
        """Frames that are kept in memory become visible."""
        entries, self.intake.memory_entries = self.intake.memory_entries, []
        self._show(entries)

    def _show(self, entries: list[tuple[Partition, Stored]]) -> None:
        """Frames became visible to consumers."""
        if not entries:
            return
        effects: list[Deliver] = []
        for partition, stored in entries:
            partition.append(stored)
            if not partition.pass_on(stored, self.state.now_ns, effects):
                self.state.mark_ready(partition)
            if not partition.keeps_memory:
                self.tails.count(partition, stored)
        if effects:
            self.delivery.add(self.state.catalog.by_id, effects)

    def _dispatch(self) -> int:
        """Hand out what can be handed out; 1 if some wait for their turn to read the log."""
        if self.state.ready:
            dirty, self.state.ready = self.state.ready, {}
            self._read_until = self.reader.bytes_read + READ_BYTES_PER_TURN
            self._reading.clear()
            effects: list[Deliver] = []
            for partition in dirty.values():
                if partition.policy.message_ttl_ms:
                    self.retention.expire_old(partition)
                mets, again = dispatch_fairly(partition, self._read_log, self.state.now_ns, effects)
                if again:
                    self.state.mark_ready(partition)
                for sub, met in mets:
                    if isinstance(met, Gap):
                        self.gaps.tell(partition, sub, met)
                    else:
                        self.gaps.refuse(sub, met)
            if effects:
                self.delivery.add(self.state.catalog.by_id, effects)
        self.tails.trim()
        if not self._unread:
            return 0
        # Who could not read at all goes before who was cut short.
        unread, self._unread = self._unread, {}
        first = {pid: part for pid, part in unread.items() if pid not in self._reading}
        self.state.ready = {**first, **unread, **self.state.ready}
        return 1

    def _read_log(self, partition: Partition, offset: int) -> list[Stored] | Gap | None:
        """Frames behind the tail; None, and the partition's turn comes again, when enough was read."""
        if self.reader.bytes_read >= self._read_until:
            self._unread[partition.partition_id] = partition
            return None
        self._reading.add(partition.partition_id)
        return self.reader.read(partition, offset, READ_AHEAD_BYTES)

    # ------------------------------------------------------------ shared steps

    def write_cursors(self) -> None:
        """Record every cursor that moved, except in logs that have no room for records."""
        moved, self.state.moved_cursors = self.state.moved_cursors, {}
        for partition in moved.values():
            journal = self.state.journals[partition.log_slot]
            if journal.stuck is not None:
                self.state.mark_cursor(partition)
                continue
            for record in partition.cursor_records():
                journal.record(record)
        self.upkeep.cursors_written(self.state.now_ns)

    def close_consumer(self, session: Session, consumer: Consumer, **detail: object) -> None:
        """Detach a consumer against its will, and say why: `code` and `text`."""
        self.delivery.tell_closed(session, consumer, detail)
        self.detach(session, consumer, Parting.LOST)

    def detach(self, session: Session, consumer: Consumer, how: Parting = Parting.CLOSED) -> None:
        """A consumer leaves; what it held may go to others."""
        sub = consumer.subscription
        sub.detach(consumer, how)
        self.touch(sub)
        if session.consumers.pop(consumer.consumer_id, None) is not None:
            session.holds -= 1
        partition = self.state.partition(sub.partition_id)
        if partition is not None:
            if sub.kind is SubscriptionKind.READER and sub in partition.readers:
                partition.readers.remove(sub)
            self.state.mark_ready(partition)

    def touch(self, sub: Subscription) -> None:
        """A subscription may have something to hand out, to record or to publish."""
        partition = self.state.partition(sub.partition_id)
        if partition is not None:
            self.state.mark_ready(partition)
            if sub.cursor_dirty:
                self.state.mark_cursor(partition)
            if sub.poisoned:
                self.dead_letters.take(sub)

    def forget_partition(self, partition: Partition) -> None:
        """A partition was removed: nothing of it is kept."""
        self.intake.forget(partition)
        for pending in (self.state.ready, self._unread, self.state.moved_cursors):
            pending.pop(partition.partition_id, None)
        self.gaps.forget(partition.partition_id)
        self.retention.forget(partition)
        self.tails.empty(partition)

    def resume(self, session: Session) -> None:
        """A session takes messages again."""
        for flow in session.flows.values():
            for consumer in flow.users:
                partition = self.state.partition(consumer.subscription.partition_id)
                if partition is not None:
                    self.state.mark_ready(partition)

    def close_session(self, session: Session, parting: Parting = Parting.LOST) -> None:
        """A session ends, by default as its client goes on with another: all its consumers leave."""
        for consumer in list(session.consumers.values()):
            self.detach(session, consumer, parting)
        self.delivery.forget(session)
        self.state.sessions.close(session)

    def snapshot_state(self, slot: int, *, clean: bool) -> bytes:
        """State of a log's partitions at its written position."""
        now = self.state.now_wall_ns
        epoch = self.state.catalog.epoch_started(
            self.state.logs[slot].epoch, now, self.state.boot_id, clean=clean
        )
        return r.encode_snapshot(self.state.catalog.snapshot(slot, epoch))


def main() -> int:
    """Process entry."""
    keep_freed_memory()
    booted = boot()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(1)
    try:
        worker = ShardWorker(booted, context)
        booted.settle()
        if booted.settings.pin:
            booted.pin()
        worker.start()
        worker.run()
    except DanubeError as error:
        _log.error("%s", error)
        booted.set_state(ProcessState.FAILED)
        return 1
    context.destroy(linger=0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
