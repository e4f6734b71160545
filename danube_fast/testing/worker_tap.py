"""Hears all that a worker reads and sends, and tells the model; says when a promise was broken.

It stands where the worker reads and sends, so it knows the order in which the worker learned things.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from danube_fast.frame.bundle import bundle_entries
from danube_fast.frame.view import FrameView
from danube_fast.net import protocol as p
from danube_fast.testing.attached_model import Attached, Credit, Policy
from danube_fast.testing.loopback import Tap, Wire
from danube_fast.testing.model import Model
from danube_fast.testing.publishing_model import PROBE, Frame, Violation, due_of
from danube_fast.testing.subscription_model import SubscriptionModel

__all__ = ["Session", "WorkerTap"]


@dataclass
class Session:
    """A session as its worker knows it."""

    number: int
    token: bytes
    heard_ns: int
    consumers: dict[int, tuple[SubscriptionModel, Attached]] = field(default_factory=dict)
    flows: dict[int, Credit] = field(default_factory=dict)
    leaving: dict[int, tuple[SubscriptionModel, Attached]] = field(default_factory=dict)
    """Sent away because a partition moves, and still heard."""
    is_gone: bool = False
    is_lagging: bool = False

    def took(self, consumer_id: int, taken: Sequence[int] | None) -> None:
        """Its client said how far the application of a consumer is."""
        if consumer_id in self.consumers and taken is not None:
            sub, consumer = self.consumers[consumer_id]
            sub.suspect(consumer)
            consumer.taken = taken[0], taken[1]

    def close(self, consumer_id: int) -> None:
        """Its client takes a consumer away, if it is there."""
        if consumer_id in self.consumers:
            sub, consumer = self.consumers[consumer_id]
            sub.detach(consumer)
            # behind that: a session without consumers may be silent for longer
            del self.consumers[consumer_id]

    def ranges(
        self, entries: Any, *, last: bool = False
    ) -> Iterator[tuple[SubscriptionModel, Attached, int, int]]:
        """The [low, high) ranges of an ACK, NACK or EXTEND, with whom they concern. `last`: also of
        those that were sent away."""
        known = {**self.leaving, **self.consumers} if last else self.consumers
        for consumer_id, pairs in entries:
            sub, consumer = known.get(consumer_id, (None, None))
            if sub is None or consumer is None:
                continue
            if isinstance(pairs, bytes):
                pairs = list(struct.unpack(f"<{len(pairs) // 8}q", pairs))
            for low, high in zip(pairs[::2], pairs[1::2], strict=True):
                yield sub, consumer, low, high


class _Flush(list[tuple[SubscriptionModel, list[int], tuple[int, int] | None]]):
    """An ACK that wants an answer: what was acked before it."""


class WorkerTap(Tap):
    """Tells the model what one worker reads and sends."""

    def __init__(self, model: Model, index: int) -> None:
        self.model = model
        self.index = index
        self.synced_position: Callable[[int], int] = lambda log_id: 0
        """Up to where a log is durable, as the disk knows."""
        self._sessions: dict[bytes, Session] = {}
        self._by_number: dict[int, Session] = {}
        self._requests: dict[tuple[bytes, int], Any] = {}
        """What a request is about, until it is answered."""
        self._unconfirmed: list[tuple[SubscriptionModel, list[int]]] = []
        self._leaving: list[Session] = []
        """Gone, and still served until the turn ends."""

    # ------------------------------------------------------------ lives

    def died(self, partition_ids: set[int]) -> None:
        """The worker is gone, and all that only it knew: of its partitions, and of subscriptions that were
        here before their partition moved and have no consumer there yet."""
        model = self.model
        for (partition_id, _), sub in model.subscriptions.items():
            if partition_id in partition_ids or sub.tap is self:
                sub.worker_died()
        for partition_id in partition_ids:
            partition = model.partitions[partition_id]
            partition.fenced.clear()
            if partition.durability == "memory":
                partition.may_have_lost()
        self._sessions.clear()
        self._by_number.clear()
        self._requests.clear()
        self._unconfirmed.clear()
        self._leaving.clear()

    def _close(self, session: Session, parting: str) -> None:
        if session.is_gone:
            return
        for sub, consumer in session.consumers.values():
            sub.detach(consumer, parting)
        session.is_gone = True
        session.consumers.clear()

    def is_silent(self, number: int) -> bool:
        """Whether the worker may have given up a session."""
        session = self._by_number.get(number)
        if session is None or session.is_gone:
            return True
        limit = self.model.silence_ns if session.consumers else self.model.idle_silence_ns
        return self.model.clock.now_ns - session.heard_ns > limit

    def end_turn(self) -> None:
        """The worker has closed the sessions that it could not send to."""
        while self._leaving:
            self._close(self._leaving.pop(0), "died")

    # ------------------------------------------------------------ what the worker reads

    def received(self, wire: Wire, head: bytes, parts: list[Any]) -> None:
        """The worker took a command."""
        command = p.decode_client_command(head)
        identity = wire.identity
        self.model.trace.note(f"worker {self.index} < {identity.hex()} {command!r}", head)
        if isinstance(command, p.Hello):
            self._requests[identity, command.request] = command
            return
        session = self._sessions.get(identity)
        if session is None or session.is_gone:
            return
        handler = getattr(self, f"_on_{type(command).__name__.lower()}", None)
        if handler is not None:
            handler(identity, session, command, parts)
        session.heard_ns = self.model.clock.now_ns

    def _on_bye(self, identity: bytes, session: Session, command: p.Bye, parts: Any) -> None:
        self._close(session, "closed")

    def _on_ping(self, identity: bytes, session: Session, command: p.Ping, parts: Any) -> None:
        for consumer_id, *taken in command.taken:
            session.took(consumer_id, taken)

    def _on_openproducer(
        self, identity: bytes, session: Session, command: p.OpenProducer, parts: Any
    ) -> None:
        partition = self.model.partitions.get(command.partition_id)
        epochs = {} if partition is None else partition.epochs
        known = {producer_id: list(told) for producer_id, told in epochs.items()}
        self._requests[identity, command.request] = (command, session, known)

    def _on_publish(
        self, identity: bytes, session: Session, command: p.Publish, parts: Any
    ) -> None:
        frames = []
        for partition_id, start, _ in bundle_entries(parts[0]):
            view = FrameView(parts[0], start)
            payloads = [payload or b"" for payload in view.payloads()]
            keys = view.keys() or [None] * len(payloads)
            frame = Frame(
                partition_id, view.producer_id, view.base_sequence,
                list(zip(payloads, keys, strict=True)), (self.index, session.number),
                payloads[0].startswith(PROBE),
            )  # fmt: skip
            partition = self.model.partitions.get(partition_id)
            if partition is not None:
                partition.try_frame(frame)
            frames.append(frame)
        self._requests[identity, command.request] = frames

    def _on_subscribe(
        self, identity: bytes, session: Session, command: p.Subscribe, parts: Any
    ) -> None:
        session.close(command.consumer_id)
        filters = tuple(command.options.get("key_filters") or ())
        consumer = Attached(session.number, command.consumer_id, filters)
        consumer.reports = bool(command.options.get("reports_taken"))
        consumer.credit = session.flows.setdefault(command.flow_id, Credit())
        consumer.name = f"{command.consumer_name}#{session.number}.{command.consumer_id}"
        consumer.owner = command.consumer_name
        self._requests[identity, command.request] = (command, session, consumer)
        if command.type == "reader":
            return
        sub = self.model.subscriptions.get((command.partition_id, command.subscription))
        if sub is None:
            policy = Policy(**(command.options.get("failure_policy") or {}))
            sub = SubscriptionModel(
                command.partition_id, command.subscription, command.type, 1 << 62, policy,
                self.model.clock, self.is_silent,
            )  # fmt: skip
            self.model.subscriptions[command.partition_id, command.subscription] = sub
            sub.tap = self
        sub.attach(consumer)
        session.consumers[command.consumer_id] = (sub, consumer)

    def _on_flow(self, identity: bytes, session: Session, command: p.Flow, parts: Any) -> None:
        credit = session.flows.setdefault(command.flow_id, Credit())
        credit.grant(command.byte_count, command.message_count)

    def _on_closeconsumer(
        self, identity: bytes, session: Session, command: p.CloseConsumer, parts: Any
    ) -> None:
        session.took(command.consumer_id, command.taken)
        session.leaving.pop(command.consumer_id, None)
        session.close(command.consumer_id)

    def _on_ack(self, identity: bytes, session: Session, command: p.Ack, parts: Any) -> None:
        for sub, consumer, low, high in session.ranges(command.entries, last=True):
            settled = (sub.ack_last if consumer.is_gone else sub.ack)(consumer, low, high)
            self.model.check_owner(sub, consumer, settled)
            self.model.messages_acked += len(settled)
            self._unconfirmed.append((sub, settled))
        if command.request:
            flush = [(sub, settled, sub.sought) for sub, settled in self._unconfirmed]
            self._requests[identity, command.request] = _Flush(flush)

    def _on_nack(self, identity: bytes, session: Session, command: p.Nack, parts: Any) -> None:
        for sub, consumer, low, high in session.ranges(command.entries):
            sub.nack(consumer, low, high, command.delay_ms)

    def _on_extend(self, identity: bytes, session: Session, command: p.Extend, parts: Any) -> None:
        for sub, consumer, low, high in session.ranges(command.entries):
            sub.extend(consumer, low, high, command.milliseconds)

    def _on_seek(self, identity: bytes, session: Session, command: p.Seek, parts: Any) -> None:
        found = session.consumers.get(command.consumer_id)
        if found is not None:
            self._requests[identity, command.request] = (command, *found, session)
            if session.is_lagging:
                found[0].may_have_sought()  # the answer comes late

    # ------------------------------------------------------------ what the worker sends

    def refused(self, identity: bytes, parts: list[Any], *, gone: bool) -> None:
        """The worker could not send a message."""
        session = self._sessions.get(identity)
        if session is None:
            return
        if gone:
            self._leaving.append(session)
            command = p.decode_server_command(parts[0])
            if command == p.Pong(0):  # it was asked whether the connection is there
                self._close(session, "died")
            elif isinstance(command, p.Deliver):
                self._not_sent(session, command, parts)
            else:
                # it was done, though no client hears of it
                self._answered(identity, command, parts)
            return
        session.is_lagging = True
        for sub, _ in session.consumers.values():
            sub.is_lagging = True

    @staticmethod
    def _not_sent(session: Session, command: p.Deliver, parts: list[Any]) -> None:
        ids = iter(command.consumer_ids)
        for bundle in parts[1:]:
            for _, start, _ in bundle_entries(bundle):
                sub, consumer = session.consumers.get(next(ids), (None, None))
                if sub is None or consumer is None:
                    continue
                for offset in FrameView(bundle, start).offsets().tolist():
                    sub.not_sent(consumer, offset)

    def sent(self, wire: Wire, parts: list[bytes]) -> None:
        """The worker sent a message."""
        command = p.decode_server_command(parts[0])
        identity = wire.identity
        data = b"".join(parts)
        self.model.trace.note(f"worker {self.index} > {identity.hex()} {command!r}", data)
        self._answered(identity, command, parts)

    def _answered(self, identity: bytes, command: Any, parts: list[Any]) -> None:
        handler = getattr(self, f"_sent_{type(command).__name__.lower()}", None)
        if handler is not None:
            handler(identity, command, parts)

    def _sent_welcome(self, identity: bytes, command: p.Welcome, parts: Any) -> None:
        hello = self._requests.pop((identity, command.request), None)
        if command.resumed:
            return
        shown = self._by_number.get(hello.session)
        if shown is not None and shown.token == hello.token:
            self._close(shown, "lost")
        if identity in self._sessions:
            self._close(self._sessions[identity], "lost")
        session = Session(command.session, command.token, self.model.clock.now_ns)
        self._sessions[identity] = self._by_number[command.session] = session

    def _sent_pong(self, identity: bytes, command: p.Pong, parts: Any) -> None:
        session = self._sessions.get(identity)
        for _, consumer in session.consumers.values() if session is not None else ():
            consumer.counted = None  # it was silent, and is not dead

    def _sent_error(self, identity: bytes, command: p.Error, parts: Any) -> None:
        if command.code == p.Status.NO_SESSION:
            session = self._sessions.get(identity)
            if session is not None:
                self._close(session, "died")
        about = self._requests.pop((identity, command.request), None)
        if isinstance(about, tuple) and isinstance(about[0], p.Subscribe):
            subscribe, session, consumer = about
            found = session.consumers.get(subscribe.consumer_id)
            if found is not None and found[1] is consumer:
                del session.consumers[subscribe.consumer_id]
                found[0].detach(consumer)

    def _sent_result(self, identity: bytes, command: p.Result, parts: Any) -> None:
        about = self._requests.pop((identity, command.request), None)
        if isinstance(about, _Flush):
            for sub, settled, sought in about:
                sub.confirm_acks(settled, sought)
            return
        if not isinstance(about, tuple):
            return
        asked = about[0]
        if isinstance(asked, p.Subscribe):
            self._subscribed(asked, about[2], command.value)
        elif isinstance(asked, p.OpenProducer):
            partition = self.model.partitions[asked.partition_id]
            opened = command.value
            producer_id, known = opened["producer_id"], about[2]
            partition.open(
                producer_id, opened["producer_epoch"], (self.index, about[1].number),
                known.get(producer_id, []),
            )  # fmt: skip
        elif isinstance(asked, p.Seek):
            _, sub, consumer, session = about
            sub.seek(command.value["next_offset"], None if session.is_lagging else consumer)

    def _sent_consumerevent(self, identity: bytes, command: p.ConsumerEvent, parts: Any) -> None:
        session = self._sessions.get(identity)
        if command.kind == p.EventKind.CLOSED.value and session is not None:
            found = session.consumers.pop(command.consumer_id, None)
            if found is not None and command.detail.get("code") == p.Status.NOT_OWNER:
                session.leaving[command.consumer_id] = found
                found[0].send_away(found[1])
            elif found is not None:
                found[0].detach(found[1], "lost")

    def _subscribed(self, asked: p.Subscribe, consumer: Attached, value: Any) -> None:
        sub = self.model.subscriptions.get((asked.partition_id, asked.subscription))
        if asked.type == "reader" or sub is None:
            return
        if consumer.is_gone:
            return
        if sub.tap is not self:  # the partition has moved here
            self._take_over(sub)
        if sub.start == 1 << 62:
            sub.start = value["next_offset"]
            if asked.partition_id in self.model.letters:
                self.model.letters_unread = sub.start
        sub.confirm(consumer)

    def _take_over(self, sub: SubscriptionModel) -> None:
        """The first consumer of a partition that came from another worker, as far as is known here."""
        here = [
            each for session in self._by_number.values() for _, each in session.consumers.values()
        ]
        mine = [each for each in sub.consumers if any(each is other for other in here)]
        sub.moved()
        sub.tap = self
        sub.is_silent = self.is_silent
        for consumer in mine:
            consumer.is_gone = False
            sub.consumers.append(consumer)

    def _sent_published(self, identity: bytes, command: p.Published, parts: Any) -> None:
        for request, outcome in command.entries:
            frames = self._requests.pop((identity, request), None)
            for place, frame in enumerate(frames or ()):
                at = 2 * place if len(outcome) > 2 * place else 0
                self._outcome(frame, outcome[at], outcome[at + 1])

    def _outcome(self, frame: Frame, status: int, offset: int) -> None:
        partition = self.model.partitions.get(frame.partition_id)
        if partition is None:
            return
        if status in (p.Status.OK, p.Status.DUPLICATE):
            is_duplicate = status == p.Status.DUPLICATE
            partition.accept(frame, offset, is_duplicate=is_duplicate)
            self.model.messages_accepted += len(frame.messages) * (not is_duplicate)
        elif status == 6:
            partition.refuse_as_old(frame)

    def _sent_deliver(self, identity: bytes, command: p.Deliver, parts: Any) -> None:
        session = self._sessions.get(identity)
        ids = iter(command.consumer_ids)
        for bundle in parts[1:]:
            for partition_id, start, _ in bundle_entries(bundle):
                consumer_id = next(ids)
                view = FrameView(bundle, start)
                view.check(stamped=True)
                found = session.consumers.get(consumer_id) if session is not None else None
                self._delivered(session, found, partition_id, view)

    def _delivered(
        self,
        session: Session | None,
        found: tuple[SubscriptionModel, Attached] | None,
        partition_id: int,
        view: FrameView,
    ) -> None:
        partition = self.model.partitions[partition_id]
        payloads = view.payloads()
        keys = view.keys() or [None] * len(payloads)
        counts = view.redelivery_counts()
        attempts = [0] * len(payloads) if counts is None else counts.tolist()
        names = [(view.producer_id, sequence) for sequence in view.sequences().tolist()]
        if (
            partition.durability == "fsync"
            and self.synced_position(view.log_id) <= view.log_position
        ):
            raise Violation(f"partition {partition_id}: {view.base_offset} was shown unsynced")
        offsets = view.offsets().tolist()
        to = f"{found[0].name} {found[1].name}" if found is not None else "nobody known"
        self.model.trace.note(f"  partition {partition_id}: {offsets} {attempts} to {to}")
        if found is not None:
            found[0].charge(found[1], view.frame_bytes, payloads)
        for place, offset in enumerate(offsets):
            payload, key = payloads[place] or b"", keys[place]
            if partition_id in self.model.letters:
                self._letter(view, place)
                continue
            partition.show(offset, payload, key, names[place])
            if found is not None and session is not None:
                sub, consumer = found
                if sub.tap is not self:  # its SUBSCRIBE is answered when that is durable
                    self._take_over(sub)
                self.model.messages_delivered += 1
                sub.due[offset] = due_of(payload)
                sub.deliver(consumer, offset, key, attempts[place], is_late=session.is_lagging)

    def _letter(self, view: FrameView, place: int) -> None:
        """A dead letter was delivered: its message is not owed any more, and must be what it was."""
        attributes = (view.attributes(place, place + 1) or [{}])[0]
        offset = int(attributes["x-original-topic-offset"])
        topic, index = attributes["x-original-topic"], attributes["x-original-partition"]
        for (partition_id, name), sub in self.model.subscriptions.items():
            partition = self.model.partitions[partition_id]
            if name != attributes["x-original-subscription"] or partition.place != (topic, index):
                continue
            stands = partition.by_offset.get(offset)
            payload = view.payloads(place, place + 1)[0] or b""
            if stands is not None and stands[0] != payload:
                raise Violation(f"{sub.label}: the dead letter of {offset} is another message")
            sub.letters.add(offset)
