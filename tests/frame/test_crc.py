"""crc32c and the key hash: known answers, other implementations, the fallback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import google_crc32c
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from danube_fast.frame.crc import _table_extend, crc32c, crc32c_extend
from danube_fast.frame.hash import key_hash
from danube_fast.frame.kernel import address_of

ROOT = Path(__file__).parents[2]


def test_known_answers() -> None:
    assert crc32c(b"") == 0
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43


@given(st.binary(max_size=3000), st.binary(min_size=1, max_size=300))
def test_agrees_with_the_package_and_can_be_continued(first: bytes, second: bytes) -> None:
    whole = google_crc32c.value(first + second)
    assert crc32c(first + second) == whole
    assert crc32c(second, crc32c(first)) == whole
    assert crc32c(memoryview(bytearray(first + second))) == whole


@given(st.binary(min_size=1, max_size=300), st.integers(0, 0xFFFFFFFF))
def test_the_table_gives_the_same(data: bytes, crc: int) -> None:
    address = address_of(data)
    assert _table_extend(crc, address, len(data)) == crc32c_extend(crc, address, len(data))


def test_the_fallback_works_behind_kernels_cached_with_the_library() -> None:
    code = "from danube_fast.frame import crc\nprint(crc._entry is not None, hex(crc.crc32c(b'123456789')))"
    for plain, expected in (("", "True 0xe3069283"), ("1", "False 0xe3069283")):
        result = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(ROOT), "DANUBE_PLAIN_CRC": plain},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert result.stdout.strip() == expected, result.stderr


@given(st.binary(max_size=200))
def test_key_hash_is_xxh64(key: bytes) -> None:
    assert key_hash(key) == xxhash.xxh64_intdigest(key, 0)


def test_key_hash_known_answers() -> None:
    assert key_hash(b"") == 0xEF46DB3751D8E999
    assert key_hash(b"a") == 0xD24EC4F1A98C6E5B
