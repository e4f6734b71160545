"""Names that every layer shares: dispatch, durability, subscription types, topic names.

Glossary, used everywhere with one meaning each:
  offset     number of a message in its partition; dense, never reused
  position   byte address in a log; absolute, never restarts
  index      place in a list or array
  count      how many things; size and bytes: how many bytes
  sequence   number of a message among those of one producer on one partition
  epoch      how often an owner of something has changed
"""

from __future__ import annotations

import enum
import fnmatch
import re

from danube_fast.errors import InvalidArgument

__all__ = [
    "AUDIT_TOPIC",
    "AUTH_NONE_TEXT",
    "CLUSTER",
    "REPLY_TOPICS",
    "SYSTEM_NAMESPACE",
    "Dispatch",
    "Durability",
    "Permission",
    "TopicName",
    "TopicPattern",
    "check_namespace",
    "check_settings",
    "glob_front",
    "namespace_front",
    "parse_topic",
    "partition_topic",
]

CLUSTER = "cluster"
"""Text of the scope, and of the resource, that stands for the whole cluster."""
SYSTEM_NAMESPACE = "system"
"""Namespace of the broker's own topics: scopes name it literally or do not cover it."""
REPLY_TOPICS = "/system/reply-"
"""Names of reply topics begin so: each belongs to one client."""
AUDIT_TOPIC = "/system/audit"
"""Topic of the audit log. Written by the broker alone."""
AUTH_NONE_TEXT = "none: all who reach the broker, and every user of its host, may do everything"
"""Says what the setting `auth` means where it is `none`."""


class Dispatch(enum.StrEnum):
    """How a topic treats its messages; fixed when the topic is created."""

    RELIABLE = "reliable"
    NON_RELIABLE = "non_reliable"


class Durability(enum.StrEnum):
    """When a publish to a reliable topic is acknowledged."""

    MEMORY = "memory"
    OS = "os"
    FSYNC = "fsync"
    OBJECT = "object"


class Permission(enum.StrEnum):
    """A right of a principal, on a topic, a namespace or the cluster."""

    LOOKUP = "lookup"
    PRODUCE = "produce"
    CONSUME = "consume"
    MANAGE_NAMESPACE = "manage_namespace"
    MANAGE_TOPIC = "manage_topic"
    MANAGE_SCHEMA = "manage_schema"
    MANAGE_BROKER = "manage_broker"
    MANAGE_CLUSTER = "manage_cluster"


def check_settings(dispatch: str | None, durability: str | None) -> None:
    """Raise InvalidArgument for a durability of messages that are never stored."""
    if dispatch == Dispatch.NON_RELIABLE and durability is not None:
        raise InvalidArgument(
            f"a non_reliable topic stores nothing, so it has no durability {durability}; leave "
            "durability out, or make the topic reliable"
        )


_SEGMENT = re.compile(r"[A-Za-z0-9_.-]{1,128}\Z")
_WILDCARD = re.compile(r"[*?\[]")


class TopicName(str):
    """A topic name that has been checked: `/namespace/topic`."""

    __slots__ = ()

    @property
    def namespace(self) -> str:
        """The part between the slashes."""
        return self.split("/")[1]

    @property
    def topic(self) -> str:
        """The part behind the second slash."""
        return self.split("/")[2]


def parse_topic(name: str) -> TopicName:
    """Check `name` and return it. Raises InvalidArgument that says what a name looks like."""
    parts = name.split("/") if isinstance(name, str) else []
    if len(parts) != 3 or parts[0] or not all(_SEGMENT.match(part) for part in parts[1:]):
        raise InvalidArgument(
            f"{name!a:.300} is not a topic name; write /namespace/topic, each of 1 to 128 letters, "
            "digits, '_', '.' or '-'"
        )
    return TopicName(name)


def check_namespace(name: str) -> None:
    """Raise InvalidArgument for what cannot be a namespace."""
    if not isinstance(name, str) or not _SEGMENT.match(name):
        raise InvalidArgument(
            f"{name!a:.300} is not the name of a namespace; give 1 to 128 letters, digits, '_', '.' or "
            "'-', without a slash"
        )


class TopicPattern:
    """A glob over the topics of one namespace, such as `/iot/dev-*`. Raises InvalidArgument."""

    __slots__ = ("_is_match", "front", "text")

    def __init__(self, text: str) -> None:
        parts = text.split("/") if isinstance(text, str) else []
        if len(parts) != 3 or parts[0] or not _SEGMENT.match(parts[1]) or not parts[2]:
            raise InvalidArgument(
                f"{text!a:.300} is not a pattern; write /namespace/glob, such as /iot/dev-*: the "
                "namespace by its name, and behind it '*', '?' or '[...]' where you like"
            )
        self.text = text
        self.front = glob_front(text)
        """How all names begin that match."""
        self._is_match = re.compile(fnmatch.translate(text)).match

    def matches(self, topic: str) -> bool:
        """Whether that topic is one of them."""
        return self._is_match(topic) is not None


def glob_front(pattern: str) -> str:
    """Return the literal front of a glob of `fnmatch`."""
    return _WILDCARD.split(pattern, maxsplit=1)[0]


def namespace_front(namespace: str) -> str:
    """Return how the names of all topics of a namespace begin; of "" those of all."""
    return f"/{namespace}/" if namespace else ""


PART_MARK = "-part-"
"""Between the name of a topic and the index of a partition. A topic may have it in its name: only the broker knows."""


def partition_topic(topic: str, index: int, partitions: int) -> str:
    """Name of one partition: the topic itself if it is not partitioned (`partitions` 0)."""
    return f"{topic}{PART_MARK}{index}" if partitions else topic
