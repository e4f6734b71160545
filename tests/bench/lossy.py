"""Members of a run with one fault each: the third list that is sent never leaves the producer, acks never
leave the consumer, payloads are not those that were prepared."""

from __future__ import annotations

import itertools
from typing import Any

from danube_fast.bench.load import streams
from danube_fast.bench.load.member import Link
from danube_fast.bench.load.payloads import NUMBER_BYTES
from danube_fast.bench.load.streams import consume_batches
from danube_fast.bench.workloads import (
    crowd,
    delayed,
    lapped,
    promotion,
    requests,
    share,
    soak_roles,
    unacked,
)
from danube_fast.bench.workloads.delayed import take_delayed
from danube_fast.bench.workloads.lapped import fall_behind
from danube_fast.bench.workloads.promotion import follow
from danube_fast.bench.workloads.requests import request_each
from danube_fast.bench.workloads.security import turns
from danube_fast.bench.workloads.share import produce_keyed
from danube_fast.client.consumer import Consumer
from danube_fast.client.producer import Producer

__all__ = [
    "LOST_LIST", "churn", "consume_batches", "consume_share", "fall_behind", "fill", "follow", "hold_all",
    "produce_keyed", "produce_lists", "publish_delayed", "publish_in_turns", "publish_on", "publish_paced",
    "receive_in_turns", "reply_each", "request_each", "stand", "take_delayed",
]  # fmt: skip

LOST_LIST = 2
LATE_REPLIES = (19, 39)
delayed.SILENCE_SECONDS = 10.0
for module in (lapped, streams):
    module.SILENCE_SECONDS = {True: 10.0, False: 1.0}


def _forget_a_list(which: int = LOST_LIST) -> None:
    send_many, numbers = Producer.send_many, itertools.count()

    def send_some(self: Producer, payloads: Any, **options: Any) -> Any:
        return None if next(numbers) == which else send_many(self, payloads, **options)

    Producer.send_many = send_some  # type: ignore[method-assign]


def produce_lists(link: Link, options: dict[str, Any]) -> None:
    """That of the bench, less a list."""
    _forget_a_list()
    streams.produce_lists(link, options)


def publish_on(link: Link, options: dict[str, Any]) -> None:
    """The same."""
    _forget_a_list()
    lapped.publish_on(link, options)


def churn(link: Link, options: dict[str, Any]) -> None:
    """That of the soak; most messages of the first life are not sent."""
    soak_roles.PATIENCE_SECONDS = 10.0
    _forget_a_list(0)
    soak_roles.churn(link, options)


def stand(link: Link, options: dict[str, Any]) -> None:
    """That of the soak; some messages are altered on their way."""
    make = soak_roles.make

    def altered(life: int, numbers: Any, message_bytes: int) -> list[bytes]:
        made = make(life, numbers, message_bytes)
        return [
            m[:-1] + bytes([m[-1] ^ 1]) if n == 7 else m for n, m in zip(numbers, made, strict=True)
        ]

    soak_roles.PATIENCE_SECONDS = 10.0
    soak_roles.make = altered  # type: ignore[assignment]
    soak_roles.stand(link, options)


def publish_in_turns(link: Link, options: dict[str, Any]) -> None:
    """That of the workloads about security, less a list."""
    _forget_a_list()
    turns.publish_in_turns(link, options)


def receive_in_turns(link: Link, options: dict[str, Any]) -> None:
    """That of the workloads about security; it does not wait long."""
    turns.SILENCE_SECONDS = 2.0
    turns.receive_in_turns(link, options)


def publish_delayed(link: Link, options: dict[str, Any]) -> None:
    """That of `delayed`, less a list."""
    _forget_a_list()
    delayed.publish_delayed(link, options)


def _forget_acks() -> None:
    Consumer.ack = lambda self, what: None  # type: ignore[method-assign]


def consume_share(link: Link, options: dict[str, Any]) -> None:
    """That of `shared`; it acks nothing."""
    _forget_acks()
    share.consume_share(link, options)


def hold_all(link: Link, options: dict[str, Any]) -> None:
    """That of `unacked`; it acks nothing."""
    _forget_acks()
    unacked.hold_all(link, options)


def publish_paced(link: Link, options: dict[str, Any]) -> None:
    """That of `promotion`, less one message."""
    send, numbers = Producer.send, itertools.count()

    def send_some(self: Producer, payload: Any) -> None:
        if next(numbers) != LOST_LIST:
            send(self, payload)

    Producer.send = send_some  # type: ignore[assignment]
    promotion.publish_paced(link, options)


def fill(link: Link, options: dict[str, Any]) -> None:
    """That of `crowd`; each topic gets the next one's message."""
    crowd.fill(link, options | {"topics": options["topics"][1:] + options["topics"][:1]})


def reply_each(link: Link, options: dict[str, Any]) -> None:
    """That of `requests`; two requests get the reply to the one before them."""
    right, before = requests.reply_to, [b""]

    def late(payload: bytes) -> bytes:
        number = int.from_bytes(payload[:NUMBER_BYTES], "little")
        said, before[0] = before[0] if number in LATE_REPLIES else payload, payload
        return right(said)

    requests.reply_to = late
    requests.reply_each(link, options)
