"""The workload `curve`: what CURVE costs over tcp on loopback, raw ZeroMQ without a broker.

    sender (DEALER) --tcp, plain or CURVE--> receiver (DEALER)     messages of 1 KiB, and of 64 KiB

plain, CURVE, plain, CURVE, ... with sockets of their own in two processes that stay: MB/s of both, and the median of the
ratios of neighbours.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import zmq

from danube_fast.bench.load.member import Link
from danube_fast.bench.load.rig import Rig, blank
from danube_fast.bench.plan import Figures, Plan
from danube_fast.bench.workloads.reference import open_socket, stalled
from danube_fast.bench.workloads.security.turns import END
from danube_fast.errors import Internal
from danube_fast.security.curve import new_key_pair

__all__ = ["receive_frames", "run_curve", "send_frames"]

_HERE = "danube_fast.bench.workloads.security.curve"
TURNS = 5
SIZES = {"1_kib": 1024, "64_kib": 64 * 1024}
QUEUE_BYTES = 4 * 1024 * 1024
"""What may wait at each side."""


def _open(context: zmq.Context[Any], size: int) -> zmq.Socket[Any]:
    socket = open_socket(context, zmq.DEALER)
    socket.set_hwm(QUEUE_BYTES // size)
    return socket


def receive_frames(link: Link, options: dict[str, Any]) -> None:
    """Bind a port for each order (is CURVE, size, count), send the first message back, and count what comes then."""
    link.ready()
    with zmq.Context() as context:
        while (order := link.hear()) != END:
            is_curve, size, count = order
            with _open(context, size) as socket:
                if is_curve:
                    socket.setsockopt(zmq.CURVE_SERVER, 1)
                    socket.setsockopt_string(zmq.CURVE_SECRETKEY, options["server"][1])
                link.say(socket.bind_to_random_port("tcp://127.0.0.1"))
                try:
                    socket.send(socket.recv())
                    got = sum(len(socket.recv()) for _ in range(count))
                except zmq.Again:
                    raise stalled() from None
                link.say({"ended_ns": time.monotonic_ns(), "bytes": got})


def send_frames(link: Link, options: dict[str, Any]) -> None:
    """Send as many messages as each order says, once one was there and back; report when they began."""
    link.ready()
    with zmq.Context() as context:
        while (order := link.hear()) != END:
            is_curve, size, count, port = order
            payload = os.urandom(size)
            with _open(context, size) as socket:
                if is_curve:
                    socket.setsockopt_string(zmq.CURVE_SERVERKEY, options["server"][0])
                    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, options["client"][0])
                    socket.setsockopt_string(zmq.CURVE_SECRETKEY, options["client"][1])
                socket.connect(f"tcp://127.0.0.1:{port}")
                try:
                    socket.send(payload)
                    socket.recv()
                    began = time.monotonic_ns()
                    for _ in range(count):
                        socket.send(payload)
                except zmq.Again:
                    raise stalled() from None
                link.say({"began_ns": began})
                link.hear()  # all has arrived


def run_curve(rig: Rig, plan: Plan) -> Figures:
    """MB/s with CURVE and without, for each size, and the ratios. Raises Internal if not all came."""
    pairs = [new_key_pair() for _ in range(2)]
    server, client = [[pair.public, pair.secret] for pair in pairs]
    options: dict[str, Any] = {"server": server, "client": client}
    figures = blank(plan)
    figures.system, figures.version, figures.durability = "zeromq", zmq.zmq_version(), None
    with rig.crew() as crew:
        receiver = crew.start("receiver", f"{_HERE}:receive_frames", options)
        sender = crew.start("sender", f"{_HERE}:send_frames", options)
        for member in (receiver, sender):
            member.hear()
            member.tell("go")

        def rate(is_curve: bool, size: int) -> float:
            count = max(1, plan.messages * SIZES["1_kib"] // size)
            receiver.tell([is_curve, size, count])
            sender.tell([is_curve, size, count, receiver.hear()])
            sent, came = sender.hear(), receiver.hear()
            sender.tell("arrived")
            if came["bytes"] != count * size:
                raise Internal(f"{came['bytes']} bytes came of {count * size}")
            return count * size * 1e3 / float(came["ended_ns"] - sent["began_ns"])

        for name, size in SIZES.items():
            turns = [(rate(False, size), rate(True, size)) for _ in range(TURNS)]
            figures.extra |= {
                f"plain_{name}_mb_per_s": statistics.median(plain for plain, _ in turns),
                f"curve_{name}_mb_per_s": statistics.median(curve for _, curve in turns),
                f"ratio_{name}": statistics.median(curve / plain for plain, curve in turns),
            }
        for member in crew.members:
            member.tell(END)
    return figures
