"""The workload `delayed`: messages with random due times over a span, and the worker killed in its middle.

    publish all      | lead | due ... due ... SIGKILL   ready ... due ... due |
    (clock of the wall)     start              ^ outage ^                    start + messages / rate

Lateness is arrival less due time, by the wall clock that both ends share; nothing may come before its time.
What was due before the consumer had anything again, and had not come when the worker was killed, is measured from
the worker's return and stands apart (`outage_...`). A message may come a second time only if its
ack may have died with the worker. With `watch_seconds` the rest of the span is not waited for: an hour's worth of
messages waits in the broker, and minutes of it are looked at.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from danube_fast.bench.load.member import Link
from danube_fast.bench.load.payloads import LIST_MESSAGES, NUMBER_BYTES
from danube_fast.bench.load.processes import HEAR_SECONDS, Broker, hear_all
from danube_fast.bench.load.rig import Rig, blank
from danube_fast.bench.load.streams import FLUSH_SECONDS, open_client, open_consumer, open_payloads
from danube_fast.bench.plan import Figures, Plan
from danube_fast.clock import SECOND_NS
from danube_fast.errors import DanubeError, DeadlineExceeded

__all__ = ["Outage", "due_times", "figures_of", "publish_delayed", "run_delayed", "take_delayed"]

_HERE = "danube_fast.bench.workloads.delayed"
SEED = 13
LEAD_SECONDS = 3.0
PUBLISHED_PER_S_MIN = 40_000
"""So fast at least everything is published before the first is due, or the run ends with an error."""
POLL_SECONDS = 0.005
READY_SECONDS = 60.0
SILENCE_SECONDS = 20.0
"""After the last due time: what has not come by then is lost."""
RECEIVE_SECONDS = 0.5
ACK_DURABLE_NS = 2_000_000_000
"""An ack that was given so long before a kill is on disk."""
NEVER_NS = 1 << 62
Times = NDArray[np.int64]


class Outage(NamedTuple):
    """When the worker was killed, and when another one was ready; ns since 1970."""

    killed_ns: int
    ready_ns: int


def due_times(count: int, start_ns: int, span_ns: int) -> Times:
    """When each message is due: at random over the span; all processes of a run draw the same."""
    generator = np.random.Generator(np.random.SFC64(SEED))
    return start_ns + generator.integers(0, span_ns, count, dtype=np.int64)


# ------------------------------------------------------------------ roles


def _span_ns(options: dict[str, Any]) -> int:
    return int(options["messages"] / options["rate"] * SECOND_NS)


def _watched_ns(options: dict[str, Any]) -> int:
    """What of the span is waited for."""
    span_ns, watch_ns = _span_ns(options), int(options["watch_seconds"] * SECOND_NS)
    return min(span_ns, watch_ns) if watch_ns else span_ns


def publish_delayed(link: Link, options: dict[str, Any]) -> None:
    """All of them; the next order says when the span starts."""
    lists = open_payloads(options).lists()
    with (
        open_client(options) as client,
        client.producer(options["topics"][0], **options["topic_options"]) as producer,
    ):
        link.ready()
        due = due_times(options["messages"], link.hear(), _span_ns(options)).tolist()
        cpu = time.process_time()
        at = 0
        for one in lists:
            producer.send_many(one, deliver_at=due[at : at + len(one)])
            at += len(one)
        producer.flush(timeout=FLUSH_SECONDS)
        link.say({"acked_ns": time.time_ns(), "cpu": time.process_time() - cpu})
        link.hear()


def take_delayed(link: Link, options: dict[str, Any]) -> None:
    """Whatever comes, acked batch by batch; when each message came first, and when last."""
    payloads, size = open_payloads(options), options["message_bytes"]
    whole = np.frombuffer(payloads._map, np.uint8).reshape(-1, size)
    first = np.zeros(payloads.count, np.int64)
    times = first.copy()
    corrupted = 0
    with open_consumer(options) as consumer:
        link.ready()
        start_ns = link.hear()
        watched_ns = start_ns + _watched_ns(options)
        wanted = due_times(payloads.count, start_ns, _span_ns(options)) < watched_ns
        end_ns, left = watched_ns + int(SILENCE_SECONDS * SECOND_NS), np.count_nonzero(wanted)
        cpu = time.process_time()
        while left and time.time_ns() < end_ns:
            batch = consumer.receive_batch(LIST_MESSAGES, timeout=RECEIVE_SECONDS)
            now_ns = time.time_ns()
            if not len(batch):
                continue
            got = b"".join(payload or b"" for payload in batch.payloads())
            consumer.ack(batch)
            if len(got) != len(batch) * size:
                corrupted += len(batch)
                continue
            rows = np.frombuffer(got, np.uint8).reshape(-1, size)
            numbers = rows[:, :NUMBER_BYTES].copy().view("<u8").ravel()
            known = numbers < payloads.count
            right = known & (whole[np.where(known, numbers, 0)] == rows).all(axis=1)
            corrupted += int(np.count_nonzero(~right))
            good = numbers[right].astype(np.int64)
            fresh = good[first[good] == 0]
            first[fresh] = now_ns
            np.add.at(times, good, 1)
            left -= np.count_nonzero(wanted[fresh])
        link.say(
            {
                "corrupted": corrupted, "cpu": time.process_time() - cpu,
                "first": first.tobytes(), "times": times.tobytes(),
            }
        )  # fmt: skip
        link.hear()


# ------------------------------------------------------------------ the run


def _state(broker: Broker) -> tuple[int, str]:
    """Pid and state of the worker, as the supervisor has them; (0, "") while nobody can say."""
    try:
        processes = broker.status()["processes"]
    except DanubeError:
        return 0, ""
    (worker,) = (entry for entry in processes if entry["process"] == "worker-0")
    return int(worker["pid"] or 0), str(worker["state"])


def kill_worker(broker: Broker) -> Outage:
    """SIGKILL of the one worker; until another one is ready. Raises DeadlineExceeded."""
    (victim,) = broker.worker_pids
    broker.status()  # the connection for questions is there
    killed_ns = time.time_ns()
    os.kill(victim, signal.SIGKILL)
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        pid, state = _state(broker)
        if pid not in (0, victim) and state == "ready":
            broker.ready["worker_pids"] = [pid]
            return Outage(killed_ns, time.time_ns())
        time.sleep(POLL_SECONDS)
    raise DeadlineExceeded(
        f"no worker was ready {READY_SECONDS:g} s after the last one was killed; look at the broker's log"
    )


def figures_of(
    figures: Figures, due: Times, taken: dict[str, Any], outage: Outage, watched_ns: int
) -> None:
    """Fill in what the arrivals say: how late messages came, which not, which too often. Who is due from
    `watched_ns` on is not waited for."""
    first, times = (np.frombuffer(taken[x], np.int64) for x in ("first", "times"))
    came, again = times > 0, times > 1
    wanted = due < watched_ns
    killed_ns, ready_ns = outage
    back_ns = int(first[came & (first > ready_ns)].min(initial=NEVER_NS))
    figures.lost = int(np.count_nonzero(wanted & ~came))
    figures.corrupted = taken["corrupted"]
    excused = (first > killed_ns - ACK_DURABLE_NS) & (first < ready_ns) & (times == 2)
    figures.duplicated = int(np.count_nonzero(again & ~excused))
    away = came & (due < back_ns) & (first > killed_ns)
    late = first - due
    figures.extra |= {
        "early": float(np.count_nonzero(late[came] < 0)),
        "redelivered": float(np.count_nonzero(again)),
        "outage_ms": (ready_ns - killed_ns) / 1e6,
        "consumer_back_ms": (back_ns - ready_ns) / 1e6 if back_ns < NEVER_NS else 0.0,
        "watched_messages": float(np.count_nonzero(wanted)),
        "outage_messages": float(np.count_nonzero(away)),
    }
    for name, some in (("late", late[came & ~away]), ("outage_late", first[away] - ready_ns)):
        for part, share in (("p50", 50), ("p99", 99), ("max", 100)):
            value = float(np.percentile(some, share)) / 1e6 if len(some) else 0.0
            figures.extra[f"{name}_{part}_ms"] = value


def run_delayed(rig: Rig, plan: Plan) -> Figures:
    """How late delayed messages come, also when the worker is killed. Raises DeadlineExceeded."""
    figures = blank(plan)
    fd = rig.payloads(plan.messages, plan.message_bytes)
    with rig.own_broker("delayed", 1) as broker, rig.crew() as crew:
        options: dict[str, Any] = {
            "url": broker.url, "transport": plan.transport, "spin_us": plan.spin_us,
            "topic_options": plan.topic_options, "message_bytes": plan.message_bytes,
            "messages": plan.messages, "rate": plan.rate, "watch_seconds": plan.watch_seconds,
            "topics": rig.topics(1),
            "subscription": "bench", "type": "exclusive", "fd": fd,
        }  # fmt: skip
        producer = crew.start("producer", f"{_HERE}:publish_delayed", options, [fd])
        consumer = crew.start("consumer", f"{_HERE}:take_delayed", options, [fd])
        hear_all(crew.members)
        lead = LEAD_SECONDS + plan.messages / PUBLISHED_PER_S_MIN
        start_ns = time.time_ns() + int(lead * SECOND_NS)
        due = due_times(plan.messages, start_ns, _span_ns(options))
        for member in (consumer, producer):
            member.tell("go")
            member.tell(start_ns)
        sent = producer.hear(HEAR_SECONDS)
        if sent["acked_ns"] > start_ns:
            raise DeadlineExceeded(
                f"{plan.messages} messages were not published within {lead:.1f} s, so some were due "
                "before; take fewer --messages"
            )
        middle_ns = start_ns + _watched_ns(options) // 2
        time.sleep(max(0, middle_ns - time.time_ns()) / SECOND_NS)
        outage = kill_worker(broker)
        taken = consumer.hear(HEAR_SECONDS + _watched_ns(options) / SECOND_NS)
        figures.broker_rss_mb = broker.resident_mb()
        for member in crew.members:
            member.tell("bye")
    figures_of(figures, due, taken, outage, start_ns + _watched_ns(options))
    figures.extra["publish_seconds"] = lead - (start_ns - sent["acked_ns"]) / SECOND_NS
    figures.client_cpu_s = sent["cpu"] + taken["cpu"]
    return figures
