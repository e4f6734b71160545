"""The simulation is the same for the same seed, and no seed finds a broken promise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from danube_fast.testing import simulation
from danube_fast.testing.simulation import run_seed
from tests.simulation.seeds import HISTORY_SEEDS, MOVES, ROOT, SEEDS, first_seed, seed_count

PARTS = 4
SECONDS_MAX = 280
MOVED = (
    101126, 100304, 100119, 100893, 100372, 100574, 100060, 100330, 100064, 101219, 101157, 200471,
    200667,
)  # fmt: skip
"""Seeds with moves: of the log, of clients that left a consumer behind or lost credit, and of the model."""
WITH_HISTORY = ((10, 0.0), (51, 0.0), (99, 0.5), (50012, 0.4))
"""Seeds with history: what is kept until it expires, a clock set back, a snapshot behind a frontier's record, and
frames of a scripted producer that are too many for one bundle."""


@pytest.mark.parametrize("history", [0.0, 1.0])
def test_one_seed_twice_is_one_trace(history: float):
    first, second = run_seed(7, history=history), run_seed(7, history=history)
    assert first.digest == second.digest
    assert first.lines == second.lines
    assert first.delivered > 0


def test_another_seed_is_another_trace():
    assert len({run_seed(seed).digest for seed in range(5)}) == 5


def test_another_process_gives_the_same_trace():
    """Neither hashes of strings nor addresses of objects decide anything."""
    digests = set()
    for salt in ("1", "2"):
        code = "from danube_fast.testing.simulation import run_seed\n"
        code += "print([run_seed(seed).digest for seed in range(20, 24)])\n"
        code += "print([run_seed(seed, moves=0.5, history=1.0).digest for seed in range(20, 22)])\n"
        result = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": salt},
            cwd=ROOT, capture_output=True, text=True, check=True, timeout=SECONDS_MAX,
        )  # fmt: skip
        digests.add(result.stdout)
    assert len(digests) == 1, digests


def test_how_many_digits_a_process_id_has_changes_no_trace(monkeypatch: pytest.MonkeyPatch):
    """Errors name the folder, whose name has it."""
    found = []
    for process_id in (7, 2_000_000):
        monkeypatch.setattr(simulation.os, "getpid", lambda number=process_id: number)
        found.append([run_seed(seed).digest for seed in range(20, 24)])
    assert found[0] == found[1]


@pytest.mark.parametrize("seed", MOVED)
def test_a_seed_with_moves_that_found_a_fault_once(seed: int):
    outcome = run_seed(seed, moves=0.5)
    assert not outcome.fault, f"seed {seed}: {outcome.fault}"


@pytest.mark.parametrize("part", range(PARTS))
def test_no_seed_of_this_commit_finds_a_fault(part: int):
    first, count = first_seed(), seed_count()
    seeds = range(first + part, first + count, PARTS)
    for seed in seeds:
        outcome = run_seed(seed, moves=MOVES)
        assert not outcome.fault, (
            "\n".join(outcome.lines[-30:])
            + f"\nseed {seed}: {outcome.fault}\n"
            + f"again: python -m danube_fast.testing.simulation --seed {seed} --moves {MOVES}"
        )


@pytest.mark.parametrize("part", range(PARTS))
def test_no_seed_of_this_commit_finds_a_fault_of_history(part: int):
    first = first_seed()
    count = max(HISTORY_SEEDS, seed_count() - SEEDS + HISTORY_SEEDS)
    for seed in range(first + part, first + count, PARTS):
        outcome = run_seed(seed, moves=MOVES, history=1.0)
        assert not outcome.fault, (
            "\n".join(outcome.lines[-30:])
            + f"\nseed {seed}: {outcome.fault}\n"
            + f"again: python -m danube_fast.testing.simulation --seed {seed} --moves {MOVES} --history 1"
        )


@pytest.mark.parametrize(("seed", "moves"), WITH_HISTORY)
def test_a_seed_with_history_that_found_a_fault_once(seed: int, moves: float):
    outcome = run_seed(seed, moves=moves, history=1.0)
    assert not outcome.fault, f"seed {seed}: {outcome.fault}"


def test_the_command_runs_seeds_and_tells():
    result = subprocess.run(
        [sys.executable, "-m", "danube_fast.testing.simulation", "--seeds", "0:3"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=SECONDS_MAX,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "every promise was kept" in result.stdout
