"""Objects written again without a topic that was deleted: a record whose answer is lost is found again."""

from __future__ import annotations

import pytest

from danube_fast.errors import Unavailable
from danube_fast.history.manifest import MANIFESTS_PREFIX
from danube_fast.history.stores.memory import MemoryStore
from danube_fast.testing.virtual_clock import VirtualClock
from danube_fast.workers.uploader.rewrite import rewrite_object
from tests.history.rig import put_object
from tests.workers.uploader_rig import PARTITION, TOPIC, Bench, frames_from


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
