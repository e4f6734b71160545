"""Interpreters that are refused in one sentence: subinterpreters, and builds without a GIL."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

import pytest

import danube_fast
from danube_fast.cli.host import _python
from danube_fast.cli.main import main
from danube_fast.interpreter import check_interpreter, is_subinterpreter

SECONDS = 120
"""Longest wait for a child, which perhaps compiles kernels."""
NOWHERE = "danube://127.0.0.1:1"

INSIDE = """
import sys
import danube_fast
from danube_fast.cli.main import main

def tell(call):
    try:
        call()
    except danube_fast.FailedPrecondition as error:
        print(f"refused: {error}", flush=True)
    except BaseException as error:
        print(f"{error!r}", flush=True)

def connect_async():
    danube_fast.connect_async("danube://127.0.0.1:1", timeout=0.1).__await__().send(None)

def load_kernels():
    import danube_fast.frame.kernel

tell(lambda: danube_fast.connect("danube://127.0.0.1:1", timeout=0.1))
tell(connect_async)
tell(load_kernels)
sys.stderr = sys.stdout
# that setting is refused, too, but later: a broker never starts here
print(main(["serve", "--workers", "0"]), flush=True)
"""

# decimal, which the command line loads, says of itself when it is loaded in a subinterpreter first
AROUND = """
import decimal, importlib, sys, danube_fast

if sys.argv[1] == "with kernels":
    import danube_fast.client.client
try:
    interpreters = importlib.import_module("_interpreters")
except ImportError:
    interpreters = importlib.import_module("_xxsubinterpreters")
interpreter = interpreters.create()
failure = interpreters.run_string(interpreter, sys.argv[2])
if failure is not None:
    print(failure)
interpreters.destroy(interpreter)
try:
    danube_fast.connect("danube://127.0.0.1:1", timeout=0.1)
except danube_fast.Unavailable:
    print("the main one goes on")
"""


@pytest.mark.parametrize("before", ["with kernels", "without"])
def test_a_subinterpreter_is_refused_before_anything_is_loaded(before: str) -> None:
    """Neither a warning of NumPy nor a crash comes first, whatever the main interpreter has loaded."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-X", "faulthandler", "-c", AROUND, before, INSIDE],
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    *told, serve, code, last = ended.stdout.splitlines()
    for line in told:
        assert line.startswith("refused: ") and "subinterpreter" in line and "processes" in line
    assert len(told) == 3
    assert serve.startswith("danube-fast: ") and "subinterpreter" in serve
    assert (code, last) == ("4", "the main one goes on")


def test_the_main_interpreter_is_none() -> None:
    assert not is_subinterpreter()
    check_interpreter()


@pytest.fixture
def free_threaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """This build says that it has no GIL."""
    original = sysconfig.get_config_var
    monkeypatch.setattr(
        sysconfig, "get_config_var", lambda name: name == "Py_GIL_DISABLED" or original(name)
    )


@pytest.mark.usefixtures("free_threaded")
@pytest.mark.parametrize(
    "connect",
    [
        lambda: danube_fast.connect(NOWHERE, timeout=0.1),
        lambda: asyncio.run(_open_async()),
    ],
    ids=["connect", "connect_async"],
)
def test_a_free_threaded_build_is_refused(connect: Callable[[], Any]) -> None:
    with pytest.raises(danube_fast.FailedPrecondition, match=r"free-threaded.*use the ordinary"):
        connect()


async def _open_async() -> None:
    await danube_fast.connect_async(NOWHERE, timeout=0.1)


@pytest.mark.usefixtures("free_threaded")
def test_a_free_threaded_build_gets_no_broker(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor a traceback. The setting is refused, too, but later: a broker never starts here."""
    assert main(["serve", "--workers", "0"]) == 4
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith("danube-fast: ") and "free-threaded" in said.err


@pytest.mark.usefixtures("free_threaded")
def test_the_doctor_finds_a_free_threaded_build() -> None:
    finding = _python()
    assert finding.verdict.value == "failure" and "free-threaded" in finding.seen


def test_kernels_are_not_loaded_in_a_free_threaded_build() -> None:
    """Whatever loads them: here a worker's part that no client has opened."""
    code = (
        "import sysconfig\n"
        "sysconfig.get_config_var = lambda name: 1\n"
        "import danube_fast\n"
        "try:\n"
        "    import danube_fast.ring.duplex_kernel\n"
        "except danube_fast.FailedPrecondition as error:\n"
        "    print(error)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS
    )
    assert (ended.returncode, ended.stderr) == (0, "") and "free-threaded" in ended.stdout
