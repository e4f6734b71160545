"""Whatever the bytes say, reading them stays inside them (see fuzz.py and guarded.py).

`DANUBE_FUZZ_CASES=100000 pytest tests/frame/test_fuzz.py` looks longer, `DANUBE_FUZZ_MUTATED=10000000`
checks ten million mutated frames; `DANUBE_FUZZ_SEED` sets where to begin (default: the same every time).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STATE_BYTES = 256
CASES = int(os.environ.get("DANUBE_FUZZ_CASES", "2000"))
MUTATED = int(os.environ.get("DANUBE_FUZZ_MUTATED", "200000"))
BATCH = 10_000
SEED = int(os.environ.get("DANUBE_FUZZ_SEED", "1"))


def _run(tmp_path: Path, *arguments: str) -> int:
    """Run the fuzzer to its end; returns the number of cases it did."""
    state = tmp_path / "state"
    state.write_bytes(bytes(STATE_BYTES))
    result = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(HERE / "fuzz.py"), str(state), *arguments],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"},
        capture_output=True,
        text=True,
        timeout=120 + CASES / 100 + MUTATED / 2000,
        check=False,
    )
    case = state.read_bytes().rstrip(b"\0").decode()
    assert result.returncode == 0, (
        f"exit {result.returncode} at {case}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    )
    return int(result.stdout)


def test_every_number_may_lie(tmp_path: Path) -> None:
    assert _run(tmp_path, "systematic") > 3000


def test_random_lies(tmp_path: Path) -> None:
    assert _run(tmp_path, "random", str(SEED), str(CASES)) == CASES


def test_mutated_frames(tmp_path: Path) -> None:
    batches = -(-MUTATED // BATCH)
    assert _run(tmp_path, "mutated", str(SEED), str(batches)) == batches * BATCH


def test_the_guard_page_kills(tmp_path: Path) -> None:
    """A read one byte past the end is noticed: otherwise the tests above prove nothing."""
    code = (
        "from guarded import Guarded; from danube_fast.frame.crc import crc32c_extend\n"
        "memory = Guarded(4096)\n"
        "address, _ = memory.put_last(bytes(100))\n"
        "crc32c_extend(0, address, 100)\n"
        "print('inside', flush=True)\n"
        "crc32c_extend(0, address, 101)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.stdout == "inside\n", result.stderr
    assert result.returncode == -11
