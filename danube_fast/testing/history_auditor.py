"""Looks behind the scenes of history: what workers say is uploaded must be in the store, what is not must be in the
log; and at the end every byte of the store must be what publishers were told."""

from __future__ import annotations

import itertools

from danube_fast.frame.view import FrameView
from danube_fast.history.audit import verify_history
from danube_fast.history.manifest import MANIFESTS_PREFIX, Manifest, ManifestReader
from danube_fast.history.reader import HistoryReader
from danube_fast.history.stores.memory import MemoryStore
from danube_fast.testing.host import SimulatedHost, SimulatedWorker
from danube_fast.testing.publishing_model import PartitionModel, Violation

__all__ = ["HistoryAuditor"]

READ_BYTES = 1 << 20


class HistoryAuditor:
    """Compare workers, store and model of the partitions whose messages stay."""

    def __init__(
        self, host: SimulatedHost, objects: MemoryStore, partitions: list[PartitionModel]
    ) -> None:
        self._host, self._objects, self._partitions = host, objects, partitions
        self.trimmed: set[int] = set()
        """Partitions of which the log has lost messages that the store has."""

    def look(self) -> None:
        """Check workers that are up. Raises Violation."""
        for worker in self._host.workers:
            if worker.is_up:
                for partition in self._partitions:
                    self._look_at(worker, partition)

    def _look_at(self, worker: SimulatedWorker, model: PartitionModel) -> None:
        state = worker.worker.state
        partition = state.catalog.by_id.get(model.partition_id)
        if partition is None or partition.moving or not state.keeps_history(partition):
            return
        until, manifest = partition.uploaded.until, self._manifest(model.partition_id)
        where = f"partition {model.partition_id} on worker {worker.index}"
        if until > manifest.end_offset:
            raise Violation(f"{where}: uploaded up to {until}, and to {manifest.end_offset} only")
        below = [each for each in model.accepted if each < partition.first_offset]
        if below or (
            manifest.sections and partition.first_offset > manifest.sections[0].base_offset
        ):
            raise Violation(f"{where} begins at {partition.first_offset}, behind {below}")
        log = state.logs[partition.log_slot]
        runs = log.runs(model.partition_id, 0, 1 << 40)
        early = [
            run.base_offset
            for run in runs
            if run.end_offset <= manifest.end_offset
            and run.position + run.byte_count > log.synced_position
        ]
        if early:
            raise Violation(f"{where}: {early} were uploaded unsynced")
        there = {each for run in runs for each in range(run.base_offset, run.end_offset)}
        missing = sorted(
            each for each in model.accepted - there if until <= each < partition.visible
        )
        if missing:
            raise Violation(f"{where}: uploaded up to {until}, and the log lacks {missing}")
        if any(each not in there for each in model.accepted):
            self.trimmed.add(model.partition_id)

    def _manifest(self, partition_id: int) -> Manifest:
        return ManifestReader(self._objects, None, partition_id).load()

    def waiting(self) -> str:
        """Name what is not uploaded yet."""
        texts = []
        for model in self._partitions:
            end = self._manifest(model.partition_id).end_offset
            late = sorted(each for each in model.accepted if each >= end)
            if late:
                texts.append(f"partition {model.partition_id}: {late} are not uploaded")
        return "; ".join(texts)

    def verify(self) -> dict[int, set[int]]:
        """Check every byte of the store; the offsets that it has, by partition. Raises Violation."""
        if not any(True for _ in self._objects.list(MANIFESTS_PREFIX)):
            return {}
        found = verify_history(self._objects)
        if found.damages:
            raise Violation(f"the store is damaged: {found.damages}")
        return {each.partition_id: self._read_all(each) for each in self._partitions}

    def _read_all(self, model: PartitionModel) -> set[int]:
        manifest = self._manifest(model.partition_id)
        reader = HistoryReader(self._objects, model.partition_id, manifest)
        offsets: list[int] = []
        at = 0
        while (fetched := reader.fetch(at, READ_BYTES)) is not None:
            place = 0
            while place < len(fetched.data):
                view = FrameView(fetched.data, place)
                offsets += self._compare(model, view)
                place += view.frame_bytes
            at = fetched.end_offset
        where = f"history of partition {model.partition_id}"
        if any(high <= low for low, high in itertools.pairwise(offsets)):
            raise Violation(f"{where} is {offsets}")
        lost = sorted(x for x in model.accepted - set(offsets) if x < manifest.end_offset)
        if lost:
            raise Violation(f"{where} ends at {manifest.end_offset} and lacks {lost}")
        return set(offsets)

    def _compare(self, model: PartitionModel, view: FrameView) -> list[int]:
        """Offsets of a frame, whose messages are those that publishers were told of."""
        offsets: list[int] = view.offsets().tolist()
        for offset, payload in zip(offsets, view.payloads(), strict=True):
            stands = model.by_offset.get(offset)
            if stands is not None and stands[0] != (payload or b""):
                raise Violation(
                    f"history of partition {model.partition_id} has another message at {offset}"
                )
        return offsets
