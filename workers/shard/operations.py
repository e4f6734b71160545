"""Operations of administrators on a worker's partitions and subscriptions, by way of the coordinator."""

from __future__ import annotations

from danube_fast.broker import messages as m
from danube_fast.broker import records as r
from danube_fast.broker.admission.layout import PartitionWord
from danube_fast.broker.answers import ConsumerCounts, PartitionCounts, SubscriptionCounts
from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.policy import FailurePolicy, parse_policy
from danube_fast.broker.subscription.subscription import Subscription
from danube_fast.countdown import Countdown, Done
from danube_fast.errors import DanubeError, NotFound, Unavailable
from danube_fast.workers.process.mailbox import Request
from danube_fast.workers.reports.clients import client_page
from danube_fast.workers.shard.deliver.consumers import Consumers
from danube_fast.workers.shard.deliver.dead_letters import DeadLetters, refuse_own_topic
from danube_fast.workers.shard.deliver.gaps import Gaps
from danube_fast.workers.shard.deliver.subscriptions import Subscriptions
from danube_fast.workers.shard.read.times import lag_seconds
from danube_fast.workers.shard.state import ShardState

__all__ = ["Operations"]


class Operations:
    """Describe and change the partitions and subscriptions of one worker."""

    def __init__(
        self, state: ShardState, consumers: Consumers, subscriptions: Subscriptions, gaps: Gaps,
        dead_letters: DeadLetters,
    ) -> None:  # fmt: skip
        self._state, self._consumers, self._subscriptions = state, consumers, subscriptions
        self._gaps, self._dead_letters = gaps, dead_letters
        mailbox = state.boot.mailbox
        mailbox.serve(m.PartitionStats, self._partition_stats)
        mailbox.serve(m.ListSubscriptions, self._list_subscriptions)
        mailbox.serve(m.DeleteSubscription, self._delete_subscription)
        mailbox.serve(m.SetFailurePolicy, self._set_failure_policy)
        mailbox.serve(m.ListClients, self._clients)

    def _wanted(self, ids: list[int] | None) -> list[Partition]:
        by_id = self._state.catalog.by_id
        if ids is None:
            return list(by_id.values())
        return [by_id[partition_id] for partition_id in ids if partition_id in by_id]

    def _changeable(self, ids: list[int]) -> list[Partition]:
        """Find partitions to change. Raises Unavailable if one moves: its new log would not know of the change."""
        found = self._wanted(ids)
        for partition in found:
            if partition.moving:
                raise Unavailable(f"{partition.topic} is just being moved; try again")
        return found

    def _partition_stats(self, request: Request[m.PartitionStats]) -> None:
        wanted = self._wanted(request.message.partition_ids)
        request.reply([self._stats(partition) for partition in wanted])

    def _stats(self, partition: Partition) -> PartitionCounts:
        row = self._state.tables.partitions[partition.slot]
        return PartitionCounts(
            partition_id=partition.partition_id,
            topic=partition.topic,
            dispatch=partition.assigned.dispatch,
            durability=partition.assigned.durability,
            log_id=self._state.logs[partition.log_slot].log_id,
            first_offset=partition.first_offset,
            end_offset=partition.visible,
            next_offset=int(row[PartitionWord.NEXT_OFFSET]),
            messages_in=partition.message_count,
            bytes_in=partition.byte_count,
            producers=len(partition.producer_names),
            subscriptions=[self._counts(partition, s) for s in partition.subscriptions.values()],
            readers=len(partition.readers),
            refusal=partition.refusal,
        )

    def _counts(self, partition: Partition, sub: Subscription) -> SubscriptionCounts:
        ledger = sub.ledger
        gaps, last_gap = self._gaps.of(partition, sub)
        return SubscriptionCounts(
            subscription=sub.name,
            type=sub.kind.value,
            cursor=sub.cursor,
            lag_messages=max(0, partition.visible - sub.cursor - ledger.settled_ahead),
            lag_seconds=lag_seconds(self._state, partition, sub),
            unacked=ledger.unacked,
            waiting_redelivery=ledger.waiting,
            delayed=ledger.delayed,
            blocked=ledger.blocked,
            redelivered=sub.redelivered_count,
            dropped=sub.dropped_count,
            dead_letters=sub.dead_letter_count,
            dead_letter_fault=self._dead_letters.fault_of(sub),
            skipped=sub.router.skipped_count if sub.router is not None else 0,
            lost=sub.lost_count,
            expired=sub.expired_count,
            gaps=gaps,
            last_gap=last_gap,
            failure_policy=sub.policy,
            policy_setter=sub.policy_setter,
            consumers=[
                ConsumerCounts(
                    name=each.name,
                    session=each.session,
                    unacked=each.unacked,
                    byte_credit=each.flow.byte_credit,
                    message_credit=each.flow.message_credit,
                )
                for each in sub.consumers
            ],
        )

    def _list_subscriptions(self, request: Request[m.ListSubscriptions]) -> None:
        wanted = self._wanted(request.message.partition_ids)
        request.reply([self._counts(p, sub) for p in wanted for sub in p.subscriptions.values()])

    def _clients(self, request: Request[m.ListClients]) -> None:
        state, asked = self._state, request.message
        request.reply(client_page(state.sessions, asked.after, asked.limit, state.now_ns, state))

    def _set_failure_policy(self, request: Request[m.SetFailurePolicy]) -> None:
        asked = request.message
        name = asked.subscription
        found = [p for p in self._changeable(asked.partition_ids) if name in p.subscriptions]
        changed: list[FailurePolicy] = []

        def change(partition: Partition, sub: Subscription, done: Done) -> None:
            policy = parse_policy(asked.values, sub.policy)
            refuse_own_topic(policy, partition.topic)
            # a change of other fields lends no right to a topic that someone else has chosen
            names_topic = "dead_letter_topic" in asked.values
            setter = asked.setter if names_topic else sub.policy_setter

            def recorded(error: DanubeError | None) -> None:
                if error is None:
                    sub.set_policy(policy, setter)
                    self._consumers.touch(sub)
                    changed.append(policy)
                done(error)

            record = r.PolicySet(partition.partition_id, name, policy, setter)
            self._state.record(partition, record, recorded)

        with Countdown(request.when_done(changed)) as countdown:
            for partition in found:
                change(partition, partition.subscriptions[name], countdown.add())

    def _delete_subscription(self, request: Request[m.DeleteSubscription]) -> None:
        name = request.message.subscription
        wanted = self._changeable(request.message.partition_ids)
        found = [partition for partition in wanted if name in partition.subscriptions]
        with Countdown(request.when_done(m.Deleted(len(found)))) as countdown:
            for partition in found:
                sub = partition.subscriptions[name]
                cause = NotFound(f"subscription {name!r} was deleted")
                self._subscriptions.drop(partition, sub, cause, countdown.add())
