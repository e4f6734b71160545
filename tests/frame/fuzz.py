"""Lies told to the frame reader, next to a guard page. A process of its own, run by test_fuzz.py.

    python tests/frame/fuzz.py STATE_FILE systematic            every field, entry and offset
    python tests/frame/fuzz.py STATE_FILE random SEED COUNT     COUNT random frames from SEED on
    python tests/frame/fuzz.py STATE_FILE mutated SEED COUNT    COUNT times 10,000 mutated frames: the
                                                                check of each, all of some

STATE_FILE holds the case under way, so that it is known even after a SIGSEGV. `random SEED 1`
repeats one case, `mutated SEED 1` 10,000 of them.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import struct
import sys
from collections.abc import Callable, Iterator

import numpy as np
from guarded import Guarded
from samples import COLUMNS, FULL, random_frame, rows_of, stamped

from danube_fast.errors import DanubeError
from danube_fast.frame.arrow import to_record_batch
from danube_fast.frame.bundle import read_bundle, sealed_bundle
from danube_fast.frame.check import body_crc, check_frame
from danube_fast.frame.crc import crc32c
from danube_fast.frame.kernel import direct
from danube_fast.frame.layout import (
    AT_BUFFER_COUNT,
    BUFFER_DIRECTORY_BYTES,
    BUFFER_ENTRY_BYTES,
    CLIENT_HALF_BYTES,
    HEADER_BYTES,
    HEADER_DTYPE,
    At,
    BufferId,
    Codec,
    Flag,
)
from danube_fast.frame.pack import encode_frame
from danube_fast.frame.split import split_frame
from danube_fast.frame.view import FrameView

STATE_BYTES = 256
ALL_FLAGS = int(Flag.SPLIT | Flag.CONTROL | Flag.PAD | Flag.DELAYED)
ODD = (
    0,
    1,
    3,
    4,
    7,
    8,
    64,
    127,
    128,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFF_FFFF,
    0x8000_0000,
    0xFFFF_FFFF,
)

MUTATED_BATCH = 10_000
CUT_SHARE, NUMBER_SHARE, SEALED_SHARE = 0.1, 0.8, 0.9
READ_EVERY = 64
"""So many accepted frames of a mutated batch are only checked before one is read too."""

memory = Guarded(1 << 16)


def reseal(frame: bytearray) -> None:
    """Make body_crc32c right for whatever the bytes say, so that the lies behind it are reached."""
    if len(frame) < HEADER_BYTES:
        return
    told = struct.unpack_from("<I", frame, At.FRAME_BYTES)[0]
    crc = crc32c(frame[: At.BODY_CRC32C])
    crc = crc32c(frame[At.BODY_CRC32C + 4 : CLIENT_HALF_BYTES], crc)
    crc = crc32c(frame[HEADER_BYTES : max(HEADER_BYTES, told)], crc)
    struct.pack_into("<I", frame, At.BODY_CRC32C, crc)


def read_everything(window: memoryview) -> None:
    """Use all of a frame that `check_frame` took; only our own errors may come out."""
    try:
        view = FrameView(window)
        view.check()
        rows = rows_of(view)
        count = view.message_count
        if len(rows["payloads"]) != count or any(
            rows[name] is not None and len(rows[name]) != count for name in COLUMNS
        ):
            raise SystemExit("a column has another length than message_count")
        view.payloads(1, 3)
        view.key_hashes()
        to_record_batch(view).validate(full=True)
        chosen = np.arange(0, count, 2, dtype=np.int32)
        part = FrameView(split_frame(view, chosen, np.ones(chosen.size, dtype=np.uint32)))
        part.check(stamped=True)
        if part.payloads() != rows["payloads"][::2]:
            raise SystemExit("a split frame has other payloads")
    except DanubeError:
        pass


def try_frame(frame: bytes) -> None:
    """Check the bytes at both guard pages, and read them if they are accepted."""
    for put in (memory.put_last, memory.put_first):
        address, window = put(frame)
        for check_crc in (0, 1):
            result = check_frame(address, len(frame), ALL_FLAGS, check_crc)
            if result > len(frame):
                raise SystemExit(f"check_frame accepted {result} of {len(frame)} bytes")
        if len(frame) >= HEADER_BYTES:
            read_everything(window)


def try_bundle(bundle: bytes) -> None:
    """Check the bytes of a bundle next to the guard page."""
    address, _ = memory.put_last(bundle)
    read_bundle(address, len(bundle))


def _places(frame: bytearray) -> Iterator[tuple[str, int, int]]:
    """(name, offset, size) of every number in a frame: fields, directory, offsets, deltas."""
    for name, (kind, at) in ((n, f[:2]) for n, f in (HEADER_DTYPE.fields or {}).items()):
        yield name, at, kind.itemsize
    count = struct.unpack_from("<I", frame, HEADER_BYTES + AT_BUFFER_COUNT)[0]
    yield "buffer_count", HEADER_BYTES, 4
    yield "directory_reserved", HEADER_BYTES + 4, 4
    place = HEADER_BYTES + BUFFER_DIRECTORY_BYTES + BUFFER_ENTRY_BYTES * count
    for index in range(count):
        entry = HEADER_BYTES + BUFFER_DIRECTORY_BYTES + BUFFER_ENTRY_BYTES * index
        buffer_id, size = struct.unpack_from("<HxxI", frame, entry)
        label = BufferId(buffer_id).name
        yield f"{label} id", entry, 2
        yield f"{label} reserved", entry + 2, 2
        yield f"{label} size", entry + 4, 4
        if label.endswith(("OFFSETS", "DELTA")):
            for at in range(place, place + size, 4):
                yield f"{label} at {at - place}", at, 4
        place += (size + 7) & -8


def _lies(true: int, size: int) -> Iterator[int]:
    limit = 1 << (8 * size)
    for value in {*ODD, *(true + step for step in (-8, -4, -1, 1, 4, 8)), limit - 1, limit // 2}:
        if 0 <= value < limit and value != true:
            yield value


def _full_frames() -> Iterator[bytearray]:
    plain = stamped(encode_frame(**FULL))
    yield plain
    rows = np.array([0, 2, 3, 4], dtype=np.int32)
    yield split_frame(FrameView(plain), rows, np.array([1, 2, 3, 4], dtype=np.uint32))
    yield stamped(encode_frame(**FULL, codec=Codec.LZ4))
    yield stamped(encode_frame(**FULL, codec=Codec.ZSTD))


def _shrunk(frame: bytearray) -> Iterator[tuple[str, bytearray]]:
    """The frame cut at every word, with a header that agrees."""
    for length in range(HEADER_BYTES, len(frame), 8):
        shorter = frame[:length]
        struct.pack_into("<I", shorter, At.FRAME_BYTES, length)
        struct.pack_into("<I", shorter, At.RAW_BODY_BYTES, length - HEADER_BYTES)
        yield f"shrunk to {length} bytes", shorter


def _conspiracies(frame: bytearray) -> Iterator[tuple[str, bytearray]]:
    """Counts and sizes that agree with each other, but not with the bytes that are there."""
    entries = {name: at for name, at, _ in _places(frame) if name.endswith(" size")}
    for count in (6, 9, 100, 5000, 1 << 20, (1 << 29) - 1):
        changed = bytearray(frame)
        struct.pack_into("<I", changed, At.MESSAGE_COUNT, count)
        for name, at in entries.items():
            if name.startswith(("PAYLOAD_VALIDITY", "KEY_VALIDITY")):
                struct.pack_into("<I", changed, at, (count + 7) >> 3)
            elif name.startswith(("PAYLOAD_OFFSETS", "KEY_OFFSETS", "ATTRIBUTE_OFFSETS")):
                struct.pack_into("<I", changed, at, 4 * (count + 1))
            yield f"{count} messages, agreeing as far as {name}", bytearray(changed)
    pair_counts = [at for name, at, _ in _places(frame) if name.startswith("ATTRIBUTE_OFFSETS at")]
    for count in (6, 100, 1 << 20, (1 << 29) - 1):
        changed = bytearray(frame)
        struct.pack_into("<I", changed, pair_counts[-1], count)
        struct.pack_into("<I", changed, entries["ATTRIBUTE_KEY_OFFSETS size"], 4 * (count + 1))
        yield f"{count} pairs", changed


def systematic(tell: Callable[[str], None]) -> int:
    """One lie at a time, everywhere; and every shorter length."""
    cases = 0
    for kind, frame in enumerate(_full_frames()):
        tell(f"frame {kind} as it is")
        try_frame(frame)
        walkable = frame if frame[At.CODEC] == Codec.NONE else frame[:HEADER_BYTES] + bytes(8)
        numbers = list(_places(walkable))
        for name, at, size in numbers:
            true = int.from_bytes(frame[at : at + size], "little")
            for lie in _lies(true, size):
                tell(f"frame {kind}, {name} = {lie} instead of {true}")
                changed = bytearray(frame)
                changed[at : at + size] = lie.to_bytes(size, "little")
                if name != "body_crc32c":
                    reseal(changed)
                try_frame(changed)
                cases += 1
        more = [*_shrunk(frame), *(_conspiracies(frame) if kind < 2 else ())]
        for text, changed in more:
            tell(f"frame {kind}, {text}")
            reseal(changed)
            try_frame(changed)
            cases += 1
        for length in range(len(frame)):
            tell(f"frame {kind} cut to {length} bytes")
            try_frame(frame[:length])
            cases += 1
    bundle = bytearray(sealed_bundle([(7, frame) for frame in _full_frames()]))
    for at in range(0, 40, 4):
        for lie in _lies(struct.unpack_from("<I", bundle, at)[0], 4):
            tell(f"bundle, {lie} at {at}")
            changed = bytearray(bundle)
            struct.pack_into("<I", changed, at, lie)
            try_bundle(changed)
            try_bundle(changed[: at + 4])
            cases += 2
    return cases


def random_case(seed: int) -> None:
    """One random frame with a few random lies."""
    chance = random.Random(seed)
    frame = random_frame(chance)
    numbers = list(_places(frame)) if frame[At.CODEC] == Codec.NONE else []
    for _ in range(chance.randrange(4)):
        if numbers and chance.random() < 0.7:
            _, at, size = chance.choice(numbers)
            value = chance.choice((chance.choice(ODD), chance.randrange(1 << (8 * size))))
            frame[at : at + size] = (value % (1 << (8 * size))).to_bytes(size, "little")
        else:
            frame[chance.randrange(len(frame))] = chance.randrange(256)
    if chance.random() < 0.8:
        reseal(frame)
    if chance.random() < 0.2:
        del frame[chance.randrange(len(frame)) :]
    try_frame(frame)


def _templates(seed: int) -> list[tuple[bytes, list[tuple[int, int]]]]:
    """Frames to mutate, with the place and size of every number in them."""
    found = []
    for frame in (*_full_frames(), *(random_frame(random.Random(16 * seed + i)) for i in range(8))):
        walkable = frame if frame[At.CODEC] == Codec.NONE else frame[:HEADER_BYTES] + bytes(8)
        found.append((bytes(frame), [(at, size) for _, at, size in _places(walkable)]))
    return found


def mutated_batch(seed: int) -> None:
    """MUTATED_BATCH frames with one to four lies, as fast as Python goes: most are only checked."""
    check, crc_of = direct(check_frame), direct(body_crc)
    templates, chance = _templates(seed), random.Random(seed)
    below = chance.random
    whole = memory.window(memory.first, memory.capacity_bytes).cast("B")
    accepted = 0
    for _ in range(MUTATED_BATCH):
        frame, numbers = templates[int(below() * len(templates))]
        length = len(frame)
        if below() < CUT_SHARE:
            length = int(below() * length)
        start = memory.capacity_bytes - length
        address = memory.end - length
        ctypes.memmove(address, frame, length)
        for _ in range(1 + int(below() * 4)):
            if below() < NUMBER_SHARE:
                at, size = numbers[int(below() * len(numbers))]
                value = ODD[int(below() * len(ODD))] if below() < 0.5 else int(below() * 2**32)
            else:
                at, size, value = int(below() * len(frame)), 1, int(below() * 256)
            if at + size <= length:
                lie = (value % (1 << (8 * size))).to_bytes(size, "little")
                whole[start + at : start + at + size] = lie
        if length >= HEADER_BYTES and below() < SEALED_SHARE:
            told = struct.unpack_from("<I", whole, start + At.FRAME_BYTES)[0]
            if HEADER_BYTES <= told <= length:
                crc = crc_of(address, told)
                struct.pack_into("<I", whole, start + At.BODY_CRC32C, crc)
        result = check(address, length, ALL_FLAGS, 1)
        if result > length:
            raise SystemExit(f"check_frame accepted {result} of {length} bytes")
        if result >= 0:
            accepted += 1
            if accepted % READ_EVERY == 0:
                read_everything(memory.window(address, length))
    if accepted < MUTATED_BATCH // 100:
        raise SystemExit(f"only {accepted} of {MUTATED_BATCH} were accepted: nothing was read")


def main() -> None:
    """Run as the module's docstring says; prints the number of cases."""
    path, mode, *numbers = sys.argv[1:]
    with open(path, "r+b") as file:
        state = mmap.mmap(file.fileno(), STATE_BYTES)

    def tell(text: str) -> None:
        state[:STATE_BYTES] = text.encode()[:STATE_BYTES].ljust(STATE_BYTES, b"\0")

    if mode == "systematic":
        print(systematic(tell))
        return
    first, count = map(int, numbers)
    if mode == "mutated":
        for seed in range(first, first + count):
            tell(f"seed {seed}: repeat with `fuzz.py STATE_FILE mutated {seed} 1`")
            mutated_batch(seed)
        print(count * MUTATED_BATCH)
        return
    for seed in range(first, first + count):
        tell(f"seed {seed}: repeat with `fuzz.py STATE_FILE random {seed} 1`")
        random_case(seed)
    print(count)


if __name__ == "__main__":
    main()
