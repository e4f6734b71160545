"""The demo itself, on a slice of the data set: with its kill, its end, its interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MARK = "DANUBE_TEST_DEMO"
MESSAGES = 30_000
END_SECONDS = 240.0
CLEAN_SECONDS = 60.0


class Demo:
    """`danube-fast demo` in a process, and everything that descends from it."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        environment = {**os.environ, "TMPDIR": str(folder), MARK: self.mark}
        environment["PYTHONPATH"] = str(ROOT)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "danube_fast.cli.main", "demo", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
        self.lines: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._threads = [
            threading.Thread(target=self._read, args=(name,), daemon=True) for name in self.lines
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, name: str) -> None:
        stream = getattr(self.process, name)
        with stream:
            self.lines[name].extend(iter(stream.readline, ""))

    def said(self, text: str) -> bool:
        return any(text in line for lines in self.lines.values() for line in lines)

    def wait(self) -> int:
        """Its exit code."""
        try:
            code = self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the demo did not end: {self.lines}") from None
        for thread in self._threads:
            thread.join(CLEAN_SECONDS)
        return code

    def processes(self) -> list[int]:
        """All that carry our mark and are no zombies."""
        needle = f"{MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and needle in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found


def wait_until(what: str, condition: Callable[[], Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.02)


Start = Callable[..., Demo]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    demos: list[Demo] = []

    def begin(*arguments: str) -> Demo:
        demo = Demo(tmp_path, *arguments)
        demos.append(demo)
        return demo

    yield begin
    for demo in demos:
        if demo.process.poll() is None:
            demo.process.kill()
            demo.process.wait()


def test_a_slice_with_the_kill(start: Start) -> None:
    demo = start("--messages", str(MESSAGES), "--rate", "15000", "--output", "json")
    code = demo.wait()
    assert code == 0, demo.lines
    (line,) = demo.lines["stdout"]
    outcome = json.loads(line)
    assert outcome["ok"] and outcome["problems"] == []
    assert outcome["messages"] == MESSAGES == sum(outcome["carriers"].values())
    assert outcome["worker_restarts"] >= 1
    assert [x["type"] for x in outcome["subscriptions"]] == [
        "exclusive",
        "shared",
        "failover",
        "key_shared",
    ]
    for each in outcome["subscriptions"]:
        assert each["distinct"] == MESSAGES
        assert each["received"] == MESSAGES + each["redelivered"]
        assert each["received"] == sum(each["received_by_consumer"])
        assert not each["lost"] + each["duplicated"] + each["foreign"] + each["unacked"]
        assert each["carriers"] == outcome["carriers"]
        assert MESSAGES / 3 <= each["published_before_kill"] < MESSAGES, "not in the middle"
        assert 0.05 < each["silence_seconds"] < 60
        assert 0 < each["latency"]["p50_ms"] <= each["latency"]["p99_ms"]
    history = outcome["history"]
    assert history["read"] == history["distinct"] == MESSAGES
    assert history["carriers"] == outcome["carriers"]
    assert history["trimmed_logs"] == 2 and history["objects"] >= 1
    shares = {x["type"]: x["received_by_consumer"] for x in outcome["subscriptions"]}
    assert all(shares["shared"]) and all(shares["key_shared"])
    assert demo.said("killed worker") and demo.said("was killed by SIGKILL")
    assert demo.processes() == []
    assert list(demo.folder.glob("danube-fast-demo-*")) == []


def test_ctrl_c_leaves_nothing(start: Start) -> None:
    demo = start("--messages", str(MESSAGES), "--rate", "1000")
    wait_until("the stream", lambda: demo.said("streaming"), END_SECONDS)
    assert len(demo.processes()) > 6
    demo.process.send_signal(signal.SIGINT)
    assert demo.wait() == 130
    assert demo.processes() == []
    assert list(demo.folder.glob("danube-fast-demo-*")) == []
    assert not demo.said("Traceback") and not demo.said("COMPLETE")


def test_kill_9_of_the_demo_leaves_no_process(start: Start) -> None:
    demo = start("--messages", str(MESSAGES))
    wait_until("the broker", lambda: demo.said("broker ready"), END_SECONDS)
    demo.process.kill()
    demo.wait()
    wait_until("the end of all", lambda: not demo.processes(), CLEAN_SECONDS)
