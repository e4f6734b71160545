r"""Request and reply over ordinary topics.

    client.request --- x-reply-topic, x-correlation-id ---> topic ---> a responder's consumer
         ^                                                                  | message.reply, or
         |                                                                  v what a handler returns
      waiting[id] <--- reader at the end of a private topic <--- x-correlation-id

A client makes its reply topic with its first request and deletes it when it is closed. The topic is
non_reliable (a reply that no call waits for is worth nothing), its name is drawn at random, and its
reader stands at the end of it before any request goes out. All requests of a client share them.

The reader is an inbox without a queue: the thread that reads the sockets completes the requests, so no
thread waits for replies. A reply whose request was given up is dropped.
"""

from __future__ import annotations

import functools
import logging
import secrets
from typing import Any, TypeVar

from danube_fast.checks import check_seconds
from danube_fast.client.consume.attachment import Attachment
from danube_fast.client.consume.consumers import Consumers
from danube_fast.client.consume.delivery import Delivery
from danube_fast.client.consume.inbox import Inbox
from danube_fast.client.link.answers import Ticket
from danube_fast.client.link.operations import admin_steps
from danube_fast.client.link.steps import Steps, Wait, deadline_after
from danube_fast.client.produce.outgoing import Attributes, as_payload, checked_attributes
from danube_fast.client.produce.producers import ProducerCache, Producers
from danube_fast.client.values.limits import (
    CLOSE_TIMEOUT_SECONDS,
    REPLIERS_MAX,
)
from danube_fast.client.values.message import (
    CORRELATION_ID,
    REPLY_TOPIC,
    Message,
    MessageId,
    Received,
    reply_address,
)
from danube_fast.client.values.options import READER, ConsumerOptions
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
from danube_fast.frame.view import FrameView
from danube_fast.types import REPLY_TOPICS

__all__ = ["ReplyInbox", "Requests", "reply_topic_name"]

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_RANDOM_BYTES = 16
_CLOSED = (
    "the client was closed (or its process forked) while a request waited for its reply; connect again, and "
    "ask again if that does no harm"
)


def reply_topic_name() -> str:
    """Return a name for a reply topic that no client has, and that cannot be guessed."""
    return REPLY_TOPICS + secrets.token_hex(_RANDOM_BYTES)


class _Overdue(Exception):
    """Raised when the time of a request is up."""


class _Request(Ticket, eq=False):
    """A call that waits for one reply, or for the news that none will come."""

    correlation_id: str = ""
    reply: Message | None = None

    def complete(self, message_id: MessageId | None, error: DanubeError | None) -> None:
        """Go on waiting behind an ack; end with an error, the first one. Under the pump's lock."""
        if error is not None and not self.done:
            super().complete(None, error)


class ReplyInbox(Inbox):
    """The reader of a reply topic: hands each message to the request that waits for it."""

    def __init__(self, requests: Requests, *arguments: Any) -> None:
        self._requests = requests
        super().__init__(*arguments)

    def arrived(self, attachment: Attachment, view: FrameView, place: tuple[int, ...]) -> None:
        """Attachment: hand over the replies of a frame."""
        delivery = Delivery(attachment, view, place)
        if delivery.count == 1 and delivery.is_dense:
            self._requests.replied(delivery.only())
        else:
            for message in delivery.messages(0, delivery.count):
                self._requests.replied(message)
        attachment.credit.take(delivery.frame_bytes, delivery.count, delivery.flow_id)

    def damaged(self, error: DanubeError) -> None:
        """Attachment: drop a frame that cannot be trusted; its requests find out when their time is up."""
        _log.warning("replies were lost: %s", error)

    def attachment_failed(self, attachment: Attachment, error: DanubeError) -> None:
        """Attachment: end the requests, as no reply will come any more."""
        super().attachment_failed(attachment, error)
        self._requests.reader_failed(self, error)

    def refuse(self, error: DanubeError) -> None:
        """End the requests, as the client is closed, or the process was forked."""
        super().refuse(error)
        self._requests.reader_failed(self, FailedPrecondition(_CLOSED))


