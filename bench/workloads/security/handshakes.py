"""The workload `handshakes`: what strangers whose handshakes fail do to an honest publisher and its consumer.

publisher, consumer   CURVE over tcp (--transport shm: rings)    single messages, then lists, both below saturation
attacker              a thousand failing handshakes a second, to the ports of the worker and of the coordinator:
                      one half with a key that is not registered, the other with a greeting that is none

quiet, attacked, quiet, attacked, ...      ratios of neighbours, and their medians
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import statistics
import struct
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import msgspec

from danube_fast.bench.load.member import Link
from danube_fast.bench.load.rig import Rig
from danube_fast.bench.load.zmtp import CurvePeer, NullPeer
from danube_fast.bench.plan import Figures, Plan
from danube_fast.bench.workloads.security.secured import secured
from danube_fast.bench.workloads.security.turns import END, Pair, add_faults
from danube_fast.errors import Internal
from danube_fast.security.curve import new_key_pair

__all__ = ["fail_handshakes", "run_handshakes"]

_HERE = "danube_fast.bench.workloads.security.handshakes"
PAIRS = 5
HANDSHAKES_PER_S = 1000
THREADS = 8
LISTS_PER_S = 400_000.0
PACED_SECONDS = 2.0
SETTLE_SECONDS = 0.3
STEP_SECONDS = 0.01
GREETING_BYTES = 64
CLOSED_SECONDS = 0.2
"""How long an attacker waits for the broker to close a connection whose greeting was none."""


RATIOS = {
    "per_s": "rate_ratio", "lists_per_s": "lists_ratio", "p50_us": "p50_ratio", "p99_us": "p99_ratio",
    "publish_p99_us": "publish_p99_ratio",
}  # fmt: skip


# ------------------------------------------------------------------ the attacker


class _Attack:
    """Failing handshakes from several threads, until it is stopped."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._ends = threading.Event()
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self.counts = {"denied": 0, "garbage": 0, "admitted": 0, "broken": 0}
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def _run(self, thread: int) -> None:
        rate, tried = self._options["rate"] / THREADS, 0
        while not self._ends.is_set():
            ahead = tried / rate - (time.monotonic() - self._began)
            if ahead > 0:
                self._ends.wait(min(ahead, STEP_SECONDS))
                continue
            ports = self._options["ports"]
            port, poses = ports[tried % len(ports)], (thread + tried // len(ports)) % 2
            found = self._pose(port) if poses else self._babble(port)
            with self._lock:
                self.counts[found] += 1
            tried += 1

    def _pose(self, port: int) -> str:
        """Prove a key that is not registered."""
        peer = None
        try:
            peer = CurvePeer(port, *self._options["keys"])
            welcome = peer.say_hello()
        except OSError:
            found = "broken"
        else:
            try:
                peer.initiate(welcome)
                found = "admitted"
            except TimeoutError:
                found = "broken"
            except OSError:
                found = "denied"
        if peer is not None:
            _close(peer)
        return found

    def _babble(self, port: int) -> str:
        """Send a greeting that is none, and wait a moment for the end of the connection."""
        try:
            peer = NullPeer(port)
        except OSError:
            return "broken"
        peer.socket.settimeout(CLOSED_SECONDS)
        with contextlib.suppress(OSError):
            peer.socket.sendall(b"\xff" + secrets.token_bytes(GREETING_BYTES - 1))
            while peer.socket.recv(GREETING_BYTES):
                pass
        _close(peer)
        return "garbage"

    def stop(self) -> dict[str, float]:
        """End it; how many of each kind a second."""
        self._ends.set()
        for thread in self._threads:
            thread.join()
        seconds = time.monotonic() - self._began
        return {name: count / seconds for name, count in self.counts.items()}


def _close(peer: NullPeer) -> None:
    """Close without the minute in which the port would not be free."""
    on = struct.pack("ii", 1, 0)
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, on)
    peer.socket.close()


def fail_handshakes(link: Link, options: dict[str, Any]) -> None:
    """Fail handshakes from one order to the next, again and again; report how many a second."""
    link.ready()
    while link.hear() != END:
        attack = _Attack(options)
        link.hear()
        link.say(attack.stop())


# ------------------------------------------------------------------ the run


def run_handshakes(rig: Rig, plan: Plan) -> Figures:
    """Rates and p99 of honest clients under attack, as a part and in times of those without: medians of pairs."""
    quiet: list[dict[str, float]] = []
    attacked: list[dict[str, float]] = []
    parts: list[Figures] = []
    # held off, the attacker would not come to a thousand
    plan = msgspec.structs.replace(
        plan, broker={**plan.broker, "handshakes_failed_per_second_max": 0}
    )
    with secured(rig, plan) as made, rig.crew() as crew:
        pair = Pair(crew, rig, plan, made.broker)
        stranger = new_key_pair()
        options = {
            "ports": [urlsplit(made.broker.url).port or 0, *made.broker.ready["worker_ports"]], "rate": HANDSHAKES_PER_S,
            "keys": [made.server_key, stranger.public, stranger.secret],
        }  # fmt: skip
        attacker = crew.start("attacker", f"{_HERE}:fail_handshakes", options)
        attacker.hear()
        attacker.tell("go")
        pair.lists(plan.messages)
        for _ in range(PAIRS):
            quiet.append(_measure(pair, plan, parts))
            attacker.tell("attack")
            time.sleep(SETTLE_SECONDS)
            attacked.append(_measure(pair, plan, parts))
            attacker.tell("stop")
            attacked[-1] |= attacker.hear()
        attacker.tell(END)
        pair.end()
        figures = parts.pop()
        figures.broker_rss_mb = made.broker.resident_mb()
    for part in parts:
        add_faults(figures, part)
    return _compared(figures, quiet, attacked)


def _measure(pair: Pair, plan: Plan, parts: list[Figures]) -> dict[str, float]:
    """One turn; `parts` are the figures of it."""
    count = min(plan.messages, max(1, int(plan.rate * PACED_SECONDS)))
    lists = pair.lists(plan.messages, LISTS_PER_S)
    single, acked = pair.one_by_one(count, plan.rate)
    parts += [lists, single]
    return {
        "per_s": single.messages_per_s or 0.0, "lists_per_s": lists.messages_per_s or 0.0,
        "p50_us": single.p50_us or 0.0, "p99_us": single.p99_us or 0.0,
        "publish_p99_us": acked.p99_us or 0.0,
    }  # fmt: skip


def _compared(
    figures: Figures, quiet: list[dict[str, float]], attacked: list[dict[str, float]]
) -> Figures:
    """Add medians and ratios. Raises Internal if the attack was none."""
    middle = {name: statistics.median(each[name] for each in attacked) for name in attacked[0]}
    if middle["admitted"] or not middle["denied"] or not middle["garbage"]:
        raise Internal(
            f"the attacker was let in {middle['admitted']:g} times a second, refused {middle['denied']:g} times: "
            "the run says nothing about failing handshakes"
        )
    figures.extra["handshakes_per_s"] = middle["denied"] + middle["garbage"]
    figures.extra["denied_per_s"] = middle["denied"]
    figures.extra["broken_per_s"] = middle["broken"]
    for name in quiet[0]:
        figures.extra[f"quiet_{name}"] = statistics.median(each[name] for each in quiet)
        figures.extra[f"attacked_{name}"] = middle[name]
        ratios = [x[name] / q[name] for q, x in zip(quiet, attacked, strict=True)]
        figures.extra[RATIOS[name]] = statistics.median(ratios)
    return figures
