"""Options of producers and consumers, checked before anything is sent."""

from __future__ import annotations

import datetime as dt
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

from danube_fast.checks import (
    check_choice,
    check_mapping,
    check_names,
    check_seconds,
    check_text,
    check_time_ns,
    check_whole,
    parse_amount,
)
from danube_fast.client.values.arguments import FailurePolicyFields, SubscriptionType
from danube_fast.client.values.limits import (
    BATCH_BYTES_DEFAULT,
    BATCH_BYTES_MAX,
    BATCH_BYTES_MIN,
    LINGER_US_DEFAULT,
    PERMITS_BYTES_DEFAULT,
    PERMITS_MESSAGES_DEFAULT,
    SEND_TIMEOUT_SECONDS,
    WINDOW_BYTES_DEFAULT,
)
from danube_fast.errors import FailedPrecondition, InvalidArgument
from danube_fast.frame.layout import Codec
from danube_fast.types import Dispatch, Durability, check_settings

__all__ = [
    "READER",
    "TYPES",
    "ConsumerOptions",
    "Position",
    "ProducerOptions",
    "checked_position",
    "checked_settings",
    "subscribe_options",
]

READER = "reader"
"""Subscription type of readers: no cursor, no acks."""
TYPES = get_args(SubscriptionType)
_CODECS = {None: Codec.NONE, "none": Codec.NONE, "lz4": Codec.LZ4, "zstd": Codec.ZSTD}
_POSITION_MAX = (1 << 62) - 1
"""Offsets, and nanoseconds: until the year 2116."""
_TEXT_BYTES_MAX = 1024
Position = str | int | dict[str, int]
"""Earliest, latest, an offset, {"time_ns": t}, {"ago_ns": n} or {"last": n}."""


class ProducerOptions:
    """Checked options of `client.producer()`. Raises InvalidArgument, FailedPrecondition."""

    def __init__(
        self,
        *,
        linger_us: int = LINGER_US_DEFAULT,
        batch_bytes_max: int | None = None,
        window_bytes_max: int = WINDOW_BYTES_DEFAULT,
        timeout: float = SEND_TIMEOUT_SECONDS,
        compression: str | None = None,
        schema: object = None,
    ) -> None:
        if batch_bytes_max is None:  # a small window makes smaller batches
            window = check_whole(window_bytes_max, "window_bytes_max", 1)
            batch_bytes_max = max(BATCH_BYTES_MIN, min(BATCH_BYTES_DEFAULT, window))
        batch_bytes = check_whole(
            batch_bytes_max, "batch_bytes_max", BATCH_BYTES_MIN, BATCH_BYTES_MAX
        )
        if check_whole(window_bytes_max, "window_bytes_max", 1) < batch_bytes:
            raise InvalidArgument("window_bytes_max must be at least batch_bytes_max; raise it")
        linger_seconds = check_seconds(linger_us, "linger_us")
        if linger_seconds < 0:
            raise InvalidArgument(f"linger_us is {linger_us}; choose 0 or more microseconds")
        timeout_seconds = check_seconds(timeout, "timeout", is_positive=True)
        check_choice(compression, "compression", _CODECS)
        if schema is not None:
            raise FailedPrecondition(
                "schemas are not served yet; publish without schema= and encode payloads yourself"
            )
        self.linger_ns = int(linger_us * 1000)
        self.batch_bytes = batch_bytes
        self.window_bytes = window_bytes_max
        self.timeout_ns = int(timeout_seconds * 1e9)
        self.codec = _CODECS[compression]


def checked_settings(dispatch: Any, durability: Any, partitions: Any) -> dict[str, Any]:
    """Return the settings of a topic that were given. Raises InvalidArgument."""
    if dispatch is not None:
        check_choice(dispatch, "dispatch", [mode.value for mode in Dispatch])
    if durability is not None:
        check_choice(durability, "durability", [mode.value for mode in Durability])
    if partitions is not None:
        partitions = check_whole(partitions, "partitions", 0)
    check_settings(dispatch, durability)
    asked = {"dispatch": dispatch, "durability": durability, "partitions": partitions}
    return {option: value for option, value in asked.items() if value is not None}


