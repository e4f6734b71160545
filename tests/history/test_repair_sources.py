"""Where a repair takes messages from: what a manifest has named comes before objects that none names."""

from __future__ import annotations

import pytest

from danube_fast.clock import SystemClock
from danube_fast.frame.view import FrameView
from danube_fast.history.layout import BLOCK_BYTES, object_key
from danube_fast.history.manifest import ManifestLog, manifest_key
from danube_fast.history.stores.memory import MemoryStore
from tests.history.repair_rig import TOPIC, flip, load, named, readable, repair
from tests.history.rig import IDENTITY, make_frame, put_object


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(SystemClock())


def blocks(first: int, end: int, fill: bytes) -> list[bytearray]:
    """Frames of one message that are a block each."""
    return [make_frame(5, offset, [fill * BLOCK_BYTES]) for offset in range(first, end)]


def test_an_orphan_fills_only_the_holes_of_a_damaged_section(store: MemoryStore) -> None:
    """It fits whole, and is of another life of the topic."""
    ours, others = blocks(0, 6, b"a"), blocks(0, 6, b"b")
    (section,) = put_object(store, {5: ours}, part_bytes=1 << 20)
    ManifestLog(store, IDENTITY, 5, 1).commit(
        TOPIC, 1, 1, first_offset=0, end_offset=6, added=[section]
    )
    put_object(store, {5: others}, epoch=2, part_bytes=1 << 20)
    flip(store, section.key, section.position + 2 * len(ours[0]) + 500)
    (one,) = repair(store).partitions
    assert one.named == []
    assert [(each.key, each.base_offset, each.end_offset) for each in one.copied] == [
        (section.key, 0, 2),
        (section.key, 3, 6),
        (object_key(2, 0), 2, 3),
    ]
    got = readable(store, 5, load(store, 5))
    assert got == {n: bytes((others if n == 2 else ours)[n]) for n in range(6)}
    assert repair(store).partitions == []


def test_an_orphan_that_has_no_whole_frame_for_a_hole_is_no_help(store: MemoryStore) -> None:
    """The section stays named as it was."""
    ours = blocks(0, 4, b"a")
    (section,) = put_object(store, {5: ours}, part_bytes=1 << 20)
    ManifestLog(store, IDENTITY, 5, 1).commit(
        TOPIC, 1, 1, first_offset=0, end_offset=4, added=[section]
    )
    put_object(store, {5: [make_frame(5, 0, [b"x"] * 4)]}, epoch=2)
    flip(store, section.key, section.position + 2 * len(ours[0]) + 500)
    done = repair(store)
    assert (done.partitions, len(done.damages)) == ([], 1)
    assert load(store, 5).sections == [section]


def history_with_a_gap(store: MemoryStore) -> ManifestLog:
    """Make a history in which offsets 5 to 10 were never used; the record that adds 10 to 15 is damaged."""
    log = ManifestLog(store, IDENTITY, 5, 1)
    for number, (base, end) in enumerate([(0, 10), (10, 15), (15, 20)]):
        frames = [make_frame(5, base, [b"ours"] * 5)]
        sections = put_object(store, {5: frames}, number=number)
        log.commit(TOPIC, 1, 1, first_offset=0, end_offset=end, added=sections)
    flip(store, manifest_key(5, 1))
    return log


@pytest.mark.parametrize("is_there", [True, False])
def test_offsets_that_were_never_used_stay_so(store: MemoryStore, is_there: bool) -> None:
    """An orphan has messages there: it is not named, and only what is needed is copied."""
    wanted = history_with_a_gap(store).manifest.sections
    frames = [make_frame(5, 7, [b"theirs"] * 3), make_frame(5, 10, [b"theirs"] * 5)]
    put_object(store, {5: frames}, epoch=2)
    if not is_there:
        store.delete([object_key(1, 1)])
    (one,) = repair(store).partitions
    manifest = load(store, 5)
    assert one.lost == []
    assert named(manifest.sections) == [(0, 5), (10, 15), (15, 20)]
    assert sorted(readable(store, 5, manifest)) == [0, 10, 15]
    if is_there:
        assert manifest.sections == wanted
        return
    assert [(each.key, each.base_offset, each.end_offset) for each in one.copied] == [
        (object_key(2, 0), 10, 15)
    ]


def test_an_orphan_reaches_across_offsets_that_were_never_used(store: MemoryStore) -> None:
    """It has no messages there, as an object that was written again has none, so it is named as it is."""
    log = ManifestLog(store, IDENTITY, 5, 1)
    frames = [make_frame(5, base, [b"x"] * 5) for base in (0, 10)]
    for number, frame in enumerate(frames):
        sections = put_object(store, {5: [frame]}, number=number)
        log.commit(TOPIC, 1, 1, first_offset=0, end_offset=10 * number + 10, added=sections)
    store.delete([object_key(1, 0), object_key(1, 1)])
    (whole,) = put_object(store, {5: frames}, number=2)
    (one,) = repair(store).partitions
    assert (one.copied, one.lost) == ([], [])
    assert load(store, 5).sections == [whole]
    assert readable(store, 5, load(store, 5)).keys() == {FrameView(f).base_offset for f in frames}
