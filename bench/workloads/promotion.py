"""The workload `promotion`: the active consumer of a failover subscription dies under load, again and again.

    producer   publish() at a pace, all the time
    active     receive_batch, ack, flush_acks          SIGKILL or SIGSTOP, in turn
    standby    the same: its first message ends the round; then it is the active one, and a new standby comes

What each consumer has received and what it knows to be acked stands in memory that it shares with the harness, so a
dead one's is known. A standby must go on where the active one was: nothing left out, everything in order, and
again only what was not known to be acked.

    shared, u64:   first | first at, ns | next | acked | wrong          of each consumer; next, acked: one past the last
"""

from __future__ import annotations

import mmap
import os
import signal
import statistics
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from danube_fast.bench.load.member import Link
from danube_fast.bench.load.pacer import Pacer
from danube_fast.bench.load.payloads import NUMBER_BYTES
from danube_fast.bench.load.processes import Crew, Member
from danube_fast.bench.load.rig import Rig, blank
from danube_fast.bench.load.streams import FLUSH_SECONDS, open_client, open_consumer, open_payloads
from danube_fast.bench.plan import Figures, Plan
from danube_fast.errors import DeadlineExceeded

__all__ = ["Log", "follow", "publish_paced", "run_promotion"]

_HERE = "danube_fast.bench.workloads.promotion"
ROUNDS = 6
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
LOAD_SECONDS = 1.0
"""How long a consumer is the active one before it dies."""
PROMOTION_SECONDS_MAX = 60.0
POLL_SECONDS = 0.002
RECEIVE_SECONDS = 0.2
BATCH_MESSAGES = 1000
END_SECONDS = 30.0
FIRST, FIRST_NS, NEXT, ACKED, WRONG = range(5)
WORDS = 5
Words = NDArray[np.uint64]


class Log:
    """What the consumers have had, one row each, in memory that all processes share."""

    def __init__(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, size)
        self.rows: Words = np.frombuffer(self._map, np.uint64).reshape(-1, WORDS)

    def at(self, row: int, word: int) -> int:
        """A word of a consumer."""
        return int(self.rows[row, word])


# ------------------------------------------------------------------ roles


def publish_paced(link: Link, options: dict[str, Any]) -> None:
    """The messages one by one at a pace, until the next order; how many it were."""
    prepared = open_payloads(options).cut()
    with (
        open_client(options) as client,
        client.producer(options["topics"][0], **options["topic_options"]) as producer,
    ):
        pacer = Pacer(options["rate"])
        link.ready()
        pacer.start()
        sent = 0
        for number, payload in enumerate(prepared):
            if link.has_order():
                break
            pacer.wait(number)
            producer.send(payload)
            sent += 1
        producer.flush(timeout=FLUSH_SECONDS)
        link.say(sent)
        link.hear()


def follow(link: Link, options: dict[str, Any]) -> None:
    """In order, every batch acked durably before the next; row `index` says how far."""
    payloads, row = open_payloads(options), Log(options["log_fd"]).rows[options["index"]]
    expected = -1
    with open_consumer(options) as consumer:
        link.say("ready")
        while not link.has_order():
            batch = consumer.receive_batch(BATCH_MESSAGES, timeout=RECEIVE_SECONDS)
            if not len(batch):
                continue
            for payload in batch.payloads():
                number = int.from_bytes((payload or b"")[:NUMBER_BYTES], "little")
                if expected < 0:
                    expected = number
                    row[FIRST] = number
                    row[FIRST_NS] = time.monotonic_ns()
                sound = number == expected and payload == payloads[number]
                row[WRONG] += not sound
                expected += 1
                row[NEXT] = expected
            consumer.ack(batch)
            consumer.flush_acks()
            row[ACKED] = expected
        link.hear()


# ------------------------------------------------------------------ the run


