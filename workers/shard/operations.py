"""What the coordinator asks of a shard worker over the mailbox, and what the worker asks of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from danube_fast.broker import records as r
from danube_fast.broker.admission.layout import PartitionWord
from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.policy import parse_policy
from danube_fast.broker.subscription.subscription import Subscription
from danube_fast.errors import (
    DanubeError,
    DataLoss,
    InvalidArgument,
    NotFound,
    TopicDeleted,
    Unavailable,
)
from danube_fast.workers.process.boot import COORDINATOR
from danube_fast.workers.process.mailbox import Reply, Request
from danube_fast.workers.reports.clients import client_page
from danube_fast.workers.shard.deliver.dead_letters import refuse_own_topic
from danube_fast.workers.shard.inherit import inherit
from danube_fast.workers.shard.publish.durability import change_durability
from danube_fast.workers.shard.publish.group import Done
from danube_fast.workers.shard.read.positions import Positions

if TYPE_CHECKING:
    from danube_fast.workers.shard.worker import ShardWorker

__all__ = ["Operations"]

_log = logging.getLogger(__name__)

ASSIGNMENTS_TIMEOUT_MS = 10_000


class Operations:
    """Mailbox handlers of one worker."""

    def __init__(self, worker: ShardWorker) -> None:
        self._worker = worker
        self.assignments_missing = False
        """The coordinator could not be asked; upkeep asks again."""
        self.positions = Positions(worker)
        self._unrecorded: set[int] = set()
        """Partitions whose assignment is not durable yet."""
        worker.state.boot.mailbox.handlers.update(
            {
                "assign": self._assign,
                "unassign": self._unassign,
                "partition_stats": self._partition_stats,
                "subscriptions": self._subscriptions,
                "delete_subscription": self._delete_subscription,
                "set_failure_policy": self._set_failure_policy,
                "clients": self._clients,
            }
        )

    # ------------------------------------------------------------ assignments

    def peer_restarted(self, peer: int, epoch: int) -> None:
        """Another process is new: if it is the coordinator, ask it again."""
        if peer == COORDINATOR:
            self._worker.moves.arrivals.give_up_all()
            self._worker.moves.departures.give_up_all()
            self.ask_assignments()

    def ask_assignments(self) -> None:
        """Ask the coordinator which partitions live in our logs; what we know is served anyway."""
        log_ids = [log.log_id for log in self._worker.state.logs]
        self.assignments_missing = False
        moves = self._worker.moves
        # what began to move since then is not meant by the answer
        undecided = moves.undecided()

        def got(reply: Reply) -> None:
            if reply.error is not None:
                _log.info("no assignments yet, asking again: %s", reply.error)
                self.assignments_missing = True
                return
            every = set(range(len(self._worker.state.logs)))
            self._worker.restored.note_revision(reply.value.get("revision", 0), every)
            for entry in reply.value["partitions"]:
                if entry["partition_id"] in undecided:
                    moves.decide(undecided[entry["partition_id"]], entry)
                self._take(entry, None)
            self._drop(reply.value["deleted"])
            for partition_id in reply.value.get("elsewhere", ()):
                moves.decide_elsewhere(undecided[partition_id])
            self._report_unknown({entry["partition_id"] for entry in reply.value["partitions"]})

        self._worker.state.boot.mailbox.call(
            COORDINATOR,
            "assignments",
            {
                "log_ids": log_ids,
                "undecided": list(undecided),
                **self._worker.restored.report(),
            },
            on_reply=got,
            timeout_ms=ASSIGNMENTS_TIMEOUT_MS,
        )

    def _drop(self, partition_ids: list[int]) -> None:
        """Partitions that were deleted while this worker was away."""
        mailbox = self._worker.state.boot.mailbox
        for partition_id in partition_ids:

            def dropped(error: DanubeError | None, partition_id: int = partition_id) -> None:
                if error is None:
                    mailbox.notify(COORDINATOR, "dropped", {"partition_ids": [partition_id]})

            self._remove(partition_id, dropped)

    def _report_unknown(self, assigned: set[int]) -> None:
        """The metadata is behind the log, as after an old backup: keep everything, and say so."""
        for partition_id, partition in self._worker.state.catalog.by_id.items():
            if partition_id not in assigned:
                _log.error(
                    "partition %d (%s) is in log %d, but the metadata does not know it; it is kept "
                    "and not served: restore the metadata that belongs to this data directory",
                    partition_id,
                    partition.topic,
                    self._worker.state.logs[partition.log_slot].log_id,
                )

    def _take(self, entry: dict[str, Any], done: Any) -> bool:
        """Enter one assignment; True if it needed a record."""
        worker = self._worker
        slots = {log.log_id: slot for slot, log in enumerate(worker.state.logs)}
        slot = slots.get(entry["log_id"])
        if slot is None:
            return False
        assigned = r.PartitionAssigned.of(entry)
        known = worker.state.partition(assigned.partition_id)
        if known is not None and not worker.moves.assigned(known, entry):
            if done is not None:
                done(Unavailable(f"{assigned.topic} is being moved just now; try again"))
            return True
        if known is not None and known.assigned.incarnation != assigned.incarnation:
            text = (
                f"partition {assigned.partition_id} is {known.topic} in log {entry['log_id']} but "
                f"{assigned.topic} in the metadata: the two do not belong together; restore the "
                "metadata of this data directory"
            )
            _log.error("%s", text)
            if done is not None:
                done(DataLoss(text))
            return True
        if known is None:
            first_offset = worker.restored.first_offset(entry, slot)
            assigned = msgspec.structs.replace(assigned, first_offset=first_offset)
        unrecorded = self._unrecorded

        def recorded(error: DanubeError | None) -> None:
            if error is None:
                unrecorded.discard(assigned.partition_id)
            if done is not None:
                done(error)

        if known is not None and known.assigned == assigned and not known.switching:
            if assigned.partition_id not in unrecorded:
                return False
            worker.state.journals[slot].when_durable(recorded)
            return True
        if known is not None and (
            known.switching or known.assigned.durability != assigned.durability
        ):
            change_durability(worker, known, assigned, recorded)
            return True
        unrecorded.add(assigned.partition_id)
        partition = worker.state.catalog.assign(assigned, slot)
        worker.limits.apply(partition)
        worker.state.journals[slot].record(assigned, recorded)
        worker.intake.reserve_offsets(partition, urgent=True)
        return True

    def _assign(self, request: Request) -> None:
        """{"partitions": [...]} -> {} when all of them are durable."""
        left = 1
        failed: DanubeError | None = None

        def done(error: DanubeError | None) -> None:
            nonlocal left, failed
            left -= 1
            failed = failed or error
            if left == 0:
                if failed is not None:
                    request.fail(failed)
                else:
                    request.reply({})

        entries = request.arguments["partitions"]
        for entry in entries:
            left += 1
            if not self._take(entry, done):
                left -= 1
            left += inherit(self._worker.state, entry, done)
        self._note_revision(request, [entry["partition_id"] for entry in entries])
        done(None)

    def _note_revision(self, request: Request, partition_ids: list[int]) -> None:
        """Write into the logs of these partitions how new the metadata is that named them."""
        by_id = self._worker.state.catalog.by_id
        slots = {by_id[number].log_slot for number in partition_ids if number in by_id}
        self._worker.restored.note_revision(request.arguments.get("revision", 0), slots)

    def _unassign(self, request: Request) -> None:
        """{"partition_ids": [...], "reason": text} -> {} when it is durable."""
        ids = request.arguments["partition_ids"]
        left = len(ids)
        if not ids:
            request.reply({})

        def done(error: DanubeError | None) -> None:
            nonlocal left
            left -= 1
            if error is not None:
                request.fail(error)
            elif left == 0:
                self._worker.state.boot.mailbox.notify(
                    COORDINATOR, "dropped", {"partition_ids": ids}
                )
                request.reply({})

        self._note_revision(request, ids)
        for partition_id in ids:
            self._remove(partition_id, done)

    def _remove(self, partition_id: int, done: Any) -> None:
        worker = self._worker
        partition = worker.state.partition(partition_id)
        if partition is None:
            if done is not None:
                done(None)
            return
        text = f"topic {partition.topic} was deleted; create it again to use its name"
        for sub in partition.all_subscriptions():
            for consumer in list(sub.consumers):
                session = worker.state.sessions.by_number(consumer.session)
                if session is not None:
                    worker.close_consumer(session, consumer, code=TopicDeleted.code, text=text)
        worker.state.catalog.remove(partition_id)
        self._unrecorded.discard(partition_id)
        worker.forget_partition(partition)
        worker.state.journals[partition.log_slot].record(r.PartitionRemoved(partition_id), done)
        worker.state.logs[partition.log_slot].drop_partition(partition_id)

    # ------------------------------------------------------------ answers

    def _wanted(self, request: Request) -> list[Partition]:
        ids = request.arguments.get("partition_ids")
        by_id = self._worker.state.catalog.by_id
        if ids is None:
            return list(by_id.values())
        return [by_id[partition_id] for partition_id in ids if partition_id in by_id]

    def _changeable(self, request: Request) -> list[Partition]:
        """For what the new log of a partition that moves would not know of. Raises Unavailable."""
        found = self._wanted(request)
        for partition in found:
            if partition.moving:
                raise Unavailable(f"{partition.topic} is just being moved; try again")
        return found

    def _partition_stats(self, request: Request) -> None:
        request.reply({"partitions": [self._stats(part) for part in self._wanted(request)]})

    def _stats(self, partition: Partition) -> dict[str, Any]:
        row = self._worker.state.tables.partitions[partition.slot]
        return {
            "partition_id": partition.partition_id,
            "topic": partition.topic,
            "dispatch": partition.assigned.dispatch,
            "durability": partition.assigned.durability,
            "log_id": self._worker.state.logs[partition.log_slot].log_id,
            "first_offset": partition.first_offset,
            "end_offset": partition.visible,
            "next_offset": int(row[PartitionWord.NEXT_OFFSET]),
            "messages_in": partition.message_count,
            "bytes_in": partition.byte_count,
            "producers": len(partition.producer_names),
            "subscriptions": [
                self._describe(partition, sub) for sub in partition.subscriptions.values()
            ],
            "readers": len(partition.readers),
            "refusal": partition.refusal,
        }

    def _describe(self, partition: Partition, sub: Subscription) -> dict[str, Any]:
        ledger = sub.ledger
        return {
            "subscription": sub.name,
            "type": sub.kind.value,
            "cursor": sub.cursor,
            "lag_messages": max(0, partition.visible - sub.cursor - ledger.settled_ahead),
            "lag_seconds": self.positions.lag_seconds(partition, sub),
            "unacked": ledger.held,
            "waiting_redelivery": ledger.waiting,
            "delayed": ledger.delayed,
            "blocked": ledger.blocked,
            "redelivered": sub.redelivered_count,
            "dropped": sub.dropped_count,
            "dead_letters": sub.dead_letter_count,
            "dead_letter_fault": self._worker.dead_letters.fault_of(sub),
            "skipped": sub.router.skipped_count if sub.router is not None else 0,
            "lost": sub.lost_count,
            "expired": sub.expired_count,
            **self._worker.gaps.of(partition, sub),
            "failure_policy": msgspec.to_builtins(sub.policy),
            "consumers": [
                {
                    "name": consumer.name,
                    "session": consumer.session,
                    "unacked": consumer.unacked,
                    "byte_credit": consumer.flow.byte_credit,
                    "message_credit": consumer.flow.message_credit,
                }
                for consumer in sub.consumers
            ],
        }

    def _subscriptions(self, request: Request) -> None:
        entries = [
            {
                "partition_id": partition.partition_id,
                "topic": partition.topic,
                **self._describe(partition, sub),
            }
            for partition in self._wanted(request)
            for sub in partition.subscriptions.values()
        ]
        request.reply({"subscriptions": entries})

    def _clients(self, request: Request) -> None:
        """{"after": session number, "limit"} -> a page of who is connected."""
        state, asked = self._worker.state, request.arguments
        request.reply(
            client_page(state.sessions, asked["after"], asked["limit"], state.now_ns, state)
        )

    def _set_failure_policy(self, request: Request) -> None:
        """{"partition_ids", "subscription", "values"} -> {"failure_policies": [...]} when durable."""
        worker = self._worker
        name = request.arguments["subscription"]
        found = [part for part in self._changeable(request) if name in part.subscriptions]
        changed: list[dict[str, Any]] = []
        if not found:
            request.reply({"failure_policies": []})

        def change(partition: Partition, sub: Subscription) -> None:
            policy = parse_policy(request.arguments["values"], sub.policy)
            refuse_own_topic(policy, partition.topic)

            def done(error: DanubeError | None) -> None:
                if error is not None:
                    request.fail(error)
                    return
                sub.set_policy(policy)
                worker.touch(sub)
                changed.append(msgspec.to_builtins(policy))
                if len(changed) == len(found):
                    request.reply({"failure_policies": changed})

            record = r.PolicySet(partition.partition_id, name, policy)
            worker.state.journals[partition.log_slot].record(record, done)

        try:
            for partition in found:
                change(partition, partition.subscriptions[name])
        except InvalidArgument as error:
            request.fail(error)

    def drop_subscription(
        self,
        partition: Partition,
        sub: Subscription,
        cause: DanubeError,
        done: Done,
    ) -> None:
        """Delete a subscription, whose consumers hear of the cause; `done` when that is durable."""
        worker = self._worker
        for consumer in list(sub.consumers):
            session = worker.state.sessions.by_number(consumer.session)
            if session is not None:
                worker.close_consumer(session, consumer, code=cause.code, text=str(cause))
        partition.forget_subscription(sub.name)
        worker.gaps.forget(partition.partition_id, sub.name)
        record = r.SubscriptionDeleted(partition.partition_id, sub.name)
        worker.state.journals[partition.log_slot].record(record, done)

    def _delete_subscription(self, request: Request) -> None:
        """{"partition_ids", "subscription"} -> {"deleted": n} when durable; consumers are closed."""
        name = request.arguments["subscription"]
        found = [part for part in self._changeable(request) if name in part.subscriptions]
        left = len(found)
        if not left:
            request.reply({"deleted": 0})
            return

        def done(error: DanubeError | None) -> None:
            nonlocal left
            left -= 1
            if error is not None:
                request.fail(error)
            elif left == 0:
                request.reply({"deleted": len(found)})

        for partition in found:
            cause = NotFound(f"subscription {name!r} was deleted")
            self.drop_subscription(partition, partition.subscriptions[name], cause, done)
