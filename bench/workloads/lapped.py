"""The workload `lapped`: a consumer far behind, with the log going on meanwhile, until it is at the tail.

    producer   backlog, as fast as it goes | one list a millisecond, at a pace ........ | stop
    consumer   attached, does not receive  | from memory or the log, as fast as it goes | at the tail

The backlog is larger than what the broker keeps in memory (tail_bytes_max) and what the consumer's credit
lets come before: so most of it is read from the log (`read_ratio`: bytes read from files, in times of the
payloads). What the credit let come before is not counted: the clock starts behind it. The consumer is
at the tail when it has the whole backlog and the frame in its hands was packed AT_TAIL_NS ago or less.

The paced lists are the prepared messages once more, in turn, until the consumer is at the tail; every
message is compared, and how many there were is told to the consumer at the end.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from danube_fast.bench.load import host
from danube_fast.bench.load.member import Link
from danube_fast.bench.load.pacer import Pacer
from danube_fast.bench.load.payloads import LIST_MESSAGES
from danube_fast.bench.load.processes import HEAR_SECONDS, Broker, Member, hear_all
from danube_fast.bench.load.rig import Rig, blank, charge
from danube_fast.bench.load.streams import (
    AFTER_SECONDS,
    FLUSH_SECONDS,
    PACED_TICKS_PER_S,
    SILENCE_SECONDS,
    open_client,
    open_consumer,
    open_payloads,
)
from danube_fast.bench.load.verify import Verifier
from danube_fast.bench.plan import Figures, Plan
from danube_fast.client.values.limits import PERMITS_BYTES_DEFAULT, PERMITS_MESSAGES_DEFAULT
from danube_fast.config import Settings
from danube_fast.errors import DeadlineExceeded

__all__ = ["backlog_messages", "credit_messages", "fall_behind", "publish_on", "run_lapped"]
__all__ += ["run_on"]

_HERE = "danube_fast.bench.workloads.lapped"
AT_TAIL_NS = 100_000_000
CATCH_UP_SECONDS_MAX = 240.0
POLL_SECONDS = 0.1
WANTED_UNKNOWN = 1 << 40
"""Messages that may come while nobody has said yet how many were sent."""


# ------------------------------------------------------------------ roles


def _slices(prepared: list[bytes], some: int) -> Iterator[list[bytes]]:
    """All of them in lists of `some`, in order, without end."""
    while True:
        for start in range(0, len(prepared), some):
            yield prepared[start : start + some]


def publish_on(link: Link, options: dict[str, Any]) -> None:
    """The backlog at once; after the next order lists at a pace, until the order after it."""
    prepared = open_payloads(options).cut()
    some = max(1, int(options["rate"] / PACED_TICKS_PER_S))
    with (
        open_client(options) as client,
        client.producer(options["topics"][0], **options["topic_options"]) as producer,
    ):
        link.ready()
        cpu = time.process_time()
        sent = 0
        for one in itertools.islice(
            _slices(prepared, LIST_MESSAGES), -(-len(prepared) // LIST_MESSAGES)
        ):
            producer.send_many(one)
            sent += len(one)
        producer.flush(timeout=FLUSH_SECONDS)
        link.say("behind")
        link.hear()
        pacer = Pacer(options["rate"] / some)
        pacer.start()
        for number, one in enumerate(_slices(prepared, some)):
            if link.has_order():
                break
            pacer.wait(number)
            producer.send_many(one)
            sent += len(one)
        producer.flush(timeout=FLUSH_SECONDS)
        link.say({"sent": sent, "cpu": time.process_time() - cpu})
        link.hear()
        link.hear()


class _Follower:
    """What the consumer has received, and when."""

    def __init__(self, consumer: Any, options: dict[str, Any]) -> None:
        self.verifier = Verifier(open_payloads(options), 1, WANTED_UNKNOWN)
        self._consumer = consumer

    def take(self, seconds: float) -> int | None:
        """Receive, verify and ack one batch: the age of its last frame, ns; None: nothing came."""
        batch = self._consumer.receive_batch(LIST_MESSAGES, timeout=seconds)
        if not len(batch):
            return None
        age_ns = time.time_ns() - int(batch[len(batch) - 1].publish_time)
        self.verifier.take(batch.payloads())
        self._consumer.ack(batch)
        return age_ns

    def mark(self) -> tuple[int, int]:
        """(messages so far, CLOCK_MONOTONIC ns)"""
        return self.verifier.received, time.monotonic_ns()


def _catch_up(
    follower: _Follower, options: dict[str, Any]
) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """Marks where the credit of before was used up, and at the tail; None: not reached."""
    start = None
    deadline = time.monotonic() + CATCH_UP_SECONDS_MAX
    while time.monotonic() < deadline:
        age_ns = follower.take(SILENCE_SECONDS[True])
        if age_ns is None:
            break
        if start is None:
            if follower.verifier.received >= options["credit_messages"]:
                start = follower.mark()
        elif age_ns <= AT_TAIL_NS and follower.verifier.received >= options["backlog"]:
            return start, follower.mark()
    return start, None


def fall_behind(link: Link, options: dict[str, Any]) -> None:
    """Attached without receiving; after the go to the tail, and then to the end that it is told."""
    with open_consumer(options) as consumer:
        follower = _Follower(consumer, options)
        verifier = follower.verifier
        link.ready()
        cpu = time.process_time()
        start, tail = _catch_up(follower, options)
        cpu = time.process_time() - cpu
        link.say({"start": start, "tail": tail, "cpu": cpu})
        while not link.has_order():
            follower.take(POLL_SECONDS)
        verifier.expect(link.hear())
        while verifier.received < verifier.wanted:
            if follower.take(SILENCE_SECONDS[True]) is None:
                break
        follower.take(AFTER_SECONDS)
        link.say({x: getattr(verifier, x) for x in ("lost", "duplicated", "corrupted")})
        link.hear()


# ------------------------------------------------------------------ the run


def credit_messages(message_bytes: int) -> int:
    """Messages that a consumer's credit lets come, at most, before it receives."""
    return min(PERMITS_MESSAGES_DEFAULT, PERMITS_BYTES_DEFAULT // message_bytes)


def backlog_messages(plan: Plan) -> int:
    """`messages`, but more than the broker's memory and the consumer's credit hold: fewer would be no
    backlog in the log."""
    held_bytes = Settings().tail_bytes_max + PERMITS_BYTES_DEFAULT
    return max(plan.messages, held_bytes // plan.message_bytes + 1)


def _options(rig: Rig, plan: Plan, broker: Broker) -> dict[str, Any]:
    return {
        "url": broker.url,
        "transport": plan.transport,
        "spin_us": plan.spin_us,
        "topic_options": plan.topic_options,
        "topics": rig.topics(1),
        "subscription": "bench",
        "message_bytes": plan.message_bytes,
        "rate": plan.rate,
        "backlog": plan.messages,
        "credit_messages": credit_messages(plan.message_bytes),
        "fd": rig.payloads(plan.messages, plan.message_bytes),
    }


def run_lapped(rig: Rig, plan: Plan) -> Figures:
    """The rate at which a lapped consumer catches up. Raises DeadlineExceeded."""
    return run_on(rig, plan, rig.broker(plan))


def run_on(
    rig: Rig,
    plan: Plan,
    broker: Broker,
    before: Callable[[str], None] = lambda topic: None,
    behind: Callable[[str], None] = lambda topic: None,
) -> Figures:
    """`run_lapped` on that broker; `before` and `behind` get the name of the topic before it is made, and once its
    backlog is there. Raises DeadlineExceeded."""
    plan = msgspec.structs.replace(plan, messages=backlog_messages(plan))
    options = _options(rig, plan, broker)
    before(options["topics"][0])
    figures = blank(plan)
    with rig.crew() as crew:
        producer = crew.start("producer", f"{_HERE}:publish_on", options, [options["fd"]])
        consumer = crew.start("consumer", f"{_HERE}:fall_behind", options, [options["fd"]])
        hear_all(crew.members)
        usage = broker.usage()
        producer.tell("go")
        producer.hear()
        behind(options["topics"][0])
        read_bytes = _read_bytes(broker)
        consumer.tell("go")
        producer.tell("on")
        caught = consumer.hear(HEAR_SECONDS)
        read_bytes = _read_bytes(broker) - read_bytes
        sent = _finish(figures, producer, consumer)
        charge(figures, broker, usage)
        for member in crew.members:
            member.tell("bye")
    figures.client_cpu_s = sent["cpu"] + caught["cpu"]
    if caught["tail"] is None:
        if figures.is_faultless:
            raise DeadlineExceeded(
                f"the consumer was not at the tail after {CATCH_UP_SECONDS_MAX:g} s beside "
                f"{plan.rate:,.0f} new messages/s; take a lower --rate or fewer --messages"
            )
        return figures
    _set_rate(figures, caught["start"], caught["tail"])
    if broker.worker_pids:
        figures.extra["read_ratio"] = read_bytes / (caught["tail"][0] * plan.message_bytes)
    return figures


def _read_bytes(broker: Broker) -> int:
    """Bytes that the workers have read from files."""
    return sum(host.read_bytes(pid) for pid in broker.worker_pids)


def _finish(figures: Figures, producer: Member, consumer: Member) -> dict[str, Any]:
    """Stop the producer, let the consumer have the rest; what the producer reports."""
    producer.tell("stop")
    sent: dict[str, Any] = producer.hear()
    figures.messages = sent["sent"]
    consumer.tell(sent["sent"])
    for name, count in consumer.hear().items():
        setattr(figures, name, count)
    return sent


def _set_rate(figures: Figures, start: tuple[int, int], tail: tuple[int, int]) -> None:
    seconds = max(tail[1] - start[1], 1) / 1e9
    figures.messages_per_s = (tail[0] - start[0]) / seconds
    figures.mb_per_s = figures.messages_per_s * (figures.message_bytes or 0) / 1e6
    figures.extra["at_tail_seconds"] = seconds
