"""Becomes another program: `python -m danube_fast.bench.peers.become PROGRAM ARGUMENT...`.

Run behind the leash (demo/leash.py), whose order to die with the harness outlasts the exec.
"""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Never returns."""
    os.execv(sys.argv[1], sys.argv[1:])  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main()
