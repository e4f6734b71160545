"""Which seeds a test run tries: others with each commit, the same for one commit."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEEDS_VARIABLE = "DANUBE_SIMULATION_SEEDS"
SEEDS = 60
HISTORY_SEEDS = 20
"""How many of them run once more, with an uploader and a store."""
MOVES = 0.2
"""Share of the runs in which partitions move between workers."""
FIRST_WITHOUT_GIT = 1_000_000


def seed_count() -> int:
    """How many seeds a run tries."""
    return int(os.environ.get(SEEDS_VARIABLE, SEEDS))


def first_seed() -> int:
    """The first of them, from the commit."""
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=False, timeout=20
    )
    commit = found.stdout.decode().strip()
    return int(commit[:8], 16) if found.returncode == 0 and commit else FIRST_WITHOUT_GIT
