"""Raw ZeroMQ there and back, one message at a time: what no broker with one process between can beat.

    asker (DEALER) --ipc--> echo (ROUTER) --ipc--> asker          two hops, as for a message or its ack

Closed loop: `clients` threads with a socket each, in `producers` processes. With a rate: one asker at
that pace, and the time of each round trip. Nothing is looked at, kept, or made durable.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import zmq

from danube_fast.bench.load.member import Link
from danube_fast.bench.load.pacer import Pacer
from danube_fast.bench.load.processes import hear_all
from danube_fast.bench.load.rig import Rig, blank
from danube_fast.bench.plan import Figures, Plan
from danube_fast.bench.workloads.rates import set_percentiles
from danube_fast.bench.workloads.reference import open_socket, stalled

__all__ = ["ask_each", "ask_paced", "echo", "run_echo"]

_HERE = "danube_fast.bench.workloads.echo"
STOP_LOOK_MS = 100
WARM_UP_SECONDS = 0.2


def echo(link: Link, options: dict[str, Any]) -> None:
    """Send everything back until told to stop."""
    with zmq.Context() as context, open_socket(context, zmq.ROUTER) as socket:
        socket.bind(options["endpoint"])
        link.say("bound")
        cpu = time.process_time()
        while not link.has_order():
            if socket.poll(STOP_LOOK_MS):
                for _ in range(256):
                    try:
                        parts = socket.recv_multipart(zmq.NOBLOCK)
                    except zmq.Again:
                        break
                    socket.send_multipart(parts)
        link.hear()
        link.say({"cpu": time.process_time() - cpu})
        link.hear()


def ask_each(link: Link, options: dict[str, Any]) -> None:
    """Threads that each send a message and wait for it, as often as they should."""
    payload = os.urandom(options["message_bytes"])
    barrier = threading.Barrier(options["clients"] + 1)
    failures: list[zmq.ZMQError] = []

    def run(socket: zmq.Socket[bytes]) -> None:
        barrier.wait()
        try:
            for _ in range(options["each"]):
                socket.send(payload)
                socket.recv()
        except zmq.ZMQError as error:
            failures.append(error)

    with zmq.Context() as context, ExitStack() as stack:
        threads = []
        for _ in range(options["clients"]):
            socket = stack.enter_context(open_socket(context, zmq.DEALER))
            socket.connect(options["endpoint"])
            socket.send(payload)  # connected when it is back
            socket.recv()
            threads.append(threading.Thread(target=run, args=(socket,)))
        for thread in threads:
            thread.start()
        link.ready()
        cpu, began = time.process_time(), time.monotonic_ns()
        barrier.wait()
        for thread in threads:
            thread.join()
        ended = time.monotonic_ns()
        if failures:
            raise stalled() from failures[0]
        link.say({"began_ns": began, "ended_ns": ended, "cpu": time.process_time() - cpu})
        link.hear()


def ask_paced(link: Link, options: dict[str, Any]) -> None:
    """One message at each due time; reports how long each was away."""
    payload = os.urandom(options["message_bytes"])
    away = np.zeros(options["each"], np.int64)
    with zmq.Context() as context, open_socket(context, zmq.DEALER) as socket:
        socket.connect(options["endpoint"])
        pacer = Pacer(options["rate"])
        try:
            socket.send(payload)
            socket.recv()
            link.ready()
            cpu, began = time.process_time(), pacer.start()
            for number in range(len(away)):
                pacer.wait(number)
                sent = time.monotonic_ns()
                socket.send(payload)
                socket.recv()
                away[number] = time.monotonic_ns() - sent
        except zmq.Again:
            raise stalled() from None
        ended = time.monotonic_ns()
        cpu = time.process_time() - cpu
        link.say({"began_ns": began, "ended_ns": ended, "cpu": cpu, "away": away})
        link.hear()


def run_echo(rig: Rig, plan: Plan) -> Figures:
    """One run: a rate of round trips, or at a pace their times."""
    processes = 1 if plan.rate else plan.producers
    clients = 1 if plan.rate else plan.clients // processes
    options: dict[str, Any] = {
        "endpoint": f"ipc://@danube-bench-{os.getpid()}-{secrets.token_hex(8)}",
        "message_bytes": plan.message_bytes,
        "rate": plan.rate,
        "clients": clients,
        "each": max(1, plan.messages // (processes * clients)),
    }
    role = "ask_paced" if plan.rate else "ask_each"
    with rig.crew() as crew:
        middle = crew.start("echo", f"{_HERE}:echo", options)
        middle.hear()
        askers = [crew.start(f"asker-{i}", f"{_HERE}:{role}", options) for i in range(processes)]
        hear_all(askers)
        for member in askers:
            member.tell("go")
        asked = hear_all(askers)
        middle.tell("stop")
        echoed = middle.hear()
        for member in crew.members:
            member.tell("bye")
    figures = blank(plan)
    figures.system, figures.version, figures.durability = "zeromq", zmq.zmq_version(), None
    figures.messages = options["each"] * clients * processes
    seconds = max(one["ended_ns"] for one in asked) - min(one["began_ns"] for one in asked)
    figures.messages_per_s = figures.messages / (seconds / 1e9)
    figures.broker_cpu_s = echoed["cpu"]
    figures.client_cpu_s = sum(one["cpu"] for one in asked)
    if plan.rate:
        away = asked[0]["away"]
        set_percentiles(figures, away[min(int(plan.rate * WARM_UP_SECONDS), len(away) // 2) :])
    else:
        figures.window = plan.message_bytes
    return figures
