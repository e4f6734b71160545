"""Workloads about a broker's life: how soon it is ready, recovers, how little it takes when idle.

Each starts brokers of its own and sees what only their host can see (/proc), so none works with --url.
"""

from __future__ import annotations

import itertools
import time
from contextlib import ExitStack
from typing import Any

import danube_fast
from danube_fast.bench.load import host
from danube_fast.bench.load.member import Link
from danube_fast.bench.load.payloads import Payloads
from danube_fast.bench.load.processes import Broker, Member
from danube_fast.bench.load.rig import Rig, blank
from danube_fast.bench.plan import Figures, Plan
from danube_fast.errors import DataLoss, DeadlineExceeded

__all__ = ["fill", "hold", "run_idle", "run_readback", "run_ready", "run_recovery"]

_HERE = "danube_fast.bench.workloads.standing"
PREPARED_MESSAGES = 1024
FLUSH_SECONDS = 300.0
CONNECT_SECONDS = 30.0
READ_SECONDS = 60.0
IDLE_WORKERS = 4
IDLE_SETTLE_SECONDS = 5.0
IDLE_SECONDS = 10.0
LOAD_SECONDS = 1.0
"""How long the load runs on before everything is killed."""
FRAME_BYTES = 64 * 1024
FRAME_PAYLOAD_BYTES = 64_000
"""One message of this size fills a frame of 64 KiB: a second one does not fit."""


# ------------------------------------------------------------------ roles


def fill(link: Link, options: dict[str, Any]) -> None:
    """Message i to topic i mod the number of topics; then, if asked, goes on until it is killed."""
    payloads = Payloads(options["fd"], options["message_bytes"])
    prepared = payloads.cut()
    topics: list[str] = options["topics"]
    with ExitStack() as stack:
        client = stack.enter_context(
            danube_fast.connect(
                options["url"], transport=options["transport"], timeout=CONNECT_SECONDS
            )
        )
        producers = [
            stack.enter_context(
                client.producer(topic, batch_bytes_max=FRAME_BYTES, **options["topic_options"])
            )
            for topic in topics
        ]
        link.ready()
        sends = itertools.cycle([producer.send for producer in producers])
        source = itertools.cycle(prepared)
        for send in itertools.islice(sends, options["messages"]):
            send(next(source))
        for producer in producers:
            producer.flush(timeout=FLUSH_SECONDS)
        link.say("filled")
        if link.hear() == "go on":
            for send in sends:
                send(next(source))


def hold(link: Link, options: dict[str, Any]) -> None:
    """Clients that are connected, with a producer each, and do nothing."""
    with ExitStack() as stack:
        for topic in options["topics"]:
            client = stack.enter_context(
                danube_fast.connect(
                    options["url"], transport=options["transport"], timeout=CONNECT_SECONDS
                )
            )
            producer = stack.enter_context(client.producer(topic, **options["topic_options"]))
            producer.publish(b"hello")
        link.ready()
        link.say("done")
        link.hear()


# ------------------------------------------------------------------ runs


def _standing_figures(plan: Plan) -> Figures:
    figures = blank(plan)
    figures.messages = figures.message_bytes = figures.rate = None
    return figures


def run_ready(rig: Rig, plan: Plan) -> Figures:
    """From the start of `serve --workers 2` to its ready line, kernels compiled before."""
    with rig.own_broker("ready"):
        pass  # compiles the kernels if nobody has yet
    figures = _standing_figures(plan)
    figures.durability = figures.transport = None
    with rig.own_broker("ready") as broker:
        figures.extra["ready_seconds"] = broker.ready_seconds
        figures.broker_cpu_s = host.cpu_seconds(broker.pids)
        figures.broker_rss_mb = broker.resident_mb()
    return figures


