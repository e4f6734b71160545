"""The formats, pinned: these bytes must be written and read for ever.

The files under golden/ were made by `python -m tests.history.test_golden` (it overwrites nothing). A change
here is a change of the format: it needs a version bump, a line in docs/history.md and a migration.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from danube_fast.clock import SystemClock
from danube_fast.frame.view import FrameView
from danube_fast.history.layout import object_key
from danube_fast.history.manifest import ManifestLog, Record, Section, manifest_key
from danube_fast.history.objects import read_blocks, verify_object
from danube_fast.history.stores.memory import MemoryStore
from danube_fast.workers.shard.read.frames import frames_of
from tests.history.rig import IDENTITY, make_frame, put_object

GOLDEN = Path(__file__).parent / "golden"
FRAMES = {
    7: [make_frame(7, 100, [b"first", b"second"]), make_frame(7, 105, [b"third"])],
    9: [make_frame(9, 0, [b"of another partition"])],
}
OBJECT = object_key(3, 17)
RECORD = manifest_key(7, 0)
PRODUCERS = {3: "loader", 1 << 62: "späher"}


def make() -> dict[str, bytes]:
    """Every golden file, made now."""
    store = MemoryStore(SystemClock())
    sections = put_object(store, FRAMES, epoch=3, number=17)
    log = ManifestLog(store, IDENTITY, 7, 3)
    log.load()
    log.commit(
        "/default/golden",
        2,
        5,
        first_offset=100,
        end_offset=110,
        added=sections[:1],
        removed=["gone"],
        producers=PRODUCERS,
    )
    return {"object": store.read(OBJECT), "record": store.read(RECORD)}


@pytest.mark.parametrize("name", ["object", "record"])
def test_the_same_bytes_are_written(name: str) -> None:
    assert make()[name] == (GOLDEN / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "producers"), [("record", PRODUCERS), ("record-before-producers", {})]
)
def test_they_are_read(name: str, producers: dict[int, str]) -> None:
    store = MemoryStore(SystemClock())
    store.create(OBJECT, (GOLDEN / "object").read_bytes())
    store.create(RECORD, (GOLDEN / name).read_bytes())
    rows = verify_object(store, OBJECT, IDENTITY)
    assert rows["partition_id"].tolist() == [7, 9]
    assert rows["end_offset"].tolist() == [106, 1]
    record = Record.decode(store.read(RECORD), "golden")
    assert (record.topic, record.incarnation, record.owner_epoch) == ("/default/golden", 2, 5)
    assert (record.number, record.previous, record.snapshot, record.removed) == (0, -1, 0, ["gone"])
    manifest = ManifestLog(store, IDENTITY, 7, 3).load()
    assert (manifest.first_offset, manifest.end_offset) == (100, 110)
    assert manifest.producers == producers
    (section,) = manifest.sections
    assert (section.key, section.message_count, section.block_count) == (OBJECT, 3, 1)
    assert len(read_blocks(store, section)) == 1
    data = store.read(OBJECT, section.position, section.byte_count)
    payloads = [FrameView(stored.memory).payloads() for stored in frames_of(7, data)]
    assert payloads == [[b"first", b"second"], [b"third"]]


class _Before(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A record as the version before producers reads it."""

    identity: bytes
    partition_id: int
    topic: str
    incarnation: int
    number: int
    previous: int
    snapshot: int
    owner_epoch: int
    uploader_epoch: int
    first_offset: int
    end_offset: int
    added: list[Section] = []
    removed: list[str] = []


def test_the_version_before_reads_what_is_written_now() -> None:
    body = (GOLDEN / "record").read_bytes()[24:]
    record = msgspec.msgpack.decode(body, type=_Before)
    assert (record.end_offset, record.removed, len(record.added)) == (110, ["gone"], 1)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, data in make().items():
        path = GOLDEN / name
        if not path.exists():
            path.write_bytes(data)
