"""Messages and their ids.

A received message is a view: it keeps the frame it came in and an index, and unpacks keys,
attributes and times only when they are asked for. Received frames are never overwritten, so messages
own their bytes for as long as they live.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from danube_fast.errors import FailedPrecondition, InvalidArgument

__all__ = [
    "CORRELATION_ID",
    "REPLY_TOPIC",
    "Gap",
    "Message",
    "MessageId",
    "Processing",
    "Received",
    "new_id",
    "reply_address",
]


class MessageId(NamedTuple):
    """Identity of a message; as text `/default/flights-part-0@123`."""

    topic: str
    """The partition's topic."""
    offset: int
    """Number of the message in its partition."""

    def __str__(self) -> str:
        return f"{self.topic}@{self.offset}"

    @classmethod
    def parse(cls, text: str) -> MessageId:
        """Return the id that a text names. Raises InvalidArgument."""
        topic, separator, offset = str(text).rpartition("@")
        if not separator or not topic.startswith("/") or not offset.isdecimal():
            raise InvalidArgument(f"{text!r} is not a message id; write /namespace/topic@offset")
        return cls(topic, int(offset))


new_id: Callable[[tuple[str, int]], MessageId] = functools.partial(tuple.__new__, MessageId)
"""Make the id of a topic and an offset, in one call of C."""


class Gap(NamedTuple):
    """Offsets that will never be delivered."""

    topic: str
    """The partition's topic."""
    first: int
    """The first of the offsets."""
    last: int
    """The last of them."""
    reason: str
    """Why they will not come."""
    lost: bool = False
    """Whether there were messages; otherwise the offsets were never used."""


class Processing:
    """`with message.processing():`, or `async with`: the message stays with its consumer meanwhile.

    Neither waits for anything. A message whose connection is lost is delivered again all the same.
    """

    def __init__(
        self, message: Message, begin: Callable[[], None], end: Callable[[], None]
    ) -> None:
        self._message = message
        self._begin = begin
        self._end = end

    def __enter__(self) -> Message:
        self._begin()
        return self._message

    def __exit__(self, *_: object) -> None:
        self._end()

    async def __aenter__(self) -> Message:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()


class MessageConsumer(Protocol):
    """The consumer of a message, as the message sees it."""

    def reply(
        self, message: Message, payload: bytes | None, attributes: Mapping[str, str] | None
    ) -> Awaitable[None]:
        """Send the reply to a message."""

    def processing(self, message: Message) -> Processing:
        """Keep the ack timeout of a message from running out."""


class Source(Protocol):
    """Where a message takes its fields from: a received frame, or what the constructor was given."""

    @property
    def consumer(self) -> MessageConsumer:
        """The consumer that received it. Raises FailedPrecondition for what was constructed."""

    @property
    def topic(self) -> str:
        """The partition's topic."""

    @property
    def partition(self) -> int | None:
        """Number of the partition; None if the topic has no partitions."""

    @property
    def producer_name(self) -> str:
        """Name of the producer."""

    @property
    def publish_time(self) -> int:
        """Nanoseconds since the epoch."""

    @property
    def schema(self) -> tuple[int, int] | None:
        """Schema id and version."""

    def key(self, index: int) -> bytes | None:
        """Key of a message."""

    def attributes_of(self, index: int) -> dict[str, str]:
        """Attributes of a message."""

    def event_time(self, index: int) -> int | None:
        """Event time of a message."""

    def sequence(self, index: int) -> int:
        """Sequence of a message."""

    def redelivery_count(self, index: int) -> int:
        """Return how often a message was delivered before."""


class _Fields(NamedTuple):
    """Fields of a message that was constructed, not received."""

    topic: str
    producer_name: str
    publish_time: int
    schema: tuple[int, int] | None
    values: tuple[bytes | None, dict[str, str], int | None, int, int]
    partition: int | None = None

    @property
    def consumer(self) -> MessageConsumer:
        raise FailedPrecondition(
            "this message was constructed, not received; only a received one can be answered or kept"
        )

    def key(self, _index: int) -> bytes | None:
        return self.values[0]

    def attributes_of(self, _index: int) -> dict[str, str]:
        return self.values[1]

    def event_time(self, _index: int) -> int | None:
        return self.values[2]

    def sequence(self, _index: int) -> int:
        return self.values[3]

    def redelivery_count(self, _index: int) -> int:
        return self.values[4]


