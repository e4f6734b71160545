"""Memory orderings of all kernels that share words with another thread or process: in LLVM's IR, and for aarch64.

`test_litmus.py` looks at the instructions of the machine that it runs on, where an x86-64 hides most mistakes: every
load there acquires and every store releases. The IR says what is promised on each machine (`ordering_process.py` reads
it), and LLVM tells what becomes of it on an aarch64, wherever this runs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SECONDS = 280
"""Kernels are compiled, some for the first time."""
ORDERED = {
    "ring.buckets._pay": "cmpxchg seq_cst acquire, load acquire",
    "ring.buckets._wait": "load acquire x2",
    "ring.buckets.find_row": "cmpxchg seq_cst acquire, load acquire x2",
    "ring.buckets._room": "load acquire",
    "ring.buckets._forgive": "store release x2",
    "ring.namespace_words._exchange": "cmpxchg seq_cst acquire, load acquire",
    "ring.doorbell._prepare_sleep": "fence seq_cst, load monotonic, store monotonic, store seq_cst",
    "ring.doorbell._cancel_sleep": "store release",
    "ring.doorbell._sleep_to_end": "fence seq_cst, load monotonic",
    "ring.doorbell._clear": "cmpxchg seq_cst acquire",
    "ring.spsc_kernel._reserve": "load acquire, load monotonic, store monotonic",
    "ring.spsc_kernel._own_tail": "load monotonic",
    "ring.spsc_kernel._publish": "store release",
    "ring.spsc_kernel._front": "load acquire, load monotonic x2, store monotonic",
    "ring.spsc_kernel._release": "load monotonic, store release",
    "ring.spsc_kernel._readable": "load acquire, load monotonic",
    "ring.spsc_kernel._used": "load acquire x2",
    "ring.spsc_kernel._version": "load acquire",
    "ring.spsc_kernel._seal_version": "store release",
    "ring.duplex_kernel._ask_room": "fence seq_cst, store monotonic, store seq_cst",
    "ring.duplex_kernel._answer_room": "fence seq_cst, load monotonic",
    "wal.sync._sync_batch": "load monotonic x2, store release x2",
    "wal.sync._sync_loop": "load acquire x2, load monotonic, store release",
    "wal.sync._push": "load acquire, load monotonic, store release",
    "wal.sync.synced_of": "load acquire",
    "wal.sync.fault_of": "load acquire",
    "wal.sync._load": "load acquire",
    "wal.sync._store": "store release",
    "client.link.answers.is_known": "load acquire",
    "client.link.answers._set_state": "cmpxchg seq_cst acquire, load monotonic",
    "client.link.answers.find_row": "load monotonic x2",
    "client.link.answers._expect": "store monotonic x2",
    "client.link.answers._follow": "cmpxchg seq_cst acquire x3, load acquire",
    "client.link.answers._hand_over": "cmpxchg seq_cst acquire x2, load monotonic",
}
"""What stands in each kernel itself, not in those that it calls: the promises of `ring/atomics.py` that the protocols
need. Change a line only with the reason why the weaker, or other, ordering is enough."""
ON_AARCH64 = {
    "load acquire": r"\bldap?r\b", "store release": r"\bstlr\b", "store seq_cst": r"\bstlr\b",
    "cmpxchg seq_cst acquire": r"\bcasal\b|\bldaxr\b(?s:.*)\bstlxr\b", "fence seq_cst": r"\bdmb\s+ish$",
}  # fmt: skip
"""Monotonic ones are ordinary instructions there."""
RINGS_READ = {"load acquire", "store release", "fence seq_cst"}
RINGS_WRITTEN = RINGS_READ | {"store seq_cst", "cmpxchg seq_cst acquire"}
THROUGH_OTHERS = {
    "ring.duplex_kernel._ring_peer": {"fence seq_cst", "cmpxchg seq_cst acquire"},
    "ring.duplex_kernel._arm": {"store seq_cst", "fence seq_cst", "load acquire", "store release"},
    "ring.duplex_kernel.release_pair": RINGS_READ,
    "ring.duplex_kernel.push_pair": RINGS_WRITTEN,
    "client.link.answers.answer": {"cmpxchg seq_cst acquire"},
    "client.link.deliveries._take_from_rings": RINGS_READ,
    "client.link.lookout._take_answers": RINGS_READ | {"cmpxchg seq_cst acquire"},
    "client.link.lookout._watch": RINGS_WRITTEN,
    "client.produce.straight._send_frame": RINGS_WRITTEN,
    "workers.shard.ring_out.deliver_one": RINGS_WRITTEN,
    "workers.shard.publish.take_kernel.take_rounds": RINGS_READ,
    "workers.shard.publish.serve_kernel.write_group": RINGS_WRITTEN,
    "workers.shard.publish.turn_kernel._step": RINGS_WRITTEN,
}
"""What kernels of the straight ways must have in their code by those that they call."""


@pytest.fixture(scope="module")
def kernels() -> dict[str, Any]:
    """What `ordering_process.py` says of each kernel."""
    result = subprocess.run(
        [sys.executable, str(HERE / "ordering_process.py")], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def text_of(ordered: list[str]) -> str:
    """Orderings as they stand in ORDERED."""
    return ", ".join(
        each if count == 1 else f"{each} x{count}"
        for each, count in sorted(Counter(ordered).items())
    )


def test_orderings_in_the_ir(kernels: dict[str, Any]) -> None:
    """Each kernel has the ordered loads, stores, exchanges and fences that its protocol needs, on every machine."""
    found = {
        name: text_of(kernel["ordered"]) for name, kernel in kernels.items() if kernel["ordered"]
    }
    differing = {
        name: f"{found.get(name)} instead of {ORDERED.get(name)}"
        for name in found.keys() | ORDERED.keys()
        if found.get(name) != ORDERED.get(name)
    }
    assert not differing, f"other orderings than those in ORDERED: {differing}"


def test_shared_words_are_touched_by_atomics_only(kernels: dict[str, Any]) -> None:
    """No plain load or store in the optimised IR goes to a word that another thread or process uses meanwhile."""
    looked_at = 0
    for name, kernel in kernels.items():
        touched = kernel["accesses"]
        if touched is None:
            continue
        assert touched, f"no access of {name} was recognised"
        plain = [line for line in touched if " atomic " not in line and " cmpxchg " not in line]
        assert not plain, f"{name} touches a shared word without an ordering: {plain}"
        looked_at += len(touched)
    assert looked_at > len(ORDERED), "too few accesses were recognised"


def test_instructions_on_aarch64(kernels: dict[str, Any]) -> None:
    """LLVM makes of them what orders memory on an aarch64, with and without instructions that exchange."""
    if not all(kernel["code"] for kernel in kernels.values()):
        pytest.skip("this llvmlite cannot make code for aarch64")
    own = [
        (name, {kind for kind in ON_AARCH64 if kind in ordered}, 0)
        for name, ordered in ORDERED.items()
    ]
    missing = [
        f"{each!r} of {name} ({features or 'no features'})"
        for name, kinds, part in [*own, *((*wanted, 1) for wanted in THROUGH_OTHERS.items())]
        for features, code in kernels[name]["code"].items()
        for each in sorted(kinds)
        if not re.search(ON_AARCH64[each], code[part], re.MULTILINE)
    ]
    assert not missing, f"no instruction on aarch64 for {missing}"


def test_exchanges_are_made_in_both_ways(kernels: dict[str, Any]) -> None:
    """The two sets of features differ where they should: otherwise one of them was not looked at."""
    if not all(kernel["code"] for kernel in kernels.values()):
        pytest.skip("this llvmlite cannot make code for aarch64")
    (plain, _), (exchanging, _) = kernels["ring.doorbell._clear"]["code"].values()
    assert "casal" in exchanging and "casal" not in plain
    assert "ldaxr" in plain and "ldaxr" not in exchanging
