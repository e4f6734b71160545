"""Reader: what an application reads a range of a topic with (`consume/read_range.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from danube_fast.client.consume.batch import Batch
from danube_fast.client.consume.inbox import Inbox
from danube_fast.client.consume.read_range import ReadRange
from danube_fast.client.consumer import InboxView
from danube_fast.client.faces import Closing
from danube_fast.client.values.limits import BATCH_MESSAGES_DEFAULT, CLOSE_TIMEOUT_SECONDS
from danube_fast.client.values.message import Message

__all__ = ["Reader", "ReaderView"]


class ReaderView(InboxView):
    """Shared by both kinds of reader."""

    def __init__(self, inbox: Inbox, stop: int | str | None, run: Any, end: Any) -> None:
        super().__init__(inbox, run, end)
        self._range = ReadRange(inbox, stop)

    @property
    def is_finished(self) -> bool:
        """Whether every partition has reached its stop."""
        return self._range.is_finished


class Reader(ReaderView, Closing):
    """Reads a range of a topic. Made by `client.reader()`; iterate over it once."""

    def __init__(self, inbox: Inbox, stop: int | str | None) -> None:
        super().__init__(inbox, stop, inbox.pump.run, inbox.pump.end)

    def receive_batch(
        self, max_messages: int = BATCH_MESSAGES_DEFAULT, timeout: float | None = None
    ) -> Batch:
        """Return the next messages of the range, at most `max_messages`; an empty Batch at its end, or when `timeout`
        seconds are over. Raises TopicDeleted, DataLoss for a damaged frame."""
        return self._run(self._range.batch_steps(max_messages, timeout))

    def batches(self, max_messages: int = BATCH_MESSAGES_DEFAULT) -> Iterator[Batch]:
        """Return the whole range in batches of at most `max_messages`."""
        while batch := self.receive_batch(max_messages):
            yield batch

    def __iter__(self) -> Iterator[Message]:
        for batch in self.batches():
            yield from batch
        self.close()

    def to_arrow(self) -> Any:
        """Return the whole range as a pyarrow.Table. Needs `danube-fast[arrow]`; all of it is in memory. Raises
        InvalidArgument for a range without an end."""
        self._range.must_end()
        return self._run(self._range.all_steps()).to_arrow()

    def to_pandas(self) -> Any:
        """Return the whole range as a pandas.DataFrame. Needs `danube-fast[arrow]` and pandas. Raises what `to_arrow`
        raises."""
        return self.to_arrow().to_pandas()

    def close(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """Detach; returns within `timeout` seconds."""
        return self._end(self._inbox.close_steps(timeout))
