"""The ground under all other tests: `./run` says the right thing, and leaks and skips are found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LEAKY = """
import os, subprocess, sys, tempfile
import pytest

def test_fine(): pass

def test_child():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"],
                     start_new_session=True, stdout=subprocess.DEVNULL)

def test_orphan():
    code = ("import subprocess, sys;"
            "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])")
    subprocess.run([sys.executable, "-c", code], check=True)

def test_folder(): tempfile.mkdtemp(prefix="danube-fast-left-")

def test_shm():
    name = "/dev/shm/danube-fast-test-" + str(os.getpid())
    open(name, "w").close()

@pytest.mark.parametrize("x", [1, 2])
def test_listed(x): pytest.skip("a known reason")

def test_unlisted(): pytest.skip("a new reason")
"""


def run_session(tmp_path: Path, select: str) -> subprocess.CompletedProcess[str]:
    """A pytest run of its own, with our conftest and the leaky tests."""
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "skips_allowed.txt").write_text(
        "tests/test_leaky.py::test_listed  # known\n"
    )
    (tmp_path / "tests" / "test_leaky.py").write_text(LEAKY)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    environment = {
        **os.environ, "TMPDIR": str(tmp_path), "DANUBE_TEST_LEAK_GRACE_SECONDS": "1",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", select, "tests"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("select", "words"),
    [
        ("test_child", ["left running", "time.sleep(60)"]),
        ("test_orphan", ["left running", "time.sleep(60)"]),
        ("test_folder", ["left in the temporary folder: danube-fast-left-"]),
        ("test_shm", ["left in /dev/shm: danube-fast-test-"]),
        ("test_unlisted", ["skipped, but not listed", "a new reason"]),
    ],
)
def test_what_is_left_behind_fails_the_run(tmp_path: Path, select: str, words: list[str]) -> None:
    before = set(os.listdir("/dev/shm"))
    result = run_session(tmp_path, select)
    for name in set(os.listdir("/dev/shm")) - before:
        if name.startswith("danube-fast-test-"):
            os.unlink(f"/dev/shm/{name}")
    assert result.returncode == 9, "not that of a failed test, which gets a second chance"
    assert all(word in result.stdout for word in words), result.stdout


def test_a_clean_run_passes_and_lists_what_was_skipped(tmp_path: Path) -> None:
    result = run_session(tmp_path, "test_fine or test_listed")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "skipped: 2" in result.stdout
    assert "test_listed[1]: a known reason" in result.stdout


def test_one_process_runs_all_tests_of_spark_and_begins_with_them(tmp_path: Path) -> None:
    for name in ("early/test_a", "spark/test_b", "spark/test_c", "test_d"):
        path = tmp_path / "tests" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("def test_one(): pass\ndef test_two(): pass\n")
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "tests" / "skips_allowed.txt").touch()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "-n2", "--dist", "loadfile",
         "--no-loadscope-reorder", "tests"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    ran = re.findall(r"\[(gw\d)\].* PASSED (\S+)::", result.stdout)
    by_process = {who: list(dict.fromkeys(each for w, each in ran if w == who)) for who, _ in ran}
    spark = ["tests/spark/test_b.py", "tests/spark/test_c.py"]
    # the process that is ready first gets what is to begin
    assert spark in [files[:2] for files in by_process.values()], by_process
    assert sorted(each for files in by_process.values() for each in files) == [
        "tests/early/test_a.py", *spark, "tests/test_d.py",
    ]  # fmt: skip


def script(
    *arguments: str, root: Path = ROOT, path: str | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(root / "run"), *arguments],
        env={"HOME": str(root), "PATH": path or os.environ["PATH"]},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_run_without_a_verb_lists_them() -> None:
    result = script()
    assert result.returncode == 0
    for verb in ("demo", "serve", "test", "bench", "check", "docs"):
        assert f"./run {verb} " in result.stdout


def test_run_refuses_an_unknown_verb() -> None:
    result = script("dance")
    assert result.returncode == 2
    assert "dance" in result.stderr
    assert "./run demo" in result.stderr


def stranger(tmp_path: Path) -> Path:
    """A folder with `run` and what it reads, not set up."""
    root = tmp_path / "clone"
    shutil.copytree(ROOT / "requirements", root / "requirements")
    for name in ("run", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    return root


def tools(tmp_path: Path, python: str) -> str:
    """A PATH with what `run` may use and a python3 that is a shell script."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "cat", "cksum", "dirname"):
        found = shutil.which(name)
        assert found, name
        (folder / name).symlink_to(found)
    (folder / "python3").write_text(f"#!/bin/sh\n{python}\n")
    (folder / "python3").chmod(0o755)
    return str(folder)


def test_run_on_an_old_python_is_one_sentence(tmp_path: Path) -> None:
    old = 'case "$2" in *platform*) echo "python3 here is 3.9.2";; *) exit 1;; esac'
    result = script("demo", root=stranger(tmp_path), path=tools(tmp_path, old))
    assert result.returncode == 1
    assert result.stdout == ""
    (sentence,) = result.stderr.splitlines()
    assert "3.11" in sentence
    assert "3.9.2" in sentence


def test_run_does_nothing_else_once_set_up(tmp_path: Path) -> None:
    root = stranger(tmp_path)
    venv = root / ".venv" / "bin"
    venv.mkdir(parents=True)
    (venv / "danube-fast").write_text('#!/bin/sh\necho "ran $*"\n')
    (venv / "danube-fast").chmod(0o755)
    inputs = ["pyproject.toml", "requirements/dev.txt", "requirements/demo.txt", "run"]
    content = b"".join((root / name).read_bytes() for name in inputs)
    sums = subprocess.run(["cksum"], input=content, capture_output=True, check=True, timeout=60)
    (root / ".venv" / "run.stamp").write_text(f"{sums.stdout.decode()}{root.resolve()}\n")
    result = script("serve", "--workers", "2", root=root)
    assert (result.returncode, result.stdout, result.stderr) == (0, "ran serve --workers 2\n", "")
