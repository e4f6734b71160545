"""What each client command does on a shard worker. One method a command; PUBLISH is in intake.py.

A handler answers at once, or leaves a callback with the journal and answers when its record is
durable. Every command passes `authorize` first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import xxhash

from danube_fast.broker import records as r
from danube_fast.broker.admission.layout import ProducerWord
from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.consumer import Consumer, Flow, Parting, SubscriptionKind
from danube_fast.broker.subscription.policy import FailurePolicy, parse_policy
from danube_fast.broker.subscription.subscription import Subscription
from danube_fast.errors import (
    DanubeError,
    Internal,
    InvalidArgument,
    NotFound,
    NotOwner,
    ResourceExhausted,
    Unavailable,
)
from danube_fast.net import protocol as p
from danube_fast.net.greeting import NO_SESSION_TEXT
from danube_fast.net.protocol import Status
from danube_fast.net.session import Session
from danube_fast.security.authorization import Permission, authorize
from danube_fast.workers.shard.deliver.dead_letters import refuse_own_topic
from danube_fast.workers.shard.publish.group import Done
from danube_fast.workers.shard.read.times import offset_at

if TYPE_CHECKING:
    from danube_fast.workers.shard.worker import ShardWorker

__all__ = ["Commands"]

_log = logging.getLogger(__name__)

NAME_BYTES_MAX = 256
FLOWS_MAX = 65_536
FILTERS_MAX = 64
EXTENSION_NS_MAX = 7 * 24 * 3600 * 1_000_000_000
OWN_SESSION = "session"
"""Resource of commands that name only what this session opened before, under `authorize`."""
PERMISSIONS: dict[type, Permission] = {
    p.OpenProducer: Permission.PRODUCE,
    p.Publish: Permission.PRODUCE,
    p.CloseProducer: Permission.PRODUCE,
    p.Subscribe: Permission.CONSUME,
    p.Flow: Permission.CONSUME,
    p.Ack: Permission.CONSUME,
    p.Nack: Permission.CONSUME,
    p.Seek: Permission.CONSUME,
    p.CloseConsumer: Permission.CONSUME,
    p.Extend: Permission.CONSUME,
}
"""What each command needs; the others need only a session."""
SOUGHT = "another consumer moved the subscription by a seek; subscribe again"
PRODUCER_ID_MAX = (1 << 63) - 1
"""Producer ids stay positive as int64, for every language and every kernel."""


def _failure_policy(options: dict[str, Any], partition: Partition) -> FailurePolicy:
    """That of a new subscription. Raises InvalidArgument."""
    policy = parse_policy(options.get("failure_policy") or {})
    refuse_own_topic(policy, partition.topic)
    return policy


def _key_filters(options: dict[str, Any], kind: SubscriptionKind) -> tuple[str, ...]:
    """The globs of a consumer's keys. Raises InvalidArgument."""
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


