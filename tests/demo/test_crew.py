"""Processes of the demo: heard line by line, and ended whatever they do."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from danube_fast.demo import crew as crew_module
from danube_fast.demo import stage as stage_module
from danube_fast.demo.crew import Child, Crew
from danube_fast.demo.progress import View
from danube_fast.demo.stage import Stage
from danube_fast.errors import DeadlineExceeded, Internal

ROOT = Path(__file__).parents[2]
END_SECONDS = 60.0

ECHO = """
import sys
for line in sys.stdin:
    print("heard", line.strip(), flush=True)
    print("a word", file=sys.stderr, flush=True)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
while True:
    time.sleep(10)
"""


def start(crew: Crew, folder: Path, source: str, name: str = "someone") -> Child:
    (folder / f"{name}_module.py").write_text(source)
    return crew.start(name, f"{name}_module", PYTHONPATH=f"{folder}:{ROOT}")


def heard(crew: Crew, count: int) -> list[tuple[str, bytes]]:
    said: list[tuple[str, bytes]] = []
    deadline = time.monotonic() + END_SECONDS
    while len(said) < count:
        assert time.monotonic() < deadline, f"only {said} was said"
        said += [(stream, line) for _, stream, line in crew.listen(0.05)]
    return said


def test_lines_of_both_streams_and_the_end(tmp_path: Path) -> None:
    with Crew() as crew:
        child = start(crew, tmp_path, ECHO)
        child.order("go")
        child.order("stop")
        assert child.process.stdin is not None
        child.process.stdin.close()
        said = heard(crew, 5)
        assert [line for stream, line in said if stream == "stdout"] == [b"heard go", b"heard stop"]
        assert said[-1] == ("end", b"")
        assert child.last_words() == "a word / a word"
        child.order("to the deaf")
    assert child.process.returncode == 0


def test_who_does_not_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew_module, "STOP_SECONDS", 0.3)
    with Crew() as crew:
        child = start(crew, tmp_path, STUBBORN)
        assert heard(crew, 1) == [("stdout", b"deaf")]
    assert child.process.returncode == -9


def test_settings_from_outside_do_not_reach_the_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DANUBE_WORKERS", "7")
    monkeypatch.setenv("DANUBE_CONFIG", "broker.toml")
    environment = crew_module._environment()
    assert not {"DANUBE_WORKERS", "DANUBE_CONFIG"} & environment.keys()


def test_an_early_end_is_told_with_its_last_words(tmp_path: Path) -> None:
    with Crew() as crew:
        stage = Stage(crew, tmp_path, View(Console(file=io.StringIO())))
        stage.broker = start(
            crew, tmp_path, "import sys; sys.exit('no room on the disk')", "broker"
        )
        with pytest.raises(Internal, match=r"broker ended early, with 1.*no room on the disk"):
            stage.wait_for_broker()


def test_a_broker_that_is_never_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_module, "BROKER_TIMEOUT_SECONDS", 0.5)
    with Crew() as crew:
        stage = Stage(crew, tmp_path, View(Console(file=io.StringIO())))
        stage.broker = start(crew, tmp_path, "input()", "broker")
        with pytest.raises(DeadlineExceeded, match="not ready within"):
            stage.wait_for_broker()
