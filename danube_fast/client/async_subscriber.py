"""`AsyncClient.subscribe`: a coroutine called for every message, in tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from danube_fast.client.limits import CLOSE_TIMEOUT_SECONDS
from danube_fast.client.message import Message
from danube_fast.client.subscriber import CONCURRENCY_MAX, REASON_CHARACTERS_MAX
from danube_fast.errors import DanubeError, FailedPrecondition, InvalidArgument

if TYPE_CHECKING:
    from danube_fast.client.aio import AsyncConsumer

__all__ = ["AsyncSubscriber"]

_log = logging.getLogger(__name__)


class AsyncSubscriber:
    """`concurrency` tasks that take messages in turn and await the handler."""

    def __init__(
        self,
        consumer: AsyncConsumer,
        handler: Callable[[Message], Awaitable[object]],
        concurrency: int,
    ) -> None:
        if not 1 <= concurrency <= CONCURRENCY_MAX:
            raise InvalidArgument(f"concurrency is {concurrency}; choose 1 to {CONCURRENCY_MAX}")
        self.error: DanubeError | None = None
        """What ended the subscription, if not `close()`."""
        self._consumer = consumer
        self._handler = handler
        self._taking = asyncio.Lock()
        self._stopping = False
        self._receiving: set[asyncio.Task[Message | None]] = set()
        self._tasks = [asyncio.ensure_future(self._work()) for _ in range(concurrency)]

    async def _work(self) -> None:
        while not self._stopping:
            try:
                async with self._taking:
                    if self._stopping:
                        return
                    task = asyncio.ensure_future(self._consumer.receive())
                    self._receiving.add(task)
                    task.add_done_callback(self._receiving.discard)
                    message = await task
            except asyncio.CancelledError:
                if self._stopping:
                    return
                raise
            except DanubeError as error:
                self.error = self.error or error
                return
            if message is not None:
                await self._handle(message)

    async def _handle(self, message: Message) -> None:
        try:
            await self._handler(message)
        except Exception as error:
            # whatever the handler raises: the message goes back, the others go on
            _log.debug("a handler failed", exc_info=True)
            await self._consumer.nack(message, reason=repr(error)[:REASON_CHARACTERS_MAX])
        else:
            await self._consumer.ack(message)

    async def close(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:  # noqa: ASYNC109
        """Stop receiving, let running handlers finish, ack what they did; within `timeout` seconds.

        FailedPrecondition if handlers were still running then; their messages are redelivered.
        """
        self._stopping = True
        for task in list(self._receiving):
            task.cancel()
        _, running = await asyncio.wait(self._tasks, timeout=timeout / 2)
        for straggler in running:
            straggler.cancel()
        await self._consumer.close(timeout / 2)
        if running:
            raise FailedPrecondition(
                f"{len(running)} handlers were still running; their messages are delivered again"
            )

    async def __aenter__(self) -> AsyncSubscriber:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
