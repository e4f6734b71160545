"""Other processes for the ring tests, bounded in time and never left behind."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PEER_SECONDS = 180.0
COMPILE_SECONDS = 300.0
LITMUS = ("message_writer", "message_reader", "store_buffer", "adder")
"""Roles with kernels of their own, which Numba compiles in their process."""


@functools.cache
def _litmus_environment() -> dict[str, str]:
    """Of a process that compiles; the first of them fills Numba's cache for the others."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DANUBE_KERNELS": "numba"}
    subprocess.run(
        [sys.executable, "-c", "import tests.ring.peer"],
        env=environment, timeout=COMPILE_SECONDS, check=True,
    )  # fmt: skip
    return environment


class Peer:
    """One running role of peer.py."""

    def __init__(self, role: str, arguments: list[object], fds: list[int]) -> None:
        self.role = role
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("peer.py")), role, *map(str, arguments)],
            pass_fds=fds,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_litmus_environment()
            if role in LITMUS
            else {**os.environ, "PYTHONPATH": str(ROOT)},
        )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def result(self) -> Any:
        """What the role printed; a failure carries what it said on stderr."""
        try:
            output, errors = self.process.communicate(timeout=PEER_SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.role} did not end within {PEER_SECONDS} s")
        if self.process.returncode:
            pytest.fail(f"{self.role} ended with {self.process.returncode}: {errors.decode()}")
        return json.loads(output)

    def end(self) -> None:
        if self.running:
            self.process.kill()
        self.process.communicate()


class Peers:
    """Starts roles and closes what the test opened."""

    def __init__(self) -> None:
        self.started: list[Peer] = []
        self.fds: list[int] = []
        self.deadline = time.monotonic() + PEER_SECONDS

    def own(self, fd: int) -> int:
        self.fds.append(fd)
        return fd

    def start(self, role: str, *arguments: object) -> Peer:
        """Run a role with the test's descriptors inherited."""
        peer = Peer(role, list(arguments), self.fds)
        self.started.append(peer)
        return peer

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            pytest.fail(f"not done within {PEER_SECONDS} s")


@pytest.fixture
def peers() -> Iterator[Peers]:
    held = Peers()
    yield held
    for peer in held.started:
        peer.end()
    for fd in held.fds:
        os.close(fd)
