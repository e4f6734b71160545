"""Publications on their way through a journal, and the groups that carry their frames.

PUBLISH -> Publication (answered once) <- pending - Group of log 0, Group of log 1, ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.consumer import Stored
from danube_fast.countdown import Done
from danube_fast.wal.appender import Held

__all__ = ["Group", "Publication", "Written"]


class Publication:
    """One PUBLISH on its way: answered when every log it touched is done with it."""

    __slots__ = ("done", "pending", "request", "session", "statuses", "texts")

    def __init__(
        self, session: int, request: int, done: Callable[[Publication], None] | None = None
    ) -> None:
        """`done` is called with the outcome instead of answering a session."""
        self.session, self.request, self.done = session, request, done
        self.statuses: list[int] = []
        self.texts: dict[int, str] = {}
        """Reason of each status that is an error."""
        self.pending = 1

    def refuse(self, place: int, code: int, text: str) -> None:
        """Refuse the frame whose status stands at `place` after all."""
        self.statuses[place : place + 2] = code, 0
        self.texts[code] = text


class Written(NamedTuple):
    """Groups that kernels have written to a log in one turn."""

    first_row: int
    """Its frames are those of the result rows from here on, and below `stop_row`, that went to this log."""
    stop_row: int
    frame_count: int
    group_count: int
    end_position: int
    queued_position: int
    """A sync is queued up to here; 0: none."""
    held: Held
    """The last of them, if the sync thread writes it."""
    is_torn: bool
    """The write behind that failed, and is to be made again."""


class Group:
    """Frames and records that are written together."""

    __slots__ = (
        "began_ns", "buffers", "byte_count", "callbacks", "duplicates", "end_position", "entries", "first_row",
        "needs_sync", "on_synced", "on_written", "records", "rows", "synced_entries",
        "waits_since_ns", "written_entries",
    )  # fmt: skip

    def __init__(self, began_ns: int = 0) -> None:
        """`began_ns`: when the first of its frames came, monotonic; 0: it has none."""
        self.began_ns = began_ns
        self.buffers: list[tuple[Any, int, int]] = []
        """(holder, start, end): adjacent frames of one holder are one buffer."""
        self.byte_count = self.end_position = 0
        self.entries: list[tuple[Partition, Stored, int, Publication, int]] = []
        """(partition, frame, result index, publication, place of its status)."""
        self.written_entries: list[tuple[Partition, Stored]] = []
        """Visible once written."""
        self.synced_entries: list[tuple[Partition, Stored]] = []
        """Visible once synced."""
        self.on_written: list[Publication] = []
        self.on_synced: list[Publication] = []
        self.duplicates: list[tuple[Publication, int]] = []
        """(publication, place of its status): their originals may stand in this group."""
        self.records: list[bytes] = []
        """The control records at its end."""
        self.callbacks: list[Done] = []
        self.needs_sync = False
        self.waits_since_ns = 0
        """When it was left open for more publications, monotonic; 0: it was not."""
        self.rows: Any = None
        """Result rows from `first_row` on, with those of `entries`, kept until it is durable."""
        self.first_row = 0

    @property
    def is_quiet(self) -> bool:
        """Whether nothing waits for its sync: records that are made durable soon, and are not asked for."""
        return not (self.entries or self.callbacks or self.on_synced)
