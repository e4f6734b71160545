"""Objects written again without a topic that was deleted: a record whose answer is lost is found again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from danube_fast.errors import Unavailable
from danube_fast.history.manifest import MANIFESTS_PREFIX, manifest_prefix
from danube_fast.history.stores.memory import MemoryStore
from danube_fast.testing.virtual_clock import VirtualClock
from danube_fast.workers.uploader.rewrite import rewrite_object
from danube_fast.workers.uploader.sweep import Sweep
from tests.history.rig import make_frame, put_object
from tests.workers.uploader_rig import PARTITION, TOPIC, Bench, frames_from

OTHER = PARTITION + 1


def other_frames(count: int) -> list[bytearray]:
    """Frames of a partition that shares objects with PARTITION."""
    return [make_frame(OTHER, offset, [b"y" * 100]) for offset in range(count)]


class Deaf(MemoryStore):
    """A store that makes records, and whose answers are lost when told."""

    is_deaf = False

    def create(self, key: str, data: bytes) -> None:
        super().create(key, data)
        if self.is_deaf and key.startswith(MANIFESTS_PREFIX):
            raise Unavailable("the answer is lost")


def test_a_record_whose_answer_was_lost_holds_up_no_later_one() -> None:
    store = Deaf(VirtualClock())
    bench = Bench(store)
    (section,) = put_object(store, {PARTITION: frames_from(0, 10)})
    bench.load().commit(TOPIC, 1, end_offset=section.end_offset, added=[section])
    store.is_deaf = True
    with pytest.raises(Unavailable):
        bench.run(rewrite_object(bench.state, section.key, [PARTITION], {}))
    store.is_deaf = False
    (made,) = bench.load().manifest.sections
    assert made.key != section.key
    assert bench.load().commit(TOPIC, 1, end_offset=200).end_offset == 200


def test_a_shared_object_stays_until_all_of_its_manifests_name_it() -> None:
    """A topic is deleted between the records of two partitions that one object has: the other one's record comes."""
    store = MemoryStore(VirtualClock())
    bench = Bench(store)
    bench.state.boot = SimpleNamespace(counters=SimpleNamespace(add=lambda *_: None))
    sections = put_object(store, {PARTITION: frames_from(0, 10), OTHER: other_frames(10)})
    key = sections[0].key
    bench.load().commit(TOPIC, 1, end_offset=sections[0].end_offset, added=[sections[0]])
    bench.state.writing.add(key)
    sweep = Sweep(bench.state)
    # a sweep that has listed who names what before the object was made
    bench.run(sweep._delete_partition(PARTITION, {}, {PARTITION}))
    assert store.head(key) is not None and bench.load().manifest.sections
    other = bench.run(bench.state.history(OTHER, -1))
    other.commit("/default/other", 1, end_offset=sections[1].end_offset, added=[sections[1]])
    bench.state.writing.discard(key)
    bench.run(sweep._delete_partition(PARTITION, {}, {PARTITION}))
    assert store.head(key) is None
    (made,) = bench.run(bench.state.history(OTHER, -1)).manifest.sections
    assert made.key != key and store.head(made.key) is not None
    assert not list(store.list(manifest_prefix(PARTITION)))
