"""The example client's own packing and checks, and a peer that says whatever it is told to.

Nothing here comes from the product: bytes are made by docs/examples/raw_client.py and msgpack.
"""

from __future__ import annotations

import runpy
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import zmq

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "raw_client.py"
ANSWER_MS = 60_000

_ALONE = """
import runpy, sys
sys.modules["danube_fast"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def example() -> Any:
    """The names of the example, as attributes."""
    return type("Example", (), {k: staticmethod(v) if callable(v) else v
                                for k, v in runpy.run_path(str(EXAMPLE)).items()})  # fmt: skip


def run_example(*arguments: str, script: Path = EXAMPLE) -> subprocess.CompletedProcess[str]:
    """The example in a process that cannot import the product."""
    return subprocess.run(
        [sys.executable, "-c", _ALONE, str(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def endpoint(ready: dict[str, Any]) -> str:
    """tcp endpoint of a ready line."""
    return "tcp://127.0.0.1:" + ready["url"].rpartition(":")[2]


class Peer:
    """A DEALER that sends any parts; answers are unpacked."""

    def __init__(self, context: zmq.Context[Any], address: str, hello: bool = True) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(address)
        self.deliveries = 0
        if hello:
            assert self.ask(1, 1, 1, "peer")[0] == 64

    def send(self, *fields: Any, parts: tuple[bytes, ...] = ()) -> None:
        self.socket.send_multipart([msgpack.packb(list(fields)), *parts])

    def receive(self, wait_ms: int = ANSWER_MS) -> list[Any] | None:
        """The next message's command, its bundle parts behind it; None if nothing comes."""
        if not self.socket.poll(wait_ms):
            return None
        command, *parts = self.socket.recv_multipart()
        fields = msgpack.unpackb(command, strict_map_key=False)
        self.deliveries += fields[0] == 69
        return [*fields, *parts]

    def wait_deliveries(self, count: int) -> None:
        """Until so many DELIVER have come since the beginning."""
        while self.deliveries < count:
            assert self.receive() is not None, f"{self.deliveries} of {count} deliveries came"

    def ask(self, *fields: Any, parts: tuple[bytes, ...] = ()) -> list[Any]:
        """Send a command; the next message that is no delivery."""
        self.send(*fields, parts=parts)
        return self.answer()

    def answer(self) -> list[Any]:
        """The next message that is no delivery, no name and no PONG to request 0."""
        while True:
            found = self.receive()
            assert found is not None, "the broker did not answer in time"
            if found[0] not in (69, 71) and found[:2] != [65, 0]:
                return found

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def resealed(frame: bytes, crc32c: Any, *changes: tuple[int, str, int]) -> bytes:
    """The frame with (position, struct code, value) written into it and a right body_crc32c."""
    changed = bytearray(frame)
    for position, code, value in changes:
        struct.pack_into("<" + code, changed, position, value)
    struct.pack_into("<I", changed, 20, crc32c(changed[:20], changed[24:64], changed[128:]))
    return bytes(changed)
