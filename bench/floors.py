"""What danube-fast must reach on two cores, and what it aims at: the one table of both.

`danube-fast bench --check` runs every case, takes the median of each figure over the runs, and misses
a floor aloud. Raw ZeroMQ runs beside each case that it can be compared with, so that a slow machine can
be told from slow code.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from danube_fast.bench.load.rig import Rig
from danube_fast.bench.peers.nats import Nats
from danube_fast.bench.peers.runs import Bench
from danube_fast.bench.plan import Figures, Plan
from danube_fast.bench.workloads.catalog import (
    EVERYWHERE,
    GB,
    WORKLOADS,
    find,
    planned,
    require_present,
)
from danube_fast.errors import FailedPrecondition, InvalidArgument

__all__ = [
    "CASES",
    "LANE_CASES",
    "NATS",
    "RUNS",
    "Case",
    "Floor",
    "Verdict",
    "cases_of",
    "check",
    "measure",
    "select",
    "value_of",
    "verdicts",
]

RUNS = 5
NATS = Nats()
"""Runs beside `requests`, where it is present."""
REFERENCE_BYTES_MAX = 500_000_000
REST_FROM_BYTES = 50_000_000
"""A run that writes so much waits until a new broker has made its spare segments."""


class Floor(NamedTuple):
    """One figure: at least (or at most) the floor, better the target."""

    figure: str
    """A field of `Figures`, or a name in its `extra`."""
    floor: float
    target: float
    unit: str

    @property
    def is_ceiling(self) -> bool:
        """Whether less is better."""
        return self.target < self.floor

    def is_met(self, value: float | None) -> bool:
        """Whether a median is good enough."""
        if value is None:
            return False
        return value <= self.floor if self.is_ceiling else value >= self.floor


class Case(NamedTuple):
    """A workload with the numbers under which it is checked."""

    what: str
    workload: str
    changes: Mapping[str, Any]
    floors: Sequence[Floor]
    why_absent: Callable[[], str | None] = lambda: None
    """Why its floors mean nothing on this machine; None if they do."""

    def plan(self, **changes: Any) -> Plan:
        """Its plan; a user's choice goes before ours where the workload takes it."""
        takes = find(self.workload).takes | EVERYWHERE
        return planned(
            self.workload,
            **{**self.changes, **{k: v for k, v in changes.items() if k in takes}},
        )


def _rate(floor: float, target: float) -> list[Floor]:
    return [Floor("messages_per_s", floor, target, "msgs/s")]


def _micros(name: str, floor: float, target: float) -> Floor:
    return Floor(f"{name}_us", floor, target, "us")


def _no_nats() -> str | None:
    """Why nothing can be measured beside NATS here."""
    return NATS.absence()


_SHM = {"transport": "shm"}
_REQUESTS_CASE = Case(
    "request and reply at 1,000/s, non_reliable, p50", "requests", {"durability": "non_reliable"},
    [Floor("vs_nats", 1.0, 0.8, "of a NATS request")], _no_nats,
)  # fmt: skip
_HISTORY_CASES = (
    Case(
        "history: upload to file://, 1 KiB, of a bare loop", "history-upload", {},
        [Floor("vs_bare", 0.7, 1.0, "of bare writes")],
    ),
    Case(
        "history: upload to S3 (SeaweedFS), 1 KiB, of boto3", "history-upload-s3", {},
        [Floor("vs_bare", 0.7, 1.0, "of boto3 alone")],
    ),
    Case(
        "history: publish beside an upload, fsync, 1 KiB", "history-publish", {},
        [
            Floor("vs_no_upload", 0.6, 0.8, "of no upload"),
            Floor("throttled_vs_no_upload", 0.85, 0.95, "of no upload, at 100 MB/s"),
        ],
    ),
    Case(
        "history: cold catch-up from file://, 100 B", "history-lapped", _SHM,
        [Floor("vs_log", 0.9, 1.0, "of the log alone")],
    ),
    Case(
        "history: cold catch-up from file://, 1 KiB", "history-lapped",
        {**_SHM, "message_bytes": 1024, "messages": 1_000_000, "rate": 20_000.0},
        [Floor("vs_log", 0.7, 0.9, "of the log alone")],
    ),
    Case(
        "history: across the seam", "history-seam", _SHM,
        [Floor("vs_log", 0.9, 1.0, "of the log alone")],
    ),
    Case(
        "history: an offset amid 10,000 objects, file://", "history-offset", {},
        [Floor("first_ms", 50, 10, "ms")],
    ),
    Case(
        "history: an offset amid 10,000 objects, S3", "history-offset-s3", {},
        [Floor("requests", 3, 2, "round trips")],
    ),
    Case(
        "history: turns beside 8 readers of history", "history-turns", {},
        [Floor("turn_ratio", 1.1, 1.0, "times those of the log, p99")],
    ),
)  # fmt: skip

