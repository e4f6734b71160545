"""Shared by both kinds of `subscribe`: options, the words of a failure, what a handler's result means."""

from __future__ import annotations

import logging
from typing import Any

from danube_fast.checks import check_choice, check_names, check_whole
from danube_fast.client.consume.inbox import Inbox
from danube_fast.client.handle.turns import Turns
from danube_fast.client.link.steps import Steps
from danube_fast.client.values.arguments import ConsumerArguments
from danube_fast.client.values.limits import PREFETCH_PER_HANDLER
from danube_fast.client.values.message import Message, Received
from danube_fast.client.values.options import TYPES
from danube_fast.errors import DanubeError, FailedPrecondition, InvalidArgument

__all__ = ["CLOSE_SHARE", "Handling", "checked_concurrency", "prefetch", "reason_of", "reply_of"]

_log = logging.getLogger(__name__)
CONCURRENCY_DEFAULT = 8
CONCURRENCY_MAX = 1024
QUEUED_PER_HANDLER = 4
REASON_CHARACTERS_MAX = 200
CLOSE_SHARE = 0.8
"""Part of the time to close that handlers get; acks have the rest."""
_ONE_AT_A_TIME = ("exclusive", "failover")


def checked_concurrency(type_name: str, concurrency: int | None) -> int:
    """Return how many handlers run beside each other. Raises InvalidArgument."""
    check_choice(type_name, "type", TYPES)
    in_order = type_name in _ONE_AT_A_TIME
    if concurrency is None:
        return 1 if in_order else CONCURRENCY_DEFAULT
    concurrency = check_whole(concurrency, "concurrency", 1, CONCURRENCY_MAX)
    if in_order and concurrency > 1:
        raise InvalidArgument(
            f"concurrency={concurrency} would break the order that a {type_name} subscription keeps; leave "
            "it out, or use type='key_shared', which keeps the order of each key"
        )
    return concurrency


def prefetch(options: ConsumerArguments, concurrency: int) -> dict[str, Any]:
    """Return options of the consumer behind a subscription: what is queued here was sent ahead, too.
    Raises InvalidArgument."""
    check_names(options, ConsumerArguments.__annotations__, "subscribe()")
    messages = (PREFETCH_PER_HANDLER - QUEUED_PER_HANDLER) * concurrency
    return {"permits_messages": messages, **options}


def reply_of(message: Message, result: object) -> bytes | None:
    """Return the result of a handler, if the message asks for a reply and that is one."""
    if isinstance(result, bytes | bytearray | memoryview) and message.reply_topic is not None:
        return bytes(result)
    return None


def reason_of(error: BaseException) -> str:
    """Return why a handler failed, as it stands in a dead letter."""
    return f"{type(error).__name__}: {error}"[:REASON_CHARACTERS_MAX]


def still_running(messages: list[Message]) -> FailedPrecondition:
    """Return the error of handlers that did not end in time."""
    names = ", ".join(str(message.message_id) for message in messages[:3])
    more = ", ..." if len(messages) > 3 else ""
    return FailedPrecondition(
        f"{len(messages)} handlers were still running when the time to close was up; their messages are not "
        f"acked and come again: {names}{more}; give close() a longer timeout="
    )


class Completion:
    """Follows messages of a consumer from their arrival to the ack or nack, in any thread."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._lock = inbox.pump.lock
        inbox.progress.has_handlers = True

    def wait(self, message: Message) -> None:
        """Keep the ack timeout of a message that waits for a handler from running out."""
        self._inbox.progress.wait(_delivery(message), message.offset)
        with self._lock:
            self._inbox.in_progress.add(*_place(message))

    def begin(self, message: Message) -> Steps[None] | None:
        """Note that a handler takes a message. Returns the steps to run before, or None."""
        return self._inbox.progress.begin(_delivery(message), message)

    def abandon(self, message: Message) -> None:
        """Let a message that no handler will take go back to the subscription."""
        with self._lock:
            self._inbox.in_progress.remove(*_place(message))

    def complete(self, message: Message, reason: str | None) -> None:
        """Ack a message, or nack it with the reason."""
        with self._lock:
            self._inbox.in_progress.remove(*_place(message))
            # not the consumer's quick way to ack: that one is for one thread alone
            if reason is None:
                self._inbox._acks.add(message)
            else:
                self._inbox._acks.give_back(message, -1, reason)

    def interrupt(self, error: Exception) -> None:
        """Raise that error in the receive that waits."""
        with self._lock:
            self._inbox.interrupt(error)


class Handling:
    """State of a running subscription, whichever way its handlers run."""

    def __init__(self, inbox: Inbox, concurrency: int) -> None:
        self.error: DanubeError | None = None
        """The error that ended the subscription; None if it runs, or `close()` ended it."""
        self._completion = Completion(inbox)
        self._turns = Turns(
            by_key=inbox.type == "key_shared", room=QUEUED_PER_HANDLER * concurrency
        )
        self._stopping = False
        self._told = False

    def _failed(self, error: DanubeError) -> None:
        """Note what ends the subscription, unless it was to stop."""
        if not self._stopping:
            self.error = error
            _log.warning("a subscription ended: %s", error)

    def _raise_end(self, running: list[Message]) -> None:
        """Raise what `close` has to tell: handlers that are running, or an error that was not raised yet."""
        if running:
            raise still_running(running)
        if self.error is not None and not self._told:
            self._told = True
            raise self.error


def _delivery(message: Message) -> Any:
    if not isinstance(message, Received):
        raise TypeError(f"{message!r} was not received")
    return message._source


def _place(message: Message) -> tuple[Any, int, int]:
    source = _delivery(message)
    return source.attachment, source.generation, message.offset
