"""The publisher: everything of a producer but the way in which its callers wait.

    send, send_many     into the open batch of a lane; the calling thread packs and sends it when
                        it is full, the timer thread when it has lingered
    publish             into the open batch too, which goes out at once; a ticket waits for the ack
    flush               waits until everything is acked, raises what was not

Each partition has a lane (`lane.py`). `Producer` and `AsyncProducer` are faces of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from danube_fast.checks import check_callable
from danube_fast.client.link.answers import Ticket
from danube_fast.client.link.buffers import Buffers
from danube_fast.client.link.names import no_answer_steps
from danube_fast.client.link.steps import Steps, Wait, deadline_after
from danube_fast.client.produce.lane import Lane
from danube_fast.client.produce.outgoing import (
    Attributes,
    Fields,
    OnDelivery,
    Outgoing,
    as_key,
    as_payload,
    as_time_ns,
    by_key,
    check_delays,
    checked_attributes,
    due_ns,
    outgoing_list,
)
from danube_fast.client.produce.straight import PAYLOAD_BYTES_MAX, StraightWay
from danube_fast.client.topics.routes import Partition, Routes, Topic, made_again
from danube_fast.client.values.limits import (
    CLOSE_TIMEOUT_SECONDS,
    MESSAGE_OVERHEAD_BYTES,
)
from danube_fast.client.values.message import MessageId
from danube_fast.client.values.options import ProducerOptions
from danube_fast.errors import (
    DanubeError,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
)
from danube_fast.frame.layout import FRAME_OVERHEAD_BYTES, Codec

__all__ = ["QUICK_BYTES_MAX", "UNCHECKED_MASK", "Publisher"]

UNCHECKED_MASK = 31
"""A busy sender looks at the clock, and at the size of what is open, once in so many messages."""
QUICK_BYTES_MAX = 2048
"""Larger payloads are looked at one by one."""
_ALONE = (None,) * 4
"""Fields of a payload without any other."""
_QUICK_BATCH_BYTES_MIN = 2 * (UNCHECKED_MASK + 1) * (QUICK_BYTES_MAX + MESSAGE_OVERHEAD_BYTES)
_QUICK_BATCH_MESSAGES_MIN = 2 * (UNCHECKED_MASK + 1)
"""Batches take at least twice what is appended without a look."""


class Publisher(StraightWay):
    """Lanes and open batches of one producer."""

    __slots__ = (
        "__weakref__", "_batch_bytes", "_linger_ns", "_lock", "joining", "topic",
    )  # fmt: skip

    def __init__(
        self, routes: Routes, buffers: Buffers, route: Topic, name: str, options: ProducerOptions
    ) -> None:
        super().__init__(routes, buffers, route, name, options)
        self.topic: str = route.name
        self._lock = self.pump.lock
        self._batch_bytes = options.batch_bytes - FRAME_OVERHEAD_BYTES
        self._alone_bytes_max = PAYLOAD_BYTES_MAX if options.codec == Codec.NONE else -1
        self._linger_ns = options.linger_ns
        self._next_lane = 0
        self.joining: list[Lane] = []
        """Lanes to partitions that are new; messages go there once all of them are open."""
        self.lanes = [self.make_lane(partition) for partition in route.partitions]
        self._only = self.lanes[0] if len(self.lanes) == 1 else None
        self.changed()

    # ------------------------------------------------------------ opening

    def make_lane(self, partition: Partition, *, is_joining: bool = False) -> Lane:
        """Make the lane of a partition."""
        return Lane(self, partition, is_joining=is_joining)

    def open_steps(self, deadline_ns: int) -> Steps[None]:
        """Wait until every partition has told its next sequence."""
        yield Wait(lambda: all(lane.opened or lane.failure for lane in self.lanes), deadline_ns)
        with self._lock:
            late = next((lane for lane in self.lanes if lane.failure or not lane.opened), None)
            if late is None:
                self.changed()
                return
        if late.failure is not None:
            raise late.failure
        if late.refusal is not None:
            raise DeadlineExceeded(
                f"{late.topic} was not opened in time, as its worker refuses that for now: {late.refusal}"
            )
        raise (yield from no_answer_steps(self.pump, late.topic, late.connection.endpoint))

    def keep_to_limits(self) -> None:
        """Lanes: pack as the brokers want it that have opened them so far."""
        lanes = [*self.lanes, *self.joining]
        known = [
            lane.limits.within(lane.connection.limits)
            for lane in lanes
            if lane.connection.limits or lane.connection.is_open
        ]
        if not known:
            return  # none has said what it takes
        self.packer.keep_to(known)
        self._batch_bytes = self.packer.batch_bytes - FRAME_OVERHEAD_BYTES
        if self._alone_bytes_max >= 0:
            self._alone_bytes_max = min(
                PAYLOAD_BYTES_MAX,
                self.packer.message_bytes_max,
                self._batch_bytes - MESSAGE_OVERHEAD_BYTES,
            )

    # ------------------------------------------------------------ sending

    def send_plain(self, payload: Any) -> bool:
        """Send a payload alone, if that needs neither a wait nor a decision; whether it was sent."""
        if type(payload) is not bytes or self.pump.is_inside():
            return False
        with self._lock:
            lane = self.quick
            if lane is None:
                return False
            more = len(payload) + MESSAGE_OVERHEAD_BYTES
            if len(payload) <= QUICK_BYTES_MAX:
                more *= UNCHECKED_MASK + 1  # as much may follow before the next look
            # without a batch behind it, what is not there takes nothing
            before = lane.measure() if lane.plain else 0
            if before + more > self._batch_bytes or len(lane.plain) >= self.packer.batch_messages:
                return False
            lane.plain.append(payload)
            self._appended(lane)
            return True

    def look_after(self, lane: Lane) -> None:
        """See that what was appended to `plain` is sent: there was nothing that would, or perhaps not any more."""
        if self.pump.is_inside():
            self.pump.call_later(self.look_after, lane)
            return
        with self._lock:
            if lane.is_minded or lane.is_empty:
                return
            if lane.failure is not None:
                lane.drop_open(lane.failure)
            elif self._refusal is not None:
                lane.plain.clear()
                raise self._refusal
            else:
                self._appended(lane)

    def _appended(self, lane: Lane) -> None:
        """Send what is open in `lane`, which is more now, at once or later."""
        bundler = lane.connection.bundler
        if not (lane.is_minded or lane.unacked or bundler.is_busy(lane.ack_class)):
            lane.push()
            return
        # what is open while something is unacked goes with its ack
        now_ns = self.pump.clock.monotonic_ns()
        if not lane.is_minded:
            bundler.linger(lane, now_ns, self._linger_ns)
            lane.is_minded = True  # only now: an interrupt in there must not leave it behind
        if now_ns >= bundler.look_ns:
            bundler.keep_time(now_ns)

    def try_send(self, fields: Fields, callback: OnDelivery | Ticket | None) -> Lane | None:
        """Add a checked message to its lane's open batch; that lane if it must be waited for."""
        if callback is not None and not isinstance(callback, Ticket):
            check_callable(callback, "on_delivery")
        if self.pump.is_inside():
            self.pump.call_later(lambda: self.pump.run(self.send_steps(fields, callback)))
            return None
        with self._lock:
            self._raise_errors()
            lane = self._lane_for(fields[1])
            if lane.failure is not None:
                raise lane.failure
            if not self._has_room(lane, len(fields[0] or b"")):
                return lane
            batch = lane.batch
            if (
                lane is self.quick
                and callback is None
                and fields[0] is not None
                and fields[1:] == _ALONE
            ):
                lane.plain.append(fields[0])
            else:
                batch.append(*fields, callback)
                self.quick = None
            if isinstance(callback, Ticket):
                batch.urgent = True
                if self.pump.push_later is None:
                    lane.push()
                else:
                    self.pump.push_later(lane)
            elif not lane.is_minded or not lane.open_messages & UNCHECKED_MASK:
                self._appended(lane)
            return None

    def send_steps(self, fields: Fields, callback: OnDelivery | Ticket | None) -> Steps[None]:
        """Send a checked message, which may have to wait for the window."""
        deadline_ns = self.pump.clock.monotonic_ns() + self.timeout_ns
        while (lane := self.try_send(fields, callback)) is not None:
            yield from self._room(lane, deadline_ns)

    def publish_steps(
        self,
        payload: bytes | None,
        key: bytes | str | None = None,
        attributes: Attributes | None = None,
        event_time: Any = None,
        deliver_at: Any = None,
        deliver_after: float | None = None,
    ) -> Steps[MessageId]:
        """Send one message at once, and wait for its ack."""
        fields = self.checked(payload, key, attributes, event_time, deliver_at, deliver_after)
        ticket = Ticket()
        yield from self.send_steps(fields, ticket)
        yield Wait(ticket.is_complete, ticket=ticket)
        return self._outcome(ticket)

    def _has_room(self, lane: Lane, payload_bytes: int) -> bool:
        """Whether one more message may be open, if need be after the others were sent."""
        return (
            lane.is_empty
            or (
                lane.measure() + payload_bytes + MESSAGE_OVERHEAD_BYTES <= self._batch_bytes
                and lane.open_messages < self.packer.batch_messages
            )
            or lane.push()
        )

    def _room(self, lane: Lane, deadline_ns: int) -> Steps[None]:
        """Wait until the window lets one more frame of `lane` through."""
        ready = yield Wait(
            lambda: lane.can_pour or bool(self._errors or self._refusal or lane.failure),
            deadline_ns,
        )
        if not ready:
            with self._lock:
                raise self._window_error(lane)

    def _window_error(self, lane: Lane) -> DanubeError:
        seconds = self.timeout_ns / 1e9
        if not lane.opened or not lane.connection.is_open:
            return DeadlineExceeded(
                f"{lane.topic}: the worker at {lane.connection.endpoint} could not be reached for "
                f"{seconds:g} s; look at `danube-fast status`, then send again"
            )
        why = lane.refusal if lane.unacked else None
        return ResourceExhausted(
            f"{lane.topic}: {self.unacked_bytes} bytes in {len(lane.unacked)} batches were not acked "
            f"within {seconds:g} s, so the message was not taken"
            + (f" (the broker says: {why})" if why else "")
            + f"; {self.remedies.no_room}"
        )

    def checked(
        self,
        payload: Any,
        key: Any,
        attributes: Any,
        event_time: Any,
        deliver_at: Any,
        deliver_after: Any,
    ) -> Fields:
        """Return the fields of one message in the form in which they are packed. InvalidArgument."""
        own = None if attributes is None else checked_attributes(attributes)
        fields = self.checked_plain(payload, key, own)
        if event_time is None and deliver_at is None and deliver_after is None:
            return fields
        if deliver_after is not None or deliver_at is not None:
            deliver_at = due_ns(deliver_at, deliver_after, self.pump.clock)
            check_delays(self._route)
        return (*fields[:3], as_time_ns(event_time, "event_time"), deliver_at)

    def checked_plain(self, payload: Any, key: Any, attributes: Attributes | None) -> Fields:
        """Return the same fields of a message without times, whose attributes were checked. InvalidArgument."""
        data = payload if type(payload) is bytes else as_payload(payload)
        limit = self.packer.message_bytes_max
        if data is not None and len(data) > limit:
            raise InvalidArgument(
                f"the payload has {len(data)} bytes and the broker accepts {limit} "
                "(message_bytes_max); split it, or raise the broker's limit"
            )
        return data, None if key is None else as_key(key), attributes, None, None

    def send_many_steps(
        self,
        payloads: Sequence[bytes | None],
        keys: Sequence[bytes | str | None] | None,
        attributes: Sequence[Attributes | None] | None,
        event_times: Sequence[Any] | None,
        deliver_at: Sequence[Any] | None,
        on_delivery: OnDelivery | None,
    ) -> Steps[None]:
        """Send whole lists, packed where they lie."""
        outgoing = outgoing_list(payloads, keys, attributes, event_times, deliver_at, on_delivery)
        if outgoing.deliver_at:
            check_delays(self._route)
        if self._only is None and outgoing.keys is not None:
            self._next_lane = (self._next_lane + 1) % len(self.lanes)
            for lane_index, part in by_key(outgoing, len(self.lanes), self._next_lane):
                yield from self._pour(part, self.lanes[lane_index])
        else:
            yield from self._pour(outgoing, self._only)

    def _pour(self, outgoing: Outgoing, only: Lane | None) -> Steps[None]:
        """Pack a whole list into frames of one lane, or of all in turn."""
        total, start = len(outgoing.payloads), 0
        deadline_ns = self.pump.clock.monotonic_ns() + self.timeout_ns
        while start < total:
            with self._lock:
                self._raise_errors()
                lane = only or self._lane_for(None)
                if lane.failure is not None:
                    raise lane.failure
                # what waits in the open batch was sent earlier and goes first
                if lane.can_pour and lane.push() and lane.can_pour:
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

    def flush_steps(self, timeout: float | None = None) -> Steps[MessageId | None]:
        """Wait until nothing is unacked; id of the last message acked."""
        seconds = self.timeout_ns / 1e9 if timeout is None else timeout
        deadline_ns = deadline_after(self.pump.clock, seconds)
        if self.pump.calls_later:
            yield Wait(lambda: not self.pump.calls_later, deadline_ns)
        with self._lock:
            self._check_usable()
            for lane in self.lanes:
                lane.push()
        ready = yield Wait(self._is_flushed, deadline_ns)
        yield Wait(self.pump.is_called_back, deadline_ns)
        with self._lock:
            self._raise_errors()
            if not ready:
                raise DeadlineExceeded(
                    f"not acked within {seconds:g} s: {self._unacked_text()}; {self.remedies.not_flushed}"
                    f"{self._refusal_text()}"
                )
            return self._last

    def _is_flushed(self) -> bool:
        if self._errors or self._refusal is not None:
            return True
        for lane in self.lanes:
            if lane.failure is None:
                lane.push()
        return all(not lane.unacked and lane.is_empty for lane in self.lanes)

    def _unacked_text(self) -> str:
        count, first, last = 0, "", ""
        for lane in self.lanes:
            if lane.unacked or not lane.is_empty:
                begin = lane.unacked[0].base_sequence if lane.unacked else lane.next_sequence
                end = lane.next_sequence + lane.open_messages
                count += end - begin
                first = first or f"{lane.topic} sequence {begin}"
                last = f"{lane.topic} sequence {end - 1}"
        return f"{count} messages, first {first}, last {last}"

    def _refusal_text(self) -> str:
        """Why the broker does not take what is unacked."""
        reasons = [lane.refusal for lane in self.lanes if lane.unacked]
        return next((f" (the broker says: {reason})" for reason in reasons if reason), "")

    # ------------------------------------------------------------ lanes and partitions

    def changed(self) -> None:
        """Lanes: take lanes into use that a grown topic needs, when all are open; decide how to send."""
        if self.joining and all(lane.opened for lane in self.joining):
            for joined in self.joining:
                joined.is_joining = False
            self.lanes += self.joining
            self.joining = []
            self._only = None
        lane = self._only
        usable = lane is not None and lane.failure is None
        self._quick = lane if usable and not self._errors and self._refusal is None else None
        is_quick = lane is not None and not lane.batch.payloads
        is_quick &= self._batch_bytes >= _QUICK_BATCH_BYTES_MIN
        is_quick &= self.packer.batch_messages >= _QUICK_BATCH_MESSAGES_MIN
        self.quick = self._quick if is_quick else None

    def moved(self) -> None:
        """Routes: follow partitions to their workers, open lanes to new ones. What is on its way keeps its
        partition."""
        if self._refusal is not None:
            return
        route = self._route
        lanes = [*self.lanes, *self.joining]
        known = list(zip(lanes, route.partitions, strict=False))
        if any(lane.partition_id != partition.partition_id for lane, partition in known):
            self.topic_gone(route, made_again(route))
            return
        for lane, partition in known:
            lane.move(partition.connection)
        for partition in route.partitions[len(lanes) :]:
            self.joining.append(self.make_lane(partition, is_joining=True))

    @property
    def next_sequence(self) -> int:
        """Sequence of the next message that is packed. Raises FailedPrecondition for a topic of several partitions."""
        if self._only is None:
            raise FailedPrecondition(
                f"{self.topic} has {len(self.lanes)} partitions, which count for themselves; open a producer on one of "
                f"them, such as {self.lanes[0].topic}"
            )
        return self._only.next_sequence

    @property
    def is_usable(self) -> bool:
        """Whether it is open, and none of its lanes has failed."""
        if self._quick is not None:
            return True
        return self._refusal is None and all(lane.failure is None for lane in self.lanes)

    def routes(self) -> list[Topic]:
        """Return what was looked up for its topic."""
        return [self._route]

    def topic_gone(self, route: Topic, error: DanubeError) -> None:
        """Routes: give up a topic that does not exist any more."""
        for lane in (*self.lanes, *self.joining):
            lane.fail(error)

    # ------------------------------------------------------------ the end

    def close_steps(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> Steps[None]:
        """Flush, then give every lane up."""
        if self._refusal is not None:
            return
        deadline_ns = deadline_after(self.pump.clock, timeout)
        try:
            yield from self.flush_steps(timeout)
        finally:
            with self._lock:
                self.refuse(
                    FailedPrecondition(
                        f"the producer {self.name!r} is closed; open another with client.producer()"
                    )
                )
                lanes = (*self.lanes, *self.joining)
                calls = [call for lane in lanes if (call := lane.close()) is not None]
                self._routes.users.pop(self, None)
                self.pump.unacked_bytes -= self.unacked_bytes  # no ack will be heard
                self.unacked_bytes = 0
                self.pump.notify()
        yield Wait(lambda: all(call.done for call in calls), deadline_ns)

    def refuse(self, error: DanubeError) -> None:
        """Take no more messages: the producer or the client is closed, or the process was forked."""
        self._refusal = self._refusal or error
        self.changed()
        waits = type(error)(f"{error} (the message that waits for its ack may have been stored)")
        for lane in (*self.lanes, *self.joining):
            for callbacks in (*(each.callbacks for each in lane.unacked), lane.batch.callbacks):
                for _, call in callbacks or ():
                    if isinstance(call, Ticket) and not call.done:
                        call.complete(None, waits)