_SECURITY_CASES = (
    Case(
        "--auth required, shared memory, os, of auth none", "auth", _SHM,
        [
            Floor("rate_ratio", 0.98, 1.0, "of the rate of lists"),
            Floor("latency_ratio", 0.98, 1.0, "of the speed of publish()"),
        ],
    ),
    Case(
        "1,000 failing handshakes a second, of quiet", "handshakes", {},
        [
            Floor("rate_ratio", 0.8, 1.0, "of 2,000 messages/s one by one"),
            Floor("lists_ratio", 0.8, 1.0, "of 400,000 messages/s by lists"),
            Floor("handshakes_per_s", 900, 1000, "failing handshakes/s, or it says little"),
        ],
    ),
    Case(
        "10,000 principals, 1,000 roles, 100,000 bindings", "policy", {},
        [
            Floor("check_p99_us", 20, 5, "us a check, p99"),
            Floor("load_seconds", 3, 1, "s to load"),
            Floor("turn_ratio", 1.1, 1.0, "times quiet turns, p99, 20 changes/s"),
        ],
    ),
    Case(
        "answers about what is forbidden and what is missing, 2,000 each", "answers", {},
        [
            Floor(f"{name}_apart", 1.05, 1.0, f"times, medians of {name}")
            for name in ("lookup", "describe", "watch", "open", "subscribe")
        ],
    ),
)  # fmt: skip

_SPARK_CASES = (
    Case(
        "Spark: scan of history, 100 B, of Parquet", "spark-scan", {},
        [
            Floor("vs_parquet", 1.0, 1.2, "of Parquet, offset and payload"),
            Floor("ten_columns_vs_parquet", 0.5, 0.8, "of Parquet, all ten columns"),
            Floor("counted_per_s", 6e6, 10e6, "records/s counted"),
            Floor("streamed_per_s", 2.5e6, 4e6, "records/s streamed"),
            Floor("broker_cpu_share", 0.05, 0.01, "of a core at the broker"),
            Floor("slice_bytes_share", 0.03, 0.015, "of the bytes, for 1 % of the time"),
        ],
    ),
    Case("Spark: export to Parquet, 100 B", "spark-export", {}, _rate(1.5e6, 2.5e6)),
    Case(
        "Spark: export to Parquet, 1 KiB", "spark-export",
        {"message_bytes": 1024, "messages": 2_000_000},
        [Floor("export_mb_per_s", 200, 400, "MB/s")],
    ),
)  # fmt: skip

