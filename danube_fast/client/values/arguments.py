"""Types of the arguments of the public API, for type checkers and editors; nothing is checked by them.

`options.py` checks the values when a call is made.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
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
    "Token",
    "Transport",
]

DispatchMode = Literal["reliable", "non_reliable"]
DurabilityLevel = Literal["memory", "os", "fsync"]
SubscriptionType = Literal["exclusive", "shared", "failover", "key_shared"]
Transport = Literal["auto", "zmq", "shm", "tcp"]
Compression = Literal["none", "lz4", "zstd"]
Start = str | int | dt.datetime | dt.timedelta | dict[str, int]
"""A position: "earliest", "latest", an offset, a datetime, an RFC 3339 time, a time ago as a timedelta or
such as "-10m", or {"last": n} messages."""
Token = str | Callable[[], str]
"""An API key or a JWT, or a function that returns one; called for each sign-on, in a thread of the client."""
Moment = int | dt.datetime
"""Nanoseconds since the epoch, or a datetime."""


class FailurePolicyFields(TypedDict, total=False):
    """Failure policy of a subscription; defaults as in tuning.md. Times in milliseconds."""

    max_redelivery_count: int
    """Failures after which a message comes again; one more, and it is poison."""
    ack_timeout_ms: int
    """An ack that takes longer is a failure. 0: never."""
    base_redelivery_delay_ms: int
    """Pause before the first redelivery."""
    max_redelivery_delay_ms: int
    """The longest pause."""
    backoff_strategy: Literal["fixed", "exponential"]
    """Whether the pause doubles from failure to failure."""
    poison_policy: Literal["block", "drop", "dead_letter"]
    """Whether poison stays unacked, counts as acked, or goes to `dead_letter_topic` first."""
    dead_letter_topic: str
    """A reliable topic other than the subscription's, made if it is missing."""


class ProducerArguments(TypedDict, total=False):
    """Options of `client.producer()` that tune it."""

    linger_us: int
    """How long a batch stays open while something is unacked, in microseconds (200)."""
    batch_bytes_max: int
    """Size of a batch in bytes (1 MiB)."""
    window_bytes_max: int
    """How many bytes may be unacked (16 MiB)."""
    timeout: float
    """Seconds until an unacked message is an error (30)."""
    compression: Compression | None
    """Of batches (none)."""
    schema: None
    """Refused until schemas are served."""


class PublishArguments(TypedDict, total=False):
    """Fields of a message beside its payload."""

    key: bytes | str | None
    """Messages of one key keep their order and share a partition."""
    attributes: Mapping[str, str] | None
    """Text by name."""
    event_time: Moment | None
    """When it happened."""
    deliver_at: Moment | None
    """Consumers get it then."""
    deliver_after: float | None
    """Consumers get it so many seconds later."""


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
