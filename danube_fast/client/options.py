"""Options of producers and consumers, checked before anything is sent."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from danube_fast.client.limits import (
    BATCH_BYTES_DEFAULT,
    BATCH_BYTES_MAX,
    LINGER_US_DEFAULT,
    PERMITS_BYTES_DEFAULT,
    PERMITS_MESSAGES_DEFAULT,
    SEND_TIMEOUT_SECONDS,
    WINDOW_BYTES_DEFAULT,
)
from danube_fast.errors import FailedPrecondition, InvalidArgument
from danube_fast.frame.layout import Codec

__all__ = [
    "READER",
    "ConsumerOptions",
    "Position",
    "ProducerOptions",
    "checked_position",
    "subscribe_options",
]

READER = "reader"
"""Subscription type of readers: no cursor, no acks."""
_TYPES = ("exclusive", "shared", "failover", "key_shared", READER)
_CODECS = {None: Codec.NONE, "none": Codec.NONE, "lz4": Codec.LZ4, "zstd": Codec.ZSTD}
_BATCH_BYTES_MIN = 4096
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_AGO = re.compile(r"-(\d{1,9})([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
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
            batch_bytes_max = max(_BATCH_BYTES_MIN, min(BATCH_BYTES_DEFAULT, window_bytes_max))
        if not _BATCH_BYTES_MIN <= batch_bytes_max <= BATCH_BYTES_MAX:
            raise InvalidArgument(
                f"batch_bytes_max is {batch_bytes_max}; choose {_BATCH_BYTES_MIN} to "
                f"{BATCH_BYTES_MAX}"
            )
        if window_bytes_max < batch_bytes_max:
            raise InvalidArgument("window_bytes_max must be at least batch_bytes_max; raise it")
        if linger_us < 0 or timeout <= 0:
            raise InvalidArgument("linger_us must not be negative and timeout must be positive")
        if compression not in _CODECS:
            raise InvalidArgument(f"compression {compression!r} is unknown; use lz4, zstd or None")
        if schema is not None:
            raise FailedPrecondition(
                "schemas are not served yet; publish without schema= and encode payloads yourself"
            )
        self.linger_ns = int(linger_us * 1000)
        self.batch_bytes = batch_bytes_max
        self.window_bytes = window_bytes_max
        self.timeout_ns = int(timeout * 1e9)
        self.codec = _CODECS[compression]


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
        if self.type not in _TYPES:
            raise InvalidArgument(
                f"type={self.type!r} is unknown; use exclusive, shared, failover or key_shared"
            )
        if self.options.get("key_filters") and self.type != "key_shared":
            raise InvalidArgument("key_filters= choose among keys; use them with type='key_shared'")
        if not self.subscription and self.type != READER:
            raise InvalidArgument("a consumer needs subscription=; name the cursor it advances")
        if self.permits_bytes <= 0 or self.permits_messages <= 0:
            raise InvalidArgument("permits_bytes and permits_messages must be positive; raise them")
        return self._replace(position=checked_position(self.position))


def subscribe_options(
    key_filters: Sequence[str] | None, failure_policy: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What SUBSCRIBE has in `options`. Raises InvalidArgument."""
    options: dict[str, Any] = {}
    if key_filters is not None:
        if isinstance(key_filters, str) or not all(isinstance(f, str) for f in key_filters):
            raise InvalidArgument("key_filters is a list of globs, such as ['pay*', 'eu-?']")
        options["key_filters"] = list(key_filters)
    if failure_policy is not None:
        options["failure_policy"] = dict(failure_policy)
    return options


def checked_position(position: Any) -> Position:
    """A position as SUBSCRIBE and SEEK have it. Raises InvalidArgument."""
    if isinstance(position, str) and position in ("earliest", "latest"):
        return position
    if type(position) is int and position >= 0:
        return position
    if isinstance(position, dict) and [*position] == ["last"]:
        last = position["last"]
        if type(last) is int and 0 <= last < 1 << 62:
            return {"last": last}
    if isinstance(position, dt.timedelta):
        return {"ago_ns": _whole_ns(abs(position))}
    if isinstance(position, str):
        position = parse_time(position)
        if isinstance(position, dt.timedelta):
            return {"ago_ns": _whole_ns(position)}
    if isinstance(position, dt.datetime):
        moment = position if position.tzinfo else position.astimezone()
        return {"time_ns": max(0, _whole_ns(moment - _EPOCH))}
    raise InvalidArgument(
        f"{position!r} is not a position; use 'earliest', 'latest', an offset of at least 0, a "
        "datetime, an RFC 3339 time, a time ago such as '-10m', or {'last': n} messages"
    )


def _whole_ns(span: dt.timedelta) -> int:
    return span // dt.timedelta(microseconds=1) * 1000


def parse_time(text: str) -> dt.datetime | dt.timedelta | None:
    """'-10m' as a timedelta of ten minutes, an RFC 3339 time as a datetime; None for anything else."""
    ago = _AGO.fullmatch(text)
    if ago:
        return dt.timedelta(**{_UNITS[ago[2]]: int(ago[1])})
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if "T" in text or " " in text else None
