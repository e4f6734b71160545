"""Runs the client's steps in an event loop, without a thread between.

The pump's descriptor stands for all sockets of the client (an epoll of their ZeroMQ descriptors).
When it becomes readable the loop reads everything and completes the futures of whoever waits for
what has come true. The keeper's deadlines stay with its thread; what it changes reaches the loop
through `on_progress`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from danube_fast.client.core import Core
from danube_fast.client.limits import FOREVER_NS
from danube_fast.client.link.pump import Steps, Wait

__all__ = ["LoopDriver"]

T = TypeVar("T")


class LoopDriver:
    """Drives the operations of one core in the running event loop."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._pump = core.pump
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._waiters: dict[asyncio.Future[bool], Callable[[], bool]] = {}
        self._checking = False
        self._fd = self._pump.fileno()
        self._loop.add_reader(self._fd, self._readable)
        with self._pump.lock:
            self._pump.on_progress = self._progressed
            self._pump.drain()

    def close(self) -> None:
        """Stop listening; before the pump's descriptors are closed."""
        self._loop.remove_reader(self._fd)
        with self._pump.lock:
            self._pump.on_progress = None

    async def run(self, steps: Steps[T]) -> T:
        """Drive an operation to its end. Cancelling it closes the steps: nothing was taken then."""
        if self._core.refusal is not None:
            steps.close()
            raise self._core.refusal
        try:
            wait = next(steps)
            while True:
                wait = steps.send(await self._wait(wait))
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        finally:
            steps.close()

    async def _wait(self, wait: Wait) -> bool:
        with self._pump.lock:
            # as everywhere: look at every socket before relying on its descriptor
            if wait.ready() or (self._pump.drain() and wait.ready()):
                return True
            future: asyncio.Future[bool] = self._loop.create_future()
            self._waiters[future] = wait.ready
        timer: asyncio.TimerHandle | None = None
        if wait.deadline_ns < FOREVER_NS:
            left_ns = wait.deadline_ns - self._pump.clock.monotonic_ns()
            timer = self._loop.call_later(max(0.0, left_ns / 1e9), self._expire, future)
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
        """Under the lock, in whichever thread: states changed."""
        if self._checking or not (self._waiters or self._pump.callbacks):
            return
        self._checking = True
        if threading.get_ident() == self._thread:
            self._loop.call_soon(self._check)
        else:
            self._loop.call_soon_threadsafe(self._check)

    def _check(self) -> None:
        """Complete the futures of whoever waits for what is true now; call back."""
        with self._pump.lock:
            self._checking = False
            for future, ready in list(self._waiters.items()):
                if not future.done() and ready():
                    del self._waiters[future]
                    future.set_result(True)
            callbacks = list(self._pump.callbacks)
            self._pump.callbacks.clear()
        for function, arguments in callbacks:
            self._loop.call_soon(function, *arguments)