CASES = (
    Case("reliable, fdatasync before ack", "throughput", {}, _rate(6e6, 9e6)),
    Case("reliable, os", "throughput", {"durability": "os"}, _rate(7e6, 10e6)),
    Case("non_reliable", "throughput", {"durability": "non_reliable"}, _rate(8e6, 12e6)),
    Case(
        "reliable fsync, 1 KiB", "throughput",
        {"message_bytes": 1024, "messages": 1_000_000}, _rate(0.8e6, 1.2e6),
    ),
    Case(
        "per-message API both ends, fsync", "messages", {"messages": 2_000_000},
        _rate(1.5e6, 3e6),
    ),
    Case("1,000 topics, one process", "topics", {"messages": 2_000_000}, _rate(1.5e6, 3e6)),
    Case(
        "64 clients publish() one by one, fsync", "publishers", {},
        [*_rate(30e3, 60e3), Floor("disk_bytes_per_message", 600, 300, "B/message")],
    ),
    Case("fan-out 1 to 8, sum", "fanout", {}, _rate(8e6, 12e6)),
    Case(
        "publish() ack at 1,000/s, os", "publish-latency", {"durability": "os"},
        [_micros("p99", 400, 250)],
    ),
    Case(
        "publish() ack at 1,000/s, fsync", "publish-latency", {},
        [_micros("p50", 300, 200), _micros("p99", 1000, 500)],
    ),
    Case(
        "publish to consume at 1,000/s, non_reliable", "latency", {"durability": "non_reliable"},
        [_micros("p50", 150, 80), _micros("p99", 400, 200)],
    ),
    Case(
        "publish to consume at 1,000/s, fsync", "latency", {},
        [_micros("p50", 300, 185), _micros("p99", 800, 400)],
    ),
    Case(
        "non_reliable p99 beside a publish() loop", "isolation", {},
        [Floor("p99_ratio", 2.0, 1.3, "times quiet")],
    ),
    _REQUESTS_CASE,
    Case("ready, kernels compiled before", "ready", {}, [Floor("ready_seconds", 2.0, 1.0, "s")]),
    Case(
        "SIGKILL of all, 200 topics, 5 GB: first read", "recovery", {"log_bytes": 5 * GB},
        [Floor("read_seconds", 3.0, 1.5, "s")],
    ),
    Case(
        "idle: 4 workers, 50 clients, 1,000 topics", "idle", {},
        [Floor("cpu_percent", 1.5, 0.5, "% of a core"), Floor("rss_anon_mb", 110, 80, "MB a worker")],
    ),
    Case(
        "one of 1,000 partitions out of 5 GB", "readback", {"log_bytes": 5 * GB},
        [Floor("read_ratio", 2.0, 1.2, "times its bytes")],
    ),
    Case(
        "4 consumers on a shared subscription", "shared", {},
        [Floor("vs_exclusive", 0.5, 1.0, "of one exclusive")],
    ),
    Case(
        "4 consumers on a key_shared subscription, 10,000 keys", "key-shared", {},
        [Floor("vs_exclusive", 0.5, 1.0, "of one exclusive")],
    ),
    Case(
        "the active one of a failover subscription", "failover", {},
        [Floor("vs_exclusive", 0.9, 1.0, "of one exclusive")],
    ),
    Case(
        "each message acked by itself", "acks", {},
        [Floor("vs_batch_acks", 0.6, 0.9, "of batch acks")],
    ),
    Case(
        "SIGKILL and SIGSTOP of the active consumer, until the standby's first", "promotion", {},
        [Floor("kill_seconds_max", 3.0, 0.1, "s"), Floor("stop_seconds_max", 3.0, 2.6, "s")],
    ),
    Case(
        "1 million due at random in an hour, 2 min of it, the worker killed", "delayed",
        {"messages": 1_000_000, "rate": 1_000_000 / 3600, "watch_seconds": 120.0},
        [
            Floor("late_p99_ms", 100, 20, "ms p99"), Floor("late_max_ms", 100, 50, "ms at most"),
            Floor("outage_late_max_ms", 250, 50, "ms from ready, due before"),
            Floor("early", 0.5, 0, "messages early"),
        ],
    ),
    Case(
        "10 million unacked, then every second one acked: memory", "unacked", {},
        [Floor("peak_mb", 1000, 150, "MB beyond idle")],
    ),
    Case(
        "10,000 topics and subscriptions: start to first message", "crowd", {},
        [Floor("orderly_seconds", 10, 3, "s"), Floor("killed_seconds", 10, 3, "s")],
    ),
    *_SECURITY_CASES,
    *_HISTORY_CASES,
    *_SPARK_CASES,
    Case(
        "soak, 5 min: clients, topics and workers come and go", "soak", {"messages": 600_000},
        [
            Floor("anon_mb_growth", 8, 1, "MB in the second half"),
            Floor("descriptors_growth", 4, 1, "in the second half"),
            Floor("left_behind", 0.5, 0, "files and processes"),
        ],
    ),
)  # fmt: skip

