"""Bugs planted on purpose in a worker's turn over rings, and what a client's leader looks at, in a copy of the tree:
each has a test that must go red.

    python -m tests.workers.turn_mutants                 all, with the seconds until each was found
    python -m tests.workers.turn_mutants --only NAME     one

The simulation cannot find them: its clients have no rings. Every one needs its kernels compiled, up to a minute.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SECONDS_MAX = 600
PUBLISH = "workers/shard/publish"
SERVE, INTAKE = f"{PUBLISH}/serve_kernel.py", f"{PUBLISH}/ring_intake.py"
HEARTBEATS = "tests/workers/test_ring_heartbeats.py"
TURN, UNASKED = f"{PUBLISH}/turn_kernel.py", "tests/workers/test_unasked_clients.py"
FAULTS, EDGES = "tests/workers/test_ring_turn_faults.py", "tests/workers/test_ring_turn_edges.py"
CREDIT, GUARDED = "tests/workers/test_ring_turn_credit.py", "tests/workers/test_guarded_tables.py"
DURABLE = "tests/workers/test_durable_writes.py"
GROUPS, DISKS = "tests/workers/test_ring_turn_groups.py", "tests/faults/test_ring_faults.py"


class Mutant(NamedTuple):
    """What stands once in a file, what stands there instead, and the tests that must find it."""

    path: str
    before: str
    after: str
    tests: str


MUTANTS: dict[str, Mutant] = {
    "answered_before_the_sync": Mutant(
        SERVE, "OutletWord.KIND) == OutletKind.OS:", "OutletWord.KIND) >= OutletKind.OS:", FAULTS
    ),
    "short_write_taken_for_whole": Mutant(
        SERVE, "pwritev(fd, vector, 1, place) != size", "pwritev(fd, vector, 1, place) < 0",
        f"{DISKS}::test_short_writes_under_ring_publishes",
    ),
    "torn_write_forgotten": Mutant(
        SERVE, "JobWord.IS_TORN, 1 if size != 0 else 0)", "JobWord.IS_TORN, 0)", FAULTS
    ),
    "failed_sync_not_looked_at": Mutant(
        SERVE, "        if load_word(row, TakenWord.END) > synced:\n",
        "        if fault_of(load_word(job, JobWord.SYNCS)) == 0 and load_word(row, TakenWord.END) > synced:\n",
        f"{DISKS}::test_a_publish_whose_sync_fails_is_not_acked",
    ),
    "pads_take_no_room": Mutant(
        SERVE, "load_word(job, JobWord.ROOM) - pad)", "load_word(job, JobWord.ROOM))", GROUPS
    ),
    "names_not_asked_for": Mutant(
        SERVE, "ProducerWord.ANNOUNCED) != load_word(outlet, OutletWord.CONSUMER):",
        "ProducerWord.ANNOUNCED) == -1:", EDGES,
    ),
    "credit_not_charged": Mutant(
        SERVE, "OutletWord.MESSAGES, messages_left - count)", "OutletWord.MESSAGES, messages_left)",
        CREDIT,
    ),
    "frames_not_covered_by_credit": Mutant(
        SERVE, "load_word(outlet, OutletWord.COVERS) != 0 and", "load_word(outlet, OutletWord.COVERS) > 1 and",
        CREDIT,
    ),
    "delayed_messages_are_plain": Mutant(
        SERVE, "load_word(result, ResultWord.FLAGS) != 0 or", "load_word(result, ResultWord.FLAGS) < 0 or",
        EDGES,
    ),
    "what_waits_for_room_is_overtaken": Mutant(
        SERVE, "            stopped != 0\n            or word_of(side, WAITS) != 0\n", "            stopped > 1\n",
        EDGES,
    ),
    "group_waits_for_a_sync_that_was_never_queued": Mutant(
        f"{PUBLISH}/journal.py", "self._note_written(group, queued_position, self._now_ns)",
        "self._note_written(group, self.log.written_position, self._now_ns)", GROUPS,
    ),
    "signal_of_a_client_lost": Mutant(
        "danube_fast/ring/handover.py", "                awake.setdefault(identity)\n", "            pass\n", EDGES
    ),
    "clients_that_wait_for_no_sync_not_asked_to_signal": Mutant(
        TURN, "        if waits and load_word(link, LinkWord.WAITS_FOR_SYNC) != 0:\n", "        if waits:\n", UNASKED
    ),
    "client_that_was_not_asked_to_signal_rests": Mutant(
        INTAKE, "(each == _ARMED, is_kept", "(each >= _ARMED, is_kept", UNASKED
    ),
    "turn_that_closes_leaves_all_to_python": Mutant(
        "danube_fast/ring/handover.py", "if each not in kept", "if each", UNASKED
    ),
    "heartbeats_of_a_client_have_no_end": Mutant(
        f"{PUBLISH}/take_kernel.py", "    if last_ns >= load_word(job, JobWord.STEP_NS) or now_ns - last_ns < HEARTBEAT_NS_MIN:",
        "    if last_ns < 0:", HEARTBEATS
    ),
    "heartbeats_count_from_the_end_of_the_sleep": Mutant(
        INTAKE, "session.last_seen_ns = heard_ns", "session.last_seen_ns = self._state.now_ns", HEARTBEATS
    ),
    "session_hears_of_no_heartbeat": Mutant(
        INTAKE, "        if words[JOB.HEARTBEATS]:\n", "        if words[JOB.HEARTBEATS] < 0:\n", HEARTBEATS
    ),
    "heartbeat_overtakes_what_waits_for_room": Mutant(
        f"{PUBLISH}/take_kernel.py", "found < 0 or word_of(side, WAITS) != 0:", "found < 0:", HEARTBEATS
    ),
    "half_is_enough_behind_slow_syncs": Mutant(
        SERVE, "JobWord.SYNC_NS) < QUICK_SYNC_NS", "JobWord.SYNC_NS) >= 0", UNASKED
    ),
    "bundle_taken_behind_the_limit": Mutant(
        f"{PUBLISH}/take_kernel.py", "JobWord.TAKEN) >= load_word(job, JobWord.TAKEN_LIMIT)",
        "JobWord.TAKEN) > load_word(job, JobWord.TAKEN_LIMIT)", GUARDED,
    ),
    "link_too_many_looked_at": Mutant(
        f"{PUBLISH}/take_kernel.py", "range(load_word(job, JobWord.LINKS))",
        "range(load_word(job, JobWord.LINKS) + 1)", GUARDED,
    ),
    "row_too_many_staged": Mutant(
        SERVE,
        "LOOKED)):\n        row = job + AT_TAKEN + number * TAKEN_BYTES\n        result = _result_of(job, row)\n        position",
        "LOOKED) + 1):\n        row = job + AT_TAKEN + number * TAKEN_BYTES\n        result = _result_of(job, row)\n        position",
        GUARDED,
    ),
    "outlet_too_many": Mutant(
        f"{PUBLISH}/outlets.py", "number < OUTLETS_MAX", "number <= OUTLETS_MAX", GUARDED
    ),
    "answer_too_many_looked_at": Mutant(
        "danube_fast/client/link/answers.py", "range(load_relaxed(table))",
        "range(load_relaxed(table) + 1)", GUARDED,
    ),
    "durable_write_behind_a_log_that_is_not": Mutant(
        SERVE, "if synced == load_word(job, JobWord.GROUP_START)", "if synced >= 0",
        "tests/faults/test_durable_writes.py",
    ),
    "written_behind_a_group_that_is_not": Mutant(
        SERVE, "if load_word(job, JobWord.DURABLE_END) <= synced", "if synced >= 0", DURABLE
    ),
    "hole_before_what_is_written": Mutant(
        "danube_fast/wal/appender.py", "            self._write_held()\n", "", DURABLE
    ),
    "header_of_a_segment_not_synced": Mutant(
        "danube_fast/wal/appender.py", "if position != newest.first_position and way", "if way",
        DURABLE,
    ),
    "staged_over_a_group_that_hangs": Mutant(
        INTAKE, "self._writing is not None and self._writing.syncs.backlog:", "self._writing is self:", DURABLE
    ),
    "outlet_left_behind": Mutant(
        f"{PUBLISH}/outlets.py", "            partitions[slot, _OUTLET] = 0\n", "            pass\n", EDGES
    ),
}  # fmt: skip


def count(mutant: Mutant, root: Path = ROOT) -> int:
    """How often its line stands in its file."""
    return (root / mutant.path).read_text().count(mutant.before)


def plant(mutant: Mutant, target: Path) -> None:
    """A copy of the tree with one bug in it."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        source, copy = ROOT / name, target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, copy, follow_symlinks=False)
    path = target / mutant.path
    text = path.read_text()
    if mutant.path == SERVE and "fault_of" in mutant.after:
        text = text.replace(
            "import queue_sync, synced_of", "import fault_of, queue_sync, synced_of"
        )
    path.write_text(text.replace(mutant.before, mutant.after))


def hunt(name: str) -> tuple[bool, float, str]:
    """Run the tests of a bug: whether they went red, after how many seconds, and the last line."""
    begun = time.monotonic()
    mutant = MUTANTS[name]
    with tempfile.TemporaryDirectory(prefix="df-mutant-") as folder:
        plant(mutant, Path(folder))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            mutant.tests,
        ]
        environment = {**os.environ, "PYTHONPATH": folder, "XDG_CACHE_HOME": f"{folder}/.cache"}
        result = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False,
            timeout=SECONDS_MAX,
        )  # fmt: skip
    lines = [line for line in result.stdout.splitlines() if line.startswith(("FAILED", "E  "))]
    last = (lines or (result.stdout + result.stderr).splitlines() or [""])[-1]
    return result.returncode == 1 and "failed" in result.stdout, time.monotonic() - begun, last


def main() -> int:
    """Command line; 0 if all were found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=sorted(MUTANTS))
    only = parser.parse_args().only
    missed = 0
    for name in [only] if only else MUTANTS:
        is_red, seconds, text = hunt(name)
        missed += not is_red
        print(
            f"{name:46} {'found' if is_red else 'NOT FOUND':>9} {seconds:6.1f} s  {text[:150]}",
            flush=True,
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
