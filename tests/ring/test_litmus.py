"""Memory ordering between two real processes, and the instructions that give it."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from danube_fast.client.link import answers
from danube_fast.ring import doorbell, duplex_kernel, spsc_kernel
from danube_fast.ring.memory import create_memfd, map_fd

LINE = 128
WRONG_ORDER_SECONDS = 60


def message_passing(peers: Any, order: str, count: int) -> int:
    words = 6
    fd = peers.own(create_memfd("litmus", LINE + words * 8))
    reader = peers.start("message_reader", fd, words, count)
    writer = peers.start("message_writer", fd, words, count, order)
    assert writer.result() == count
    stale: int = reader.result()
    return stale


def test_message_passing(peers: Any) -> None:
    """Who sees the flag sees everything stored before it."""
    assert message_passing(peers, "right", 5_000_000) == 0


def test_message_passing_sees_a_wrong_order(peers: Any) -> None:
    """With the stores the wrong way round the same reader finds stale data: it can fail.

    Only while both processes really run at once, which a busy machine grants now and then.
    """
    deadline = time.monotonic() + WRONG_ORDER_SECONDS
    while message_passing(peers, "wrong", 5_000_000) == 0:
        assert time.monotonic() < deadline, (
            f"no stale data within {WRONG_ORDER_SECONDS} s: either the two processes never ran at "
            "the same time, or the test above cannot fail"
        )


def test_store_buffering(peers: Any) -> None:
    """Of two processes that store and then look, one sees the other: the sleeping word's promise."""
    count = 100_000
    fd = peers.own(create_memfd("litmus", 2 * LINE + 2 * (count + 1) * 8))
    both = [peers.start("store_buffer", fd, side, count, 1) for side in (0, 1)]
    met = [peer.result() for peer in both]
    seen = np.frombuffer(map_fd(fd), dtype=np.int64, offset=2 * LINE).reshape(2, count + 1)
    blind = np.flatnonzero(seen[:, 1:].sum(axis=0) == 0)
    assert blind.size == 0, f"neither side saw the other in {blind.size} rounds of {met} met"
    assert min(met) > 0, "the two processes never met; nothing was tested"


ASSEMBLY = """
import numba, {module} as module
kernel = module.{name}
fresh = numba.njit(kernel.signatures[0])(kernel.py_func)  # what comes from a cache has no text
print(*fresh.inspect_asm().values())
"""


def assembly(module: Any, name: str) -> str:
    """The machine code of a kernel, from a process that compiles."""
    return subprocess.run(
        [sys.executable, "-c", ASSEMBLY.format(module=module.__name__, name=name)],
        env={**os.environ, "DANUBE_KERNELS": "numba"}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip


FULL_FENCE = {"x86_64": r"mfence|lock\s+orl", "aarch64": r"dmb\s+ish\b"}
SEQ_CST_STORE = {"x86_64": r"xchgq", "aarch64": r"stlr"}
EXCHANGE = {"x86_64": r"lock\s+cmpxchgq", "aarch64": r"casal|ldaxr"}
RELEASE_STORE = {"x86_64": r"movq", "aarch64": r"stlr"}


@pytest.mark.parametrize(
    ("module", "name", "wanted"),
    [
        pytest.param(doorbell, "_prepare_sleep", (SEQ_CST_STORE, FULL_FENCE), id="prepare_sleep"),
        pytest.param(doorbell, "_sleep_to_end", (FULL_FENCE,), id="ring"),
        pytest.param(doorbell, "_clear", (EXCHANGE,), id="clear"),
        pytest.param(spsc_kernel, "_publish", (RELEASE_STORE,), id="publish"),
        pytest.param(spsc_kernel, "_release", (RELEASE_STORE,), id="release"),
        pytest.param(duplex_kernel, "_ask_room", (SEQ_CST_STORE, FULL_FENCE), id="ask_room"),
        pytest.param(duplex_kernel, "_answer_room", (FULL_FENCE,), id="answer_room"),
        pytest.param(duplex_kernel, "_ring_peer", (FULL_FENCE, EXCHANGE), id="ring_peer"),
        pytest.param(answers, "answer", (EXCHANGE,), id="answer"),
        pytest.param(answers, "_follow", (EXCHANGE,), id="follow"),
        pytest.param(answers, "_hand_over", (EXCHANGE,), id="hand_over"),
    ],
)
def test_instructions(module: Any, name: str, wanted: tuple[dict[str, str], ...]) -> None:
    """The fences are in the machine code, wherever the litmus tests happen to run."""
    text = assembly(module, name)
    missing = [words for words in wanted if not re.search(words.get(platform.machine(), ""), text)]
    assert not missing, f"no {missing} in:\n{text}"