_NON_RELIABLE, _KIB = {"durability": "non_reliable"}, {"message_bytes": 1024}
LANE_CASES = (
    Case("non_reliable", "throughput", {**_NON_RELIABLE, "messages": 10_000_000}, _rate(35e6, 50e6)),
    Case("non_reliable, 1 KiB", "throughput", {**_NON_RELIABLE, **_KIB, "messages": 2_000_000}, _rate(4e6, 6e6)),
    Case(
        "reliable, os", "throughput", {"durability": "os", "messages": 10_000_000, "warm": True},
        _rate(20e6, 32e6),
    ),
    Case(
        "reliable, os, 1 KiB", "throughput",
        {"durability": "os", **_KIB, "messages": 2_000_000, "warm": True}, _rate(3e6, 5e6),
    ),
    Case(
        "reliable fsync, 2 GB", "throughput", {"messages": 20_000_000, "warm": True},
        _rate(18e6, 22e6),
    ),
    Case(
        "reliable fsync, 1 KiB, 2 GB", "throughput",
        {**_KIB, "messages": 2_000_000, "warm": True}, _rate(1.5e6, 2.5e6),
    ),
    Case(
        "reliable fsync, empty data directory, first 2 GB", "throughput",
        {"messages": 20_000_000}, _rate(8e6, 14e6),
    ),
    Case(
        "per-message API both ends, non_reliable", "messages", {**_NON_RELIABLE, "messages": 2_000_000},
        _rate(3e6, 6e6),
    ),
    Case("fan-out 1 to 8, sum", "fanout", {**_NON_RELIABLE, "messages": 2_000_000}, _rate(40e6, 90e6)),
    Case(
        "4 producers into 1 topic, fsync", "merge", {},
        [Floor("vs_one_producer", 0.8, 1.0, "of one producer")],
    ),
    Case(
        "sustained fsync, 20 GB of log, beside bare writes", "sustained", {"log_bytes": 20 * GB},
        [Floor("vs_bare_writes", 0.70, 0.90, "of bare writes")],
    ),
    Case("lapped consumer, from the log to the tail", "lapped", {}, _rate(8e6, 15e6)),
    Case(
        "publish to consume at 1,000/s, non_reliable", "latency", _NON_RELIABLE,
        [_micros("p50", 45, 25), _micros("p99", 150, 80)],
    ),
    Case(
        "the same, spinning", "latency", {**_NON_RELIABLE, "spin_us": 2000},
        [_micros("p50", 20, 10), _micros("p99", 60, 30)],
    ),
    Case(
        "publish to consume at 1,000/s, fsync", "latency", {},
        [_micros("p50", 180, 130), _micros("p99", 450, 250)],
    ),
    *(case for case in _SECURITY_CASES if case.changes == _SHM),
    _REQUESTS_CASE,
)  # fmt: skip
"""Those of shared memory; `--transport shm` chooses them."""

_OWN = ("reference", "soak", "delayed", "auth", "handshakes")
"""They start what they need by themselves."""
_COMPARED = ("throughput", "messages", "topics", "fanout")
_ECHOED = ("publishers", "publish-latency", "latency", "requests")
_TIMES = ("p50_us", "p99_us")


class Verdict(NamedTuple):
    """A floor, what was measured, and whether that is enough."""

    case: Case
    floor: Floor
    median: float | None
    vs_reference: float | None
    """`messages_per_s` divided by that of raw ZeroMQ in the same run."""
    reference: float | None
    """The same figure of raw ZeroMQ in the same run, a median too."""
    is_met: bool


def value_of(figures: Figures, name: str) -> float | None:
    """A figure by name."""
    value = getattr(figures, name, None) if name in Figures.__struct_fields__ else None
    return figures.extra.get(name) if value is None else value


def cases_of(transport: str) -> Sequence[Case]:
    """All cases of a transport."""
    return LANE_CASES if transport == "shm" else CASES


