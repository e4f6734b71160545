"""Recent changes among the topics, so that watchers need not ask for all again. IO-free.

A cursor is text that only this object understands: which life of the coordinator, and how many
changes there were. A watcher with a cursor of another life, or of too long ago, begins anew.
"""

from __future__ import annotations

import collections
import enum
import itertools
import uuid

__all__ = ["Change", "TopicChanges"]

CHANGES_KEPT_MAX = 20_000


class Change(enum.StrEnum):
    """Kinds of change of a topic."""

    CREATED = "created"
    DELETED = "deleted"
    GROWN = "grown"
    """It has more partitions."""


class TopicChanges:
    """The latest changes, in their order."""

    def __init__(self) -> None:
        self._life = uuid.uuid4().hex
        self._kept: collections.deque[tuple[Change, str]] = collections.deque(
            maxlen=CHANGES_KEPT_MAX
        )
        self.count = 0
        """Changes in this life."""

    def note(self, change: Change, topic: str) -> None:
        """Note a change that is durable."""
        self._kept.append((change, topic))
        self.count += 1

    @property
    def cursor(self) -> str:
        """Where they end now."""
        return f"{self._life}-{self.count}"

    def since(self, cursor: str) -> list[tuple[Change, str]] | None:
        """Changes behind a cursor; None if that is not known any more."""
        life, _, digits = cursor.rpartition("-")
        if life != self._life or not digits.isdecimal():
            return None
        new = self.count - int(digits)
        if not 0 <= new <= len(self._kept):
            return None
        return list(itertools.islice(self._kept, len(self._kept) - new, None))
