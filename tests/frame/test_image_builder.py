"""A process that builds the kernel image: what it compiles, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240
"""Of one process; it imports Numba and compiles a few kernels."""


def build_process(code: str) -> str:
    """Run code in a process that builds an image; what it prints."""
    preamble = "from danube_fast.frame import crc, image_builder as builder\n"
    preamble += "from danube_fast.frame.kernel import declared, direct\n"
    preamble += "from danube_fast.errors import Internal\n"
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", preamble + code], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DANUBE_KERNELS": "build"},
        timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"exit {done.returncode}: {done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def test_a_kernel_that_python_calls_while_the_image_is_built_says_so() -> None:
    """Its code is nowhere yet: a module that needs a kernel for its import must find another way."""
    said = build_process(
        "for kernel in (crc.crc32c_extend, direct(crc.crc32c_extend)):\n"
        "    try:\n"
        "        kernel(0, 0, 0)\n"
        "    except Internal as error:\n"
        "        print(error)\n"
    )
    text = "danube_fast.frame.crc.crc32c_extend was called while the kernel image is built"
    assert said.splitlines() == [text, text]


def test_shares_make_one_module() -> None:
    """Kernels of one share call those of another, which another process compiles."""
    said = build_process(
        "from danube_fast.frame.hash import *\n"
        "parts = [builder._compile(declared, number, 2) for number in range(2)]\n"
        "module, names = builder._link(declared, parts)\n"
        "assert {entry.name for entry in declared} >= set(names[1:]) and len(names) > 3, names\n"
        "code = builder._emit(module)\n"
        "print(names[0], 'danube_fast.frame.crc.crc32c_extend' in names, len(code) > 1000)\n"
        "print([f.name for f in module.functions if f.is_declaration and 'kernel:' in f.name])\n"
    )
    assert said.splitlines()[-2:] == ["address_of True True", "[]"]


def test_a_share_that_lacks_a_kernel_is_noticed() -> None:
    """An image without its code would end a process that loads it."""
    said = build_process(
        "try:\n"
        "    builder._link(declared, [builder._compile(declared, 1, 2)])\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    assert said.startswith("no code of danube_fast.frame."), said
