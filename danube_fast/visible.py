"""Visible names: those that lists show to one principal, by a question about each, and where they can be at all.

A *front* is how the names of topics begin: "" for all, "/shop/" for those of a namespace, "/shop/orders" for those with
that beginning. Where a list goes by fronts, what lies beside them costs it nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

__all__ = ["Visible", "common", "narrowest"]


class Visible(NamedTuple):
    """All that lists may show to a principal."""

    shows: Callable[[str], bool]
    """Whether a list may show a topic, "/namespace/topic#subscription" or "namespace:NAME". Never raises."""
    fronts: tuple[str, ...] = ("",)
    """How all topics begin that it may show, sorted, none the beginning of another."""
    key: int = 0
    """A signed word, another one where something else is shown; of this process alone."""


def narrowest(fronts: Iterable[str]) -> tuple[str, ...]:
    """Sort fronts, without those that others cover.

    >>> narrowest(["/shop/", "/press/a", "/shop/orders", "/press/"])
    ('/press/', '/shop/')
    """
    kept: list[str] = []
    for front in sorted(fronts):
        if not kept or not front.startswith(kept[-1]):
            kept.append(front)
    return tuple(kept)


def common(some: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    """Return the fronts of all names that both cover; each alone as `narrowest` has them.

    >>> common(["/press/", "/shop/o"], ["/shop/", "/press/a", "/press/b"])
    ('/press/a', '/press/b', '/shop/o')
    """
    found: list[str] = []
    before: str | None = None
    # what another front covers comes behind it, and before all that it does not cover
    both = [(front, side) for side, fronts in enumerate((some, others)) for front in fronts]
    last = ["", ""]
    has = [False, False]
    for front, side in sorted(both):
        last[side], has[side] = front, True
        other = last[1 - side]
        if has[1 - side] and front.startswith(other) and front != before:
            found.append(front)
            before = front
    return tuple(found)
