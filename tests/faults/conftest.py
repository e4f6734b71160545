"""Fixtures of the disk tests: the preloaded library, and a disk that obeys."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.rig import Disk

SOURCE = Path(__file__).with_name("disk.c")
COMPILE_SECONDS = 60


@pytest.fixture(scope="session")
def disk_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """disk.c, compiled. Fails, and does not skip, when there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, "these tests need a C compiler: install gcc or clang"
    library = tmp_path_factory.mktemp("disk") / "disk.so"
    command = [compiler, "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-o"]
    subprocess.run(
        [*command, str(library), str(SOURCE), "-ldl"], check=True, timeout=COMPILE_SECONDS
    )
    return library


@pytest.fixture
def disk(disk_library: Path, tmp_path: Path) -> Iterator[Disk]:
    """A sound disk, until it is told otherwise."""
    made = Disk(disk_library, tmp_path)
    yield made
    made.close()
