"""A writer that is killed: opens the log, says what it found, writes and says what is durable.

Run by test_kill.py as `python -m tests.wal.writer_process DIR SEED`. Lines on stdout:
`found N` (offsets 0 to N-1 were there) and `acked N` (offsets below N are durable).
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import msgspec

from danube_fast.wal.layout import REPLAY_DTYPE
from tests.wal.rig import SETTINGS, open_log, put, wait_synced

KILLED = msgspec.structs.replace(SETTINGS, segment_bytes=512 * 1024, spare_segments=1)


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def main() -> None:
    directory, seed = Path(sys.argv[1]), int(sys.argv[2])
    draw = random.Random(seed)
    log = open_log(directory, KILLED, lock_timeout_ms=10_000)
    state = log.snapshot[1] if log.snapshot else b"0"
    offset = int(state)
    for block in log.replay():
        assert block.rows.dtype == REPLAY_DTYPE
        for row in block.rows[block.rows["partition_id"] == 5]:
            assert int(row["base_offset"]) == offset, f"{row['base_offset']} after {offset}"
            offset += int(row["offset_span"])
    log.begin_epoch([b"start"])
    if offset:
        run = log.find(5, offset - 1)
        assert run is not None and run.end_offset == offset
        log.read_run(run)
    say("found", offset)
    while True:
        groups = [[bytes(draw.randrange(1, 9000))] for _ in range(draw.randrange(1, 20))]
        offset = put(log, groups, base_offset=offset, sync=draw.random() < 0.5)
        if draw.random() < 0.7:
            log.sync()
            wait_synced(log)
            say("acked", offset)
        if log.snapshot_due:
            log.save_snapshot(log.written_position, str(offset).encode())
        log.trim(log.written_position)


if __name__ == "__main__":
    main()
