"""Types of the arguments of the public API, for type checkers and editors; nothing is checked by them.

`options.py` checks the values when a call is made.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

__all__ = [
    "Compression",
    "ConsumerArguments",
    "DispatchMode",
    "DurabilityLevel",
    "FailurePolicyFields",
    "Moment",
    "ProducerArguments",
    "PublishArguments",
    "Start",
    "SubscriptionType",
    "Transport",
]

DispatchMode = Literal["reliable", "non_reliable"]
DurabilityLevel = Literal["memory", "os", "fsync"]
SubscriptionType = Literal["exclusive", "shared", "failover", "key_shared"]
Transport = Literal["auto", "zmq", "shm"]
Compression = Literal["none", "lz4", "zstd"]
Start = str | int | dt.datetime | dt.timedelta | dict[str, int]
"""A position: "earliest", "latest", an offset, a datetime, an RFC 3339 time, a time ago as a timedelta or
such as "-10m", or {"last": n} messages."""
Moment = int | dt.datetime
"""Nanoseconds since the epoch, or a datetime."""


class FailurePolicyFields(TypedDict, total=False):
    """Failure policy of a subscription; fields and defaults as in tuning.md. Times in milliseconds."""

    max_redelivery_count: int
    ack_timeout_ms: int
    base_redelivery_delay_ms: int
    max_redelivery_delay_ms: int
    backoff_strategy: Literal["fixed", "exponential"]
    poison_policy: Literal["block", "drop", "dead_letter"]
    dead_letter_topic: str


class ProducerArguments(TypedDict, total=False):
    """Options of `client.producer()` that tune it."""

    linger_us: int
    """How long a batch stays open while something is unacked, in microseconds (200)."""
    batch_bytes_max: int
    """Size of a batch (1 MiB)."""
    window_bytes_max: int
    """How many bytes may be unacked."""
    timeout: float
    """Seconds until an unacked message is an error (30)."""
    compression: Compression | None
    schema: None


class PublishArguments(TypedDict, total=False):
    """Fields of a message beside its payload."""

    key: bytes | str | None
    attributes: Mapping[str, str] | None
    event_time: Moment | None
    deliver_at: Moment | None
    deliver_after: float | None


class ConsumerArguments(TypedDict, total=False):
    """Options of `client.subscribe()` that go to its consumer; see `client.consumer()`."""

    initial_position: Start
    name: str | None
    timeout: float
    pattern: str | None
    permits_bytes: int
    permits_messages: int
    key_filters: Sequence[str] | None
    failure_policy: FailurePolicyFields | None
