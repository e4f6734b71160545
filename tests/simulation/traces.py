"""The trace hashes of the first seeds, kept: a change that moves code without changing it changes none of them.

python -m tests.simulation.traces                compare, and name the seeds that differ
python -m tests.simulation.traces --record       write them anew, in a commit that says why they differ

Both do so with the runs with history of `history_traces.txt`, too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

from danube_fast.testing.simulation import run_seed

MOVES = 0.3
FOLDER = Path(__file__).parent


class Book(NamedTuple):
    """Traces on record."""

    name: str
    seeds: int
    history: float
    """Share of the runs with history."""

    def digest_of(self, seed: int) -> str:
        """Trace hash of a seed; the fault instead, if there is one."""
        outcome = run_seed(seed, moves=MOVES, history=self.history)
        return outcome.fault or outcome.digest

    def record(self) -> None:
        """Write the hashes anew."""
        found = [self.digest_of(seed) for seed in range(self.seeds)]
        (FOLDER / self.name).write_text("\n".join(found) + "\n")

    def compare(self) -> bool:
        """Name the seeds whose traces differ; whether none does."""
        kept = (FOLDER / self.name).read_text().split()
        differ = [
            seed
            for seed, old in zip(range(self.seeds), kept, strict=True)
            if old != self.digest_of(seed)
        ]
        same = self.seeds - len(differ)
        print(f"{same} of {self.seeds} traces as on record; others: {differ or 'none'}")
        return not differ


BOOKS = (Book("traces.txt", 200, 0.0), Book("history_traces.txt", 50, 1.0))


def main() -> int:
    """Command line; 0 if all hashes are those on record."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.traces")
    parser.add_argument("--record", action="store_true", help="write the hashes anew")
    options = parser.parse_args()
    if options.record:
        for book in BOOKS:
            book.record()
        return 0
    same = [book.compare() for book in BOOKS]
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
