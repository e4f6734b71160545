"""The checkpoint of an upload: its file, when it is written, and uploads that no checkpoint names."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.broker.messages import FileRange
from danube_fast.errors import AlreadyExists, DanubeError, NotFound, Unavailable
from danube_fast.frame.view import FrameView
from danube_fast.history.layout import ObjectHeader, object_key
from danube_fast.history.objects import ObjectWriter, WriterState
from danube_fast.history.stores.memory import MemoryStore
from danube_fast.history.stores.store import Part, Upload
from danube_fast.testing.virtual_clock import VirtualClock
from danube_fast.workers.process.tasks import Do, Pause, Task
from danube_fast.workers.uploader.abandoned import GRACE_NS, abandoned, sweep
from danube_fast.workers.uploader.checkpoint import (
    CHECKPOINT_NAME,
    Checkpoint,
    Checkpoints,
    Inside,
    Progress,
)
from danube_fast.workers.uploader.log_files import add_ranges, read_frames
from danube_fast.workers.uploader.sender import complete
from tests.history.rig import IDENTITY, make_frames

HEADER = ObjectHeader(IDENTITY, 3, 7, 9)
BLANK = Checkpoint(url="memory://", header=HEADER, key=object_key(3, 7), part_bytes=100)
INSIDE = [Inside(5, 1, 0, 9)]


def state(part_count: int) -> WriterState:
    return WriterState(part_count, part_count * 100, b"rows", [(0, 1)], 1)


def part(number: int) -> Part:
    return Part(number, (number - 1) * 100, 100, f"tag {number}")


def run(task: Task) -> Any:
    """Take all steps, up to a pause; what the task returns."""
    value: Any = None
    try:
        step = task.send(None)
        while not isinstance(step, Pause):
            assert isinstance(step, Do)
            try:
                value = step.work()
            except DanubeError as error:
                step = task.throw(error)
            else:
                step = task.send(value)
    except StopIteration as end:
        return end.value
    return None


def kept(folder: Path) -> Checkpoint | None:
    """The checkpoint that the next uploader finds."""
    checkpoints = Checkpoints(folder)
    checkpoints.load()
    return checkpoints.current


def test_what_is_written_is_read_and_nothing_else(tmp_path: Path) -> None:
    progress = Progress(Checkpoints(tmp_path), BLANK)
    assert kept(tmp_path) is None
    progress.begin(Upload(BLANK.key, "an upload"))
    progress.hold(state(1), INSIDE)
    run(progress.note_sent(part(1)))
    found = kept(tmp_path)
    assert found is not None
    assert found.upload == Upload(BLANK.key, "an upload")
    assert (found.parts, found.inside, found.state) == ([part(1)], INSIDE, state(1))
    assert found.header == HEADER
    data = found.encode()
    for at in range(len(data)):
        assert Checkpoint.decode(data[:at]) is None
        assert Checkpoint.decode(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]) is None


def test_a_damaged_one_is_told_and_forgotten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / CHECKPOINT_NAME).write_bytes(b"damaged")
    assert kept(tmp_path) is None
    assert "is damaged" in caplog.text


def test_parts_count_once_all_before_them_are_sent(tmp_path: Path) -> None:
    """Parts end in any order; one call completes two of them."""
    progress = Progress(Checkpoints(tmp_path), BLANK)
    progress.begin(Upload(BLANK.key, "an upload"))
    for count in (1, 3, 4):
        progress.hold(state(count), INSIDE)
    seen = []
    for number in (2, 4, 1, 3):
        run(progress.note_sent(part(number)))
        found = kept(tmp_path)
        seen.append(len(found.parts) if found else 0)
        assert found is None or (found.state and found.state.part_count == len(found.parts))
    assert seen == [0, 0, 1, 4]
    run(progress.seal([], INSIDE, 450))
    found = kept(tmp_path)
    assert found is not None
    assert (found.state, found.size, len(found.parts)) == (None, 450, 4)
    again = Progress(Checkpoints(tmp_path), found)
    assert again.parts == [part(number) for number in (1, 2, 3, 4)]
    run(again.drop())
    assert kept(tmp_path) is None


def test_of_two_that_are_written_at_once_the_last_one_counts(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    first, second = (Checkpoint(**{**_fields(BLANK), "upload_id": name}) for name in "ab")
    writing = checkpoints.write(first)
    step = next(writing)
    run(checkpoints.write(second))
    assert isinstance(step, Do)
    step.work()
    run(writing)
    assert kept(tmp_path) == second


def _fields(checkpoint: Checkpoint) -> dict[str, Any]:
    return {name: getattr(checkpoint, name) for name in checkpoint.__struct_fields__}


def test_an_upload_goes_on_without_room_for_its_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An older one is removed: its object may be made by the time that it is read."""
    checkpoints = Checkpoints(tmp_path)
    run(checkpoints.write(BLANK))
    (tmp_path / f"{CHECKPOINT_NAME}.partial").mkdir()
    run(checkpoints.write(Checkpoint(**{**_fields(BLANK), "upload_id": "b"})))
    assert "sent again" in caplog.text
    assert checkpoints.current is not None
    assert kept(tmp_path) is None


