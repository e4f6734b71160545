"""A producer and a consumer that stay, and take turns on order: what is compared differs by its broker alone, or by what
goes on beside.

    order (LISTS, count, rate)       send_many, receive_batch; rate 0: as fast as it goes
          (ONE_BY_ONE, count, rate)  publish() and receive() of single messages at that rate

In each turn the consumer compares the first `count` prepared messages, every byte, once, in order.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np

from danube_fast.bench.load.member import Link
from danube_fast.bench.load.pacer import Pacer
from danube_fast.bench.load.payloads import LIST_MESSAGES, NUMBER_BYTES, Payloads
from danube_fast.bench.load.processes import HEAR_SECONDS, Broker, Crew, hear_all
from danube_fast.bench.load.rig import Rig, blank
from danube_fast.bench.load.streams import FLUSH_SECONDS, open_client, open_consumer, open_payloads
from danube_fast.bench.load.verify import Verifier
from danube_fast.bench.plan import LISTS, ONE_BY_ONE, Figures, Plan
from danube_fast.bench.workloads.latency import set_latencies
from danube_fast.bench.workloads.rates import set_percentiles
from danube_fast.client.consumer import Consumer
from danube_fast.client.producer import Producer

__all__ = ["END", "FAULTS", "Pair", "add_faults", "publish_in_turns", "receive_in_turns"]

_HERE = "danube_fast.bench.workloads.security.turns"
FAULTS = ("lost", "duplicated", "corrupted")
SILENCE_SECONDS = 20.0
TICKS_PER_S = 1000
END = "end"


# ------------------------------------------------------------------ roles


def publish_in_turns(link: Link, options: dict[str, Any]) -> None:
    """Publish what each order says; report when it began, and of single messages when each was due, sent and acked."""
    payloads = open_payloads(options)
    with (
        open_client(options) as client,
        client.producer(options["topics"][0], **options["topic_options"]) as producer,
    ):
        some = LIST_MESSAGES
        lists = payloads.lists()
        link.ready()
        while (order := link.hear()) != END:
            kind, count, rate = order
            if kind == LISTS:
                size = max(1, int(rate / TICKS_PER_S)) if rate else LIST_MESSAGES
                if size != some:
                    some, lists = size, payloads.lists(0, 1, size)
                link.say(_send_lists(producer, lists[: -(-count // size)], rate / size))
            else:
                link.say(_publish_each(producer, payloads.cut(0, 1, count), rate))


def _send_lists(producer: Producer, lists: list[Any], rate: float) -> dict[str, Any]:
    pacer = Pacer(rate) if rate else None
    began = pacer.start() if pacer else time.monotonic_ns()
    for number, each in enumerate(lists):
        if pacer:
            pacer.wait(number)
        producer.send_many(each)
    producer.flush(timeout=FLUSH_SECONDS)
    return {"began_ns": began}


def _publish_each(producer: Producer, prepared: list[bytes], rate: float) -> dict[str, Any]:
    times = np.zeros((3, len(prepared)), np.int64)
    pacer = Pacer(rate)
    began = pacer.start()
    for number, payload in enumerate(prepared):
        due_ns = pacer.wait(number)
        sent_ns = time.monotonic_ns()
        producer.publish(payload)
        times[:, number] = due_ns, sent_ns, time.monotonic_ns()
    return {"began_ns": began, "times": times}


def receive_in_turns(link: Link, options: dict[str, Any]) -> None:
    """Receive as many as each order says; report when the last came, of single messages when each did, and faults."""
    payloads = open_payloads(options)
    with open_consumer(options) as consumer:
        link.ready()
        while (order := link.hear()) != END:
            kind, count, _ = order
            verifier = Verifier(payloads, 1, count)
            take = _take_lists if kind == LISTS else _take_each
            report = take(consumer, payloads, verifier, count)
            link.say(report | {name: getattr(verifier, name) for name in FAULTS})


def _take_lists(consumer: Consumer, _: Payloads, verifier: Verifier, count: int) -> dict[str, Any]:
    ended = 0
    while verifier.right < count:
        batch = consumer.receive_batch(LIST_MESSAGES, timeout=SILENCE_SECONDS)
        if not len(batch):
            break
        verifier.take(batch.payloads())
        ended = time.monotonic_ns()
        consumer.ack(batch)
    return {"ended_ns": ended}


def _take_each(
    consumer: Consumer, payloads: Payloads, verifier: Verifier, count: int
) -> dict[str, Any]:
    arrived = np.zeros(count, np.int64)
    for _ in range(count):
        message = consumer.receive(SILENCE_SECONDS)
        if message is None:
            break
        now_ns, payload = time.monotonic_ns(), message.payload
        consumer.ack(message)
        verifier.take([payload])
        number = int.from_bytes((payload or b"")[:NUMBER_BYTES], "little")
        if number < count:
            arrived[number] = now_ns
    return {"ended_ns": int(arrived.max()), "arrived": arrived}


# ------------------------------------------------------------------ the run


class Pair:
    """A producer and a consumer of a topic of their own."""

    def __init__(self, crew: Crew, rig: Rig, plan: Plan, broker: Broker) -> None:
        self._plan = plan
        options: dict[str, Any] = {
            "url": broker.url, "access": broker.access, "transport": plan.transport,
            "spin_us": plan.spin_us, "topic_options": plan.topic_options, "topics": rig.topics(1),
            "subscription": "bench", "message_bytes": plan.message_bytes,
            "fd": rig.payloads(plan.messages, plan.message_bytes),
        }  # fmt: skip
        self._members = [
            crew.start(role, f"{_HERE}:{role}_in_turns", options, [options["fd"]])
            for role in ("publish", "receive")
        ]
        hear_all(self._members)
        for member in self._members:
            member.tell("go")

    def lists(self, count: int, rate: float = 0.0) -> Figures:
        """A turn of lists; its rate."""
        return self._run(LISTS, count, rate)[0]

    def one_by_one(self, count: int, rate: float) -> tuple[Figures, Figures]:
        """A turn of single messages; times until receive() has each, and until publish() returns."""
        figures, times, arrived = self._run(ONE_BY_ONE, count, rate)
        paced = msgspec.structs.replace(self._plan, rate=rate)
        set_latencies(figures, paced, times, arrived)
        acked = blank(paced)
        set_percentiles(acked, times[2] - times[1])
        return figures, acked

    def _run(self, kind: str, count: int, rate: float) -> tuple[Figures, Any, Any]:
        for member in self._members:
            member.tell((kind, count, rate))
        sent, received = hear_all(self._members, HEAR_SECONDS)
        figures = blank(msgspec.structs.replace(self._plan, messages=count, rate=rate))
        figures.client = kind
        seconds = max(received["ended_ns"] - sent["began_ns"], 1) / 1e9
        arrived = count - received["lost"]
        figures.messages_per_s = arrived / seconds
        figures.mb_per_s = figures.messages_per_s * self._plan.message_bytes / 1e6
        add_faults(figures, received)
        return figures, sent.get("times"), received.get("arrived")

    def end(self) -> None:
        """No more turns."""
        for member in self._members:
            member.tell(END)


def add_faults(figures: Figures, found: dict[str, int] | Figures) -> None:
    """Count what went wrong in one part of a run."""
    for name in FAULTS:
        more = getattr(found, name) if isinstance(found, Figures) else found[name]
        setattr(figures, name, (getattr(figures, name) or 0) + (more or 0))
