"""Reader: what an application reads a range of a topic with (`consume/read_range.py`)."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

from danube_fast.client.consume.batch import Batch
from danube_fast.client.consume.inbox import Inbox
from danube_fast.client.consume.read_range import ReadRange
from danube_fast.client.link.faces import Closing, Run
from danube_fast.client.values.limits import BATCH_MESSAGES_DEFAULT, CLOSE_TIMEOUT_SECONDS
from danube_fast.client.values.message import Gap, Message

__all__ = ["Reader", "ReaderView"]


class ReaderView:
    """What both kinds of reader show of their range."""

    def __init__(
        self,
        inbox: Inbox,
        stop: int | str | None,
        run: Any,
        end: Any,
    ) -> None:
        """`run` and `end` drive steps, as those of `Pump` and of `LoopDriver`."""
        self._run: Run = run
        self._end: Run = end
        self._inbox = inbox
        self._range = ReadRange(inbox, stop)

    @property
    def is_finished(self) -> bool:
        """Whether every partition has reached its stop."""
        return self._range.is_finished

    @property
    def gaps(self) -> collections.deque[Gap]:
        """The latest ranges that the broker said will never come."""
        return self._inbox.gaps

    @property
    def on_gap(self) -> Callable[[Gap], object] | None:
        """Called with every such range, by whichever thread serves the client then."""
        return self._inbox.on_gap

    @on_gap.setter
    def on_gap(self, callback: Callable[[Gap], object] | None) -> None:
        self._inbox.on_gap = callback


class Reader(ReaderView, Closing):
    """Reads a range of a topic. Made by `client.reader()`; iterate over it once."""

    def __init__(self, inbox: Inbox, stop: int | str | None) -> None:
        super().__init__(inbox, stop, inbox.pump.run, inbox.pump.end)

    def receive_batch(
        self, max_messages: int = BATCH_MESSAGES_DEFAULT, timeout: float | None = None
    ) -> Batch:
        """The next messages of the range; empty at its end or when `timeout` seconds are over."""
        return self._run(self._range.batch_steps(max_messages, timeout))

    def batches(self, max_messages: int = BATCH_MESSAGES_DEFAULT) -> Iterator[Batch]:
        """The whole range in batches."""
        while batch := self.receive_batch(max_messages):
            yield batch

    def __iter__(self) -> Iterator[Message]:
        for batch in self.batches():
            yield from batch
        self.close()

    def to_arrow(self) -> Any:
        """The whole range as a pyarrow.Table. Needs `danube-fast[arrow]`; all of it is in memory."""
        self._range.must_end()
        return self._run(self._range.all_steps()).to_arrow()

    def to_pandas(self) -> Any:
        """The whole range as a pandas.DataFrame. Needs `danube-fast[arrow]` and pandas."""
        return self.to_arrow().to_pandas()

    def close(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """Detach; returns within `timeout` seconds."""
        return self._end(self._inbox.close_steps(timeout))
