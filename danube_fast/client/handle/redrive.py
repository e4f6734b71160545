"""Dead letters back into the topic that they come from."""

from __future__ import annotations

from danube_fast.checks import check_whole
from danube_fast.client.consume.batch import Batch
from danube_fast.client.consume.consumers import Consumers
from danube_fast.client.consume.inbox import Inbox
from danube_fast.client.link.operations import admin_steps
from danube_fast.client.link.steps import Steps
from danube_fast.client.produce.producers import Producers
from danube_fast.client.produce.publisher import Publisher
from danube_fast.client.values.message import Message
from danube_fast.client.values.options import ConsumerOptions
from danube_fast.errors import DeadlineExceeded, FailedPrecondition

__all__ = ["redrive_steps"]

_OURS = (
    "x-original-topic", "x-original-partition", "x-original-subscription",
    "x-original-topic-offset", "x-delivery-attempt", "x-failure-reason", "x-poison-policy",
)  # fmt: skip
QUIET_SECONDS = 0.5
"""After so long without a letter, see whether that was all."""
QUIETS_MAX = 60
LETTERS_AT_ONCE = 1000


def redrive_steps(
    producers: Producers,
    consumers: Consumers,
    topic: str,
    subscription: str,
    dead_letter_topic: str | None,
    max_messages: int | None,
) -> Steps[int]:
    """Publish the dead letters of a subscription to its topic again; how many there were."""
    if max_messages is not None:
        check_whole(max_messages, "max_messages", 1)
    if dead_letter_topic is None:
        arguments = {"topic": topic, "subscription": subscription}
        found = yield from admin_steps(
            consumers.routes.bootstrap, "describe_subscription", arguments
        )
        dead_letter_topic = found["failure_policy"].get("dead_letter_topic")
    if not dead_letter_topic:
        raise FailedPrecondition(
            f"subscription {subscription!r} of {topic} has no dead_letter_topic; name the topic of "
            "its dead letters"
        )
    options = ConsumerOptions(
        f"redrive-{subscription}", "exclusive", "earliest", consumers.client_name
    )
    users: list[Inbox | Publisher] = []
    try:
        letters = yield from consumers.open_steps([dead_letter_topic], options.checked())
        users.append(letters)
        producer = yield from producers.open_steps(topic)
        users.append(producer)
        count = yield from _move_steps(letters, producer, (topic, subscription), max_messages)
        for user in reversed(users):
            yield from user.close_steps()
        return count
    except BaseException:  # cancelled, too, when nothing may be waited for
        for user in users:
            consumers.routes.discard(user)
        raise


def _move_steps(
    letters: Inbox, producer: Publisher, origin: tuple[str, str], max_messages: int | None
) -> Steps[int]:
    """Letter by letter, until all are read; how many there were."""
    count = quiet = 0
    while max_messages is None or count < max_messages:
        wanted = LETTERS_AT_ONCE if max_messages is None else max_messages - count
        batch = yield from letters.receive_batch_steps(min(wanted, LETTERS_AT_ONCE), QUIET_SECONDS)
        if batch:
            quiet = 0
            count += yield from _publish_steps(batch, letters, producer, origin)
            continue
        quiet += 1
        lag = yield from letters.lag_steps()
        if lag == 0:
            break
        if quiet == QUIETS_MAX:
            raise DeadlineExceeded(
                f"{lag} messages of {letters.topics[0]} do not come; look at `danube-fast "
                "subscriptions describe`, then redrive again"
            )
    return count


def _publish_steps(
    batch: Batch, letters: Inbox, producer: Publisher, origin: tuple[str, str]
) -> Steps[int]:
    """Durable first, then acked: a letter may come twice, and is never lost."""
    mine = [letter for letter in batch if _origin(letter) == origin]
    for letter in mine:
        attributes = {k: v for k, v in letter.attributes.items() if k not in _OURS}
        fields = producer.checked(
            letter.payload, letter.key, attributes, letter.event_time, None, None
        )
        yield from producer.send_steps(fields, None)
    yield from producer.flush_steps(None)
    with letters.pump.lock:
        letters._acks.add(batch)
    yield from letters.flush_acks_steps()
    return len(mine)


def _origin(letter: Message) -> tuple[str | None, str | None]:
    attributes = letter.attributes
    return attributes.get("x-original-topic"), attributes.get("x-original-subscription")
