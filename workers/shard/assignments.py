"""Assignments of partitions to this worker: sent by the coordinator, asked for after a restart of either."""

from __future__ import annotations

import logging

import msgspec

from danube_fast.broker import messages as m
from danube_fast.broker import records as r
from danube_fast.broker.subscription.consumer import SubscriptionKind
from danube_fast.broker.subscription.policy import FailurePolicy
from danube_fast.clock import MILLISECOND_NS
from danube_fast.countdown import Countdown, Done
from danube_fast.errors import DanubeError, DataLoss, TopicDeleted, Unavailable
from danube_fast.roles import COORDINATOR
from danube_fast.workers.process.mailbox import Reply, Request
from danube_fast.workers.shard.deliver.consumers import Consumers
from danube_fast.workers.shard.job import PeriodicJob
from danube_fast.workers.shard.move.arrival import Arrivals
from danube_fast.workers.shard.move.departure import Departures
from danube_fast.workers.shard.move.moves import Moves
from danube_fast.workers.shard.publish.durability import DurabilityChanges
from danube_fast.workers.shard.publish.intake import Intake
from danube_fast.workers.shard.rollback import Restored
from danube_fast.workers.shard.state import ShardState

__all__ = ["Assignments"]

_log = logging.getLogger(__name__)

TIMEOUT_MS = 10_000


def _ignore(error: DanubeError | None) -> None:
    """Report to no caller: the coordinator was asked, and does not wait."""


