"""Names that a shell completes: topics and subscriptions of the broker that the command line means.

A completion that cannot be had at once is no completion: without a broker, or before the kernels are
compiled on this machine, there is none, and the shell is told nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from danube_fast.cli.contexts.context_file import choose, values
from danube_fast.cli.contexts.open_client import access_of, open_client
from danube_fast.client.link.url import DEFAULT_URL
from danube_fast.errors import DanubeError

__all__ = ["complete_subscriptions", "complete_topics"]

CONNECT_SECONDS = 1.0
"""A person waits with a finger on the Tab key."""
NAMES_MAX = 200
"""More do not help a person to choose."""


def complete_topics(context: typer.Context, incomplete: str) -> list[str]:
    """Topics whose names begin so."""
    pattern = f"{incomplete}*" if incomplete.count("/") == 2 else None
    return _ask(
        context,
        incomplete,
        lambda admin: [found["topic"] for found in admin.list_topics(pattern=pattern)],
    )


def complete_subscriptions(context: typer.Context, incomplete: str) -> list[str]:
    """Subscriptions of the topic that was typed before whose names begin so."""
    words = [
        context.params.get("topic"),
        *context.args,
    ]  # an option without its value parses nothing
    topic = next((word for word in words if word), None)
    if topic is None:
        return []
    return _ask(
        context,
        incomplete,
        lambda admin: [found["subscription"] for found in admin.list_subscriptions(topic)],
    )


def _ask(context: typer.Context, incomplete: str, names: Callable[[Any], list[str]]) -> list[str]:
    from danube_fast.frame.image import is_built

    if not is_built():
        return []
    try:
        choose(context.find_root().params.get("context") or "")
        told = values()
        url = context.params.get("url") or told["url"].text or DEFAULT_URL
        with open_client(url, access_of(told), CONNECT_SECONDS) as client:
            found = names(client.admin)
    except DanubeError:
        return []
    return sorted(name for name in found if name.startswith(incomplete))[:NAMES_MAX]
