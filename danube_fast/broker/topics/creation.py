"""Rights to topics that are made by the way: by a publish, or for dead letters."""

from __future__ import annotations

from collections.abc import Callable

from danube_fast.broker.topics.directory import TopicDirectory
from danube_fast.errors import PermissionDenied
from danube_fast.types import Permission, parse_topic

__all__ = ["check_dead_letter_topic", "may_create"]

May = Callable[[Permission, str], bool]
"""Tells whether a principal has a permission on a resource."""


def may_create(topic: str, may: May) -> bool:
    """Whether a principal may make a topic by using it: by a right to the topic itself, or to all of its namespace."""
    if may(Permission.MANAGE_TOPIC, topic):
        return True
    return may(Permission.PRODUCE, f"namespace:{parse_topic(topic).namespace}")


def check_dead_letter_topic(topics: TopicDirectory, topic: str, may: May) -> None:
    """Raise what prevents that a principal, which may publish there, sends dead letters to a topic: PermissionDenied if it
    would have to be made, and else as `check_takes_dead_letters`."""
    topics.check_takes_dead_letters(topic)
    if topics.topic(topic) is None and not may_create(topic, may):
        raise PermissionDenied(
            f"{topic} does not exist, and making it needs manage_topic on it, or produce on its namespace; ask an "
            "administrator to make it"
        )
