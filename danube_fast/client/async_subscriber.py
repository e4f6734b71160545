"""`AsyncClient.subscribe`: a coroutine called for every message, in tasks.

The same as `subscriber.py`, with tasks where that has threads: one receives, `concurrency` handle.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable

from danube_fast.checks import check_seconds
from danube_fast.client.aio import AsyncConsumer
from danube_fast.client.faces import AsyncClosing
from danube_fast.client.handle.handlers import CLOSE_SHARE, Handling, reason_of, reply_of
from danube_fast.client.values.limits import CLOSE_TIMEOUT_SECONDS
from danube_fast.client.values.message import Message
from danube_fast.errors import DanubeError, FailedPrecondition

__all__ = ["AsyncSubscriber"]

_log = logging.getLogger(__name__)


class AsyncSubscriber(Handling, AsyncClosing):
    """A running subscription. Made by `client.subscribe()`; close it, or use `async with`."""

    def __init__(
        self,
        consumer: AsyncConsumer,
        handler: Callable[[Message], Awaitable[object] | object],
        concurrency: int,
    ) -> None:
        super().__init__(consumer._inbox, concurrency)
        self.consumer = consumer
        """The consumer behind it, to look at."""
        self._handler = handler
        self._changed = asyncio.Condition()
        self._running: dict[asyncio.Task[None], Message] = {}
        self._receiver = asyncio.ensure_future(self._receive())
        self._tasks = [asyncio.ensure_future(self._work()) for _ in range(concurrency)]

    # ------------------------------------------------------------ tasks

    async def _receive(self) -> None:
        try:
            while not self._stopping:
                message = await self.consumer.receive()
                if message is not None:
                    await self._enqueue(message)
        except DanubeError as error:
            self._failed(error)
        finally:
            self._stop()

    async def _enqueue(self, message: Message) -> None:
        self._completion.wait(message)
        async with self._changed:
            self._turns.add(message)
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._stopping or not self._turns.is_full)

    async def _work(self) -> None:
        task = asyncio.current_task()
        if task is None:
            raise FailedPrecondition("a subscription needs a running event loop")
        while (message := await self._next()) is not None:
            self._running[task] = message
            if (steps := self._completion.begin(message)) is not None:
                with contextlib.suppress(DanubeError):  # the client is closed
                    await self.consumer._run(steps)
            reason = await self._handle(message)
            try:
                self._completion.complete(message, reason)
            except DanubeError:
                _log.debug("an ack came too late", exc_info=True)
            async with self._changed:
                del self._running[task]
                self._turns.done(message)
                self._changed.notify_all()

    async def _next(self) -> Message | None:
        async with self._changed:
            while not self._stopping:
                message = self._turns.take()
                if message is not None:
                    return message
                await self._changed.wait()
        return None

    async def _handle(self, message: Message) -> str | None:
        """Call the handler; why it failed, or None."""
        try:
            result = self._handler(message)
            if inspect.isawaitable(result):
                result = await result
            reply = reply_of(message, result)
            if reply is not None:
                await message.reply(reply)
        except Exception as error:
            # whatever the handler raises: the message goes back, the others go on
            _log.debug("a handler failed", exc_info=True)
            return reason_of(error)
        return None

    def _stop(self) -> None:
        self._stopping = True
        for message in self._turns.clear():
            self._completion.abandon(message)
        self._wake = asyncio.ensure_future(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # ------------------------------------------------------------ the end

    async def wait(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109
        """Wait until the subscription has ended; False when `timeout` seconds are over before.

        Ends by `close()`, or by an error (TopicDeleted, ...), which is raised here. Raises FailedPrecondition in a
        handler, which cannot wait for its own end.
        """
        if asyncio.current_task() in self._tasks:
            raise FailedPrecondition("a handler cannot wait for its own end; return from it")
        if timeout is not None:
            timeout = max(0.0, check_seconds(timeout, "timeout"))
        _, left = await asyncio.wait([self._receiver, *self._tasks], timeout=timeout)
        if not left and self.error is not None:
            self._told = True
            raise self.error
        return not left

    async def close(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:  # noqa: ASYNC109
        """Receive no more, let running handlers finish, ack what they did; within `timeout` seconds.

        Raises FailedPrecondition if handlers were still running then: they are cancelled, and their messages come
        again. Raises what ended the subscription if `wait()` has not raised it. A handler may call it: then it
        returns at once, and the end comes when the handlers have returned.
        """
        check_seconds(timeout, "timeout")
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._stopping = True
        self._receiver.cancel()
        if asyncio.current_task() in self._tasks:
            self._closer = asyncio.ensure_future(self.close(timeout))
            return
        await asyncio.wait([self._receiver])
        self._stop()
        _, left = await asyncio.wait(self._tasks, timeout=timeout * CLOSE_SHARE)
        running = [self._running[task] for task in left if task in self._running]
        for straggler in left:
            straggler.cancel()
        try:
            await self.consumer.close(max(0.0, timeout - (loop.time() - began)))
        except DanubeError:
            if not running:
                raise
        self._raise_end(running)
