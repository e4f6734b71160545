"""Consumer: what an application receives with. For one thread at a time."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from danube_fast.client.consume.acks import delay_ms
from danube_fast.client.consume.batch import Batch
from danube_fast.client.consume.inbox import Inbox
from danube_fast.client.consume.leases import GROUPS
from danube_fast.client.faces import Closing, Run
from danube_fast.client.link.steps import deadline_after
from danube_fast.client.values.arguments import Start
from danube_fast.client.values.limits import (
    BATCH_MESSAGES_DEFAULT,
    CLOSE_TIMEOUT_SECONDS,
    REQUEST_TIMEOUT_SECONDS,
)
from danube_fast.client.values.message import Gap, Message, MessageId, Received
from danube_fast.errors import FailedPrecondition

__all__ = ["Consumer", "ConsumerView", "InboxView"]


class InboxView:
    """Shared by consumers and readers."""

    def __init__(self, inbox: Inbox, run: Any, end: Any) -> None:
        """`run` and `end` drive steps, as those of `Pump` and of `LoopDriver`."""
        self._run: Run = run
        self._end: Run = end
        self._inbox = inbox

    @property
    def gaps(self) -> collections.deque[Gap]:
        """The latest ranges that the broker said will never come."""
        return self._inbox.gaps

    @property
    def on_gap(self) -> Callable[[Gap], object] | None:
        """Called with every such range, by any thread that serves the client then; the first one that is set
        also with those that came before."""
        return self._inbox.on_gap

    @on_gap.setter
    def on_gap(self, callback: Callable[[Gap], object] | None) -> None:
        self._inbox.on_gap = callback


class ConsumerView(InboxView):
    """Shared by both kinds of consumer."""

    def __init__(self, inbox: Inbox, run: Any, end: Any) -> None:
        super().__init__(inbox, run, end)
        self._left = inbox.frames.left
        self._lock = inbox.pump.lock
        self._acks = inbox._acks

    @property
    def subscription(self) -> str:
        """Name of the subscription."""
        return self._inbox.subscription

    @property
    def type(self) -> str:
        """exclusive, shared, failover or key_shared."""
        return self._inbox.type

    @property
    def name(self) -> str:
        """Name of the consumer, as the broker shows it."""
        return self._inbox.name

    @property
    def topics(self) -> tuple[str, ...]:
        """Topics that it receives from now."""
        return self._inbox.topics

    @property
    def state(self) -> str:
        """connected, reconnecting, failed or closed."""
        return self._inbox.state

    def __repr__(self) -> str:
        inbox = self._inbox
        topics = inbox.partitions.pattern or ", ".join(inbox.topics)
        return f"<{type(self).__name__} {inbox.subscription!r} ({inbox.type}) on {topics}: {inbox.state}>"


class Consumer(ConsumerView, Closing):
    """Receives from the partitions of one or several topics. Made by `client.consumer()`."""

    def __init__(self, inbox: Inbox) -> None:
        super().__init__(inbox, inbox.pump.run, inbox.pump.end)

    def receive(self, timeout: float | None = None) -> Message | None:
        """Return the next message; None when `timeout` seconds are over. Without timeout: wait.

            while (message := consumer.receive(timeout=5)) is not None:
                consumer.ack(message)

        Raises what ended the consumer (TopicDeleted, ...), FailedPrecondition when it is closed, and DataLoss for a
        damaged frame.
        """
        left = self._left
        if left:
            try:
                return left.pop()
            except IndexError:
                pass  # another thread has closed us just now
        inbox = self._inbox
        deadline_ns = deadline_after(inbox.pump.clock, timeout)
        message = inbox.receive_alone(deadline_ns)
        if message is not None:
            return message
        return self._run(inbox.receive_steps(deadline_ns))

    def receive_batch(
        self, max_messages: int = BATCH_MESSAGES_DEFAULT, timeout: float | None = None
    ) -> Batch:
        """Return the messages that are there, at most `max_messages`; wait up to `timeout` seconds for the first.

        An empty Batch when the time is up. Without timeout: wait.

            batch = consumer.receive_batch(timeout=1)
            consumer.ack(batch)

        Raises what `receive` raises.
        """
        return self._run(self._inbox.receive_batch_steps(max_messages, timeout))

    def __iter__(self) -> Iterator[Message]:
        """Return messages for ever; ends when the consumer is closed."""
        inbox = self._inbox
        while not inbox._closed:
            yield from inbox.frames
            if not inbox._closed:
                self._run(inbox.next_steps(None))

    def ack(self, what: Message | MessageId | Batch | Iterable[Message]) -> None:
        """Ack a message, its id, a batch, or a list of messages: they do not come again.

        Queued: durable with the next group, after 100 ms at the latest; see `flush_acks`. Acks of messages from
        before a reconnect do nothing. Raises InvalidArgument for messages of another consumer, or of a reader, and
        FailedPrecondition when the consumer is closed.
        """
        acks = self._acks
        if type(what) is Received:
            offset = what.offset
            if what._source is acks.run_source and offset == acks.run_end:
                acks.run_end = offset + 1
                return
        if self._inbox.pump.is_inside():
            self._inbox.pump.call_later(self.ack, what)
            return
        with self._lock:
            if type(what) is Received:
                acks.add_one(what)
            else:
                acks.add(what)

    def ack_cumulative(self, message: Message) -> None:
        """Ack everything of the message's partition up to and with the message.

        Raises FailedPrecondition on a shared subscription, and what `ack` raises.
        """
        self._inbox.check_acking()
        if self.type in GROUPS:
            raise FailedPrecondition(
                f"a cumulative ack makes no sense on a {self.type} subscription, whose messages go to "
                "several consumers; ack messages or batches"
            )
        with self._lock:
            self._acks.add_up_to(message)

    def nack(
        self,
        what: Message | MessageId | Batch | Iterable[Message],
        delay: float | None = None,
        reason: str = "",
    ) -> None:
        """Give messages back: they failed, and come again after `delay` seconds.

        Without a delay the subscription's failure policy says when. `reason`: stands in the dead letter. A message
        that fails too often is poison (see the policy). Raises what `ack` raises.
        """
        self._inbox.check_acking()
        if self._inbox.pump.is_inside():
            self._inbox.pump.call_later(self.nack, what, delay, reason)
            return
        with self._lock:
            self._acks.give_back(what, delay_ms(delay), reason)

    def extend(self, message: Message, seconds: float) -> None:
        """Keep a message for `seconds` from now on, whatever the ack timeout is. Raises what `ack` raises."""
        self._inbox.check_acking()
        with self._lock:
            self._inbox._extend(message, seconds)

    def flush_acks(self, timeout: float = REQUEST_TIMEOUT_SECONDS) -> None:
        """Send queued acks and wait, up to `timeout` seconds, until they are durable.

        Raises Unavailable if acks were lost with a connection (their messages come again), DeadlineExceeded when
        the time is up.
        """
        return self._run(self._inbox.flush_acks_steps(timeout))

    def seek(self, position: Start, timeout: float = REQUEST_TIMEOUT_SECONDS) -> None:
        """Move the subscription in every partition; what lies behind the position comes, or comes again.

        `position`: "earliest", "latest", an offset, a datetime, an RFC 3339 time or a time ago such as "-10m".
        Raises InvalidArgument for an offset beyond the end of all partitions; Unavailable, or DeadlineExceeded
        after `timeout` seconds, with the partitions that were moved.
        """
        return self._run(self._inbox.seek_steps(position, timeout))

    def lag(self) -> int:
        """Return how many messages of this subscription are not acked, as the broker counts them. Raises Unavailable,
        DeadlineExceeded."""
        return self._run(self._inbox.lag_steps())

    def close(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """Flush acks and detach, within `timeout` seconds.

        Raises Unavailable, closed all the same, when acks were lost with a connection, not sent or not answered by
        then: it names their messages.
        """
        return self._end(self._inbox.close_steps(timeout))
