"""What comes back after damage: the longest valid prefix or a named corruption, never a ghost.

One log is written once, with synced groups, a marker and an unsynced tail, over several small
segments. Hypothesis then flips or cuts at any byte of any segment of a copy; a model of where the
frames stand says what must come back.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from danube_fast.errors import DataLoss, FailedPrecondition
from danube_fast.frame.layout import HEADER_BYTES, HEADER_DTYPE, Flag
from danube_fast.wal.layout import GROUP_ALIGNMENT, SEGMENT_HEADER_BYTES, SegmentHeader
from danube_fast.wal.log import Log
from tests.wal.rig import (
    LOG_ID,
    SETTINGS,
    abandon,
    data_rows,
    make_frame,
    open_log,
    put,
    segments,
    stamp_frame,
    start_log,
    wait_synced,
)

SMALL = msgspec.structs.replace(SETTINGS, segment_bytes=96 * 1024)


class Frame(NamedTuple):
    position: int
    checked_bytes: int  # bytes whose damage is seen
    frame_bytes: int
    offset: int | None  # None: control or pad
    synced: int


class Written(NamedTuple):
    directory: Path
    frames: list[Frame]
    end: int
    durable: int  # acknowledged up to here, and a marker says so
    firsts: list[int]


def read_frames(log: Log, end: int) -> list[Frame]:
    found, at = [], 0
    while at < end:
        header = np.frombuffer(log.read(at, HEADER_BYTES), HEADER_DTYPE)[0]
        size, flags = int(header["frame_bytes"]), int(header["flags"])
        found.append(
            Frame(
                at,
                HEADER_BYTES if flags & Flag.PAD else size,
                size,
                None if flags & Flag.CONTROL else int(header["base_offset"]),
                int(header["synced_position"]),
            )
        )
        at += size
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    directory = tmp_path_factory.mktemp("written")
    log = start_log(directory, SMALL)
    sizes = [200, 5000, 3960, 12_000, 40, 30_000, 8000]
    offset = 0
    for size in sizes * 2:
        frames = [make_frame([bytes([offset % 251]) * part]) for part in (size, 64, size // 2)]
        total = sum(map(len, frames))
        at = log.reserve(total)
        for frame in frames:
            synced = log.synced_position
            stamp_frame(frame, at, epoch=log.epoch, base_offset=offset, synced=synced)
            at += len(frame)
            offset += 1
        log.append(frames, total)
        log.sync()
        wait_synced(log)
    assert log.write_marker()
    wait_synced(log)
    durable = log.written_position - GROUP_ALIGNMENT
    put(log, ([b"tail" * 900] for _ in range(12)), base_offset=offset, sync=False)
    frames_found = read_frames(log, log.written_position)
    end = log.written_position
    shutil.copytree(directory, directory.with_name("kept"))  # before a last sync can help
    abandon(log)
    firsts = [int(path.stem) for path in segments(directory.with_name("kept"))]
    assert len(firsts) >= 3
    return Written(directory.with_name("kept"), frames_found, end, durable, firsts)


def expected_after(written: Written, faulty: Frame | None) -> tuple[list[int], int, int]:
    """(offsets before the fault, cut, largest synced that any other sound header names)."""
    cut = faulty.position if faulty else written.end
    offsets = [f.offset for f in written.frames if f.offset is not None and f.position < cut]
    seen = [
        f.synced
        for f in written.frames
        if f is not faulty and (f.position < cut or f.position % GROUP_ALIGNMENT == 0)
    ]
    return offsets, cut, max(seen, default=0)


def check_recovery(
    copy: Path, written: Written, faulty: Frame | None, new_bytes: int, *, is_short: bool = False
) -> None:
    offsets, cut, synced = expected_after(written, faulty)
    log = open_log(copy, SMALL)
    if cut < synced or is_short:
        with pytest.raises(DataLoss, match=rf"\.seg is damaged at position {cut}:") as caught:
            data_rows(log)
        assert "accept-loss" in str(caught.value)
        log.close()
        return
    assert cut >= written.durable, "less than was acknowledged came back without a word"
    assert [row[1] for row in data_rows(log)] == offsets
    log.begin_epoch([b"again"])
    assert log.epoch == 2
    put(log, [[bytes(new_bytes)]], base_offset=10_000)
    wait_synced(log)
    abandon(log)
    third = open_log(copy, SMALL)
    assert [row[1] for row in data_rows(third)] == [*offsets, 10_000]
    third.begin_epoch([b"x"])
    assert third.epoch == 3
    third.close()


def fault_of_flip(written: Written, index: int, place: int) -> Frame | None:
    """The frame that a flip at byte `place` of segment `index` damages."""
    if place < SEGMENT_HEADER_BYTES:
        return None
    position = written.firsts[index] + place - SEGMENT_HEADER_BYTES
    if index + 1 < len(written.firsts) and position >= written.firsts[index + 1]:
        return None
    for frame in written.frames:
        if frame.position <= position < frame.position + frame.checked_bytes:
            return frame
    return None


def fault_of_cut(written: Written, index: int, size: int) -> Frame | None:
    """The first frame that a file of only `size` bytes does not hold whole."""
    first = written.firsts[index]
    end = written.firsts[index + 1] if index + 1 < len(written.firsts) else written.end
    kept = first + max(size - SEGMENT_HEADER_BYTES, 0)
    for frame in written.frames:
        if first <= frame.position < end and frame.position + frame.checked_bytes > kept:
            return frame
    return None


RELAXED = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@RELAXED
@given(data=st.data())
def test_a_flip_of_any_byte(written: Written, tmp_path: Path, data: st.DataObject) -> None:
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(written.directory, copy)
    index = data.draw(st.integers(0, len(written.firsts) - 1), label="segment")
    near = [f.position - written.firsts[index] + SEGMENT_HEADER_BYTES for f in written.frames]
    near = [place for place in near if 0 <= place < SMALL.segment_bytes - HEADER_BYTES]
    place = data.draw(
        st.integers(0, SMALL.segment_bytes - 1)
        | st.sampled_from(near).flatmap(lambda at: st.integers(at, at + HEADER_BYTES)),
        label="byte",
    )
    with open(segments(copy)[index], "r+b") as file:
        file.seek(place)
        old = file.read(1)[0]
        file.seek(place)
        file.write(bytes([old ^ data.draw(st.integers(1, 255), label="mask")]))
    new_bytes = data.draw(st.integers(1, 20_000), label="new bytes")
    check_recovery(copy, written, fault_of_flip(written, index, place), new_bytes)


@RELAXED
@given(data=st.data())
def test_a_cut_at_any_byte(written: Written, tmp_path: Path, data: st.DataObject) -> None:
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(written.directory, copy)
    index = data.draw(st.integers(0, len(written.firsts) - 1), label="segment")
    size = data.draw(st.integers(0, SMALL.segment_bytes), label="size")
    os.truncate(segments(copy)[index], size)
    new_bytes = data.draw(st.integers(1, 20_000), label="new bytes")
    faulty = fault_of_cut(written, index, size)
    # a file that ends where the frames do may have held more of them
    bare = written.end - written.firsts[-1] + SEGMENT_HEADER_BYTES + HEADER_BYTES
    is_bare = index == len(written.firsts) - 1 and size < min(bare, SMALL.segment_bytes)
    check_recovery(copy, written, faulty, new_bytes, is_short=faulty is not None or is_bare)


def test_without_damage_everything_comes_back(written: Written, tmp_path: Path) -> None:
    shutil.copytree(written.directory, tmp_path / "copy")
    check_recovery(tmp_path / "copy", written, None, 100)


def test_a_missing_segment_is_named(written: Written, tmp_path: Path) -> None:
    for index in range(len(written.firsts) - 1):
        copy = tmp_path / f"copy{index}"
        shutil.copytree(written.directory, copy)
        segments(copy)[index].unlink()
        with pytest.raises(DataLoss, match=r"missing|does not start there"):
            open_log(copy, SMALL)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_missing_newest_segment_is_named(tmp_path: Path, is_stopped: bool) -> None:
    """No segment behind it says that it was there: the index does, or the snapshot of an orderly stop."""
    log = start_log(tmp_path, SMALL)
    put(log, ([bytes(3000)] for _ in range(60)))
    wait_synced(log)
    if is_stopped:
        log.close(b"state")
    else:
        assert log.write_marker()
        abandon(log)
    segments(tmp_path)[-1].unlink()
    with pytest.raises(DataLoss, match="missing"):
        data_rows(open_log(tmp_path, SMALL))


# -- golden bytes: exactly what a torn group or a recycled file leaves behind ------------------


def write_at(directory: Path, position: int, data: bytes | bytearray) -> None:
    """Put bytes where log position `position` stands."""
    path = max(path for path in segments(directory) if int(path.stem) <= position)
    with open(path, "r+b") as file:
        file.seek(SEGMENT_HEADER_BYTES + position - int(path.stem))
        file.write(data)


def test_a_leftover_behind_the_epoch_record_never_comes_back(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    put(log, [[b"kept"]])
    wait_synced(log)
    cut = log.written_position
    abandon(log)
    # A group of epoch 1 at its own right position, one group behind the cut: its first page was
    # lost, the second was not. The epoch record of the restart ends exactly in front of it.
    leftover = stamp_frame(
        make_frame([b"ghost"]), cut + GROUP_ALIGNMENT, epoch=1, base_offset=1, synced=cut
    )
    write_at(tmp_path, cut + GROUP_ALIGNMENT, leftover)
    log = open_log(tmp_path)
    assert [row[1] for row in data_rows(log)] == [0]
    log.begin_epoch([b"again"])
    assert log.written_position == cut + GROUP_ALIGNMENT
    abandon(log)
    for _ in range(2):
        log = open_log(tmp_path)
        assert [row[1] for row in data_rows(log)] == [0]
        log.close()


def test_a_leftover_behind_a_torn_frame_never_comes_back(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    put(log, [[b"kept"]])
    wait_synced(log)
    cut = log.written_position
    frames = [make_frame([bytes([index]) * 6000]) for index in range(3)]
    at = log.reserve(sum(map(len, frames)))
    for index, frame in enumerate(frames):
        stamp_frame(frame, at, epoch=log.epoch, base_offset=1 + index, synced=cut)
        at += len(frame)
    log.append(frames, sum(map(len, frames)))
    abandon_end = log.written_position
    abandon(log)
    write_at(tmp_path, cut + len(frames[0]) + 5000, bytes(64))  # tears the second frame
    log = open_log(tmp_path)
    assert [row[1] for row in data_rows(log)] == [0, 1]
    log.begin_epoch([b"again"])
    assert log.written_position < abandon_end
    put(log, [[b"x" * 3000]], base_offset=2)
    wait_synced(log)
    abandon(log)
    log = open_log(tmp_path)
    assert [row[1] for row in data_rows(log)] == [0, 1, 2]
    log.close()


def test_a_leftover_right_at_a_snapshot_never_comes_back(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    put(log, [[b"kept"]])
    wait_synced(log)
    cut = log.written_position
    abandon(log)
    log = start_log(tmp_path)
    assert log.epoch == 2
    end = log.written_position
    log.close(b"state")
    leftover = stamp_frame(make_frame([b"ghost"]), end, epoch=1, base_offset=1, synced=cut)
    write_at(tmp_path, end, leftover)
    log = open_log(tmp_path)
    assert data_rows(log) == []
    assert log.snapshot is not None
    assert log._recovery.cut == log.snapshot[0]
    log.begin_epoch([b"x"])
    assert log.epoch == 3, "an epoch was used twice"
    log.close()


def test_a_stale_frame_of_a_recycled_segment_never_comes_back(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    put(log, [[b"kept"]])
    wait_synced(log)
    cut = log.written_position
    abandon(log)
    for position, log_id in ((cut - GROUP_ALIGNMENT, LOG_ID), (cut + 8, LOG_ID), (cut, 99)):
        stale = stamp_frame(make_frame([b"stale"]), position, epoch=9, synced=cut, log_id=log_id)
        write_at(tmp_path, cut, stale)
        log = open_log(tmp_path)
        assert [row[1] for row in data_rows(log)] == [0]
        log.close()


@pytest.mark.parametrize("shift", [-4096, 4096 * 4096])
@pytest.mark.parametrize("durable", [False, True])
def test_the_newest_segment_has_its_name_and_the_header_of_its_old_place(
    tmp_path: Path, shift: int, durable: bool
) -> None:
    """A power cut between the sync of the folder and that of the segment: no header says that anything
    in there was durable; unless a marker behind it does."""
    log = start_log(tmp_path, SMALL)
    offset = put(log, ([bytes(3800)] for _ in range(10)))
    while log.segment_count < 3:
        offset = put(log, [[bytes(3800)]], base_offset=offset)
    newest = max(tmp_path.glob("0*.seg"))
    first = int(newest.stem)
    wait_synced(log)
    if durable:
        assert log.write_marker()
        wait_synced(log)
    rows_before = first if not durable else log.written_position
    abandon(log)
    header = SegmentHeader.decode(newest.read_bytes()[:4096], str(newest))
    old = header._replace(
        first_position=first + shift, previous_position=max(0, first + shift - 4096)
    )
    with open(newest, "r+b") as file:
        file.write(old.encode())
        if not durable:
            file.write(bytes(newest.stat().st_size - 4096))  # nothing of its new life
    log = open_log(tmp_path, SMALL)
    assert len(data_rows(log)) == offset - (0 if durable else 1)
    assert log.begin_epoch([b"again"]) == rows_before
    put(log, [[b"more"]], base_offset=offset)
    wait_synced(log)
    abandon(log)
    log = open_log(tmp_path, SMALL)
    assert data_rows(log)[-1][1] == offset
    log.close()


def test_a_recycled_segment_full_of_old_frames(tmp_path: Path) -> None:
    small = msgspec.structs.replace(SMALL, spare_segments=1)
    log = start_log(tmp_path, small)
    offset = put(log, ([bytes(3800)] for _ in range(60)))
    wait_synced(log)
    log.save_snapshot(log.written_position, b"s")
    snapshot = log.written_position
    while log.snapshot_position != snapshot:
        wait_synced(log)
    assert log.trim(snapshot) >= 1
    recycled = set(tmp_path.glob("spare-*.seg"))
    assert recycled
    while set(tmp_path.glob("spare-*.seg")) & recycled:
        offset = put(log, [[bytes(10)]], base_offset=offset)
    last = offset - 1
    wait_synced(log)
    abandon(log)
    log = open_log(tmp_path, small)
    assert data_rows(log)[-1][1] == last
    log.close()


def test_a_marker_makes_a_lost_last_group_a_corruption(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    put(log, [[b"acknowledged"]])
    wait_synced(log)
    position = log.written_position - GROUP_ALIGNMENT
    assert log.write_marker()
    wait_synced(log)
    abandon(log)
    write_at(tmp_path, position, bytes(GROUP_ALIGNMENT))
    log = open_log(tmp_path)
    with pytest.raises(DataLoss, match=f"damaged at position {position}"):
        data_rows(log)
    with pytest.raises(FailedPrecondition):
        log.begin_epoch([b""])
    log.close()


def test_a_damaged_newest_snapshot_falls_back_to_the_older(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    for index in range(2):
        put(log, [[b"x"]], base_offset=index)
        wait_synced(log)
        log.save_snapshot(log.written_position, b"state %d" % index)
        at = log.written_position
        while log.snapshot_position != at:
            assert log.sync_fault is None
    abandon(log)
    newest = max(tmp_path.glob("*.snap"))
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    log = open_log(tmp_path)
    assert log.snapshot is not None
    assert log.snapshot[1] == b"state 0"
    assert [row[1] for row in data_rows(log)] == [1]
    log.close()


def test_an_epoch_that_only_a_leftover_knows_is_not_used_again(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    cut = log.written_position
    abandon(log)
    leftover = stamp_frame(make_frame([b"ghost"]), cut + 3 * GROUP_ALIGNMENT, epoch=7, synced=cut)
    write_at(tmp_path, cut + 3 * GROUP_ALIGNMENT, leftover)
    log = start_log(tmp_path)
    assert log.epoch == 8
    log.close()
