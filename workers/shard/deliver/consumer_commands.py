"""Commands of consumers: subscribe, grant credit, ack, nack, extend, seek, close."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from danube_fast.broker import records as r
from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.consumer import Consumer, Flow, SubscriptionKind
from danube_fast.broker.subscription.policy import FailurePolicy, parse_policy
from danube_fast.broker.subscription.subscription import Subscription
from danube_fast.clock import MILLISECOND_NS, SECOND_NS
from danube_fast.countdown import Done
from danube_fast.errors import (
    DanubeError,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from danube_fast.net import protocol as p
from danube_fast.net.session import Session
from danube_fast.workers.shard.deliver.consumers import Consumers
from danube_fast.workers.shard.deliver.dead_letters import DeadLetters, refuse_own_topic
from danube_fast.workers.shard.deliver.delivery import Delivery
from danube_fast.workers.shard.deliver.gaps import Gaps
from danube_fast.workers.shard.deliver.subscriptions import Subscriptions
from danube_fast.workers.shard.history.times import HistoryTimes
from danube_fast.workers.shard.keep.cursors import Cursors
from danube_fast.workers.shard.keep.limits import Limits
from danube_fast.workers.shard.publish.producers import NAME_BYTES_MAX
from danube_fast.workers.shard.read.times import offset_at
from danube_fast.workers.shard.state import ShardState

__all__ = ["ConsumerCommands"]

FLOWS_MAX = 65_536
FILTERS_MAX = 64
EXTENSION_NS_MAX = 7 * 24 * 3600 * SECOND_NS
SOUGHT = "another consumer moved the subscription by a seek; subscribe again"


def _key_filters(options: dict[str, Any], kind: SubscriptionKind) -> tuple[str, ...]:
    """Parse the globs of a consumer's keys. Raises InvalidArgument."""
    filters = options.get("key_filters") or []
    if not isinstance(filters, list) or not all(isinstance(item, str) for item in filters):
        raise InvalidArgument("key_filters is a list of globs, such as ['pay*', 'eu-?']")
    if filters and kind is not SubscriptionKind.KEY_SHARED:
        raise InvalidArgument(f"key_filters choose among keys; a {kind} subscription has none")
    if len(filters) > FILTERS_MAX or any(len(item) > NAME_BYTES_MAX for item in filters):
        raise InvalidArgument(
            f"a consumer has at most {FILTERS_MAX} key filters of {NAME_BYTES_MAX} characters"
        )
    return tuple(sorted(set(filters)))


