"""Random messages for the broker's sockets: noise, commands that are wrong or nearly right, frames that lie."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import lz4.block
import msgpack

from tests.protocol.raw import example, resealed

EXTREMES = (0, 1, -1, 127, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))

raw = example()


def lz4_frame(frame: bytes) -> bytes:
    body = lz4.block.compress(frame[128:], store_size=False)
    padding = -len(body) % 8
    packed = frame[:128] + body + bytes(padding)
    return resealed(packed, raw.crc32c, (5, "B", 1), (8, "I", len(packed)), (58, "B", padding))


class Storm:
    """Random messages, some from scratch, some nearly right."""

    def __init__(self, seed: int, partition_id: int, owner: tuple[int, int, int]) -> None:
        self.random = random.Random(seed)
        self.partition_id = partition_id
        self.owner = owner
        self.kinds: list[Callable[[], list[bytes]]] = [
            self.noise, self.any_command, self.nearly, self.cut, self.nested, self.bundle,
            self.bundle, self.bundle, self.acks,
        ]  # fmt: skip

    def message(self) -> list[bytes]:
        return self.random.choice(self.kinds)()

    def noise(self) -> list[bytes]:
        count = self.random.randint(1, 70 if self.random.random() < 0.05 else 4)
        return [self.random.randbytes(self.random.randint(0, 300)) for _ in range(count)]

    def value(self, depth: int = 0) -> Any:
        choice = self.random.randrange(11 if depth < 3 else 8)
        if choice < 3:
            return self.random.choice((*EXTREMES, self.partition_id, self.random.getrandbits(40)))
        if choice == 3:
            return self.random.choice((None, True, False, 0.5, float("nan"), -1e300))
        if choice == 4:
            return self.random.randbytes(self.random.randint(0, 40))
        if choice < 8:
            words = ("", "earliest", "shared", "exclusive", "reader", "/default/storm", "x" * 3000)
            return self.random.choice((*words, "\0", "é\U0001f600", "/default/", "durability"))
        if choice < 10:
            return [self.value(depth + 1) for _ in range(self.random.randint(0, 5))]
        keys = (self.random.choice(("topic", "partitions", "a", 7)) for _ in range(3))
        return {key: self.value(depth + 1) for key in keys}

    def any_command(self) -> list[bytes]:
        op = self.random.choice((1, 2, 4, 5, 10, 11, 12, 20, 21, 22, 23, 24, 25, 64, 68, 255))
        fields = [self.value() for _ in range(self.random.randint(0, 10))]
        return [msgpack.packb([op, *fields])]

    def right(self) -> list[Any]:
        name = self.random.choice(("storm", "other"))
        commands: list[list[Any]] = [
            [2, 1],
            [4, 1, "/default/storm", {"durability": "os"}, 0],
            [5, 1, "describe_topic", {"topic": "/default/storm"}],
            [10, 1, self.partition_id, name],
            [12, 1, self.partition_id, self.owner[0] + 1],
            [20, 1, self.random.randint(1, 3), 1, self.partition_id, name, "shared", "earliest"],
            [21, 1, self.random.choice((1, 10_000)), self.random.choice((1, 100))],
            [22, 1, [[1, [0, 5]]]],
            [23, [[1, [0, 5]]], 0, "no"],
            [24, 1, 1, "earliest"],
            [25, 1, 2],
        ]
        return self.random.choice(commands)

    def nearly(self) -> list[bytes]:
        command = self.right()
        if self.random.random() < 0.7:
            command[self.random.randrange(1, len(command))] = self.value()
        if self.random.random() < 0.2:
            command += [self.value()]
        return [msgpack.packb(command)]

    def cut(self) -> list[bytes]:
        data = bytearray(msgpack.packb(self.right()))
        if self.random.random() < 0.5:
            data[self.random.randrange(len(data))] = self.random.randrange(256)
        else:
            del data[self.random.randrange(len(data)) :]
        return [bytes(data)]

    def nested(self) -> list[bytes]:
        opener = self.random.choice(
            (b"\x91", b"\x81\xa1a", b"\xdd\0\0\0\1", b"\xdf\xff\xff\xff\xff")
        )
        return [b"\x94\x04\x01\xa1a" + opener * self.random.choice((3, 500, 20_000))]

    def acks(self) -> list[bytes]:
        length = self.random.choice((1, 2, 6, 6))
        bounds = [self.random.choice((*EXTREMES, *range(40))) for _ in range(length)]
        request = [1] if self.random.random() < 0.5 else []
        op = 22 if request else 23
        return [msgpack.packb([op, *request, [[self.random.randint(0, 3), bounds]]])]

    def frame(self) -> bytes:
        producer_id, epoch, sequence = self.owner
        messages = [
            (
                None if self.random.random() < 0.5 else self.random.randbytes(3),
                None if self.random.random() < 0.1 else b"v" * self.random.randint(0, 60),
            )
            for _ in range(self.random.randint(1, 12))
        ]
        sequence += self.random.choice((0, 0, 0, 1, -1)) if sequence else 0
        made: bytes = raw.pack_frame(messages, producer_id, epoch, sequence)
        if self.random.random() < 0.3:
            made = lz4_frame(made)
        choice = self.random.random()
        if choice < 0.4:
            size, code = self.random.choice(((1, "B"), (2, "H"), (4, "I"), (8, "Q")))
            spots = [*range(64), *range(128, len(made) - 8)]
            position = self.random.choice(spots) // size * size
            value = self.random.choice((0, 1, 2, 8, self.random.getrandbits(64), 2**64 - 1))
            made = resealed(made, raw.crc32c, (position, code, value % (1 << 8 * size)))
        elif choice < 0.5:
            damaged = bytearray(made)
            damaged[self.random.randrange(len(made))] ^= 1 << self.random.randrange(8)
            made = bytes(damaged)
        return made

    def bundle(self) -> list[bytes]:
        frames = [self.frame() for _ in range(self.random.randint(1, 3))]
        part = bytearray(raw.pack_bundle(self.partition_id, frames))
        choice = self.random.random()
        if choice < 0.1:
            struct.pack_into("<I", part, self.random.choice((0, 4, 8, 12)), 2**32 - 8)
        elif choice < 0.2:
            del part[self.random.randrange(len(part)) :]
        elif choice < 0.3:
            part += self.random.randbytes(8)
        parts = [bytes(part)] * self.random.choice((1, 1, 1, 1, 1, 1, 0, 2))
        return [msgpack.packb([11, self.random.randint(0, 9)]), *parts]
