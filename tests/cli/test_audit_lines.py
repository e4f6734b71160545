"""The text of `security audit`: what was asked for, in short, and how many records are shown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from danube_fast.cli.options import OutputForm
from danube_fast.cli.security import audit
from tests.cli.conftest import Run
from tests.cli.fakes import FakeBroker

CHANGE: dict[str, Any] = {
    "time": "2026-01-02T03:04:05.006Z", "principal": "ann", "action": "set_binding", "resource": "cluster",
    "request": "1.2", "process": "coordinator",
}  # fmt: skip
ARGUMENTS = {
    "binding": "b", "subject": "user:pia", "role": "admin", "scope": "x" * 500, "not_shown": ["label"],
}  # fmt: skip


def test_a_line_says_what_was_asked_for(run: Run, fake: FakeBroker) -> None:
    fake.answers["list_audit"] = [
        {**CHANGE, "event": "begin", "arguments": ARGUMENTS},
        {**CHANGE, "event": "end", "outcome": "ok"},
        {**CHANGE, "event": "note", "action": "create_topic", "resource": "/a/x", "outcome": "ok",
         "arguments": {"topic": "/a/x"}},
        {**CHANGE, "event": "closed", "action": "producer", "resource": "/a/x", "count": 2},
    ]  # fmt: skip
    _, line, topic, gone = run("security", "audit").out.splitlines()
    assert "2026-01-02 03:04:05.006Z" in line
    assert "set_binding cluster (binding=b, subject=user:pia, role=admin, scope=xxx" in line
    assert "label" not in line and len(line) < 300
    assert "producer /a/x  " in gone and gone.endswith("  closed, 2 times")
    assert topic.endswith("ok") and "(" not in topic, "what the resource says is not said twice"


def test_what_is_shown_first_is_bounded(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    def pages() -> Iterator[audit._Page]:
        for number, is_last in ((1, False), (2, False), (3, True), (4, True), (5, False)):
            yield audit._Page([{**CHANGE, "event": "note", "action": f"do{number}"}], is_last)

    audit._follow(OutputForm.TEXT, pages(), 1)
    lines = capfdbinary.readouterr().out.decode().splitlines()
    assert [line.split()[4] for line in lines] == ["do3", "do4", "do5"], lines
