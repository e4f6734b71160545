"""Parts of the uploader without processes: logs of partitions in a file each, a store in memory, tasks in one thread."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from danube_fast.broker import messages as m
from danube_fast.errors import DanubeError, NotOwner
from danube_fast.frame.view import FrameView
from danube_fast.history.manifest import ManifestLog
from danube_fast.history.reader import HistoryReader
from danube_fast.history.stores.memory import MemoryStore
from danube_fast.testing.virtual_clock import VirtualClock
from danube_fast.workers.process.tasks import Ask, Do, Fork, Join, Task
from danube_fast.workers.uploader.state import History, naming
from tests.history.rig import IDENTITY, START_NS, make_frame

EPOCH = 5
WORKER = 1
PARTITION = 7
TOPIC = "/default/flights"


def frames_from(
    base_offset: int, frame_count: int, life: int = 0, partition_id: int = PARTITION
) -> list[bytearray]:
    """Frames of ten messages; those of another life came at other times, and have the same sizes."""
    found = []
    for base in range(base_offset, base_offset + 10 * frame_count, 10):
        chance = random.Random(f"{life} {base}")
        payloads = [chance.randbytes(50) for _ in range(10)]
        time_ns = START_NS + base + life * 1_000_000_000
        found.append(make_frame(partition_id, base, payloads, time_ns=time_ns))
    return found


class FakeLog:
    """The log of one partition, as its owner answers for it."""

    def __init__(self, folder: Path, frames: Sequence[bytearray], *, run_frames: int = 3) -> None:
        self._path = folder / f"log {len(list(folder.iterdir()))}"
        self._path.write_bytes(b"".join(frames))
        self._run_frames = run_frames
        """Frames of one run."""
        self._views = [FrameView(frame) for frame in frames]
        self.first_offset = 0
        self.end_offset = self.end_of(-1)
        self.synced_until = self.end_offset

    def end_of(self, place: int) -> int:
        """Where a frame ends."""
        return self._views[place].base_offset + self._views[place].offset_span

    def runs(self, asked: m.HistoryRuns) -> m.Runs:
        """Answer as `workers/shard/history/uploads.py` does."""
        at, ranges, place, size = max(asked.offset, self.first_offset), [], 0, 0
        for start in range(0, len(self._views), self._run_frames):
            some = self._views[start : start + self._run_frames]
            span = sum(view.frame_bytes for view in some)
            base, end = some[0].base_offset, some[-1].base_offset + some[-1].offset_span
            if end > at and size < asked.bytes_max:
                if end > self.synced_until:
                    return m.Runs(ranges, max(at, base))
                ranges.append(m.FileRange(str(self._path), place, span, end))
                at, size = end, size + span
            place += span
        return m.Runs(ranges, at if size >= asked.bytes_max else self.end_offset)

    def backlog(self, uploaded_until: int, **changes: Any) -> m.Backlog:
        """Make the backlog of the partition."""
        values = {
            "partition_id": PARTITION, "topic": TOPIC, "incarnation": 1, "first_offset": self.first_offset,
            "uploaded_until": uploaded_until, "manifest": -1, "end_offset": self.end_offset, "bytes": 1, "age_ns": 1,
            "retention_seconds": 0, "retention_bytes": 0, "bytes_in_log": 0, "is_urgent": False,
        }  # fmt: skip
        return m.Backlog(**{**values, **changes})


class Bench:
    """State that the parts of an uploader share."""

    def __init__(self, store: MemoryStore, *, part_bytes: int = 1 << 20) -> None:
        self.store = store
        self.logs: dict[int, FakeLog] = {}
        self.histories: dict[int, History] = {}
        self.told: list[m.SetUploaded] = []
        """What owners were told."""
        numbers = itertools.count(100)
        self.state: Any = SimpleNamespace(
            epoch=EPOCH, identity=IDENTITY, store=store, clock=VirtualClock(), writing=set(),
            note_fault=lambda error: None, settings=SimpleNamespace(history_part_bytes=part_bytes), next_number=lambda: next(numbers),
            history=self._history, known=self.histories.get, deleting=set(), copying=set(),
            naming=lambda keys: naming(self.histories, keys), forget=lambda number: self.histories.pop(number, None),
        )  # fmt: skip

    def _history(self, partition_id: int, manifest: int) -> Task:
        yield from ()
        return self.load(partition_id)

    def load(self, partition_id: int = PARTITION) -> History:
        """The history of a partition."""
        if partition_id not in self.histories:
            log = ManifestLog(self.store, IDENTITY, partition_id, EPOCH)
            log.load()
            reader = HistoryReader(self.store, partition_id, log.manifest)
            self.histories[partition_id] = History(log, reader)
        return self.histories[partition_id]

    def run(self, task: Task) -> Any:
        """Take all steps of a task; what it returns. Raises as the task."""
        answers: Mapping[type, Callable[[Any], Any]] = {
            Ask: lambda step: self._answer(step.message),
            Do: lambda step: step.work(),
            Fork: lambda step: self.run(step.task),
            Join: lambda step: step.running,
        }
        try:
            step = next(task)
            while True:
                try:
                    value = answers[type(step)](step)
                except DanubeError as error:
                    step = task.throw(error)
                else:
                    step = task.send(value)
        except StopIteration as end:
            return end.value

    def _answer(self, message: m.Message) -> Any:
        if isinstance(message, m.HistoryRuns):
            log = self.logs.get(message.partition_id)
            if log is None:
                raise NotOwner("it moves")
            return log.runs(message)
        if isinstance(message, m.SetUploaded):
            self.told.append(message)
        return [] if isinstance(message, m.FindWithoutHistory) else None
