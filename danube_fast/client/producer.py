"""Producer: what an application publishes with. Thread-safe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from danube_fast.client.faces import Closing, Run
from danube_fast.client.produce.outgoing import Attributes, OnDelivery
from danube_fast.client.produce.publisher import QUICK_BYTES_MAX, UNCHECKED_MASK, Publisher
from danube_fast.client.values.arguments import Moment
from danube_fast.client.values.limits import CLOSE_TIMEOUT_SECONDS
from danube_fast.client.values.message import MessageId

__all__ = ["Producer", "ProducerView"]


class ProducerView:
    """Shared by both kinds of producer."""

    # what every message needs lies in the object itself: among a thousand producers each step is a cache miss
    __slots__ = ("__dict__", "__weakref__", "_end", "_publisher", "_run")

    def __init__(self, publisher: Publisher, run: Any, end: Any) -> None:
        """`run` and `end` drive steps, as those of `Pump` and of `LoopDriver`."""
        self._publisher = publisher
        self._run: Run = run
        self._end: Run = end

    @property
    def topic(self) -> str:
        """The topic."""
        return self._publisher.topic

    @property
    def name(self) -> str:
        """Name of the producer: what it published before under that name is not accepted twice."""
        return self._publisher.name

    @property
    def acked_messages(self) -> int:
        """How many of its messages are acked."""
        return self._publisher.acked_messages

    @property
    def next_sequence(self) -> int:
        """How many messages the topic has had, or will have, of producers with this name; of one partition. Raises
        FailedPrecondition for a topic with several: each counts for itself."""
        return self._publisher.next_sequence

    def __repr__(self) -> str:
        publisher = self._publisher
        return (
            f"<{type(self).__name__} {publisher.name!r} on {publisher.topic}, "
            f"{publisher.unacked_bytes} bytes unacked>"
        )


class Producer(ProducerView, Closing):
    """Publishes to one topic. Made by `client.producer()`."""

    __slots__ = ()

    def __init__(self, publisher: Publisher) -> None:
        super().__init__(publisher, publisher.pump.run, publisher.pump.end)

    def send(
        self,
        payload: bytes | None,
        *,
        key: bytes | str | None = None,
        attributes: Attributes | None = None,
        event_time: Moment | None = None,
        deliver_at: Moment | None = None,
        deliver_after: float | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> None:
        """Queue one message; it goes out in a batch.

        `payload`: None deletes the key; `key`: messages of one key keep their order and share a partition;
        `attributes`: text by name; `event_time` and `deliver_at`: nanoseconds since the epoch, or datetimes;
        `deliver_after`: seconds; `on_delivery(message_id, error)`: called once, in the order of the acks, before
        `flush` returns, from any thread of this client that reads the ack.

            producer.send(b"payload", key="UA", attributes={"a": "1"})

        Blocks while the window is full. Raises ResourceExhausted when that lasts for the producer's timeout,
        InvalidArgument for a message that cannot be sent, and what went wrong with earlier messages. A signal handler
        that interrupts another call of the client may send: the message goes out behind that call, and what goes
        wrong with it then is logged.
        """
        if (
            key is None
            and attributes is None
            and on_delivery is None
            and event_time is None
            and deliver_at is None
            and deliver_after is None
        ):
            publisher = self._publisher
            lane = publisher.quick
            if (
                lane is not None
                and type(payload) is bytes
                and len(plain := lane.plain) & UNCHECKED_MASK
                and len(payload) <= QUICK_BYTES_MAX
            ):
                plain.append(payload)
                if not lane.is_minded:
                    publisher.look_after(lane)
                return None
            if publisher.send_plain(payload):
                return None
        publisher = self._publisher
        fields = publisher.checked(payload, key, attributes, event_time, deliver_at, deliver_after)
        if publisher.try_send(fields, on_delivery) is not None:
            return self._run(publisher.send_steps(fields, on_delivery))
        return None

    def send_many(
        self,
        payloads: Sequence[bytes | None],
        *,
        keys: Sequence[bytes | str | None] | None = None,
        attributes: Sequence[Attributes | None] | None = None,
        event_times: Sequence[Moment | None] | None = None,
        deliver_at: Sequence[Moment | None] | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> None:
        """Queue many messages, packed straight from the list (fastest from a `list[bytes]`).

        `keys`, `attributes`, `event_times` and `deliver_at` have one entry for each payload; `on_delivery` is
        called for each message, as by `send`. The lists may be changed as soon as the call has returned.

            producer.send_many([b"a", b"b"], keys=["UA", "AA"])

        Blocks while the window is full. Raises ResourceExhausted, whose text says how many messages were taken,
        and otherwise what `send` raises.
        """
        return self._run(
            self._publisher.send_many_steps(
                payloads, keys, attributes, event_times, deliver_at, on_delivery
            )
        )

    def publish(
        self,
        payload: bytes | None,
        *,
        key: bytes | str | None = None,
        attributes: Attributes | None = None,
        event_time: Moment | None = None,
        deliver_at: Moment | None = None,
        deliver_after: float | None = None,
    ) -> MessageId:
        """Publish one message at once and wait for its ack; its id. Never lingers.

        The fields are those of `send`. Raises ProducerFenced, TopicDeleted, DeadlineExceeded after the producer's
        timeout (the message may have been stored), FailedPrecondition in a signal handler that interrupts another
        call of the client, and what `send` raises.
        """
        publisher = self._publisher
        fields = payload, key, attributes, event_time, deliver_at, deliver_after
        if (
            key is None
            and attributes is None
            and event_time is None
            and deliver_at is None
            and deliver_after is None
        ):
            message_id = publisher.publish_plain(payload)
        elif publisher.pump.on_progress is None:
            message_id = publisher.publish_columns(publisher.checked(*fields))
        else:
            message_id = None
        if message_id is not None:
            return message_id
        return self._run(publisher.publish_steps(*fields))

    def flush(self, timeout: float | None = None) -> MessageId | None:
        """Wait until everything sent is acked; id of the last message acked, None if there is none.

        `timeout`: seconds; the producer's own by default. Raises the error of messages that were not accepted,
        naming the first and the last, and DeadlineExceeded when the time is up.
        """
        return self._run(self._publisher.flush_steps(timeout))

    def close(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """Flush and close, within `timeout` seconds. Raises what was not accepted or acked; closed all the same."""
        return self._end(self._publisher.close_steps(timeout))
