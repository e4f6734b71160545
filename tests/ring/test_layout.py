"""Bytes of the shared memory, pinned by hand: a change here needs a new version word."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from danube_fast.ring import layout
from danube_fast.ring.control import ControlBlock, ProcessState
from danube_fast.ring.counters import Counter, CounterBlock
from danube_fast.ring.memory import map_fd
from danube_fast.ring.spsc import SpscRing

ROOT = Path(__file__).resolve().parents[2]


def test_golden_ring() -> None:
    """Written out without layout.py: version 1, capacity 64; one record popped, a pad, a record."""
    memory = np.zeros(512 + 64, dtype=np.uint8)
    ring = SpscRing.create(memory, 64)
    assert ring.try_push(b"gone" * 3)
    assert ring.pop() == b"gone" * 3
    assert ring.try_push(b"two", b"-two")
    assert ring.try_push(b"third")
    assert ring.try_push(b"over the edge")

    golden = bytearray(512 + 64)
    golden[0:16] = bytes.fromhex("44465247 01000000 40000000 00000000")
    golden[128:144] = bytes.fromhex("58000000 00000000 18000000 00000000")  # tail 88, head was 24
    golden[256:272] = bytes.fromhex("18000000 00000000 18000000 00000000")  # head 24, tail was 24
    golden[512:536] = bytes.fromhex("0d000000 00000000") + b"over the edge\0\0\0"
    golden[536:552] = bytes.fromhex("07000000 00000000") + b"two-two\0"
    golden[552:568] = bytes.fromhex("05000000 00000000") + b"third\0\0\0"
    golden[568:576] = bytes.fromhex("00000000 01000000")
    assert memory.tobytes() == bytes(golden)


def test_golden_control_block() -> None:
    block = ControlBlock.create(2)
    try:
        block.announce(1, ProcessState.READY, epoch=3, port=6653)
        block.beat(1, 1_000)
        block.beat(1, 2_000, thread=1)
        block.set_restarts(1, 2)
        with map_fd(block.fd) as memory:
            image = memory[:]
        pid = block.pid(1)
        assert block.doorbell_address(1) - block.doorbell_address(0) == 512
    finally:
        block.close()
    golden = bytearray(128 + 2 * 512)
    golden[0:16] = bytes.fromhex("4446434c 01000000 02000000 00000000")
    slot = 128 + 512
    golden[slot : slot + 8] = bytes.fromhex("0200 fd19 03000000")
    golden[slot + 8 : slot + 16] = pid.to_bytes(8, "little")
    golden[slot + 128 : slot + 144] = bytes.fromhex("01000000 00000000 e8030000 00000000")
    golden[slot + 144 : slot + 160] = bytes.fromhex("01000000 00000000 d0070000 00000000")
    golden[slot + 256 : slot + 272] = bytes.fromhex("02000000 00000000 00000000 00000000")
    assert image == bytes(golden) + bytes(len(image) - len(golden))


def test_golden_counter_block() -> None:
    block = CounterBlock.create(2, 1)
    try:
        block.add(Counter.PARTITIONS, 7)
        with map_fd(block.fd) as memory:
            image = memory[:]
    finally:
        block.close()
    golden = bytearray(128 + 2 * 1024)
    golden[0:16] = bytes.fromhex("4446434e 01000000 02000000 00000000")
    golden[128 + 1024 + 19 * 8] = 7
    assert image == bytes(golden) + bytes(len(image) - len(golden))


def test_counter_numbers_never_change() -> None:
    assert {counter.name: int(counter) for counter in Counter if counter < 20} == {
        "MESSAGES_IN": 0, "BYTES_IN": 1, "MESSAGES_OUT": 2, "BYTES_OUT": 3, "FRAMES_IN": 4,
        "BUNDLES_IN": 5, "GROUPS": 6, "SYNCS": 7, "SYNC_BYTES": 8, "ACKS_OUT": 9, "SESSIONS": 10,
        "PRODUCERS": 11, "CONSUMERS": 12, "DUPLICATES": 13, "REFUSED": 14, "REDELIVERED": 15,
        "LOST_NON_RELIABLE": 16, "LOG_BYTES": 17, "LOG_POSITION": 18, "PARTITIONS": 19,
    }  # fmt: skip
    assert len({int(counter) for counter in Counter}) == len(Counter.__members__)


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("AT_HEAD", layout.AT_TAIL + 64, "another writer"),
        ("AT_CACHED_HEAD", layout.AT_TAIL, "overlaps"),
        ("AT_CACHED_TAIL", layout.AT_HEAD + 4, "unaligned"),
        ("AT_HEAD", layout.RING_HEADER_BYTES, "outside"),
    ],
)
def test_proof_fails_for_a_wrong_layout(
    name: str, value: int, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof that runs at import can fail."""
    key = name.removeprefix("AT_").lower()
    writer = layout._RING_WORDS[key][1]
    monkeypatch.setitem(layout._RING_WORDS, key, (value, writer))
    with pytest.raises(ImportError, match=complaint):
        layout._prove()


def test_supervisor_side_needs_no_kernels() -> None:
    """What the supervisor imports loads neither numba nor numpy."""
    code = (
        "import sys, danube_fast.ring, danube_fast.ring.repair\n"
        "print([name for name in ('numba', 'numpy', 'llvmlite') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60, check=True
    )
    assert done.stdout.decode().strip() == "[]"
