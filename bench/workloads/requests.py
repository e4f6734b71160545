"""The workload `requests`: one client asks, a consumer in a process of its own replies.

    requester   client.request(), at a pace, then back to back         p50_us, p99_us: of those at the pace
    responder   receive(), reply(), ack()                              messages_per_s: of those back to back

A time is that from the actual send of a request until its reply is in the requester's hands.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from danube_fast.bench.load.member import Link
from danube_fast.bench.load.processes import Member
from danube_fast.bench.load.requests import (
    LOOK_SECONDS,
    REPLY_SECONDS,
    After,
    Before,
    ask_twice,
    reply_to,
)
from danube_fast.bench.load.rig import Rig, blank, charge
from danube_fast.bench.load.streams import open_client
from danube_fast.bench.plan import Figures, Plan
from danube_fast.bench.workloads.latency import set_latencies
from danube_fast.errors import DanubeError

__all__ = ["converse", "reply_each", "request_each", "run_requests", "set_requests"]

_HERE = "danube_fast.bench.workloads.requests"


# ------------------------------------------------------------------ roles


def request_each(link: Link, options: dict[str, Any]) -> None:
    """One request after the other."""
    topic = options["topic"]
    with open_client(options) as client:

        def request(payloads: Sequence[bytes], before: Before, after: After) -> None:
            for number, payload in enumerate(payloads):
                before(number)
                after(client.request(topic, payload, REPLY_SECONDS).payload)

        ask_twice(link, options, request)


def reply_each(link: Link, options: dict[str, Any]) -> None:
    """A reply to each request, until told to stop."""
    with (
        open_client(options) as client,
        client.consumer(
            options["topic"], subscription="bench", initial_position="earliest"
        ) as consumer,
    ):
        link.ready()
        cpu = time.process_time()
        while True:
            message = consumer.receive(LOOK_SECONDS)
            if message is not None:
                message.reply(reply_to(message.payload or b""))
                consumer.ack(message)
            elif link.has_order():
                break
        link.hear()
        link.say({"cpu": time.process_time() - cpu})
        link.hear()


# ------------------------------------------------------------------ the run


def run_requests(rig: Rig, plan: Plan) -> Figures:
    """How long a request takes until its reply is there."""
    broker = rig.broker(plan)
    topic = rig.topics(1)[0]
    broker.client.admin.create_topic(topic, **plan.topic_options)  # type: ignore[arg-type]
    options: dict[str, Any] = {
        "url": broker.url,
        "transport": plan.transport,
        "spin_us": plan.spin_us,
        "topic": topic,
        "message_bytes": plan.message_bytes,
        "rate": plan.rate,
        "fd": rig.payloads(plan.messages, plan.message_bytes),
    }
    with rig.crew() as crew:
        responder = crew.start("responder", f"{_HERE}:reply_each", options)
        responder.hear()
        responder.tell("go")
        requester = crew.start("requester", f"{_HERE}:request_each", options, [options["fd"]])
        requester.hear()
        before = broker.usage()
        asked, replied = converse(responder, requester)
        figures = charge(blank(plan), broker, before)
        for member in crew.members:
            member.tell("bye")
    set_requests(figures, plan, asked, replied)
    return figures


def converse(responder: Member, requester: Member) -> tuple[dict[str, Any], dict[str, Any]]:
    """Let the requester ask, and stop the responder; their reports. Raises what either failed with."""
    requester.tell("go")
    try:
        asked = requester.hear()
    except DanubeError:
        if responder.pipe.poll():
            responder.hear()  # the cause
        raise
    responder.tell("stop")
    return asked, responder.hear()


def set_requests(
    figures: Figures, plan: Plan, asked: dict[str, Any], replied: dict[str, Any]
) -> None:
    """Times of both halves, the rate of the second, faults."""
    halves = [asked["paced"], asked["back_to_back"]]
    unpaced = blank(plan)
    for found, half in zip((figures, unpaced), halves, strict=True):
        set_latencies(found, plan, half["times"], half["times"][2])
    figures.messages_per_s, figures.mb_per_s = unpaced.messages_per_s, unpaced.mb_per_s
    for name in ("p50_us", "p99_us"):
        figures.extra[f"back_to_back_{name}"] = getattr(unpaced, name)
    figures.client_cpu_s = asked["cpu"] + replied["cpu"]
    figures.lost = sum(half["missing"] for half in halves)
    figures.corrupted = sum(half["wrong"] for half in halves)
    figures.duplicated = 0
