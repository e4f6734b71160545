"""Runs one of our modules so that it cannot outlive the demo: `python -m danube_fast.demo.leash PID
MODULE ARGUMENT...`. The kernel sends SIGKILL when the demo ends in a way that leaves no time for
cleaning up; a broker's own children die with it in the same manner.
"""

from __future__ import annotations

import runpy
import sys

from danube_fast.workers.process.boot import die_with_parent

__all__ = ["main"]


def main() -> None:
    """Become the module that is named."""
    die_with_parent(int(sys.argv[1]))
    module = sys.argv[2]
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
