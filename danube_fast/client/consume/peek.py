"""Looks at messages without a subscription: `peek` from a position on, `tail` at the end.

A reader does the reading; of a partitioned topic each partition gives as many messages as were asked
for, and of all of them those published first (or last) are shown.
"""

from __future__ import annotations

from danube_fast.checks import check_whole
from danube_fast.client.consume.consumers import Consumers
from danube_fast.client.consume.read_range import ReadRange
from danube_fast.client.link.steps import Steps, deadline_after
from danube_fast.client.values.arguments import Start
from danube_fast.client.values.limits import REQUEST_TIMEOUT_SECONDS
from danube_fast.client.values.message import Message
from danube_fast.client.values.options import READER, ConsumerOptions

__all__ = ["peek_steps", "tail_steps"]

PERMITS_BYTES = 1 << 20


def peek_steps(
    consumers: Consumers, topic: str, count: int, position: Start
) -> Steps[list[Message]]:
    """Return the first `count` messages from `position` on, as far as they are there."""
    found = yield from _look_steps(consumers, topic, count, position)
    return found[:count]


def tail_steps(consumers: Consumers, topic: str, count: int) -> Steps[list[Message]]:
    """Return the last `count` messages, oldest first."""
    found = yield from _look_steps(consumers, topic, count, {"last": count})
    return found[-count:]


def _look_steps(
    consumers: Consumers, topic: str, count: int, position: Start
) -> Steps[list[Message]]:
    check_whole(count, "count", 1)
    routes = consumers.routes
    clock = routes.pump.clock
    deadline_ns = deadline_after(clock, REQUEST_TIMEOUT_SECONDS)
    yield from routes.lookup_steps(topic, None, 0, deadline_ns)  # a missing topic fails at once
    options = ConsumerOptions("", READER, position, consumers.client_name, PERMITS_BYTES).checked()
    inbox = yield from consumers.open_steps([topic], options)
    reader = ReadRange(inbox, "latest")
    by_partition: dict[str, list[Message]] = {a.topic: [] for a in inbox.attachments}
    try:
        while clock.monotonic_ns() < deadline_ns:
            batch = yield from reader.batch_steps(count, REQUEST_TIMEOUT_SECONDS)
            for message in batch:
                by_partition[message.topic].append(message)
            if not batch or reader.is_finished:
                break
            if all(len(messages) >= count for messages in by_partition.values()):
                break
    except BaseException:  # cancelled, too, when nothing may be waited for
        routes.discard(inbox)
        raise
    yield from reader.close_steps()
    found = [message for messages in by_partition.values() for message in messages[:count]]
    return sorted(found, key=lambda message: message.publish_time)
