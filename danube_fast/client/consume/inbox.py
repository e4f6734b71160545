"""The inbox: everything of a consumer but the way in which its callers wait.

    connection.drain -> attachment.on_frame -> frames: queue, then current -> Message / Batch
                                                                ack -> acks.py -> ACK

Frames wait, checked, in a queue; the application takes messages out of the current one without a lock.
`Consumer` and `AsyncConsumer` show an application what is its own of this; one thread (or task) at a time.
"""

from __future__ import annotations

import collections
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from danube_fast.checks import check_seconds, check_whole
from danube_fast.client.consume.acks import AckQueue, acks_unsent
from danube_fast.client.consume.attachment import Attachment
from danube_fast.client.consume.batch import Batch, Piece
from danube_fast.client.consume.delivery import Delivery
from danube_fast.client.consume.flushes import ask_cursors_steps, flush_steps
from danube_fast.client.consume.frames import Frames
from danube_fast.client.consume.in_progress import InProgress
from danube_fast.client.consume.leases import Leases
from danube_fast.client.consume.partitions import Partitions
from danube_fast.client.consume.progress import Progress
from danube_fast.client.consume.seeks import seek_steps
from danube_fast.client.link.names import no_answer_steps
from danube_fast.client.link.operations import admin_steps
from danube_fast.client.link.steps import Steps, Wait, deadline_after, seconds_until
from danube_fast.client.topics.routes import Routes, Topic
from danube_fast.client.topics.watcher import Watcher
from danube_fast.client.values.limits import (
    BATCH_MESSAGES_DEFAULT,
    CLOSE_TIMEOUT_SECONDS,
    LOOK_NS,
    REQUEST_TIMEOUT_SECONDS,
)
from danube_fast.client.values.message import Gap, Message, Processing
from danube_fast.client.values.options import READER, ConsumerOptions
from danube_fast.errors import DanubeError, DeadlineExceeded, FailedPrecondition
from danube_fast.frame.view import FrameView

__all__ = ["Inbox", "Reply"]

_GAPS_KEPT_MAX = 1000
Reply = Callable[[Message, bytes | None, Mapping[str, str] | None], Awaitable[None]]
"""Sends the reply to a message."""


