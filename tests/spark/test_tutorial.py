"""The tutorial, block by block: each says what stands below it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from danube_fast.demo import dataset
from danube_fast.testing.broker import Broker

PAGE = Path(__file__).resolve().parents[2] / "docs/spark-tutorial.md"
BLOCK = re.compile(r"```(sh|python|text)\n(.*?)```", re.DOTALL)
SETTING_UP = "danube-fast serve"
"""A block with this is what the test does itself."""
BLOCK_SECONDS = 300


def _said(language: str, text: str, folder: Path, url: str) -> str:
    """Run one block; what it printed."""
    command = [sys.executable, "-c", text] if language == "python" else ["sh", "-ec", text]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=BLOCK_SECONDS, check=False,
        env={**os.environ, "DANUBE_URL": url, "PATH": path, "PYTHONPATH": str(PAGE.parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, f"{text}\n{done.stderr}"
    return done.stdout


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()]


def test_every_block_of_the_tutorial(tmp_path: Path) -> None:
    assert dataset.find().is_file()
    blocks = BLOCK.findall(PAGE.read_text())
    assert len(blocks) >= 8
    printed = ""
    with Broker(workers=2, store=f"file://{tmp_path / 'history'}") as broker:
        for language, text in blocks:
            if language == "text":
                assert _words(printed) == _words(text)
            elif SETTING_UP not in text:
                printed = _said(language, text, tmp_path, broker.url)
    assert (tmp_path / "delays.png").read_bytes().startswith(b"\x89PNG")
