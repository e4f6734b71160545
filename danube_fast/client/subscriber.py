r"""`client.subscribe`: a handler called for every message, in threads.

    consumer -> receiver (one thread) -> turns -> handlers (`concurrency` threads) -> ack, nack
                                                                                 \-> reply

Handlers never wait for each other but for the order that the subscription keeps (`turns.py`). What
the receiver took is in progress (`consume/in_progress.py`) until it is acked or nacked, so no handler is
too slow for the ack timeout. What was taken and not begun when the end comes goes back to the subscription.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
from collections.abc import Callable

from danube_fast.checks import check_seconds
from danube_fast.client.consumer import Consumer
from danube_fast.client.faces import Closing
from danube_fast.client.handle.handlers import CLOSE_SHARE, Handling, reason_of, reply_of
from danube_fast.client.link.steps import deadline_after
from danube_fast.client.values.limits import CLOSE_TIMEOUT_SECONDS
from danube_fast.client.values.message import Message
from danube_fast.clock import Clock
from danube_fast.errors import DanubeError, FailedPrecondition, InvalidArgument

__all__ = ["Subscriber", "refuse_coroutines"]

_log = logging.getLogger(__name__)


class _Stopped(Exception):
    """The receiver is to stop."""


def refuse_coroutines(handler: Callable[[Message], object]) -> None:
    """Raise InvalidArgument for a handler that only an event loop can run."""
    call = getattr(handler, "__call__", None)  # noqa: B004 - the method, not whether there is one
    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call):
        raise InvalidArgument(
            "the handler is a coroutine function; use danube_fast.connect_async(), or a plain function"
        )


class Subscriber(Handling, Closing):
    """A running subscription. Made by `client.subscribe()`; close it, or use it as a context manager."""

    def __init__(
        self, consumer: Consumer, handler: Callable[[Message], object], concurrency: int
    ) -> None:
        super().__init__(consumer._inbox, concurrency)
        self.consumer = consumer
        """The consumer behind it, to look at."""
        self._handler = handler
        self._clock: Clock = consumer._inbox.pump.clock
        self._condition = threading.Condition()
        """Guards the turns and what follows."""
        self._running: dict[int, Message] = {}
        """By thread: what is being handled."""
        self._alive = concurrency + 1
        self._last_closes = False
        """A handler called `close`: the thread that ends last does it."""
        names = [f"danube-handler-{i}" for i in range(concurrency)]
        self._threads = [threading.Thread(target=self._work, name=n, daemon=True) for n in names]
        receiver = threading.Thread(target=self._receive, name="danube-receiver", daemon=True)
        self._threads.append(receiver)
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------------------ threads

    def _receive(self) -> None:
        try:
            while not self._stopping:
                message = self.consumer.receive()
                if message is not None:
                    self._enqueue(message)
        except _Stopped:
            pass
        except DanubeError as error:
            self._failed(error)
        finally:
            self._stop()
            self._leave()

    def _enqueue(self, message: Message) -> None:
        self._completion.wait(message)
        with self._condition:
            self._turns.add(message)
            self._condition.notify()
            while self._turns.is_full and not self._stopping:
                self._condition.wait()

    def _work(self) -> None:
        try:
            while (message := self._next()) is not None:
                if (steps := self._completion.begin(message)) is not None:
                    with contextlib.suppress(DanubeError):  # the client is closed
                        self.consumer._run(steps)
                reason = self._handle(message)
                try:
                    self._completion.complete(message, reason)
                except DanubeError:
                    _log.debug("an ack came too late", exc_info=True)
                self._done(message)
        finally:
            self._leave()

    def _next(self) -> Message | None:
        with self._condition:
            while not self._stopping:
                message = self._turns.take()
                if message is not None:
                    self._running[threading.get_ident()] = message
                    return message
                self._condition.wait()
        return None

    def _handle(self, message: Message) -> str | None:
        """Call the handler; why it failed, or None."""
        try:
            reply = reply_of(message, self._handler(message))
            if reply is not None:
                message.reply(reply)
        except BaseException as error:
            # whatever the handler raises, SystemExit too: the message goes back, the others go on
            _log.debug("a handler failed", exc_info=True)
            return reason_of(error)
        return None

    def _done(self, message: Message) -> None:
        with self._condition:
            del self._running[threading.get_ident()]
            self._turns.done(message)
            self._condition.notify_all()

    def _leave(self) -> None:
        with self._condition:
            self._alive -= 1
            is_last = not self._alive
            self._condition.notify_all()
        if is_last and self._last_closes:
            try:
                self.consumer.close()
            except DanubeError as error:
                self.error = self.error or error
                _log.warning("a subscription ended: %s", error)

    def _stop(self) -> None:
        with self._condition:
            self._stopping = True
            left = self._turns.clear()
            self._condition.notify_all()
        for message in left:
            self._completion.abandon(message)

    # ------------------------------------------------------------ the end

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the subscription has ended; False when `timeout` seconds are over before.

        Ends by `close()`, or by an error (TopicDeleted, ...), which is raised here. Raises FailedPrecondition in a
        handler, which cannot wait for its own end.
        """
        if threading.current_thread() in self._threads:
            raise FailedPrecondition("a handler cannot wait for its own end; return from it")
        ended = self._wait_for_threads(timeout)
        if ended and self.error is not None:
            self._told = True
            raise self.error
        return ended

    def _wait_for_threads(self, timeout: float | None) -> bool:
        deadline_ns = None if timeout is None else deadline_after(self._clock, timeout)
        with self._condition:
            while self._alive:
                left = None
                if deadline_ns is not None:
                    left = (deadline_ns - self._clock.monotonic_ns()) / 1e9
                    if left <= 0:
                        return False
                self._condition.wait(left)
        return True

    def close(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """Receive no more, let running handlers finish, ack what they did; within `timeout` seconds.

        Raises FailedPrecondition if handlers were still running then: their messages come again. Raises what
        ended the subscription if `wait()` has not raised it. A handler may call it: then it returns at once, and
        the end comes when the handlers have returned.
        """
        check_seconds(timeout, "timeout")
        began_ns = self._clock.monotonic_ns()
        self._stop()
        self._completion.interrupt(_Stopped())
        if threading.current_thread() in self._threads:
            self._last_closes = True  # the message in hand is answered first
            return
        self._wait_for_threads(timeout * CLOSE_SHARE)
        with self._condition:
            running = list(self._running.values())
        spent = (self._clock.monotonic_ns() - began_ns) / 1e9
        try:
            self.consumer.close(max(0.0, timeout - spent))
        except DanubeError:
            if not running:
                raise  # otherwise its messages come again with those in hand
        self._raise_end(running)
