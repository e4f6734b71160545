r"""Request and reply over ordinary topics.

    client.request --- x-reply-topic, x-correlation-id ---> topic ---> a responder's consumer
         ^                                                                  | message.reply, or
         |                                                                  v what a handler returns
      waiting[id] <--- reader at the end of a private topic <--- x-correlation-id

A client makes its reply topic with its first request and deletes it when it is closed. The topic is
non_reliable (a reply that nobody waits for is worth nothing), its name is drawn at random, and its
reader stands at the end of it before any request goes out. All requests of a client share them.

The reader is an inbox without a queue: whoever reads the sockets settles the requests, so no thread
waits for replies. A reply whose request was given up finds nobody and is dropped.
"""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING, TypeVar

from danube_fast.checks import check_seconds
from danube_fast.client.consume.delivery import Delivery
from danube_fast.client.consume.inbox import Inbox
from danube_fast.client.limits import CLOSE_TIMEOUT_SECONDS, REPLIERS_MAX, REQUEST_TIMEOUT_SECONDS
from danube_fast.client.link.pump import Steps, Wait, deadline_after
from danube_fast.client.message import CORRELATION_ID, REPLY_TOPIC, Message, reply_address
from danube_fast.client.options import READER, ConsumerOptions
from danube_fast.client.produce.outgoing import Attributes, Ticket, as_payload, checked_attributes
from danube_fast.client.produce.producer_cache import ProducerCache
from danube_fast.errors import (
    AlreadyExists,
    DanubeError,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    TopicDeleted,
    Unavailable,
)
from danube_fast.types import REPLY_TOPICS

if TYPE_CHECKING:
    from danube_fast.client.consume.attachment import Attachment
    from danube_fast.client.core import Core

__all__ = ["Desk", "ReplyInbox", "reply_topic_name"]

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_RANDOM_BYTES = 12
_CLOSED = (
    "the client was closed (or its process forked) while a request waited for its reply; connect again, and "
    "ask again if that does no harm"
)


def reply_topic_name() -> str:
    """A name for a reply topic that nobody has and nobody guesses."""
    return REPLY_TOPICS + secrets.token_hex(_RANDOM_BYTES)


class _Overdue(Exception):
    """The time of a request is up."""


class _Asked:
    """Somebody waits for one reply."""

    __slots__ = ("error", "reply")

    def __init__(self) -> None:
        self.reply: Message | None = None
        self.error: DanubeError | None = None

    @property
    def is_settled(self) -> bool:
        return self.reply is not None or self.error is not None


class ReplyInbox(Inbox):
    """The reader of a reply topic: hands each message to whoever waits for it."""

    def arrived(self, delivery: Delivery) -> None:
        """Attachment: a frame with replies."""
        desk = self._core.desk
        for message in delivery.messages(0, delivery.count):
            desk.replied(message)
        delivery.give_credit_back(delivery.count)

    def damaged(self, error: DanubeError) -> None:
        """Attachment: a frame that cannot be trusted: its requests find out when their time is up."""
        _log.warning("replies were lost: %s", error)

    def attachment_failed(self, attachment: Attachment, error: DanubeError) -> None:
        """Attachment: no reply will come any more."""
        super().attachment_failed(attachment, error)
        self._core.desk.reader_failed(self, error)

    def refuse(self, error: DanubeError) -> None:
        """Core: nothing works any more."""
        super().refuse(error)
        self._core.desk.reader_failed(self, FailedPrecondition(_CLOSED))


