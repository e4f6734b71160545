"""Any file of a broker's data directory harmed: all of it is served exactly, or a refusal names it.

The directory is made by a real broker, which is stopped or killed. Most cases open it as the broker's
processes do, without them; some start a real broker on it.
"""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from danube_fast.errors import DataLoss, FailedPrecondition
from tests.crash.rig import Server
from tests.damage.store import Harm, cases, content, copy_of, fill, read_all

ENDS = ("kill", "stop")
LONG = "DANUBE_DAMAGE_CASES" in os.environ or "DANUBE_DAMAGE_CASE" in os.environ


class Filled(NamedTuple):
    """One broker's directory, and all that is in it."""

    directory: Path
    content: dict[str, Any]
    served: dict[str, Any]


@pytest.fixture(scope="module", params=ENDS)
def filled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Filled:
    root = tmp_path_factory.mktemp(request.param)
    fill(root / "data", end=request.param)
    found = content(copy_of(root / "data", root / "copy"))
    with Server(copy_of(root / "data", root / "copy")) as server:
        served = read_all(server)
    return Filled(root / "data", found, served)


def names(text: str, harm: Harm, directory: Path) -> bool:
    """Whether a refusal says which file, or which folder it is missing from."""
    path = directory / harm.path
    return str(path) in text or str(path.parent) in text or "metadata" in text


def test_harm_anywhere_is_told_or_harmless(filled: Filled, tmp_path: Path) -> None:
    refused = 0
    for case in cases(60):
        copy = copy_of(filled.directory, tmp_path / "copy")
        harm = Harm.draw(filled.directory, case)
        about = harm.about(case, "tests/damage/test_data_directory.py -k anywhere")
        harm.do(copy)
        try:
            found = content(copy)
        except (DataLoss, FailedPrecondition) as fault:
            refused += 1
            if not names(str(fault), harm, copy):
                pytest.fail(f"{about}: the text names something else: {fault}")
            continue
        except Exception as fault:
            pytest.fail(f"{about}: {type(fault).__name__}: {fault}")
        for part, expected in filled.content.items():
            assert found[part] == expected, f"{about}: {part} is different without a word"
    assert refused or len(cases(60)) < 60, "nothing was harmed"


def refusal(copy: Path) -> tuple[Server, str | None]:
    """A broker on `copy`, ready; or what the one said that did not start."""
    server = Server(copy)
    try:
        server.start()
    except AssertionError:
        broker = server.broker
        assert broker is not None
        with broker:
            code = broker.process.wait(60)
            text = broker.error_text()
        assert code == 1, f"the broker ended with {code}: {text}"
        assert "Traceback" not in text, text
        return server, text
    return server, None


def test_a_real_broker_serves_exactly_or_refuses(filled: Filled, tmp_path: Path) -> None:
    if filled.directory.parent.name.startswith("stop") and not LONG:
        return  # a start takes seconds; the kill is the harder one
    for case in cases(3):
        copy = copy_of(filled.directory, tmp_path / "copy")
        harm = Harm.draw(filled.directory, 1000 + case)
        about = harm.about(case, "tests/damage/test_data_directory.py -k real")
        harm.do(copy)
        server, text = refusal(copy)
        if text is not None:
            assert names(text, harm, copy), f"{about}: the text names something else: {text}"
            continue
        with ExitStack() as stack:
            stack.callback(server.__exit__)
            try:
                served = read_all(server)
            except DataLoss as fault:
                if not names(str(fault), harm, copy):
                    pytest.fail(f"{about}: the text names something else: {fault}")
                continue
            assert served == filled.served, f"{about}: less or other than before is served"
            assert server.broker is not None
            assert "Traceback" not in server.broker.error_text(), about


def test_what_is_gone_is_no_reason_to_begin_anew(filled: Filled, tmp_path: Path) -> None:
    """What refused leaves nothing behind that the next start takes for good."""
    if filled.directory.parent.name.startswith("stop") and not LONG:
        return
    for what, text in (
        ("metadata", "missing or empty"),
        ("logs/0000", "log 0"),
        ("logs/0001", "log 1"),
    ):
        copy = copy_of(filled.directory, tmp_path / "copy")
        shutil.rmtree(copy / what)
        for _ in range(2):
            _, said = refusal(copy)
            assert said is not None, f"a broker without {what} started"
            assert text in said and "backup" in said, said
