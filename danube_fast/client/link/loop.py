"""Runs the client's steps in an event loop, without a thread between.

The pump's descriptor stands for all sockets of the client (an epoll of their ZeroMQ descriptors).
When it becomes readable the loop reads everything and completes the futures of operations whose
condition has come true. Deadlines stay with the timer thread; what it changes reaches the loop
through `on_progress`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from danube_fast.client.link.pump import Pump, Steps, Wait
from danube_fast.client.values.limits import FOREVER_NS
from danube_fast.errors import FailedPrecondition

__all__ = ["LoopDriver"]

T = TypeVar("T")


class LoopDriver:
    """Drives the operations of one client in an event loop: what `Pump.run` is for a thread."""

    def __init__(self, pump: Pump) -> None:
        self._pump = pump
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._waiters: dict[asyncio.Future[bool], Callable[[], bool]] = {}
        self._checking = False

    def open(self) -> None:
        """Listen in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._fd = self._pump.fileno()
        self._loop.add_reader(self._fd, self._readable)
        with self._pump.lock:
            self._pump.on_progress = self._progressed
            self._pump.drain()

    def close(self) -> None:
        """Stop listening; before the pump's descriptors are closed."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.remove_reader(self._fd)
            with self._pump.lock:
                self._pump.on_progress = None

    async def run(self, steps: Steps[T]) -> T:
        """Drive an operation to its end. Cancelling it closes the steps: nothing was taken then."""
        loop = self._loop
        if self._pump.refusal is not None or loop is None:
            steps.close()
            raise self._pump.refusal or FailedPrecondition(
                "the client is not open; use `await danube_fast.connect_async(...)`"
            )
        try:
            wait = next(steps)
            while True:
                wait = steps.send(await self._wait(wait, loop))
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        finally:
            steps.close()

    async def end(self, steps: Steps[None]) -> None:
        """Drive a close; a client that cannot be used any more has closed everything."""
        if self._pump.refusal is None:
            await self.run(steps)
        steps.close()

    async def _wait(self, wait: Wait, loop: asyncio.AbstractEventLoop) -> bool:
        with self._pump.lock:
            # as everywhere: look at every socket before relying on its descriptor
            if wait.ready() or (self._pump.drain() and wait.ready()):
                return True
            future: asyncio.Future[bool] = loop.create_future()
            self._waiters[future] = wait.ready
        timer: asyncio.TimerHandle | None = None
        if wait.deadline_ns < FOREVER_NS:
            left_ns = wait.deadline_ns - self._pump.clock.monotonic_ns()
            timer = loop.call_later(max(0.0, left_ns / 1e9), self._expire, future)
        try:
            return await future
        finally:
            self._waiters.pop(future, None)
            if timer is not None:
                timer.cancel()

    def _expire(self, future: asyncio.Future[bool]) -> None:
        ready = self._waiters.pop(future, None)
        if ready is not None and not future.done():
            with self._pump.lock:
                future.set_result(ready())

    def _readable(self) -> None:
        with self._pump.lock:
            self._pump.clear_wake()
            self._pump.drain()

    def _progressed(self) -> None:
        """Look soon what has come true. Under the lock, in any thread."""
        loop = self._loop
        if loop is None or self._checking or not (self._waiters or self._pump.callbacks):
            return
        self._checking = True
        if threading.get_ident() == self._thread:
            loop.call_soon(self._check, loop)
        else:
            loop.call_soon_threadsafe(self._check, loop)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        """Complete the futures whose condition is true now; call the application back."""
        with self._pump.lock:
            self._checking = False
            for future, ready in list(self._waiters.items()):
                if not future.done() and ready():
                    del self._waiters[future]
                    future.set_result(True)
            callbacks = list(self._pump.callbacks)
            self._pump.callbacks.clear()
        for function, arguments in callbacks:
            loop.call_soon(function, *arguments)
