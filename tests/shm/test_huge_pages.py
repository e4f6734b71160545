"""Rings in huge pages: who asks for them when, and what the kernel then gives."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from danube_fast.ring.memory import HUGE_PAGE_BYTES
from tests.crash.rig import Server
from tests.shm.children import ring_maps
from tests.workers.broker import ROOT

SECONDS = 60


@pytest.mark.parametrize(
    ("huge", "ring_bytes", "asks"),
    [
        (True, HUGE_PAGE_BYTES, True),
        (True, HUGE_PAGE_BYTES // 2, False),
        (False, HUGE_PAGE_BYTES, False),
    ],
)
def test_rings_ask_for_huge_pages(tmp_path: Path, huge: bool, ring_bytes: int, asks: bool) -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel knows no transparent huge pages")
    changes = {"shm_huge_pages": huge, "shm_ring_bytes": ring_bytes}
    gc.collect()
    before = asking("self")  # other tests of this process may have left rings to the collector
    with (
        Server(tmp_path / "data", workers=1, **changes) as server,
        server.client(transport="shm") as client,
    ):
        payload = os.urandom(100_000)
        client.producer("/default/t").publish(payload)
        (message,) = client.reader("/default/t").receive_batch(timeout=SECONDS)
        assert message.payload == payload
        found = asking("self")
        found.subtract(before)
        assert +found == Counter([asks]) == asking(server.pid_of(1))


def asking(pid: int | str) -> Counter[bool]:
    """How many rings of a process ask for huge pages, and how many do not."""
    return Counter("hg" in one["VmFlags"].split() for one in ring_maps(pid))


_BOTH_SIDES = """
import json, os, sys
from danube_fast.ring.duplex import duplex_bytes
from danube_fast.ring.memory import HUGE_PAGE_BYTES, map_fd
from danube_fast.ring.spsc import SpscRing
from tests.shm.children import ring_maps
found = {}
for huge in (False, True):
    name = os.path.join(sys.argv[1], f"rings-{huge}")
    fd = os.open(name, os.O_CREAT | os.O_RDWR)
    os.ftruncate(fd, duplex_bytes(HUGE_PAGE_BYTES))
    sides = [map_fd(fd, huge=huge) for _ in range(2)]
    ring = SpscRing.create(sides[0], HUGE_PAGE_BYTES)
    assert ring.try_push(b"x")
    assert SpscRing.attach(sides[1]).pop() == b"x"
    found[str(huge)] = [one["ShmemPmdMapped"] for one in ring_maps("self", name)]
print(json.dumps(found))
"""


def test_both_sides_get_huge_pages_where_the_kernel_has_them(tmp_path: Path) -> None:
    """On a file system that allows them: what the kernel does for a memfd is for its owner to say."""
    if os.geteuid():
        pytest.skip("only root can mount a tmpfs with huge=advise")
    mounted = 'mount -t tmpfs -o huge=advise,size=64m tmpfs "$1" || exit 9; shift; exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounted, "sh", str(tmp_path),
         sys.executable, "-c", _BOTH_SIDES, str(tmp_path)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    if done.returncode == 9:
        pytest.skip(f"no tmpfs with huge=advise may be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    page = f"{HUGE_PAGE_BYTES // 1024} kB"
    assert json.loads(done.stdout) == {"False": ["0 kB", "0 kB"], "True": [page, page]}
    assert list(tmp_path.iterdir()) == []