class _Rounds:
    """The consumers of a run, one after the other."""

    def __init__(self, crew: Crew, options: dict[str, Any]) -> None:
        self._crew = crew
        self._options = options
        self.log = Log(options["log_fd"])
        self.members: list[Member] = []
        self.missing = self.repeated = 0

    def join(self) -> None:
        """Another consumer, behind those that are there."""
        index = len(self.members)
        fds = [self._options["fd"], self._options["log_fd"]]
        member = self._crew.start(
            f"consumer-{index}", f"{_HERE}:follow", self._options | {"index": index}, fds
        )
        member.hear()
        self.members.append(member)

    def wait(self, row: int, word: int, value: int, what: str) -> None:
        """Until a word of a consumer is at least so large. Raises DeadlineExceeded."""
        deadline = time.monotonic() + PROMOTION_SECONDS_MAX
        while self.log.at(row, word) < value:
            if self.members[row].pipe.poll():
                self.members[row].hear(0)  # it has nothing to say yet but that it failed
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{what} did not happen within {PROMOTION_SECONDS_MAX:g} s; is this host busy?"
                )
            time.sleep(POLL_SECONDS)

    def end(self, number: int) -> float:
        """Signal the active consumer; seconds until the next one has its first message."""
        active = len(self.members) - 2
        pid = self.members[active].process.pid
        began_ns = time.monotonic_ns()
        os.kill(pid, number)
        self.wait(active + 1, FIRST_NS, 1, f"the promotion after signal {number}")
        os.kill(pid, signal.SIGKILL)
        self.members[active].process.wait()
        self.count(active)
        return (self.log.at(active + 1, FIRST_NS) - began_ns) / 1e9

    def count(self, active: int) -> None:
        """What was left out, or came again though it was acked, between that consumer and the next one."""
        first = self.log.at(active + 1, FIRST)
        self.missing += max(0, first - self.log.at(active, NEXT))
        self.repeated += max(0, self.log.at(active, ACKED) - first)


def run_promotion(rig: Rig, plan: Plan) -> Figures:
    """Seconds from a signal to the active consumer until the standby's first message, median and worst."""
    figures, broker = blank(plan), rig.broker(plan)
    fd = rig.payloads(plan.messages, plan.message_bytes)
    rounds_max = ROUNDS + 1
    log_fd = os.memfd_create("danube-fast-promotion", os.MFD_CLOEXEC)
    os.truncate(log_fd, rounds_max * WORDS * 8)
    options: dict[str, Any] = {
        "url": broker.url, "transport": plan.transport, "spin_us": plan.spin_us,
        "topic_options": plan.topic_options, "message_bytes": plan.message_bytes,
        "topics": rig.topics(1), "subscription": "bench", "type": "failover", "rate": plan.rate,
        "fd": fd, "log_fd": log_fd,
    }  # fmt: skip
    took: dict[str, list[float]] = {name: [] for name in SIGNALS}
    try:
        with rig.crew() as crew:
            producer = crew.start("producer", f"{_HERE}:publish_paced", options, [fd])
            producer.hear()
            rounds = _Rounds(crew, options)
            rounds.join()
            producer.tell("go")
            for number in range(ROUNDS):
                rounds.wait(number, ACKED, 1, "the first message")
                rounds.join()
                time.sleep(LOAD_SECONDS)
                name = list(SIGNALS)[number % len(SIGNALS)]
                took[name].append(rounds.end(SIGNALS[name]))
            producer.tell("stop")
            sent = producer.hear()
            rounds.wait(ROUNDS, ACKED, sent, "the last ack")
            rounds.missing += rounds.log.at(0, FIRST)
            figures.broker_rss_mb = broker.resident_mb()
            for member in (producer, rounds.members[-1]):
                member.tell("bye")
    finally:
        os.close(log_fd)
    figures.messages = sent
    figures.lost, figures.duplicated = rounds.missing, rounds.repeated
    figures.corrupted = int(rounds.log.rows[:, WRONG].sum())
    for name, seconds in took.items():
        figures.extra[f"{name}_seconds"] = statistics.median(seconds)
        figures.extra[f"{name}_seconds_max"] = max(seconds)
    figures.extra["rounds"] = float(ROUNDS)
    return figures
