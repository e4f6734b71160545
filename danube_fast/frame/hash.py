"""xxh64 with seed 0, as a kernel: the hash that places a key.

A partitioned topic sends a key to partition `key_hash % partitions`, and a key_shared subscription
divides the hashes among its consumers, so the value is part of the protocol: it is xxHash's XXH64,
seed 0, as the `xxhash` package computes it (which the plain fallback and the tests use).

Kernels compute in int64: multiplication wraps, and a right shift is masked because it would drag
the sign along.
"""

from __future__ import annotations

from typing import Any

from danube_fast.frame.kernel import address_of, direct, kernel
from danube_fast.frame.memory import load_i64, load_u8, load_u32

__all__ = ["key_hash", "xxh64"]


def _signed(value: int) -> int:
    """The int64 with the bits of a u64."""
    return value - (1 << 64) if value >> 63 else value


_PRIME_1 = _signed(0x9E37_79B1_85EB_CA87)
_PRIME_2 = _signed(0xC2B2_AE3D_27D4_EB4F)
_PRIME_3 = _signed(0x1656_67B1_9E37_79F9)
_PRIME_4 = _signed(0x85EB_CA77_C2B2_AE63)
_PRIME_5 = _signed(0x27D4_EB2F_1656_67C5)
_LANE_1 = _signed((_PRIME_1 + _PRIME_2) & 0xFFFF_FFFF_FFFF_FFFF)
_LANE_4 = _signed(-_PRIME_1 & 0xFFFF_FFFF_FFFF_FFFF)
_STRIPE_BYTES = 32


@kernel("int64(int64,int64)")
def _rotate(value: int, bits: int) -> int:
    """Rotate left by 1 to 63 bits."""
    return (value << bits) | ((value >> (64 - bits)) & ((1 << bits) - 1))


@kernel("int64(int64,int64)")
def _round(lane: int, word: int) -> int:
    """Mix one word into a lane."""
    return _rotate(lane + word * _PRIME_2, 31) * _PRIME_1


@kernel("int64(int64,int64)")
def _merge(value: int, lane: int) -> int:
    """Mix a lane into the result."""
    return (value ^ _round(0, lane)) * _PRIME_1 + _PRIME_4


@kernel("int64(int64,int64)")
def _stripes(address: int, stripe_count: int) -> int:
    """The four lanes over all whole stripes, merged."""
    lane_1, lane_2, lane_3, lane_4 = _LANE_1, _PRIME_2, 0, _LANE_4
    for _ in range(stripe_count):
        lane_1 = _round(lane_1, load_i64(address))
        lane_2 = _round(lane_2, load_i64(address + 8))
        lane_3 = _round(lane_3, load_i64(address + 16))
        lane_4 = _round(lane_4, load_i64(address + 24))
        address += _STRIPE_BYTES
    value = _rotate(lane_1, 1) + _rotate(lane_2, 7) + _rotate(lane_3, 12) + _rotate(lane_4, 18)
    return _merge(_merge(_merge(_merge(value, lane_1), lane_2), lane_3), lane_4)


@kernel("int64(int64)")
def _avalanche(value: int) -> int:
    """Spread the last bits."""
    value = (value ^ ((value >> 33) & 0x7FFF_FFFF)) * _PRIME_2
    value = (value ^ ((value >> 29) & 0x7_FFFF_FFFF)) * _PRIME_3
    return value ^ ((value >> 32) & 0xFFFF_FFFF)


@kernel("int64(int64,int64)")
def xxh64(address: int, byte_count: int) -> int:
    """XXH64 with seed 0 of `byte_count` bytes at `address`: the u64's bits as int64."""
    stripe_count = byte_count // _STRIPE_BYTES
    value = _stripes(address, stripe_count) if stripe_count else _PRIME_5
    value += byte_count
    place = address + _STRIPE_BYTES * stripe_count
    end = address + byte_count
    while end - place >= 8:
        value = _rotate(value ^ _round(0, load_i64(place)), 27) * _PRIME_1 + _PRIME_4
        place += 8
    if end - place >= 4:
        value = _rotate(value ^ (load_u32(place) * _PRIME_1), 23) * _PRIME_2 + _PRIME_3
        place += 4
    while place < end:
        value = _rotate(value ^ (load_u8(place) * _PRIME_5), 11) * _PRIME_1
        place += 1
    return _avalanche(value)


_xxh64 = direct(xxh64)


def key_hash(key: Any) -> int:
    """The hash of a key (bytes-like): XXH64 with seed 0, from 0 to 2**64 - 1."""
    view = memoryview(key)
    value: int = _xxh64(address_of(view), view.nbytes) if view.nbytes else _xxh64(0, 0)
    return value & 0xFFFF_FFFF_FFFF_FFFF