# ---------------------------------------------------------------- uploads that no checkpoint names


def test_old_uploads_of_older_uploaders_are_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock = VirtualClock()
    store = MemoryStore(clock)
    named, left = store.begin(object_key(3, 1)), store.begin(object_key(3, 2))
    own, foreign = store.begin(object_key(4, 1)), store.begin("elsewhere/3")
    clock.now_ns += GRACE_NS // 2
    young = store.begin(object_key(3, 3))
    assert abandoned(store, 4, clock.wall_ns()) == []
    clock.now_ns += GRACE_NS // 2 + 1
    assert set(abandoned(store, 4, clock.wall_ns())) == {named, left}
    checkpoints = Checkpoints(tmp_path)
    run(checkpoints.write(Checkpoint(**{**_fields(BLANK), "upload_id": named.upload_id})))
    broken = SimpleNamespace(store=store, epoch=4, clock=clock)
    run(sweep(broken, checkpoints))  # type: ignore[arg-type]
    assert {upload for upload, _ in store.uploads()} == {named, own, foreign, young}
    assert left.key in caplog.text


# ---------------------------------------------------------------- objects that are there already


def test_an_object_of_another_broker_is_not_ours() -> None:
    store = MemoryStore(VirtualClock())
    other = ObjectHeader(b"another identity", 3, 7, 9)
    store.create(object_key(3, 7), other.encode() + bytes(100))
    upload = store.begin(object_key(3, 7))
    sent = [store.put_part(upload, 1, 0, HEADER.encode() + bytes(100))]
    with pytest.raises(AlreadyExists):
        complete(store, upload, sent, HEADER, 164)
    store.delete([object_key(3, 7)])
    complete(store, upload, sent, HEADER, 164)
    complete(store, upload, sent, HEADER, 164)  # its answer was lost
    complete(store, Upload(object_key(3, 7), ""), [], HEADER, 164)
    with pytest.raises(NotFound, match="was not created"):
        complete(store, Upload(object_key(3, 8), ""), [], HEADER._replace(number=8), 164)


# ---------------------------------------------------------------- files of the log


def test_a_run_is_read_from_the_offset_that_was_asked_for(tmp_path: Path) -> None:
    """The index may know several frames as one run, and the one asked for in its middle."""
    frames = make_frames(5, 0, 20, random.Random(1))
    path = tmp_path / "segment"
    path.write_bytes(b"before" + b"".join(frames))
    ends = [FrameView(frame).base_offset + FrameView(frame).offset_span for frame in frames]
    size = sum(map(len, frames))
    ranges = [FileRange(str(path), 6, size, ends[-1])]
    for place in (0, 1, 19):
        offset = ends[place - 1] if place else 0
        rest = b"".join(frames[place:])
        assert read_frames(ranges, offset, 1 << 20) == rest
        assert read_frames(ranges, offset, 300) == rest[:300]
        writer = ObjectWriter(HEADER, 1 << 20)
        writer.begin(5, offset)
        assert add_ranges(writer, ranges, offset) == []
        assert writer.size == 64 + len(rest)
    with pytest.raises(Unavailable, match="the file ends before"):
        read_frames([FileRange(str(path), 6, size + 1, ends[-1])], 0, 300)
    writer = ObjectWriter(HEADER, 1 << 20)
    writer.begin(5, 0)
    with pytest.raises(Unavailable, match="other messages stand there"):
        add_ranges(writer, [FileRange(str(path), 6, size, ends[-1] + 1)], 0)