def _filled(
    rig: Rig, plan: Plan, broker: Broker, topics: list[str], crew: Any, message_bytes: int
) -> tuple[Member, int, Payloads]:
    """A member that has written `log_bytes` over these topics; how many messages, and which."""
    messages = max(plan.log_bytes // message_bytes, 2 * len(topics))
    fd = rig.payloads(max(PREPARED_MESSAGES, len(topics)), message_bytes)
    options = {
        "url": broker.url,
        "transport": plan.transport,
        "topic_options": plan.topic_options,
        "topics": topics,
        "message_bytes": message_bytes,
        "messages": messages,
        "fd": fd,
    }
    member: Member = crew.start("filler", f"{_HERE}:fill", options, [fd])
    member.hear()
    member.tell("go")
    member.hear(2 * FLUSH_SECONDS)
    return member, messages, Payloads(fd, message_bytes)


def run_recovery(rig: Rig, plan: Plan) -> Figures:
    """SIGKILL of all under load; from the new start to the first earliest read."""
    topics = rig.topics(plan.topics)
    figures = _standing_figures(plan)
    figures.message_bytes = plan.message_bytes
    with rig.own_broker("recovery") as broker, rig.crew() as crew:
        member, figures.messages, payloads = _filled(
            rig, plan, broker, topics, crew, plan.message_bytes
        )
        member.tell("go on")
        time.sleep(LOAD_SECONDS)
        figures.extra["log_bytes"] = float(broker.quiet_usage().written_bytes)
        broker.kill()
        member.process.kill()
        began = time.monotonic()
        broker.start()
        with (
            danube_fast.connect(
                broker.url, transport=plan.transport, timeout=CONNECT_SECONDS
            ) as client,
            client.reader(topics[-1], start="earliest", stop=None) as reader,
        ):
            batch = reader.receive_batch(1, timeout=READ_SECONDS)
            figures.extra["read_seconds"] = time.monotonic() - began
        figures.extra["ready_seconds"] = broker.ready_seconds
        if not len(batch):
            raise DeadlineExceeded(
                f"nothing could be read within {READ_SECONDS:g} s after a recovery; look at the "
                "broker's log"
            )
        if batch[0].payload != payloads[(len(topics) - 1) % payloads.count]:
            raise DataLoss("the first message after a recovery is not the first that was sent")
    figures.lost = figures.corrupted = 0
    return figures


def run_idle(rig: Rig, plan: Plan) -> Figures:
    """CPU and memory of a broker with connected clients that do nothing."""
    topics = rig.topics(plan.topics)
    figures = _standing_figures(plan)
    with rig.own_broker("idle", IDLE_WORKERS) as broker, rig.crew() as crew:
        for topic in topics:
            broker.client.admin.create_topic(topic)
        broker.close_client()
        member = crew.start(
            "clients", f"{_HERE}:hold",
            {
                "url": broker.url, "transport": plan.transport,
                "topics": topics[: plan.clients], "topic_options": plan.topic_options,
            },
        )  # fmt: skip
        member.hear()
        member.tell("go")
        member.hear()
        time.sleep(IDLE_SETTLE_SECONDS)
        cpu, began = host.cpu_seconds(broker.pids), time.monotonic()
        time.sleep(IDLE_SECONDS)
        cpu = host.cpu_seconds(broker.pids) - cpu
        figures.broker_cpu_s = cpu
        figures.extra["cpu_percent"] = 100 * cpu / (time.monotonic() - began)
        anonymous = [host.memory_bytes(pid, "RssAnon") for pid in broker.worker_pids]
        figures.extra["rss_anon_mb"] = max(anonymous) / 1e6
        figures.broker_rss_mb = broker.resident_mb()
        member.tell("bye")
    return figures


def run_readback(rig: Rig, plan: Plan) -> Figures:
    """What a worker reads from its log to serve one of many interleaved partitions."""
    topics = rig.topics(plan.topics)
    figures = _standing_figures(plan)
    figures.message_bytes = FRAME_PAYLOAD_BYTES
    with rig.own_broker("readback", 1) as broker, rig.crew() as crew:
        member, messages, payloads = _filled(rig, plan, broker, topics, crew, FRAME_PAYLOAD_BYTES)
        member.tell("bye")
        figures.messages = messages // len(topics)
        chosen = len(topics) // 2
        (worker,) = broker.worker_pids
        before, began = host.read_bytes(worker), time.monotonic()
        received: list[bytes | None] = []
        with danube_fast.connect(
            broker.url, transport=plan.transport, timeout=CONNECT_SECONDS
        ) as client:
            reader = client.reader(topics[chosen], start="earliest", stop="latest")
            received.extend(message.payload for message in reader)
        seconds = time.monotonic() - began
        read = host.read_bytes(worker) - before
    numbers = range(chosen, messages, len(topics))
    expected = [payloads[number % payloads.count] for number in numbers]
    figures.lost = max(0, len(expected) - len(received))
    figures.corrupted = sum(a != b for a, b in zip(expected, received, strict=False))
    figures.messages_per_s = len(received) / seconds
    figures.mb_per_s = figures.messages_per_s * FRAME_PAYLOAD_BYTES / 1e6
    figures.extra["read_ratio"] = read / max(1, len(received) * FRAME_PAYLOAD_BYTES)
    return figures
