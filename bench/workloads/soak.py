"""The workload `soak`: clients, topics and workers come and go for a while, and nothing is lost or leaks.

    churners    lives in turn, over both lanes (soak_roles.py)
    stander     clients that stay, with all types of subscription
    worker 0    lives all along: its memory and descriptors are looked at
    worker 1    gets SIGKILL now and then
    this        looks into /proc several times a second

The first fifth is left out: caches fill. What grows with work is told from what has filled up by slopes: a line
through the samples of the first half, another one through those of the second. Both are printed, the worst of
the second decides: `..._growth` is what its slope would have added over the half. At the end nothing may be left
in the directory for temporary files, in /dev/shm, or of the processes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from danube_fast.bench.load import host
from danube_fast.bench.load.processes import Broker, Crew, Member, hear_all
from danube_fast.bench.load.rig import Rig, blank
from danube_fast.bench.plan import Figures, Plan
from danube_fast.bench.workloads.soak_roles import LIFE_MESSAGES, MESSAGE_BYTES_MIN
from danube_fast.errors import DanubeError, InvalidArgument

__all__ = ["Sample", "grown", "left_behind", "run_soak", "slopes"]

_HERE = "danube_fast.bench.workloads.soak_roles"
CHURNERS = 2
CHURN_SHARE = 0.5
"""Of the rate; the rest is the stander's."""
WARM_SHARE = 0.2
SAMPLES_PER_S = 4
SAMPLES_MIN = 6
"""In each half, or there is no slope."""
KILLS = 4
KILL_SECONDS_MIN = 5.0
END_SECONDS = 240.0
GONE_SECONDS = 10.0
MIB = 1024 * 1024
MEASURES = ("anon_mb", "rss_mb", "descriptors", "threads")
SETTINGS = {
    "segment_bytes": 16 * MIB, "spare_segments": 1, "retention_seconds_min": 30,
    "tail_bytes_max": MIB,
}  # fmt: skip
"""Segments are used up and trimmed while it runs, and memory for recent frames is full soon. A life reads back what it has
acked, and may have to wait for a worker before it does."""
SHM = Path("/dev/shm")  # noqa: S108 - looked at, not written to


class Sample(NamedTuple):
    """A process at some time, seconds from the start."""

    seconds: float
    anon_mb: float
    rss_mb: float
    descriptors: float
    threads: float


class Watcher:
    """Samples of the processes that live all along, by what they are."""

    def __init__(self, broker: Broker, members: list[Member]) -> None:
        self.broker = broker
        self.victim = 0
        """Pid of the worker that is killed now and then."""
        self.samples: dict[str, list[Sample]] = {}
        self._pids = {
            "supervisor": broker.ready["pid"],
            "coordinator": broker.ready["coordinator_pid"],
            "worker": broker.worker_pids[0],
        } | {member.name: member.process.pid for member in members}
        self.pids_seen = set(broker.pids)
        self._began = time.monotonic()

    def look(self) -> None:
        """One sample of each."""
        seconds = time.monotonic() - self._began
        for name, pid in self._pids.items():
            anon, rss = (host.memory_bytes(pid, line) / 1e6 for line in ("RssAnon", "VmRSS"))
            threads = host.thread_count(pid)
            sample = Sample(seconds, anon, rss, host.descriptor_count(pid), threads)
            self.samples.setdefault(name, []).append(sample)

    def kill(self) -> bool:
        """SIGKILL to the worker that is not looked at; False if it is away just now."""
        try:
            processes = self.broker.status()["processes"]
        except DanubeError:
            return False
        (worker,) = (entry for entry in processes if entry["process"] == "worker-1")
        if worker["state"] != "ready" or worker["pid"] == self.victim:
            return False
        self.victim = worker["pid"]
        self.pids_seen.add(self.victim)
        os.kill(self.victim, signal.SIGKILL)
        return True


def slopes(samples: Iterable[Sample], measure: str) -> tuple[float, float, float]:
    """Growth a minute in the first half and in the second, and how long a half is, minutes; the first
    fifth is left out. Zeros while there are too few samples."""
    rows = np.array([(s.seconds, getattr(s, measure)) for s in samples], dtype=float)
    if len(rows) < 1:
        return 0.0, 0.0, 0.0
    rows = rows[rows[:, 0] >= rows[0, 0] + WARM_SHARE * (rows[-1, 0] - rows[0, 0])]
    middle = (rows[0, 0] + rows[-1, 0]) / 2
    halves = rows[rows[:, 0] < middle], rows[rows[:, 0] >= middle]
    if min(map(len, halves)) < SAMPLES_MIN:
        return 0.0, 0.0, 0.0
    first, second = (float(np.polyfit(half[:, 0] / 60, half[:, 1], 1)[0]) for half in halves)
    return first, second, float(rows[-1, 0] - middle) / 60


def grown(samples: dict[str, list[Sample]], figures: Figures) -> None:
    """Fill in the slopes of every process, and the worst growth of each measure."""
    for measure in MEASURES:
        worst = 0.0
        for name, taken in samples.items():
            first, second, minutes = slopes(taken, measure)
            worst = max(worst, second * minutes)
            if measure in ("anon_mb", "descriptors"):
                figures.extra[f"{name}_{measure}_per_min_1"] = first
                figures.extra[f"{name}_{measure}_per_min_2"] = second
                figures.extra[f"{name}_{measure}"] = getattr(taken[-1], measure)
        figures.extra[f"{measure}_growth"] = worst


