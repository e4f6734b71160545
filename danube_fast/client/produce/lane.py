"""A lane: one producer on one partition. It numbers, packs, sends, and sends again.

    open                 unacked, in order of sequence                       acked
    plain, batch ... --> [ sending | sending | ... (at most the window) ] --> released
       linger             OPEN_PRODUCER decides where the numbering starts

Sequences are dense, and the broker accepts only the next one. So after any refusal the lane stops
sending until every frame on its way has been answered, gives up what can never succeed, gives the
frames behind it their new numbers, and sends on from there. After a lost session it asks for the
broker's next sequence first; frames that the broker has already are acked as duplicates at their
original offsets.

The broker knows a producer by its name alone. At the end it may stand for another lane of this client, one that
took over: then nothing is to be closed.

All methods are called under the pump's lock.
"""

from __future__ import annotations

from collections.abc import Callable

from danube_fast.client.link.buffers import Sending
from danube_fast.client.link.calls import RETRYABLE, Call, OnLoss, asks_again, tell_wait
from danube_fast.client.link.connection import Connection
from danube_fast.client.produce.lane_state import Change, LaneState, Phase, at_once
from danube_fast.client.produce.outgoing import Outgoing
from danube_fast.client.produce.state import ProducerState
from danube_fast.client.topics.routes import Partition
from danube_fast.client.values.limits import (
    BACKOFF_MAX_NS,
    BACKOFF_MIN_NS,
    FOREVER_NS,
    THROTTLE_MAX_NS,
)
from danube_fast.clock import MILLISECOND_NS
from danube_fast.errors import (
    AlreadyExists,
    DanubeError,
    DeadlineExceeded,
    InvalidArgument,
    NotOwner,
    ProducerFenced,
    ResourceExhausted,
    TopicDeleted,
    Unavailable,
    error_from_code,
)
from danube_fast.frame.kernel import direct
from danube_fast.frame.stamp import seal
from danube_fast.net.protocol import CloseProducer, OpenProducer, OpenProducerUnnamed, Status
from danube_fast.types import REPLY_TOPICS

__all__ = ["Lane", "Phase"]

_seal, _PAUSED = direct(seal), Phase.PAUSED
_RETRYABLE = (*RETRYABLE, DeadlineExceeded)


