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
from danube_fast.client.client import Client
from danube_fast.client.consumer import Consumer
from danube_fast.client.core import Core
from danube_fast.client.faces import AsyncClosing, opening, opens, twin
from danube_fast.client.handle.handlers import checked_concurrency, prefetch
from danube_fast.client.link.loop import LoopDriver
from danube_fast.client.link.steps import Steps, deadline_after, seconds_until
from danube_fast.client.producer import Producer
from danube_fast.client.reader import Reader
from danube_fast.client.values.arguments import (
    ConsumerArguments,
    SubscriptionType,
)
from danube_fast.client.values.limits import (
    CLOSE_TIMEOUT_SECONDS,
)
from danube_fast.client.values.message import Message
from danube_fast.errors import DanubeError

__all__ = ["AsyncClient"]

_TWINS: dict[Any, Any] = {
    Producer: AsyncProducer, Consumer: AsyncConsumer, Reader: AsyncReader,
}  # fmt: skip


class AsyncClient(AsyncClosing):
    """A connection to a broker for one event loop. Made by `danube_fast.connect_async()`.

    The methods are those of Client, to be awaited; what opens a producer, consumer, reader or subscription may be
    entered with `async with`, too.
    """

    def __init__(self, url: str, **options: Any) -> None:
        """`options`: those of `connect_async()`."""
        self._core = Core(url, **options)
        self._driver = LoopDriver(self._core.pump)
        self._run = self._core.perform = self._driver.run
        self._subscribers: weakref.WeakSet[AsyncSubscriber] = weakref.WeakSet()
        self.admin = AsyncAdmin(self._core.producers, self._core.consumers, self._driver)
        """Administrative operations."""

    async def open(self, timeout: float) -> None:  # noqa: ASYNC109
        """Connect, within `timeout` seconds; `connect_async` does it. Raises Unavailable."""
        self._driver.open()
        try:
            await self._run(self._core.open_steps(timeout))
        except BaseException:
            await self._shut()
            raise

    @property
    def name(self) -> str:
        """Name of this client, as the broker shows it."""
        return self._core.name

    async def _open(self, steps: Steps[Any], face: Any, *arguments: Any) -> Any:
        """Open a resource and show it to the application: as the twin of the synchronous `face`."""
        return _TWINS[face](await self._run(steps), *arguments, self._driver)

    producer = opening(Client.producer, AsyncProducer)
    publish = twin(Client.publish)
    consumer = opening(Client.consumer, AsyncConsumer)
    reader = opening(Client.reader, AsyncReader)
    request = twin(Client.request)
    reply = twin(Client.reply)

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
        """Await `handler` for every message: ack when it returns, nack with its reason when it raises.

        `concurrency`: how many tasks run the handler, which may be a plain function, too. Everything else is as
        for `Client.subscribe`.

            async with client.subscribe("/default/flights", "billing", handle) as subscriber:
                await subscriber.wait()
        """
        check_callable(handler, "handler")
        count = checked_concurrency(type, concurrency)
        consumer = await self.consumer(
            topic, subscription=subscription, type=type, **prefetch(options, count)
        )
        subscriber = AsyncSubscriber(consumer, handler, count)
        self._subscribers.add(subscriber)
        return subscriber

    async def close(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:  # noqa: ASYNC109
        """Close everything within `timeout` seconds, as `Client.close` does."""
        if self._core.pump.refusal is not None:
            return
        clock = self._core.pump.clock
        deadline_ns = deadline_after(clock, timeout)
        first: DanubeError | None = None
        try:
            for subscriber in list(self._subscribers):  # what their handlers did is acked
                try:
                    await subscriber.close(seconds_until(clock, deadline_ns))
                except DanubeError as error:
                    first = first or error
            await self._run(self._core.close_users_steps(seconds_until(clock, deadline_ns)))
        finally:
            await self._shut()
        if first is not None:
            raise first

    async def _shut(self) -> None:
        self._driver.close()
        # closing sockets may take a moment: not in the loop
        await asyncio.get_running_loop().run_in_executor(None, self._core.shut)

    def __repr__(self) -> str:
        return f"<AsyncClient {self._core.name!r} of {self._core.url}>"
