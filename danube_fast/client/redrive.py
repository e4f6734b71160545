"""Dead letters back into the topic that they come from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from danube_fast.client.message import Message
from danube_fast.errors import DeadlineExceeded, FailedPrecondition

if TYPE_CHECKING:
    from danube_fast.client.client import Client

__all__ = ["redrive"]

_OURS = (
    "x-original-topic", "x-original-partition", "x-original-subscription",
    "x-original-topic-offset", "x-delivery-attempt", "x-failure-reason", "x-poison-policy",
)  # fmt: skip
QUIET_SECONDS = 0.5
"""Nothing has come for so long: see whether that was all."""
QUIETS_MAX = 60


def redrive(
    client: Client,
    topic: str,
    subscription: str,
    *,
    dead_letter_topic: str | None = None,
    max_messages: int | None = None,
) -> int:
    """Publish the dead letters of a subscription to its topic again; how many there were.

    They go to every subscription of the topic, without the attributes that made them dead letters.
    The place in the dead-letter topic is kept under the subscription `redrive-SUBSCRIPTION`, so each
    letter is redriven once. Raises NotFound, FailedPrecondition if no topic of dead letters is known,
    and DeadlineExceeded if letters do not come.
    """
    if dead_letter_topic is None:
        policy = client.admin.describe_subscription(topic, subscription)["failure_policy"]
        dead_letter_topic = policy.get("dead_letter_topic")
    if not dead_letter_topic:
        raise FailedPrecondition(
            f"subscription {subscription!r} of {topic} has no dead_letter_topic; name the topic of "
            "its dead letters"
        )
    count = quiet = 0
    with (
        client.consumer(
            dead_letter_topic, subscription=f"redrive-{subscription}", initial_position="earliest"
        ) as letters,
        client.producer(topic) as producer,
    ):
        while max_messages is None or count < max_messages:
            wanted = 1000 if max_messages is None else min(1000, max_messages - count)
            batch = letters.receive_batch(max_messages=wanted, timeout=QUIET_SECONDS)
            if not batch:
                quiet += 1
                if letters.lag() == 0:
                    break
                if quiet == QUIETS_MAX:
                    raise DeadlineExceeded(
                        f"{letters.lag()} messages of {dead_letter_topic} do not come; look at "
                        "`danube-fast subscriptions describe`, then redrive again"
                    )
                continue
            quiet = 0
            mine = [letter for letter in batch if _is_of(letter, topic, subscription)]
            for letter in mine:
                producer.send(
                    letter.payload,
                    key=letter.key,
                    attributes={k: v for k, v in letter.attributes.items() if k not in _OURS},
                    event_time=letter.event_time,
                )
            producer.flush()  # durable, then acked: a letter may come twice, and is never lost
            letters.ack(batch)
            letters.flush_acks()
            count += len(mine)
    return count


def _is_of(letter: Message, topic: str, subscription: str) -> bool:
    attributes = letter.attributes
    return (
        attributes.get("x-original-topic") == topic
        and attributes.get("x-original-subscription") == subscription
    )