class Lane(LaneState):
    """Sequence numbers, window and open batch of one producer on one partition."""

    __slots__ = (
        "_backoff_ns", "_has_moved", "_is_told", "_opening", "_refused_since_ns", "_retry_due_ns", "_wait_ns", "_was_fenced",
        "is_joining", "on_way", "refusal",
    )  # fmt: skip

    def __init__(
        self, producer: ProducerState, partition: Partition, *, is_joining: bool = False
    ) -> None:
        super().__init__(producer, partition)
        self.is_joining = is_joining
        """The partition is new: messages go there once all new ones are open."""
        self.on_way = 0
        """Frames sent and not answered."""
        self.refusal: DanubeError | None = None
        """The last refusal, if the broker has taken nothing since: frames behind a refused one are
        refused for their sequence, which explains nothing."""
        self._retry_due_ns = FOREVER_NS
        self._wait_ns = 0
        """The time that the broker said to wait before sending again."""
        self._backoff_ns = BACKOFF_MIN_NS
        self._refused_since_ns = 0
        self._is_told = False
        """Whether the log has why it is refused."""
        self._opening: Call | None = None
        self._has_moved = self._was_fenced = False
        """The partition went elsewhere since this was fenced the last time. An OPEN_PRODUCER of our own that was
        passed on from there may have come late and fenced us: then it is asked again, once."""
        self.connection.users[self] = None
        if self.connection.is_open:
            self._open()

    # ------------------------------------------------------------ opening

    def _open(self) -> None:
        """Ask for the broker's next sequence."""
        self.phase = Phase.OPENING
        if self._opening is not None:
            self.connection.abandon(self._opening)
        request = self.connection.next_request()
        command: OpenProducer | OpenProducerUnnamed
        command = OpenProducerUnnamed(request, self.partition_id, self.producer.name)
        if self.connection.wants_topics or self.topic.startswith(REPLY_TOPICS):
            command = OpenProducer(request, self.partition_id, self.producer.name, self.parent)
        self._opening = self.connection.call(Call(command, OnLoss.FORGET, self._on_opened))

    def _on_opened(self, call: Call) -> None:
        if call is not self._opening and self._opening is not None:
            return
        self._opening = None
        if call.error is not None:
            self._on_refused(call.error)
            return
        reply = call.value
        if self.opened and reply["next_sequence"] > self.next_sequence:
            self.fail(self._fenced())
            return
        if self._was_fenced:
            self._has_moved = self._was_fenced = False
        self.opened = True
        self.producer_id, self.producer_epoch = reply["producer_id"], reply["producer_epoch"]
        self.limits.tell(reply)
        self.producer.keep_to_limits()
        first = self.unacked[0].base_sequence if self.unacked else self.next_sequence
        known = reply["next_sequence"]
        self._number_from(min(first, known) if self.unacked else known)
        self._backoff_ns, self._refused_since_ns, self._is_told = BACKOFF_MIN_NS, 0, False
        self._resend()
        self.producer.changed()
        self.producer.pump.notify()

    def _on_refused(self, error: DanubeError) -> None:
        now = self.producer.pump.clock.monotonic_ns()
        self._refused_since_ns = self._refused_since_ns or now
        refused_ns = now - self._refused_since_ns
        waits = isinstance(error, _RETRYABLE) and self.is_joining
        waits = waits or isinstance(error, DeadlineExceeded)
        if not waits and not asks_again(error, refused_ns, was_open=self.opened):
            self.fail(error)
            return
        self.refusal = error
        self._is_told = tell_wait(self.topic, error, refused_ns, is_told=self._is_told)
        self._retry_later(None)  # nothing may be sent before it is open, on this session
        if isinstance(error, Unavailable):
            self.producer.lost()

    def _fenced(self) -> ProducerFenced:
        return ProducerFenced(
            f"another producer named {self.producer.name!r} has published to {self.topic}; close this "
            "one, or give each producer a name of its own"
        )

    def _number_from(self, sequence: int) -> None:
        """Give the unacked frames dense numbers from `sequence` on, and seal what changed."""
        for sending in self.unacked:
            sending.base_sequence = sequence
            self.seal(sending)
            sequence += sending.message_count
        self.next_sequence = sequence

    def seal(self, sending: Sending) -> None:
        """Write the client's half of a frame's header, and its crc."""
        _seal(
            sending.address, self.producer_id, sending.base_sequence, sending.publish_time_ns,
            self.producer_epoch, 0, 0,
        )  # fmt: skip

    # ------------------------------------------------------------ sending

    def pack(
        self, outgoing: Outgoing, start: int, cut: Callable[[int], Change] | None = None
    ) -> int:
        """Pack and send one frame from `outgoing` at `start`; index of the first message left. `cut` returns what takes
        so many messages out of where they came from."""
        producer = self.producer
        buffer, frame_bytes, count = producer.packer.pack(outgoing, start)
        sending = Sending(self, buffer, frame_bytes, self.next_sequence, count)
        clock = producer.pump.clock
        sending.publish_time_ns = clock.wall_ns()
        self.seal(sending)
        if outgoing.callbacks is not None:
            stop = start + count
            found = [(i - start, call) for i, call in outgoing.callbacks if start <= i < stop]
            sending.callbacks = found or None
        self._take(sending, clock.monotonic_ns(), *(() if cut is None else (cut(count),)))
        if self.phase is Phase.FLOWING:
            self._transmit(sending)
        return start + count

    def _take(self, sending: Sending, now_ns: int, *cut: Change) -> None:
        """Count a sealed frame as unacked, and its messages as open no more."""
        producer = self.producer
        sending.deadline_ns = now_ns + producer.timeout_ns
        behind = sending.base_sequence + sending.message_count
        at_once((self.unacked.append, sending), (setattr, self, "next_sequence", behind), *cut)
        producer.sent(sending.frame_bytes)
        if now_ns >= self.limits.relax_ns:
            self.limits.relax(now_ns)
            producer.keep_to_limits()
        if self not in producer.pump.armed:
            producer.pump.arm(self, sending.deadline_ns)

    def push(self) -> bool:
        """Send what is open as far as the window allows; True if nothing of it is left."""
        while not self.is_empty and self.can_pack:
            self.is_minded = False
            try:
                self._pack_open()
            except BaseException:
                self.connection.reset()  # an interrupt: what was packed is perhaps not sent
                raise
        is_left = self.is_minded = not self.is_empty
        if is_left and self.opened and not self.unacked:
            self.producer.starved[self] = None
        return not is_left

    def _pack_open(self) -> None:
        """Pack and send one frame of what is open."""
        outgoing, cut = self.first_open()
        try:
            self.pack(outgoing, 0, cut)
        except InvalidArgument as error:
            # too large with its key and attributes: it must not block those behind it
            one = outgoing.part(0, 1)
            self.producer.batch_dropped(self.topic, self.next_sequence, one, error)
            at_once(cut(1))
        if outgoing is not self.batch and outgoing.payloads is not self.plain:
            self.producer.changed()

    # ------------------------------------------------------------ sending with other lanes

    def packed(self, sending: Sending, now_ns: int) -> None:
        """Take a frame with the first of what is open as unacked, and on its way."""
        self._take(sending, now_ns, self.cut_plain(sending.message_count))
        self.on_way += 1
        self.is_minded = bool(self.plain)

    def _transmit(self, sending: Sending) -> None:
        self.on_way += 1
        self.connection.bundler.send(sending)

    def _resend(self) -> None:
        """Everything that is not acked goes out (again), in order."""
        self.phase = Phase.FLOWING
        self._retry_due_ns = FOREVER_NS
        self.on_way = 0
        for sending in self.unacked:
            sending.refusal = None
            self._transmit(sending)
        self.push()

    # ------------------------------------------------------------ answers

    def answered(self, sending: Sending, status: int, offset: int, text: str) -> None:
        """Take the broker's answer to one frame."""
        if status <= Status.DUPLICATE:
            self.acked(sending, offset)
            return
        sending.request = 0
        self.on_way -= 1
        if status == Status.NOT_OWNER:
            self._has_moved = True
        elif status == Status.FENCED:
            if not self._has_moved:
                self.fail(self._fenced())
                return
            self._was_fenced, status = True, int(Status.NOT_OWNER)
        if status == Status.TOPIC_DELETED:
            self.fail(TopicDeleted(f"{self.topic} was deleted; create it again"))
            return
        code = status
        if status == Status.THROTTLED:
            code, text = (
                ResourceExhausted.code,
                f"the publish rate of {self.topic} is used up; send more slowly",
            )
            self._wait_ns = min(offset * MILLISECOND_NS, THROTTLE_MAX_NS)
            now_ns = self.producer.pump.clock.monotonic_ns()
            if self.limits.wait(self._wait_ns, sending.frame_bytes, sending.message_count, now_ns):
                self.producer.keep_to_limits()
        if sending.buffer.frames_left > 1:
            sending.stand_alone(self.producer.packer.pool)
        if status != Status.OUT_OF_SEQUENCE:
            sending.refusal = error_from_code(code, text or f"{self.topic} refused a publish")
            self.refusal = sending.refusal
        if self.phase is Phase.FLOWING:
            self.phase = Phase.PAUSED
        if status == Status.NOT_OWNER:
            self.producer.lost()
        if self.on_way == 0 and self.phase is Phase.PAUSED:
            self._recover()

    def acked(self, sending: Sending, offset: int) -> None:
        """Take the answer that a frame is stored."""
        sending.request = 0
        self.on_way -= 1
        self.refusal = None
        sending.done, sending.offset = True, offset
        unacked = self.unacked
        while unacked and unacked[0].done:
            acked = unacked.popleft()
            self._backoff_ns = BACKOFF_MIN_NS
            self.producer.completed(self.topic, acked)
        if self.on_way == 0 and self.phase is _PAUSED:
            self._recover()
        elif (self.plain or self.batch.payloads) and (not unacked or self.batch.urgent):
            self.push_soon()

    def push_soon(self) -> None:
        """Send what is open, now or when all answers are read that are being read."""
        self.connection.bundler.push_acked(self)

    def _recover(self) -> None:
        """Go on after a refusal, when everything that was sent has been answered."""
        while self.unacked:
            head = self.unacked[0]
            if head.done:
                self.producer.completed(self.topic, self.unacked.popleft())
                continue
            if head.refusal is None or isinstance(head.refusal, _RETRYABLE):
                break
            refusal = head.refusal
            self.unacked.popleft()
            self._give_up(head, refusal)
            if self.unacked and not isinstance(refusal, AlreadyExists):
                self._number_from(head.base_sequence)
            elif not self.unacked and not isinstance(refusal, AlreadyExists):
                self.next_sequence = head.base_sequence
        if self.unacked:
            self._retry_later(self.unacked[0].refusal)
        else:
            self._resend()
        self.producer.pump.notify()

    def _retry_later(self, refusal: DanubeError | None) -> None:
        now = self.producer.pump.clock.monotonic_ns()
        # out of sequence though nothing before it is missing, or moved: ask where the broker stands
        knows = self.opened and refusal is not None and not isinstance(refusal, NotOwner)
        self.phase = Phase.PAUSED if knows else Phase.OPENING
        self._retry_due_ns = now + (self._wait_ns or self._backoff_ns)
        if not self._wait_ns:
            self._backoff_ns = min(2 * self._backoff_ns, BACKOFF_MAX_NS)
        self._wait_ns = 0
        self._rearm(now)

    def _give_up(self, sending: Sending, error: DanubeError) -> None:
        sending.done, sending.error = True, error
        self.producer.completed(self.topic, sending)

    def fail(self, error: DanubeError) -> None:
        """Give everything up: nothing of this lane will ever be accepted."""
        if self.phase is Phase.FAILED:
            return
        self.phase, self.failure = Phase.FAILED, error
        self.on_way = 0
        for sending in self.unacked:
            sending.request = 0
            self._give_up(sending, error)
        self.unacked.clear()
        self.drop_open(error)
        self.producer.pump.disarm(self)
        self.producer.pump.notify()

    def drop_open(self, error: DanubeError) -> None:
        """Give up what is open."""
        for some in self.take_open():
            self.producer.batch_dropped(self.topic, self.next_sequence, some, error)

    # ------------------------------------------------------------ sessions

    def on_session(self, resumed: bool) -> None:
        """Send again what was on its way, in the session that is open now."""
        if self.phase is Phase.FAILED:
            return
        self.on_way = 0
        for sending in self.unacked:
            sending.request = 0
        if resumed and self.opened:
            self._resend()
        else:
            self._open()

    def on_lost(self) -> None:
        """Do nothing: what was not acked is sent again in the next session."""

    def on_away(self) -> None:
        """Look the topic up again, as the worker is gone for long."""
        self.producer.lost()

    def on_failure(self, error: DanubeError) -> None:
        """Give everything up, as the connection refuses this client."""
        self.fail(error)

    def move(self, connection: Connection) -> None:
        """Go on over another connection, where the partition is served now."""
        if connection is self.connection or self.phase is Phase.FAILED:
            return
        self.leave()
        self._has_moved = True
        self.connection = connection
        connection.users[self] = None
        self.phase = Phase.OPENING
        if connection.is_open:
            self.on_session(resumed=False)

    def leave(self) -> None:
        """Forget the connection."""
        for sending in self.unacked:
            sending.request = 0
        if self._opening is not None:
            self.connection.abandon(self._opening)
            self._opening = None
        self.connection.bundler.prune()
        self.connection.bundler.forget(self)
        self.connection.users.pop(self, None)

    def close(self) -> Call | None:
        """Give the producer up at the broker; the call to wait for."""
        self.producer.pump.disarm(self)
        call = None
        if self.opened and self.failure is None and self.connection.is_open:
            call = self._close_at_broker(self.producer_id)
        elif self._opening is not None:
            self._opening.on_done = self._close_when_opened
            self._opening = None
        self.leave()
        return call

    def _close_at_broker(self, producer_id: int) -> Call | None:
        """Close the producer; the call to wait for, None if another lane has the name."""
        connection = self.connection
        others = (user for user in connection.users if isinstance(user, Lane) and user is not self)
        mine = self.partition_id, self.producer.name
        if mine in ((lane.partition_id, lane.producer.name) for lane in others):
            return None
        command = CloseProducer(connection.next_request(), self.partition_id, producer_id)
        return connection.call(Call(command, OnLoss.FORGET))

    def _close_when_opened(self, call: Call) -> None:
        """Close what an OPEN_PRODUCER has opened that was on its way at the end."""
        if call.error is None and self.connection.is_open:
            self._close_at_broker(call.value["producer_id"])

    # ------------------------------------------------------------ deadlines

    def _expired(self, sending: Sending) -> DanubeError:
        """Return the error for a frame that has waited too long."""
        if isinstance(sending.refusal, ResourceExhausted):
            return ResourceExhausted(
                f"the broker refused it when it was last sent, and has not stored it: {sending.refusal}"
            )
        seconds = f"{self.producer.timeout_ns / 1e9:g} s"
        cause = sending.refusal or self.refusal
        why = f"; the broker said: {cause}" if cause is not None else ""
        kind = type(cause) if isinstance(cause, ResourceExhausted) else DeadlineExceeded
        return kind(
            f"no ack from {self.connection.endpoint} within {seconds}{why}; it may have been stored: "
            f"{self.producer.remedies.unacked}"
        )

    def on_time(self, now_ns: int) -> None:
        """Retry, or give up frames that have waited too long."""
        if self.phase is Phase.FAILED:
            return
        if self.unacked and self.unacked[0].deadline_ns <= now_ns:
            self._expire(now_ns)
        if self._retry_due_ns <= now_ns:
            self._retry_due_ns = FOREVER_NS
            if self.connection.is_open:
                if self.phase is Phase.PAUSED and self.on_way == 0:
                    self._resend()
                elif self.phase is Phase.OPENING and self._opening is None:
                    self._open()
        self._rearm(now_ns)

    def _rearm(self, now_ns: int) -> None:
        due_ns = self._retry_due_ns
        if self.unacked:
            due_ns = min(due_ns, self.unacked[0].deadline_ns)
        if due_ns < FOREVER_NS:
            self.producer.pump.arm(self, max(due_ns, now_ns))

    def _expire(self, now_ns: int) -> None:
        """The oldest frames have waited for longer than the producer's timeout."""
        while self.unacked and self.unacked[0].deadline_ns <= now_ns:
            sending = self.unacked.popleft()
            sending.request = 0
            self._give_up(sending, self._expired(sending))
        # the broker may or may not have them: only it knows the next sequence
        self.on_way = 0
        for sending in self.unacked:
            sending.request = 0
        self.connection.bundler.prune()
        if self.connection.is_open:
            self._open()
        else:
            self.phase = Phase.OPENING
