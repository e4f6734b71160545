"""What this machine can do just now: raw ZeroMQ, the same bytes, no broker.

    producer (DEALER) --ipc--> relay (ROUTER, ROUTER) --ipc--> consumer (DEALER)

Prebuilt messages of 256 KiB, passed on without a look (copy=False), nothing verified. A rate of a
workload divided by this one says more on a noisy machine than the rate alone.
"""

from __future__ import annotations

import os
import secrets
import time
from typing import Any

import zmq

from danube_fast.bench.load.member import Link
from danube_fast.bench.load.payloads import Payloads
from danube_fast.bench.load.processes import hear_all
from danube_fast.bench.load.rig import Rig, blank
from danube_fast.bench.plan import Figures, Plan
from danube_fast.errors import DeadlineExceeded

__all__ = ["consume", "open_socket", "produce", "relay", "run_reference", "stalled"]

_HERE = "danube_fast.bench.workloads.reference"
PART_BYTES = 256 * 1024
HIGH_WATER_PARTS = 64
"""16 MiB, as large as a producer's window."""
WAIT_MS = 30_000


def open_socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[Any]:
    """A socket that waits for at most WAIT_MS and then raises zmq.Again."""
    socket: zmq.Socket[Any] = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_PARTS)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_PARTS)
    socket.setsockopt(zmq.SNDTIMEO, WAIT_MS)
    socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
    socket.setsockopt(zmq.LINGER, 0)
    return socket


def stalled() -> DeadlineExceeded:
    """What to raise then."""
    return DeadlineExceeded(
        f"the ZeroMQ reference stood still for {WAIT_MS // 1000} s; is this host busy? Run it again"
    )


def produce(link: Link, options: dict[str, Any]) -> None:
    """Send every part."""
    payloads = Payloads(options["fd"], options["message_bytes"])
    part_messages = max(1, PART_BYTES // options["message_bytes"])
    parts = [
        b"".join(payloads.cut(start, 1, start + part_messages))
        for start in range(0, payloads.count, part_messages)
    ]
    with zmq.Context() as context, open_socket(context, zmq.DEALER) as socket:
        socket.connect(options["inward"])
        link.ready()
        cpu, began = time.process_time(), time.monotonic_ns()
        try:
            for part in parts:
                socket.send(part, copy=False)
            link.say({"began_ns": began, "cpu": time.process_time() - cpu})
            link.hear()
        except zmq.Again:
            raise stalled() from None


def relay(link: Link, options: dict[str, Any]) -> None:
    """Pass every part on to the one consumer."""
    with (
        zmq.Context() as context,
        open_socket(context, zmq.ROUTER) as inward,
        open_socket(context, zmq.ROUTER) as outward,
    ):
        outward.setsockopt(zmq.ROUTER_MANDATORY, 1)
        inward.bind(options["inward"])
        outward.bind(options["outward"])
        link.say("bound")
        try:
            consumer: bytes = outward.recv_multipart()[0]
            link.say("introduced")
            passed, wanted = 0, options["messages"] * options["message_bytes"]
            cpu = time.process_time()
            while passed < wanted:
                part: zmq.Frame = inward.recv_multipart(copy=False)[1]
                passed += len(part.buffer)
                parts: list[Any] = [consumer, part]
                outward.send_multipart(parts, copy=False)
            link.say({"cpu": time.process_time() - cpu})
            link.hear()
        except zmq.Again:
            raise stalled() from None


def consume(link: Link, options: dict[str, Any]) -> None:
    """Receive every part."""
    wanted = options["messages"] * options["message_bytes"]
    with zmq.Context() as context, open_socket(context, zmq.DEALER) as socket:
        socket.connect(options["outward"])
        socket.send(b"here")
        cpu = time.process_time()
        got = 0
        try:
            while got < wanted:
                got += len(socket.recv(copy=False).buffer)
        except zmq.Again:
            raise stalled() from None
        link.say({"ended_ns": time.monotonic_ns(), "cpu": time.process_time() - cpu})
        link.hear()


def run_reference(rig: Rig, plan: Plan) -> Figures:
    """One run of the three processes."""
    token = f"{os.getpid()}-{secrets.token_hex(8)}"
    options: dict[str, Any] = {
        "inward": f"ipc://@danube-bench-{token}-in",
        "outward": f"ipc://@danube-bench-{token}-out",
        "message_bytes": plan.message_bytes,
        "messages": plan.messages,
        "fd": rig.payloads(plan.messages, plan.message_bytes),
    }
    with rig.crew() as crew:
        middle = crew.start("relay", f"{_HERE}:relay", options)
        middle.hear()
        producer = crew.start("producer", f"{_HERE}:produce", options, [options["fd"]])
        consumer = crew.start("consumer", f"{_HERE}:consume", options)
        hear_all([middle, producer])
        producer.tell("go")
        sent, passed, received = hear_all([producer, middle, consumer])
        for member in crew.members:
            member.tell("bye")
    figures = blank(plan)
    figures.system, figures.version, figures.durability = "zeromq", zmq.zmq_version(), None
    seconds = (received["ended_ns"] - sent["began_ns"]) / 1e9
    figures.messages_per_s = plan.messages / seconds
    figures.mb_per_s = figures.messages_per_s * plan.message_bytes / 1e6
    figures.broker_cpu_s = passed["cpu"]
    figures.client_cpu_s = sent["cpu"] + received["cpu"]
    figures.window = HIGH_WATER_PARTS * PART_BYTES
    return figures
