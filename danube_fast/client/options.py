"""Options of producers and consumers, checked before anything is sent."""

from __future__ import annotations

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

__all__ = ["READER", "ConsumerOptions", "ProducerOptions", "checked_position"]

READER = "reader"
"""Subscription type of readers: no cursor, no acks."""
_TYPES = ("exclusive", "shared", READER)
_TYPES_LATER = ("failover", "key_shared")
_CODECS = {None: Codec.NONE, "none": Codec.NONE, "lz4": Codec.LZ4, "zstd": Codec.ZSTD}
_BATCH_BYTES_MIN = 4096


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
    position: str | int
    name: str
    permits_bytes: int = PERMITS_BYTES_DEFAULT
    permits_messages: int = PERMITS_MESSAGES_DEFAULT
    options: dict[str, Any] = {}

    def checked(self) -> ConsumerOptions:
        """Raise InvalidArgument or FailedPrecondition for what cannot be."""
        if self.type in _TYPES_LATER:
            raise FailedPrecondition(
                f"type={self.type!r} is not served yet; use exclusive or shared"
            )
        if self.type not in _TYPES:
            raise InvalidArgument(f"type={self.type!r} is unknown; use exclusive or shared")
        if not self.subscription and self.type != READER:
            raise InvalidArgument("a consumer needs subscription=; name the cursor it advances")
        if self.permits_bytes <= 0 or self.permits_messages <= 0:
            raise InvalidArgument("permits_bytes and permits_messages must be positive; raise them")
        return self._replace(position=checked_position(self.position))


def checked_position(position: Any) -> str | int:
    """Earliest, latest or an offset. Raises InvalidArgument."""
    if position in ("earliest", "latest"):
        return str(position)
    if type(position) is int and position >= 0:
        return position
    raise InvalidArgument(
        f"{position!r} is not a position; use 'earliest', 'latest' or an offset of at least 0"
    )
