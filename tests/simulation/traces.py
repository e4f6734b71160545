"""The trace hashes of the first seeds, kept: a change that moves code without changing it changes none of them.

python -m tests.simulation.traces                compare, and name the seeds that differ
python -m tests.simulation.traces --record       write them anew, in a commit that says why they differ
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from danube_fast.testing.simulation import run_seed

SEEDS = 200
MOVES = 0.3
PATH = Path(__file__).with_name("traces.txt")


def digest_of(seed: int) -> str:
    """Trace hash of a seed; the fault instead, if there is one."""
    outcome = run_seed(seed, moves=MOVES)
    return outcome.fault or outcome.digest


def kept() -> list[str]:
    """The hashes on record, by seed."""
    return PATH.read_text().split()


def main() -> int:
    """Command line; 0 if all hashes are those on record."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.traces")
    parser.add_argument("--record", action="store_true", help="write the hashes anew")
    options = parser.parse_args()
    found = [digest_of(seed) for seed in range(SEEDS)]
    if options.record:
        PATH.write_text("\n".join(found) + "\n")
        return 0
    differ = [seed for seed, (old, new) in enumerate(zip(kept(), found, strict=True)) if old != new]
    print(f"{SEEDS - len(differ)} of {SEEDS} traces as on record; others: {differ or 'none'}")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
