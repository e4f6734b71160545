"""What a move copies at a time fits into a segment of the log that it comes to, however small that is."""

from __future__ import annotations

from pathlib import Path

from tests.workers.move_rig import MoveRig

KIB = 1024
OK = 0
FRAMES, PER_FRAME = 10, 20


def test_pieces_fit_into_small_segments(tmp_path: Path) -> None:
    rig = MoveRig(tmp_path, segment_bytes=64 * KIB, segment_start_bytes=64 * KIB)
    try:
        pid = rig.create().partition_id
        client = rig.workers[1].client()
        opened = client.open_producer(pid, "p")
        large = [b"%d" % number * KIB for number in range(PER_FRAME)]
        for frame in range(FRAMES):
            sealed = client.frame(opened, frame * PER_FRAME, large)
            assert client.publish((pid, sealed)) == [OK, frame * PER_FRAME]
        outcome = rig.start_move(1)
        rig.settle()
        ((_, error),) = outcome
        assert error is None, error
        copied = rig.workers[2].worker.state.catalog.by_id[pid]
        assert copied.visible == FRAMES * PER_FRAME
    finally:
        rig.stop()