class Assignments(PeriodicJob):
    """Take over and give up partitions of one worker."""

    interval_ns = 250 * MILLISECOND_NS

    def __init__(
        self, state: ShardState, restored: Restored, intake: Intake, consumers: Consumers,
        durability: DurabilityChanges, moves: Moves, arrivals: Arrivals, departures: Departures,
    ) -> None:  # fmt: skip
        self._state, self._restored, self._intake = state, restored, intake
        self._consumers, self._durability, self._moves = consumers, durability, moves
        self._arrivals, self._departures = arrivals, departures
        self.is_missing = False
        """Whether the coordinator could not be asked, and is asked again."""
        self._unrecorded: set[int] = set()
        """Partitions whose assignment is not durable yet."""
        state.boot.mailbox.serve(m.Assign, self._assign)
        state.boot.mailbox.serve(m.Unassign, self._unassign)
        state.boot.mailbox.epoch_watchers.append(self._peer_restarted)

    def run(self, now_ns: int) -> None:
        """Ask again if the last answer is missing."""
        if self.is_missing:
            self.ask()

    def _peer_restarted(self, peer: int, epoch: int) -> None:
        """Ask again if the coordinator is new, and give up moves for the one before."""
        if peer == COORDINATOR:
            self._arrivals.give_up_all()
            self._departures.give_up_all()
            self.ask()

    def ask(self) -> None:
        """Ask the coordinator which partitions live in our logs; known ones are served meanwhile."""
        log_ids = [log.log_id for log in self._state.logs.values()]
        self.is_missing = False
        # the answer does not speak of partitions that begin to move after the question
        undecided = self._moves.undecided()

        def got(reply: Reply) -> None:
            if reply.error is not None:
                _log.info("no assignments yet, asking again: %s", reply.error)
                self.is_missing = True
                return
            told: m.Assignments = reply.value
            self._restored.note_revision(told.revision, set(self._state.logs))
            for entry in told.partitions:
                if entry.partition_id in undecided:
                    self._moves.decide(undecided[entry.partition_id], entry)
                self._take(entry)
            self._drop(told.deleted)
            for partition_id in told.elsewhere:
                self._moves.decide_elsewhere(undecided[partition_id])
            self._report_unknown({entry.partition_id for entry in told.partitions})

        question = m.FindAssignments(log_ids, list(undecided), self._restored.report())
        self._state.boot.mailbox.call(COORDINATOR, question, on_reply=got, timeout_ms=TIMEOUT_MS)

    def _drop(self, partition_ids: list[int]) -> None:
        """Remove partitions that were deleted while this worker was away."""
        mailbox = self._state.boot.mailbox
        for partition_id in partition_ids:

            def dropped(error: DanubeError | None, partition_id: int = partition_id) -> None:
                if error is None:
                    mailbox.notify(COORDINATOR, m.PartitionsDropped([partition_id]))

            self._remove(partition_id, dropped)

    def _report_unknown(self, assigned: set[int]) -> None:
        """Log partitions that the metadata does not know, as after an old backup: they are kept, not served."""
        for partition_id, partition in self._state.catalog.by_id.items():
            if partition_id not in assigned:
                _log.error(
                    "partition %d (%s) is in log %d, but the metadata does not know it; it is kept "
                    "and not served: restore the metadata that belongs to this data directory",
                    partition_id,
                    partition.topic,
                    self._state.logs[partition.log_slot].log_id,
                )

    def _take(self, entry: m.Assignment, done: Done = _ignore) -> bool:
        """Enter one assignment; True if it needs a record, and `done` will be called."""
        slot = {log.log_id: slot for slot, log in self._state.logs.items()}.get(entry.log_id)
        if slot is None:
            return False
        assigned = r.PartitionAssigned.of(entry)
        known = self._state.partition(assigned.partition_id)
        if known is not None and not self._moves.assigned(known, entry):
            done(Unavailable(f"{assigned.topic} is being moved just now; try again"))
            return True
        if known is not None and known.assigned.incarnation != assigned.incarnation:
            text = (
                f"partition {assigned.partition_id} is {known.topic} in log {entry.log_id} but "
                f"{assigned.topic} in the metadata: the two do not belong together; restore the "
                "metadata of this data directory"
            )
            _log.error("%s", text)
            done(DataLoss(text))
            return True
        if known is None:
            first_offset = self._restored.first_offset(entry, slot)
            assigned = msgspec.structs.replace(assigned, first_offset=first_offset)
        unrecorded = self._unrecorded

        def recorded(error: DanubeError | None) -> None:
            if error is None:
                unrecorded.discard(assigned.partition_id)
            done(error)

        if known is not None and known.assigned == assigned and not known.is_changing:
            if assigned.partition_id not in unrecorded:
                return False
            self._state.journals[slot].when_durable(recorded)
            return True
        if known is not None and (
            known.is_changing or known.assigned.durability != assigned.durability
        ):
            self._durability.begin(known, assigned, recorded)
            return True
        unrecorded.add(assigned.partition_id)
        partition = self._state.catalog.assign(assigned, slot)
        self._state.apply_policy(partition)
        self._state.journals[slot].record(assigned, recorded)
        self._intake.reserve_offsets(partition, urgent=True)
        return True

    def _assign(self, request: Request[m.Assign]) -> None:
        entries = request.message.partitions
        with Countdown(request.when_done()) as countdown:
            for entry in entries:
                entered = countdown.add()
                if not self._take(entry, entered):
                    entered(None)
                self._inherit(entry, countdown)
            self._note_revision(request.message.revision, [entry.partition_id for entry in entries])

    def _inherit(self, entry: m.Assignment, countdown: Countdown) -> None:
        """Make the missing subscriptions of a new partition of a growing topic, at its first message: before
        a producer can publish to it. `countdown` waits until they are durable."""
        partition = self._state.partition(entry.partition_id)
        if partition is None or not entry.subscriptions:
            return
        done = countdown.add()
        journal = self._state.journals[partition.log_slot]
        for inherited in entry.subscriptions:
            name, policy = inherited.subscription, inherited.failure_policy
            if name in partition.subscriptions:
                continue
            sub, _ = partition.subscribe(name, SubscriptionKind(inherited.type), "earliest")
            number = partition.partition_id
            journal.record(r.SubscriptionCreated(number, name, sub.kind.value, sub.cursor))
            if policy != FailurePolicy():
                sub.set_policy(policy, inherited.policy_setter)
                journal.record(r.PolicySet(number, name, policy, inherited.policy_setter))

        def recorded(error: DanubeError | None) -> None:
            for inherited in entry.subscriptions:
                sub = partition.subscriptions.get(inherited.subscription)
                if sub is not None and error is None:
                    sub.note_recorded()
            done(error)

        journal.when_durable(recorded)

    def _note_revision(self, revision: int, partition_ids: list[int]) -> None:
        """Record the revision of the metadata in the logs of these partitions."""
        by_id = self._state.catalog.by_id
        slots = {by_id[number].log_slot for number in partition_ids if number in by_id}
        self._restored.note_revision(revision, slots)

    def _unassign(self, request: Request[m.Unassign]) -> None:
        ids = request.message.partition_ids
        answer = request.when_done()

        def done(error: DanubeError | None) -> None:
            if error is None and ids:
                self._state.boot.mailbox.notify(COORDINATOR, m.PartitionsDropped(ids))
            answer(error)

        self._note_revision(request.message.revision, ids)
        with Countdown(done) as countdown:
            for partition_id in ids:
                self._remove(partition_id, countdown.add())

    def _remove(self, partition_id: int, done: Done) -> None:
        partition = self._state.partition(partition_id)
        if partition is None:
            done(None)
            return
        text = f"topic {partition.topic} was deleted; create it again to use its name"
        for sub in partition.all_subscriptions():
            self._consumers.close_all(sub, TopicDeleted.code, text)
        self._state.catalog.remove(partition_id)
        self._unrecorded.discard(partition_id)
        self._state.forget(partition)
        self._state.record_removal(partition, done)
