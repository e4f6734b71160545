"""What one run is asked to do, and what it found out: the two structs that everything here passes on."""

from __future__ import annotations

from typing import Any

import msgspec

from danube_fast.client.values.arguments import Transport
from danube_fast.config import Settings
from danube_fast.version import VERSION

__all__ = ["LISTS", "NON_RELIABLE", "ONE_BY_ONE", "WARM_SETTINGS", "Figures", "Plan", "client_of"]

LISTS, ONE_BY_ONE = "lists", "one by one"
"""How a client is given its messages."""
_EACH = (
    "messages", "topics", "publishers", "publish-latency", "latency", "requests", "isolation", "echo",
)  # fmt: skip
"""Workloads whose producers are given one at a time."""

NON_RELIABLE = "non_reliable"
"""Stands where a durability would: such a topic has none."""

WARM_SETTINGS = {
    "retention_seconds_min": 1,
    "spare_segments": 8,
    "segment_start_bytes": Settings().segment_bytes,
}
"""What is read goes at once, and its segments are used again, all of them of full size."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one workload, every number settled."""

    workload: str
    transport: Transport = "zmq"
    durability: str = "fsync"
    """memory, os, fsync, or NON_RELIABLE."""
    message_bytes: int = 100
    messages: int = 0
    prepared: int = 0
    """Messages made before the clock starts, a part of `messages` that goes into it without a rest: they
    are sent in turn (`send_many` alone does so). 0: every message is made."""
    rate: float = 0.0
    """Messages a second of an open loop; 0: closed loop."""
    producers: int = 1
    consumers: int = 1
    topics: int = 1
    clients: int = 1
    log_bytes: int = 0
    watch_seconds: float = 0.0
    """How much of the span of due times is waited for; 0: all of it."""
    spin_us: int = 0
    """How long workers and clients look on before they sleep."""
    warm: bool = False
    """Segments of the log are used again, after a first run that is not counted."""
    broker: dict[str, Any] = {}
    """Settings of the broker that a workload or a sweep needs."""

    @property
    def is_reliable(self) -> bool:
        """Whether everything must arrive."""
        return self.durability != NON_RELIABLE

    @property
    def settings(self) -> dict[str, Any]:
        """What the broker is told beside its defaults."""
        settings = {"spin_us": self.spin_us} if self.spin_us else {}
        return settings | (WARM_SETTINGS if self.warm else {}) | self.broker

    @property
    def topic_options(self) -> dict[str, str]:
        """What `client.producer()` is told about the topic."""
        if self.is_reliable:
            return {"dispatch": "reliable", "durability": self.durability}
        return {"dispatch": NON_RELIABLE}


class Figures(msgspec.Struct, kw_only=True):
    """The JSON line of a run. None: not measured by this workload."""

    system: str = "danube-fast"
    version: str = VERSION
    workload: str
    transport: str | None = None
    durability: str | None = None
    message_bytes: int | None = None
    messages: int | None = None
    messages_per_s: float | None = None
    mb_per_s: float | None = None
    p50_us: float | None = None
    """Latency from the actual send."""
    p99_us: float | None = None
    p999_us: float | None = None
    syncs: int | None = None
    bytes_per_sync: float | None = None
    lost: int | None = None
    duplicated: int | None = None
    corrupted: int | None = None
    broker_cpu_s: float | None = None
    client_cpu_s: float | None = None
    broker_rss_mb: float | None = None
    window: int | None = None
    """Bytes that a closed loop keeps unacked at most, for each producer; 1 message: one by one."""
    rate: float | None = None
    """Messages a second of an open loop."""
    client: str = LISTS
    """LISTS or ONE_BY_ONE."""
    vs_reference: float | None = None
    """`messages_per_s` divided by that of raw ZeroMQ in the same run."""
    extra: dict[str, float] = {}
    """What only this workload measures."""

    @property
    def is_faultless(self) -> bool:
        """Nothing doubled or changed, and nothing lost beyond what the dispatch allows."""
        share = LOST_SHARE_MAX if self.durability == NON_RELIABLE else 0.0
        lost_max = share * (self.messages or 0)
        return not self.duplicated and not self.corrupted and (self.lost or 0) <= lost_max


LOST_SHARE_MAX = 0.001
"""What a non_reliable run may lose."""


def client_of(workload: str) -> str:
    """LISTS or ONE_BY_ONE."""
    return ONE_BY_ONE if workload in _EACH else LISTS
