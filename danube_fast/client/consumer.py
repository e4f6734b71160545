"""Consumer: what an application receives with. For one thread at a time.

Frames wait, checked, in `_queue`; the application takes messages out of the one in hand without a
lock. Queue entries of an older generation of their attachment (before a reconnect or a seek) are
skipped when their turn comes.

    connection.drain -> attachment.on_frame -> _queue -> in hand -> Message / Batch
                                                          ack -> attachment.pending -> ACK
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from danube_fast.client.attachment import READER, Attachment
from danube_fast.client.connection import Call, Connection
from danube_fast.client.credit import Credit
from danube_fast.client.delivery import Delivery
from danube_fast.client.limits import (
    ACK_DELAY_NS,
    ACK_RANGES_MAX,
    BATCH_MESSAGES_DEFAULT,
    CLOSE_TIMEOUT_SECONDS,
    PERMITS_BYTES_DEFAULT,
    PERMITS_MESSAGES_DEFAULT,
    REQUEST_TIMEOUT_SECONDS,
)
from danube_fast.client.message import Batch, Message, MessageId, Received
from danube_fast.client.pump import Steps, Wait, deadline_after
from danube_fast.errors import (
    DanubeError,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
)
from danube_fast.net.protocol import Ack, Nack, Seek

if TYPE_CHECKING:
    from danube_fast.client.core import Core
    from danube_fast.client.routes import Topic

__all__ = ["Consumer", "ConsumerOptions", "Gap"]

_GAPS_KEPT_MAX = 1000
_TYPES = ("exclusive", "shared", READER)
_TYPES_LATER = ("failover", "key_shared")


class Gap(NamedTuple):
    """Offsets that will never be delivered, both ends included."""

    topic: str
    first: int
    last: int
    reason: str


class ConsumerOptions(NamedTuple):
    """Checked options of `client.consumer()`."""

    subscription: str
    type: str
    position: str | int
    name: str
    permits_bytes: int = PERMITS_BYTES_DEFAULT
    permits_messages: int = PERMITS_MESSAGES_DEFAULT
    options: dict[str, Any] = {}

    def checked(self) -> ConsumerOptions:
        """Raise InvalidArgument or FailedPrecondition for what cannot be."""
        if self.type in _TYPES_LATER:
            raise FailedPrecondition(
                f"type={self.type!r} is not served yet; use exclusive or shared"
            )
        if self.type not in _TYPES:
            raise InvalidArgument(f"type={self.type!r} is unknown; use exclusive or shared")
        if not self.subscription and self.type != READER:
            raise InvalidArgument("a consumer needs subscription=; name the cursor it advances")
        if self.permits_bytes <= 0 or self.permits_messages <= 0:
            raise InvalidArgument("permits_bytes and permits_messages must be positive; raise them")
        return self._replace(position=checked_position(self.position))


def checked_position(position: Any) -> str | int:
    """Earliest, latest or an offset. Raises InvalidArgument."""
    if position in ("earliest", "latest"):
        return str(position)
    if type(position) is int and position >= 0:
        return position
    raise InvalidArgument(
        f"{position!r} is not a position; use 'earliest', 'latest' or an offset of at least 0"
    )


class Consumer:
    """Receives from the partitions of one or several topics. Made by `client.consumer()`."""

    def __init__(self, core: Core, topics: Sequence[Topic], options: ConsumerOptions) -> None:
        self.pump = core.pump
        self.subscription = options.subscription
        self.type = options.type
        self.name = options.name
        self.options = options.options
        self.topics: tuple[str, ...] = tuple(topic.name for topic in topics)
        self.gaps: collections.deque[Gap] = collections.deque(maxlen=_GAPS_KEPT_MAX)
        """The latest ranges that the broker said are lost."""
        self._core = core
        self._routes = tuple(topics)
        self._lock = core.pump.lock
        self._queue: collections.deque[Delivery] = collections.deque()
        self._error: DanubeError | None = None
        """Raised once by the next receive."""
        self._refusal: DanubeError | None = None
        """Raised by every receive from now on."""
        self._acks_due_ns = 0
        # the frame in hand
        self._delivery: Delivery | None = None
        self._index = 0
        self._stop = 0
        self._payloads: list[bytes | None] = []
        self._offsets: Sequence[int] = ()
        self.attachments: list[Attachment] = []
        partitions = [partition for topic in topics for partition in topic.partitions]
        connections = list(dict.fromkeys(partition.connection for partition in partitions))
        self._window_bytes = max(1, options.permits_bytes // len(connections))
        self._window_messages = max(1, options.permits_messages // len(connections))
        self._credits: dict[Connection, Credit] = {}
        self.attachments = [
            Attachment(
                self,
                partition.connection,
                self._credit(partition.connection),
                partition.topic,
                partition.partition_id,
                options.position,
            )
            for partition in partitions
        ]

    def _credit(self, connection: Connection) -> Credit:
        credit = self._credits.get(connection)
        if credit is None:
            credit = Credit(connection, self._window_bytes, self._window_messages)
            self._credits[connection] = credit
        return credit

    def open_steps(self, deadline_ns: int) -> Steps[None]:
        """Wait until every partition has accepted the subscription."""
        attachments = self.attachments
        ready = yield Wait(
            lambda: self._refusal is not None or all(a.subscribed for a in attachments), deadline_ns
        )
        with self._lock:
            if self._refusal is not None:
                raise self._refusal
            if not ready:
                waiting = next(a for a in attachments if not a.subscribed)
                raise DeadlineExceeded(
                    f"{waiting.topic}: its worker at {waiting.connection.endpoint} did not answer in "
                    "time; look at `danube-fast status`"
                )

    # ------------------------------------------------------------ receiving

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message; None when `timeout` seconds are over. Without timeout: wait."""
        index = self._index
        if index < self._stop:
            self._index = index + 1
            return Received(self._delivery, index, self._payloads[index], self._offsets[index])  # type: ignore[arg-type]
        return self._core.run(self.receive_steps(timeout))

    def receive_steps(self, timeout: float | None = None) -> Steps[Message | None]:
        """`receive` as steps."""
        if self._index >= self._stop and not (yield from self._next_steps(timeout)):
            return None
        index = self._index
        self._index = index + 1
        return Received(self._delivery, index, self._payloads[index], self._offsets[index])  # type: ignore[arg-type]

    def receive_batch(
        self, max_messages: int = BATCH_MESSAGES_DEFAULT, timeout: float | None = None
    ) -> Batch:
        """What is there, at most `max_messages`; waits for the first message for `timeout` seconds.

        An empty Batch when the time is up.
        """
        return self._core.run(self.receive_batch_steps(max_messages, timeout))

    def receive_batch_steps(
        self, max_messages: int = BATCH_MESSAGES_DEFAULT, timeout: float | None = None
    ) -> Steps[Batch]:
        """`receive_batch` as steps."""
        if max_messages < 1:
            raise InvalidArgument("max_messages must be at least 1; ask for more")
        pieces: list[tuple[Delivery, int, int]] = []
        left = max_messages
        if self._index < self._stop and self._delivery is not None:
            stop = min(self._stop, self._index + left)
            pieces.append((self._delivery, self._index, stop))
            left -= stop - self._index
            self._index = stop
        elif not self._queue and not (yield from self._arrived_steps(timeout)):
            return Batch(pieces)
        while left:
            delivery = self._take()
            if delivery is None:
                break
            stop = min(delivery.count, left)
            pieces.append((delivery, 0, stop))
            left -= stop
            if stop < delivery.count:
                self._hold(delivery, stop)
        if not pieces and self._error is not None:
            yield from self._arrived_steps(0)  # raises it
        return Batch(pieces)

    def __iter__(self) -> Iterator[Message]:
        """Messages for ever; ends when the consumer is closed."""
        while self._refusal is None or self._index < self._stop:
            stop = self._stop
            delivery = self._delivery
            if self._index >= stop or delivery is None:
                if not self._core.run(self._next_steps(None)):
                    return
                continue
            payloads, offsets = self._payloads, self._offsets
            while (index := self._index) < self._stop and delivery is self._delivery:
                self._index = index + 1
                yield Received(delivery, index, payloads[index], offsets[index])

    def _next_steps(self, timeout: float | None) -> Steps[bool]:
        """Have a message in hand; False when the time is up."""
        deadline_ns = deadline_after(self.pump.clock, timeout)
        while True:
            delivery = self._take()
            if delivery is not None:
                self._hold(delivery, 0)
                return True
            if not (yield from self._arrived_steps(None, deadline_ns)):
                return False

    def _arrived_steps(self, timeout: float | None, deadline_ns: int | None = None) -> Steps[bool]:
        """Wait for a frame in the queue. Raises what ended or broke the consumer."""
        if deadline_ns is None:
            deadline_ns = deadline_after(self.pump.clock, timeout)
        with self._lock:
            self._send_acks()
        ready = yield Wait(self._has_arrived, deadline_ns)
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if not self._queue and self._refusal is not None:
            raise self._refusal
        return ready

    def _has_arrived(self) -> bool:
        return bool(self._queue) or self._error is not None or self._refusal is not None

    def _take(self) -> Delivery | None:
        """The next frame that still counts; its credit goes back."""
        while True:
            try:
                delivery = self._queue.popleft()
            except IndexError:
                return None
            attachment = delivery.attachment
            with self._lock:
                attachment.credit.take(delivery.frame_bytes, delivery.count, delivery.flow_id)
                if self._acks_due_ns and self.pump.clock.monotonic_ns() >= self._acks_due_ns:
                    self._send_acks()
            if delivery.generation == attachment.generation and delivery.count:
                return delivery

    def _hold(self, delivery: Delivery, index: int) -> None:
        """Take that frame in hand, from message `index` on."""
        count = delivery.count
        self._payloads = delivery.view.payloads()
        self._offsets = delivery.offset_list(0, count)
        self._delivery = delivery
        self._index, self._stop = index, count

    def has_waiting(self, attachment: Attachment) -> bool:
        """Whether frames of that partition wait in the queue or are in hand."""
        held = self._delivery
        if self._index < self._stop and held is not None and held.attachment is attachment:
            return True
        with self._lock:
            return any(delivery.attachment is attachment for delivery in self._queue)

    # ------------------------------------------------------------ what attachments report

    def arrived(self, delivery: Delivery) -> None:
        """Attachment: a frame."""
        self._queue.append(delivery)
        if self.type == READER:
            delivery.attachment.next_offset = delivery.end_offset

    def damaged(self, error: DanubeError) -> None:
        """Attachment: a frame that cannot be trusted."""
        self._error = error

    def gap(self, attachment: Attachment, first: int, last: int, reason: str) -> None:
        """Attachment: offsets that will never come."""
        self.gaps.append(Gap(attachment.topic, first, last, reason))

    def attachment_failed(self, attachment: Attachment, error: DanubeError) -> None:
        """Attachment: it will receive nothing any more."""
        self._refusal = self._refusal or type(error)(f"{attachment.topic}: {error}")
        self.pump.notify()

    def attachment_lost(self, attachment: Attachment) -> None:
        """Attachment: its worker does not have the partition."""
        for route in self._routes:
            if any(p.partition_id == attachment.partition_id for p in route.partitions):
                self._core.routes.refresh(route)

    def moved(self) -> None:
        """Routes: a topic was looked up again."""
        places = {p.partition_id: p.connection for route in self._routes for p in route.partitions}
        for attachment in self.attachments:
            connection = places.get(attachment.partition_id)
            if connection is not None and connection is not attachment.connection:
                attachment.move(connection, self._credit(connection))

    def topic_gone(self, error: DanubeError) -> None:
        """Routes: a topic does not exist any more."""
        for attachment in self.attachments:
            attachment.fail(error)

    # ------------------------------------------------------------ acks

    def ack(self, what: Message | Batch | MessageId | Iterable[Message]) -> None:
        """Done with a message, a batch, or a list of messages. Queued; see `flush_acks`."""
        with self._lock:
            if type(what) is Received:
                source = what._source
                attachment = source.attachment  # type: ignore[attr-defined]
                if source.generation == attachment.generation:  # type: ignore[attr-defined]
                    attachment.ack(what.offset, what.offset + 1)
                    if not self._acks_due_ns or len(attachment.pending) > 2 * ACK_RANGES_MAX:
                        self._acks_soon(attachment)
                return
            for attachment, ranges in self._ranges_of(what):
                for start, end in zip(ranges[::2], ranges[1::2], strict=True):
                    attachment.ack(start, end)
                self._acks_soon(attachment)

    def _ranges_of(self, what: Any) -> Iterator[tuple[Attachment, list[int]]]:
        """Attachment and flat ranges of everything that still counts."""
        if isinstance(what, Batch):
            for delivery, start, stop in what._pieces:
                if delivery.generation == delivery.attachment.generation:
                    yield delivery.attachment, delivery.ranges(start, stop)
        elif isinstance(what, MessageId):
            for attachment in self.attachments:
                if attachment.topic == what.topic:
                    yield attachment, [what.offset, what.offset + 1]
        elif isinstance(what, Received):
            source: Any = what._source
            if source.generation == source.attachment.generation:
                yield source.attachment, [what.offset, what.offset + 1]
        elif isinstance(what, Message):
            yield from self._ranges_of(what.message_id)
        elif isinstance(what, Iterable) and not isinstance(what, str | bytes):
            for item in what:
                yield from self._ranges_of(item)
        else:
            raise InvalidArgument(
                f"cannot ack {type(what).__name__}; give a Message, Batch or list"
            )

    def _acks_soon(self, attachment: Attachment) -> None:
        if len(attachment.pending) > 2 * ACK_RANGES_MAX:
            self._send_acks()
        elif not self._acks_due_ns:
            self._acks_due_ns = self.pump.clock.monotonic_ns() + ACK_DELAY_NS
            self.pump.arm(self, self._acks_due_ns)

    def on_time(self, now_ns: int) -> None:
        """Keeper: acks have waited long enough."""
        self._send_acks()

    def _send_acks(self, *, durable: bool = False) -> list[Call]:
        """Under the lock: send what is queued; with `durable` the calls to wait for."""
        calls: list[Call] = []
        if not self._acks_due_ns and not durable:
            return calls
        self._acks_due_ns = 0
        self.pump.disarm(self)
        for connection in self._credits:
            entries = [
                (attachment.consumer_id, attachment.take_pending())
                for attachment in self.attachments
                if attachment.connection is connection and attachment.pending
            ]
            if not connection.is_open:
                continue
            if durable:
                command = Ack(connection.next_request(), entries)
                calls.append(connection.call(Call(command, repeatable=False)))
            elif entries:
                connection.send(Ack(0, entries))
        return calls

    def flush_acks(self, timeout: float = REQUEST_TIMEOUT_SECONDS) -> None:
        """Send queued acks and wait until they are durable."""
        self._core.run(self.flush_acks_steps(timeout))

    def flush_acks_steps(self, timeout: float = REQUEST_TIMEOUT_SECONDS) -> Steps[None]:
        """`flush_acks` as steps."""
        self._check_acking()
        with self._lock:
            calls = self._send_acks(durable=True)
        ready = yield Wait(
            lambda: all(call.done for call in calls), deadline_after(self.pump.clock, timeout)
        )
        for call in calls:
            if call.done:
                call.result()
        if not ready:
            raise DeadlineExceeded(
                f"acks were not durable within {timeout:g} s; unacked messages are redelivered, "
                "flush again or look at `danube-fast status`"
            )

    def ack_cumulative(self, message: Message) -> None:
        """Done with everything of the message's partition up to and with it. Not for shared."""
        self._check_acking()
        if self.type == "shared":
            raise FailedPrecondition(
                "cumulative acks would take messages from other consumers of a shared subscription; "
                "ack messages or batches"
            )
        with self._lock:
            for attachment, ranges in self._ranges_of(message):
                attachment.pending[:] = [0, ranges[1]]
                self._acks_soon(attachment)

    def nack(
        self, what: Message | Batch | Iterable[Message], delay: float = 0.0, reason: str = ""
    ) -> None:
        """Give messages back for redelivery, after `delay` seconds at the earliest."""
        self._check_acking()
        with self._lock:
            for attachment, ranges in self._ranges_of(what):
                if attachment.connection.is_open:
                    entry = [(attachment.consumer_id, ranges)]
                    attachment.connection.send(Nack(entry, int(delay * 1000), reason))

    def extend(self, message: Message, seconds: float) -> None:
        """Keep a message for longer than the ack timeout."""
        raise FailedPrecondition(
            "there is no ack timeout yet, so nothing to extend: a message is yours until the consumer "
            "goes; leave the call out"
        )

    def _check_acking(self) -> None:
        if self.type == READER:
            raise FailedPrecondition(
                "a reader acks nothing; use client.consumer() to keep a cursor"
            )

    # ------------------------------------------------------------ moving, looking

    def seek(self, position: Any, timeout: float = REQUEST_TIMEOUT_SECONDS) -> None:
        """Move the subscription to "earliest", "latest" or an offset (in every partition)."""
        self._core.run(self.seek_steps(position, timeout))

    def seek_steps(self, position: Any, timeout: float = REQUEST_TIMEOUT_SECONDS) -> Steps[None]:
        """`seek` as steps."""
        self._check_acking()
        place = checked_position(position)
        calls: list[Call] = []
        with self._lock:
            self._send_acks()
            for attachment in self.attachments:
                connection = attachment.connection
                command = Seek(connection.next_request(), attachment.consumer_id, place)
                calls.append(
                    connection.call(
                        Call(command, repeatable=False, on_done=_Restart(self, attachment))
                    )
                )
        ready = yield Wait(
            lambda: all(call.done for call in calls), deadline_after(self.pump.clock, timeout)
        )
        if not ready:
            raise DeadlineExceeded(
                f"no answer to seek within {timeout:g} s; it may have happened, look at "
                "`danube-fast subscriptions describe`"
            )
        for call in calls:
            call.result()

    def restarted(self, attachment: Attachment) -> None:
        """A seek or a new subscription: the frame in hand may be from before it."""
        attachment.restart()
        if self._delivery is not None and self._delivery.attachment is attachment:
            self._stop = 0

    @property
    def state(self) -> str:
        """connected, reconnecting, failed or closed."""
        if self._refusal is not None:
            failed = any(attachment.failure is not None for attachment in self.attachments)
            return "failed" if failed else "closed"
        connected = all(a.subscribed and a.connection.is_open for a in self.attachments)
        return "connected" if connected else "reconnecting"

    def lag(self) -> int:
        """Messages of this subscription that were not acked yet, as the broker counts them."""
        return self._core.run(self.lag_steps())

    def lag_steps(self) -> Steps[int]:
        """`lag` as steps."""
        lag = 0
        for topic in self.topics:
            answer = yield from self._core.admin_steps(
                "describe_subscription", {"topic": topic, "subscription": self.subscription}
            )
            lag += int(answer["lag_messages"])
        return lag

    # ------------------------------------------------------------ the end

    def close(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """Flush acks and detach; returns within `timeout` seconds."""
        self._core.run(self.close_steps(timeout))

    def close_steps(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> Steps[None]:
        """`close` as steps."""
        if self.state == "closed":
            return
        deadline_ns = deadline_after(self.pump.clock, timeout)
        with self._lock:
            self._refusal = FailedPrecondition("the consumer is closed; open another one")
            calls = [] if self.type == READER else self._send_acks(durable=True)
            for attachment in self.attachments:
                call = attachment.close()
                if call is not None:
                    calls.append(call)
            for credit in self._credits.values():
                credit.close()
            self.pump.disarm(self)
            self._core.forget(self)
            self.pump.notify()
        self._queue.clear()
        self._index = self._stop = 0
        yield Wait(lambda: all(call.done for call in calls), deadline_ns)

    def refuse(self, error: DanubeError) -> None:
        """Core: nothing works any more (closed client, forked process)."""
        self._refusal = self._refusal or error

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Consumer {self.subscription!r} ({self.type}) on {', '.join(self.topics)}: {self.state}>"


class _Restart:
    """What happens when a seek is answered."""

    __slots__ = ("attachment", "consumer")

    def __init__(self, consumer: Consumer, attachment: Attachment) -> None:
        self.consumer = consumer
        self.attachment = attachment

    def __call__(self, call: Call) -> None:
        if call.error is None:
            self.consumer.restarted(self.attachment)
