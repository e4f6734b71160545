"""The kernels that read and write msgpack, against msgspec, next to a guard page. Run by test_msgpack_kernel.py.

python tests/net/msgpack_process.py STATE_FILE SEED COUNT

STATE_FILE holds the case under way, so that it is known even after a SIGSEGV.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import sys
from collections.abc import Callable
from typing import Any

import msgspec
from guarded import Guarded

from danube_fast.frame.kernel import direct
from danube_fast.net.msgpack_kernel import (
    FIXED_ARRAY,
    UNSIGNED_BYTES_MAX,
    read_array,
    read_unsigned,
    write_unsigned,
)

STATE_BYTES = 256
UNTOUCHED = 0x5AA5_1234_5678_9ABC
EDGES = sorted(
    {1 << bits for bits in range(64)}
    | {(1 << bits) - 1 for bits in range(1, 65)}
    | {(1 << bits) + 1 for bits in range(64)}
)
read_unsigned_at, read_array_at = direct(read_unsigned), direct(read_array)
write_unsigned_at = direct(write_unsigned)
HEAD_BYTES = {0xDC: 3, 0xDD: 5}


class Walk:
    """Reads and writes at the upper guard page, and says which case is under way."""

    def __init__(self, state: mmap.mmap) -> None:
        self._state = state
        self._memory = Guarded(4096)
        self._out = (ctypes.c_int64 * 1)(UNTOUCHED)
        self.count = 0

    def note(self, what: str, content: bytes) -> str:
        """Keep what is done now; the same text for a failure."""
        text = f"{what} {content.hex()}"
        self._state[:STATE_BYTES] = text.encode()[:STATE_BYTES].ljust(STATE_BYTES, b"\0")
        self.count += 1
        return text

    def read(self, what: str, kernel: Callable[..., int], content: bytes, expected: Any) -> None:
        """Read `content`, which ends at the page: `expected` is None or (value, bytes of it)."""
        text = self.note(what, content)
        self._out[0] = UNTOUCHED
        address, _ = self._memory.put_last(content)
        end = kernel(address, address + len(content), ctypes.addressof(self._out))
        value = self._out[0]
        if expected is None:
            assert (end, value) == (0, UNTOUCHED), f"{text}: read {value} up to {end - address}"
        else:
            got = (value, end - address)
            assert got == expected, f"{text}: {got} instead of {expected}"

    def written(self, value: int) -> bytes:
        """What the kernel writes for a value, directly before the page."""
        expected = msgspec.msgpack.encode(value)
        text = self.note("write", expected)
        address, window = self._memory.put_last(bytes([0xA5]) * (1 + len(expected)))
        end = write_unsigned_at(address + 1, value)
        content = bytes(window)
        assert content == b"\xa5" + expected, f"{text}: wrote {content[1:].hex()}"
        assert end == address + len(content) and len(expected) <= UNSIGNED_BYTES_MAX, text
        return expected


def forms(value: int) -> list[bytes]:
    """Every encoding of an unsigned integer, the shortest and the wasteful ones."""
    found = [bytes([value])] if value < 128 else []
    for kind, size in ((0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8)):
        if value < 1 << 8 * size:
            found.append(bytes([kind]) + value.to_bytes(size, "big"))
    return found


def walk_value(walk: Walk, value: int) -> None:
    """Each form of a value, alone, cut at every byte, and with more behind it."""
    for form in forms(value):
        assert msgspec.msgpack.decode(form) == value
        fits = value < 1 << 63
        walk.read("unsigned", read_unsigned_at, form, (value, len(form)) if fits else None)
        walk.read(
            "unsigned", read_unsigned_at, form + b"\xff", (value, len(form)) if fits else None
        )
        for size in range(len(form)):
            walk.read("unsigned", read_unsigned_at, form[:size], None)
    if value < 1 << 63:
        form = walk.written(value)
        walk.read("unsigned", read_unsigned_at, form, (value, len(form)))


def array_of(content: bytes) -> tuple[int, int] | None:
    """What `read_array` is to find: how many values, and the bytes of the head."""
    kind = content[0]
    if FIXED_ARRAY <= kind < FIXED_ARRAY + 16:
        return kind - FIXED_ARRAY, 1
    if kind == 0xDC and len(content) >= 3:
        return int.from_bytes(content[1:3], "big"), 3
    return None


def walk_arrays(walk: Walk) -> None:
    """Arrays of all lengths near an edge, as msgspec writes them, and cut in their heads."""
    for length in [*range(40), 255, 256, 257, 65_534, 65_535, 65_536, 70_000]:
        whole = msgspec.msgpack.encode([0] * length)
        head = whole[: HEAD_BYTES.get(whole[0], 1)]
        expected = (length, len(head)) if length < 1 << 16 else None
        walk.read("array", read_array_at, head, expected)
        walk.read("array", read_array_at, (head + b"\x01\x02")[:9], expected)
        for size in range(len(head)):
            walk.read("array", read_array_at, head[:size], None)


def unsigned_of(content: bytes) -> tuple[int, int] | None:
    """What msgspec finds in the first bytes, if that is what `read_unsigned` is for."""
    kind = content[0]
    size = 1 if kind < 128 else 1 + (1 << (kind - 0xCC)) if 0xCC <= kind <= 0xCF else 0
    if not 0 < size <= len(content):
        return None
    value = msgspec.msgpack.decode(content[:size])
    return (value, size) if value < 1 << 63 else None


def walk_bytes(walk: Walk, content: bytes) -> None:
    """Bytes that may be anything."""
    walk.read("unsigned", read_unsigned_at, content, unsigned_of(content))
    walk.read("array", read_array_at, content, array_of(content))


def main(state_file: str, seed: str, count: str) -> int:
    """All edges, then random values and bytes; how many reads and writes there were."""
    with open(state_file, "r+b") as file, mmap.mmap(file.fileno(), STATE_BYTES) as state:
        walk = Walk(state)
        for value in [*range(300), *(edge for edge in EDGES if edge < 1 << 64)]:
            walk_value(walk, value)
        walk_arrays(walk)
        for kind in range(256):
            for size in range(12):
                walk_bytes(walk, bytes([kind]) + bytes([0x80]) * size)
        draw = random.Random(int(seed))
        for _ in range(int(count)):
            walk_value(walk, draw.getrandbits(draw.randrange(1, 65)))
            walk_bytes(walk, draw.randbytes(draw.randrange(1, 12)))
        return walk.count


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
