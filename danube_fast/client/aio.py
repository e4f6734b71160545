"""Producers, consumers and readers of an AsyncClient: the same names with `await`.

Every method runs the steps of its synchronous twin in the event loop (`link/loop.py`). Cancelling a
receive loses no message: messages are taken only when the call returns. Cancelling a publish leaves
the message on its way.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from danube_fast.client.consume.acks import delay_ms
from danube_fast.client.consume.batch import Batch
from danube_fast.client.consume.inbox import Inbox
from danube_fast.client.consumer import ConsumerView, refuse_cumulative
from danube_fast.client.link.loop import LoopDriver
from danube_fast.client.produce.outgoing import Attributes, OnDelivery
from danube_fast.client.produce.publisher import Publisher
from danube_fast.client.producer import ProducerView
from danube_fast.client.reader import ReaderView
from danube_fast.client.values.arguments import Moment, Start
from danube_fast.client.values.limits import (
    BATCH_MESSAGES_DEFAULT,
    CLOSE_TIMEOUT_SECONDS,
    REQUEST_TIMEOUT_SECONDS,
)
from danube_fast.client.values.message import Message, MessageId, Received
from danube_fast.errors import DanubeError

__all__ = ["AsyncConsumer", "AsyncProducer", "AsyncReader"]


class AsyncProducer(ProducerView):
    """Publishes to one topic. Made by `client.producer()`. See Producer for each method."""

    __slots__ = ("_driver",)

    def __init__(self, publisher: Publisher, driver: LoopDriver) -> None:
        super().__init__(publisher)
        self._driver = driver

    async def send(
        self,
        payload: bytes | None,
        *,
        key: bytes | str | None = None,
        attributes: Attributes | None = None,
        event_time: Moment | None = None,
        deliver_at: Moment | None = None,
        deliver_after: float | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> None:
        """Queue one message; waits only while the window is full."""
        if (
            key is None
            and attributes is None
            and on_delivery is None
            and event_time is None
            and deliver_at is None
            and deliver_after is None
            and self._publisher.send_plain(payload)
        ):
            return
        publisher = self._publisher
        fields = publisher.checked(payload, key, attributes, event_time, deliver_at, deliver_after)
        if publisher.try_send(fields, on_delivery) is not None:
            await self._driver.run(publisher.send_steps(fields, on_delivery))

    async def send_many(
        self,
        payloads: Sequence[bytes | None],
        *,
        keys: Sequence[bytes | str | None] | None = None,
        attributes: Sequence[Attributes | None] | None = None,
        event_times: Sequence[Moment | None] | None = None,
        deliver_at: Sequence[Moment | None] | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> None:
        """Queue many messages; waits only while the window is full."""
        await self._driver.run(
            self._publisher.send_many_steps(
                payloads, keys, attributes, event_times, deliver_at, on_delivery
            )
        )

    async def publish(
        self,
        payload: bytes | None,
        *,
        key: bytes | str | None = None,
        attributes: Attributes | None = None,
        event_time: Moment | None = None,
        deliver_at: Moment | None = None,
        deliver_after: float | None = None,
    ) -> MessageId:
        """Publish one message at once and wait for its ack; its id."""
        return await self._driver.run(
            self._publisher.publish_steps(
                payload, key, attributes, event_time, deliver_at, deliver_after
            )
        )

    async def flush(self, timeout: float | None = None) -> MessageId | None:  # noqa: ASYNC109
        """Wait until everything sent is acked; id of the last message acked."""
        return await self._driver.run(self._publisher.flush_steps(timeout))

    async def close(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:  # noqa: ASYNC109
        """Flush and close, within `timeout` seconds."""
        await self._driver.end(self._publisher.close_steps(timeout))

    async def __aenter__(self) -> AsyncProducer:
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        try:
            await self.close()
        except DanubeError:
            if kind is None:
                raise


class AsyncConsumer(ConsumerView):
    """Receives from topics. Made by `client.consumer()`. See Consumer for each method."""

    def __init__(self, inbox: Inbox, driver: LoopDriver) -> None:
        super().__init__(inbox)
        self._driver = driver

    async def receive(self, timeout: float | None = None) -> Message | None:  # noqa: ASYNC109
        """The next message; None when `timeout` seconds are over."""
        for message in self._inbox.frames:
            return message
        return await self._driver.run(self._inbox.receive_steps(timeout))

    async def receive_batch(
        self,
        max_messages: int = BATCH_MESSAGES_DEFAULT,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> Batch:
        """What is there, at most `max_messages`; an empty Batch when the time is up."""
        return await self._driver.run(self._inbox.receive_batch_steps(max_messages, timeout))

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Messages for ever; ends when the consumer is closed."""
        inbox = self._inbox
        while not inbox._closed:
            for message in inbox.frames:
                yield message
            if not inbox._closed:
                await self._driver.run(inbox.next_steps(None))

    async def ack(self, what: Message | MessageId | Batch | Iterable[Message]) -> None:
        """Done with a message, a batch, or a list of messages. Queued; see `flush_acks`."""
        with self._lock:
            if type(what) is Received:
                self._acks.add_one(what)
            else:
                self._acks.add(what)

    async def ack_cumulative(self, message: Message) -> None:
        """Done with everything of the message's partition up to and with it."""
        refuse_cumulative(self._inbox)
        with self._lock:
            self._acks.add_up_to(message)

    async def nack(
        self,
        what: Message | MessageId | Batch | Iterable[Message],
        delay: float | None = None,
        reason: str = "",
    ) -> None:
        """Give messages back: they failed; see Consumer.nack."""
        self._inbox.check_acking()
        with self._lock:
            self._acks.give_back(what, delay_ms(delay), reason)

    async def extend(self, message: Message, seconds: float) -> None:
        """Keep a message for `seconds` from now on, whatever the ack timeout is."""
        self._inbox.check_acking()
        with self._lock:
            self._inbox._extend(message, seconds)

    async def flush_acks(self, timeout: float = REQUEST_TIMEOUT_SECONDS) -> None:  # noqa: ASYNC109
        """Send queued acks and wait until they are durable."""
        await self._driver.run(self._inbox.flush_acks_steps(timeout))

    async def seek(self, position: Start, timeout: float = REQUEST_TIMEOUT_SECONDS) -> None:  # noqa: ASYNC109
        """Move the subscription to "earliest", "latest" or an offset (in every partition)."""
        await self._driver.run(self._inbox.seek_steps(position, timeout))

    async def lag(self) -> int:
        """Messages of this subscription that are not acked, as the broker counts them."""
        return await self._driver.run(self._inbox.lag_steps())

    async def close(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:  # noqa: ASYNC109
        """Flush acks and detach; returns within `timeout` seconds."""
        await self._driver.end(self._inbox.close_steps(timeout))

    async def __aenter__(self) -> AsyncConsumer:
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        try:
            await self.close()
        except DanubeError:
            if kind is None:
                raise


class AsyncReader(ReaderView):
    """Reads a range of a topic. Made by `client.reader()`; iterate over it once."""

    def __init__(self, inbox: Inbox, stop: int | str | None, driver: LoopDriver) -> None:
        super().__init__(inbox, stop)
        self._driver = driver

    async def receive_batch(
        self,
        max_messages: int = BATCH_MESSAGES_DEFAULT,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> Batch:
        """The next messages of the range; empty at its end or when the time is up."""
        return await self._driver.run(self._range.batch_steps(max_messages, timeout))

    async def batches(self, max_messages: int = BATCH_MESSAGES_DEFAULT) -> AsyncIterator[Batch]:
        """The whole range in batches."""
        while batch := await self.receive_batch(max_messages):
            yield batch

    async def __aiter__(self) -> AsyncIterator[Message]:
        async for batch in self.batches():
            for message in batch:
                yield message
        await self.close()

    async def to_arrow(self) -> Any:
        """The whole range as a pyarrow.Table."""
        self._range.must_end()
        return (await self._driver.run(self._range.all_steps())).to_arrow()

    async def to_pandas(self) -> Any:
        """The whole range as a pandas.DataFrame."""
        return (await self.to_arrow()).to_pandas()

    async def close(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:  # noqa: ASYNC109
        """Detach; returns within `timeout` seconds."""
        await self._driver.end(self._inbox.close_steps(timeout))

    async def __aenter__(self) -> AsyncReader:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