class Inbox:
    """Attachments, received frames and acks of one consumer."""

    def __init__(
        self,
        routes: Routes,
        watcher: Watcher,
        reply: Reply,
        topics: Sequence[Topic],
        options: ConsumerOptions,
    ) -> None:
        pump = self.pump = routes.pump
        self.subscription = options.subscription
        self.type = options.type
        self.name = options.name
        self.options = options.options
        self.gaps: collections.deque[Gap] = collections.deque(maxlen=_GAPS_KEPT_MAX)
        """The latest ranges that the broker said will never come."""
        self.refusal: DanubeError | None = None
        """Raised by every receive from now on."""
        self.reply = reply
        """Sends the reply to a message that was received here."""
        self._on_gap: Callable[[Gap], object] | None = None
        self._routes = routes
        self._lock = pump.lock
        self._error: Exception | None = None
        """Raised once by the next receive."""
        self._closed = False
        self.frames = Frames()
        self._queue = self.frames.queue
        self.attachments: list[Attachment] = []
        self._acks = AckQueue(self, pump, self.attachments)
        self.progress = Progress(pump, self.frames, self._acks)
        self.in_progress = InProgress(pump)
        self._leases = Leases(self.type, pump, self.frames, self.in_progress, self.rest)
        self.partitions = Partitions(self, routes, watcher, self.attachments, topics, options)

    @property
    def topics(self) -> tuple[str, ...]:
        """Topics that it receives from now."""
        return self.partitions.topics

    @property
    def on_gap(self) -> Callable[[Gap], object] | None:
        """Called with every such range, by any thread that serves the client then; the first one that is set also
        with those that came before."""
        return self._on_gap

    @on_gap.setter
    def on_gap(self, callback: Callable[[Gap], object] | None) -> None:
        with self._lock:
            if self._on_gap is None and callback is not None:
                self.pump.callbacks += [(callback, (gap,)) for gap in self.gaps]
                self.pump.notify()
            self._on_gap = callback

    def routes(self) -> list[Topic]:
        """Return what was looked up for its topics."""
        return self.partitions.routes

    def open_steps(self, deadline_ns: int) -> Steps[None]:
        """Wait until every partition has accepted the subscription."""
        ready = yield Wait(
            lambda: self.refusal is not None or self.partitions.is_subscribed, deadline_ns
        )
        with self._lock:
            if self.refusal is not None:
                raise self.refusal
            self.partitions.opened = ready
            if ready:
                return
            late = next((a for a in self.attachments if not a.ever_subscribed), None)
        if late is None:
            raise DeadlineExceeded(
                "the broker did not tell in time where all topics of the pattern are; look at `danube-fast status`"
            )
        why = f", and has refused before: {late.refusal}" if late.refusal else ""
        raise (yield from no_answer_steps(self.pump, late.topic, late.connection.endpoint, why))

    # ------------------------------------------------------------ receiving

    def receive_steps(self, deadline_ns: int) -> Steps[Message | None]:
        """Return the next message; None when the time is up."""
        while (message := self.frames.take() or self._only()) is None:
            if not self._queue and self.frames.here is None:
                if not (yield from self._arrived_steps(deadline_ns)):
                    return None
            elif not (yield from self._next_until_steps(deadline_ns, 1)):
                return None
        return message

    def receive_alone(self, deadline_ns: int) -> Message | None:
        """Receive a message that is alone in its frame, and wait for it, in the calling thread; None if that takes more,
        or the time is up."""
        pump, frames = self.pump, self.frames
        if pump.refusal is not None or pump.is_inside() or (pump.leader and pump.leads):
            return None
        with self._lock:
            if self._queue:
                self._keep_up()
            elif frames.here is not None or self._has_arrived() or self.partitions.is_resting:
                return None
            else:
                frames.return_credit()
                self._acks.send_unless_busy()
                if not pump.wait_inside(self._has_arrived, deadline_ns, LOOK_NS):
                    return None
            delivery = self._take_only()
        return None if delivery is None else delivery.only()

    def _only(self) -> Message | None:
        """Return the message that is alone in the next frame, if one is there."""
        with self._lock:
            self._keep_up()
            delivery = self._take_only()
        return None if delivery is None else delivery.only()

    def _take_only(self) -> Delivery | None:
        """Under the lock: take the next frame if it has one message, delivered for the first time, and nothing stands
        before it."""
        frames = self.frames
        if self.progress.call is not None or frames.left or frames.stop < frames.end:
            return None
        try:
            delivery = self._queue[0]
            if delivery.count != 1 or not delivery.is_dense:
                return None
            if delivery.generation != delivery.attachment.generation:
                return None
            self._queue.popleft()
        except IndexError:
            return None  # nothing is there, or another thread has closed us just now
        frames.taken += 1
        frames.open_taken(delivery)
        self.progress.took(delivery)
        return delivery

    def next_steps(self, timeout: float | None, redelivered_max: int = 1) -> Steps[bool]:
        """Have a current frame that has a message left; of redelivered ones at most `redelivered_max`, which are
        reported. False when the time is up."""
        deadline_ns = deadline_after(self.pump.clock, timeout)
        return (yield from self._next_until_steps(deadline_ns, redelivered_max))

    def _next_until_steps(self, deadline_ns: int, redelivered_max: int) -> Steps[bool]:
        """Do the same until a monotonic time."""
        while not self.frames.left:
            if self.frames.here is None:
                if (delivery := self._take()) is None:
                    if not (yield from self._arrived_steps(deadline_ns)):
                        return False
                    continue
                self.frames.open(delivery, 0)
            self._begin_part(redelivered_max)
        if self.progress.call is not None:
            yield from self.progress.answered_steps()
        return True

    def receive_batch_steps(
        self, max_messages: int = BATCH_MESSAGES_DEFAULT, timeout: float | None = None
    ) -> Steps[Batch]:
        """Return the messages that are there; wait only for the first."""
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
        if current := self.frames.here:
            return current[0].is_again
        try:
            return self._queue[0].is_again
        except IndexError:
            return False

    def _gather(self, limit: int) -> list[Piece]:
        """Pieces of at most `limit` messages that are here already. Redelivered messages have a batch of
        their own, which was reported."""
        pieces: list[Piece] = []
        if current := self.frames.here:
            begun, index = current
            stop = min(self.frames.stop if begun.is_again else begun.count, index + limit)
            pieces.append((begun, index, stop))
            limit = 0 if begun.is_again else limit - (stop - index)
            self.frames.skip(stop)
        while limit and (delivery := self._take(redelivered=False)) is not None:
            stop = min(delivery.count, limit)
            pieces.append((delivery, 0, stop))
            limit -= stop
            if stop < delivery.count:
                self.frames.open(delivery, stop)
        with self._lock:
            for delivery, _, stop in pieces:
                delivery.give_credit_back(stop)
                self.progress.took(delivery)
        return pieces

    def _arrived_steps(self, deadline_ns: int) -> Steps[bool]:
        """Wait for a frame in the queue. Raises what ended or broke the consumer."""
        with self._lock:
            if self.partitions.is_resting:
                self.partitions.wake()
            self.frames.return_credit()
            self._acks.send_unless_busy()
        ready = yield Wait(self._has_arrived, deadline_ns, look_ns=LOOK_NS)
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if not self._queue and self.refusal is not None:
            raise self.refusal
        return ready

    def _has_arrived(self) -> bool:
        return bool(self._queue) or self._error is not None or self.refusal is not None

    def _keep_up(self) -> None:
        """Under the lock: give credit back for what was taken, and send acks that are due."""
        self.frames.return_credit()
        if self._acks.due_ns <= self.pump.clock.monotonic_ns():
            self._acks.send()

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
            self.frames.taken += 1
            with self._lock:
                self._keep_up()
                if delivery.generation == attachment.generation and delivery.count:
                    return delivery
                delivery.give_credit_back(delivery.count)

    def _begin_part(self, redelivered_max: int) -> None:
        """Begin the next part of the current frame."""
        with self._lock:
            delivery = self.frames.current
            if delivery is None:
                return  # forgotten just now
            if delivery.is_again:
                self._acks.send()  # a death counts messages from the last ack or report on
            is_redelivered = self.frames.begin_part(redelivered_max)
            self.progress.took(delivery)
            if is_redelivered:
                self.progress.report_part(delivery)

    def rest(self) -> None:
        """Leave the subscription until the application comes for more; what waits goes to others."""
        self._acks.send()
        self.partitions.rest()

    def _extend(self, message: Message, seconds: float) -> None:
        """Under the lock: keep a message for longer. Raises InvalidArgument."""
        milliseconds = max(1, int(check_seconds(seconds, "seconds") * 1000))
        for attachment, generation, pairs in self._acks.named(message):
            if generation == attachment.generation and attachment.tracks:
                self._leases.extend(attachment, pairs.tolist(), milliseconds)

    def processing(self, message: Message) -> Processing:
        """Keep the ack timeout of a message from running out while the result is entered."""
        self.check_acking()
        delivery: Delivery = message._source  # type: ignore[assignment]
        place = delivery.attachment, delivery.generation, message.offset

        def begin() -> None:
            with self._lock:
                self.in_progress.add(*place)
                if delivery.generation == delivery.attachment.generation:
                    self.in_progress.extend(delivery.attachment, [message.offset])

        def end() -> None:
            with self._lock:
                self.in_progress.remove(*place)

        return Processing(message, begin, end)

    # ------------------------------------------------------------ what attachments report

    def arrived(self, attachment: Attachment, view: FrameView, place: tuple[int, ...]) -> None:
        """Attachment: queue a frame."""
        self._queue.append(Delivery(attachment, view, place))

    def damaged(self, error: DanubeError) -> None:
        """Attachment: raise the error of a frame that cannot be trusted with the next receive."""
        self._error = error

    def subscribed(self, ack_timeout_ms: int) -> None:
        """Attachment: extend what waits within that ack timeout."""
        self._leases.subscribed(ack_timeout_ms)

    def taken(self, attachment: Attachment) -> tuple[int, int]:
        """Attachment: return how far the application is."""
        return self.progress.of(attachment)

    def interrupt(self, error: Exception) -> None:
        """Under the lock: raise that error once, in the receive that waits or in the next one."""
        self._error = error
        self.pump.notify()

    def gap(
        self, attachment: Attachment, first: int, last: int, reason: str, lost: bool = False
    ) -> None:
        """Attachment: note offsets that will never come, and tell the application."""
        gap = Gap(attachment.topic, first, last, reason, lost)
        self.gaps.append(gap)
        if self._on_gap is not None:
            self.pump.callbacks.append((self._on_gap, (gap,)))
        self.pump.notify()

    def restarted(self, attachment: Attachment, *, sought: bool) -> None:
        """Attachment: drop frames from before a seek or a new subscription."""
        attachment.generation += 1
        if sought:
            attachment.sought_generation = attachment.generation
        self._acks.restarted(attachment, sought=sought)
        self.frames.drop(attachment)

    def seek_failed(self, attachment: Attachment) -> None:
        """Attachment: send what was acked during a seek that moved nothing."""
        self._acks.go_on(attachment)

    def send_acks(self, attachment: Attachment) -> None:
        """Attachment: send its acks before it leaves."""
        self._acks.send_last(attachment)

    def rested(self, attachment: Attachment) -> None:
        """Attachment: drop the frames that came before it left for a while; acks that were sent count."""
        attachment.generation += 1
        self._acks.rested(attachment)
        self.frames.drop(attachment)

    def attachment_failed(self, attachment: Attachment, error: DanubeError) -> None:
        """Attachment: end the consumer, unless the topic has only left its pattern."""
        if not self.partitions.has_only_left(attachment, error):
            self.refusal = self.refusal or type(error)(f"{attachment.topic}: {error}")
        self.pump.notify()

    def attachment_lost(self, attachment: Attachment) -> None:
        """Attachment: look the topic up again, as the worker does not have the partition."""
        self.partitions.lost(attachment)

    def moved(self) -> None:
        """Routes: follow a topic that was looked up again."""
        self.partitions.moved()

    def topic_gone(self, route: Topic, error: DanubeError) -> None:
        """Routes: give up a topic that does not exist any more."""
        self.partitions.gone(route, error)

    # ------------------------------------------------------------ acks, seek, lag

    def check_acking(self) -> None:
        """Raise FailedPrecondition for a reader, which has no cursor."""
        if self.type == READER:
            raise FailedPrecondition("a reader acks nothing; use client.consumer() for a cursor")

    def flush_acks_steps(self, timeout: float = REQUEST_TIMEOUT_SECONDS) -> Steps[None]:
        """Send queued acks and wait until they are durable."""
        self.check_acking()
        yield from flush_steps(self._acks, self._routes.bootstrap, self.subscription, timeout)

    def seek_steps(self, position: Any, timeout: float = REQUEST_TIMEOUT_SECONDS) -> Steps[None]:
        """Move the subscription in every partition."""
        self.check_acking()
        yield from seek_steps(self.partitions, self._acks, position, timeout)

    def lag_steps(self) -> Steps[int]:
        """Return how many messages are not acked, as the broker counts them."""
        self.check_acking()
        lag = 0
        for topic in self.topics:
            arguments = {"topic": topic, "subscription": self.subscription}
            answer = yield from admin_steps(
                self._routes.bootstrap, "describe_subscription", arguments
            )
            lag += int(answer["lag_messages"])
        return lag

    @property
    def state(self) -> str:
        """connected, reconnecting, failed or closed."""
        if self._closed:
            return "closed"
        if self.refusal is not None:
            return "failed"
        with self._lock:
            return "connected" if self.partitions.is_connected else "reconnecting"

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
            self.partitions.close()
            self._acks.close()
            self._leases.close()
            self.in_progress.close()
            self._routes.users.pop(self, None)
            self.pump.notify()
        self._queue.clear()
        self.frames.forget()

        def is_over() -> bool:
            gone = all(call.done or not connection.is_open for connection, call in ends)
            return gone and all(call.done for call in calls)

        yield Wait(is_over, deadline_ns)
        bootstrap = self._routes.bootstrap
        if self._acks.has_void and bootstrap.is_open:
            left = seconds_until(self.pump.clock, deadline_ns)
            yield from ask_cursors_steps(self._acks, bootstrap, self.subscription, left)
        if unsent := self._acks.unsent(covered):
            raise acks_unsent(unsent)

    def refuse(self, error: DanubeError) -> None:
        """Raise that error from now on: the consumer or the client is closed, or the process was forked."""
        self.refusal = self.refusal or error
        self.frames.forget()
