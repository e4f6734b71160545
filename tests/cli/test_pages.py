"""What README.md and tuning.md say is tried: the examples run, the settings have these defaults."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from danube_fast.config import Settings
from tests.workers.broker import Broker

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
ADDRESS = "danube://127.0.0.1:6650"


def block(language: str, first: str) -> str:
    """The code block of README that begins with that line."""
    for text in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL):
        if text.startswith(first):
            return str(text)
    raise AssertionError(f"README has no {language} block that begins with {first!r}")


def run(*command: str, url: str) -> str:
    """Run a command, which must succeed; what it printed."""
    done = subprocess.run(
        command, env={**os.environ, "DANUBE_URL": url}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_examples_of_the_readme(tmp_path: Path) -> None:
    """As they stand there, in order; only the address is another."""
    with Broker(tmp_path / "data", fake="") as broker:
        url = str(broker.wait_ready()["url"])
        example = block("python", "import danube_fast")
        assert len(example.splitlines()) <= 20 and ADDRESS in example
        told = example.replace(ADDRESS, url) + "print(message.payload, message.offset)\n"
        assert run(sys.executable, "-c", told, url=url) == "b'UA 1545' 0\n"
        lines = block("sh", "danube-fast produce").splitlines()
        outputs = [
            run(sys.executable, "-m", "danube_fast.cli.main", *shlex.split(line)[1:], url=url)
            for line in lines
        ]
    produced, consumed, listed, latest, described, connected, helped = outputs
    assert "coordinator" in connected, "the connection that asks is one"
    assert "UA 1714" in consumed or "AA 1141" in consumed, "the first was acked by the example"
    assert "/default/flights" in listed
    assert "consume" in helped and produced is not None
    assert 1 <= len(latest.splitlines()) <= 3 and "billing" in described


def test_every_setting_and_its_default_is_in_the_guide() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", (ROOT / "tuning.md").read_text(), re.MULTILINE)
    said = {name: value for name, value in rows if name in Settings.__struct_fields__}
    settings = Settings()
    true = {name: getattr(settings, name) for name in Settings.__struct_fields__}
    texts = {
        name: str(value).lower() if isinstance(value, bool) else str(value) or "empty"
        for name, value in true.items()
    }
    assert said == texts
