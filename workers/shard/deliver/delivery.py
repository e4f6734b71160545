"""The outbound half of a worker: effects of the subscriptions become DELIVER messages.

    effects -> per session: pieces (frame or part of one) -> [command, bundle, bundle, ...]

A bundle that came in and goes out whole, to one session, is sent as the very buffer that ZeroMQ
received; everything else is copied into a new bundle. A message that finds the peer's queue full
waits in the session's outbox; until that is empty the session gets no more frames.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.consumer import Consumer, Deliver, Stored
from danube_fast.broker.subscription.subscription import Subscription
from danube_fast.config import Settings
from danube_fast.errors import DanubeError
from danube_fast.frame.bundle import bundle_bytes, sealed_bundle, write_bundle
from danube_fast.frame.split import Cut
from danube_fast.net import protocol
from danube_fast.net.server import PeerGone, WouldBlock
from danube_fast.net.session import Session, Sessions
from danube_fast.workers.shard.transports import Transports

__all__ = ["Delivery"]

OUTBOX_MESSAGES_MAX = 20_000
"""A session whose outbox has so many messages is given up."""
PIECES_MAX = 4096
"""Frames in one DELIVER."""
WHOLE_BUNDLES_MAX = 16
"""Bundle parts in one DELIVER."""

Piece = tuple[Consumer, Stored, Cut | None]


class Delivery:
    """Send deliveries and answers to sessions. Used by the worker's loop only."""

    def __init__(self, transports: Transports, sessions: Sessions, settings: Settings) -> None:
        self._transports, self._sessions = transports, sessions
        self.apply(settings)
        self._pieces: dict[int, list[Piece]] = {}
        self._waiting: dict[Session, None] = {}
        self.gone: list[Session] = []
        """Sessions whose connection has ended or whose outbox is full; the worker closes them."""
        self.drained: list[Session] = []
        """Sessions whose outbox became empty."""
        self.bytes_out = self.messages_out = self.redelivered = 0
        self.announced: Callable[[Consumer, int, int], None] = lambda *_: None
        """Called with a consumer that is told the name of a producer, the partition's id and the producer's."""
        self.lost = 0
        """Messages of non_reliable topics that subscriptions missed."""

    def apply(self, settings: Settings) -> None:
        """Take over the size of a DELIVER."""
        self._bytes_max = settings.delivery_bytes_max

    # ------------------------------------------------------------ frames

    def add(self, partitions: dict[int, Partition], effects: list[Deliver]) -> None:
        """Take the effects of a turn: messages for consumers."""
        for effect in effects:
            consumer, stored = effect.consumer, effect.stored
            if effect.rows is not None and effect.cut is None:
                self._charge_whole(consumer, stored, len(effect.rows))
            elif effect.attempts is not None:
                self.redelivered += int(np.count_nonzero(effect.attempts))
            if stored.producer_id not in consumer.announced:
                self._announce(partitions.get(stored.partition_id), consumer, stored.producer_id)
            self._pieces.setdefault(consumer.session, []).append((consumer, stored, effect.cut))
            cut = effect.cut
            self.messages_out += stored.message_count if cut is None else cut.row_count

    @staticmethod
    def _charge_whole(consumer: Consumer, stored: Stored, count: int) -> None:
        """Charge the consumer for a frame that goes out whole, as it cannot be taken apart: its compressed
        body, message_count included, is the producer's, and the consumer finds the same fault."""
        flow, estimate = consumer.flow, stored.frame_bytes * count // stored.message_count
        flow.take(stored.frame_bytes - estimate, stored.message_count - count)

    def count(self, stored: Stored) -> None:
        """Count a frame that went out whole another way."""
        self.messages_out += stored.message_count
        self.bytes_out += stored.frame_bytes

    def _announce(self, partition: Partition | None, consumer: Consumer, producer_id: int) -> None:
        consumer.announced.add(producer_id)
        if partition is not None:
            self.announced(consumer, partition.partition_id, producer_id)
        name = partition.producer_names.get(producer_id) if partition else None
        session = self._sessions.by_number(consumer.session)
        if name is None or partition is None or session is None:
            return
        names = protocol.ProducerNames(partition.partition_id, {producer_id: name})
        self.send(session, [protocol.encode(names)])

    def count_lost(self, partition: Partition, sub: Subscription) -> None:
        """Count the messages that a subscription lost in a gap."""
        if not partition.reliable:
            self.lost += sub.take_lost()

    def result(self, session: Session, request: int, value: Any = None) -> None:
        """Answer a request."""
        self.send(session, [protocol.encode(protocol.Result(request, value))])

    def fail(self, session: Session, request: int, error: DanubeError) -> None:
        """Answer a request with what prevented it."""
        self.send(session, [protocol.encode(protocol.Error(request, error.code, str(error)))])

    def respond(
        self, session: Session, request: int, value: Any, error: DanubeError | None
    ) -> None:
        """Answer a request with an error if there is one, else with a value."""
        if error is not None:
            self.fail(session, request, error)
        else:
            self.result(session, request, value)

    def tell_closed(self, session: Session, consumer: Consumer, detail: dict[str, Any]) -> None:
        """Tell a consumer that nothing more comes, and why."""
        kind = protocol.EventKind.CLOSED.value
        event = protocol.ConsumerEvent(consumer.consumer_id, kind, detail)
        self.send(session, [protocol.encode(event)])

    def answer(self, by_session: dict[int, list[Any]], texts: dict[int, dict[int, str]]) -> None:
        """Send outcomes of PUBLISH and the texts of refusals, by session."""
        for number, entries in by_session.items():
            session = self._sessions.by_number(number)
            if session is None or self._answer_one(session, entries, texts):
                continue
            answer = protocol.Published(entries, texts.get(number, {}))
            self.send(session, [protocol.encode(answer)])

    def _answer_one(
        self, session: Session, entries: list[Any], texts: dict[int, dict[int, str]]
    ) -> bool:
        """Answer one publish of one frame at once; False if it takes more than that."""
        if len(entries) > 1 or session.outbox or session.closed or session.number in texts:
            return False
        ((request, outcome),) = entries
        return len(outcome) == 2 and self._transports.send_published(
            session.identity, request, *outcome
        )

    def flush(self) -> int:
        """Send the deliveries of the turn; the number of messages that went out."""
        sent = 0
        if self._waiting:
            self._retry()
        if self._pieces:
            pieces, self._pieces = self._pieces, {}
            for number, items in pieces.items():
                session = self._sessions.by_number(number)
                if session is not None:
                    sent += self._send_pieces(session, items)
        return sent

    def _send_pieces(self, session: Session, items: list[Piece]) -> int:
        """Cut a session's pieces into DELIVER messages."""
        if len(items) == 1 and self._deliver_one(session, *items[0]):
            return 1
        sent = at = 0
        while at < len(items):
            ids: list[int] = []
            parts: list[Any] = []
            copies: list[tuple[int, Any]] = []
            size = 0
            while at < len(items) and size < self._bytes_max and len(ids) < PIECES_MAX:
                consumer, stored, piece = items[at]
                whole = 0 if piece is not None else self._whole_bundle(items, at)
                if whole:
                    if copies:
                        parts.append(self._bundle(session, copies))
                        copies = []
                    if len(parts) >= WHOLE_BUNDLES_MAX:
                        break
                    parts.append(stored.holder)
                    for consumer, stored, _ in items[at : at + whole]:
                        ids.append(consumer.consumer_id)
                        size += stored.frame_bytes
                    at += whole
                    continue
                data = piece if piece is not None else stored.memory
                copies.append((stored.partition_id, data))
                ids.append(consumer.consumer_id)
                size += len(data)
                at += 1
            if copies:
                parts.append(self._bundle(session, copies))
            self.bytes_out += size
            self.send(session, [protocol.encode(protocol.Deliver(ids)), *parts])
            sent += 1
        return sent

    def _deliver_one(
        self, session: Session, consumer: Consumer, stored: Stored, piece: Cut | None
    ) -> bool:
        """Send a bundle of one frame, which goes out as it came in; False if it takes more than that."""
        if piece is not None or stored.bundle_frames != 1 or session.outbox or session.closed:
            return False
        if not self._transports.send_delivery(
            session.identity, consumer.consumer_id, stored.holder
        ):
            return False
        self.bytes_out += stored.frame_bytes
        return True

    def _bundle(self, session: Session, frames: list[tuple[int, Any]]) -> Any:
        """Make a part of these frames. Cuts of frames are written where they are sent from: each copy in between
        would cost as much as the cutting."""
        if not any(isinstance(frame, Cut) for _, frame in frames):
            return sealed_bundle(frames)
        size = bundle_bytes([len(frame) for _, frame in frames])
        part, address = self._transports.room(session.identity, size)
        write_bundle(address, frames)
        return part

    @staticmethod
    def _whole_bundle(items: list[Piece], at: int) -> int:
        """Count the pieces from `at` on that are together one whole incoming bundle; 0 if they are not."""
        first = items[at][1]
        count = first.bundle_frames
        if count == 1:
            return 1
        if count == 0 or first.index != 0 or at + count > len(items):
            return 0
        holder = first.holder
        for i in range(1, count):
            _, stored, piece = items[at + i]
            if piece is not None or stored.holder is not holder or stored.index != i:
                return 0
        return count

    # ------------------------------------------------------------ messages

    def send(self, session: Session, parts: list[Any]) -> None:
        """Send in order, or put into the session's outbox; nothing to a session that was closed."""
        if session.closed:
            return
        if session.outbox:
            session.outbox.append(parts)
            if len(session.outbox) == OUTBOX_MESSAGES_MAX:
                self.gone.append(session)
            return
        try:
            self._transports.send(session.identity, parts)
        except WouldBlock:
            session.outbox.append(parts)
            self._pause(session, paused=True)
            self._waiting[session] = None
        except PeerGone:
            self.gone.append(session)

    @staticmethod
    def _pause(session: Session, *, paused: bool) -> None:
        for flow in session.flows.values():
            flow.paused = paused

    def reply(self, identity: bytes, command: Any) -> None:
        """Answer a connection that may have no session; without one the answer is lost if the queue is full."""
        session = self._sessions.by_identity(identity)
        if session is not None:
            self.send(session, [protocol.encode(command)])
            return
        try:
            self._transports.send(identity, [protocol.encode(command)])
        except (WouldBlock, PeerGone):
            return

    @property
    def is_busy(self) -> bool:
        """Whether messages wait for `flush`, or some outbox is not empty: others must not overtake them."""
        return bool(self._pieces or self._waiting)

    @property
    def waiting(self) -> bool:
        """Whether some outbox is not empty."""
        return bool(self._waiting)

    def _retry(self) -> None:
        for session in list(self._waiting):
            done = 0
            try:
                for parts in session.outbox:
                    self._transports.send(session.identity, parts)
                    done += 1
            except WouldBlock:
                pass
            except PeerGone:
                done = len(session.outbox)
                self.gone.append(session)
            del session.outbox[:done]
            if not session.outbox:
                self._waiting.pop(session, None)
                self._pause(session, paused=False)
                self.drained.append(session)

    def forget(self, session: Session) -> None:
        """Drop all that waits for a session that is closed."""
        self._waiting.pop(session, None)
        self._pieces.pop(session.number, None)
        self._transports.end_session(session.identity)
        session.outbox.clear()
