"""Processes of these tests: killed at the end, listened to within bounds."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.workers.broker import ROOT

__all__ = ["Held", "Script", "child", "heard", "held", "ring_maps", "script"]


@contextlib.contextmanager
def child(*command: str, through: Sequence[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process (`-m module ...` or `-c code ...`), started by the program `through`."""
    with subprocess.Popen(
        [*through, sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def heard(process: subprocess.Popen[bytes], byte_count: int, seconds: float = 60) -> bytes:
    """At least so many bytes of what a child says."""
    assert process.stdout is not None
    fd, said = process.stdout.fileno(), b""
    deadline = time.monotonic() + seconds
    while len(said) < byte_count:
        left = deadline - time.monotonic()
        assert left > 0 and select.select([fd], [], [], left)[0], f"only {said!r} in {seconds} s"
        some = os.read(fd, 65536)
        assert some, f"the child ended with {process.wait(seconds)}"
        said += some
    return said


class Held(NamedTuple):
    """What a worker keeps for its clients."""

    maps: int
    """Memories of rings."""
    descriptors: int
    """Whatever is open and no file, as logs come and go."""


def held(pid: int) -> Held:
    """Of the worker with that pid."""
    descriptors = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            descriptors += not os.readlink(entry).startswith("/")
    return Held(len(ring_maps(pid)), descriptors)


def ring_maps(pid: int | str, name: str = "/memfd:danube-rings") -> list[dict[str, str]]:
    """What the kernel says of each such map of a process (`smaps`)."""
    found: list[dict[str, str]] = []
    is_one = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        key, _, value = line.partition(":")
        if " " in key:  # the map's first line
            is_one = name in line
            found += [{}] * is_one
        elif is_one:
            found[-1] = {**found[-1], key: value.strip()}
    return found


class Script:
    """A Python process that says words, one a line, and is told some."""

    def __init__(self, process: subprocess.Popen[bytes], errors: Path) -> None:
        self.process = process
        self._errors = errors
        self._said = b""

    def hear(self, word: str, seconds: float = 60) -> None:
        """Wait for the next line, which must be `word`."""
        line = self.hear_any(seconds, repr(word))
        assert line == word, f"{line!r} instead of {word!r}: {self.error_text()}"

    def hear_any(self, seconds: float = 60, wanted: str = "line") -> str:
        """Wait for the next line."""
        assert self.process.stdout is not None
        fd, deadline = self.process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self._said:
            left = deadline - time.monotonic()
            readable = left > 0 and select.select([fd], [], [], left)[0]
            assert readable, f"no {wanted} in {seconds} s, only {self._said!r}: {self.error_text()}"
            some = os.read(fd, 65536)
            assert some, f"no {wanted}, but its end: {self.error_text()}"
            self._said += some
        line, _, self._said = self._said.partition(b"\n")
        return line.decode()

    def tell(self, word: str) -> None:
        """Say a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(word.encode() + b"\n")
        self.process.stdin.flush()

    def error_text(self) -> str:
        """All that stands on its stderr."""
        return self._errors.read_text()

    def ends_quietly(self, seconds: float = 60) -> None:
        """Wait for its end by itself: exit code 0, and not a word on stderr."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {seconds} s: {self.error_text()}") from None
        said = self.error_text()
        assert (code, said) == (0, ""), f"exit code {code}; on stderr: {said}"


@contextlib.contextmanager
def script(code: str, *arguments: str) -> Iterator[Script]:
    """A process that runs that code."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Path(folder, "errors").open("wb") as errors,
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", code, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        ) as process,
    ):  # fmt: skip
        try:
            yield Script(process, Path(folder, "errors"))
        finally:
            process.kill()
