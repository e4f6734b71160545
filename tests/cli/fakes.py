"""A broker at the seam between commands and the client: keeps messages, records what was asked."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from danube_fast.client.values.message import Message, MessageId
from danube_fast.errors import NotFound

PUBLISH_TIME_NS = 1_385_000_000_123_456_789


class Scope:
    closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.closed = True


class FakeBatch(list[Message]):
    def payloads(self) -> list[bytes | None]:
        return [message.payload for message in self]


class FakeBroker:
    """What `connect` gives its clients access to."""

    def __init__(self) -> None:
        self.messages: dict[str, list[Message]] = {}
        self.acked: list[int] = []
        self.flushed_acks = 0
        self.answers: dict[str, Any] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.producer_options: dict[str, Any] = {}
        self.consumer_options: dict[str, Any] = {}
        self.calls: list[tuple[str, int]] = []
        self.urls: list[str] = []
        self.transports: list[str] = []
        self.interrupt: BaseException | None = None

    def connect(self, url: str, transport: str = "auto") -> FakeClient:
        self.urls.append(url)
        self.transports.append(transport)
        return FakeClient(self)


class FakeClient(Scope):
    def __init__(self, broker: FakeBroker) -> None:
        self._broker = broker
        self.admin = FakeAdmin(broker)

    def producer(self, topic: str, **options: Any) -> FakeProducer:
        self._broker.producer_options = options
        return FakeProducer(self._broker, topic)

    def consumer(self, topic: str, **options: Any) -> FakeConsumer:
        self._broker.consumer_options = options
        return FakeConsumer(self._broker, topic)


class FakeAdmin:
    def __init__(self, broker: FakeBroker) -> None:
        self._broker = broker

    def __getattr__(self, name: str) -> Any:
        def call(**arguments: Any) -> Any:
            self._broker.asked.append((name, arguments))
            answer = self._broker.answers.get(name, {})
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return call


class FakeProducer(Scope):
    def __init__(self, broker: FakeBroker, topic: str) -> None:
        self._broker = broker
        self._topic = topic
        self._kept = broker.messages.setdefault(topic, [])

    def _keep(self, payload: bytes | None, fields: dict[str, Any]) -> MessageId:
        offset = len(self._kept)
        self._kept.append(
            Message(
                payload,
                offset=offset,
                topic=self._topic,
                publish_time=PUBLISH_TIME_NS,
                producer_name="fake",
                sequence=offset,
                **fields,
            )
        )
        return MessageId(self._topic, offset)

    def publish(self, payload: bytes | None, **fields: Any) -> MessageId:
        self._broker.calls.append(("publish", 1))
        return self._keep(payload, fields)

    def send(self, payload: bytes | None, **fields: Any) -> None:
        self._broker.calls.append(("send", 1))
        self._keep(payload, fields)

    def send_many(self, payloads: list[bytes | None], **columns: list[Any]) -> None:
        self._broker.calls.append(("send_many", len(payloads)))
        names = {"keys": "key", "attributes": "attributes", "event_times": "event_time"}
        for index, payload in enumerate(payloads):
            self._keep(payload, {names[name]: column[index] for name, column in columns.items()})

    @property
    def acked_messages(self) -> int:
        return len(self._kept)

    def flush(self, timeout: float) -> MessageId | None:
        return MessageId(self._topic, len(self._kept) - 1) if self._kept else None


class FakeConsumer(Scope):
    def __init__(self, broker: FakeBroker, topic: str) -> None:
        if topic not in broker.messages:
            raise NotFound(f"topic {topic} does not exist; create it")
        self._broker = broker
        self._left = list(broker.messages[topic])

    def receive_batch(self, max_messages: int, timeout: float) -> FakeBatch:
        if self._broker.interrupt is not None and not self._left:
            raise self._broker.interrupt
        batch = FakeBatch(self._left[:max_messages])
        del self._left[:max_messages]
        return batch

    def ack(self, batch: FakeBatch) -> None:
        self._broker.acked.extend(message.offset for message in batch)

    def flush_acks(self, timeout: float = 30.0) -> None:
        self._broker.flushed_acks += 1
