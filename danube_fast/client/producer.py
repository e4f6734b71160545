"""Producer: what an application publishes with. Thread-safe.

    send, send_many     into the open batch of a lane; the calling thread packs and sends it when
                        it is full, the keeper when it has lingered
    publish             one frame of its own, waits for its ack
    flush               waits until everything is acked, raises what was not

Each partition has a lane (`lane.py`). Whatever went wrong in the background is kept and raised by
the next send, flush or close, naming the first and the last message concerned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from danube_fast.client.lane import Lane, Sending
from danube_fast.client.limits import (
    BATCH_BYTES_DEFAULT,
    BATCH_BYTES_MAX,
    BATCH_MESSAGES_MAX,
    CLOSE_TIMEOUT_SECONDS,
    FRAME_OVERHEAD_BYTES,
    LINGER_US_DEFAULT,
    MESSAGE_BYTES_MAX_DEFAULT,
    MESSAGE_OVERHEAD_BYTES,
    SEND_TIMEOUT_SECONDS,
    WINDOW_BYTES_DEFAULT,
)
from danube_fast.client.message import MessageId
from danube_fast.client.outgoing import (
    Attributes,
    OnDelivery,
    Outgoing,
    Packer,
    as_key,
    as_payload,
    as_time_ns,
    checked_attributes,
    outgoing_list,
)
from danube_fast.client.pump import Steps, Wait, deadline_after
from danube_fast.errors import (
    DanubeError,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
)
from danube_fast.frame.hash import key_hash
from danube_fast.frame.layout import Codec

if TYPE_CHECKING:
    from danube_fast.client.core import Core
    from danube_fast.client.routes import Topic

__all__ = ["Producer", "ProducerOptions"]

_LINGER_CHECK_MASK = 31
"""A busy sender looks at the clock once in so many messages."""
_CODECS = {None: Codec.NONE, "none": Codec.NONE, "lz4": Codec.LZ4, "zstd": Codec.ZSTD}
_BATCH_BYTES_MIN = 4096


class ProducerOptions:
    """Checked options of `client.producer()`."""

    def __init__(
        self,
        *,
        linger_us: int = LINGER_US_DEFAULT,
        batch_bytes_max: int = BATCH_BYTES_DEFAULT,
        window_bytes_max: int = WINDOW_BYTES_DEFAULT,
        timeout: float = SEND_TIMEOUT_SECONDS,
        compression: str | None = None,
        schema: object = None,
    ) -> None:
        if not _BATCH_BYTES_MIN <= batch_bytes_max <= BATCH_BYTES_MAX:
            raise InvalidArgument(
                f"batch_bytes_max is {batch_bytes_max}; choose {_BATCH_BYTES_MIN} to {BATCH_BYTES_MAX}"
            )
        if window_bytes_max < batch_bytes_max:
            raise InvalidArgument("window_bytes_max must be at least batch_bytes_max; raise it")
        if linger_us < 0 or timeout <= 0:
            raise InvalidArgument("linger_us must not be negative and timeout must be positive")
        if compression not in _CODECS:
            raise InvalidArgument(f"compression {compression!r} is unknown; use lz4, zstd or None")
        if schema is not None:
            raise FailedPrecondition(
                "schemas are not served yet; publish without schema= and encode payloads yourself"
            )
        self.linger_ns = linger_us * 1000
        self.batch_bytes = batch_bytes_max
        self.window_bytes = window_bytes_max
        self.timeout_ns = int(timeout * 1e9)
        self.codec = _CODECS[compression]


class Producer:
    """Publishes to one topic. Made by `client.producer()`."""

    def __init__(self, core: Core, topic: Topic, name: str, options: ProducerOptions) -> None:
        self.topic: str = topic.name
        self.name = name
        self.pump = core.pump
        self.timeout_ns = options.timeout_ns
        self.packer = Packer(options.batch_bytes, options.codec)
        self.unacked_bytes = 0
        self._core = core
        self._route = topic
        self._options = options
        self._lock = core.pump.lock
        self._batch_bytes = options.batch_bytes - FRAME_OVERHEAD_BYTES
        self._window_bytes = options.window_bytes
        self._linger_ns = options.linger_ns
        self._message_bytes_max = MESSAGE_BYTES_MAX_DEFAULT
        self._last_id: MessageId | None = None
        self._errors: list[tuple[str, str, int, DanubeError]] = []
        self._refusal: DanubeError | None = None
        """Set once no further message can be taken: closed, or forked."""
        self._next_lane = 0
        self.lanes = [
            Lane(self, partition.connection, partition.topic, partition.partition_id)
            for partition in topic.partitions
        ]
        self._only = self.lanes[0] if len(self.lanes) == 1 else None

    # ------------------------------------------------------------ opening

    def open_steps(self, deadline_ns: int) -> Steps[None]:
        """Wait until every partition has told its next sequence."""
        lanes = self.lanes
        yield Wait(lambda: all(lane.opened or lane.failure for lane in lanes), deadline_ns)
        with self._lock:
            for lane in lanes:
                if lane.failure is not None:
                    raise lane.failure
                if not lane.opened:
                    raise DeadlineExceeded(
                        f"{lane.topic}: its worker at {lane.connection.endpoint} did not answer in time; "
                        "look at `danube-fast status`"
                    )
            self._message_bytes_max = min(
                lane.connection.limit("message_bytes_max", MESSAGE_BYTES_MAX_DEFAULT)
                for lane in lanes
            )
            self.packer.message_frame_bytes_max = self._message_bytes_max

    # ------------------------------------------------------------ sending

    def send(
        self,
        payload: bytes | None,
        *,
        key: bytes | str | None = None,
        attributes: Attributes | None = None,
        event_time: Any = None,
        deliver_at: Any = None,
        deliver_after: float | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> None:
        """Queue one message; it goes out in a batch.

        Blocks while the window is full, at most for the producer's timeout (ResourceExhausted).
        Raises what went wrong with earlier messages. `event_time` and `deliver_at` are nanoseconds
        since the epoch or datetimes, `deliver_after` is in seconds.
        """
        with self._lock:
            lane = self._only
            if (
                lane is not None
                and key is None
                and type(payload) is bytes
                and attributes is None
                and event_time is None
                and deliver_at is None
                and deliver_after is None
                and on_delivery is None
                and self._refusal is None
                and not self._errors
                and lane.failure is None
            ):
                batch = lane.batch
                size = len(payload) + MESSAGE_OVERHEAD_BYTES
                if batch.byte_count + size <= self._batch_bytes and batch.is_plain:
                    batch.payloads.append(payload)
                    batch.byte_count += size
                    self._appended(lane, len(batch.payloads))
                    return
        self._core.run(
            self.send_steps(
                payload, key, attributes, event_time, deliver_at, deliver_after, on_delivery
            )
        )

    def _appended(self, lane: Lane, count: int) -> None:
        """A message was added to the open batch of `lane`: now, or later?"""
        if not lane.unacked:
            lane.push()
        elif count == 1:
            now = self.pump.clock.monotonic_ns()
            lane.linger_due_ns = now + self._linger_ns
            self.pump.arm(lane, lane.linger_due_ns)
        elif count & _LINGER_CHECK_MASK == 0:
            if self.pump.clock.monotonic_ns() >= lane.linger_due_ns or count >= BATCH_MESSAGES_MAX:
                self.pump.try_drain()
                lane.push()

    def send_steps(
        self,
        payload: bytes | None,
        key: bytes | str | None,
        attributes: Attributes | None,
        event_time: Any,
        deliver_at: Any,
        deliver_after: float | None,
        on_delivery: OnDelivery | None,
    ) -> Steps[None]:
        """`send`, with all its options."""
        fields = self._checked(payload, key, attributes, event_time, deliver_at, deliver_after)
        size = len(fields[0] or b"") + MESSAGE_OVERHEAD_BYTES
        deadline_ns = self.pump.clock.monotonic_ns() + self.timeout_ns
        while True:
            with self._lock:
                self._raise_errors()
                lane = self._lane_for(fields[1])
                batch = lane.batch
                if not batch.payloads or (
                    batch.byte_count + size <= self._batch_bytes
                    and len(batch.payloads) < BATCH_MESSAGES_MAX
                ) or lane.push():  # fmt: skip
                    lane.batch.append(*fields, on_delivery)
                    self._appended(lane, len(lane.batch.payloads))
                    return
            yield from self._room(lane, deadline_ns)

    def _room(self, lane: Lane, deadline_ns: int) -> Steps[None]:
        """Wait until the window lets one more frame of `lane` through."""
        ready = yield Wait(lambda: lane.can_pack or self._must_raise(lane), deadline_ns)
        if not ready:
            with self._lock:
                raise self._window_error(lane)

    def _must_raise(self, lane: Lane) -> bool:
        return bool(self._errors) or self._refusal is not None or lane.failure is not None

    def _window_error(self, lane: Lane) -> DanubeError:
        seconds = self.timeout_ns / 1e9
        if not lane.opened or not lane.connection.is_open:
            return DeadlineExceeded(
                f"{lane.topic}: the worker at {lane.connection.endpoint} could not be reached for "
                f"{seconds:g} s; look at `danube-fast status`, then send again"
            )
        why = lane.unacked[0].refusal if lane.unacked else None
        return ResourceExhausted(
            f"{lane.topic}: {self.unacked_bytes} bytes in {len(lane.unacked)} batches were not acked "
            f"within {seconds:g} s, so the message was not taken"
            + (f" (the broker says: {why})" if why else "")
            + "; send more slowly, or raise window_bytes_max= or timeout="
        )

    def _checked(
        self,
        payload: Any,
        key: Any,
        attributes: Attributes | None,
        event_time: Any,
        deliver_at: Any,
        deliver_after: float | None,
    ) -> tuple[bytes | None, bytes | None, Attributes | None, int | None, int | None]:
        data = as_payload(payload)
        if data is not None and len(data) > self._message_bytes_max:
            raise InvalidArgument(
                f"the payload has {len(data)} bytes and the broker accepts {self._message_bytes_max} "
                "(message_bytes_max); split it, or raise the broker's limit"
            )
        if deliver_after is not None:
            if deliver_at is not None:
                raise InvalidArgument("give deliver_at or deliver_after, not both")
            deliver_at = self.pump.clock.wall_ns() + int(deliver_after * 1e9)
        return (
            data,
            as_key(key),
            checked_attributes(attributes) if attributes else None,
            as_time_ns(event_time, "event_time"),
            as_time_ns(deliver_at, "deliver_at"),
        )

    def _lane_for(self, key: bytes | None) -> Lane:
        """By key hash, or round-robin by batch."""
        if self._only is not None:
            return self._only
        if key is not None:
            return self.lanes[key_hash(key) % len(self.lanes)]
        lane = self.lanes[self._next_lane]
        if not lane.batch.payloads:
            self._next_lane = (self._next_lane + 1) % len(self.lanes)
            lane = self.lanes[self._next_lane]
        return lane

    def send_many(
        self,
        payloads: Sequence[bytes | None],
        *,
        keys: Sequence[bytes | str | None] | None = None,
        attributes: Sequence[Attributes | None] | None = None,
        event_times: Sequence[Any] | None = None,
        deliver_at: Sequence[Any] | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> None:
        """Queue many messages, packed straight from the list (fastest from a `list[bytes]`).

        Blocks while the window is full. If it raises ResourceExhausted, the text says how many
        messages were taken. The list may be changed as soon as the call has returned.
        """
        self._core.run(
            self.send_many_steps(payloads, keys, attributes, event_times, deliver_at, on_delivery)
        )

    def send_many_steps(
        self,
        payloads: Sequence[bytes | None],
        keys: Sequence[bytes | str | None] | None,
        attributes: Sequence[Attributes | None] | None,
        event_times: Sequence[Any] | None,
        deliver_at: Sequence[Any] | None,
        on_delivery: OnDelivery | None,
    ) -> Steps[None]:
        """`send_many` as steps."""
        outgoing = outgoing_list(payloads, keys, attributes, event_times, deliver_at, on_delivery)
        if not outgoing.payloads:
            return
        if self._only is None and outgoing.keys is not None:
            for lane_index, part in self._by_key(outgoing):
                yield from self._pour(part, self.lanes[lane_index])
        else:
            yield from self._pour(outgoing, self._only)

    def _by_key(self, outgoing: Outgoing) -> list[tuple[int, Outgoing]]:
        """Split by the partition of each key; without a key, all to the next partition in turn."""
        count = len(self.lanes)
        parts: dict[int, Outgoing] = {}
        keys = outgoing.keys or []
        callbacks = dict(outgoing.callbacks or ())
        self._next_lane = (self._next_lane + 1) % count
        for index, payload in enumerate(outgoing.payloads):
            key = keys[index]
            lane_index = self._next_lane if key is None else key_hash(key) % count
            part = parts.get(lane_index)
            if part is None:
                part = parts[lane_index] = Outgoing()
            part.append(
                payload,
                key,
                outgoing.attributes[index] if outgoing.attributes else None,
                outgoing.event_times[index] if outgoing.event_times else None,
                outgoing.deliver_at[index] if outgoing.deliver_at else None,
                callbacks.get(index),
            )
        return list(parts.items())

    def _pour(self, outgoing: Outgoing, only: Lane | None) -> Steps[None]:
        """Pack a whole list into frames of one lane, or of all in turn."""
        total, start = len(outgoing.payloads), 0
        deadline_ns = self.pump.clock.monotonic_ns() + self.timeout_ns
        while start < total:
            with self._lock:
                self._raise_errors()
                lane = only or self._lane_for(None)
                # what waits in the open batch was sent earlier and goes first
                if lane.can_pack and lane.push() and lane.can_pack:
                    start = lane.pack(outgoing, start)
                    if only is None:
                        self._next_lane = (self._next_lane + 1) % len(self.lanes)
                    self.pump.try_drain()
                    deadline_ns = self.pump.clock.monotonic_ns() + self.timeout_ns
                    continue
            try:
                yield from self._room(lane, deadline_ns)
            except ResourceExhausted as error:
                raise ResourceExhausted(f"{error} ({start} of {total} messages taken)") from None

    # ------------------------------------------------------------ waiting for acks

    def publish(
        self,
        payload: bytes | None,
        *,
        key: bytes | str | None = None,
        attributes: Attributes | None = None,
        event_time: Any = None,
        deliver_at: Any = None,
        deliver_after: float | None = None,
    ) -> MessageId:
        """Publish one message at once and wait for its ack; its id. Never lingers."""
        return self._core.run(
            self.publish_steps(payload, key, attributes, event_time, deliver_at, deliver_after)
        )

    def publish_steps(
        self,
        payload: bytes | None,
        key: bytes | str | None = None,
        attributes: Attributes | None = None,
        event_time: Any = None,
        deliver_at: Any = None,
        deliver_after: float | None = None,
    ) -> Steps[MessageId]:
        """`publish` as steps."""
        outgoing = Outgoing()
        outgoing.append(
            *self._checked(payload, key, attributes, event_time, deliver_at, deliver_after), None
        )
        deadline_ns = self.pump.clock.monotonic_ns() + self.timeout_ns
        sending: Sending | None = None
        while sending is None:
            with self._lock:
                self._raise_errors()
                lane = self._lane_for(outgoing.keys[0] if outgoing.keys else None)
                if lane.can_pack and lane.push() and lane.can_pack:
                    lane.pack(outgoing, 0)
                    sending = lane.unacked[-1]
                    sending.awaited = True
                    break
            yield from self._room(lane, deadline_ns)
        frame = sending
        yield Wait(lambda: frame.done)
        if frame.error is not None:
            raise frame.error
        return lane.message_id(frame, 0)

    def flush(self, timeout: float | None = None) -> MessageId | None:
        """Wait until everything sent is acked; id of the last message acked, None if there is none.

        Raises the error of messages that were not accepted, naming the first and the last, and
        DeadlineExceeded when `timeout` (seconds; default: the producer's own) is over.
        """
        return self._core.run(self.flush_steps(timeout))

    def flush_steps(self, timeout: float | None = None) -> Steps[MessageId | None]:
        """`flush` as steps."""
        seconds = self.timeout_ns / 1e9 if timeout is None else timeout
        deadline_ns = deadline_after(self.pump.clock, seconds)
        with self._lock:
            self._check_usable()
            for lane in self.lanes:
                lane.push()
        ready = yield Wait(self._is_flushed, deadline_ns)
        with self._lock:
            self._raise_errors()
            if not ready:
                raise DeadlineExceeded(
                    f"not acked within {seconds:g} s: {self._unacked_text()}; flush again to wait on"
                )
            return self._last_id

    def _is_flushed(self) -> bool:
        if self._errors or self._refusal is not None:
            return True
        for lane in self.lanes:
            if lane.batch.payloads and lane.failure is None:
                lane.push()
        return all(not lane.unacked and not lane.batch.payloads for lane in self.lanes)

    def _unacked_text(self) -> str:
        count, first, last = 0, "", ""
        for lane in self.lanes:
            if lane.unacked or lane.batch.payloads:
                begin = lane.unacked[0].base_sequence if lane.unacked else lane.next_sequence
                end = lane.next_sequence + len(lane.batch.payloads)
                count += end - begin
                first = first or f"{lane.topic} sequence {begin}"
                last = f"{lane.topic} sequence {end - 1}"
        return f"{count} messages, first {first}, last {last}"

    # ------------------------------------------------------------ what lanes report

    @property
    def window_open(self) -> bool:
        """Whether the unacked bytes leave room for one more frame."""
        return self.unacked_bytes < self._window_bytes

    def settled(self, lane: Lane, sending: Sending) -> None:
        """Lane: a frame is acked or given up."""
        self.unacked_bytes -= sending.frame_bytes
        self.packer.pool.give_back(sending.buffer)
        error = sending.error
        if error is None:
            self._last_id = lane.message_id(sending, sending.message_count - 1)
        elif not sending.awaited:
            first, last = lane.name_messages(sending)
            self._note_error(first, last, sending.message_count, error)
        if sending.callbacks:
            for index, call in sending.callbacks:
                done = None if error is not None else lane.message_id(sending, index)
                self.pump.callbacks.append((call, (done, error)))

    def batch_dropped(self, lane: Lane, batch: Outgoing, error: DanubeError) -> None:
        """Lane: messages that were never packed are given up."""
        if batch.payloads:
            first, last = lane.next_sequence, lane.next_sequence + len(batch.payloads) - 1
            self._note_error(
                f"{lane.topic} sequence {first}",
                f"{lane.topic} sequence {last}",
                len(batch.payloads),
                error,
            )
        for _, call in batch.callbacks or ():
            self.pump.callbacks.append((call, (None, error)))

    def lane_lost(self, lane: Lane) -> None:
        """Lane: its worker does not have the partition; look the topic up again."""
        self._core.routes.refresh(self._route)

    def moved(self) -> None:
        """Routes: the topic was looked up again."""
        for lane, partition in zip(self.lanes, self._route.partitions, strict=False):
            lane.move(partition.connection)

    def topic_gone(self, error: DanubeError) -> None:
        """Routes: the topic does not exist any more."""
        for lane in self.lanes:
            lane.fail(error)

    def _note_error(self, first: str, last: str, count: int, error: DanubeError) -> None:
        if self._errors and type(self._errors[-1][3]) is type(error):
            begin, _, before, kept = self._errors[-1]
            self._errors[-1] = (begin, last, before + count, kept)
        else:
            self._errors.append((first, last, count, error))

    def _check_usable(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def _raise_errors(self) -> None:
        self._check_usable()
        if self._errors:
            first, last, _, error = self._errors[0]
            count = sum(entry[2] for entry in self._errors)
            last = self._errors[-1][1]
            self._errors.clear()
            raise type(error)(
                f"{count} messages were not accepted, first {first}, last {last}: {error}"
            )
        if self._only is not None and self._only.failure is not None:
            raise self._only.failure

    # ------------------------------------------------------------ the end

    def close(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """Flush and close; returns within `timeout` seconds. Raises what was not accepted or acked."""
        self._core.run(self.close_steps(timeout))

    def close_steps(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> Steps[None]:
        """`close` as steps."""
        if self._refusal is not None:
            return
        deadline_ns = deadline_after(self.pump.clock, timeout)
        try:
            yield from self.flush_steps(timeout)
        finally:
            with self._lock:
                self._refusal = FailedPrecondition(
                    f"the producer {self.name!r} is closed; open another with client.producer()"
                )
                calls = [call for lane in self.lanes if (call := lane.close()) is not None]
                self._core.forget(self)
                self.pump.notify()
        yield Wait(lambda: all(call.done for call in calls), deadline_ns)

    def refuse(self, error: DanubeError) -> None:
        """Core: nothing works any more (closed client, forked process)."""
        self._refusal = self._refusal or error

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()
            return
        try:
            self.close()
        except DanubeError:
            pass  # the application's own error matters more

    def __repr__(self) -> str:
        return f"<Producer {self.name!r} on {self.topic}, {self.unacked_bytes} bytes unacked>"
