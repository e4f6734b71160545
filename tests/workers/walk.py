"""The walk of one message through the code: calls, uninterrupted stays, files; counted by a profile function.

Run as a module it is a worker whose turns are counted; what was counted is written to the file that WALK_FILE
names when the worker stops.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
WALK_FILE = "DANUBE_TEST_WALK_FILE"


class Tracer:
    """Counts the calls of one thread into modules of the product, in stretches."""

    def __init__(self, ends: tuple[str, str] = ("", "")) -> None:
        """`ends`: file and function whose call ends a stretch."""
        self._ends = ends
        self._names: dict[str, str] = {}
        self.stretches: list[dict[str, Any]] = []
        self.begin()

    def begin(self) -> None:
        """Begin a stretch."""
        self._calls = self._stays = 0
        self._files: dict[str, None] = {}
        self._functions: set[str] = set()
        self._last = ""

    def end(self) -> dict[str, Any]:
        """End the stretch; what it was."""
        return {
            "calls": self._calls,
            "stays": self._stays,
            "files": list(self._files),
            "functions": sorted(self._functions),
        }

    def _file(self, path: str) -> str:
        """A module of the product by its path in the tree, else ""."""
        name = self._names.get(path)
        if name is None:
            name = ""
            if path.startswith(str(ROOT)) and ".venv" not in path:
                name = str(Path(path).resolve().relative_to(ROOT))
                if name.startswith("tests/"):
                    name = ""
            self._names[path] = name
        return name

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """The profile function."""
        if event != "call":
            return
        code = frame.f_code
        name = self._file(code.co_filename)
        if not name:
            return
        if (name, code.co_name) == self._ends:
            if self._calls:
                self.stretches.append(self.end())
            self.begin()
            return
        self._calls += 1
        self._functions.add(f"{name}:{code.co_name}")
        self._files[name] = None
        if name != self._last:
            self._stays += 1
            self._last = name


def main() -> int:
    """A worker that counts."""
    from danube_fast.workers.shard import worker

    tracer = Tracer(("workers/shard/worker.py", "do_work"))
    sys.setprofile(tracer)
    code = worker.main()
    sys.setprofile(None)
    Path(os.environ[WALK_FILE]).write_text(json.dumps(tracer.stretches))
    return code


if __name__ == "__main__":
    sys.exit(main())
