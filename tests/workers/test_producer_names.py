"""Names of producers on their way into a manifest: asked of the owner once, whichever uploader ends an object."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from danube_fast.broker import messages as m
from danube_fast.errors import NotOwner
from danube_fast.history.layout import ObjectHeader
from danube_fast.history.objects import ObjectWriter
from danube_fast.history.stores.memory import MemoryStore
from danube_fast.testing.virtual_clock import VirtualClock
from danube_fast.workers.uploader.checkpoint import Checkpoint, Checkpoints, Inside, Progress
from danube_fast.workers.uploader.resumption import Outgoing
from danube_fast.workers.uploader.rounds import Rounds, _Owned
from danube_fast.workers.uploader.sender import Sender
from tests.history.rig import IDENTITY, START_NS, make_frame
from tests.workers.uploader_rig import PARTITION, WORKER, Bench, FakeLog

NAMES = {11: "loader", 22: "reader"}


class Naming(Bench):
    """State of an uploader, and an owner that knows names."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(VirtualClock()))
        self.state.settings.history_object_bytes = 1 << 30
        self.state.settings.history_throttle_bytes_per_s = 0
        counters = SimpleNamespace(add=lambda *_: None)
        self.state.boot = SimpleNamespace(counters=counters)
        self.asked: list[list[int]] = []
        self.is_moving = False

    def _answer(self, message: m.Message) -> Any:
        if not isinstance(message, m.NameProducers):
            return super()._answer(message)
        if self.is_moving:
            raise NotOwner("it moves")
        self.asked.append(message.producer_ids)
        return {each: NAMES[each] for each in message.producer_ids if each in NAMES}


def _frames(first: int, producers: list[int]) -> list[bytearray]:
    """One frame of a message for each of these producers."""
    return [
        make_frame(PARTITION, base, [b"x"], time_ns=START_NS + base, producer_id=producer)
        for base, producer in enumerate(producers, first)
    ]


def _outgoing(bench: Bench, folder: Path, number: int) -> Outgoing:
    header = ObjectHeader(IDENTITY, 3, number, 9)
    writer = ObjectWriter(header, 1 << 20)
    checkpoint = Checkpoint(url=bench.store.url, header=header, key=writer.key, part_bytes=1 << 20)
    progress = Progress(Checkpoints(folder), checkpoint)
    return Outgoing(writer, Sender(bench.store, writer.key, progress), progress, [], {})


def test_each_name_is_asked_for_once(tmp_path: Path) -> None:
    bench = Naming()
    rounds = Rounds(bench.state, Checkpoints(tmp_path))
    frames: list[bytearray] = []
    for number, (producers, asked) in enumerate(
        [([11, 33, 11], [11, 33]), ([11, 22], [22]), ([22, 11], None)]
    ):
        frames += _frames(len(frames), producers)
        log = bench.logs[PARTITION] = FakeLog(tmp_path, frames)
        backlog = log.backlog(bench.load().manifest.end_offset)
        bench.load().note_agreement()
        owned = _Owned(WORKER, backlog)
        outgoing = _outgoing(bench, tmp_path, number)
        assert bench.run(rounds._upload(outgoing, [owned], {PARTITION: owned}))
        assert bench.asked == ([] if asked is None else [asked])
        bench.asked.clear()
    assert bench.load().manifest.producers == NAMES


def test_producers_of_what_was_there_before_a_kill_are_named(tmp_path: Path) -> None:
    """The first frames are not read again: who published them stands in the checkpoint."""
    bench = Naming()
    rounds = Rounds(bench.state, Checkpoints(tmp_path))
    frames = _frames(0, [11, 22])
    log = bench.logs[PARTITION] = FakeLog(tmp_path, frames, run_frames=1)
    bench.load().note_agreement()
    owned = _Owned(WORKER, log.backlog(0))
    outgoing = _outgoing(bench, tmp_path, 1)
    outgoing.writer.begin(PARTITION, 0)
    outgoing.writer.space(len(frames[0]))[:] = frames[0]
    list(outgoing.writer.add(len(frames[0]), "a test"))
    outgoing.writer.producers.clear()  # as in another process
    outgoing.inside.append(Inside(PARTITION, 1, 0, 1, [11]))
    outgoing.histories[PARTITION] = bench.load()
    assert bench.run(rounds._upload(outgoing, [], {PARTITION: owned}))
    assert bench.asked == [[11, 22]]
    assert bench.load().manifest.producers == NAMES
    assert bench.load().manifest.end_offset == 2


def test_a_partition_that_moves_gets_its_names_with_the_next_record(tmp_path: Path) -> None:
    """One that is deleted needs its record, too: what it has in a shared object is cleared away by that."""
    bench = Naming()
    rounds = Rounds(bench.state, Checkpoints(tmp_path))
    frames = _frames(0, [11])
    log = bench.logs[PARTITION] = FakeLog(tmp_path, frames)
    bench.load().note_agreement()
    owned = _Owned(WORKER, log.backlog(0))
    bench.is_moving = True
    assert bench.run(rounds._upload(_outgoing(bench, tmp_path, 1), [owned], {PARTITION: owned}))
    assert bench.load().manifest.end_offset == 1 and bench.load().manifest.producers == {}
    bench.is_moving = False
    log = bench.logs[PARTITION] = FakeLog(tmp_path, [*frames, *_frames(1, [22])])
    owned = _Owned(WORKER, log.backlog(1))
    assert bench.run(rounds._upload(_outgoing(bench, tmp_path, 2), [owned], {PARTITION: owned}))
    assert bench.load().manifest.producers == {11: NAMES[11], 22: NAMES[22]}
