r"""Says which of the messages that came may be handled next, while others are being handled. Waits for nothing.

    add -> free -----------------> take -> done
        \ behind its key, while a message of the key is being handled

With key_shared a key's messages are handled one after the other, as they came; the others as soon as a
handler is free.
"""

from __future__ import annotations

import collections

from danube_fast.client.values.message import Message

__all__ = ["Turns"]


class Turns:
    """Messages of one subscription on their way to its handlers. The subscriber guards it with a lock."""

    def __init__(self, *, by_key: bool, room: int) -> None:
        self._by_key = by_key
        self._room = room
        self._free: collections.deque[Message] = collections.deque()
        self._behind: dict[bytes, collections.deque[Message]] = {}
        """By key: what waits for the one that is free or being handled."""
        self._waiting = 0

    @property
    def is_full(self) -> bool:
        """Whether enough is waiting."""
        return self._waiting >= self._room

    def add(self, message: Message) -> None:
        """Add a message that came."""
        self._waiting += 1
        key = message.key if self._by_key else None
        if key is None:
            self._free.append(message)
        elif key in self._behind:
            self._behind[key].append(message)
        else:
            self._behind[key] = collections.deque()
            self._free.append(message)

    def take(self) -> Message | None:
        """Return a message to be handled now; None if there is none."""
        if not self._free:
            return None
        self._waiting -= 1
        return self._free.popleft()

    def done(self, message: Message) -> None:
        """Let the next message of the key follow, as this one was handled."""
        key = message.key if self._by_key else None
        if key is None:
            return
        behind = self._behind.get(key)
        if behind:
            self._free.append(behind.popleft())
        elif behind is not None:
            del self._behind[key]

    def clear(self) -> list[Message]:
        """Return everything that waits, and forget it."""
        left = [*self._free, *(message for behind in self._behind.values() for message in behind)]
        self._free.clear()
        self._behind.clear()
        self._waiting = 0
        return left
