"""Workloads that measure latency at a pace of single messages.

    publish-latency   from publish() to its return: the ack
    latency           from publish() to the consumer's receive() having it
    isolation         the second on a quiet worker, then while another process publishes in a loop

Every latency is known from the actual send (p50_us, p99_us, p999_us) and from when the message was
due (the same with `_scheduled`), which also counts what a late send adds. Times are those of
CLOCK_MONOTONIC, the same in all processes.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import numpy as np

from danube_fast.bench.load.member import Link
from danube_fast.bench.load.pacer import Pacer
from danube_fast.bench.load.payloads import NUMBER_BYTES, Payloads
from danube_fast.bench.load.processes import Broker, Crew, Member, hear_all
from danube_fast.bench.load.rig import Rig, blank, charge
from danube_fast.bench.load.streams import open_client
from danube_fast.bench.load.verify import Verifier
from danube_fast.bench.plan import Figures, Plan
from danube_fast.bench.workloads.rates import set_percentiles
from danube_fast.errors import Internal

__all__ = ["consume_paced", "publish_in_a_loop", "publish_paced"]
__all__ += ["run_isolation", "run_latency", "run_publish_latency", "set_latencies"]

_HERE = "danube_fast.bench.workloads.latency"
WARM_UP_SECONDS = 0.2
SILENCE_SECONDS = 30.0
TOPICS_TRIED_MAX = 64


# ------------------------------------------------------------------ roles


def publish_paced(link: Link, options: dict[str, Any]) -> None:
    """publish() one message at each due time; reports when each was due, sent and acked."""
    prepared = Payloads(options["fd"], options["message_bytes"]).cut()
    times = np.zeros((3, len(prepared)), np.int64)
    with (
        open_client(options) as client,
        client.producer(options["topics"][0], **options["topic_options"]) as producer,
    ):
        pacer = Pacer(options["rate"])
        link.ready()
        cpu = time.process_time()
        pacer.start()
        for number, payload in enumerate(prepared):
            due_ns = pacer.wait(number)
            sent_ns = time.monotonic_ns()
            producer.publish(payload)
            times[:, number] = due_ns, sent_ns, time.monotonic_ns()
        link.say({"times": times, "cpu": time.process_time() - cpu})
        link.hear()


def consume_paced(link: Link, options: dict[str, Any]) -> None:
    """receive() one by one; reports when each number came."""
    payloads = Payloads(options["fd"], options["message_bytes"])
    received: list[bytes | None] = []
    arrived: list[int] = []
    with (
        open_client(options) as client,
        client.consumer(
            options["topics"], subscription="bench", initial_position="earliest"
        ) as consumer,
    ):
        link.ready()
        cpu = time.process_time()
        while len(received) < payloads.count:
            message = consumer.receive(SILENCE_SECONDS)
            if message is None:
                break
            arrived.append(time.monotonic_ns())
            received.append(message.payload)
            consumer.ack(message)
        cpu = time.process_time() - cpu
        verifier = Verifier(payloads, 1)
        verifier.take(received)
        times = np.zeros(payloads.count, np.int64)
        for payload, arrived_ns in zip(received, arrived, strict=True):
            number = int.from_bytes((payload or b"")[:NUMBER_BYTES], "little")
            if number < payloads.count:
                times[number] = arrived_ns
        faults = {name: getattr(verifier, name) for name in ("lost", "duplicated", "corrupted")}
        link.say({"arrived": times, "cpu": cpu, "faults": faults})
        link.hear()


def publish_in_a_loop(link: Link, options: dict[str, Any]) -> None:
    """publish() as fast as the acks come, until the next order; reports how many."""
    payload = bytes(options["message_bytes"])
    with ExitStack() as stack:
        client = stack.enter_context(open_client(options))
        producer = stack.enter_context(client.producer(options["noise_topic"], durability="fsync"))
        link.ready()
        count, began = 0, time.monotonic()
        while not link.has_order():
            producer.publish(payload)
            count += 1
        link.say(count / (time.monotonic() - began))
        link.hear()


# ------------------------------------------------------------------ runs


def _options(rig: Rig, plan: Plan, topic: str) -> dict[str, Any]:
    broker = rig.broker(plan)
    return {
        "url": broker.url,
        "transport": plan.transport,
        "spin_us": plan.spin_us,
        "topic_options": plan.topic_options,
        "topics": [topic],
        "message_bytes": plan.message_bytes,
        "rate": plan.rate,
        "fd": rig.payloads(plan.messages, plan.message_bytes),
    }


def set_latencies(figures: Figures, plan: Plan, times: Any, ended: Any) -> None:
    """Percentiles of what came, without the first moments."""
    due, sent = times[0], times[1]
    there = ended > 0
    there[: min(int(plan.rate * WARM_UP_SECONDS), len(there) // 2)] = False
    if not there.any():
        raise Internal("no message arrived; look at the broker with `danube-fast doctor`")
    set_percentiles(figures, (ended - due)[there])
    for name in ("p50_us", "p99_us", "p999_us"):
        figures.extra[name.replace("_us", "_scheduled_us")] = getattr(figures, name)
    set_percentiles(figures, (ended - sent)[there])
    seconds = (ended.max() - sent[0]) / 1e9
    figures.messages_per_s = float(np.count_nonzero(ended) / seconds)
    figures.mb_per_s = figures.messages_per_s * plan.message_bytes / 1e6


def run_publish_latency(rig: Rig, plan: Plan) -> Figures:
    """How long publish() takes."""
    broker = rig.broker(plan)
    options = _options(rig, plan, rig.topics(1)[0])
    with rig.crew() as crew:
        producer = crew.start("producer", f"{_HERE}:publish_paced", options, [options["fd"]])
        producer.hear()
        before = broker.usage()
        producer.tell("go")
        sent = producer.hear()
        figures = charge(blank(plan), broker, before)
        producer.tell("bye")
    set_latencies(figures, plan, sent["times"], sent["times"][2])
    figures.client_cpu_s = sent["cpu"]
    return figures


def _pair(crew: Crew, options: dict[str, Any]) -> list[Member]:
    """A producer and a consumer, ready."""
    producer = crew.start("producer", f"{_HERE}:publish_paced", options, [options["fd"]])
    consumer = crew.start("consumer", f"{_HERE}:consume_paced", options, [options["fd"]])
    hear_all([producer, consumer])
    return [producer, consumer]


def _run_pair(pair: list[Member], broker: Broker, plan: Plan) -> Figures:
    producer, consumer = pair
    before = broker.usage()
    consumer.tell("go")
    producer.tell("go")
    sent, received = hear_all(pair)
    figures = charge(blank(plan), broker, before)
    for member in pair:
        member.tell("bye")
    set_latencies(figures, plan, sent["times"], received["arrived"])
    for name, count in received["faults"].items():
        setattr(figures, name, count)
    figures.client_cpu_s = sent["cpu"] + received["cpu"]
    return figures


def run_latency(rig: Rig, plan: Plan) -> Figures:
    """From publish() to receive()."""
    options = _options(rig, plan, rig.topics(1)[0])
    with rig.crew() as crew:
        return _run_pair(_pair(crew, options), rig.broker(plan), plan)


def run_isolation(rig: Rig, plan: Plan) -> Figures:
    """What a process that publishes in a loop does to the latency of its neighbour."""
    broker = rig.broker(plan)
    noise_topic, worker = _place(broker, rig.topics(1)[0], {"durability": "fsync"})
    topics = []
    for _ in range(2):
        topics.append(_topic_of_worker(rig, plan, worker))
    with rig.crew() as crew:
        options = _options(rig, plan, topics[0]) | {"noise_topic": noise_topic}
        noise = crew.start("noise", f"{_HERE}:publish_in_a_loop", options)
        noise.hear()
        quiet = _run_pair(_pair(crew, options), broker, plan)
        pair = _pair(crew, options | {"topics": [topics[1]]})
        noise.tell("go")
        figures = _run_pair(pair, broker, plan)
        noise.tell("stop")
        figures.extra["noise_per_s"] = noise.hear()
        noise.tell("bye")
    figures.extra["quiet_p50_us"] = quiet.p50_us or 0.0
    figures.extra["quiet_p99_us"] = quiet.p99_us or 0.0
    figures.extra["p99_ratio"] = (figures.p99_us or 0.0) / (quiet.p99_us or 1.0)
    for name in ("lost", "duplicated", "corrupted"):
        setattr(figures, name, getattr(figures, name) + getattr(quiet, name))
    return figures


def _place(broker: Broker, topic: str, options: dict[str, str]) -> tuple[str, int]:
    """Create a topic: its name and its worker."""
    broker.client.admin.create_topic(topic, **options)  # type: ignore[arg-type]
    return topic, int(broker.client.admin.describe_topic(topic)["placement"][0]["worker"])


def _topic_of_worker(rig: Rig, plan: Plan, wanted: int) -> str:
    """A new topic in a certain worker."""
    for _ in range(TOPICS_TRIED_MAX):
        topic, worker = _place(rig.broker(plan), rig.topics(1)[0], plan.topic_options)
        if worker == wanted:
            return topic
    raise Internal(f"none of {TOPICS_TRIED_MAX} new topics went to worker {wanted}; run it again")
