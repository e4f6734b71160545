"""Producer: what an application publishes with. Thread-safe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from danube_fast.client.link.faces import Closing, Run
from danube_fast.client.produce.outgoing import Attributes, OnDelivery
from danube_fast.client.produce.publisher import Publisher
from danube_fast.client.values.arguments import Moment
from danube_fast.client.values.limits import CLOSE_TIMEOUT_SECONDS
from danube_fast.client.values.message import MessageId

__all__ = ["Producer", "ProducerView"]


class ProducerView:
    """What both kinds of producer show of their publisher."""

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

        Blocks while the window is full, at most for the producer's timeout (ResourceExhausted).
        Raises what went wrong with earlier messages. `event_time` and `deliver_at` are nanoseconds
        since the epoch or datetimes, `deliver_after` is in seconds. `on_delivery(message_id, error)`
        is called once, in the order of the acks, before `flush` returns, from whichever thread of
        this client reads the ack.
        """
        if (
            key is None
            and attributes is None
            and on_delivery is None
            and event_time is None
            and deliver_at is None
            and deliver_after is None
            and self._publisher.send_plain(payload)
        ):
            return
        publisher = self._publisher
        fields = publisher.checked(payload, key, attributes, event_time, deliver_at, deliver_after)
        if publisher.try_send(fields, on_delivery) is not None:
            self._run(publisher.send_steps(fields, on_delivery))

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

        Blocks while the window is full. If it raises ResourceExhausted, the text says how many
        messages were taken. The list may be changed as soon as the call has returned.
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
        """Publish one message at once and wait for its ack; its id. Never lingers."""
        return self._run(
            self._publisher.publish_steps(
                payload, key, attributes, event_time, deliver_at, deliver_after
            )
        )

    def flush(self, timeout: float | None = None) -> MessageId | None:
        """Wait until everything sent is acked; id of the last message acked, None if there is none.

        Raises the error of messages that were not accepted, naming the first and the last, and
        DeadlineExceeded when `timeout` (seconds; default: the producer's own) is over.
        """
        return self._run(self._publisher.flush_steps(timeout))

    def close(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """Flush and close, within `timeout` seconds. Raises what was not accepted or acked."""
        return self._end(self._publisher.close_steps(timeout))
