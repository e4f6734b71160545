"""Metadata that ends with its process: for tests, simulations and brokers that keep nothing."""

from __future__ import annotations

import bisect

from danube_fast.clock import Clock
from danube_fast.metadata.local import LocalStore
from danube_fast.metadata.store import Entry, Event

__all__ = ["MemoryStore"]


class MemoryStore(LocalStore):
    """A dict and the sorted UTF-8 forms of its keys."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._entries: dict[str, Entry] = {}
        self._order: list[bytes] = []

    def _read(self, key: str) -> Entry | None:
        return self._entries.get(key)

    def _scan(self, prefix: str) -> list[tuple[str, Entry]]:
        wanted = prefix.encode()
        found = []
        for index in range(bisect.bisect_left(self._order, wanted), len(self._order)):
            if not self._order[index].startswith(wanted):
                break
            key = self._order[index].decode()
            found.append((key, self._entries[key]))
        return found

    def _write(self, events: list[Event], leased: frozenset[str]) -> None:
        for event in events:
            encoded = event.key.encode()
            if event.value is None:
                if self._entries.pop(event.key, None) is not None:
                    del self._order[bisect.bisect_left(self._order, encoded)]
                continue
            if event.key not in self._entries:
                bisect.insort(self._order, encoded)
            self._entries[event.key] = Entry(event.value, event.revision)
