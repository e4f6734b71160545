"""What a process says while kernels are compiled: one line, and at a terminal one bar."""

from __future__ import annotations

import io
import sys

import pytest

from danube_fast.frame.image import COMPILING_TEXT, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["pipe", "terminal"])
def test_one_line_and_one_bar(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress()
    for line in ("0/4 a", "2/4 b", "no progress", "4/4 done"):
        progress.show(line)
    progress.end()
    said = stream.getvalue()
    assert said.startswith(f"danube-fast: {COMPILING_TEXT}\n")
    assert said.count("\n") == 1
    assert ("[####################....................] 2/4" in said) == stream.isatty()
    assert said.endswith("\r\033[K") == stream.isatty()


def test_a_broker_says_it_in_its_log() -> None:
    lines: list[str] = []
    Progress(lines.append).end()
    assert lines == [COMPILING_TEXT]
