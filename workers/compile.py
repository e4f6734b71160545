"""Compiles every kernel once, in a short-lived child, so that no other process has to wait for it.

    supervisor --- is_compiled()? no ---> python -m danube_fast.workers.compile
               <-- "done/total module" lines on stdout ---
                                          writes the marker file last

The marker names everything that a cached kernel depends on (sources, numba, Python, processor), so
a start with a warm cache costs one look at a file. It is only a promise of speed: without it, or
with a cache that was emptied behind its back, each process compiles what it needs by itself.

Until `main` runs nothing here imports numba: the supervisor uses the first half.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path

__all__ = ["is_compiled", "kernel_modules", "main", "marker_path"]

_KERNEL_FOLDERS = ("frame", "ring", "wal", "broker", "client", "workers")
_MARKS = re.compile(rb"^@kernel\(|intrinsic\(|^@intrinsic", re.MULTILINE)
_CPU_FIELDS = (b"model name", b"flags", b"CPU implementer", b"CPU part", b"Features")


def _package() -> Path:
    return Path(__file__).absolute().parents[1]


def _kernel_sources() -> list[Path]:
    import danube_fast

    package = Path(danube_fast.__file__).parent
    sources = [
        source for folder in _KERNEL_FOLDERS for source in sorted((package / folder).glob("*.py"))
    ]
    return [source for source in sources if _MARKS.search(source.read_bytes())]


def kernel_modules() -> list[str]:
    """Names of all modules that define kernels or what kernels are made of."""
    return [f"danube_fast.{source.parent.name}.{source.stem}" for source in _kernel_sources()]


def _processor() -> bytes:
    """What the code generator looks at: the first processor's model and features."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().split(b"\n\n", 1)[0].splitlines()
    except OSError:
        lines = []
    return b"\n".join(line for line in lines if line.startswith(_CPU_FIELDS))


def marker_path() -> Path:
    """The file that says: all kernels of exactly these sources are compiled for this machine."""
    parts = [
        importlib.metadata.version("numba"),
        importlib.metadata.version("llvmlite"),
        sys.version,
        platform.machine(),
        str(_package()),
        os.environ.get("NUMBA_CACHE_DIR", ""),
    ]
    digest = hashlib.sha256("\0".join(parts).encode() + _processor())
    for source in _kernel_sources():
        digest.update(b"\0" + source.name.encode() + b"\0" + source.read_bytes())
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "danube-fast" / f"compiled-{digest.hexdigest()[:16]}"


def is_compiled() -> bool:
    """Whether a start may skip the compile child."""
    try:
        folder = marker_path().read_text()
    except OSError:
        return False
    return any(Path(folder).glob("**/*.nbi"))


def main() -> int:
    """Import every module with kernels, which compiles them, and write the marker."""
    if len(sys.argv) > 1:
        from danube_fast.workers.boot import die_with_parent

        die_with_parent(int(sys.argv[1]))
    marker = marker_path()  # before: a source edited meanwhile must not count as compiled
    modules = kernel_modules()
    for done, module in enumerate(modules):
        print(f"{done}/{len(modules)} {module}", flush=True)
        importlib.import_module(module)
    print(f"{len(modules)}/{len(modules)} done", flush=True)
    import numba.core.config

    with contextlib.suppress(OSError):
        marker.parent.mkdir(parents=True, exist_ok=True)
        partial = marker.with_name(f"{marker.name}.{os.getpid()}")
        partial.write_text(str(vars(numba.core.config)["CACHE_DIR"]))
        partial.replace(marker)
        for other in marker.parent.glob("compiled-*"):
            if other.stat().st_mtime < marker.stat().st_mtime - 30 * 86400:
                other.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
