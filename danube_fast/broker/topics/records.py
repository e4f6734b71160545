"""Records of topics, partitions and namespaces in the metadata; and what may be asked of a new topic.

Records are JSON in the metadata store: small, seldom written, and readable by a person who looks
for a fault. A field may be added with a default; a reader ignores fields that it does not know.
"""

from __future__ import annotations

from typing import Any

import msgspec

from danube_fast.checks import in_our_words
from danube_fast.errors import InvalidArgument
from danube_fast.types import Dispatch, Durability, check_settings, partition_topic

__all__ = [
    "Extent",
    "NamespaceRecord",
    "PartitionRecord",
    "TopicOptions",
    "TopicRecord",
    "parse_dispatch",
    "parse_durability",
]

OPEN_END = -1


class Extent(msgspec.Struct, array_like=True, frozen=True):
    """Offsets `first_offset` to `last_offset` lie in a log; `last_offset` -1: and all that follow."""

    log_id: int
    epoch: int
    first_offset: int
    last_offset: int = OPEN_END


class PartitionRecord(msgspec.Struct, frozen=True):
    """One partition: whose it is and where its messages are, oldest extent first."""

    partition_id: int
    topic: str
    index: int
    extents: list[Extent]
    owner_epoch: int = 1

    @property
    def log_id(self) -> int:
        """The log that it is written to."""
        return self.extents[-1].log_id


class TopicRecord(msgspec.Struct, frozen=True):
    """One topic. A topic of the same name made later has another incarnation."""

    topic: str
    incarnation: int
    dispatch: str
    durability: str
    partitioned: bool
    partition_ids: list[int]
    created_ns: int
    epoch: int = 1
    """One more with every change of its settings."""
    policy: dict[str, Any] = {}
    """Values of its own; see policy.py."""
    owner: str = ""
    """Principal that made it, of a reply topic in a secured broker: no other reads it."""

    def partition_topic(self, index: int) -> str:
        """Name of one of its partitions."""
        return partition_topic(self.topic, index, len(self.partition_ids) * self.partitioned)


class NamespaceRecord(msgspec.Struct, frozen=True):
    """One namespace."""

    namespace: str
    created_ns: int
    policy: dict[str, Any] = {}
    """Values for its topics."""
    quota: dict[str, Any] = {}
    """Values for all its topics together; see quota.py."""


class TopicOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The choices of a topic's creator. None: the default, or what the topic has already."""

    dispatch: str | None = None
    durability: str | None = None
    partitions: int | None = None
    """0: not partitioned."""

    @classmethod
    def parse(cls, options: dict[str, Any]) -> TopicOptions:
        """Options from the wire. Raises InvalidArgument for unknown ones and wrong values."""
        try:
            parsed = msgspec.convert(options, cls)
        except msgspec.ValidationError as error:
            raise InvalidArgument(
                f"{in_our_words(error, 'topic options')}; known are dispatch, durability, partitions"
            ) from None
        parse_dispatch(parsed.dispatch)
        parse_durability(parsed.durability)
        check_settings(parsed.dispatch, parsed.durability)
        return parsed


def parse_dispatch(text: str | None) -> Dispatch:
    """The dispatch mode named by `text`; reliable for None. Raises InvalidArgument."""
    try:
        return Dispatch(text) if text is not None else Dispatch.RELIABLE
    except ValueError:
        raise InvalidArgument(f"dispatch {text!r} is neither reliable nor non_reliable") from None


def parse_durability(text: str | None) -> Durability:
    """The durability named by `text`; fsync for None. Raises InvalidArgument."""
    try:
        durability = Durability(text) if text is not None else Durability.FSYNC
    except ValueError:
        raise InvalidArgument(f"durability {text!r} is none of memory, os, fsync") from None
    if durability is Durability.OBJECT:
        raise InvalidArgument(
            "durability 'object' needs a history, which this broker does not have; use fsync"
        )
    return durability
