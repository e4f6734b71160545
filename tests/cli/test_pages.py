"""What the pages say is tried: the examples run, links lead somewhere, and nothing differs from the code."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from danube_fast import errors
from danube_fast.net import protocol
from tests.workers.broker import Broker

ROOT = Path(__file__).resolve().parents[2]
README, GUIDE = (ROOT / name for name in ("README.md", "docs/guide.md"))
ADDRESS = "danube://127.0.0.1:6650"


def block(page: Path, language: str, first: str) -> str:
    """The code block of a page that begins with that line."""
    for text in re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL):
        if text.startswith(first):
            return str(text)
    raise AssertionError(f"{page.name} has no {language} block that begins with {first!r}")


def run(*command: str, url: str) -> str:
    """Run a command, which must succeed; what it printed."""
    done = subprocess.run(
        command, env={**os.environ, "DANUBE_URL": url}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_examples_of_the_pages(tmp_path: Path) -> None:
    """As they stand there, in order; only the address is another."""

    def shell(page: Path, first: str) -> list[str]:
        return [
            run(sys.executable, "-m", "danube_fast.cli.main", *shlex.split(line)[1:], url=url)
            for line in block(page, "sh", first).splitlines()
        ]

    with Broker(tmp_path / "data", fake="") as broker:
        url = str(broker.wait_ready()["url"])
        example = block(README, "python", "import danube_fast")
        assert len(example.splitlines()) <= 20 and ADDRESS in example
        told = example.replace(ADDRESS, url) + "print(message.payload, message.offset)\n"
        assert run(sys.executable, "-c", told, url=url) == "b'UA 1545' 0\n"
        produced, consumed, helped = shell(README, "danube-fast produce")
        assert "UA 1714" in consumed or "AA 1141" in consumed, "the first was acked by the example"
        assert "consume" in helped and produced is not None
        example = block(GUIDE, "python", "import danube_fast").replace(ADDRESS, url)
        assert run(sys.executable, "-c", example, url=url) == "b'gate B12'\n"
        listed, latest, described, connected, changed, status = shell(GUIDE, "danube-fast topics")
        assert "/default/flights" in listed
        assert 1 <= len(latest.splitlines()) <= 3 and "billing" in described
        assert "coordinator" in connected, "the connection that asks is one"
        assert "os" in changed and "worker" in status


def test_the_pages_are_true_and_tidy() -> None:
    """Links, widths, names; api.md and the tables of tuning.md say what the code says."""
    command = [sys.executable, ROOT / "docs/check_pages.py", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_page_that_differs_from_the_code_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    pages = importlib.import_module("check_pages")
    assert not list(pages.drifted())
    for page in list(pages.MADE):
        text = page.read_text()
        changed = text.replace("Publishes to one topic.", "Publishes.").replace(
            "| 4 MiB |", "| 5 MiB |"
        )
        assert changed != text
        assert pages.wrapped(pages.MADE[page](changed)) == text, "and is mended"


def test_prose_is_wrapped_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    wrapping = importlib.import_module("wrapping")
    long = "word " * 40 + "- end"
    page = f"# {long}\n\n{long}\n\n- {long}\n  {long}\n\n```\n{long}\n```\n| {long} |\n    {long}\n"
    done = wrapping.wrapped(page)
    assert done.split() == page.split()
    assert wrapping.wrapped(done) == done
    for kept in (f"# {long}\n", f"```\n{long}\n```\n| {long} |\n    {long}\n"):
        assert kept in done
    assert len([line for line in done.splitlines() if line.startswith("- ")]) == 1
    assert len(list(wrapping.too_wide(done))) == 3, "heading and code, which nobody can wrap"


def test_the_page_of_the_protocol_has_every_command_field_and_code() -> None:
    text = (ROOT / "docs/protocol.md").read_text()
    said = {
        int(op): (name, fields)
        for op, name, fields in re.findall(
            r"^\| (\d+) \| ([A-Z_]+) \| ([^|]*) \|", text, re.MULTILINE
        )
    }
    kinds = [kind for kind in vars(protocol).values() if isinstance(kind, type)]
    kinds.remove(protocol.OpenProducerUnnamed)  # OPEN_PRODUCER as it was before its last field
    commands = [
        kind for kind in kinds if issubclass(kind, msgspec.Struct) and kind.__name__[0] != "_"
    ]
    for kind in commands:
        name, fields = said.pop(kind.__struct_config__.tag)
        assert name.replace("_", "") == kind.__name__.upper()
        places = [fields.find(field.name) for field in msgspec.structs.fields(kind)]
        assert -1 not in places and places == sorted(places), (name, fields)
    assert not said and len(commands) > 20
    section = (
        text.partition("## 4 Publishing")[2].partition("## 5 ")[0]
        + text.partition("## 8 Errors")[2]
    )
    codes = {int(status) for status in protocol.Status} | set(errors._BY_CODE)
    assert [
        code for code in sorted(codes - {0, 1, 2}) if not re.search(rf"\b{code}\b", section)
    ] == []
