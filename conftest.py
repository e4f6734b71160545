"""What every test run shares: the `--benchmark` flag, the leak checks, the list of what was skipped.

Without `--benchmark` the functions in bench/ run tiny, as tests; with it they run at full size, alone
unless paths are given. A run gets a temporary folder of its own, so that leftovers can be told from
those of another run on the same machine, and a mark in the environment, which every process that a
test starts inherits: whatever still carries the mark at the end was leaked.

With `-n` the tests run in processes beside each other: each looks for what its own tests left, and
tells the one that started them.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent
MARK = "DANUBE_TEST_RUN"
LEAK_GRACE_SECONDS = float(os.environ.get("DANUBE_TEST_LEAK_GRACE_SECONDS", "60"))
# the exit code when something is left behind or a skip is not listed: no second run mends that
LEFT_BEHIND = 9
SPARK = "tests/spark"
"""Tests that share a Java runtime: one process runs them all, and begins with them, as they take longest."""
SKIPS_ALLOWED = ROOT / "tests" / "skips_allowed.txt"

_mark = f"{os.getpid()}-{uuid.uuid4().hex}"
_skipped: dict[str, str] = {}
_problems: list[str] = []
_folder: Path | None = None
_shm_before: set[str] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--benchmark",
        action="store_true",
        help="run bench/ at full size with pytest-benchmark (default: tiny, as tests)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    global _folder, _mark, _shm_before
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # a shell starts what runs in the background so, and every process of a test would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--benchmark"):
        if config.args_source is not pytest.Config.ArgsSource.ARGS:
            config.args = ["bench"]
    else:
        config.option.benchmark_disable = True
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    _mark = getattr(config, "workerinput", {}).get("mark", _mark)
    os.environ[MARK] = _mark
    _folder = Path(tempfile.mkdtemp(prefix="df-"))  # short: Unix socket paths end at 107 bytes
    os.environ["TMPDIR"] = tempfile.tempdir = str(_folder)
    _shm_before = _shared_memory()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(f"{SPARK}/"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile` a process gets whole files, and one of them all files of Spark."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return SPARK if nodeid.startswith(f"{SPARK}/") else super()._split_scope(nodeid)

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Keep the garbage collector from what was collected, which stays to the end: a look through all of it takes
    longer than most tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def full_size(request: pytest.FixtureRequest) -> bool:
    """True under `--benchmark`; a function in bench/ picks its sizes by it."""
    return bool(request.config.getoption("--benchmark"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        _skipped[report.nodeid] = report.longrepr[2].removeprefix("Skipped: ")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        _skipped[report.nodeid] = report.longrepr[2].removeprefix("Skipped: ")


def _shared_memory() -> set[str]:
    try:
        return {name for name in os.listdir("/dev/shm") if "danube" in name}
    except OSError:
        return set()


def _marked_processes(mark: str) -> dict[int, str]:
    """Processes other than this one that carry the mark: pid -> command line."""
    found = {}
    needle = f"{MARK}={mark}".encode()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            environment = Path("/proc", entry, "environ").read_bytes()
            if needle not in environment.split(b"\0") and (environment or not _is_starting(entry)):
                continue
            command = Path("/proc", entry, "cmdline").read_bytes()
        except OSError:
            continue
        found[int(entry)] = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return found


def _is_starting(pid: str) -> bool:
    """Whether it is a child of this process that has no environment yet: between fork and the end of exec, which is
    long on a busy machine."""
    state, parent = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[:2]
    return state != "Z" and int(parent) == os.getpid()


def _leaked_processes(mark: str, grace_seconds: float) -> dict[int, str]:
    """What still runs after a grace period; each is killed, so that nothing outlives the run."""
    deadline = time.monotonic() + grace_seconds
    left = _marked_processes(mark)
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = _marked_processes(mark)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    return left


def _allowed_skips() -> list[str]:
    lines = (line.split("#", 1)[0].strip() for line in SKIPS_ALLOWED.read_text().splitlines())
    return [line for line in lines if line]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if session.config.option.collectonly or _folder is None:
        return
    is_helper = hasattr(session.config, "workerinput")  # one of `-n`
    if is_helper or not session.config.getoption("numprocesses", None):
        _problems.extend(
            f"left running: {pid} {command[:200]}"
            for pid, command in _leaked_processes(_mark, LEAK_GRACE_SECONDS).items()
        )
    kernel_cache = f"danube-fast-{os.getuid()}"  # the documented place when ~ cannot be written
    _problems.extend(
        f"left in the temporary folder: {path.name}"
        for path in sorted(_folder.glob("danube-fast*"))
        if path.name != kernel_cache and not path.name.startswith("danube-fast-kernels-")
    )
    if is_helper:
        session.config.workeroutput["problems"] = _problems
        return
    _problems.extend(f"left in /dev/shm: {x}" for x in sorted(_shared_memory() - _shm_before))
    allowed = _allowed_skips()
    _problems.extend(
        f"skipped, but not listed in {SKIPS_ALLOWED.relative_to(ROOT)}: {test} ({reason})"
        for test, reason in _skipped.items()
        if not any(
            test == entry or test.startswith((f"{entry}[", f"{entry}::")) for entry in allowed
        )
    )
    if _problems and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        session.exitstatus = LEFT_BEHIND


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """One of the processes of `-n` is about to start."""
    node.workerinput["mark"] = f"{_mark}-{node.gateway.id}"


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """One of the processes of `-n` has ended; if it crashed, its test failed and left what it had."""
    output = getattr(node, "workeroutput", {})
    _problems.extend(output.get("problems", ()))
    if "problems" not in output:
        _leaked_processes(node.workerinput["mark"], 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _problems:
        terminalreporter.section("left behind", red=True, bold=True)
        for problem in _problems:
            terminalreporter.line(problem, red=True)
    if not terminalreporter.config.option.collectonly:
        terminalreporter.section(f"skipped: {len(_skipped)}")
        for test, reason in sorted(_skipped.items()):
            terminalreporter.line(f"{test}: {reason}")


def pytest_unconfigure() -> None:
    if _folder is not None:
        shutil.rmtree(_folder, ignore_errors=True)
