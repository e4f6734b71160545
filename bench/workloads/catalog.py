"""Every workload: what it is called, what it runs, what it is given when nobody says otherwise."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, NamedTuple

from danube_fast.bench.load.rig import Rig
from danube_fast.bench.load.zmtp import why_no_sodium
from danube_fast.bench.plan import Figures, Plan
from danube_fast.bench.workloads import (
    crowd,
    delayed,
    echo,
    lapped,
    latency,
    promotion,
    rates,
    reference,
    requests,
    share,
    soak,
    standing,
    sustained,
    unacked,
)
from danube_fast.bench.workloads.history import offset, publish, reads, turns, upload
from danube_fast.bench.workloads.history.stores import why_no_seaweed
from danube_fast.bench.workloads.security import answers, auth, curve, handshakes, policy
from danube_fast.bench.workloads.spark import exporting, scan
from danube_fast.errors import FailedPrecondition, InvalidArgument

__all__ = ["EVERYWHERE", "WORKLOADS", "Workload", "find", "planned"]
__all__ += ["require_present"]

REQUESTS_MIN = 2
GB = 1_000_000_000


class Workload(NamedTuple):
    """One of them."""

    what: str
    run: Callable[[Rig, Plan], Figures]
    defaults: dict[str, Any]
    takes: frozenset[str]
    """Fields of the plan that a user may choose."""
    why_absent: Callable[[], str] = lambda: ""
    """Why it cannot run on this machine; empty if it can."""


EVERYWHERE = frozenset({"transport", "spin_us"})
"""Fields of the plan that a user may choose for any workload."""
_STREAM = frozenset(
    {"durability", "message_bytes", "messages", "seconds", "producers", "rate", "warm"}
)
_SHARE = frozenset({"durability", "message_bytes", "messages", "consumers"})
_HISTORY = frozenset({"message_bytes", "messages"})
_SECURED = frozenset({"durability", "message_bytes", "messages"})
_PACED = frozenset({"durability", "message_bytes", "messages", "seconds", "rate"})

WORKLOADS: dict[str, Workload] = {
    "throughput": Workload(
        "send_many and receive_batch, one process each",
        rates.run_batches, {"messages": 5_000_000}, _STREAM | {"consumers"},
    ),
    "messages": Workload(
        "send(), receive() and ack() of every message alone",
        rates.run_each, {"messages": 1_000_000}, _STREAM | {"consumers"},
    ),
    "topics": Workload(
        "one process, a producer for each topic, send() in turn; one list consumer",
        rates.run_topics, {"messages": 1_000_000, "topics": 1000},
        (_STREAM | {"topics"}) - {"producers"},
    ),
    "publishers": Workload(
        "clients that publish() one by one, each to its own topic: acks per second",
        rates.run_publishers, {"messages": 64_000, "producers": 4, "clients": 64},
        frozenset({"durability", "message_bytes", "messages", "seconds", "producers", "clients"}),
    ),
    "fanout": Workload(
        "one producer, eight exclusive consumers in processes of their own, their sum",
        rates.run_batches, {"messages": 1_000_000, "consumers": 8}, _STREAM | {"consumers"},
    ),
    "merge": Workload(
        "four producer processes into one topic, one consumer",
        rates.run_merge, {"messages": 4_000_000, "producers": 4}, _STREAM - {"rate", "seconds"},
    ),
    "shared": Workload(
        "keyed messages to four consumers on one shared subscription, beside one exclusive consumer",
        share.run_share, {"messages": 2_000_000, "consumers": 4}, _SHARE,
    ),
    "key-shared": Workload(
        "the same on a key_shared subscription, 10,000 keys",
        share.run_share, {"messages": 2_000_000, "consumers": 4}, _SHARE,
    ),
    "failover": Workload(
        "the active consumer of a failover subscription, beside one exclusive consumer",
        share.run_failover, {"messages": 2_000_000, "durability": "os"}, _SHARE - {"consumers"},
    ),
    "acks": Workload(
        "each message acked by itself, beside the same with batch acks",
        share.run_acks, {"messages": 2_000_000, "durability": "os"}, _SHARE - {"consumers"},
    ),
    "promotion": Workload(
        "SIGKILL and SIGSTOP of the active consumer under load, until the standby has a message",
        promotion.run_promotion, {"messages": 200_000, "rate": 1000.0},
        frozenset({"durability", "message_bytes", "messages", "rate"}),
    ),
    "delayed": Workload(
        "random due times over `messages / rate` seconds, the worker killed in the middle: lateness",
        delayed.run_delayed, {"messages": 100_000, "rate": 5000.0},
        frozenset({"durability", "message_bytes", "messages", "seconds", "rate", "watch_seconds"}),
    ),
    "unacked": Workload(
        "all held by 100 subscriptions, then every second message acked at random: a worker's memory",
        unacked.run_unacked, {"messages": 100_000, "consumers": 100}, _SHARE,
    ),
    "crowd": Workload(
        "a subscription on each of thousands of topics: stop or SIGKILL, start, first message",
        crowd.run_crowd, {"topics": 10_000},
        frozenset({"durability", "message_bytes", "topics"}),
    ),
    "sustained": Workload(
        "fsync over gigabytes of log, then bare pwrite and fdatasync of groups as large",
        sustained.run_sustained, {"log_bytes": 4 * GB}, frozenset({"message_bytes", "log_bytes"}),
    ),
    "lapped": Workload(
        "a consumer behind by more than memory and credit hold, until it is at the tail",
        lapped.run_lapped, {"messages": 5_000_000, "rate": 200_000.0},
        frozenset({"message_bytes", "messages", "rate"}),
    ),
    "publish-latency": Workload(
        "publish() at a pace, until the ack",
        latency.run_publish_latency, {"messages": 5_000, "rate": 1000.0}, _PACED,
    ),
    "latency": Workload(
        "publish() at a pace, until receive() has it",
        latency.run_latency, {"messages": 5_000, "rate": 1000.0}, _PACED,
    ),
    "requests": Workload(
        "request() until its reply: half of them at a pace, the others back to back",
        requests.run_requests, {"messages": 10_000, "rate": 1000.0}, _PACED,
    ),
    "isolation": Workload(
        "non_reliable latency while a neighbour publishes in a loop, against quiet",
        latency.run_isolation,
        {"messages": 5_000, "rate": 1000.0, "durability": "non_reliable"}, _PACED,
    ),
    "auth": Workload(
        "lists and publish() on a broker with --auth required, in turns with one without",
        auth.run_auth,
        {"messages": 2_000_000, "durability": "os", "transport": "shm", "warm": True}, _SECURED,
    ),
    "handshakes": Workload(
        "honest clients while a thousand handshakes a second fail, against quiet",
        handshakes.run_handshakes,
        {"messages": 800_000, "rate": 2000.0, "durability": "os"}, _SECURED | {"rate"}, why_no_sodium,
    ),
    "policy": Workload(
        "100,000 bindings: checks, loading, a worker's turns while bindings change",
        policy.run_policy,
        {
            "messages": 400_000, "rate": 200_000.0, "clients": 200, "durability": "os",
            "transport": "shm",
        },
        _SECURED | {"rate", "clients"},
    ),
    "answers": Workload(
        "times of answers about what is forbidden beside what is missing, for a user without rights",
        answers.run_answers, {"messages": 2000}, frozenset({"messages"}),
    ),
    "curve": Workload(
        "raw ZeroMQ over tcp on loopback, CURVE in turns with plain, 1 KiB and 64 KiB",
        curve.run_curve, {"messages": 200_000}, frozenset({"messages"}),
    ),
    "ready": Workload(
        "serve --workers 2 until its ready line", standing.run_ready, {}, frozenset()
    ),
    "recovery": Workload(
        "SIGKILL of all under load, until the first read",
        standing.run_recovery,
        {"topics": 200, "message_bytes": 1000, "log_bytes": GB // 4},
        frozenset({"topics", "message_bytes", "log_bytes", "durability"}),
    ),
    "idle": Workload(
        "4 workers and clients that do nothing: CPU and memory",
        standing.run_idle, {"topics": 1000, "clients": 50}, frozenset({"topics", "clients"}),
    ),
    "readback": Workload(
        "one of many partitions read back from the log",
        standing.run_readback,
        {"topics": 1000, "durability": "os", "log_bytes": GB // 4},
        frozenset({"topics", "log_bytes"}),
    ),
    "soak": Workload(
        "clients, topics and workers come and go: nothing lost, memory and descriptors flat",
        soak.run_soak, {"messages": 40_000, "rate": 2000.0},
        frozenset({"durability", "message_bytes", "messages", "seconds", "rate"}),
    ),
    "history-upload": Workload(
        "messages that go from the log into a folder, beside a bare loop over the same frames",
        upload.run_upload, {"messages": 1_000_000, "message_bytes": 1024}, _HISTORY,
    ),
    "history-upload-s3": Workload(
        "the same into SeaweedFS, beside boto3 alone",
        upload.run_upload_s3, {"messages": 500_000, "message_bytes": 1024}, _HISTORY, why_no_seaweed,
    ),
    "history-publish": Workload(
        "send_many with fsync while the uploader is busy, beside the same without",
        publish.run_publish, {"messages": 500_000, "message_bytes": 1024}, _HISTORY,
    ),
    "history-lapped": Workload(
        "a lapped consumer whose backlog is in a folder, not in the log, beside the same in the log",
        reads.run_history_lapped, {"messages": 5_000_000, "rate": 200_000.0}, _HISTORY | {"rate"},
    ),
    "history-seam": Workload(
        "one consumer of messages that are half in a folder, beside one of the log alone",
        reads.run_seam, {"messages": 5_000_000}, _HISTORY,
    ),
    "history-offset": Workload(
        "a reader at an offset in the middle of many objects, until its first message",
        offset.run_offset, {"messages": 10_000}, _HISTORY,
    ),
    "history-offset-s3": Workload(
        "the same in SeaweedFS: round trips",
        offset.run_offset_s3, {"messages": 10_000}, _HISTORY, why_no_seaweed,
    ),
    "history-turns": Workload(
        "turns of a worker while 8 consumers read history, beside those while they read the log",
        turns.run_turns, {"messages": 1_000_000, "message_bytes": 1024, "consumers": 8},
        _HISTORY | {"consumers"},
    ),
    "spark-scan": Workload(
        "Spark reads the history of a topic, beside the same rows in Parquet",
        scan.run_scan, {"messages": 20_000_000}, _HISTORY, scan.why_no_spark,
    ),
    "spark-export": Workload(
        "a topic becomes Parquet, as `danube-fast export` writes it",
        exporting.run_export_row, {"messages": 20_000_000}, _HISTORY, scan.why_no_spark,
    ),
    "reference": Workload(
        "raw ZeroMQ without a broker, the same bytes",
        reference.run_reference, {"messages": 5_000_000},
        frozenset({"message_bytes", "messages"}),
    ),
    "echo": Workload(
        "raw ZeroMQ without a broker, one message at a time, there and back",
        echo.run_echo, {"messages": 64_000, "producers": 4, "clients": 64},
        frozenset({"message_bytes", "messages", "producers", "clients", "rate"}),
    ),
}  # fmt: skip


def find(name: str) -> Workload:
    """A workload by name. Raises InvalidArgument that names the nearest."""
    workload = WORKLOADS.get(name)
    if workload is None:
        near = difflib.get_close_matches(name, WORKLOADS, 1, 0.4)
        hint = f"did you mean {near[0]!r}?" if near else "choose among them"
        raise InvalidArgument(f"there is no workload {name!r}; {hint} ({', '.join(WORKLOADS)})")
    return workload


def require_present(name: str) -> None:
    """Raise FailedPrecondition if a workload cannot run on this machine."""
    reason = find(name).why_absent()
    if reason:
        raise FailedPrecondition(f"{name} cannot run here: {reason}")


def planned(name: str, **changes: Any) -> Plan:
    """The plan of a workload with what was chosen. Raises InvalidArgument for what it cannot take."""
    workload = find(name)
    for field in changes:
        if field not in EVERYWHERE and field not in workload.takes:
            option = f"--{field.replace('_', '-')}"
            raise InvalidArgument(f"the workload {name} takes no {option}; leave it out")
    plan = Plan(workload=name, **{**workload.defaults, **changes})
    if plan.clients < plan.producers and name in ("publishers", "echo"):
        raise InvalidArgument("--clients must be at least --producers: each process holds some")
    if name == "requests" and plan.messages < REQUESTS_MIN:
        raise InvalidArgument(
            f"--messages must be at least {REQUESTS_MIN}: half of the requests go back to back"
        )
    return plan
