"""Recent changes among the topics, so that watchers need not ask for all again. IO-free.

A cursor is text that only this object understands: which life of the coordinator, and how many changes there were. It
looks different each time, for the number would tell of changes that its reader may not know of. A watcher with a cursor
of another life, or of too long ago, begins anew.
"""

from __future__ import annotations

import collections
import enum
import hashlib
import itertools
import secrets

__all__ = ["Change", "TopicChanges"]

CHANGES_KEPT_MAX = 20_000
_WORD_BYTES = 8
_CURSOR_BYTES = 3 * _WORD_BYTES


class Change(enum.StrEnum):
    """Kinds of change of a topic."""

    CREATED = "created"
    DELETED = "deleted"
    GROWN = "grown"
    """It has more partitions."""


class TopicChanges:
    """The latest changes, in their order."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(hashlib.blake2b.MAX_KEY_SIZE)
        self._kept: collections.deque[tuple[Change, str]] = collections.deque(
            maxlen=CHANGES_KEPT_MAX
        )
        self.count = 0
        """Changes in this life."""

    def note(self, change: Change, topic: str) -> None:
        """Note a change that is durable."""
        self._kept.append((change, topic))
        self.count += 1

    def cursor_at(self, place: int) -> str:
        """Return a cursor behind so many changes."""
        nonce = secrets.token_bytes(_WORD_BYTES)
        text = nonce + _xor(place.to_bytes(_WORD_BYTES, "big"), self._hash(nonce))
        return (text + self._hash(text)).hex()

    def place_of(self, cursor: str) -> int | None:
        """Return behind how many changes a cursor is; None if it is not of this life."""
        try:
            data = bytes.fromhex(cursor)
        except ValueError:
            return None
        text, tag = data[:-_WORD_BYTES], data[-_WORD_BYTES:]
        if len(data) != _CURSOR_BYTES or not secrets.compare_digest(tag, self._hash(text)):
            return None
        nonce, masked = text[:_WORD_BYTES], text[_WORD_BYTES:]
        return int.from_bytes(_xor(masked, self._hash(nonce)), "big")

    def behind(self, place: int) -> list[tuple[Change, str]] | None:
        """Return the changes behind so many; None if these are not kept any more."""
        new = self.count - place
        if not 0 <= new <= len(self._kept):
            return None
        return list(itertools.islice(self._kept, len(self._kept) - new, None))

    def _hash(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=_WORD_BYTES, key=self._key).digest()


def _xor(some: bytes, others: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(some, others, strict=True))