class _Views:
    """Properties and methods of a message, wherever its fields are."""

    __slots__ = ()

    if TYPE_CHECKING:
        payload: bytes | None
        offset: int
        _source: Source
        _index: int

    @property
    def key(self) -> bytes | None:
        """The key, or None."""
        return self._source.key(self._index)

    @property
    def attributes(self) -> dict[str, str]:
        """The attributes; empty if there are none."""
        return self._source.attributes_of(self._index)

    @property
    def topic(self) -> str:
        """The partition's topic."""
        return self._source.topic

    @property
    def partition(self) -> int | None:
        """Number of the partition; None if the topic has no partitions."""
        return self._source.partition

    @property
    def message_id(self) -> MessageId:
        """Partition topic and offset."""
        return MessageId(self._source.topic, self.offset)

    @property
    def publish_time(self) -> int:
        """Time at which the producer packed the message's frame, nanoseconds since the epoch."""
        return self._source.publish_time

    @property
    def event_time(self) -> int | None:
        """Time of the event, as the producer says; nanoseconds since the epoch. None if it says none."""
        return self._source.event_time(self._index)

    @property
    def producer_name(self) -> str:
        """Name of the producer; empty if the broker did not tell."""
        return self._source.producer_name

    @property
    def sequence(self) -> int:
        """Number among the messages of its producer on this partition."""
        return self._source.sequence(self._index)

    @property
    def redelivery_count(self) -> int:
        """Number of times that it was delivered before."""
        return self._source.redelivery_count(self._index)

    @property
    def schema(self) -> tuple[int, int] | None:
        """Schema id and version, or None."""
        return self._source.schema

    @property
    def reply_topic(self) -> str | None:
        """Topic of the reply that is asked for; None if none is."""
        return self.attributes.get(REPLY_TOPIC)

    def reply(
        self, payload: bytes | None, attributes: Mapping[str, str] | None = None
    ) -> Awaitable[None]:
        """Reply to a message that came by `client.request`; to be awaited if the client is asynchronous.

        `attributes` are those of the reply. Returns when the broker has the reply; the client that asked may have
        given up, then it is dropped. Acks nothing. Raises FailedPrecondition if the message asks for no reply or
        was not received.
        """
        return self._source.consumer.reply(self, payload, attributes)  # type: ignore[arg-type]

    def processing(self) -> Processing:
        """Return a context manager (`with`, or `async with`): as long as it is open the message's ack timeout does not
        run out, however long that is. Acks nothing. Raises FailedPrecondition for a message of a reader, or one
        that was not received.

            with message.processing():
                convert(message.payload)
            consumer.ack(message)
        """
        return self._source.consumer.processing(self)  # type: ignore[arg-type]

    def _comparable(self) -> tuple[Any, ...]:
        names = ("payload", "offset", *_FIELD_NAMES)
        return tuple(getattr(self, name) for name in names)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return self._comparable() == other._comparable()

    def __hash__(self) -> int:
        return hash((self.topic, self.offset, self.payload))

    def __reduce__(self) -> Any:
        fields = {name: getattr(self, name) for name in ("offset", *_FIELD_NAMES)}
        return _rebuild, (self.payload, fields)

    def __repr__(self) -> str:
        payload = self.payload
        if payload is not None and len(payload) > _SHOWN_BYTES:
            payload = payload[:_SHOWN_BYTES] + b"..."
        return f"<Message {self.topic}@{self.offset} key={self.key!r} payload={payload!r}>"


REPLY_TOPIC = "x-reply-topic"
"""Attribute of a request: where its reply is to be published."""
CORRELATION_ID = "x-correlation-id"
"""Attribute of a request and of its reply."""


def reply_address(message: Message) -> tuple[str, str]:
    """Topic and correlation id for the reply to a message. Raises FailedPrecondition."""
    attributes = message.attributes
    topic = attributes.get(REPLY_TOPIC)
    if topic is None:
        raise FailedPrecondition(
            f"{message.message_id} asks for no reply (it has no attribute {REPLY_TOPIC}); publish it "
            "with client.request()"
        )
    return topic, attributes.get(CORRELATION_ID, "")


_FIELD_NAMES = (
    "key", "attributes", "topic", "publish_time", "event_time", "producer_name", "sequence",
    "redelivery_count", "schema", "partition",
)  # fmt: skip
_SHOWN_BYTES = 40


def _rebuild(payload: bytes | None, fields: dict[str, Any]) -> Message:
    return Message(payload, **fields)


class Message(_Views, abc.ABC):
    """One message. Times are nanoseconds since the epoch, UTC; what is not there is None.

    `payload`: its bytes; None is a tombstone, whose key is to be forgotten. `offset`: its number in the partition;
    numbers rise by one, and are never used again. Applications construct messages in tests; a constructed one is
    acked by its topic and offset, and cannot be replied to.
    """

    __slots__ = ("_index", "_source", "offset", "payload")

    def __init__(
        self,
        payload: bytes | None,
        *,
        key: bytes | str | None = None,
        attributes: dict[str, str] | None = None,
        offset: int = 0,
        topic: str = "",
        publish_time: int = 0,
        event_time: int | None = None,
        producer_name: str = "",
        sequence: int = 0,
        redelivery_count: int = 0,
        schema: tuple[int, int] | None = None,
        partition: int | None = None,
    ) -> None:
        key = key.encode() if isinstance(key, str) else key
        values = (key, attributes or {}, event_time, sequence, redelivery_count)
        self.payload = payload
        self.offset = offset
        self._source: Source = _Fields(
            topic, producer_name, publish_time, schema, values, partition
        )
        self._index = 0


if TYPE_CHECKING:

    class Received(Message):
        """A message out of a received frame."""

        def __init__(
            self, source: Source, index: int, payload: bytes | None, offset: int
        ) -> None: ...

else:

    class Received(_Views, msgspec.Struct, gc=False, eq=False, weakref=False):
        """A message out of a received frame: four references, made by C code, and no work for the
        garbage collector (a frame never refers to its messages). Three times cheaper than a class
        with an `__init__` of its own, which is why it does not inherit from Message."""

        _source: Any
        _index: int
        payload: Any
        offset: int

    Message.register(Received)
