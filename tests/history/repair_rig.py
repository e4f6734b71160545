"""Stores with a history that uploaders have made, with faults of all kinds, and what of it must be readable."""

from __future__ import annotations

import random
from collections.abc import Iterator

from danube_fast.clock import SystemClock
from danube_fast.errors import DataLoss
from danube_fast.frame.view import FrameView
from danube_fast.history.catalog import FAULTS
from danube_fast.history.layout import OBJECTS_PREFIX
from danube_fast.history.manifest import (
    MANIFESTS_PREFIX,
    Manifest,
    ManifestLog,
    ManifestReader,
    Section,
)
from danube_fast.history.objects import verify_object
from danube_fast.history.reader import HistoryReader
from danube_fast.history.repair import Repair, repair_history
from danube_fast.history.stores.memory import MemoryStore
from tests.history.rig import (
    IDENTITY,
    START_NS,
    change_object,
    make_frames,
    put_history,
    put_object,
)

TOPIC = "/default/a"
TOPICS = {5: "/default/a", 6: "/default/a", 7: "/default/b"}
FRAMES = 60


class World:
    """A store, and the logs that its history came from."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.store = MemoryStore(SystemClock())
        self.frames = {number: make_frames(number, 0, FRAMES, self.chance, 60) for number in TOPICS}
        self.epoch = 0
        self.logs: dict[int, ManifestLog] = {}
        self.numbers: dict[int, int] = {}
        self.begin()

    def begin(self) -> None:
        """Let another uploader begin."""
        self.epoch += 1
        self.numbers[self.epoch] = 0
        self.logs = {
            number: ManifestLog(self.store, IDENTITY, number, self.epoch) for number in TOPICS
        }
        for log in self.logs.values():
            log.load()

    def take(self, partition_id: int) -> list[bytearray]:
        """Take frames that are not uploaded yet; none if there are no more."""
        end = self.logs[partition_id].manifest.end_offset
        left = [each for each in self.frames[partition_id] if FrameView(each).base_offset >= end]
        return left[: self.chance.randrange(1, 8)]

    def upload(self, *, is_cut_short: bool) -> None:
        """Make an object of some partitions; name it nowhere, or in some manifests alone, if `is_cut_short`."""
        chance = self.chance
        chosen = {number: self.take(number) for number in TOPICS if chance.random() < 0.7}
        chosen = {number: some for number, some in chosen.items() if some}
        if not chosen:
            return
        self.numbers[self.epoch] += 1
        sections = put_object(
            self.store, chosen, epoch=self.epoch, number=self.numbers[self.epoch],
            part_bytes=1 << 20,
        )  # fmt: skip
        for (number, some), section in zip(chosen.items(), sections, strict=True):
            if is_cut_short and chance.random() < 0.8:
                continue
            last, log = FrameView(some[-1]), self.logs[number]
            log.commit(
                TOPICS[number], 1, 1, first_offset=log.manifest.first_offset,
                end_offset=last.base_offset + last.offset_span, added=[section],
            )  # fmt: skip

    def expire(self) -> None:
        """Let the oldest sections of a partition go, and their objects, perhaps."""
        log = self.logs[self.chance.choice(list(TOPICS))]
        manifest = log.manifest
        if len(manifest.sections) < 2:
            return
        gone = manifest.sections[: self.chance.randrange(1, len(manifest.sections))]
        log.commit(
            manifest.topic, 1, 1, first_offset=gone[-1].end_offset,
            end_offset=manifest.end_offset, removed=[each.key for each in gone],
        )  # fmt: skip
        if self.chance.random() < 0.5:
            self.sweep()

    def sweep(self) -> None:
        """Delete objects that no manifest names."""
        named = {s.key for log in self.logs.values() for s in log.manifest.sections}
        listed = [info.key for info in self.store.list(OBJECTS_PREFIX)]
        self.store.delete([key for key in listed if key not in named])

    def live(self, steps: int) -> None:
        """Let uploaders work."""
        for _ in range(steps):
            step = self.chance.random()
            if step < 0.1:
                self.begin()
            elif step < 0.2:
                self.expire()
            else:
                self.upload(is_cut_short=step < 0.35)

    def damage(self, count: int) -> None:
        """Lose or change records and objects."""
        for _ in range(count):
            prefix = self.chance.choice([MANIFESTS_PREFIX, OBJECTS_PREFIX])
            keys = [info.key for info in self.store.list(prefix) if info.size]
            if not keys:
                continue
            key = self.chance.choice(keys)
            if self.chance.random() < 0.5:
                self.store.delete([key])
            else:
                change_object(self.store, key, self._flip)

    def _flip(self, data: bytearray) -> None:
        at = self.chance.randrange(len(data))
        data[at] ^= 1 << self.chance.randrange(8)


def readable(store: MemoryStore, partition_id: int, manifest: Manifest) -> dict[int, bytes]:
    """Read all that a reader gets, the frames by their first offset; expect it in order, once."""
    reader = HistoryReader(store, partition_id, manifest)
    found: dict[int, bytes] = {}
    for base, end in steps(manifest):
        at = base
        while at < end:
            try:
                fetched = reader.fetch(at, 1)
            except DataLoss:
                at += 1
                continue
            if fetched is None:
                break
            place = 0
            while place < len(fetched.data):
                frame = FrameView(fetched.data, place)
                assert found.get(frame.base_offset) in (None, bytes(frame.frame))
                found[frame.base_offset] = bytes(frame.frame)
                place += frame.frame_bytes
            at = max(at + 1, fetched.end_offset)
    return found


def steps(manifest: Manifest) -> Iterator[tuple[int, int]]:
    """Yield the offsets to read."""
    yield manifest.first_offset, manifest.end_offset


def held_by_sound_objects(store: MemoryStore) -> dict[int, set[int]]:
    """First offsets of the frames in objects of which every byte is sound, by partition."""
    found: dict[int, set[int]] = {number: set() for number in TOPICS}
    for info in list(store.list(OBJECTS_PREFIX)):
        try:
            rows = verify_object(store, info.key, IDENTITY)
        except FAULTS:
            continue
        for row in rows:
            data, place = store.read(info.key, int(row["position"]), int(row["byte_count"])), 0
            while place < len(data):
                frame = FrameView(data, place)
                found[int(row["partition_id"])].add(frame.base_offset)
                place += frame.frame_bytes
    return found


def named(sections: list[Section]) -> list[tuple[int, int]]:
    """Offsets of sections."""
    return [(each.base_offset, each.end_offset) for each in sections]


def load(store: MemoryStore, partition_id: int, hint: int = -1) -> Manifest:
    """Read a manifest as a broker does that knows a record of it."""
    return ManifestReader(store, IDENTITY, partition_id).load(hint)


def repair(
    store: MemoryStore, adopted: dict[int, str] | None = None, *, is_dry: bool = False
) -> Repair:
    """Repair a store, at an instant that stands still."""
    return repair_history(store, adopted or {}, START_NS, is_dry=is_dry)


def contents(store: MemoryStore) -> dict[str, bytes]:
    """Read all objects of a store."""
    return {info.key: store.read(info.key) for info in store.list()}


def history_of(store: MemoryStore, objects: int = 4) -> ManifestLog:
    """Make the history of one partition: so many objects, a record for each."""
    return put_history(store, objects, {5: TOPIC})[5]


def flip(store: MemoryStore, key: str, at: int = 40) -> None:
    """Change one bit of an object."""
    change_object(store, key, lambda data: data.__setitem__(at, data[at] ^ 0x10))
