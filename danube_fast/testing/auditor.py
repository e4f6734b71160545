"""Reads everything that is there at the end, after one more crash: whatever a publisher was told to be
accepted must be in its partition, once, in order, or trimmed because no subscription needs it any more."""

from __future__ import annotations

import itertools
import random
from typing import Any

from danube_fast.frame.bundle import bundle_entries
from danube_fast.frame.view import FrameView
from danube_fast.net import protocol as p
from danube_fast.testing.host import SimulatedHost, SimulatedWorker
from danube_fast.testing.loopback import Network
from danube_fast.testing.peer import Peer
from danube_fast.testing.publishing_model import PartitionModel, Violation

__all__ = ["Auditor"]

CREDIT = 1 << 29


class Auditor(Peer):
    """A reader of all partitions of one worker."""

    def __init__(
        self, host: SimulatedHost, network: Network, worker: SimulatedWorker, draw: random.Random,
        partitions: list[PartitionModel], held: dict[int, set[int]],
    ) -> None:  # fmt: skip
        super().__init__(f"auditor-{worker.index}", host, network, worker, draw)
        self._partitions = partitions
        self._held = held
        """Offsets that the store of history has, by partition: they are never lost."""
        self._read: dict[int, list[int]] = {}
        """Offsets that came, by partition."""
        self._bounds: dict[int, tuple[int, int]] = {}
        """First offset and end, as the worker said, by partition."""

    def on_open(self) -> None:
        """There is a session."""
        self._read = {each.partition_id: [] for each in self._partitions}
        self._bounds = {}
        self.send(p.Flow(1, CREDIT, CREDIT))
        for partition in self._partitions:
            self._begin(partition.partition_id)

    def _begin(self, partition_id: int) -> None:
        def done(answer: Any) -> None:
            if isinstance(answer, p.Error):
                self.later(50_000_000, lambda: self._begin(partition_id))
                return
            value = answer.value
            self._bounds[partition_id] = value["first_offset"], value["end_offset"]

        self.ask(
            p.Subscribe(
                self.next_request(), partition_id, 1, partition_id, "", "reader", "earliest"
            ),
            done,
        )

    def on_deliver(self, command: p.Deliver, bundles: list[bytes]) -> None:
        """Messages came."""
        for bundle in bundles:
            for partition_id, start, _ in bundle_entries(bundle):
                self._read[partition_id] += FrameView(bundle, start).offsets().tolist()

    @property
    def is_done(self) -> bool:
        """Everything was read, and found to be in order. Raises Violation."""
        for partition in self._partitions:
            bounds = self._bounds.get(partition.partition_id)
            if bounds is None:
                return False
            read = self._read[partition.partition_id]
            if any(high <= low for low, high in itertools.pairwise(read)):
                raise Violation(f"partition {partition.partition_id} is read as {read}")
            owed = {each for each in partition.accepted if each >= bounds[0]}
            owed |= self._held.get(partition.partition_id, set())
            if not owed <= set(read):
                return False
        return True

    def missing(self) -> str:
        """Name what was accepted and is not there."""
        texts = []
        for partition in self._partitions:
            first, end = self._bounds.get(partition.partition_id, (0, 0))
            read = self._read.get(partition.partition_id, [])
            owed = {each for each in partition.accepted - set(read) if each >= first}
            owed |= self._held.get(partition.partition_id, set()) - set(read)
            if owed or not end:
                texts.append(
                    f"partition {partition.partition_id} [{first}, {end}) lacks {sorted(owed)}"
                )
        return "; ".join(texts)
