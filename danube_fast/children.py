"""How we start Python processes of our own: no code comes from the directory they start in, no memory gets onto a disk.

`python -m` puts the working directory first on the module path, where a stray `lmdb.py` would be
imported in place of the library; so children run with `-P`, and entries of PYTHONPATH that name that
directory, outright or by being relative or empty, are not handed on.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

__all__ = ["child_environment", "forbid_core_dumps", "module_command"]

_NO_CORE_BYTES = 1
"""Too little for any dump. Linux makes none for a program that takes dumps either, as it would with a limit of 0."""


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module with this interpreter."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment() -> dict[str, str]:
    """Our environment with a module path that children may trust; the source tree is added to it if
    the package is run from one."""
    environment = dict(os.environ)
    root = Path(__file__).absolute().parents[1]
    entries = [] if root.name.endswith("-packages") else [str(root)]
    for entry in environment.pop("PYTHONPATH", "").split(os.pathsep):
        if os.path.isabs(entry) and not _is_here(entry) and entry not in entries:
            entries.append(entry)
    if entries:
        environment["PYTHONPATH"] = os.pathsep.join(entries)
    return environment


def forbid_core_dumps() -> None:
    """Let this process and its children leave no image of their memory when they crash: there are keys in it."""
    resource.setrlimit(resource.RLIMIT_CORE, (_core_limit(), _core_limit()))


def _core_limit() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    return 0 if hard == 0 else _NO_CORE_BYTES


def _is_here(entry: str) -> bool:
    try:
        return os.path.samefile(entry, os.curdir)
    except OSError:
        return False  # one of them does not exist: no module comes from there
