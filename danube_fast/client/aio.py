"""AsyncClient and its producers, consumers and readers: the same names with `await`.

Every method runs the steps of its synchronous twin in the event loop (`loop.py`). Cancelling a
receive loses no message: messages are taken only when the call returns. Cancelling a publish leaves
the message on its way.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar, Unpack

from danube_fast.checks import check_callable
from danube_fast.client.arguments import (
    ConsumerArguments,
    DispatchMode,
    DurabilityLevel,
    FailurePolicyFields,
    Moment,
    ProducerArguments,
    PublishArguments,
    Start,
    SubscriptionType,
    Transport,
)
from danube_fast.client.async_admin import AsyncAdmin
from danube_fast.client.client import consumer_request, reader_request
from danube_fast.client.consume.acks import delay_ms
from danube_fast.client.consume.inbox import Inbox
from danube_fast.client.consumer import ConsumerView, refuse_cumulative
from danube_fast.client.core import Core
from danube_fast.client.handle.async_subscriber import AsyncSubscriber
from danube_fast.client.handle.handlers import checked_concurrency, prefetch
from danube_fast.client.limits import (
    BATCH_MESSAGES_DEFAULT,
    CLOSE_TIMEOUT_SECONDS,
    CONNECT_TIMEOUT_SECONDS,
    PERMITS_BYTES_DEFAULT,
    PERMITS_MESSAGES_DEFAULT,
    REQUEST_TIMEOUT_SECONDS,
)
from danube_fast.client.link.loop import LoopDriver
from danube_fast.client.link.pump import Steps, deadline_after
from danube_fast.client.message import Batch, Message, MessageId, Received
from danube_fast.client.opening import opens
from danube_fast.client.produce.outgoing import Attributes, OnDelivery
from danube_fast.client.producer import ProducerView
from danube_fast.client.reader import ReaderView, checked_stop
from danube_fast.errors import DanubeError, FailedPrecondition

__all__ = ["AsyncAdmin", "AsyncClient", "AsyncConsumer", "AsyncProducer", "AsyncReader"]

T = TypeVar("T")


class AsyncCore(Core):
    """A core with a driver for the loop it was opened in."""

    driver: LoopDriver | None = None

    async def arun(self, steps: Steps[T]) -> T:
        """Drive an operation in the event loop."""
        if self.driver is None:
            steps.close()
            raise self.refusal or FailedPrecondition(
                "the client is not open; use `await danube_fast.connect_async(...)`"
            )
        return await self.driver.run(steps)

    async def aend(self, steps: Steps[None]) -> None:
        """Drive a close; a client that is closed has closed everything."""
        if self.refusal is None:
            await self.arun(steps)
        steps.close()

    def perform(self, steps: Steps[T]) -> Awaitable[T]:
        """Drive an operation to its end when this is awaited."""
        return self.arun(steps)


class AsyncProducer(ProducerView):
    """Publishes to one topic. Made by `client.producer()`. See Producer for each method."""

    __slots__ = ()
    _core: AsyncCore

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
            and self._outbox.send_plain(payload)
        ):
            return
        outbox = self._outbox
        fields = outbox.checked(payload, key, attributes, event_time, deliver_at, deliver_after)
        if outbox.try_send(fields, on_delivery) is not None:
            await self._core.arun(outbox.send_steps(fields, on_delivery))

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
        await self._core.arun(
            self._outbox.send_many_steps(
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
        return await self._core.arun(
            self._outbox.publish_steps(
                payload, key, attributes, event_time, deliver_at, deliver_after
            )
        )

    async def flush(self, timeout: float | None = None) -> MessageId | None:  # noqa: ASYNC109
        """Wait until everything sent is acked; id of the last message acked."""
        return await self._core.arun(self._outbox.flush_steps(timeout))

    async def close(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:  # noqa: ASYNC109
        """Flush and close, within `timeout` seconds."""
        await self._core.aend(self._outbox.close_steps(timeout))

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

    _core: AsyncCore

    async def receive(self, timeout: float | None = None) -> Message | None:  # noqa: ASYNC109
        """The next message; None when `timeout` seconds are over."""
        for message in self._inbox.hand:
            return message
        return await self._core.arun(self._inbox.receive_steps(timeout))

    async def receive_batch(
        self,
        max_messages: int = BATCH_MESSAGES_DEFAULT,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> Batch:
        """What is there, at most `max_messages`; an empty Batch when the time is up."""
        return await self._core.arun(self._inbox.receive_batch_steps(max_messages, timeout))

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Messages for ever; ends when the consumer is closed."""
        inbox = self._inbox
        while not inbox._closed:
            for message in inbox.hand:
                yield message
            if not inbox._closed:
                await self._core.arun(inbox.next_steps(None))

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
        await self._core.arun(self._inbox.flush_acks_steps(timeout))

    async def seek(self, position: Start, timeout: float = REQUEST_TIMEOUT_SECONDS) -> None:  # noqa: ASYNC109
        """Move the subscription to "earliest", "latest" or an offset (in every partition)."""
        await self._core.arun(self._inbox.seek_steps(position, timeout))

    async def lag(self) -> int:
        """Messages of this subscription that are not acked, as the broker counts them."""
        return await self._core.arun(self._inbox.lag_steps())

    async def close(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:  # noqa: ASYNC109
        """Flush acks and detach; returns within `timeout` seconds."""
        await self._core.aend(self._inbox.close_steps(timeout))

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

    _core: AsyncCore

    async def receive_batch(
        self,
        max_messages: int = BATCH_MESSAGES_DEFAULT,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> Batch:
        """The next messages of the range; empty at its end or when the time is up."""
        return await self._core.arun(self._range.batch_steps(max_messages, timeout))

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
        return (await self._core.arun(self._range.all_steps())).to_arrow()

    async def to_pandas(self) -> Any:
        """The whole range as a pandas.DataFrame."""
        return (await self.to_arrow()).to_pandas()

    async def close(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:  # noqa: ASYNC109
        """Detach; returns within `timeout` seconds."""
        await self._core.aend(self._inbox.close_steps(timeout))

    async def __aenter__(self) -> AsyncReader:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncClient:
    """A connection to a broker for one event loop. Made by `danube_fast.connect_async()`."""

    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        token: str | None = None,
        tls: Any = None,
        transport: Transport = "auto",
        spin_us: int = 0,
    ) -> None:
        self._core = AsyncCore(
            url, name=name, token=token, tls=tls, transport=transport, spin_us=spin_us
        )
        self._subscribers: weakref.WeakSet[AsyncSubscriber] = weakref.WeakSet()
        self.admin = AsyncAdmin(self._core)
        """Administrative operations."""

    async def open(self, timeout: float = CONNECT_TIMEOUT_SECONDS) -> None:  # noqa: ASYNC109
        """Connect, within `timeout` seconds; `connect_async` does it. Raises Unavailable."""
        self._core.driver = LoopDriver(self._core)
        try:
            await self._core.arun(self._core.open_steps(timeout))
        except BaseException:
            await self._shut()
            raise

    @property
    def name(self) -> str:
        """Name of this client, as the broker shows it."""
        return self._core.name

    @opens
    async def producer(
        self,
        topic: str,
        *,
        name: str | None = None,
        dispatch: DispatchMode | None = None,
        durability: DurabilityLevel | None = None,
        partitions: int | None = None,
        **options: Unpack[ProducerArguments],
    ) -> AsyncProducer:
        """Open a producer, see Client.producer."""
        outbox = await self._core.arun(
            self._core.producer_steps(
                topic,
                name=name,
                dispatch=dispatch,
                durability=durability,
                partitions=partitions,
                **options,
            )
        )
        return AsyncProducer(outbox)

    async def publish(
        self, topic: str, payload: bytes | None, **fields: Unpack[PublishArguments]
    ) -> MessageId:
        """Publish one message through a cached producer and wait for its ack; its id."""
        return await self._core.arun(self._core.publish_steps(topic, payload, fields))

    @opens
    async def consumer(
        self,
        topic: str | Sequence[str] | None = None,
        *,
        subscription: str,
        type: SubscriptionType = "exclusive",  # noqa: A002 - its name in the documentation
        initial_position: Start = "latest",
        name: str | None = None,
        timeout: float = REQUEST_TIMEOUT_SECONDS,  # noqa: ASYNC109
        pattern: str | None = None,
        permits_bytes: int = PERMITS_BYTES_DEFAULT,
        permits_messages: int = PERMITS_MESSAGES_DEFAULT,
        key_filters: Sequence[str] | None = None,
        failure_policy: FailurePolicyFields | None = None,
    ) -> AsyncConsumer:
        """Subscribe, see Client.consumer."""
        topics, options = consumer_request(
            self._core,
            topic,
            subscription=subscription,
            type=type,
            initial_position=initial_position,
            name=name,
            pattern=pattern,
            permits_bytes=permits_bytes,
            permits_messages=permits_messages,
            key_filters=key_filters,
            failure_policy=failure_policy,
        )
        inbox = await self._core.arun(self._core.consumer_steps(Inbox, topics, options, timeout))
        return AsyncConsumer(inbox)

    @opens
    async def reader(
        self,
        topic: str | Sequence[str] | None = None,
        *,
        pattern: str | None = None,
        start: Start = "earliest",
        stop: str | int | None = "latest",
        timeout: float = REQUEST_TIMEOUT_SECONDS,  # noqa: ASYNC109
        permits_bytes: int = PERMITS_BYTES_DEFAULT,
    ) -> AsyncReader:
        """Read a range, see Client.reader."""
        end = checked_stop(stop)
        topics, options = reader_request(self._core, topic, start, permits_bytes, pattern)
        inbox = await self._core.arun(self._core.consumer_steps(Inbox, topics, options, timeout))
        return AsyncReader(inbox, end)

    async def request(
        self,
        topic: str,
        payload: bytes | None,
        timeout: float = REQUEST_TIMEOUT_SECONDS,  # noqa: ASYNC109
        *,
        key: bytes | str | None = None,
        attributes: Attributes | None = None,
    ) -> Message:
        """Publish a request and wait for its reply, see Client.request."""
        return await self._core.arun(
            self._core.desk.request_steps(topic, payload, timeout, key, attributes)
        )

    async def reply(
        self, message: Message, payload: bytes | None, attributes: Attributes | None = None
    ) -> None:
        """Reply to a message that asks for it, see Client.reply."""
        await self._core.arun(self._core.desk.reply_steps(message, payload, attributes))

    @opens
    async def subscribe(
        self,
        topic: str | Sequence[str] | None,
        subscription: str,
        handler: Callable[[Message], Awaitable[object] | object],
        *,
        type: SubscriptionType = "shared",  # noqa: A002 - its name in the documentation
        concurrency: int | None = None,
        **options: Unpack[ConsumerArguments],
    ) -> AsyncSubscriber:
        """Await `handler` for every message in `concurrency` tasks, see Client.subscribe."""
        check_callable(handler, "handler")
        count = checked_concurrency(type, concurrency)
        consumer = await self.consumer(
            topic, subscription=subscription, type=type, **prefetch(options, count)
        )
        subscriber = AsyncSubscriber(consumer, handler, count)
        self._subscribers.add(subscriber)
        return subscriber

    async def close(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:  # noqa: ASYNC109
        """Close subscriptions, producers (flushing them), consumers and connections within `timeout`
        seconds. Raises the first error, when everything is closed."""
        if self._core.refusal is not None:
            return
        clock = self._core.pump.clock
        deadline_ns = deadline_after(clock, timeout)
        first: DanubeError | None = None
        try:
            for subscriber in list(self._subscribers):  # what their handlers did is acked
                try:
                    await subscriber.close(max(0.0, (deadline_ns - clock.monotonic_ns()) / 1e9))
                except DanubeError as error:
                    first = first or error
            left = max(0.0, (deadline_ns - clock.monotonic_ns()) / 1e9)
            await self._core.arun(self._core.close_users_steps(left))
        finally:
            await self._shut()
        if first is not None:
            raise first

    async def _shut(self) -> None:
        if self._core.driver is not None:
            self._core.driver.close()
            self._core.driver = None
        # closing sockets may take a moment: not in the loop
        await asyncio.get_running_loop().run_in_executor(None, self._core.shut)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        try:
            await self.close()
        except DanubeError:
            if kind is None:
                raise

    def __repr__(self) -> str:
        return f"<AsyncClient {self._core.name!r} of {self._core.url}>"
