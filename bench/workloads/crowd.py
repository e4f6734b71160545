"""The workload `crowd`: thousands of topics with a subscription each; how soon the broker is back.

    fill    a message to each topic, a subscription on each that holds it unacked
    stop    in order, or SIGKILL of all processes
    start   ready line, then the message of a random topic: `..._seconds` is all of it

Afterwards one consumer takes every topic's message, and each is compared.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import danube_fast
from danube_fast.bench.load import host
from danube_fast.bench.load.member import Link
from danube_fast.bench.load.payloads import LIST_MESSAGES, Payloads
from danube_fast.bench.load.processes import HEAR_SECONDS, Broker
from danube_fast.bench.load.rig import Rig, blank
from danube_fast.bench.load.streams import open_client, open_payloads
from danube_fast.bench.plan import Figures, Plan
from danube_fast.errors import DataLoss, DeadlineExceeded

__all__ = ["fill", "run_crowd"]

_HERE = "danube_fast.bench.workloads.crowd"
SEED = 17
SUBSCRIPTION = "bench"
SUBSCRIBE_SECONDS = 120.0
AT_ONCE = 128
READ_SECONDS = 60.0
SLOWEST_TOPICS_PER_S = 50


def fill(link: Link, options: dict[str, Any]) -> None:
    """Message i to topic i, and a subscription on each topic, which acks nothing."""
    payloads, topics = open_payloads(options), options["topics"]
    with open_client(options) as client:
        link.ready()
        began = time.monotonic()
        asyncio.run(_publish_all(payloads, options))
        filled = time.monotonic()
        with client.consumer(
            topics,
            subscription=SUBSCRIPTION,
            initial_position="earliest",
            timeout=SUBSCRIBE_SECONDS,
        ):
            subscribed = time.monotonic()
        link.say({"fill_seconds": filled - began, "subscribe_seconds": subscribed - filled})
        link.hear()


async def _publish_all(payloads: Payloads, options: dict[str, Any]) -> None:
    """Many topics at a time, or making them would take longer than anything else here."""
    room = asyncio.Semaphore(AT_ONCE)
    client = await danube_fast.connect_async(
        options["url"], transport=options["transport"], timeout=READ_SECONDS
    )

    async def publish(number: int, topic: str) -> None:
        async with (
            room,
            await client.producer(
                topic, timeout=SUBSCRIBE_SECONDS, **options["topic_options"]
            ) as producer,
        ):
            await producer.publish(payloads[number])

    async with client:
        await asyncio.gather(*(publish(*entry) for entry in enumerate(options["topics"])))


# ------------------------------------------------------------------ the run


def _first_message(broker: Broker, plan: Plan, topic: str, payload: bytes) -> None:
    """The first message of one topic. Raises DeadlineExceeded, DataLoss."""
    with (
        danube_fast.connect(broker.url, transport=plan.transport, timeout=READ_SECONDS) as client,
        client.consumer(topic, subscription=SUBSCRIPTION, timeout=READ_SECONDS) as consumer,
    ):
        message = consumer.receive(READ_SECONDS)
    if message is None:
        raise DeadlineExceeded(
            f"{topic} had nothing within {READ_SECONDS:g} s after a start; look at the broker's log"
        )
    if message.payload != payload:
        raise DataLoss(f"the first message of {topic} after a start is not the one that was sent")


def _take_all(
    broker: Broker, plan: Plan, topics: list[str], payloads: Payloads, figures: Figures
) -> None:
    """Each topic's message, once, on the subscription that was there before."""
    expected = {topic: payloads[number] for number, topic in enumerate(topics)}
    with (
        danube_fast.connect(broker.url, transport=plan.transport, timeout=READ_SECONDS) as client,
        client.consumer(topics, subscription=SUBSCRIPTION, timeout=SUBSCRIBE_SECONDS) as consumer,
    ):
        seen: set[str] = set()
        figures.duplicated = figures.corrupted = 0
        while len(seen) < len(topics):
            batch = consumer.receive_batch(LIST_MESSAGES, timeout=READ_SECONDS)
            if not len(batch):
                break
            for message in batch:
                figures.duplicated += message.topic in seen
                figures.corrupted += expected.get(message.topic) != message.payload
                seen.add(message.topic)
    figures.lost = len(topics) - len(seen)


def _restarted(
    broker: Broker, plan: Plan, topic: str, payload: bytes, how: str, figures: Figures
) -> None:
    """Start it again; until the ready line, and until a message of that topic."""
    began = time.monotonic()
    broker.start()
    _first_message(broker, plan, topic, payload)
    figures.extra[f"{how}_seconds"] = time.monotonic() - began
    figures.extra[f"{how}_ready_seconds"] = broker.ready_seconds
    figures.extra[f"{how}_cpu_seconds"] = host.cpu_seconds(broker.pids)
    figures.extra[f"{how}_coordinator_cpu_seconds"] = host.cpu_seconds(
        [broker.ready["coordinator_pid"]]
    )


def run_crowd(rig: Rig, plan: Plan) -> Figures:
    """Start-up over `topics` topics and as many subscriptions, after an orderly stop and after SIGKILL."""
    figures, topics = blank(plan), rig.topics(plan.topics)
    figures.messages, figures.rate = plan.topics, None
    fd = rig.payloads(plan.topics, plan.message_bytes)
    payloads = Payloads(fd, plan.message_bytes)
    choice = random.Random(SEED)
    with rig.own_broker("crowd") as broker, rig.crew() as crew:
        options: dict[str, Any] = {
            "url": broker.url, "transport": plan.transport, "spin_us": plan.spin_us,
            "topic_options": plan.topic_options, "message_bytes": plan.message_bytes,
            "topics": topics, "fd": fd,
        }  # fmt: skip
        filler = crew.start("filler", f"{_HERE}:fill", options, [fd])
        filler.hear()
        filler.tell("go")
        figures.extra |= filler.hear(HEAR_SECONDS + plan.topics / SLOWEST_TOPICS_PER_S)
        filler.tell("bye")
        filler.end(0)
        began = time.monotonic()
        broker.stop()
        figures.extra["stop_seconds"] = time.monotonic() - began
        chosen = choice.randrange(len(topics))
        _restarted(broker, plan, topics[chosen], payloads[chosen], "orderly", figures)
        broker.kill()
        chosen = choice.randrange(len(topics))
        _restarted(broker, plan, topics[chosen], payloads[chosen], "killed", figures)
        figures.extra["topics_there"] = float(len(broker.client.admin.list_topics()))
        _take_all(broker, plan, topics, payloads, figures)
        figures.broker_rss_mb = broker.resident_mb()
    return figures
