"""Members of a run with one fault each: the third list that is sent never leaves the producer."""

from __future__ import annotations

import itertools
from typing import Any

from danube_fast.bench import lapped, soak_roles, streams
from danube_fast.bench.lapped import fall_behind
from danube_fast.bench.member import Link
from danube_fast.bench.streams import consume_batches
from danube_fast.client.producer import Producer

__all__ = [
    "LOST_LIST", "churn", "consume_batches", "fall_behind", "produce_lists", "publish_on", "stand",
]  # fmt: skip

LOST_LIST = 2
for module in (lapped, streams):
    module.SILENCE_SECONDS = {True: 3.0, False: 1.0}


def _forget_a_list() -> None:
    send_many, numbers = Producer.send_many, itertools.count()

    def send_some(self: Producer, payloads: Any, **options: Any) -> Any:
        return None if next(numbers) == LOST_LIST else send_many(self, payloads, **options)

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
    """That of the soak; the third life's messages are not sent by send_many."""
    soak_roles.PATIENCE_SECONDS = 3.0
    _forget_a_list()
    soak_roles.churn(link, options)


def stand(link: Link, options: dict[str, Any]) -> None:
    """That of the soak; some messages are altered on their way."""
    make = soak_roles.make

    def altered(life: int, numbers: Any, message_bytes: int) -> list[bytes]:
        made = make(life, numbers, message_bytes)
        return [
            m[:-1] + bytes([m[-1] ^ 1]) if n == 7 else m for n, m in zip(numbers, made, strict=True)
        ]

    soak_roles.PATIENCE_SECONDS = 3.0
    soak_roles.make = altered  # type: ignore[assignment]
    soak_roles.stand(link, options)
