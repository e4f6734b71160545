"""serve, and the whole way: a real broker, real commands, a kill in between."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from danube_fast.config import Settings
from tests.cli.conftest import Run

PROGRAM = [sys.executable, "-m", "danube_fast.cli.main"]
READY_SECONDS = 90
TOPIC = "/default/cli"


@contextmanager
def serving(data_dir: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """`danube-fast serve` until the block ends; then SIGTERM must end it with 0."""
    arguments = ["serve", "--data-dir", str(data_dir), "--listen", "127.0.0.1:0", "--workers", "2"]
    environment = {**os.environ, "DANUBE_SEGMENT_BYTES": str(4 * 1024 * 1024)}
    process = subprocess.Popen(
        [*PROGRAM, *arguments, "--output", "json"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], READY_SECONDS)
        assert ready, f"no ready line within {READY_SECONDS} s"
        line = process.stdout.readline()
        assert line, f"serve ended with {process.wait(timeout=60)} before it was ready"
        event = json.loads(line)
        assert event["event"] == "ready"
        yield process, event
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        assert process.stdout.read() == ""
    finally:
        process.kill()
        process.wait(timeout=60)
        if process.stdout is not None:
            process.stdout.close()


def wait_for_restart(run: Run, url: str, old_pid: int) -> None:
    deadline = time.monotonic() + 60
    states: list[Any] = []
    while time.monotonic() < deadline:
        states = run("status", "--output", "json", "--url", url).json()["processes"]
        if old_pid not in [p["pid"] for p in states] and all(p["state"] == "ready" for p in states):
            return
        time.sleep(0.02)
    pytest.fail(f"worker {old_pid} was not restarted within 60 s: {states}")


@pytest.mark.timeout(600)
def test_from_an_empty_directory_over_a_kill_to_a_verified_log(run: Run, tmp_path: Path) -> None:
    lines = "".join(f"message {number}\n" for number in range(2000))
    (tmp_path / "input.txt").write_text(lines)
    data_dir = tmp_path / "data"
    url = ""

    def command(*arguments: str) -> str:
        outcome = run(*arguments, "--url", url)
        assert outcome.code == 0, (arguments, outcome)
        return outcome.out

    with serving(data_dir) as (process, event):
        url = event["url"]
        assert event["pid"] == process.pid
        sent = json.loads(
            command("produce", TOPIC, "--file", str(tmp_path / "input.txt"), "-o", "json")
        )
        assert (sent["messages"], sent["first_offset"], sent["last_offset"]) == (2000, 0, 1999)
        for pid in event["worker_pids"]:
            os.kill(pid, signal.SIGKILL)
            wait_for_restart(run, url, pid)
        consume = ["consume", TOPIC, "--subscription", "s", "--from", "earliest"]
        assert command(*consume, "--max", "2000", "--timeout", "60") == lines
        assert command(*consume, "--timeout", "0.3") == ""  # everything was acked
        stats = json.loads(command("topics", "stats", TOPIC, "--output", "json"))
        assert stats["subscriptions"][0]["lag_messages"] == 0
        assert "/default/cli" in command("topics", "stats", TOPIC)
        assert TOPIC in command("topics", "list")
        assert "ready" in command("status")
        assert json.loads(command("doctor", "--output", "json"))
    with serving(data_dir) as (_, event):
        url = event["url"]
        consume = ["consume", TOPIC, "--from", "earliest", "--max", "2000"]
        assert command(*consume, "--subscription", "t", "--timeout", "60") == lines
        assert command(*consume, "--subscription", "s", "--timeout", "0.3") == ""  # it is past them
        command("topics", "delete", TOPIC, "--yes")
        assert json.loads(command("topics", "list", "-o", "json")) == []
    verified = run("wal", "verify", str(data_dir), "--output", "json")
    assert verified.code == 0, verified.err
    assert [report["faults"] for report in verified.json()] == [[], []]


def test_nobody_there_is_5(run: Run) -> None:
    outcome = run("topics", "list", "--url", "danube://127.0.0.1:1")
    assert outcome.code == 5
    assert "127.0.0.1:1" in outcome.sentence()


def test_a_url_that_is_none_is_2(run: Run) -> None:
    assert run("topics", "list", "--url", "http://127.0.0.1:1").code == 2


def test_serve_hands_settings_over(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Settings, str]] = []

    def serve(settings: Settings, *, output: str, accept_rollback: bool) -> int:
        assert not accept_rollback
        given.append((settings, output))
        return len(given) - 1

    monkeypatch.setattr("danube_fast.workers.supervisor.supervisor.serve", serve)
    monkeypatch.setenv("DANUBE_SPARE_SEGMENTS", "1")
    monkeypatch.setenv("DANUBE_SERVICE_HOST", "10.0.0.1")
    outcome = run("serve", "--workers", "3", "--listen", "[::1]:0", "--output", "json")
    assert outcome.code == 0
    assert "DANUBE_SERVICE_HOST" in outcome.sentence()
    assert given == [(Settings(workers=3, spare_segments=1, listen="[::1]:0"), "json")]
    assert run("serve").code == 1
