"""Throughput from a producer process over a broker to a consumer process: every byte compared.

The figures stand in the extra info of the report; `python -m bench.throughput` prints them alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FULL = ["--messages", "5000000", "--runs", "5"]
TINY = ["--messages", "30000", "--runs", "1"]
WAIT_SECONDS = 600


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = metafunc.config.getoption("--benchmark")
    metafunc.parametrize("durability", ["fsync", "os", "memory"] if full else ["fsync"])


def test_reliable_throughput(benchmark: Any, full_size: bool, durability: str) -> None:
    command = [sys.executable, "-m", "bench.throughput", "--durability", durability]
    command += FULL if full_size else TINY

    def run() -> dict[str, Any]:
        done = subprocess.run(
            command,
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return figures

    figures = benchmark.pedantic(run, rounds=1)
    assert figures["messages_per_s"] > 0
    benchmark.extra_info.update(figures)
