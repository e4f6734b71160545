"""The inbox: everything of a consumer but the way in which its callers wait.

    connection.drain -> attachment.on_frame -> _queue -> in hand -> Message / Batch
                                                          ack -> acks.py -> ACK

Frames wait, checked, in `_queue`; the application takes messages out of the one in hand without a lock. Queue
entries from before a reconnect or a seek (an older generation of their attachment) are skipped when their
turn comes. `Consumer` and `AsyncConsumer` show an application what is its own of this; one thread (or task)
at a time.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from danube_fast.checks import check_seconds, check_whole
from danube_fast.client.consume.acks import AckQueue, acks_unsent
from danube_fast.client.consume.attachment import Attachment
from danube_fast.client.consume.delivery import Delivery
from danube_fast.client.consume.flushes import ask_cursors_steps, flush_steps
from danube_fast.client.consume.hand import Hand
from danube_fast.client.consume.holds import Holds
from danube_fast.client.consume.leases import Leases
from danube_fast.client.consume.progress import Progress
from danube_fast.client.consume.roster import Roster
from danube_fast.client.consume.seeks import seek_steps
from danube_fast.client.limits import (
    BATCH_MESSAGES_DEFAULT,
    CLOSE_TIMEOUT_SECONDS,
    REQUEST_TIMEOUT_SECONDS,
    SECOND_NS,
)
from danube_fast.client.link.calls import Call
from danube_fast.client.link.pump import Steps, Wait, deadline_after
from danube_fast.client.message import Batch, Gap, Message
from danube_fast.client.options import READER, ConsumerOptions
from danube_fast.errors import DanubeError, DeadlineExceeded, FailedPrecondition

if TYPE_CHECKING:
    from danube_fast.client.core import Core
    from danube_fast.client.topics.routes import Topic

__all__ = ["Gap", "Inbox"]

_GAPS_KEPT_MAX = 1000


class Inbox:
    """Attachments, received frames and acks of one consumer."""

    def __init__(self, core: Core, topics: Sequence[Topic], options: ConsumerOptions) -> None:
        self.pump = core.pump
        self.subscription = options.subscription
        self.type = options.type
        self.name = options.name
        self.options = options.options
        self.gaps: collections.deque[Gap] = collections.deque(maxlen=_GAPS_KEPT_MAX)
        """The latest ranges that the broker said will never come."""
        self._on_gap: Callable[[Gap], object] | None = None
        self._core = core
        self._lock = core.pump.lock
        self._queue: collections.deque[Delivery] = collections.deque()
        self._error: Exception | None = None
        """Raised once by the next receive."""
        self._refusal: DanubeError | None = None
        """Raised by every receive from now on."""
        self._closed = False
        self._is_resting = False
        self._taken = 0
        """Frames that the application has had in hand."""
        self.hand = Hand()
        self.attachments: list[Attachment] = []
        self._acks = AckQueue(self.pump, self.attachments)
        self.leases = Leases(self)
        self.holds = Holds(self)
        self.progress = Progress(self)
        self.roster = Roster(self, core, topics, options)

    @property
    def topics(self) -> tuple[str, ...]:
        """Topics that it receives from now."""
        return tuple(route.name for route in self.roster.routes)

    @property
    def on_gap(self) -> Callable[[Gap], object] | None:
        """Called with every such range, by whichever thread serves the client then; the first one that is
        set also with those that came before."""
        return self._on_gap

    @on_gap.setter
    def on_gap(self, callback: Callable[[Gap], object] | None) -> None:
        with self._lock:
            if self._on_gap is None and callback is not None:
                self.pump.callbacks += [(callback, (gap,)) for gap in self.gaps]
                self.pump.notify()
            self._on_gap = callback

    def routes(self) -> list[Topic]:
        """What was looked up for it."""
        return self.roster.routes

    def open_steps(self, deadline_ns: int) -> Steps[None]:
        """Wait until every partition has accepted the subscription."""
        ready = yield Wait(lambda: self._refusal is not None or self.roster.is_settled, deadline_ns)
        with self._lock:
            if self._refusal is not None:
                raise self._refusal
            self.roster.opened = ready
            if not ready:
                waiting = next((a for a in self.attachments if not a.ever_subscribed), None)
                if waiting is None:
                    raise DeadlineExceeded(
                        "the broker did not tell in time where all topics of the pattern are; look "
                        "at `danube-fast status`"
                    )
                raise DeadlineExceeded(
                    f"{waiting.topic}: its worker at {waiting.connection.endpoint} did not answer "
                    "in time; look at `danube-fast status`"
                )

    # ------------------------------------------------------------ receiving

    def receive_steps(self, timeout: float | None = None) -> Steps[Message | None]:
        """The next message; None when the time is up."""
        while (message := self.hand.take()) is None:
            if not (yield from self.next_steps(timeout)):
                return None
        return message

    def next_steps(self, timeout: float | None, redelivered_max: int = 1) -> Steps[bool]:
        """Have a frame in hand that has a message left; of redelivered ones at most `redelivered_max`, which are
        reported. False when the time is up."""
        deadline_ns = deadline_after(self.pump.clock, timeout)
        while not self.hand.left:
            if self.hand.here is None:
                if (delivery := self._take()) is None:
                    if not (yield from self._arrived_steps(deadline_ns)):
                        return False
                    continue
                self.hand.hold(delivery, 0)
            self._begin_part(redelivered_max)
        if self.progress.report is not None:
            yield from self.progress.answered_steps()
        return True

    def receive_batch_steps(
        self, max_messages: int = BATCH_MESSAGES_DEFAULT, timeout: float | None = None
    ) -> Steps[Batch]:
        """What is there; waits only for the first message."""
        max_messages = check_whole(max_messages, "max_messages", 1)
        deadline_ns = deadline_after(self.pump.clock, timeout)
        while True:
            if self._is_redelivery_next and not (yield from self.next_steps(0, max_messages)):
                continue  # they are void
            batch = Batch(self._gather(max_messages))
            if batch or not (yield from self._arrived_steps(deadline_ns)):
                return batch

    @property
    def _is_redelivery_next(self) -> bool:
        """Whether the next frame has redelivered messages."""
        if in_hand := self.hand.here:
            return in_hand[0].is_again
        try:
            return self._queue[0].is_again
        except IndexError:
            return False

    def _gather(self, limit: int) -> list[tuple[Delivery, int, int]]:
        """Pieces of at most `limit` messages that are here already. Redelivered messages have a batch of
        their own, which was reported."""
        pieces: list[tuple[Delivery, int, int]] = []
        if in_hand := self.hand.here:
            held, index = in_hand
            stop = min(self.hand.stop if held.is_again else held.count, index + limit)
            pieces.append((held, index, stop))
            limit = 0 if held.is_again else limit - (stop - index)
            self.hand.skip(stop)
        while limit and (delivery := self._take(redelivered=False)) is not None:
            stop = min(delivery.count, limit)
            pieces.append((delivery, 0, stop))
            limit -= stop
            if stop < delivery.count:
                self.hand.hold(delivery, stop)
        with self._lock:
            for delivery, _, stop in pieces:
                delivery.give_credit_back(stop)
                delivery.attachment.took(delivery)
        return pieces

    def _arrived_steps(self, deadline_ns: int) -> Steps[bool]:
        """Wait for a frame in the queue. Raises what ended or broke the consumer."""
        with self._lock:
            if self._is_resting:
                self._wake()
            self.hand.return_credit()
            self._acks.send_unless_busy()
        ready = yield Wait(self._has_arrived, deadline_ns)
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if not self._queue and self._refusal is not None:
            raise self._refusal
        return ready

    def _has_arrived(self) -> bool:
        return bool(self._queue) or self._error is not None or self._refusal is not None

    def _take(self, *, redelivered: bool = True) -> Delivery | None:
        """The next frame that still counts; with `redelivered` also one with redelivered messages."""
        while True:
            try:
                delivery = self._queue[0]
                if delivery.is_again and not redelivered:
                    return None
                self._queue.popleft()
            except IndexError:
                return None
            attachment = delivery.attachment
            self._taken += 1
            with self._lock:
                self.hand.return_credit()
                if self._acks.due_ns <= self.pump.clock.monotonic_ns():
                    self._acks.send()
                if delivery.generation == attachment.generation and delivery.count:
                    return delivery
                delivery.give_credit_back(delivery.count)

    def _begin_part(self, redelivered_max: int) -> None:
        """The part of the frame in hand that comes next."""
        with self._lock:
            delivery = self.hand.delivery
            if delivery is not None and delivery.is_again:
                self._acks.send()  # a death counts messages from the last ack or report on
            if self.hand.begin_part(redelivered_max) and delivery is not None:
                self.progress.report_part(delivery)

    def has_waiting(self, attachment: Attachment) -> bool:
        """Whether frames of that partition wait in the queue or are in hand."""
        with self._lock:
            waiting = [*self.queued, *(self.hand.here or ())[:1]]
        return any(each.attachment is attachment for each in waiting)

    @property
    def place(self) -> object:
        """Changes whenever the application takes something."""
        return self._taken, self.hand.index

    @property
    def queued(self) -> list[Delivery]:
        """Frames that wait; the application takes from them without the lock."""
        return list(self._queue)

    def rest(self) -> None:
        """Leave the subscription until the application comes for more; what waits goes to others."""
        self._acks.send()
        for attachment in self.attachments:
            attachment.rest()
        self._is_resting = True

    def _wake(self) -> None:
        """The application is back."""
        self._is_resting = False
        for attachment in self.attachments:
            attachment.wake()

    def _extend(self, message: Message, seconds: float) -> None:
        """Under the lock: keep a message for longer. Raises InvalidArgument."""
        milliseconds = max(1, int(check_seconds(seconds, "seconds") * 1000))
        for attachment, generation, pairs in self._acks.named(message):
            if generation == attachment.generation and attachment.tracks:
                self.leases.extend(attachment, pairs.tolist(), milliseconds)

    # ------------------------------------------------------------ what attachments report

    def arrived(self, delivery: Delivery) -> None:
        """Attachment: a frame."""
        self._queue.append(delivery)

    def damaged(self, error: DanubeError) -> None:
        """Attachment: a frame that cannot be trusted."""
        self._error = error

    def interrupt(self, error: Exception) -> None:
        """Under the lock: whoever receives gets that error, once."""
        self._error = error
        self.pump.notify()

    def gap(
        self, attachment: Attachment, first: int, last: int, reason: str, lost: bool = False
    ) -> None:
        """Attachment: offsets that will never come."""
        gap = Gap(attachment.topic, first, last, reason, lost)
        self.gaps.append(gap)
        if self._on_gap is not None:
            self.pump.callbacks.append((self._on_gap, (gap,)))
        self.pump.notify()

    def restarted(self, attachment: Attachment, *, sought: bool) -> None:
        """A seek or a new subscription: frames from before it do not count any more."""
        attachment.generation += 1
        if sought:
            attachment.sought_generation = attachment.generation
        self._acks.restarted(attachment, sought=sought)
        self.hand.drop(attachment)

    def seek_failed(self, attachment: Attachment) -> None:
        """Attachment: nothing was moved, so what was acked meanwhile counts."""
        self._acks.go_on(attachment)

    def send_acks(self, attachment: Attachment) -> None:
        """Attachment: it is about to leave."""
        self._acks.send_last(attachment)

    def rested(self, attachment: Attachment) -> None:
        """Attachment: it left for a while. Frames that came are void; acks that were sent count."""
        attachment.generation += 1
        self._acks.rested(attachment)
        self.hand.drop(attachment)

    def attachment_failed(self, attachment: Attachment, error: DanubeError) -> None:
        """Attachment: it will receive nothing any more."""
        if not self.roster.is_quiet(attachment, error):
            self._refusal = self._refusal or type(error)(f"{attachment.topic}: {error}")
        self.pump.notify()

    def attachment_lost(self, attachment: Attachment) -> None:
        """Attachment: its worker does not have the partition."""
        self.roster.lost(attachment)

    def moved(self) -> None:
        """Routes: a topic was looked up again."""
        self.roster.moved()

    def topic_gone(self, route: Topic, error: DanubeError) -> None:
        """Routes: a topic does not exist any more."""
        self.roster.gone(route, error)

    # ------------------------------------------------------------ acks, seek, lag

    def check_acking(self) -> None:
        """Raise FailedPrecondition for a reader, which has no cursor."""
        if self.type == READER:
            raise FailedPrecondition("a reader acks nothing; use client.consumer() for a cursor")

    def flush_acks_steps(self, timeout: float = REQUEST_TIMEOUT_SECONDS) -> Steps[None]:
        """Send queued acks and wait until they are durable."""
        return flush_steps(self, timeout)

    def seek_steps(self, position: Any, timeout: float = REQUEST_TIMEOUT_SECONDS) -> Steps[None]:
        """Move the subscription in every partition."""
        return seek_steps(self, position, timeout)

    def _attached_steps(self, deadline_ns: int) -> Steps[None]:
        """Come back from a rest or a move. Raises what ended the consumer, DeadlineExceeded."""

        def is_attached() -> bool:
            return self._refusal is not None or all(a.subscribed for a in self.attachments)

        with self._lock:
            if self._is_resting:
                self._wake()
        ready = yield Wait(is_attached, deadline_ns)
        if self._refusal is not None:
            raise self._refusal
        if not ready:
            raise DeadlineExceeded(
                "the consumer is not attached to all its partitions; look at `danube-fast status`"
            )

    def _answered_steps(self, calls: list[Call], timeout: float, what: str) -> Steps[None]:
        """Wait for all replies and raise the first error."""
        ready = yield Wait(
            lambda: all(call.done for call in calls), deadline_after(self.pump.clock, timeout)
        )
        for call in calls:
            if call.done:
                call.result()
        if not ready:
            raise DeadlineExceeded(
                f"no answer within {timeout:g} s to {what}, look at `danube-fast status`"
            )

    def lag_steps(self) -> Steps[int]:
        """Messages that are not acked, as the broker counts them."""
        self.check_acking()
        lag = 0
        for topic in self.topics:
            arguments = {"topic": topic, "subscription": self.subscription}
            answer = yield from self._core.admin_steps("describe_subscription", arguments)
            lag += int(answer["lag_messages"])
        return lag

    @property
    def state(self) -> str:
        """connected, reconnecting, failed or closed."""
        if self._closed:
            return "closed"
        if self._refusal is not None:
            return "failed"
        with self._lock:
            connected = self._is_resting or all(
                a.subscribed and a.connection.is_open for a in self.attachments
            )
        return "connected" if connected else "reconnecting"

    # ------------------------------------------------------------ the end

    def close_steps(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> Steps[None]:
        """Flush acks, detach. Raises Unavailable, when all else is done, for acks that did not arrive."""
        if self._closed:
            return
        deadline_ns = deadline_after(self.pump.clock, timeout)
        with self._lock:
            calls = [] if self.type == READER else self._acks.send(durable=True)
            covered = self._acks.covered(calls)
            self._closed = True
            ends = [
                (a.connection, call) for a in self.attachments if (call := a.close()) is not None
            ]
            self.refuse(FailedPrecondition("the consumer is closed; open another one"))
            self.roster.close()
            self._acks.close()
            self.leases.close()
            self.holds.close()
            self._core.forget(self)
            self.pump.notify()
        self._queue.clear()
        self.hand.forget()

        def is_over() -> bool:
            gone = all(call.done or not connection.is_open for connection, call in ends)
            return gone and all(call.done for call in calls)

        yield Wait(is_over, deadline_ns)
        if self._acks.has_void and self._core.routes.bootstrap.is_open:
            left_ns = deadline_ns - self.pump.clock.monotonic_ns()
            yield from ask_cursors_steps(self, max(0.0, left_ns / SECOND_NS))
        if unsent := self._acks.unsent(covered):
            raise acks_unsent(unsent)

    def refuse(self, error: DanubeError) -> None:
        """Core: nothing works any more (closed client, forked process)."""
        self._refusal = self._refusal or error
        self.hand.forget()
