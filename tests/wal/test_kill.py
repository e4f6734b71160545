"""SIGKILL of a real writer, again and again: everything that was durable is there, once, in order."""

from __future__ import annotations

import random
import select
import subprocess
import sys
import time
from pathlib import Path

from danube_fast.wal.inspect import verify_log

ROUNDS = 10
START_SECONDS = 60.0
ROOT = Path(__file__).resolve().parents[2]


def test_kill_nine_in_a_loop(tmp_path: Path) -> None:
    draw = random.Random(7)
    acked = 0
    for turn in range(ROUNDS):
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.wal.writer_process", str(tmp_path), str(turn)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
        )
        try:
            found = read_until(process, "found")
            assert found >= acked, f"round {turn}: {acked} were durable, {found} came back"
            acked = max(acked, read_for(process, draw.uniform(0.0, 0.25)))
        finally:
            process.kill()
            rest, errors = process.communicate(timeout=START_SECONDS)
        acked = max([acked, *(int(line.split()[1]) for line in whole_lines(rest))])
        assert not errors, errors.decode()
    assert acked >= ROUNDS
    report = verify_log(tmp_path)
    assert report.faults == []


def whole_lines(data: bytes) -> list[bytes]:
    """Lines that were written to their end before the kill."""
    return data[: data.rfind(b"\n") + 1].splitlines()


def read_until(process: subprocess.Popen[bytes], word: str) -> int:
    assert process.stdout is not None
    assert process.stderr is not None
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if select.select([process.stdout], [], [], 1)[0]:
            line = process.stdout.readline().split()
            if not line:
                raise AssertionError(f"the writer ended: {process.stderr.read().decode()}")
            if line[0].decode() == word:
                return int(line[1])
    raise AssertionError(f"the writer did not say {word!r} within {START_SECONDS} s")


def read_for(process: subprocess.Popen[bytes], seconds: float) -> int:
    """The last number that the writer says within some time behind the first."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], START_SECONDS)[0], "the writer wrote nothing"
    acked = int(process.stdout.readline().split()[1])
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if select.select([process.stdout], [], [], left)[0]:
            acked = int(process.stdout.readline().split()[1])
    return acked
