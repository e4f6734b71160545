"""Consumer: what an application receives with. For one thread at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from danube_fast.client.acks import delay_ms
from danube_fast.client.arguments import Start
from danube_fast.client.inbox import Inbox
from danube_fast.client.limits import (
    BATCH_MESSAGES_DEFAULT,
    CLOSE_TIMEOUT_SECONDS,
    REQUEST_TIMEOUT_SECONDS,
)
from danube_fast.client.message import Batch, Message, MessageId, Received
from danube_fast.errors import DanubeError, FailedPrecondition

__all__ = ["Consumer", "messages_in_hand", "refuse_cumulative"]


def refuse_cumulative(inbox: Inbox) -> None:
    """Raise FailedPrecondition where a cumulative ack makes no sense."""
    inbox.check_acking()
    if inbox.type in ("shared", "key_shared"):
        raise FailedPrecondition(
            f"a cumulative ack makes no sense on a {inbox.type} subscription, whose messages go to "
            "several consumers; ack messages or batches"
        )


def messages_in_hand(inbox: Inbox) -> Iterator[Message]:
    """The messages left in the frame in hand; an interrupted iteration loses none."""
    delivery, messages = inbox._delivery, inbox._messages
    while (index := inbox._index) < inbox._stop and delivery is inbox._delivery:
        inbox._index = index + 1
        yield messages[index]


class Consumer(Inbox):
    """Receives from the partitions of one or several topics. Made by `client.consumer()`."""

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message; None when `timeout` seconds are over. Without timeout: wait.

        Raises what ended the consumer (TopicDeleted, ...), and DataLoss for a damaged frame.
        """
        index = self._index
        if index < self._stop:
            self._index = index + 1
            try:
                return self._messages[index]
            except IndexError:
                pass  # another thread has closed us just now
        return self._core.run(self.receive_steps(timeout))

    def receive_batch(
        self, max_messages: int = BATCH_MESSAGES_DEFAULT, timeout: float | None = None
    ) -> Batch:
        """What is there, at most `max_messages`; waits up to `timeout` seconds for the first.

        An empty Batch when the time is up.
        """
        return self._core.run(self.receive_batch_steps(max_messages, timeout))

    def __iter__(self) -> Iterator[Message]:
        """Messages for ever; ends when the consumer is closed."""
        while not self._closed:
            yield from messages_in_hand(self)
            if not self._closed:
                self._core.run(self.next_steps(None))

    def ack(self, what: Message | MessageId | Batch | Iterable[Message]) -> None:
        """Done with a message, a batch, or a list of messages. Queued; see `flush_acks`."""
        acks = self._acks
        if type(what) is Received:
            offset = what.offset
            if what._source is acks.run_source and offset == acks.run_end:
                acks.run_end = offset + 1
                return
        with self._lock:
            if type(what) is Received:
                acks.add_one(what)
            else:
                acks.add(what)

    def ack_cumulative(self, message: Message) -> None:
        """Done with everything of the message's partition up to and with it.

        FailedPrecondition on a shared subscription.
        """
        refuse_cumulative(self)
        with self._lock:
            self._acks.add_up_to(message)

    def nack(
        self,
        what: Message | MessageId | Batch | Iterable[Message],
        delay: float | None = None,
        reason: str = "",
    ) -> None:
        """Give messages back: they failed, and come again after `delay` seconds; without a delay after
        what the subscription's failure policy says. Who fails too often is poison (see there)."""
        self.check_acking()
        with self._lock:
            self._acks.give_back(what, delay_ms(delay), reason)

    def extend(self, message: Message, seconds: float) -> None:
        """Keep a message for `seconds` from now on, whatever the ack timeout is."""
        self.check_acking()
        with self._lock:
            self._extend(message, seconds)

    def flush_acks(self, timeout: float = REQUEST_TIMEOUT_SECONDS) -> None:
        """Send queued acks and wait until they are durable."""
        self._core.run(self.flush_acks_steps(timeout))

    def seek(self, position: Start, timeout: float = REQUEST_TIMEOUT_SECONDS) -> None:
        """Move the subscription in every partition: to "earliest", "latest", an offset, a datetime, an
        RFC 3339 time or a time ago such as "-10m"."""
        self._core.run(self.seek_steps(position, timeout))

    def lag(self) -> int:
        """Messages of this subscription that are not acked, as the broker counts them."""
        return self._core.run(self.lag_steps())

    def close(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """Flush acks and detach; within `timeout` seconds. Raises Unavailable, closed all the same, when
        acks were not sent or not answered by then: it names their messages."""
        self._core.end(self.close_steps(timeout))

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self.close()
        except DanubeError:
            if kind is None:
                raise  # otherwise the application's own error matters more
