"""An attachment: one consumer on one partition, over reconnects.

    SUBSCRIBE -> RESULT -> FLOW -> DELIVER ... DELIVER        ack ranges wait here -> ACK
                    generation g                              of generation g only

Every subscription is a new generation with a consumer id of its own: frames that come late for an
older one find no subscriber, and acks for its messages are quiet no-ops, because the broker has
given those messages back.

All methods are called under the pump's lock.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol

from danube_fast.client.consume.credit import Credit, Departed
from danube_fast.client.consume.ranges import Ranges, merged_ranges, no_ranges
from danube_fast.client.link.calls import RETRYABLE, Call, OnLoss, asks_again, tell_wait
from danube_fast.client.link.connection import Connection
from danube_fast.client.link.pump import Pump
from danube_fast.client.topics.routes import Partition, Topic
from danube_fast.client.values.limits import BACKOFF_MAX_NS, BACKOFF_MIN_NS, FOREVER_NS, TAKEOVER_NS
from danube_fast.client.values.message import Message, Processing
from danube_fast.client.values.options import READER, Position
from danube_fast.errors import (
    DanubeError,
    DataLoss,
    FailedPrecondition,
    Internal,
    NotOwner,
    Unavailable,
    error_from_code,
)
from danube_fast.frame.view import PLACE_FIELDS, FrameView
from danube_fast.net.protocol import (
    CloseConsumer,
    ConsumerEvent,
    EventKind,
    Seek,
    Subscribe,
)

__all__ = ["Attachment", "Owner"]

_OPTION = {"reports_taken": True}
"""Of SUBSCRIBE: this client reports how far its application is."""


class Owner(Protocol):
    """A consumer, as its attachments see it."""

    pump: Pump
    subscription: str
    type: str
    name: str
    options: dict[str, Any]
    refusal: DanubeError | None

    def arrived(self, attachment: Attachment, view: FrameView, place: tuple[int, ...]) -> None:
        """Take a frame that arrived, with its fields as `PLACE_FIELDS` has them."""

    def damaged(self, error: DanubeError) -> None:
        """Raise the error of a damaged frame with the next receive."""

    def gap(
        self, attachment: Attachment, first: int, last: int, reason: str, lost: bool = False
    ) -> None:
        """Note offsets that will never come."""

    def subscribed(self, ack_timeout_ms: int) -> None:
        """Extend what waits within an ack timeout that the broker told."""

    def restarted(self, attachment: Attachment, *, sought: bool) -> None:
        """Drop the frames and acks from before a new subscription, or a seek."""

    def rested(self, attachment: Attachment) -> None:
        """Drop the frames that came before the attachment left for a while; acks that were sent count."""

    def send_acks(self, attachment: Attachment) -> None:
        """Send the acks of an attachment that is about to leave."""

    def seek_failed(self, attachment: Attachment) -> None:
        """Send the acks that waited for a seek, which moved nothing."""

    def taken(self, attachment: Attachment) -> tuple[int, int]:
        """Return how far the application is, as the broker wants to know it (`progress.py`)."""

    def attachment_lost(self, attachment: Attachment) -> None:
        """Look the topic up again: the worker does not have the partition."""

    def attachment_failed(self, attachment: Attachment, error: DanubeError) -> None:
        """End the consumer, unless the topic has only left its pattern."""

    def reply(
        self, message: Message, payload: bytes | None, attributes: Mapping[str, str] | None
    ) -> Awaitable[None]:
        """Send the reply to a message that came here."""

    def processing(self, message: Message) -> Processing:
        """Keep the ack timeout of a message that came here from running out."""


class Attachment:
    """Subscription of one consumer to one partition."""

    # Python keeps more than 30 attributes in a dict of each object: a cache miss for every one of them, among thousands
    __slots__ = (
        "_backoff_ns", "_call", "_is_resting", "_is_told", "_refused_since_ns", "connection", "consumer", "consumer_id", "credit",
        "end_offset", "ever_subscribed", "failure", "flow_id", "frames_received", "generation",
        "is_late", "lowest", "next_offset", "number", "parent", "parted", "partition_id", "pending",
        "position", "refusal", "route", "seeks", "sought_generation", "start_offset", "subscribed", "taken_frames", "topic",
        "tracks",
    )  # fmt: skip

    def __init__(
        self,
        consumer: Owner,
        partition: Partition,
        credit: Credit,
        position: Position,
    ) -> None:
        self.consumer = consumer
        self.connection = partition.connection
        self.credit = credit
        self.topic: str = partition.topic
        self.partition_id = partition.partition_id
        self.parent = partition.parent
        """The topic, of which it is a partition."""
        self.number = partition.number
        """Number of the partition; None: the topic has none."""
        self.parted = False
        """Its topic has left the pattern: nothing comes any more."""
        self.route: Topic | None = None
        """The topic that was looked up to find it."""
        self.position = position
        self.generation = 0
        self.sought_generation = 0
        """Acks of deliveries before this generation are void because of a seek."""
        self.seeks = 0
        """Seeks that are not answered."""
        self.consumer_id = 0
        self.flow_id = 0
        self.tracks = True
        """The broker wants to know what is acked; of a non_reliable topic it keeps nothing."""
        self.frames_received = 0
        """Since the last SUBSCRIBE."""
        self.taken_frames = 0
        """Those that the application has had in hand."""
        self.pending = no_ranges()
        """Acked and not sent yet: flat [start, end) pairs."""
        self.failure: DanubeError | None = None
        self.subscribed = False
        self.ever_subscribed = False
        self.is_late = False
        """True: its consumer was open already when it joined."""
        self.end_offset = 0
        self.start_offset = 0
        """Where the first subscription began."""
        self.next_offset = 0
        """Where the reader is: one past the last offset received or known to be missing."""
        self.lowest = FOREVER_NS
        """The least offset received."""
        self._is_resting = False
        self._call: Call | None = None
        self._backoff_ns = BACKOFF_MIN_NS
        self._refused_since_ns, self._is_told = 0, False
        self.refusal: DanubeError | None = None
        """Why it was not subscribed when it asked the last time."""
        self.connection.users[self] = None
        if self.connection.is_open:
            self._subscribe()

    # ------------------------------------------------------------ subscribing

    def _subscribe(self) -> None:
        consumer, connection = self.consumer, self.connection
        self._forget_id()
        if consumer.type != READER:
            # a reader acks nothing and reads on behind what it has, so it keeps that
            consumer.restarted(self, sought=False)
        self.subscribed = False
        if self._call is not None:
            connection.abandon(self._call)
        request = connection.next_request()
        connection.beat_soon()
        self.consumer_id = request
        self.flow_id = self.credit.flow_id
        self.frames_received = self.taken_frames = 0
        connection.receivers[self.consumer_id] = self
        options = dict(consumer.options)
        if consumer.type != READER:
            options |= _OPTION
        if connection.wants_topics:
            options["topic"] = self.parent
        reading_on = self.ever_subscribed and consumer.type == READER
        self._call = connection.call(
            Call(
                Subscribe(
                    request,
                    self.consumer_id,
                    self.flow_id,
                    self.partition_id,
                    consumer.subscription,
                    consumer.type,
                    self.next_offset if reading_on else self.position,
                    consumer.name,
                    options,
                ),
                OnLoss.FORGET,
                self._on_subscribed,
            )
        )
        self.credit.grant()

    def _on_subscribed(self, call: Call) -> None:
        if call is not self._call and self._call is not None:
            return
        self._call = None
        if call.error is not None:
            self._on_refused(call.error)
            return
        self.subscribed = True
        asked, got = call.command.position, call.value["next_offset"]
        if self.consumer.type == READER and type(asked) is int and asked < got:
            self.consumer.gap(
                self, asked, got - 1, "they lie before the first message that is kept", True
            )
            self.next_offset = max(self.next_offset, got)
        if not self.ever_subscribed:
            self.end_offset = call.value["end_offset"]
            self.start_offset = call.value["next_offset"]
            # frames may have come before: a new subscription is answered when it is durable
            self.next_offset = max(self.next_offset, self.start_offset)
        self.ever_subscribed = True
        self.consumer.subscribed(call.value.get("ack_timeout_ms", 0))
        self._backoff_ns = BACKOFF_MIN_NS
        self._refused_since_ns, self._is_told, self.refusal = 0, False, None
        self.consumer.pump.notify()

    def _on_refused(self, error: DanubeError) -> None:
        self.refusal = error
        now = self.consumer.pump.clock.monotonic_ns()
        self._refused_since_ns = self._refused_since_ns or now
        refused_ns = now - self._refused_since_ns
        own_old_session = (
            type(error) is FailedPrecondition and self.ever_subscribed and refused_ns < TAKEOVER_NS
        )
        # no call that could hear of it has asked for one that joins an open consumer
        waits = self.is_late and not self.ever_subscribed and isinstance(error, RETRYABLE)
        if waits or own_old_session or asks_again(error, refused_ns, was_open=self.ever_subscribed):
            self._is_told = tell_wait(self.topic, error, refused_ns, is_told=self._is_told)
            if isinstance(error, Unavailable):
                self.consumer.attachment_lost(self)
            self.consumer.pump.arm(self, now + self._backoff_ns)
            self._backoff_ns = min(2 * self._backoff_ns, BACKOFF_MAX_NS)
        else:
            self.fail(error)

    def on_time(self, now_ns: int) -> None:
        """Try to subscribe again."""
        waiting = self.subscribed or self._call is not None or self.failure is not None
        waiting = waiting or self._is_resting
        if self.connection.is_open and not waiting:
            self._subscribe()

    # ------------------------------------------------------------ what arrives

    def on_frame(self, buffer: memoryview, start: int, frame_bytes: int) -> None:
        """Check a frame that arrived, and hand it to the consumer."""
        try:
            view = FrameView(buffer, start)
            view.check()
        except DataLoss as error:
            self.frames_received += 1
            self.credit.take(frame_bytes, 0, self.flow_id)
            self.consumer.damaged(
                DataLoss(
                    f"{self.topic}: a frame arrived damaged ({error}); it is not acked: reconnect"
                )
            )
            return
        self.on_checked(view, PLACE_FIELDS.unpack_from(view.memory, view.offset))

    def on_checked(self, view: FrameView, place: tuple[int, ...]) -> None:
        """Hand a sound frame to the consumer."""
        base_offset, span = place[4:]
        self.frames_received += 1
        if base_offset < self.lowest:
            self.lowest = base_offset
        if (end := base_offset + span) > self.next_offset:
            self.next_offset = end
        self.consumer.arrived(self, view, place)

    def on_event(self, event: ConsumerEvent) -> None:
        """Take the end of the consumer, or a gap, of which the broker tells."""
        detail = event.detail
        if event.kind == EventKind.CLOSED:
            error = error_from_code(
                detail.get("code", Internal.code),
                detail.get("text", "the broker closed a consumer"),
            )
            if isinstance(error, NotOwner) and self.subscribed and self.consumer.type != READER:
                # it moves: what was acked here counts if the worker hears of it now
                self.consumer.send_acks(self)
                self._depart()
                self.consumer.rested(self)
                self._on_refused(error)
                return
            self._forget_id()
            self.consumer_id = 0
            self._forget_call()  # the SUBSCRIBE may be answered yet, and that consumer is closed
            self.subscribed = False
            if detail.get("sought"):  # another consumer did: what came before does not count
                self.consumer.restarted(self, sought=True)
                self._subscribe()
            elif isinstance(error, RETRYABLE):
                self.on_lost()  # acks that the broker has not taken yet are void
                self._on_refused(error)
            else:
                self.fail(error)
        elif event.kind == EventKind.GAP:
            end = int(detail.get("end", 0))
            first = int(detail.get("start", self.next_offset))
            self.next_offset = max(self.next_offset, end)
            reason, lost = str(detail.get("reason", "unknown")), bool(detail.get("lost", False))
            if first < end:
                self.consumer.gap(self, first, end - 1, reason, lost)

    def has_received(self, offset: int) -> bool:
        """Whether a message may have come, from the least to the last that did."""
        return self.lowest <= offset < self.next_offset

    def producer_name(self, producer_id: int) -> str:
        """Name that the broker told for a producer id, or nothing."""
        return self.connection.producer_names.get((self.partition_id, producer_id), "")

    # ------------------------------------------------------------ acks

    def take_pending(self) -> Ranges[int]:
        """Return the ranges that wait, merged, and forget them."""
        pending, self.pending = self.pending, no_ranges()
        return merged_ranges(pending)

    def seek(self, position: Position, *, dry_run: bool) -> Call:
        """Move the subscription; nothing is acked until the broker has answered, as it might take that
        for what comes behind the seek."""
        command = Seek(self.connection.next_request(), self.consumer_id, position, dry_run)
        if dry_run:
            return self.connection.call(Call(command, OnLoss.REPEAT))
        self.seeks += 1
        return self.connection.call(Call(command, on_done=self._on_sought))

    def _on_sought(self, call: Call) -> None:
        """Drop what was delivered before a seek, or go on if that was refused."""
        self.seeks -= 1
        if call.error is None:
            self.consumer.restarted(self, sought=True)
        else:
            self.consumer.seek_failed(self)

    # ------------------------------------------------------------ sessions

    def on_session(self, resumed: bool) -> None:
        """Subscribe again, as the frames on their way are lost with the session before."""
        if self.failure is not None or self._is_resting:
            return
        if resumed and self.consumer_id:
            # the broker still counts them as delivered to the old id: it must give them back
            self.connection.call(Call(self._close_command(self.consumer_id), OnLoss.REPEAT))
        self._subscribe()

    def on_lost(self) -> None:
        """Drop what waits: it may be given to another consumer at any time."""
        if self.tracks and self.consumer.type != READER and self.failure is None:
            self._forget_id()
            self.subscribed = False
            self.consumer.restarted(self, sought=False)

    def rest(self) -> None:
        """Leave until `wake`: all that was delivered goes to others, and acks that were sent count."""
        if self.subscribed and self.connection.is_open:
            self._is_resting = True
            self._depart()
            self.consumer.rested(self)

    def wake(self) -> None:
        """Subscribe again after a rest."""
        if self._is_resting:
            self._is_resting = False
            if self.connection.is_open and self.failure is None:
                self._subscribe()

    def _depart(self) -> Call | None:
        """Detach at the broker if it may still send something, now or with a session that goes on after a
        loss; the call that ends it. Its SUBSCRIBE may be on the way yet."""
        connection, consumer_id = self.connection, self.consumer_id
        self.subscribed = False
        self.consumer_id = 0  # on another connection the number is that of another consumer
        if not consumer_id:
            return None
        connection.receivers[consumer_id] = Departed(self.credit, self.flow_id)

        def ended(call: Call) -> None:
            connection.receivers.pop(consumer_id, None)

        return connection.call(Call(self._close_command(consumer_id), OnLoss.REPEAT, ended))

    def _close_command(self, consumer_id: int) -> CloseConsumer:
        """Return what ends the consumer at the broker, with what its application has taken."""
        connection = self.connection
        taken = self.consumer.taken(self) if connection.takes_reports else None
        return CloseConsumer(connection.next_request(), consumer_id, taken)

    def on_away(self) -> None:
        """Look the topic up again, as the worker is gone for long."""
        self.consumer.attachment_lost(self)

    def on_failure(self, error: DanubeError) -> None:
        """Fail, as the connection refuses this client."""
        self.fail(error)

    def fail(self, error: DanubeError) -> None:
        """Receive nothing more, and tell the consumer why."""
        if self.failure is None:
            self.failure = error
            self._forget_id()
            self.subscribed = False
            self.consumer.attachment_failed(self, error)

    def move(self, connection: Connection, credit: Credit) -> None:
        """Go on over another connection, where the partition is served now."""
        if connection is self.connection or self.failure is not None:
            return
        self.leave()
        self.connection, self.credit = connection, credit
        connection.users[self] = None
        if connection.is_open and not self._is_resting:
            self._subscribe()

    def _forget_id(self) -> None:
        self.connection.receivers.pop(self.consumer_id, None)

    def leave(self) -> Call | None:
        """Forget the connection; the call that detaches the consumer there, if there is one."""
        departure = self._depart()
        self._forget_call()
        self.connection.reporters.pop(self, None)
        self.connection.users.pop(self, None)
        self.consumer.pump.disarm(self)
        return departure

    def _forget_call(self) -> None:
        if self._call is not None:
            self.connection.abandon(self._call)
            self._call = None

    def close(self) -> Call | None:
        """Detach at the broker; the call to wait for, if the broker may hear it now."""
        is_open = self.connection.is_open
        call = self.leave()
        self.generation += 1
        return call if is_open else None
