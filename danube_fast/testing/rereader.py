"""A reader that reads everything of its partitions from the beginning, again and again, while things fail: the
log's newest messages, and what was trimmed and is fetched from the store."""

from __future__ import annotations

import random
from typing import Any

from danube_fast.clock import MILLISECOND_NS
from danube_fast.frame.bundle import bundle_entries
from danube_fast.frame.view import FrameView
from danube_fast.net import protocol as p
from danube_fast.testing.host import SimulatedHost, SimulatedWorker
from danube_fast.testing.loopback import Network
from danube_fast.testing.peer import Peer
from danube_fast.testing.publishing_model import PartitionModel, Violation

__all__ = ["Rereader"]

CREDIT = 1 << 29


class Rereader(Peer):
    """A reader of partitions of one worker whose messages stay."""

    def __init__(
        self, name: str, host: SimulatedHost, network: Network, worker: SimulatedWorker,
        draw: random.Random, partitions: list[PartitionModel],
    ) -> None:  # fmt: skip
        super().__init__(name, host, network, worker, draw)
        self._partitions = partitions
        self._next: dict[int, int] = {}
        """Offset to be read next, by consumer id."""
        self._read: dict[int, PartitionModel] = {}
        """What each consumer reads."""
        self._consumer_id = 0

    def begin(self) -> None:
        """Begin as a process does."""
        self.later(self.draw.randrange(200 * MILLISECOND_NS, 1500 * MILLISECOND_NS), self._again)

    def _again(self) -> None:
        """Begin anew, at the first message or further on."""
        self.later(self.draw.randrange(200 * MILLISECOND_NS, 1500 * MILLISECOND_NS), self._again)
        if self.is_open and not self.is_calm:
            self.connect()

    def on_open(self) -> None:
        """There is a session."""
        self.on_lost()
        self.send(p.Flow(1, CREDIT, CREDIT))
        for partition in self._partitions:
            end = max(partition.by_offset, default=0)
            self._begin(partition, self.draw.choice((0, 0, self.draw.randrange(end + 1))))

    def on_lost(self) -> None:
        """The session is gone, or in doubt."""
        self._next.clear()
        self._read.clear()

    forget = on_lost

    def _begin(self, partition: PartitionModel, start: int) -> None:
        self._consumer_id += 1
        consumer_id = self._consumer_id
        self._next[consumer_id], self._read[consumer_id] = start, partition

        def done(answer: Any) -> None:
            if isinstance(answer, p.Error):
                self.later(100 * MILLISECOND_NS, lambda: self._retry(consumer_id))

        self.ask(
            p.Subscribe(
                self.next_request(), consumer_id, 1, partition.partition_id, "", "reader", start
            ),
            done,
        )

    def _retry(self, consumer_id: int) -> None:
        """Begin once more what was refused, if no other session has begun since."""
        partition = self._read.pop(consumer_id, None)
        start = self._next.pop(consumer_id, 0)
        if partition is not None and self.is_open:
            self._begin(partition, start)

    def on_deliver(self, command: p.Deliver, bundles: list[bytes]) -> None:
        """Check that nothing was left out, and nothing came twice. Raises Violation."""
        ids = iter(command.consumer_ids)
        for bundle in bundles:
            for _, start, _ in bundle_entries(bundle):
                consumer_id = next(ids)
                partition = self._read.get(consumer_id)
                if partition is not None:
                    offsets = FrameView(bundle, start).offsets().tolist()
                    self._check(consumer_id, partition, offsets)

    def _check(self, consumer_id: int, partition: PartitionModel, offsets: list[int]) -> None:
        where = f"{self.name}: partition {partition.partition_id}"
        for offset in offsets:
            wanted = self._next[consumer_id]
            if offset < wanted:
                raise Violation(f"{where}: {offset} came where {wanted} is next")
            if offset == wanted:
                self._next[consumer_id] = offset + 1
                continue
            left_out = sorted(each for each in partition.accepted if wanted <= each < offset)
            if left_out:
                raise Violation(f"{where}: {left_out} were left out before {offset}")
            self._next[consumer_id] = offset + 1
