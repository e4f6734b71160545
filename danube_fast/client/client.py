"""Client: the synchronous face. Every call runs its steps in the calling thread."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, Unpack

from danube_fast.checks import check_callable, check_choice, check_text
from danube_fast.client.admin_client import AdminClient
from danube_fast.client.consume.read_range import checked_stop
from danube_fast.client.consumer import Consumer
from danube_fast.client.core import Core
from danube_fast.client.faces import Closing, Run
from danube_fast.client.handle.handlers import checked_concurrency, prefetch
from danube_fast.client.link.steps import Steps, deadline_after, seconds_until
from danube_fast.client.produce.outgoing import Attributes
from danube_fast.client.producer import Producer
from danube_fast.client.reader import Reader
from danube_fast.client.subscriber import Subscriber, refuse_coroutines
from danube_fast.client.values.arguments import (
    ConsumerArguments,
    DispatchMode,
    DurabilityLevel,
    FailurePolicyFields,
    ProducerArguments,
    PublishArguments,
    Start,
    SubscriptionType,
)
from danube_fast.client.values.limits import (
    CLOSE_TIMEOUT_SECONDS,
    PERMITS_BYTES_DEFAULT,
    PERMITS_MESSAGES_DEFAULT,
    REQUEST_TIMEOUT_SECONDS,
)
from danube_fast.client.values.message import Message, MessageId
from danube_fast.client.values.options import READER, TYPES, ConsumerOptions, subscribe_options
from danube_fast.errors import DanubeError, InvalidArgument
from danube_fast.types import TopicPattern, parse_topic

__all__ = ["Client"]

F = TypeVar("F")


def topic_list(topic: str | Sequence[str] | None) -> list[str]:
    """Return one topic or several as a list. Raises InvalidArgument if there is none, or one twice."""
    if topic is not None and not isinstance(topic, str | list | tuple | set | frozenset):
        raise InvalidArgument(f"{topic!r:.100} names no topics; give a topic, or a list of them")
    topics = [
        str(parse_topic(name)) for name in ([topic] if isinstance(topic, str) else topic or ())
    ]
    if not topics:
        raise InvalidArgument("name a topic, a list of topics, or pattern=")
    if len(set(topics)) != len(topics):
        raise InvalidArgument("the same topic is named twice; name each once")
    return topics


def topics_of(topic: str | Sequence[str] | None, pattern: str | None) -> list[str]:
    """Return the topics that are named; none with a pattern. Raises InvalidArgument."""
    if pattern is None:
        return topic_list(topic)
    if topic:
        raise InvalidArgument("give topics or pattern=, not both")
    TopicPattern(check_text(pattern, "pattern"))
    return []


class Client(Closing):
    """A connection to a broker. Made by `danube_fast.connect()`; thread-safe."""

    def __init__(self, url: str, timeout: float, **options: Any) -> None:
        """`options`: those of `connect()`."""
        self._core = Core(url, **options)
        self._pump = self._core.pump
        self._run: Run = self._pump.run
        try:
            self._run(self._core.open_steps(timeout))
        except BaseException:
            self._core.shut()
            raise
        self._subscribers: weakref.WeakSet[Subscriber] = weakref.WeakSet()
        self.admin = AdminClient(self._core.producers, self._core.consumers)
        """Administrative operations."""

    @property
    def name(self) -> str:
        """Name of this client, as the broker shows it."""
        return self._core.name

    def _open(self, steps: Steps[Any], face: Callable[..., F], *arguments: Any) -> F:
        """Open a resource and show it to the application."""
        return face(self._run(steps), *arguments)

    def producer(
        self,
        topic: str,
        *,
        name: str | None = None,
        dispatch: DispatchMode | None = None,
        durability: DurabilityLevel | None = None,
        partitions: int | None = None,
        **options: Unpack[ProducerArguments],
    ) -> Producer:
        """Open a producer; a missing topic is created (reliable, fsync) unless the broker forbids.

        `name`: makes republishing exact across restarts of this program; the same name in a second live producer
        fences the first. `dispatch`, `durability` and `partitions` are for a new topic, and must be those of an
        existing one. Options: `linger_us` (microseconds, 200), `batch_bytes_max` (1 MiB), `window_bytes_max`
        (bytes unacked at most, 16 MiB), `timeout` (seconds until an unacked message is an error, 30),
        `compression` (None, "lz4", "zstd").

            with client.producer("/default/flights", name="loader") as producer:
                for line in lines:
                    producer.send(line)

        Raises NotFound for a missing namespace, or a missing topic where the broker creates none;
        FailedPrecondition for settings that are not the topic's; ResourceExhausted at a limit of producers;
        Unavailable or DeadlineExceeded when the broker or the worker does not answer; InvalidArgument.
        """
        steps = self._core.producers.open_steps(
            topic,
            name=name,
            dispatch=dispatch,
            durability=durability,
            partitions=partitions,
            **options,
        )
        return self._open(steps, Producer)

    def publish(
        self, topic: str, payload: bytes | None, **fields: Unpack[PublishArguments]
    ) -> MessageId:
        """Publish one message through a cached producer and wait for its ack; its id.

        For topics that change with every message. Fields: those of `Producer.publish`.

            client.publish("/iot/dev-17", b"21.5", key="temperature")

        Raises what `producer()` and `Producer.publish` raise.
        """
        return self._run(self._core.publish_steps(topic, payload, fields))

    def consumer(
        self,
        topic: str | Sequence[str] | None = None,
        *,
        subscription: str,
        type: SubscriptionType = "exclusive",  # noqa: A002 - its name in the documentation
        initial_position: Start = "latest",
        name: str | None = None,
        timeout: float = REQUEST_TIMEOUT_SECONDS,
        pattern: str | None = None,
        permits_bytes: int = PERMITS_BYTES_DEFAULT,
        permits_messages: int = PERMITS_MESSAGES_DEFAULT,
        key_filters: Sequence[str] | None = None,
        failure_policy: FailurePolicyFields | None = None,
    ) -> Consumer:
        """Subscribe to a topic, a list of topics, or all topics that match `pattern`.

        `pattern`: a glob over the topics of a namespace, such as "/iot/dev-*"; topics that appear later join from
        their first message, deleted ones leave, and none need be there yet. `subscription`: the cursor that
        remembers what is acked. `type`: exclusive, shared, failover or key_shared. `initial_position` ("latest",
        "earliest", an offset, a datetime, an RFC 3339 time, or a time ago such as "-10m") and `failure_policy`
        (fields as in tuning.md, "Failure policy") count when the subscription is new. `name`: of the consumer, as
        the broker shows it. `timeout`: seconds to wait for a missing topic. `permits_bytes` and `permits_messages`
        bound what the broker sends ahead: with few, slow consumers of a group leave more to the others.
        `key_filters`: globs such as "pay*", which say which keys a key_shared consumer takes.

            with client.consumer("/default/flights", subscription="billing", type="shared") as consumer:
                for message in consumer:
                    handle(message.payload)
                    consumer.ack(message)

        Raises NotFound when a topic is missing after `timeout`; FailedPrecondition for another type than the
        subscription has, or an exclusive one that is taken; ResourceExhausted at a limit of consumers;
        DeadlineExceeded when a worker does not answer; InvalidArgument.
        """
        check_choice(type, "type", TYPES)
        topics = topics_of(topic, pattern)
        options = ConsumerOptions(
            subscription=subscription,
            type=type,
            position=initial_position,
            name=self.name if name is None else name,
            permits_bytes=permits_bytes,
            permits_messages=permits_messages,
            options=subscribe_options(key_filters, failure_policy),
            pattern=pattern,
        )
        steps = self._core.consumers.open_steps(topics, options.checked(), timeout)
        return self._open(steps, Consumer)

    def reader(
        self,
        topic: str | Sequence[str] | None = None,
        *,
        pattern: str | None = None,
        start: Start = "earliest",
        stop: str | int | None = "latest",
        timeout: float = REQUEST_TIMEOUT_SECONDS,
        permits_bytes: int = PERMITS_BYTES_DEFAULT,
    ) -> Reader:
        """Read a topic, several, or those that match `pattern`, without a subscription.

        `start`: a position as in `consumer()`, or {"last": n} messages. `stop`: where the range ends, the offset
        not included; "latest": the end as of now; None: read on for ever, and topics that are made later too.
        `timeout`: seconds to wait for a missing topic. `permits_bytes` bounds what the broker sends ahead.

            for message in client.reader("/default/flights", start="-10m"):
                print(message.offset, message.payload)

        Raises NotFound when a topic is missing after `timeout`, DeadlineExceeded when a worker does not answer,
        InvalidArgument.
        """
        end = checked_stop(stop)
        topics = topics_of(topic, pattern)
        options = ConsumerOptions("", READER, start, self.name, permits_bytes, pattern=pattern)
        steps = self._core.consumers.open_steps(topics, options.checked(), timeout)
        return self._open(steps, Reader, end)

    def request(
        self,
        topic: str,
        payload: bytes | None,
        timeout: float = REQUEST_TIMEOUT_SECONDS,
        *,
        key: bytes | str | None = None,
        attributes: Attributes | None = None,
    ) -> Message:
        """Publish a request and wait up to `timeout` seconds for the reply of a consumer of the topic.

        `key` and `attributes` are those of the request. Replies come over a topic of this client's own, made with
        the first request and deleted by `close()`. Raises DeadlineExceeded if no reply came (the request may have
        been handled all the same), and what `publish()` raises.
        """
        return self._run(
            self._core.requests.request_steps(topic, payload, timeout, key, attributes)
        )

    def reply(
        self, message: Message, payload: bytes | None, attributes: Attributes | None = None
    ) -> None:
        """Reply to a message that asks for it (`message.reply_topic`); nothing if the client that asked has gone.

        Acks nothing. `attributes` are those of the reply. Raises FailedPrecondition if the message asks for no
        reply.
        """
        return self._run(self._core.requests.reply_steps(message, payload, attributes))

    def subscribe(
        self,
        topic: str | Sequence[str] | None,
        subscription: str,
        handler: Callable[[Message], object],
        *,
        type: SubscriptionType = "shared",  # noqa: A002 - its name in the documentation
        concurrency: int | None = None,
        **options: Unpack[ConsumerArguments],
    ) -> Subscriber:
        """Call `handler` for every message: ack when it returns, nack with its reason when it raises.

        `topic`, `subscription`, `type`: as for `consumer()`; a `pattern=` takes None as topic. `concurrency`: how
        many threads run the handler; 8 by default for shared and key_shared, which keeps the order of each key;
        exclusive and failover keep the order of all, so there it is always 1. While the handler runs, the ack
        timeout of its message does not run out. Bytes that it returns are the reply to a message that asks for
        one. Other options as for `consumer()`, but few messages are sent ahead. Close what is returned to stop, or
        `wait()`.

            with client.subscribe("/default/flights", "billing", handle, concurrency=4) as subscriber:
                subscriber.wait()

        Raises InvalidArgument for a coroutine function, or a `concurrency` that would break the order, and what
        `consumer()` raises.
        """
        check_callable(handler, "handler")
        refuse_coroutines(handler)
        count = checked_concurrency(type, concurrency)
        consumer = self.consumer(
            topic, subscription=subscription, type=type, **prefetch(options, count)
        )
        subscriber = Subscriber(consumer, handler, count)
        self._subscribers.add(subscriber)
        return subscriber

    def close(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """Close subscriptions, producers (flushing them), consumers and connections within `timeout` seconds.

        Raises the first error, when everything is closed.
        """
        if self._pump.refusal is not None:
            return
        clock = self._pump.clock
        deadline_ns = deadline_after(clock, timeout)
        first: DanubeError | None = None
        for subscriber in list(self._subscribers):  # what their handlers did is acked
            try:
                subscriber.close(seconds_until(clock, deadline_ns))
            except DanubeError as error:
                first = first or error
        try:
            self._run(self._core.close_users_steps(seconds_until(clock, deadline_ns)))
        finally:
            self._core.shut()
        if first is not None:
            raise first

    def __repr__(self) -> str:
        return f"<Client {self._core.name!r} of {self._core.url}>"
