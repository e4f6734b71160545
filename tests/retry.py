"""Run every test and give what fails a second chance: `./run test --retry`, for `.ci/run`.

A test may fail because the machine stood still for a minute. What fails runs once more, alone in one
process, when all else is done: what passes then is named as flaky and passes, what fails again
fails the run. Failed tests alone get that chance: a run that was interrupted, could not collect its
tests or left something behind has failed (conftest.py tells the last by an exit code of its own).

The arguments go to the first run. The last line counts the tests of both runs as one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

SECONDS_MAX = 3600.0
"""One run takes no longer: when a test process crashes near the end, the others' results may be waited for
in vain."""
END_SECONDS = 30.0
OVERDUE = 124
"""Exit code of a run that had to be ended, as that of timeout(1)."""


def run_pytest(*arguments: str) -> int:
    child = subprocess.Popen([sys.executable, "-m", "pytest", *arguments])
    # ^C reaches pytest by itself, as it shares the terminal; then it ends in good order
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    seconds = float(os.environ.get("DANUBE_TEST_RUN_SECONDS", SECONDS_MAX))
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"\nthe tests had not ended after {seconds:g} s, and are ended now", flush=True)
    child.send_signal(signal.SIGINT)  # so that it says what it knows
    try:
        child.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    return OVERDUE


def failed_tests(cache: Path) -> set[str]:
    """The tests that pytest remembers as failed."""
    path = cache / "v" / "cache" / "lastfailed"
    return set(json.loads(path.read_text())) if path.exists() else set()


def count(report: Path) -> tuple[int, int]:
    """How many tests ran or were skipped, and how many were skipped."""
    suites = list(ET.parse(report).getroot())
    return (
        sum(int(suite.attrib["tests"]) for suite in suites),
        sum(int(suite.attrib["skipped"]) for suite in suites),
    )


def main(arguments: list[str], folder: Path) -> int:
    # a cache of its own: what failed in earlier runs is not asked for again
    cache, report = folder / "cache", folder / "report.xml"
    remember = ("-o", f"cache_dir={cache}")
    status = run_pytest(*arguments, *remember, f"--junitxml={report}")
    first = failed_tests(cache)
    if status != pytest.ExitCode.TESTS_FAILED or not first or not all("::" in x for x in first):
        return status  # a name without "::" is a file that could not be collected
    print(f"\n{len(first)} failed; once more, alone", flush=True)
    again = run_pytest(*remember, "--last-failed", "--last-failed-no-failures=none")
    failed = failed_tests(cache)  # those that did not pass in the second run
    flaky = first - failed
    for names, what in (
        (flaky, "flaky: failed, then passed alone; list it in docs/status.md until it is mended"),
        (failed, "failed twice"),
    ):
        for name in sorted(names):
            print(f"{what}: {name}")
    total, skipped = count(report)
    passed = total - skipped - len(failed)
    print(f"{passed} passed, {len(failed)} failed, {len(flaky)} flaky, {skipped} skipped")
    return again or (pytest.ExitCode.TESTS_FAILED if failed else pytest.ExitCode.OK)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="df-retry-") as name:
        code = int(main(sys.argv[1:], Path(name)))
    sys.exit(code if code >= 0 else 128 - code)
