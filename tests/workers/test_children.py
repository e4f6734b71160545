"""What children of a broker run: our code and that of the installation, none of where they start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from danube_fast import children
from danube_fast.config import Settings
from danube_fast.frame.image import build_command
from tests.workers.broker import Broker

ROOT = Path(__file__).parents[2]
STRAYS = (
    "lmdb", "zmq", "msgspec", "numpy", "xxhash", "uvicorn", "starlette", "logging", "signal",
    "sitecustomize", "usercustomize", "danube_fast",
)  # fmt: skip
SERVE = """
import os, sys, msgspec
from danube_fast.config import Settings
from danube_fast.workers.supervisor import supervisor
os.environ["PYTHONPATH"] = os.pathsep.join(["", ".", "strays", os.getcwd()])
sys.exit(supervisor.serve(msgspec.json.decode(sys.argv[1], type=Settings), output="json"))
"""


def plant(folder: Path) -> Path:
    """Modules that tell in a file that they ran, in `folder` and below it."""
    told = folder / "ran"
    (folder / "strays").mkdir()
    for name in STRAYS:
        source = f"import sys\nopen({str(told)!r}, 'a').write(f'{name} in {{sys.argv}}\\n')\n"
        for place in (folder, folder / "strays"):
            (place / f"{name}.py").write_text(source)
    return told


class _Planted(Broker):
    """A broker with real workers that was started in a folder of stray modules."""

    def __init__(self, folder: Path) -> None:
        self.settings = Settings(data_dir=str(folder / "data"), listen="127.0.0.1:0")
        self.errors = (folder / "errors").open("w+b")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", SERVE, msgspec.json.encode(self.settings).decode()],
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=folder,
        )
        self.ready = {}


def test_modules_in_the_working_directory_never_run(tmp_path: Path) -> None:
    told = plant(tmp_path)
    with _Planted(tmp_path) as broker:
        broker.wait_ready()
        assert broker.status()["topics"] == 0
    assert not told.exists(), told.read_text()


def test_the_kernels_are_built_by_our_code_alone(tmp_path: Path) -> None:
    told = plant(tmp_path)
    command = [*build_command()[:-2], "danube_fast.version"]
    subprocess.run(
        command, cwd=tmp_path, check=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert not told.exists(), told.read_text()


def test_the_module_path_of_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    link = tmp_path.parent / f"{tmp_path.name}-link"
    link.symlink_to(tmp_path)
    entries = [
        "",
        ".",
        "lib",
        "..",
        str(tmp_path),
        f"{tmp_path}/",
        str(link),
        "/opt/lib",
        "/opt/lib",
    ]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(entries))
    monkeypatch.setenv("A_CREDENTIAL", "stays")
    environment = children.child_environment()
    kept = environment["PYTHONPATH"].split(os.pathsep)
    assert [entry for entry in kept if entry != str(ROOT)] == ["/opt/lib"]
    assert environment["A_CREDENTIAL"] == "stays"


def test_the_source_tree_stays_on_the_module_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a broker is started in it: without it children would not find the package."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}.")
    assert children.child_environment()["PYTHONPATH"] == str(ROOT)