def select(names: Sequence[str], transport: str = "zmq") -> list[Case]:
    """Cases of these workloads over that transport; without names all that can run here.

    Raises InvalidArgument, or FailedPrecondition for one that was named and cannot run here.
    """
    for name in names:
        find(name)
    cases = cases_of(transport)
    chosen = [case for case in cases if not names or case.workload in names]
    for name in names:
        require_present(name)
    if not names:
        chosen = [case for case in chosen if not find(case.workload).why_absent()]
    if not chosen:
        known = ", ".join(name for name in WORKLOADS if any(c.workload == name for c in cases))
        raise InvalidArgument(f"{', '.join(names)} has no floor; those that have: {known}")
    for case in chosen if names else ():
        if reason := case.why_absent():
            raise FailedPrecondition(f"{case.what!r} cannot be checked here: {reason}")
    return [case for case in chosen if not case.why_absent()]


def reference_plan(plan: Plan) -> Plan:
    """The reference that moves as many bytes as a plan."""
    messages = min(plan.messages, max(1, REFERENCE_BYTES_MAX // plan.message_bytes))
    return planned("reference", messages=messages, message_bytes=plan.message_bytes)


def echo_plan(plan: Plan) -> Plan:
    """The echo that sends as many messages, at the same pace or from as many clients."""
    changes: dict[str, Any] = {"messages": plan.messages, "message_bytes": plan.message_bytes}
    if plan.rate:
        changes["rate"] = plan.rate
    else:
        changes |= {"producers": plan.producers, "clients": plan.clients}
    return planned("echo", **changes)


def measure(rig: Rig, plan: Plan) -> Figures:
    """One run of a plan, after one of raw ZeroMQ where that says something."""
    is_large = plan.messages * plan.message_bytes >= REST_FROM_BYTES
    if is_large and plan.workload not in _OWN and not plan.workload.startswith("history-"):
        rig.broker(plan).rest()
    raw = None
    if plan.workload in _COMPARED and not plan.rate:
        raw = WORKLOADS["reference"].run(rig, reference_plan(plan))
    elif plan.workload in _ECHOED:
        raw = WORKLOADS["echo"].run(rig, echo_plan(plan))
    figures = WORKLOADS[plan.workload].run(rig, plan)
    for name in () if raw is None else ("messages_per_s",) if raw.p50_us is None else _TIMES:
        figures.extra[f"reference_{name}"] = getattr(raw, name)
    if plan.workload == "requests" and NATS.absence() is None:
        _compare_with_nats(rig, plan, figures)
    rate = figures.extra.get("reference_messages_per_s")
    if rate and figures.messages_per_s:
        figures.vs_reference = figures.messages_per_s / rate
    return figures


def _compare_with_nats(rig: Rig, plan: Plan, figures: Figures) -> None:
    """Run the same requests by NATS core, and note how ours compare."""
    with Bench.of(rig, NATS, NATS.variants[0]) as bench:
        theirs = bench.run(plan)
    for name in _TIMES:
        figures.extra[f"nats_{name}"] = getattr(theirs, name)
    figures.extra["vs_nats"] = (figures.p50_us or 0.0) / (theirs.p50_us or 1.0)


def check(
    rig: Rig,
    cases: Sequence[Case],
    runs: int,
    changes: Mapping[str, Any],
    on_run: Callable[[Case, Figures], None],
) -> list[list[Figures]]:
    """Run every case once in each round, each time on a fresh broker; figures of each case."""
    measured: list[list[Figures]] = [[] for _ in cases]
    for _ in range(runs):
        for case, found in zip(cases, measured, strict=True):
            found.append(measure(rig, case.plan(**changes)))
            on_run(case, found[-1])
            rig.drop_broker()
    return measured


def verdicts(cases: Sequence[Case], measured: Sequence[Sequence[Figures]]) -> list[Verdict]:
    """Medians against floors; a run that lost or changed messages misses its floor."""
    found = []
    for case, runs in zip(cases, measured, strict=True):
        is_faultless = all(figures.is_faultless for figures in runs)
        ratio = _median([figures.vs_reference for figures in runs])
        for floor in case.floors:
            median = _median([value_of(figures, floor.figure) for figures in runs])
            raw = _median([figures.extra.get(f"reference_{floor.figure}") for figures in runs])
            is_met = is_faultless and floor.is_met(median)
            found.append(Verdict(case, floor, median, ratio, raw, is_met))
    return found


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
