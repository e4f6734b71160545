"""Checkpoints of uploads that another life of the broker began: the log has other messages than the object."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from danube_fast.history.layout import ObjectHeader
from danube_fast.history.objects import ObjectWriter
from danube_fast.history.stores.memory import MemoryStore
from danube_fast.testing.virtual_clock import VirtualClock
from danube_fast.workers.uploader.checkpoint import Checkpoint, Checkpoints, Inside, Progress
from danube_fast.workers.uploader.resumption import Made, Outgoing, Resumption
from danube_fast.workers.uploader.sender import Sender
from tests.history.rig import IDENTITY, put_object
from tests.workers.uploader_rig import PARTITION, TOPIC, WORKER, Bench, FakeLog, frames_from

OTHER = PARTITION + 1
PART_BYTES = 4000
START, END = 100, 200
"""Offsets of the partition in the object."""


class Upload(Bench):
    """An upload that was cut short: its object has the partition, and another one behind it."""

    def __init__(self, folder: Path, *, is_ended: bool, life: int = 0, before: int = 0) -> None:
        """`life`: of what is in the object; `before`: of what the manifest has."""
        super().__init__(MemoryStore(VirtualClock()), part_bytes=PART_BYTES)
        (section,) = put_object(self.store, {PARTITION: frames_from(0, 10, before)})
        self.load().commit(TOPIC, 1, end_offset=START, added=[section])
        self.folder = folder
        self.checkpoints = Checkpoints(folder)
        self.others = frames_from(0, 20, 0, OTHER)
        self.logs[OTHER] = FakeLog(folder, self.others)
        header = ObjectHeader(IDENTITY, 3, 7, 9)
        writer = ObjectWriter(header, PART_BYTES)
        blank = Checkpoint(url=self.store.url, header=header, key=writer.key, part_bytes=PART_BYTES)
        progress = Progress(self.checkpoints, blank)
        sender = Sender(self.store, writer.key, progress)
        inside = [Inside(PARTITION, 1, START, END), Inside(OTHER, 1, 0, 200)]
        for each, frames in zip(inside, (frames_from(START, 10, life), self.others), strict=True):
            writer.begin(each.partition_id, each.start)
            data = b"".join(frames)
            writer.space(len(data))[:] = data
            parts = list(writer.add(len(data), "a test"))
            progress.hold(writer.state(), inside[: inside.index(each) + 1])
            for part in parts:
                self.run(sender.send(part))
        self.run(sender.settle())
        if is_ended:
            self.run(sender.finish(*writer.finish(), inside))
        found = self.checkpoints.current
        assert found is not None
        assert (found.state is None, found.inside) == (is_ended, inside)

    def resume(self, frames: Sequence[bytearray], uploaded_until: int = START) -> Any:
        """Go on with a log that has these frames from `START` on."""
        log = self.logs[PARTITION] = FakeLog(self.folder, [*frames_from(0, 10), *frames])
        backlogs = log.backlog(uploaded_until), self.logs[OTHER].backlog(0, partition_id=OTHER)
        owners = {backlog.partition_id: (WORKER, backlog) for backlog in backlogs}
        return self.run(Resumption(self.state, self.checkpoints).resume(owners))


@pytest.mark.parametrize("is_ended", [True, False])
def test_an_upload_goes_on_if_the_log_has_what_is_in_it(tmp_path: Path, is_ended: bool) -> None:
    upload = Upload(tmp_path, is_ended=is_ended)
    found = upload.resume(frames_from(START, 30))
    assert isinstance(found, Made if is_ended else Outgoing)
    assert [each.partition_id for each in found.inside] == [PARTITION, OTHER]


def test_parts_of_another_life_are_dropped(tmp_path: Path) -> None:
    """The checkpoint is younger than the log: both were copied while the broker ran."""
    upload = Upload(tmp_path, is_ended=False, life=1)
    assert upload.resume(frames_from(START, 30)) is None
    assert upload.checkpoints.current is None
    assert not list(upload.store.uploads())


def test_a_manifest_does_not_name_an_object_of_another_life(tmp_path: Path) -> None:
    upload = Upload(tmp_path, is_ended=True, life=1)
    found = upload.resume(frames_from(START, 30))
    assert [each.partition_id for each in found.inside] == [OTHER]
    assert [section.message_count for section in found.sections] == [200]


@pytest.mark.parametrize("is_ended", [True, False])
def test_a_log_that_is_older_than_its_manifest_goes_on_with_nothing(
    tmp_path: Path, is_ended: bool
) -> None:
    """Its owner knows less than the manifest, which ends where the object begins."""
    upload = Upload(tmp_path, is_ended=is_ended, life=1, before=1)
    found = upload.resume(frames_from(START, 30, 1), uploaded_until=50)
    if is_ended:
        assert [each.partition_id for each in found.inside] == [OTHER]
    else:
        assert found is None
        assert upload.checkpoints.current is None


def test_a_log_that_cannot_be_compared_just_now_is_waited_for(tmp_path: Path) -> None:
    upload = Upload(tmp_path, is_ended=True)
    log = upload.logs[PARTITION] = FakeLog(tmp_path, frames_from(0, 40))
    log.synced_until = START
    backlogs = log.backlog(START), upload.logs[OTHER].backlog(0, partition_id=OTHER)
    owners = {backlog.partition_id: (WORKER, backlog) for backlog in backlogs}
    resumption = Resumption(upload.state, upload.checkpoints)
    assert upload.run(resumption.resume(owners)) is None
    assert resumption.is_waiting
    log.synced_until = log.end_offset
    found = upload.run(resumption.resume(owners))
    assert [each.partition_id for each in found.inside] == [PARTITION, OTHER]
