"""No kernel of a worker's turn, or of a leader's sleep, reads or writes a row that is not there.

The random scripts run in a process in which every table lies next to a page that may not be touched (see
`guarded_tables.py`); a failure prints the command that repeats its case. By default a few cases of each;
`DANUBE_TURN_CASES=1000 DANUBE_TURN_SEED=5000 pytest tests/workers/test_guarded_tables.py` runs all that fits a
kind of place, so many cases of the random ones, from that seed on.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frame.guarded import PAGE_BYTES
from tests.workers.guarded_tables import HOLE_BYTES, HOLE_ROWS, PLACES

ROOT = Path(__file__).resolve().parents[2]
CASES = int(os.environ.get("DANUBE_TURN_CASES", "0"))
SEED = int(os.environ.get("DANUBE_TURN_SEED", "11"))
"""In case 11 turns are full, write groups, and hear all links at once."""
FUZZ_CASES_PER_CASE = 200
SECONDS = 240 + 20 * CASES
TURN, INTAKE = "tests/workers/test_ring_turn.py", "tests/workers/test_ring_intake.py"
GROUPS, CREDIT = "tests/workers/test_ring_turn_groups.py", "tests/workers/test_ring_turn_credit.py"
LOOKOUT = "tests/client/test_lookout.py"
RECORDS = f"{LOOKOUT}::test_any_record_is_handed_over_rightly_or_left_alone"
FEW = {"end": (TURN, INTAKE, RECORDS), "start": (INTAKE, RECORDS), "holes": (TURN, GROUPS), "narrow": (TURN,)}  # fmt: skip
BEGUN = re.compile(r"tests/\S+::")
ALL = (TURN, INTAKE, GROUPS, CREDIT, LOOKOUT)
MANY = {"end": ALL, "start": ALL, "holes": (TURN, GROUPS, CREDIT), "narrow": (TURN, CREDIT)}
"""Where a turn takes one bundle, none comes behind another one, and some tests wait for that in vain."""
NEEDS_MANY_CASES = f"{TURN}::test_kernels_served_frames_of_each_kind"
BEHIND = (
    "import sys\n"
    "from tests.workers import guarded_tables\n"
    "guarded_tables.install(sys.argv[1])\n"
    "from danube_fast.broker.admission.tables import AdmissionTables\n"
    "tables = AdmissionTables()\n"
    "tables.add_producer(1, 1)\n"
    "tables.remember(0, 0, 1, 0)\n"
    "print('inside', flush=True)\n"
    "tables.remember(int(sys.argv[2]), 0, 1, 0)\n"
)


def run(arguments: list[str], **changes: str) -> subprocess.CompletedProcess[str]:
    """A Python process, to its end."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), **changes},
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("place", PLACES)
def test_no_kernel_leaves_its_tables(place: str) -> None:
    if place in HOLE_ROWS and PAGE_BYTES > HOLE_BYTES:
        pytest.skip("the rows of a job do not fill a page of this machine")
    settings = {
        "DANUBE_TURN_SEED": str(SEED), "DANUBE_INTAKE_SEED": str(SEED), "DANUBE_FUZZ_SEED": str(SEED),
        "DANUBE_TURN_CASES": str(CASES or 1), "DANUBE_INTAKE_CASES": str(CASES or 1),
        "DANUBE_FUZZ_CASES": str(FUZZ_CASES_PER_CASE * (CASES or 1)),
    }  # fmt: skip
    command = [
        "-m", "pytest", "-v", "-x", "-n", "0", "-p", "no:cacheprovider", "-p", "tests.workers.guarded_tables",
        f"--tables={place}",
    ]  # fmt: skip
    result = run(
        [*command, "--deselect", NEEDS_MANY_CASES, *(MANY if CASES else FEW)[place]], **settings
    )
    begun = [line.split()[0] for line in result.stdout.splitlines() if BEGUN.match(line)]
    last = begun[-1] if begun else ""
    again = " ".join([*(f"{name}={value}" for name, value in settings.items()), "python", *command, last])  # fmt: skip
    what = "a kernel left its table" if result.returncode == -signal.SIGSEGV else "tests failed"
    assert result.returncode == 0, (
        f"{what} in {last or 'no test'} (exit {result.returncode}); again: {again}\n"
        f"{result.stdout[-2000:]}\n{result.stderr[-3000:]}"
    )


@pytest.mark.parametrize(("place", "row"), [("end", 1), ("start", -1)])
def test_a_row_too_far_is_noticed(place: str, row: int) -> None:
    """A kernel that is told a row behind the last one, or before the first one, is killed: otherwise the test above
    proves nothing."""
    result = run(["-c", BEHIND, place, str(row)])
    assert (result.stdout, result.returncode) == ("inside\n", -signal.SIGSEGV), result.stderr