class Requests:
    """Requests and replies of one client."""

    def __init__(self, producers: Producers, consumers: Consumers, cached: ProducerCache) -> None:
        """`cached`: the producers that requests are published with."""
        self._consumers = consumers
        self._cached = cached
        self._routes = producers.routes
        self._pump = producers.routes.pump
        self._repliers = ProducerCache(producers, REPLIERS_MAX, creates=False)
        """Producers on the reply topics of others."""
        self._reader: Inbox | None = None
        self._topic = ""
        self._topics: list[str] = []
        """Every reply topic that this client may have made, to be deleted."""
        self._opening = False
        self._waiting: dict[str, _Request] = {}
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
        seconds = check_seconds(timeout, "timeout", is_positive=True)
        own = {} if attributes is None else checked_attributes(attributes)
        if REPLY_TOPIC in own or CORRELATION_ID in own:
            raise InvalidArgument(
                f"{REPLY_TOPIC} and {CORRELATION_ID} are set by request(); leave them out of attributes="
            )
        deadline_ns = self._pump.clock.monotonic_ns() + int(seconds * 1e9)
        request = _Request()
        try:
            while True:
                with self._pump.lock:
                    producer = None if self._reader is None else self._cached.ready(topic)
                    if producer is not None:
                        own[REPLY_TOPIC], own[CORRELATION_ID] = self._topic, self._enter(request)
                        fields = producer.checked_plain(payload, key, own)
                        is_sent = producer.send_columns(fields, request)
                        break
                yield from _within(self._open_steps(topic), deadline_ns)
            if not is_sent and not request.done:  # the reply topic may be gone meanwhile
                yield from _within(producer.send_steps(fields, request), deadline_ns)
            if not (yield Wait(functools.partial(getattr, request, "done"), deadline_ns)):
                raise _Overdue
        except _Overdue:
            raise DeadlineExceeded(
                f"no reply to a request on {topic} within {timeout:g} s. Is a consumer subscribed that replies "
                "(`danube-fast subscriptions list`)? The request may still be answered, and then the "
                "reply is dropped: ask again if that does no harm, with a longer timeout= if it takes time"
            ) from None
        finally:
            if request.reply is None:
                with self._pump.lock:
                    self._waiting.pop(request.correlation_id, None)
        if request.reply is None:
            raise request.failure()
        return request.reply

    def _enter(self, request: _Request) -> str:
        """Under the lock: let a reply find the request; by which id."""
        self._last_id += 1
        request.correlation_id = correlation_id = str(self._last_id)
        self._waiting[correlation_id] = request
        return correlation_id

    def _open_steps(self, topic: str) -> Steps[None]:
        """Have a reader for replies, and a producer on the topic."""
        yield from self._ready_steps()
        yield from self._cached.take_steps(topic)

    def replied(self, message: Message) -> None:
        """Reader, under the lock: complete the request of a reply that came."""
        correlation_id = message.attributes.get(CORRELATION_ID, "")
        request = self._waiting.pop(correlation_id, None)
        if request is None:
            _log.debug("a reply came that no request waits for: %s", correlation_id)
        else:
            request.reply, request.done = message, True

    def reader_failed(self, reader: Inbox, error: DanubeError) -> None:
        """Reader, under the lock: end all requests, as no reply will come. The next one makes another topic."""
        if self._reader is not reader:
            return
        deleted = isinstance(error, TopicDeleted)
        failure = _gone(self._topic) if deleted else error
        self._reader, self._topic = None, ""
        for request in self._waiting.values():
            request.complete(None, failure)
        self._waiting.clear()
        self._pump.notify()

    # ------------------------------------------------------------ the reply topic

    def _ready_steps(self) -> Steps[None]:
        """Have a reply topic, with a reader at its end."""
        while True:
            with self._pump.lock:
                if self._reader is not None:
                    return
                if not self._opening:
                    self._opening = True
                    break
            yield Wait(lambda: not self._opening)
        try:
            topic = yield from self._create_steps()
            name = self._consumers.client_name
            options = ConsumerOptions("", READER, "latest", name).checked()
            reader = yield from self._consumers.open_steps(
                [topic], options, make=functools.partial(ReplyInbox, self)
            )
            with self._pump.lock:
                self._reader, self._topic = reader, topic
        finally:
            with self._pump.lock:
                self._opening = False
                self._pump.notify()

    def _create_steps(self) -> Steps[str]:
        """Make a reply topic."""
        while True:
            topic = reply_topic_name()
            self._topics.append(topic)  # before it is asked for: the answer may be lost
            try:
                arguments = {"topic": topic, "dispatch": "non_reliable"}
                yield from admin_steps(self._routes.bootstrap, "create_topic", arguments)
                return topic
            except AlreadyExists:
                self._topics.remove(topic)  # another client's

    def close_steps(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> Steps[None]:
        """Delete what was made, as far as the broker can be reached within `timeout` seconds."""
        deadline_ns = deadline_after(self._pump.clock, timeout)
        bootstrap = self._routes.bootstrap
        for topic in self._topics:
            if not bootstrap.is_open:
                _log.debug("the broker cannot be reached; reply topics stay: %s", self._topics)
                return
            try:
                deletion = admin_steps(bootstrap, "delete_topic", {"topic": topic})
                yield from _within(deletion, deadline_ns)
            except (DanubeError, _Overdue) as error:
                _log.debug("the reply topic %s stays: %s", topic, error)
        self._topics.clear()

    # ------------------------------------------------------------ answering

    def reply_steps(
        self, message: Message, payload: bytes | None, attributes: Attributes | None
    ) -> Steps[None]:
        """Send the reply that a message asks for; nothing, if the client that asked has gone."""
        if type(message) is not Received and not isinstance(message, Message):
            raise InvalidArgument(f"a reply is to a Message, not to {message!r:.100}")
        if type(payload) is not bytes:
            as_payload(payload)
        own = {} if attributes is None else checked_attributes(attributes)
        if CORRELATION_ID in own:
            raise InvalidArgument(
                f"{CORRELATION_ID} is set by reply(); leave it out of attributes="
            )
        topic, own[CORRELATION_ID] = reply_address(message)
        try:
            with self._pump.lock:
                producer = self._repliers.ready(topic)
            if producer is None:
                producer = yield from self._repliers.take_steps(topic)
            fields = producer.checked_plain(payload, None, own)
            if producer.publish_columns(fields) is None:
                yield from producer.publish_steps(payload, attributes=own)
        except (NotFound, TopicDeleted):
            _log.debug("the client that asked for a reply on %s has gone", topic)
            yield from self._repliers.forget_steps(topic)


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