class ConsumerOptions(NamedTuple):
    """Options of `client.consumer()` and `client.reader()`."""

    subscription: str
    type: str
    position: Any
    name: str
    permits_bytes: int = PERMITS_BYTES_DEFAULT
    permits_messages: int = PERMITS_MESSAGES_DEFAULT
    options: dict[str, Any] = {}
    pattern: str | None = None
    """Topics of a namespace, also those to come."""

    def checked(self) -> ConsumerOptions:
        """Raise InvalidArgument for what cannot be."""
        check_choice(self.type, "type", TYPES if self.type != READER else (READER,))
        if self.options.get("key_filters") and self.type != "key_shared":
            raise InvalidArgument("key_filters= choose among keys; use them with type='key_shared'")
        if self.type != READER:
            if not self.subscription and isinstance(self.subscription, str | None):
                raise InvalidArgument("a consumer needs subscription=; name the cursor it advances")
            check_text(self.subscription, "subscription")
        check_text(self.name, "name")
        check_whole(self.permits_bytes, "permits_bytes", 1)
        check_whole(self.permits_messages, "permits_messages", 1)
        return self._replace(position=checked_position(self.position))


def subscribe_options(
    key_filters: Sequence[str] | None, failure_policy: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the `options` of SUBSCRIBE. Raises InvalidArgument."""
    options: dict[str, Any] = {}
    if key_filters is not None:
        if not isinstance(key_filters, list | tuple | set | frozenset):
            raise InvalidArgument(
                "key_filters is a list of globs, such as ['pay*', 'eu-?'], not "
                f"{key_filters!r:.100}"
            )
        options["key_filters"] = [check_text(glob, "a key filter") for glob in key_filters]
    if failure_policy is not None:
        values = check_mapping(failure_policy, "failure_policy")
        check_names(values, FailurePolicyFields.__annotations__, "failure_policy")
        for field, value in values.items():
            if isinstance(value, str) and value:
                check_text(value, f"failure_policy: {field}", bytes_max=_TEXT_BYTES_MAX)
            elif isinstance(value, int):
                check_whole(value, f"failure_policy: {field}", 0)
            elif not isinstance(value, str | None):
                raise InvalidArgument(f"failure_policy: {field} cannot be {value!r:.100}")
        options["failure_policy"] = values
    return options


def checked_position(position: Any) -> Position:
    """Return a position as SUBSCRIBE and SEEK have it. Raises InvalidArgument."""
    given = position
    if isinstance(position, str):
        if position in ("earliest", "latest"):
            return position
        position = parse_time(position)
    if _is_count(position):
        return int(position)
    if isinstance(position, dict) and [*position] == ["last"] and _is_count(position["last"]):
        return {"last": int(position["last"])}
    if isinstance(position, dt.timedelta):
        ago_ns = abs(position) // dt.timedelta(microseconds=1) * 1000
        return {"ago_ns": min(ago_ns, _POSITION_MAX)}
    if isinstance(position, dt.datetime):
        time_ns = check_time_ns(position, "a position in time", high=_POSITION_MAX)
        return {"time_ns": max(0, time_ns)}
    raise InvalidArgument(
        f"{given!r:.100} is not a position; use 'earliest', 'latest', an offset of at least 0, a "
        "datetime, an RFC 3339 time, a time ago such as '-10m', or {'last': n} messages"
    )


def _is_count(value: Any) -> bool:
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_whole and 0 <= int(value) <= _POSITION_MAX


def parse_time(text: str) -> dt.datetime | dt.timedelta | None:
    """Return '-10m' as a timedelta of ten minutes, an RFC 3339 time as a datetime; None for anything else."""
    ago_us = parse_amount("us", text[1:]) if text[:1] == "-" and text[-1:].isalpha() else None
    try:
        if ago_us is not None:
            return dt.timedelta(microseconds=ago_us)
        moment = dt.datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        return None
    return moment if "T" in text or " " in text else None