def _shared_memory() -> set[str]:
    return (
        {name for name in os.listdir(SHM) if name.startswith("danube")} if SHM.is_dir() else set()
    )


def left_behind(temporary: Path, shm_before: set[str], pids: Iterable[int]) -> list[str]:
    """Files and processes that are still there when all has ended."""
    deadline = time.monotonic() + GONE_SECONDS
    living = [pid for pid in pids if host.is_running(pid)]
    # what others have in /dev/shm meanwhile goes away, too
    while (living or _shared_memory() - shm_before) and time.monotonic() < deadline:
        time.sleep(0.05)
        living = [pid for pid in living if host.is_running(pid)]
    files = [f"file {path.name}" for path in temporary.iterdir()]
    shared = [f"shared memory {name}" for name in sorted(_shared_memory() - shm_before)]
    return [*files, *shared, *(f"process {pid}" for pid in living)]


# ---------------------------------------------------------------- the run


def _start(crew: Crew, plan: Plan, broker: Broker, rig: Rig) -> list[Member]:
    (topic,) = rig.topics(1)
    seconds = plan.messages / plan.rate
    churned = plan.rate * CHURN_SHARE / CHURNERS
    options = {
        "url": broker.url, "topic": topic, "message_bytes": plan.message_bytes,
        "durability": plan.durability,
    }  # fmt: skip
    standing_per_s = plan.rate * (1 - CHURN_SHARE)
    stander = crew.start(
        "stander", f"{_HERE}:stand",
        {**options, "standing_per_s": standing_per_s,
         "standing_messages_max": int(standing_per_s * (seconds + END_SECONDS)) + 1},
    )  # fmt: skip
    stander.hear()
    churners = [
        crew.start(
            f"churner-{number}", f"{_HERE}:churn",
            {**options, "lives_per_s": churned / LIFE_MESSAGES, "first_life": number,
             "life_step": CHURNERS},
        )
        for number in range(CHURNERS)
    ]  # fmt: skip
    hear_all(churners)
    return [stander, *churners]


def _go_on(watcher: Watcher, members: list[Member], seconds: float) -> int:
    """Until the time is up; how often the worker was killed. Raises what a member failed with."""
    began = time.monotonic()
    interval = max(KILL_SECONDS_MIN, seconds / (KILLS + 1))
    kills = 0
    while (spent := time.monotonic() - began) < seconds:
        watcher.look()
        due = (kills + 1) * interval
        if due <= spent and (spent < seconds - KILL_SECONDS_MIN or not kills):
            kills += watcher.kill()
        for member in members:
            if member.pipe.poll():
                member.hear()  # nobody has anything to say yet but that it failed
        time.sleep(1 / SAMPLES_PER_S)
    return kills


def run_soak(rig: Rig, plan: Plan) -> Figures:
    """Churn for `messages / rate` seconds; what was lost, what grew, what was left behind."""
    if plan.message_bytes < MESSAGE_BYTES_MIN:
        raise InvalidArgument(f"--message-bytes must be at least {MESSAGE_BYTES_MIN} for soak")
    seconds = plan.messages / plan.rate
    figures = blank(plan)
    figures.transport = "zmq+shm"
    shm_before = _shared_memory()
    with rig.temporary() as temporary:
        with rig.own_broker("soak", settings=SETTINGS) as broker, rig.crew() as crew:
            members = _start(crew, plan, broker, rig)
            watcher = Watcher(broker, members)
            for member in members:
                member.tell("go")
            kills = _go_on(watcher, members, seconds)
            for member in reversed(members):  # churners ask the stander until their end
                member.tell("stop")
                figures_of(member.hear(END_SECONDS), figures)
            _of_the_broker(broker, figures)
            pids = {*watcher.pids_seen, *broker.pids, *(m.process.pid for m in members)}
            for member in members:
                member.tell("bye")
        left = left_behind(temporary, shm_before, pids)
    grown(watcher.samples, figures)
    figures.extra |= {"kills": float(kills), "left_behind": float(len(left))}
    return figures


def figures_of(report: dict[str, Any], figures: Figures) -> None:
    """Add what a member says. What came out of order counts as changed."""
    figures.messages = report["sent"] + (figures.messages or 0 if figures.extra else 0)
    figures.lost = report["lost"] + (figures.lost or 0)
    figures.duplicated = report["duplicated"] + (figures.duplicated or 0)
    figures.corrupted = report["corrupted"] + report["disordered"] + (figures.corrupted or 0)
    figures.client_cpu_s = report["cpu"] + (figures.client_cpu_s or 0.0)
    for name in ("lives", "requests", "redelivered", "disordered"):
        figures.extra[name] = report[name] + figures.extra.get(name, 0.0)


def _of_the_broker(broker: Broker, figures: Figures) -> None:
    """What is left of the churn in the broker: topics, disk."""
    figures.broker_rss_mb = broker.resident_mb()
    figures.extra["topics_left"] = float(len(broker.client.admin.list_topics()))
    sizes = [path.stat().st_blocks * 512 for path in broker.data_dir.rglob("*") if path.is_file()]
    figures.extra["data_mb"] = sum(sizes) / 1e6
