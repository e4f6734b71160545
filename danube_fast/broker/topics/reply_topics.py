"""Reply topics of a secured broker: any principal may make some, and each belongs to the one that made it.

Only its owner reads it. Its name is drawn at random and told in requests alone, so a client that says the name may
publish to it, and do nothing else.
"""

from __future__ import annotations

from danube_fast.broker.topics.directory import TopicDirectory
from danube_fast.broker.topics.records import TopicOptions
from danube_fast.errors import InvalidArgument, ResourceExhausted
from danube_fast.types import REPLY_TOPICS, Dispatch

__all__ = ["OWNED_MAX", "owner_of_new"]

OWNED_MAX = 10_000
"""Reply topics of one principal: a client has one, and one principal may have many clients."""


def owner_of_new(topics: TopicDirectory, name: str, options: TopicOptions, principal: str) -> str:
    """Return whose a new topic is that a principal of a secured broker makes; empty: that of no one, it is no reply topic.

    Raises InvalidArgument for a reply topic that would keep messages, ResourceExhausted for one too many.
    """
    if not name.startswith(REPLY_TOPICS):
        return ""
    if options.dispatch != Dispatch.NON_RELIABLE or options.partitions:
        raise InvalidArgument(
            f"{name} is the name of a reply topic: make it non_reliable and not partitioned, or choose another name"
        )
    if topics.owned[principal] >= OWNED_MAX:
        raise ResourceExhausted(
            f"{principal} has {OWNED_MAX} reply topics; close clients that ask, or give some of them another user"
        )
    return str(principal)
