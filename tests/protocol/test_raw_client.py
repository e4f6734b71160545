"""docs/protocol.md is enough: a client made from it alone talks to a real broker."""

from __future__ import annotations

import ast
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.protocol.raw import EXAMPLE, endpoint, example, resealed, run_example
from tests.workers.broker import Broker, Client

LINES_MAX = 250
MODULES = {"zmq", "struct", "msgpack", "sys"}
MESSAGES = [(b"k", b"one"), (None, None), (b"", b""), (None, b"four" * 40)]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("raw") / "data", fake="", workers=1) as started:
        started.wait_ready()
        yield started


def test_it_is_short_and_imports_nothing_of_the_product() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= LINES_MAX
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add("." * node.level + (node.module or ""))
    assert imported <= MODULES
    assert not re.search(r"__import__|importlib|\bexec\b|\beval\b", text)


def test_the_block_blocks(tmp_path: Path) -> None:
    script = tmp_path / "cheat.py"
    script.write_text("import danube_fast.frame.crc\n")
    result = run_example(script=script)
    assert result.returncode == 1
    assert "ModuleNotFoundError" in result.stderr


def test_its_whole_journey(broker: Broker) -> None:
    for start, count in ((0, 100), (100, 41), (141, 1)):
        result = run_example(endpoint(broker.ready), "/default/raw-client", str(count))
        assert result.returncode == 0, result.stdout + result.stderr + broker.error_text()
        frames = (count + 7) // 8
        last = start + 8 * (frames - 1)
        assert result.stdout.splitlines()[1:] == [
            f"published {count} messages in {frames} frames from offset {start} on",
            f"sent one frame again: DUPLICATE of offset {last}",
            f"received {count} messages, both checksums right; acknowledged below {start + count}",
            f"ok: {count} messages came back as they were sent",
        ]
    with Client(broker) as client:
        (found,) = client.admin("list_subscriptions", topic="/default/raw-client")
    assert found["cursors"] == {"/default/raw-client": 142}
    assert found["lag_messages"] == 0


def test_it_says_what_is_wrong(broker: Broker) -> None:
    result = run_example(endpoint(broker.ready), "no topic name")
    assert result.returncode == 1
    assert "write /namespace/topic" in result.stderr


def test_its_crc_is_the_castagnoli_one() -> None:
    raw = example()
    assert raw.crc32c(b"123456789") == 0xE3069283
    assert raw.crc32c(b"1234", b"", b"56789") == 0xE3069283


def test_its_checks_find_every_changed_byte() -> None:
    raw = example()
    frame = bytearray(resealed(raw.pack_frame(MESSAGES, 1, 1, 0), raw.crc32c))
    struct.pack_into("<Q", frame, 80, 1000)
    struct.pack_into("<I", frame, 124, raw.crc32c(frame[:124]))
    expected = [(1000 + i, *message) for i, message in enumerate(MESSAGES)]
    assert raw.unpack_frame(bytes(frame)) == expected
    for position in range(len(frame)):
        frame[position] ^= 0x10
        with pytest.raises(SystemExit):
            raw.unpack_frame(bytes(frame))
        frame[position] ^= 0x10
