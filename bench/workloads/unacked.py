"""The workload `unacked`: many messages that nobody has acked, and then acks of every second one, at random.

    one topic, `messages` in it        `consumers` subscriptions, each holds all of them
    then number 1, 3, 5, ... of each   acked one by one, in a random order: half of all are ranges of one message

What counts is the memory of the worker beyond that of an idle one: after all is held, after the acks, and at
its peak (VmHWM). That each subscription holds what it must is asked of the broker; every byte is compared.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import numpy as np

from danube_fast.bench.load import host
from danube_fast.bench.load.member import Link
from danube_fast.bench.load.payloads import LIST_MESSAGES, Payloads
from danube_fast.bench.load.processes import HEAR_SECONDS, Broker, hear_all
from danube_fast.bench.load.rig import Rig, blank
from danube_fast.bench.load.streams import FLUSH_SECONDS, open_client, open_payloads
from danube_fast.bench.plan import Figures, Plan
from danube_fast.client.values.arguments import FailurePolicyFields
from danube_fast.client.values.message import MessageId

__all__ = ["hold_all", "run_unacked"]

_HERE = "danube_fast.bench.workloads.unacked"
HOLDERS = 2
"""Processes that the consumers are divided among."""
ACKS_IN_TURN = 500
"""Of one consumer, before the next one's: subscriptions fall to pieces side by side."""
SILENCE_SECONDS = 30.0
COUNT_SECONDS = 20.0
SLOWEST_PER_S = 10_000
NO_TIMEOUT: FailurePolicyFields = {"ack_timeout_ms": 0}
"""What is held stays held."""
SEED = 11
MEASURES = {"rss": "VmRSS", "anon": "RssAnon", "peak": "VmHWM"}


# ------------------------------------------------------------------ roles


def _receive(consumer: Any, payloads: Payloads) -> int:
    """All messages, in order, held; how many were not right."""
    size, at, wrong = payloads.message_bytes, 0, 0
    whole = memoryview(payloads._map)
    while at < payloads.count:
        batch = consumer.receive_batch(LIST_MESSAGES, timeout=SILENCE_SECONDS)
        count = len(batch)
        if not count:
            return wrong + payloads.count - at
        got = b"".join(payload or b"" for payload in batch.payloads())
        placed = batch[0].offset == at and batch[count - 1].offset == at + count - 1
        if not placed or got != whole[at * size : (at + count) * size]:
            wrong += count
        at += count
    return wrong


def hold_all(link: Link, options: dict[str, Any]) -> None:
    """Consumers of `subscriptions`: each takes all there is; after an order acks every second one."""
    payloads, (topic,) = open_payloads(options), options["topics"]
    generator = np.random.Generator(np.random.SFC64(SEED))
    with open_client(options) as client, ExitStack() as stack:
        consumers = [
            stack.enter_context(
                client.consumer(
                    topic, subscription=name, initial_position="earliest", failure_policy=NO_TIMEOUT
                )
            )
            for name in options["subscriptions"]
        ]
        link.ready()
        wrong = sum(_receive(consumer, payloads) for consumer in consumers)
        link.say(wrong)
        link.hear()
        orders = [generator.permutation(np.arange(1, payloads.count, 2)) for _ in consumers]
        for start in range(0, payloads.count // 2, ACKS_IN_TURN):
            for consumer, order in zip(consumers, orders, strict=True):
                for offset in order[start : start + ACKS_IN_TURN].tolist():
                    consumer.ack(MessageId(topic, offset))
        for consumer in consumers:
            consumer.flush_acks(timeout=FLUSH_SECONDS)
        link.say("acked")
        link.hear()


# ------------------------------------------------------------------ the run


def _memory(broker: Broker) -> dict[str, float]:
    (worker,) = broker.worker_pids
    return {name: host.memory_bytes(worker, line) / 1e6 for name, line in MEASURES.items()}


def _faults(broker: Broker, topic: str, subscriptions: list[str], count: int) -> int:
    """How far the broker is from `count` unacked messages of each subscription; asks until it is right
    or the time is up, as a moment's counts may be older than the last ack."""
    admin = broker.client.admin
    deadline = time.monotonic() + COUNT_SECONDS
    while True:
        told = {row["subscription"]: row for row in admin.list_subscriptions(topic)}
        off = sum(
            abs(told[name]["unacked"] - count) + abs(told[name]["lag_messages"] - count)
            if name in told
            else count
            for name in subscriptions
        )
        if not off or time.monotonic() > deadline:
            return off


def run_unacked(rig: Rig, plan: Plan) -> Figures:
    """Memory of a worker with `messages` unacked on each of `consumers` subscriptions, and with holes."""
    figures, topics = blank(plan), rig.topics(1)
    names = [f"bench-{number}" for number in range(plan.consumers)]
    fd = rig.payloads(plan.messages, plan.message_bytes)
    seconds = HEAR_SECONDS + plan.messages * plan.consumers / SLOWEST_PER_S
    with rig.own_broker("unacked", 1) as broker, rig.crew() as crew:
        common: dict[str, Any] = {
            "url": broker.url, "transport": plan.transport, "spin_us": plan.spin_us,
            "topic_options": plan.topic_options, "message_bytes": plan.message_bytes,
            "messages": plan.messages, "topics": topics, "fd": fd,
            "rate": 0.0, "index": 0, "step": 1,
        }  # fmt: skip
        options: dict[str, Any] = plan.topic_options
        broker.client.producer(topics[0], **options).close()
        broker.rest()
        idle = _memory(broker)
        crew.start("producer", "danube_fast.bench.load.streams:produce_lists", common, [fd])
        (producer,) = crew.members
        producer.hear()
        producer.tell("go")
        producer.hear(seconds)
        holders = [
            crew.start(
                f"holder-{number}", f"{_HERE}:hold_all",
                common | {"subscriptions": names[number::HOLDERS]}, [fd],
            )
            for number in range(min(HOLDERS, len(names)))
        ]  # fmt: skip
        hear_all(holders)
        began = time.monotonic()
        for member in holders:
            member.tell("go")
        figures.corrupted = sum(hear_all(holders, seconds))
        figures.messages_per_s = plan.messages * plan.consumers / (time.monotonic() - began)
        figures.lost = _faults(broker, topics[0], names, plan.messages)
        held = _memory(broker)
        began = time.monotonic()
        for member in holders:
            member.tell("ack")
        hear_all(holders, seconds)
        acked = plan.messages // 2
        figures.extra["acks_per_s"] = acked * plan.consumers / (time.monotonic() - began)
        figures.lost += _faults(broker, topics[0], names, plan.messages - acked)
        holed = _memory(broker)
        figures.broker_cpu_s = host.cpu_seconds(broker.pids)
        figures.broker_rss_mb = broker.resident_mb()
        for member in crew.members:
            member.tell("bye")
    for name in MEASURES:
        figures.extra[f"idle_{name}_mb"] = idle[name]
        figures.extra[f"held_{name}_mb"] = held[name] - idle[name]
        figures.extra[f"holed_{name}_mb"] = holed[name] - idle[name]
    figures.extra["peak_mb"] = holed["peak"] - idle["rss"]
    figures.extra["unacked_messages"] = float(plan.messages * plan.consumers)
    figures.duplicated = 0
    return figures
