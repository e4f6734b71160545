"""All topics of a broker, by name and in the order of their names.

Any client may ask for lists, which tell it of what it may look up: they go through a part of the order, topic by topic,
while topics come and go, and never sort or copy all of it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence

from danube_fast.broker.topics.records import TopicRecord

__all__ = ["TopicTable"]

_BEHIND = chr(ord("/") + 1)
"""Behind the prefix of a namespace, and in front of all that comes after its topics."""


class TopicTable(dict[str, TopicRecord]):
    """Topics by name; entered and removed one by one."""

    def __init__(self) -> None:
        super().__init__()
        self._names: list[str] = []

    def __setitem__(self, name: str, record: TopicRecord) -> None:
        if name not in self:
            insort(self._names, name)
        super().__setitem__(name, record)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del self._names[bisect_left(self._names, name)]

    def behind(self, after: str, fronts: Sequence[str] = ("",)) -> Iterator[TopicRecord]:
        """Go through the topics behind a name that begin in one of some ways, which are sorted and none the beginning of
        another; the table may change between two steps."""
        for front in fronts:
            at = max(bisect_right(self._names, after), bisect_left(self._names, front))
            while at < len(self._names) and (name := self._names[at]).startswith(front):
                yield self[name]
                at = bisect_right(self._names, name)

    def count(self, namespace: str) -> int:
        """Return how many topics a namespace has."""
        first, end = f"/{namespace}/", f"/{namespace}{_BEHIND}"
        return bisect_left(self._names, end) - bisect_left(self._names, first)