class ConsumerCommands:
    """Run the commands of consumers of one worker."""

    def __init__(
        self, state: ShardState, delivery: Delivery, consumers: Consumers, cursors: Cursors,
        limits: Limits, gaps: Gaps, subscriptions: Subscriptions, dead_letters: DeadLetters,
        times: HistoryTimes, run: Callable[[Session, Any], None],
    ) -> None:  # fmt: skip
        """`run` runs a command that has waited: rights may have changed meanwhile."""
        self._state, self._delivery, self._consumers = state, delivery, consumers
        self._cursors, self._limits, self._gaps = cursors, limits, gaps
        self._subscriptions, self._dead_letters = subscriptions, dead_letters
        self._times, self._run = times, run
        self.handlers: dict[type, Callable[[Session, Any], None]] = {
            p.Subscribe: self._subscribe,
            p.Flow: self._flow,
            p.Ack: self._ack,
            p.Nack: self._nack,
            p.Seek: self._seek,
            p.CloseConsumer: self._close,
            p.Extend: self._extend,
        }

    def _answer(self, session: Session, request: int, value: Callable[[], Any]) -> Done:
        """Return the callback that answers a request with `value()`, or with an error."""

        def done(error: DanubeError | None) -> None:
            self._delivery.respond(session, request, value() if error is None else None, error)

        return done

    @staticmethod
    def _attached(
        session: Session, command: p.Ack | p.Nack | p.Extend
    ) -> Iterator[tuple[Consumer, Subscription, Any]]:
        """Go over the entries of a command whose consumers are still attached."""
        for consumer_id, pairs in command.entries:
            consumer = session.consumers.get(consumer_id)
            if consumer is not None:
                yield consumer, consumer.subscription, pairs

    # ------------------------------------------------------------ coming and going

    def _subscribe(self, session: Session, command: p.Subscribe) -> None:
        partition = self._state.served(command.partition_id)
        try:
            kind = SubscriptionKind(command.type)
        except ValueError:
            raise InvalidArgument(
                f"subscription type {command.type!r} is none of {', '.join(SubscriptionKind)}"
            ) from None
        filters = _key_filters(command.options, kind)
        policy = parse_policy(command.options.get("failure_policy") or {})
        refuse_own_topic(policy, partition.topic)
        if self._asks_history(session, command, partition):
            return
        place = self._place(partition, command.position)
        old = session.consumers.get(command.consumer_id)
        if old is not None:
            self._consumers.detach(session, old)
        self._limits.check_handle(partition, session.number)
        if kind is SubscriptionKind.READER:
            sub, created = partition.new_reader(place), False
        else:
            if not 0 < len(command.subscription.encode()) <= NAME_BYTES_MAX:
                raise InvalidArgument(f"a subscription name has 1 to {NAME_BYTES_MAX} bytes")
            self._limits.check_subscription(partition, command.subscription, session)
            sub, created = partition.subscribe(command.subscription, kind, place)
            self._limits.reap_exclusive(sub, session)
        self._limits.equip(partition, sub)
        skips = not sub.tracks and kind is not SubscriptionKind.READER and not sub.consumers
        if skips and self._state.now_ns >= partition.resumes_until_ns:
            sub.start_over(max(sub.cursor, partition.position("latest")))
        consumer = self._new_consumer(session, command, sub, filters)
        sub.attach(consumer)
        session.consumers[command.consumer_id] = consumer
        start = sub.ledger.first_waiting()
        start = sub.next_offset if start is None else min(start, sub.next_offset)

        def subscribed() -> dict[str, int]:
            self._state.mark_ready(partition)
            return {
                "next_offset": start,
                "end_offset": partition.visible,
                "first_offset": partition.first_offset,
                "ack_timeout_ms": sub.policy.ack_timeout_ms if sub.tracks else 0,
            }

        answer = self._answer(session, command.request, subscribed)

        def recorded(error: DanubeError | None) -> None:
            if error is None:
                sub.note_recorded()
            elif session.consumers.get(command.consumer_id) is consumer:
                self._consumers.detach(session, consumer)
            answer(error)

        if created:
            self._record(session, partition, sub, policy, recorded)
        elif not sub.recorded:
            self._state.journals[partition.log_slot].when_durable(recorded)
        else:
            answer(None)
            self._gaps.tell_pending(partition, consumer)

    def _record(
        self, session: Session, partition: Partition, sub: Subscription, policy: FailurePolicy,
        recorded: Callable[[DanubeError | None], None],
    ) -> None:  # fmt: skip
        """Record a new subscription, and its failure policy; `recorded` when both are durable."""
        journal, number = self._state.journals[partition.log_slot], partition.partition_id
        record = r.SubscriptionCreated(number, sub.name, sub.kind.value, sub.cursor)
        if policy == sub.policy:
            journal.record(record, recorded)
            return
        setter = str(session.principal) if self._dead_letters.is_guarded else ""
        sub.set_policy(policy, setter)
        journal.record(record)
        checked = self._check_dead_letter_topic(partition, sub, recorded)
        journal.record(r.PolicySet(number, sub.name, policy, setter), checked)

    def _new_consumer(
        self, session: Session, command: p.Subscribe, sub: Subscription, filters: tuple[str, ...]
    ) -> Consumer:
        flow = self._flow_of(session, command.flow_id)
        name = (command.consumer_name or session.client_name)[:NAME_BYTES_MAX]
        reports = bool(command.options.get("reports_taken"))
        number = command.consumer_id
        return Consumer(sub, session.number, number, flow, name, filters, reports=reports)

    def _check_dead_letter_topic(self, partition: Partition, sub: Subscription, done: Done) -> Done:
        """Return the callback for a new subscription that is durable: it asks the coordinator whether the
        dead-letter topic will do, deletes the subscription if not, and calls `done`."""

        def told(refusal: DanubeError | None) -> None:
            if refusal is None or partition.subscriptions.get(sub.name) is not sub:
                done(refusal)
                return
            self._subscriptions.drop(partition, sub, refusal, lambda _: done(refusal))

        def recorded(error: DanubeError | None) -> None:
            if error is not None:
                done(error)
            else:
                self._dead_letters.check(sub.policy, sub.policy_setter, told)

        return recorded

    def _place(self, partition: Partition, wanted: str | int | dict[str, int]) -> str | int:
        """Resolve a position that names a time or a count. Raises InvalidArgument."""
        if not isinstance(wanted, dict):
            return wanted
        (kind, value), *more = wanted.items() or [("", 0)]
        if more or kind not in ("time_ns", "ago_ns", "last") or not 0 <= value < 1 << 62:
            raise InvalidArgument(
                f"position {wanted!r} has neither time_ns nor ago_ns, from 0 to 2**62 nanoseconds, "
                "nor last, a number of messages"
            )
        if kind == "last":
            return max(partition.first_offset, partition.visible - value)
        time_ns = value if kind == "time_ns" else self._state.now_wall_ns - value
        return offset_at(partition, self._state.logs[partition.log_slot], time_ns)

    def _asks_history(
        self, session: Session, command: p.Subscribe | p.Seek, partition: Partition
    ) -> bool:
        """Whether history has to tell where a position by time is; then the command is run again with the offset."""
        wanted = command.position
        if not isinstance(wanted, dict) or len(wanted) != 1:
            return False
        ((kind, value),) = wanted.items()
        if kind not in ("time_ns", "ago_ns"):
            return False
        time_ns = value if kind == "time_ns" else self._state.now_wall_ns - value
        if not self._times.may_hold(partition, time_ns):
            return False
        number = session.number

        def found(offset: int, error: DanubeError | None) -> None:
            living = self._state.sessions.by_number(number)
            if living is None:
                return
            try:
                if error is not None:
                    raise error
                self._run(living, msgspec.structs.replace(command, position=offset))
            except DanubeError as fault:
                self._delivery.respond(living, command.request, None, fault)

        self._times.find(partition, time_ns, found)
        return True

    @staticmethod
    def _flow_of(session: Session, flow_id: int) -> Flow:
        flow: Flow | None = session.flows.get(flow_id)
        if flow is None:
            if len(session.flows) >= FLOWS_MAX:
                raise ResourceExhausted(f"a session has at most {FLOWS_MAX} flows; share them")
            flow = session.flows[flow_id] = Flow()
            flow.paused = bool(session.outbox)
        return flow

    def _consumer(self, session: Session, consumer_id: int) -> Consumer:
        consumer: Consumer | None = session.consumers.get(consumer_id)
        if consumer is None:
            raise NotFound(f"consumer {consumer_id} is not attached on this session; subscribe")
        return consumer

    def _flow(self, session: Session, command: p.Flow) -> None:
        flow = self._flow_of(session, command.flow_id)
        was_willing = flow.willing
        flow.grant(command.byte_count, command.message_count)
        if was_willing and not flow.ran_out:
            return
        flow.ran_out = False
        by_id = self._state.catalog.by_id
        for consumer in flow.users:
            sub = consumer.subscription
            partition = by_id.get(sub.partition_id)
            # of ten thousand topics of one consumer few have messages to deliver
            if partition is not None and (
                sub.next_offset < partition.visible or sub.ledger.waiting
            ):
                self._state.mark_ready(partition)

    def _ack(self, session: Session, command: p.Ack) -> None:
        for consumer, sub, pairs in self._attached(session, command):
            sub.ack(consumer, pairs)
            partition = self._state.partition(sub.partition_id)
            if partition is not None:
                self._state.mark_cursor(partition)
                if sub.router is not None and sub.router.is_unblocked:
                    self._state.mark_ready(partition)
        if command.request:  # answered when all cursors that moved are durable, on every log
            answer = self._answer(session, command.request, lambda: None)
            self._cursors.flush(self._state.journals, answer)

    def _nack(self, session: Session, command: p.Nack) -> None:
        delay_ns = command.delay_ms * MILLISECOND_NS if command.delay_ms >= 0 else None
        for consumer, sub, pairs in self._attached(session, command):
            sub.nack(consumer, pairs, delay_ns, self._state.now_ns, command.reason)
            self._consumers.touch(sub)

    def _extend(self, session: Session, command: p.Extend) -> None:
        for consumer, sub, pairs in self._attached(session, command):
            wait_ns = command.milliseconds * MILLISECOND_NS or sub.policy.ack_timeout_ns
            sub.extend(consumer, pairs, self._state.now_ns + min(max(0, wait_ns), EXTENSION_NS_MAX))

    def _seek(self, session: Session, command: p.Seek) -> None:
        consumer = self._consumer(session, command.consumer_id)
        sub = consumer.subscription
        partition = self._state.served(sub.partition_id)
        if self._asks_history(session, command, partition):
            return
        place, end = self._place(partition, command.position), partition.visible
        # one offset for all partitions of a topic lies beyond the end of some
        offset = partition.position(min(place, end) if isinstance(place, int) else place)
        if not command.dry_run:
            sub.seek(offset)
            partition.check_ages_at(0)  # it may have gone to where they are not known
            self._state.mark_cursor(partition)
            self._state.mark_ready(partition)
        # At once: messages before this answer are from before the seek, the others are not.
        self._delivery.result(session, command.request, {"next_offset": offset, "end_offset": end})
        if not command.dry_run:
            self._close_others(sub, consumer)

    def _close_others(self, sub: Subscription, seeker: Consumer) -> None:
        """Close every other consumer that has received anything, so that it begins anew: an ack does not tell
        which delivery it is for, and acks from before a seek are void."""
        for consumer in list(sub.consumers):
            session = self._state.sessions.by_number(consumer.session)
            if consumer is not seeker and consumer.announced and session is not None:
                detail = {"code": Unavailable.code, "text": SOUGHT, "sought": True}
                self._consumers.close(session, consumer, **detail)

    def _close(self, session: Session, command: p.CloseConsumer) -> None:
        consumer = session.consumers.get(command.consumer_id)
        if consumer is not None:
            if command.taken is not None:
                consumer.report(*command.taken)
            self._consumers.detach(session, consumer)
            self._limits.namespaces.note_closed()
        self._delivery.result(session, command.request)
