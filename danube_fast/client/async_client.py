"""AsyncClient: the client for an event loop. Its methods are those of Client, with `await`."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Unpack

from danube_fast.checks import check_callable
from danube_fast.client.admin_client import AsyncAdmin
from danube_fast.client.aio import AsyncConsumer, AsyncProducer, AsyncReader
from danube_fast.client.async_subscriber import AsyncSubscriber
from danube_fast.client.client import consumer_request, reader_request
from danube_fast.client.consume.read_range import checked_stop
from danube_fast.client.core import Core
from danube_fast.client.handle.handlers import checked_concurrency, prefetch
from danube_fast.client.link.loop import LoopDriver
from danube_fast.client.link.opening import opens
from danube_fast.client.link.pump import deadline_after
from danube_fast.client.produce.outgoing import Attributes
from danube_fast.client.values.arguments import (
    ConsumerArguments,
    DispatchMode,
    DurabilityLevel,
    FailurePolicyFields,
    ProducerArguments,
    PublishArguments,
    Start,
    SubscriptionType,
    Transport,
)
from danube_fast.client.values.limits import (
    CLOSE_TIMEOUT_SECONDS,
    CONNECT_TIMEOUT_SECONDS,
    PERMITS_BYTES_DEFAULT,
    PERMITS_MESSAGES_DEFAULT,
    REQUEST_TIMEOUT_SECONDS,
)
from danube_fast.client.values.message import Message, MessageId
from danube_fast.errors import DanubeError

__all__ = ["AsyncClient"]


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
        self._core = Core(
            url, name=name, token=token, tls=tls, transport=transport, spin_us=spin_us
        )
        self._driver = LoopDriver(self._core.pump)
        self._core.perform = self._driver.run
        self._subscribers: weakref.WeakSet[AsyncSubscriber] = weakref.WeakSet()
        self.admin = AsyncAdmin(self._core.producers, self._core.consumers, self._driver)
        """Administrative operations."""

    async def open(self, timeout: float = CONNECT_TIMEOUT_SECONDS) -> None:  # noqa: ASYNC109
        """Connect, within `timeout` seconds; `connect_async` does it. Raises Unavailable."""
        self._driver.open()
        try:
            await self._driver.run(self._core.open_steps(timeout))
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
        publisher = await self._driver.run(
            self._core.producers.open_steps(
                topic,
                name=name,
                dispatch=dispatch,
                durability=durability,
                partitions=partitions,
                **options,
            )
        )
        return AsyncProducer(publisher, self._driver)

    async def publish(
        self, topic: str, payload: bytes | None, **fields: Unpack[PublishArguments]
    ) -> MessageId:
        """Publish one message through a cached producer and wait for its ack; its id."""
        return await self._driver.run(self._core.publish_steps(topic, payload, fields))

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
            self.name,
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
        inbox = await self._driver.run(self._core.consumers.open_steps(topics, options, timeout))
        return AsyncConsumer(inbox, self._driver)

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
        topics, options = reader_request(self.name, topic, start, permits_bytes, pattern)
        inbox = await self._driver.run(self._core.consumers.open_steps(topics, options, timeout))
        return AsyncReader(inbox, end, self._driver)

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
        return await self._driver.run(
            self._core.requests.request_steps(topic, payload, timeout, key, attributes)
        )

    async def reply(
        self, message: Message, payload: bytes | None, attributes: Attributes | None = None
    ) -> None:
        """Reply to a message that asks for it, see Client.reply."""
        await self._driver.run(self._core.requests.reply_steps(message, payload, attributes))

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
        if self._core.pump.refusal is not None:
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
            await self._driver.run(self._core.close_users_steps(left))
        finally:
            await self._shut()
        if first is not None:
            raise first

    async def _shut(self) -> None:
        self._driver.close()
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