class Commands:
    """Handlers of one worker."""

    def __init__(self, worker: ShardWorker) -> None:
        self._worker = worker
        self._handlers: dict[type, Callable[[Session, Any], None]] = {
            p.Ping: self._ping,
            p.Bye: self._bye,
            p.OpenProducer: self._open_producer,
            p.CloseProducer: self._close_producer,
            p.Subscribe: self._subscribe,
            p.Flow: self._flow,
            p.Ack: self._ack,
            p.Nack: self._nack,
            p.Seek: self._seek,
            p.CloseConsumer: self._close_consumer,
            p.Extend: self._extend,
        }

    def handle(self, identity: bytes, command: Any) -> None:
        """Run one command of a connection."""
        worker = self._worker
        if isinstance(command, p.Hello):
            answer = worker.greeter.greet(identity, command, worker.state.now_ns)
            worker.delivery.reply(identity, answer)
            return
        request = getattr(command, "request", 0)
        session = worker.state.sessions.by_identity(identity)
        if session is None:
            error = p.Error(request, Status.NO_SESSION, NO_SESSION_TEXT)
            worker.delivery.reply(identity, error)
            return
        session.last_seen_ns = worker.state.now_ns
        handler = self._handlers.get(type(command))
        try:
            if handler is None:
                raise InvalidArgument(
                    "this is the port of a worker, which serves only what is published and consumed; "
                    "connect to the address that `danube-fast serve` prints"
                )
            permission = PERMISSIONS.get(type(command))
            if permission is not None:
                authorize(session.principal, permission, self._resource(session, command))
            handler(session, command)
        except DanubeError as failure:
            self._fail(session, request, failure)
        except Exception as failure:  # one bad request must not end the others' sessions
            _log.exception("%s failed", type(command).__name__)
            text = f"{type(command).__name__} failed: {failure!r}; see the worker's log"
            self._fail(session, request, Internal(text))

    def _resource(self, session: Session, command: Any) -> str:
        """The topic that a command is about, as far as this worker knows it."""
        partition_id = getattr(command, "partition_id", None)
        if partition_id is None:
            consumer = session.consumers.get(getattr(command, "consumer_id", -1))
            if consumer is None:
                return OWN_SESSION
            partition_id = consumer.subscription.partition_id
        partition = self._worker.state.partition(partition_id)
        return partition.topic if partition is not None else f"partition {partition_id}"

    def _fail(self, session: Session, request: int, error: DanubeError) -> None:
        self._worker.delivery.send(session, [p.encode(p.Error(request, error.code, str(error)))])

    def _result(self, session: Session, request: int, value: Any = None) -> None:
        self._worker.delivery.send(session, [p.encode(p.Result(request, value))])

    def _answer_when_durable(
        self, session: Session, request: int, value: Callable[[], Any]
    ) -> Callable[[DanubeError | None], None]:
        """A journal callback that answers the request."""

        def done(error: DanubeError | None) -> None:
            try:
                if error is not None:
                    raise error
                self._result(session, request, value())
            except DanubeError as failure:
                self._fail(session, request, failure)

        return done

    def _partition(self, partition_id: int) -> Partition:
        partition = self._worker.state.partition(partition_id)
        leaving = partition_id in self._worker.moves.departures.goodbyes
        if partition is None or partition.moving or leaving:
            raise NotOwner(f"partition {partition_id} is not here; look the topic up again")
        return partition

    # ------------------------------------------------------------ sessions

    def _ping(self, session: Session, command: p.Ping) -> None:
        for consumer_id, frames, offset in command.taken:
            consumer = session.consumers.get(consumer_id)
            if consumer is not None:
                consumer.report(frames, offset)
        self._worker.delivery.send(session, [p.encode(p.Pong(command.request))])

    def _bye(self, session: Session, command: p.Bye) -> None:
        self._result(session, command.request)
        self._worker.close_session(session, Parting.CLOSED)

    # ------------------------------------------------------------ producers

    def _open_producer(self, session: Session, command: p.OpenProducer) -> None:
        if command.partition_id not in self._worker.state.catalog.by_id:
            self._worker.forwarder.open_producer(session, command)
            return

        def done(opened: dict[str, int] | None, error: DanubeError | None) -> None:
            if error is not None:
                self._fail(session, command.request, error)
            else:
                self._result(session, command.request, opened)

        self.register_producer(session.number, command.partition_id, command.name, done)

    def register_producer(
        self,
        session: int,
        partition_id: int,
        name: str,
        done: Callable[[dict[str, int] | None, DanubeError | None], None],
    ) -> None:
        """Give a producer its id and next epoch; `done` when that is durable."""
        worker = self._worker
        partition = self._partition(partition_id)
        if not 0 < len(name.encode()) <= NAME_BYTES_MAX:
            raise InvalidArgument(f"a producer name has 1 to {NAME_BYTES_MAX} bytes")
        producer_id = xxhash.xxh64_intdigest(name.encode()) & PRODUCER_ID_MAX or 1
        while partition.producer_names.get(producer_id, name) != name:
            producer_id = (producer_id + 1) & PRODUCER_ID_MAX or 1
        if partition.logged:
            worker.state.journals[partition.log_slot].check_takes()
        tables = worker.state.catalog.tables
        slot = tables.find_producer(partition_id, producer_id)
        worker.limits.check_producer(partition, producer_id)
        epoch = int(tables.producers[slot, ProducerWord.EPOCH]) + 1 if slot >= 0 else 1
        slot = worker.state.catalog.open_producer(partition, producer_id, name, epoch)
        tables.producers[slot, ProducerWord.SESSION] = session
        tables.producers[slot, ProducerWord.LAST_USED_NS] = worker.state.now_wall_ns

        def durable(error: DanubeError | None) -> None:
            if error is not None:
                done(None, error)
                return
            next_sequence = int(tables.producers[slot, ProducerWord.NEXT_SEQUENCE])
            opened = {"producer_id": producer_id, "producer_epoch": epoch}
            done({**opened, "next_sequence": next_sequence}, None)

        worker.state.journals[partition.log_slot].record(
            r.ProducerOpened(partition_id, producer_id, name, epoch), durable
        )

    def _close_producer(self, session: Session, command: p.CloseProducer) -> None:
        tables = self._worker.state.catalog.tables
        slot = tables.find_producer(command.partition_id, command.producer_id)
        if slot >= 0 and tables.producers[slot, ProducerWord.SESSION] == session.number:
            tables.producers[slot, ProducerWord.SESSION] = -1
        self._result(session, command.request)

    # ------------------------------------------------------------ consumers

    def _subscribe(self, session: Session, command: p.Subscribe) -> None:
        worker = self._worker
        partition = self._partition(command.partition_id)
        try:
            kind = SubscriptionKind(command.type)
        except ValueError:
            raise InvalidArgument(
                f"subscription type {command.type!r} is none of {', '.join(SubscriptionKind)}"
            ) from None
        filters = _key_filters(command.options, kind)
        policy = _failure_policy(command.options, partition)
        place = self._place(partition, command.position)
        old = session.consumers.get(command.consumer_id)
        if old is not None:
            worker.detach(session, old)
        if kind is SubscriptionKind.READER:
            sub, created = partition.new_reader(place), False
        else:
            if not 0 < len(command.subscription.encode()) <= NAME_BYTES_MAX:
                raise InvalidArgument(f"a subscription name has 1 to {NAME_BYTES_MAX} bytes")
            worker.limits.check_subscription(partition, command.subscription, session)
            sub, created = partition.subscribe(command.subscription, kind, place)
            worker.limits.equip(partition, sub)
            worker.limits.reap_holder(sub, session)
        skips = not sub.tracks and kind is not SubscriptionKind.READER and not sub.consumers
        if skips and worker.state.now_ns >= partition.resumes_until_ns:
            sub.start_over(max(sub.cursor, partition.position("latest")))
        consumer = self._new_consumer(session, command, sub, filters)
        sub.attach(consumer)
        session.consumers[command.consumer_id] = consumer
        session.holds += 1
        start = sub.ledger.first_waiting()
        start = sub.next_offset if start is None else min(start, sub.next_offset)

        def subscribed() -> dict[str, int]:
            worker.state.mark_ready(partition)
            return {
                "next_offset": start,
                "end_offset": partition.visible,
                "first_offset": partition.first_offset,
                "ack_timeout_ms": sub.policy.ack_timeout_ms if sub.tracks else 0,
            }

        answer = self._answer_when_durable(session, command.request, subscribed)

        def recorded(error: DanubeError | None) -> None:
            sub.recorded = sub.recorded or error is None
            if error is not None and session.consumers.get(command.consumer_id) is consumer:
                worker.detach(session, consumer)
            answer(error)

        journal = worker.state.journals[partition.log_slot]
        if created:
            sub.recorded = False
            record = r.SubscriptionCreated(
                partition.partition_id, sub.name, sub.kind.value, sub.cursor
            )
            if policy == sub.policy:
                journal.record(record, recorded)
            else:
                sub.policy = policy
                journal.record(record)
                checked = self._letters_checked(partition, sub, recorded)
                journal.record(r.PolicySet(partition.partition_id, sub.name, policy), checked)
        elif not sub.recorded:
            journal.when_durable(recorded)
        else:
            answer(None)
            worker.gaps.tell_untold(partition, consumer)

    def _new_consumer(
        self, session: Session, command: p.Subscribe, sub: Subscription, filters: tuple[str, ...]
    ) -> Consumer:
        flow = self._flow_of(session, command.flow_id)
        name = (command.consumer_name or session.client_name)[:NAME_BYTES_MAX]
        reports = bool(command.options.get("reports_taken"))
        number = command.consumer_id
        return Consumer(sub, session.number, number, flow, name, filters, reports=reports)

    def _letters_checked(self, partition: Partition, sub: Subscription, done: Done) -> Done:
        """What to call when a new subscription is durable: it goes on to `done` when the coordinator has said
        whether its dead-letter topic will do; the subscription is deleted if not."""
        worker = self._worker

        def told(refusal: DanubeError | None) -> None:
            if refusal is None or partition.subscriptions.get(sub.name) is not sub:
                done(refusal)
                return
            worker.operations.drop_subscription(partition, sub, refusal, lambda _: done(refusal))

        def recorded(error: DanubeError | None) -> None:
            if error is not None:
                done(error)
            else:
                worker.dead_letters.check(sub.policy, told)

        return recorded

    def _place(self, partition: Partition, wanted: str | int | dict[str, int]) -> str | int:
        """A position without a time. Raises InvalidArgument."""
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
        worker = self._worker
        time_ns = value if kind == "time_ns" else worker.state.now_wall_ns - value
        return offset_at(partition, worker.state.logs[partition.log_slot], time_ns)

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
        by_id = self._worker.state.catalog.by_id
        for consumer in flow.users:
            sub = consumer.subscription
            partition = by_id.get(sub.partition_id)
            # of ten thousand topics of one consumer few have something to hand out
            if partition is not None and (
                sub.next_offset < partition.visible or sub.ledger.waiting
            ):
                self._worker.state.mark_ready(partition)

    def _ack(self, session: Session, command: p.Ack) -> None:
        worker = self._worker
        for consumer_id, pairs in command.entries:
            consumer = session.consumers.get(consumer_id)
            if consumer is None:
                continue
            sub = consumer.subscription
            sub.ack(consumer, pairs)
            partition = worker.state.partition(sub.partition_id)
            if partition is not None:
                worker.state.mark_cursor(partition)
                if sub.router is not None and sub.router.is_unblocked:
                    worker.state.mark_ready(partition)
        if command.request:
            self._flush_acks(session, command.request)

    def _flush_acks(self, session: Session, request: int) -> None:
        """Answer when all cursors that moved are durable, on every log."""
        worker = self._worker
        worker.write_cursors()
        left = len(worker.state.journals)

        def done(error: DanubeError | None) -> None:
            nonlocal left
            left -= 1
            if error is not None and left >= 0:
                left = -1
                self._fail(session, request, error)
            elif left == 0:
                self._result(session, request)

        for journal in worker.state.journals:
            if journal.stuck is not None:
                done(journal.stuck)  # cursors were not even recorded
            else:
                journal.when_durable(done)

    def _nack(self, session: Session, command: p.Nack) -> None:
        worker = self._worker
        delay_ns = command.delay_ms * 1_000_000 if command.delay_ms >= 0 else None
        for consumer_id, pairs in command.entries:
            consumer = session.consumers.get(consumer_id)
            if consumer is None:
                continue
            sub = consumer.subscription
            sub.nack(consumer, pairs, delay_ns, worker.state.now_ns, command.reason)
            worker.touch(sub)

    def _extend(self, session: Session, command: p.Extend) -> None:
        worker = self._worker
        for consumer_id, pairs in command.entries:
            consumer = session.consumers.get(consumer_id)
            if consumer is None:
                continue
            sub = consumer.subscription
            wait_ns = command.milliseconds * 1_000_000 or sub.policy.ack_timeout_ns
            sub.extend(
                consumer, pairs, worker.state.now_ns + min(max(0, wait_ns), EXTENSION_NS_MAX)
            )

    def _seek(self, session: Session, command: p.Seek) -> None:
        consumer = self._consumer(session, command.consumer_id)
        sub = consumer.subscription
        partition = self._partition(sub.partition_id)
        place, end = self._place(partition, command.position), partition.visible
        # one offset for all partitions of a topic lies beyond the end of some
        offset = partition.position(min(place, end) if isinstance(place, int) else place)
        if not command.dry_run:
            sub.seek(offset)
            self._worker.state.mark_cursor(partition)
            self._worker.state.mark_ready(partition)
        # At once: whatever the consumer gets before this is from before the seek, the rest is not.
        self._result(session, command.request, {"next_offset": offset, "end_offset": end})
        if not command.dry_run:
            self._close_others(sub, consumer)

    def _close_others(self, sub: Subscription, seeker: Consumer) -> None:
        """An ack does not tell which delivery it is for, and those from before a seek are void: every
        other consumer that has received anything begins anew. Clients that never heard of seeks do so, too."""
        for consumer in list(sub.consumers):
            session = self._worker.state.sessions.by_number(consumer.session)
            if consumer is not seeker and consumer.announced and session is not None:
                self._worker.close_consumer(
                    session, consumer, code=Unavailable.code, text=SOUGHT, sought=True
                )

    def _close_consumer(self, session: Session, command: p.CloseConsumer) -> None:
        consumer = session.consumers.get(command.consumer_id)
        if consumer is not None:
            if command.taken is not None:
                consumer.report(*command.taken)
            self._worker.detach(session, consumer)
        self._result(session, command.request)
