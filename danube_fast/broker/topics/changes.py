"""Recent changes among the topics, so that watchers need not ask for all again. IO-free.

A cursor is text that only this object understands: which life of the coordinator, how many changes there were, and a key of
what its reader was shown. It looks different each time, for the number would tell of changes that its reader may not know
of. A watcher with a cursor of another life, or of too long ago, begins anew.
"""

from __future__ import annotations

import collections
import enum
import hashlib
import itertools
import secrets
import struct

__all__ = ["Change", "TopicChanges"]

CHANGES_KEPT_MAX = 20_000
_WORD_BYTES = 8
_CURSOR_BYTES = 4 * _WORD_BYTES
_PLAIN = struct.Struct("=Qq")
"""How many changes, and the key."""


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

    def cursor_at(self, place: int, key: int) -> str:
        """Return a cursor behind so many changes, for a reader who was shown what has this key, a signed word."""
        nonce = secrets.token_bytes(_WORD_BYTES)
        plain = _PLAIN.pack(place, key)
        text = nonce + _xor(plain, self._hash(nonce, len(plain)))
        return (text + self._hash(text)).hex()

    def read(self, cursor: str) -> tuple[int, int] | None:
        """Return behind how many changes a cursor is, and its key; None if it is not of this life."""
        try:
            data = bytes.fromhex(cursor)
        except ValueError:
            return None
        text, tag = data[:-_WORD_BYTES], data[-_WORD_BYTES:]
        if len(data) != _CURSOR_BYTES or not secrets.compare_digest(tag, self._hash(text)):
            return None
        nonce, masked = text[:_WORD_BYTES], text[_WORD_BYTES:]
        place, key = _PLAIN.unpack(_xor(masked, self._hash(nonce, len(masked))))
        return place, key

    def behind(self, place: int) -> list[tuple[Change, str]] | None:
        """Return the changes behind so many; None if these are not kept any more."""
        new = self.count - place
        if not 0 <= new <= len(self._kept):
            return None
        return list(itertools.islice(self._kept, len(self._kept) - new, None))

    def _hash(self, data: bytes, size: int = _WORD_BYTES) -> bytes:
        return hashlib.blake2b(data, digest_size=size, key=self._key).digest()


def _xor(some: bytes, others: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(some, others, strict=True))
