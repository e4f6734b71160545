"""Ctrl-C in every command that talks to a broker, while that does not answer: an end, and silence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.broker import Broker, Client, wait_until

PROGRAM = [sys.executable, "-m", "danube_fast.cli.main"]
COMMANDS = [
    ["produce", "/default/t", "-m", "x"],
    ["consume", "/default/t", "--subscription", "s"],
    ["topics", "create", "/default/new"],
    ["status"],
]
"""Of each way to use a broker one."""
END_SECONDS_MAX = 60.0
INTERRUPTED = 130
QUIET_SECONDS = 0.3


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path / "data", fake="", workers=1) as started:
        started.wait_ready()
        yield started


def cpu_ticks(pid: int) -> tuple[int, bool]:
    """What it has computed so far, and whether it sleeps; -1 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1, False
    return int(fields[11]) + int(fields[12]), fields[0] == "S"


def has_client(pid: int) -> bool:
    """Whether it has come so far as to wait for sockets: imports are behind it."""
    try:
        links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return "anon_inode:[eventpoll]" in links


class Started:
    """One command under way."""

    def __init__(self, words: list[str], url: str) -> None:
        self.words = " ".join(words)
        self.process = subprocess.Popen(
            [*PROGRAM, *words, "--url", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._ticks = -1
        self._since = time.monotonic()

    def is_waiting(self) -> bool:
        """Whether it has a client, and has computed nothing any more for a while."""
        (ticks, sleeps), now = cpu_ticks(self.process.pid), time.monotonic()
        if ticks > self._ticks + 1 or not sleeps:
            self._ticks, self._since = ticks, now
        return has_client(self.process.pid) and now - self._since > QUIET_SECONDS

    def interrupt(self) -> tuple[int, str]:
        """Ctrl-C; exit code and what was said. Fails if it does not end in time."""
        self.process.send_signal(signal.SIGINT)
        try:
            out, errors = self.process.communicate(timeout=END_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            pytest.fail(f"{self.words} did not end within {END_SECONDS_MAX} s of Ctrl-C")
        return self.process.returncode, (out + errors).decode()


def interrupted(commands: list[list[str]], url: str) -> dict[str, tuple[int, str]]:
    """Start some, wait until all of them wait, Ctrl-C; the outcomes that are wrong."""
    started = [Started(words, url) for words in commands]
    for command in started:
        wait_until(f"{command.words} waiting", command.is_waiting)
    outcomes = {command.words: command.interrupt() for command in started}
    return {
        words: outcome
        for words, outcome in outcomes.items()
        if outcome[0] != INTERRUPTED or "Traceback" in outcome[1]
    }


def test_ctrl_c_while_nobody_answers(broker: Broker) -> None:
    pids = [broker.process.pid, *broker.pids]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        wrong = interrupted(COMMANDS, broker.ready["url"])
    finally:
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)
    assert not wrong, f"exit code and text: {wrong}"


def test_ctrl_c_while_there_is_nothing_to_do(broker: Broker) -> None:
    """Connected, and waiting for messages or for standard input."""
    commands = [
        ["consume", "/default/t", "--subscription", "s"],
        ["produce", "/default/t", "--file", "-"],
    ]
    assert interrupted(commands, broker.ready["url"]) == {}
    with Client(broker) as client:
        entries = client.admin("cluster_status")["processes"]
    assert not any(entry["restarts"] for entry in entries), broker.error_text()
