"""Several consumers on one subscription, beside one exclusive consumer of the same messages.

    produce_keyed   send_many with one of 10,000 keys a message
    consume_share   receive_batch, payloads, ack(batch), until nothing comes any more
                    or each message as an object, and acked with its batch or one by one

One of a failover subscription is the active one; what individual acks cost is measured on an exclusive one.

Each message must reach exactly one consumer: every consumer compares the bytes of what it got and
marks its number; the marks of all together are counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from danube_fast.bench.load.member import Link
from danube_fast.bench.load.payloads import LIST_MESSAGES, NUMBER_BYTES
from danube_fast.bench.load.processes import HEAR_SECONDS, Broker, hear_all
from danube_fast.bench.load.rig import Rig, blank, charge
from danube_fast.bench.load.streams import FLUSH_SECONDS, open_client, open_consumer, open_payloads
from danube_fast.bench.plan import Figures, Plan
from danube_fast.client.values.limits import WINDOW_BYTES_DEFAULT
from danube_fast.errors import DataLoss

__all__ = ["ALONE", "KEYS", "consume_share", "produce_keyed", "run_acks"]
__all__ += ["run_failover", "run_share"]

_HERE = "danube_fast.bench.workloads.share"
KEYS = 10_000
SPREAD = 7919
"""Keys do not come in their own order."""
FIRST_SECONDS, QUIET_SECONDS = 60.0, 2.0
SLOWEST_PER_S = 50_000
WITH_BATCH, OBJECTS, ALONE = "with the batch", "objects", "alone"
"""How messages are acked: those of a batch at once, the same after a look at each, or each by itself."""


def _bytes_of(payload: bytes | None) -> bytes:
    return payload or b""


def _take(consumer: Any, batch: Any, acking: str) -> tuple[bytes, int]:
    """The payloads of a batch, joined, and when it was in hand; its messages are acked."""
    if acking == WITH_BATCH:
        got = b"".join(map(_bytes_of, batch.payloads()))
        now_ns = time.monotonic_ns()
        consumer.ack(batch)
        return got, now_ns
    payloads: list[bytes | None] = []
    keep, ack = payloads.append, consumer.ack
    if acking == ALONE:
        for message in batch:
            keep(message.payload)
            ack(message)
    else:
        for message in batch:
            keep(message.payload)
        ack(batch)
    return b"".join(map(_bytes_of, payloads)), time.monotonic_ns()


def produce_keyed(link: Link, options: dict[str, Any]) -> None:
    """Lists with a key for each message, as fast as the window lets go."""
    lists = open_payloads(options).lists()
    names = [b"key-%05d" % number for number in range(KEYS)]
    keys = [
        [names[(start + i) * SPREAD % KEYS] for i in range(len(one))]
        for start, one in zip(range(0, options["messages"], LIST_MESSAGES), lists, strict=True)
    ]
    with (
        open_client(options) as client,
        client.producer(options["topics"][0], **options["topic_options"]) as producer,
    ):
        link.ready()
        cpu, began = time.process_time(), time.monotonic_ns()
        for one, some in zip(lists, keys, strict=True):
            producer.send_many(one, keys=some)
        producer.flush(timeout=FLUSH_SECONDS)
        link.say({"began_ns": began, "cpu": time.process_time() - cpu})
        link.hear()


def consume_share(link: Link, options: dict[str, Any]) -> None:
    """Whatever comes, until nothing does."""
    payloads, size = open_payloads(options), options["message_bytes"]
    whole = np.frombuffer(payloads._map, np.uint8).reshape(-1, size)
    seen = np.zeros(payloads.count, np.uint8)
    corrupted = duplicated = 0
    last_ns = 0
    with open_consumer(options) as consumer:
        link.ready()
        cpu, quiet = time.process_time(), FIRST_SECONDS
        while len(batch := consumer.receive_batch(LIST_MESSAGES, timeout=quiet)):
            got, last_ns = _take(consumer, batch, options["acking"])
            quiet = QUIET_SECONDS
            if len(got) != len(batch) * size:
                corrupted += len(batch)
                continue
            rows = np.frombuffer(got, np.uint8).reshape(-1, size)
            numbers = rows[:, :NUMBER_BYTES].copy().view("<u8").ravel()
            known = numbers < payloads.count
            right = known & (whole[np.where(known, numbers, 0)] == rows).all(axis=1)
            corrupted += int(np.count_nonzero(~right))
            np.add.at(seen, numbers[right], 1)
        cpu = time.process_time() - cpu
        duplicated = int(np.count_nonzero(seen > 1))
        consumer.flush_acks(timeout=FLUSH_SECONDS)
        link.say(
            {
                "ended_ns": last_ns, "cpu": cpu, "corrupted": corrupted, "duplicated": duplicated,
                "seen": np.packbits(seen > 0).tobytes(),
            }
        )  # fmt: skip
        link.hear()


def run_share(rig: Rig, plan: Plan) -> Figures:
    """`plan.consumers` on one subscription of the workload's type, and its rate as a part of that of one
    exclusive consumer."""
    return _in_turns(
        lambda: _run(rig, plan, plan.workload.replace("-", "_")),
        {"exclusive": lambda: _run(rig, msgspec.structs.replace(plan, consumers=1), "exclusive")},
    )


def run_failover(rig: Rig, plan: Plan) -> Figures:
    """The rate of the active consumer of a failover subscription, as a part of that of one exclusive one."""
    return _in_turns(
        lambda: _run(rig, plan, "failover"), {"exclusive": lambda: _run(rig, plan, "exclusive")}
    )


def run_acks(rig: Rig, plan: Plan) -> Figures:
    """The rate of one consumer that acks each message by itself, as a part of that of one that acks its
    batches, and of one that looks at each message and acks the batch."""
    return _in_turns(
        lambda: _run(rig, plan, "exclusive", ALONE),
        {
            "batch_acks": lambda: _run(rig, plan, "exclusive"),
            "same_with_batch_acks": lambda: _run(rig, plan, "exclusive", OBJECTS),
        },
    )


def _in_turns(run: Callable[[], Figures], others: dict[str, Callable[[], Figures]]) -> Figures:
    """Figures of `run`, and its rate as a part of those of others. All run there and back, so that what
    the first pays for (new segments, cold memory) is not counted against one of them."""
    runs: dict[str, Callable[[], Figures]] = {**others, "": run}
    found: dict[str, list[Figures]] = {name: [] for name in runs}
    for name in (*runs, *reversed(runs)):
        found[name].append(runs[name]())
    rates = {
        name: statistics.harmonic_mean([each.messages_per_s or 0.0 for each in both])
        for name, both in found.items()
    }
    figures = found[""].pop()
    figures.messages_per_s = rates[""]
    figures.mb_per_s = rates[""] * (figures.message_bytes or 0) / 1e6
    for name in others:
        figures.extra[f"vs_{name}"] = rates[""] / rates[name] if rates[name] else 0.0
        figures.extra[f"{name}_per_s"] = rates[name]
    for both in found.values():
        for other in both:
            _add_faults(figures, other)
    return figures


def _add_faults(figures: Figures, others: Figures) -> None:
    """What went wrong in a run beside counts as well."""
    for name in ("lost", "duplicated", "corrupted"):
        setattr(figures, name, (getattr(figures, name) or 0) + (getattr(others, name) or 0))


def _require_acked(broker: Broker, topic: str) -> None:
    """Nothing is left to ack. Raises DataLoss."""
    (row,) = broker.client.admin.list_subscriptions(topic)
    if row["lag_messages"]:
        raise DataLoss(
            f"{row['lag_messages']} messages of {topic} were acked, and the broker counts them as unacked"
        )


def _run(rig: Rig, plan: Plan, kind: str, acking: str = WITH_BATCH) -> Figures:
    broker = rig.broker(plan)
    common: dict[str, Any] = {
        "url": broker.url, "transport": plan.transport, "spin_us": plan.spin_us,
        "topic_options": plan.topic_options, "message_bytes": plan.message_bytes,
        "messages": plan.messages, "topics": rig.topics(1), "subscription": "bench", "type": kind,
        "acking": acking,
        "fd": rig.payloads(plan.messages, plan.message_bytes),
    }  # fmt: skip
    with rig.crew() as crew:
        producer = crew.start("producer", f"{_HERE}:produce_keyed", common, [common["fd"]])
        consumers = [
            crew.start(f"consumer-{number}", f"{_HERE}:consume_share", common, [common["fd"]])
            for number in range(plan.consumers)
        ]
        hear_all(crew.members)
        before = broker.usage()
        for member in (*consumers, producer):
            member.tell("go")
        reports = hear_all(crew.members, HEAR_SECONDS + plan.messages / SLOWEST_PER_S)
        figures = _figures(plan, reports[0], reports[1:])
        if not figures.lost:
            _require_acked(broker, common["topics"][0])
        charge(figures, broker, before)
        for member in crew.members:
            member.tell("bye")
    return figures


def _figures(plan: Plan, sent: dict[str, Any], received: list[dict[str, Any]]) -> Figures:
    figures = blank(plan)
    marks = np.zeros(plan.messages, np.int64)
    for report in received:
        packed = np.frombuffer(report["seen"], np.uint8)
        marks += np.unpackbits(packed, count=plan.messages)
    figures.lost = int(np.count_nonzero(marks == 0))
    figures.duplicated = int(np.count_nonzero(marks > 1))
    figures.duplicated += sum(report["duplicated"] for report in received)
    figures.corrupted = sum(report["corrupted"] for report in received)
    ended_ns = max(report["ended_ns"] for report in received)
    seconds = max(ended_ns - sent["began_ns"], 1) / 1e9
    figures.messages_per_s = int(marks.sum()) / seconds
    figures.mb_per_s = figures.messages_per_s * plan.message_bytes / 1e6
    figures.client_cpu_s = sum(report["cpu"] for report in (sent, *received))
    figures.window = WINDOW_BYTES_DEFAULT
    return figures
