"""Commands run in this process, against a fake broker."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import danube_fast
from danube_fast.cli import broker as seam
from danube_fast.cli import consume, doctor, produce
from danube_fast.cli.failures import wants_json
from danube_fast.cli.main import main
from danube_fast.errors import NotFound
from tests.cli.fakes import FakeBroker


class Outcome(NamedTuple):
    code: int
    out: str
    err: str
    words: tuple[str, ...] = ()

    def json(self) -> Any:
        return json.loads(self.out)

    def sentence(self) -> str:
        """What stands on stderr: exactly one line of ours, no traceback."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        if self.code and wants_json(self.words):
            error = json.loads(lines[0])["error"]
            return f"danube-fast: {error['message']}; {error['remedy']}"
        assert lines[0].startswith("danube-fast: "), self.err
        return lines[0]


Run = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / "no-config"))
    for name in list(os.environ):
        if name.startswith("DANUBE_") and name != "DANUBE_TEST_RUN":
            monkeypatch.delenv(name)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeBroker:
    broker = FakeBroker()
    for module in (seam, produce, consume, doctor):
        monkeypatch.setattr(module, "connect", broker.connect)
    return broker


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `danube_fast.connect` is called with; no broker is there."""
    calls: list[dict[str, Any]] = []

    def connect(url: str, **options: Any) -> Any:
        calls.append({"url": url, **options})
        raise NotFound("no broker; this is a test")

    monkeypatch.setattr(danube_fast, "connect", connect)
    monkeypatch.setattr(seam, "_try_all", lambda url, has_key: None)
    return calls


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def run_it(*arguments: str) -> Outcome:
        capfd.readouterr()
        code = main(arguments)
        out, err = capfd.readouterr()
        return Outcome(code, out, err, arguments)

    return run_it
