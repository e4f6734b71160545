"""Runs the client's steps in an event loop, without a thread between.

The pump's descriptor stands for all sockets of the client (an epoll of their ZeroMQ descriptors).
When it becomes readable the loop reads everything and completes the futures of operations whose
condition has come true. A future that waits for a ticket is told of by the ticket; the others are asked, all of them,
whenever states changed. Deadlines stay with the timer thread; what it changes reaches the loop through `on_progress`.

What many tasks publish in one iteration of the loop goes out together behind it, and what is acked together is
completed in slices, so that other tasks have their turns.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import threading
from collections.abc import Callable
from typing import TypeVar

from danube_fast.client.link.buffers import Sender
from danube_fast.client.link.pump import Pump
from danube_fast.client.link.steps import Steps, Wait
from danube_fast.client.values.limits import FOREVER_NS
from danube_fast.errors import FailedPrecondition

__all__ = ["LoopDriver"]

T = TypeVar("T")
COMPLETED_MAX = 128
"""Futures of publishes that are completed in one iteration."""


class LoopDriver:
    """Drives the operations of one client in an event loop: what `Pump.run` is for a thread."""

    def __init__(self, pump: Pump) -> None:
        self._pump = pump
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._waiters: dict[asyncio.Future[bool], Callable[[], bool]] = {}
        self._checking = False
        self._told: collections.deque[asyncio.Future[bool]] = collections.deque()
        """Futures whose tickets are complete."""
        self._pushed_later: dict[Sender, None] = {}

    def open(self) -> None:
        """Listen in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._fd = self._pump.fileno()
        self._loop.add_reader(self._fd, self._readable)
        with self._pump.lock:
            self._pump.on_progress = self._progressed
            self._pump.push_later = self._push_later
            self._pump.drain()

    def close(self) -> None:
        """Stop listening; before the pump's descriptors are closed."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.remove_reader(self._fd)
            with self._pump.lock:
                self._pump.on_progress = self._pump.push_later = None
                self._push()

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
        future: asyncio.Future[bool] = loop.create_future()
        with self._pump.lock:
            if wait.ticket is not None:
                if wait.ready():
                    return True
                # what is sent behind the iteration is looked for behind that, by its descriptor
                wait.ticket.listener = functools.partial(self._told.append, future)
            else:
                # as everywhere: look at every socket before relying on its descriptor
                if wait.ready() or (self._pump.drain() and wait.ready()):
                    return True
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
        is_awaited = self._told or self._waiters or self._pump.callbacks
        if loop is None or self._checking or not is_awaited:
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
            for _ in range(min(len(self._told), COMPLETED_MAX)):
                told = self._told.popleft()
                if not told.done():
                    told.set_result(True)
            if self._told:
                self._progressed()
            callbacks = list(self._pump.callbacks)
            self._pump.callbacks.clear()
        for function, arguments in callbacks:
            loop.call_soon(function, *arguments)

    def _push_later(self, lane: Sender) -> None:
        """Send the open batch of a lane behind this iteration. Under the lock."""
        if not self._pushed_later and self._loop is not None:
            self._loop.call_soon(self._push)
        self._pushed_later[lane] = None

    def _push(self) -> None:
        with self._pump.lock:
            lanes, self._pushed_later = self._pushed_later, {}
            for lane in lanes:
                lane.push()
            self._progressed()  # what cannot be sent at all has its outcome already
