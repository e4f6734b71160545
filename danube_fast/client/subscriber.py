"""`client.subscribe`: a handler called for every message, in threads."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from types import TracebackType

from danube_fast.client.consumer import Consumer
from danube_fast.client.limits import CLOSE_TIMEOUT_SECONDS
from danube_fast.client.message import Message
from danube_fast.errors import DanubeError, FailedPrecondition, InvalidArgument

__all__ = ["Subscriber"]

_log = logging.getLogger(__name__)
CONCURRENCY_MAX = 1024
_QUEUED_PER_THREAD = 4
_RECEIVE_SECONDS = 0.2
REASON_CHARACTERS_MAX = 200


class Subscriber:
    """One thread receives, `concurrency` threads call the handler."""

    def __init__(
        self, consumer: Consumer, handler: Callable[[Message], object], concurrency: int
    ) -> None:
        if not 1 <= concurrency <= CONCURRENCY_MAX:
            consumer.close()
            raise InvalidArgument(f"concurrency is {concurrency}; choose 1 to {CONCURRENCY_MAX}")
        self.error: DanubeError | None = None
        """What ended the subscription, if not `close()`."""
        self._consumer = consumer
        self._handler = handler
        self._stopping = threading.Event()
        self._queue: queue.Queue[Message | None] = queue.Queue(_QUEUED_PER_THREAD * concurrency)
        names = [f"danube-handler-{i}" for i in range(concurrency)]
        self._threads = [threading.Thread(target=self._handle, name=n, daemon=True) for n in names]
        self._receiver = threading.Thread(target=self._receive, name="danube-receiver", daemon=True)
        for thread in (*self._threads, self._receiver):
            thread.start()

    def _receive(self) -> None:
        try:
            while not self._stopping.is_set():
                message = self._consumer.receive(_RECEIVE_SECONDS)
                while message is not None and not self._stopping.is_set():
                    try:
                        self._queue.put(message, timeout=_RECEIVE_SECONDS)
                        break
                    except queue.Full:
                        continue
        except DanubeError as error:
            if not self._stopping.is_set():
                self.error = error
                _log.warning("a subscription ended: %s", error)
        finally:
            for _ in self._threads:
                self._put_end()

    def _put_end(self) -> None:
        while True:
            try:
                self._queue.put(None, timeout=_RECEIVE_SECONDS)
                return
            except queue.Full:
                if not any(thread.is_alive() for thread in self._threads):
                    return

    def _handle(self) -> None:
        while (message := self._queue.get()) is not None:
            try:
                self._handler(message)
            except Exception as error:
                # whatever the handler raises: the message goes back, the others go on
                _log.debug("a handler failed", exc_info=True)
                self._answer(message, repr(error)[:REASON_CHARACTERS_MAX])
            else:
                self._answer(message, None)

    def _answer(self, message: Message, reason: str | None) -> None:
        try:
            if reason is None:
                self._consumer.ack(message)
            else:
                self._consumer.nack(message, reason=reason)
        except DanubeError:
            _log.debug("an ack came too late", exc_info=True)

    def close(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """Stop receiving, let running handlers finish, ack what they did; within `timeout` seconds.

        FailedPrecondition if handlers were still running then; their messages are redelivered.
        """
        self._stopping.set()
        share = timeout / 2 / (len(self._threads) + 1)
        for thread in (self._receiver, *self._threads):
            if thread is not threading.current_thread():
                thread.join(max(share, _RECEIVE_SECONDS * 2))
        running = [thread for thread in self._threads if thread.is_alive()]
        self._consumer.close(timeout / 2)
        if running:
            raise FailedPrecondition(
                f"{len(running)} handlers were still running; their messages are delivered again"
            )

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
