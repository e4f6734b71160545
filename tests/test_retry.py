"""A failed test runs once more, alone; no other failure of a run does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers.broker import is_running

ROOT = Path(__file__).resolve().parents[1]

SAMPLE = """
import os, signal, subprocess, sys
from pathlib import Path
import pytest

def first_time(name):
    try:
        Path(__file__).with_name(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

def test_fine(): pass

def test_broken(): assert False

def test_once():
    assert not first_time("once")
    assert "PYTEST_XDIST_WORKER" not in os.environ, "not alone"

@pytest.fixture
def late():
    yield
    assert not first_time("late")

def test_late(late): pass

def test_dies():
    if first_time("dies"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        Path(__file__).with_name("child").write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)

def test_leaks():
    if first_time("leaks"):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])

def test_listed(): pytest.skip("a known reason")
"""


def run_twice(
    tmp_path: Path, select: str, sample: str = SAMPLE, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`tests/retry.py` over a project of its own, with our conftest and the tests named."""
    tests = tmp_path / "tests"
    tests.mkdir()
    shutil.copy(ROOT / "conftest.py", tmp_path)
    shutil.copy(ROOT / "tests" / "retry.py", tests)
    (tests / "skips_allowed.txt").write_text("tests/test_sample.py::test_listed\n")
    (tests / "test_sample.py").write_text(sample)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    environment = {
        **{name: value for name, value in os.environ.items() if "PYTEST" not in name},
        "TMPDIR": str(tmp_path),
        "DANUBE_TEST_LEAK_GRACE_SECONDS": "1",
        **variables,
    }
    return subprocess.run(
        [sys.executable, "-m", "tests.retry", "-n", "2", "-k", select],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("select", "code", "flaky", "failed", "last"),
    [
        ("fine or late or listed", 0, ["late"], [], "2 passed, 0 failed, 1 flaky, 1 skipped"),
        (
            "fine or once or dies or broken", 1, ["dies", "once"], ["broken"],
            "3 passed, 1 failed, 2 flaky, 0 skipped",
        ),
    ],
)  # fmt: skip
def test_what_failed_runs_once_more(
    tmp_path: Path, select: str, code: int, flaky: list[str], failed: list[str], last: str
) -> None:
    result = run_twice(tmp_path, select)
    assert result.returncode == code, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[-1] == last
    told = [line.rpartition("test_")[2] for line in lines if line.startswith("flaky: ")]
    assert told == flaky, result.stdout
    told = [line.rpartition("test_")[2] for line in lines if line.startswith("failed twice: ")]
    assert told == failed, result.stdout


def test_a_process_that_crashes_leaves_nothing(tmp_path: Path) -> None:
    result = run_twice(tmp_path, "dies or broken")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "left running" not in result.stdout
    assert not is_running(int((tmp_path / "tests" / "child").read_text()))


@pytest.mark.parametrize(
    ("select", "code"),
    [
        ("fine", 0),
        ("fine or leaks", 9),
        ("leaks or once", 9),
        ("no_such_test", 5),
    ],
)
def test_nothing_else_runs_once_more(tmp_path: Path, select: str, code: int) -> None:
    result = run_twice(tmp_path, select)
    assert result.returncode == code, result.stdout + result.stderr
    assert "once more" not in result.stdout
    assert " in " in result.stdout.splitlines()[-1], "the last line is pytest's own"


def test_what_cannot_be_collected_fails_the_run(tmp_path: Path) -> None:
    result = run_twice(tmp_path, "fine", SAMPLE + "raise RuntimeError('broken file')\n")
    assert result.returncode != 0, result.stdout + result.stderr
    assert "once more" not in result.stdout


def test_a_test_that_does_not_run_again_has_failed_twice(tmp_path: Path) -> None:
    sample = (
        "import os, pytest\n"
        "@pytest.mark.parametrize('x', ['PYTEST_XDIST_WORKER' in os.environ])\n"
        "def test_named(x): assert not x\n"
    )
    result = run_twice(tmp_path, "named", sample)
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "0 passed, 1 failed, 0 flaky, 0 skipped"


def test_a_run_that_does_not_end_is_ended(tmp_path: Path) -> None:
    sample = "import time\ndef test_fine(): pass\ndef test_stuck(): time.sleep(200)\n"
    result = run_twice(tmp_path, "fine or stuck", sample, DANUBE_TEST_RUN_SECONDS="15")
    assert result.returncode == 124, result.stdout + result.stderr
    assert "had not ended after 15 s" in result.stdout
    assert "once more" not in result.stdout
