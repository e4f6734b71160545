"""Kernels that read and write msgpack say what msgspec says, and read no byte too far (see msgpack_process.py).

`DANUBE_FUZZ_CASES=1000000 pytest tests/net` looks longer; `DANUBE_FUZZ_SEED` sets where to begin.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STATE_BYTES = 256
CASES = int(os.environ.get("DANUBE_FUZZ_CASES", "20000"))
SEED = int(os.environ.get("DANUBE_FUZZ_SEED", "1"))
SECONDS = 240 + CASES / 500
"""Kernels may have to be compiled first: these are part of no image."""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """A Python process that compiles kernels, to its end."""
    folders = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "frame")))
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", *command], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": folders, "DANUBE_KERNELS": "numba"},
        timeout=SECONDS, check=False,
    )  # fmt: skip


def test_kernels_agree_with_msgspec_at_every_edge_and_cut(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.write_bytes(bytes(STATE_BYTES))
    result = run(str(HERE / "msgpack_process.py"), str(state), str(SEED), str(CASES))
    case = state.read_bytes().rstrip(b"\0").decode()
    assert result.returncode == 0, (
        f"exit {result.returncode} at {case}; again: DANUBE_FUZZ_SEED={SEED} "
        f"DANUBE_FUZZ_CASES={CASES}\n{result.stdout[-1000:]}\n{result.stderr[-4000:]}"
    )
    assert int(result.stdout) > 5 * CASES


def test_a_byte_too_far_is_noticed() -> None:
    """A value whose last byte lies in the guard page kills: otherwise the test above proves less."""
    code = (
        "import ctypes\n"
        "from guarded import Guarded\n"
        "from danube_fast.frame.kernel import direct\n"
        "from danube_fast.net.msgpack_kernel import read_unsigned\n"
        "read, memory, out = direct(read_unsigned), Guarded(4096), (ctypes.c_int64 * 1)()\n"
        "address, _ = memory.put_last(bytes([0xCD, 1]))\n"
        "assert read(address, address + 2, ctypes.addressof(out)) == 0\n"
        "print('inside', flush=True)\n"
        "read(address, address + 3, ctypes.addressof(out))\n"
    )
    result = run("-c", code)
    assert (result.stdout, result.returncode) == ("inside\n", -11), result.stderr