class Desk:
    """Requests and replies of one client."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._repliers = ProducerCache(core, REPLIERS_MAX, creates=False)
        """Producers on the reply topics of others."""
        self._reader: ReplyInbox | None = None
        self._topic = ""
        self._topics: list[str] = []
        """Every reply topic that this client may have made, to be deleted."""
        self._opening = False
        self._waiting: dict[str, _Asked] = {}
        self._last_id = 0

    # ------------------------------------------------------------ asking

    def request_steps(
        self,
        topic: str,
        payload: bytes | None,
        timeout: float,
        key: bytes | str | None,
        attributes: Attributes | None,
    ) -> Steps[Message]:
        """Publish a request and wait for its reply."""
        check_seconds(timeout, "timeout", is_positive=True)
        own = _checked(attributes)
        if REPLY_TOPIC in own or CORRELATION_ID in own:
            raise InvalidArgument(
                f"{REPLY_TOPIC} and {CORRELATION_ID} are set by request(); leave them out of attributes="
            )
        deadline_ns = deadline_after(self._core.pump.clock, timeout)
        try:
            return (yield from _within(self._ask_steps(topic, payload, key, own), deadline_ns))
        except _Overdue:
            raise DeadlineExceeded(
                f"no reply to a request on {topic} within {timeout:g} s. Is somebody subscribed who replies "
                "(`danube-fast subscriptions list`)? The request may still be answered, and then the "
                "reply is dropped: ask again if that does no harm, with a longer timeout= if it takes time"
            ) from None

    def _ask_steps(
        self,
        topic: str,
        payload: bytes | None,
        key: bytes | str | None,
        attributes: dict[str, str],
    ) -> Steps[Message]:
        reply_topic = yield from self._ready_steps()
        producer = yield from self._core.cached.take_steps(topic)
        asked, ticket = _Asked(), Ticket()
        with self._core.pump.lock:
            self._last_id += 1
            correlation_id = str(self._last_id)
            self._waiting[correlation_id] = asked
            if self._topic != reply_topic:  # it was deleted meanwhile
                asked.error = _gone(reply_topic)
        attributes = {**attributes, REPLY_TOPIC: reply_topic, CORRELATION_ID: correlation_id}
        try:
            fields = producer.checked(payload, key, attributes, None, None, None)
            if not asked.is_settled:
                yield from producer.send_steps(fields, ticket)
            yield Wait(lambda: asked.is_settled or ticket.is_refused)
            if asked.error is not None:
                raise type(asked.error)(str(asked.error))
            if asked.reply is None:
                ticket.result()  # raises why the request was not taken
                raise TypeError("a request was neither replied to nor refused")
            return asked.reply
        finally:
            with self._core.pump.lock:
                self._waiting.pop(correlation_id, None)

    def replied(self, message: Message) -> None:
        """Reader, under the lock: a reply came."""
        correlation_id = message.attributes.get(CORRELATION_ID, "")
        asked = self._waiting.pop(correlation_id, None)
        if asked is None:
            _log.debug("a reply came that nobody waits for: %s", correlation_id)
        else:
            asked.reply = message

    def reader_failed(self, reader: ReplyInbox, error: DanubeError) -> None:
        """Reader, under the lock: no reply will come. The next request makes another topic."""
        if self._reader is not reader:
            return
        deleted = isinstance(error, TopicDeleted)
        failure = _gone(self._topic) if deleted else error
        self._reader, self._topic = None, ""
        for asked in self._waiting.values():
            asked.error = failure
        self._waiting.clear()
        self._core.pump.notify()

    # ------------------------------------------------------------ the reply topic

    def _ready_steps(self) -> Steps[str]:
        """The reply topic, with a reader at its end."""
        while True:
            with self._core.pump.lock:
                if self._reader is not None:
                    return self._topic
                if not self._opening:
                    self._opening = True
                    break
            yield Wait(lambda: not self._opening)
        try:
            topic = yield from self._create_steps()
            options = ConsumerOptions("", READER, "latest", self._core.name).checked()
            reader = yield from self._core.consumer_steps(
                ReplyInbox, [topic], options, REQUEST_TIMEOUT_SECONDS
            )
            with self._core.pump.lock:
                self._reader, self._topic = reader, topic
            return topic
        finally:
            with self._core.pump.lock:
                self._opening = False
                self._core.pump.notify()

    def _create_steps(self) -> Steps[str]:
        """Make a reply topic."""
        while True:
            topic = reply_topic_name()
            self._topics.append(topic)  # before it is asked for: the answer may be lost
            try:
                yield from self._core.admin_steps(
                    "create_topic", {"topic": topic, "dispatch": "non_reliable"}
                )
                return topic
            except AlreadyExists:
                self._topics.remove(topic)  # somebody else's

    def close_steps(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> Steps[None]:
        """Delete what was made, as far as the broker can be reached within `timeout` seconds."""
        deadline_ns = deadline_after(self._core.pump.clock, timeout)
        for topic in self._topics:
            if not self._core.routes.bootstrap.is_open:
                _log.debug("the broker cannot be reached; reply topics stay: %s", self._topics)
                return
            try:
                yield from _within(
                    self._core.admin_steps("delete_topic", {"topic": topic}), deadline_ns
                )
            except (DanubeError, _Overdue) as error:
                _log.debug("the reply topic %s stays: %s", topic, error)
        self._topics.clear()

    # ------------------------------------------------------------ answering

    def reply_steps(
        self, message: Message, payload: bytes | None, attributes: Attributes | None
    ) -> Steps[None]:
        """Send the reply that a message asks for; nothing, if who asked has gone."""
        if not isinstance(message, Message):
            raise InvalidArgument(f"a reply is to a Message, not to {message!r:.100}")
        as_payload(payload)
        own = _checked(attributes)
        if CORRELATION_ID in own:
            raise InvalidArgument(
                f"{CORRELATION_ID} is set by reply(); leave it out of attributes="
            )
        topic, correlation_id = reply_address(message)
        own[CORRELATION_ID] = correlation_id
        try:
            producer = yield from self._repliers.take_steps(topic)
            yield from producer.publish_steps(payload, attributes=own)
        except (NotFound, TopicDeleted):
            _log.debug("who asked for a reply on %s has gone", topic)
            yield from self._repliers.forget_steps(topic)


def _checked(attributes: Attributes | None) -> dict[str, str]:
    return {} if attributes is None else {**checked_attributes(attributes)}


def _gone(topic: str) -> Unavailable:
    return Unavailable(
        f"the reply topic {topic or 'of this client'} was deleted, so no reply can come; the next request makes "
        "another one: ask again if that does no harm"
    )


def _within(steps: Steps[_T], deadline_ns: int) -> Steps[_T]:
    """The same steps, which raise _Overdue when that time is up."""
    try:
        wait = next(steps)
        while True:
            ready = yield Wait(wait.ready, min(wait.deadline_ns, deadline_ns))
            if not ready and wait.deadline_ns >= deadline_ns:
                raise _Overdue
            wait = steps.send(ready)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    finally:
        steps.close()
