"""The workload `answers`: whether the time of an answer tells a user without rights if a thing is there.

    LOOKUP, ADMIN describe_topic, WATCH                    by a name     of a topic that is forbidden, or missing
    OPEN_PRODUCER, SUBSCRIBE at the worker                 by a number   of a partition likewise

All are asked in turn on one connection, forbidden and missing in random order; names are as long, numbers as large.
Three figures of each question: `apart`, the ratio of the medians, the larger to the smaller; `later`, how often a
forbidden one takes longer than a missing one (0.5: as often as not); `p`, of a two-sided Mann-Whitney test.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq

from danube_fast.bench.load.rig import Rig, blank
from danube_fast.bench.plan import Figures, Plan
from danube_fast.bench.workloads.security.secured import ADMIN, Secured, secured
from danube_fast.client.link.url import parse_url
from danube_fast.errors import DeadlineExceeded, Internal
from danube_fast.net import protocol

__all__ = ["later_share", "run_answers"]

TOPICS = 40
"""Forbidden ones, and as many names and numbers of none: all numbers are of one byte in msgpack."""
FIRST_MISSING = 1_000
STRANGER = "stranger"
WAIT_SECONDS = 30.0
WARM_UP = 50
_SEED = 20
Ask = Callable[[int, str, int], Any]
"""Makes a command of a request's number, a topic and a partition."""
AT_COORDINATOR: dict[str, Ask] = {
    "lookup": lambda request, topic, _: protocol.Lookup(request, topic),
    "describe": lambda request, topic, _: protocol.Admin(
        request, "describe_topic", {"topic": topic}
    ),
    "watch": lambda request, topic, _: protocol.Watch(request, "", [topic], 0),
}
AT_WORKER: dict[str, Ask] = {
    "open": lambda request, _, number: protocol.OpenProducerUnnamed(request, number, "p"),
    "subscribe": lambda request, _, number: protocol.Subscribe(
        request, 1, 1, number, "s", "shared"
    ),
}


class _Connection:
    """One session of the stranger, without a client that would gather or repeat commands."""

    def __init__(self, context: zmq.Context[Any], made: Secured, endpoint: str) -> None:
        pair = made.pair(STRANGER)
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, int(WAIT_SECONDS * 1000))
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, made.server_key.encode())
        self._socket.connect(endpoint)
        self._request = 0
        hello = protocol.Hello(self._next(), protocol.PROTOCOL_VERSION, STRANGER)
        self.ask(hello)

    def _next(self) -> int:
        self._request += 1
        return self._request

    def ask(self, command: Any) -> tuple[Any, int]:
        """The answer, and the nanoseconds until it. Raises DeadlineExceeded."""
        content = protocol.encode(command)
        began = time.perf_counter_ns()
        self._socket.send(content)
        try:
            parts = self._socket.recv_multipart()
        except zmq.Again:
            raise DeadlineExceeded(
                f"the broker gave no answer within {WAIT_SECONDS:g} s; is this host busy?"
            ) from None
        took = time.perf_counter_ns() - began
        return protocol.decode_server_command(parts[0]), took

    def question(self, make: Ask, topic: str, number: int) -> tuple[str, int]:
        """What is told of a topic or a partition, without its name, and the time."""
        answer, took = self.ask(make(self._next(), topic, number))
        if isinstance(answer, protocol.Error):
            text = answer.text.replace(topic, "NAME").replace(
                f"partition {number} ", "partition N "
            )
            return f"{answer.code} {text}", took
        value = answer.value
        return str(dict(value, cursor="") if isinstance(value, dict) else value), took

    def close(self) -> None:
        """End it."""
        self._socket.close()


# ------------------------------------------------------------------ statistics


def later_share(first: Any, second: Any) -> tuple[float, float]:
    """How often one of the first is larger than one of the second (ties count half), and how likely so uneven a share is
    where both are alike: Mann and Whitney, two-sided, by the normal distribution with the correction for ties."""
    many, others = len(first), len(second)
    both = np.concatenate([first, second])
    _, places, counts = np.unique(both, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    share = float(ranks[:many].sum() - many * (many + 1) / 2) / (many * others)
    total = many + others
    ties = float((counts.astype(float) ** 3 - counts).sum()) / (total * (total - 1))
    spread = math.sqrt((total + 1 - ties) / (12 * many * others))
    if not spread:
        return 0.5, 1.0
    return share, math.erfc(abs(share - 0.5) / spread / math.sqrt(2))


# ------------------------------------------------------------------ the run


def run_answers(rig: Rig, plan: Plan) -> Figures:
    """Times of answers about what is forbidden beside those about what is missing. Raises Internal if they differ in
    anything but time."""
    figures = blank(plan)
    with secured(rig, plan) as made:
        (run,) = rig.topics(1)
        forbidden = [f"{run}-{FIRST_MISSING + each}" for each in range(TOPICS)]
        missing = [f"{run}-{FIRST_MISSING + TOPICS + each}" for each in range(TOPICS)]
        with made.connect(ADMIN) as admin:
            made.add(admin, STRANGER, [])
            for topic in forbidden:
                admin.admin.create_topic(topic, durability="memory")
        numbers = _numbers(made, forbidden)
        none = range(max(numbers) + 1, max(numbers) + 1 + len(numbers))  # of no partition
        times = _ask_all(
            made, plan.messages,
            (list(zip(forbidden, numbers, strict=True)), list(zip(missing, none, strict=True))),
        )  # fmt: skip
        figures.broker_rss_mb = made.broker.resident_mb()
    for name, (of_forbidden, of_missing) in times.items():
        medians = [float(np.median(each)) / 1e3 for each in (of_forbidden, of_missing)]
        share, p = later_share(of_forbidden, of_missing)
        figures.extra |= {
            f"{name}_forbidden_p50_us": medians[0], f"{name}_missing_p50_us": medians[1],
            f"{name}_apart": max(medians) / min(medians), f"{name}_later": share, f"{name}_p": p,
        }  # fmt: skip
    return figures


def _numbers(made: Secured, topics: list[str]) -> list[int]:
    """Those of the topics' partitions, as the member of the run is told."""
    describe = made.broker.client.admin.describe_topic
    return [int(describe(topic)["placement"][0]["partition_id"]) for topic in topics]


def _ask_all(
    made: Secured, count: int, sides: tuple[list[tuple[str, int]], list[tuple[str, int]]]
) -> dict[str, Any]:
    """Times of all questions: of what is forbidden, of what is missing. Raises Internal."""
    broker, rng, told = made.broker, random.Random(_SEED), dict[str, set[str]]()
    questions = {**AT_COORDINATOR, **AT_WORKER}
    times = {name: np.zeros((2, count + WARM_UP), np.int64) for name in questions}
    with zmq.Context() as context:
        coordinator = _Connection(context, made, parse_url(broker.url)[0])
        port = broker.ready["worker_ports"][0]
        worker = _Connection(context, made, f"tcp://127.0.0.1:{port}")
        for number in range(count + WARM_UP):
            for name, make in questions.items():
                connection = coordinator if name in AT_COORDINATOR else worker
                for side in rng.sample((0, 1), 2):
                    topic, partition = sides[side][number % len(sides[side])]
                    answer, took = connection.question(make, topic, partition)
                    times[name][side, number] = took
                    told.setdefault(name, set()).add(answer)
        coordinator.close()
        worker.close()
    for name, answers in told.items():
        if len(answers) != 1:
            raise Internal(f"{name} tells what is forbidden from what is missing: {answers}")
    return {name: each[:, WARM_UP:] for name, each in times.items()}
