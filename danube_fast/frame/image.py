"""The kernel image: all kernels of the package compiled into one file, which a process only loads.

    build, once per machine and version        every process
    numba, 15 to 60 s                          llvmlite, some 15 ms
    @kernel ... -> LLVM -> one object  ----->  read, relocate, make built-in functions

Without it each process would import Numba and unpickle a hundred functions: 1.5 s of processor time
for each command, client and worker. The file's name is a hash of all it depends on (the sources of
kernels, Numba, Python, processor), so an edit makes a new one; `image_builder.py` writes it.

A kernel is called like any built-in function: int64 arguments, an int or None as its result, 40 ns.
Wrong arguments raise TypeError or OverflowError.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import re
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from danube_fast.children import child_environment, module_command
from danube_fast.errors import Internal

__all__ = [
    "BENCH",
    "KERNEL_HOMES",
    "Image",
    "Progress",
    "build_command",
    "cache_folder",
    "image_path",
    "image_sources",
    "is_built",
    "kernel_sources",
    "pack_image",
]

KERNEL_HOMES = (
    "frame", "lmdb_file.py", "ring", "wal", "history", "net", "broker", "client", "workers",
)  # fmt: skip
"""Folders and files of the package."""
BENCH = "bench"
"""The benchmark's kernels have an image of their own, built when it runs for the first time."""
ADDRESS_OF = "address_of"
"""The built-in function that gives the address of a buffer."""
CRC_ENTRY = "danube_crc32c_entry"
"""The word of the image that holds the address of the crc32c in use."""
_MAKERS = ("image_builder.py", "image_compiler.py")
_MARKS = (b"@kernel(", b"intrinsic(", b"external(")
_IMPORTS = re.compile(rb"^from danube_fast\.(\S+) import", re.MULTILINE)
_MAGIC = b"danube-fast kernels 1\n"
_HEAD = struct.Struct("<II")  # crc32 of all that follows, bytes of the names
_METH_FASTCALL = 0x80
_CPU_FIELDS = (b"model name", b"flags", b"CPU implementer", b"CPU part", b"Features")
_CPU_BYTES = 16384
_BUILD_SECONDS = 600
COMPILING_TEXT = "compiling kernels, once for this version on this machine; it takes up to a minute"
_BAR_CHARACTERS = 40


def kernel_sources(homes: Sequence[str] = KERNEL_HOMES) -> list[Path]:
    """Every file of these homes that defines kernels or what they are made of."""
    return list(_kernel_texts(homes))


def _kernel_texts(homes: Sequence[str]) -> dict[Path, bytes]:
    package = Path(__file__).absolute().parents[1]
    sources = [
        path
        for home in (package / name for name in homes)
        for path in ([home] if home.is_file() else sorted(home.rglob("*.py")))
    ]
    texts = {path: path.read_bytes() for path in sources}
    return {path: text for path, text in texts.items() if any(mark in text for mark in _MARKS)}


def image_sources(folder: str = "") -> dict[Path, bytes]:
    """Every file whose text decides what is in the image, and that text: the sources of kernels, the files of the
    package that those import constants from, and what makes the image; with those of one more `folder`, if it has an
    image of its own."""
    package = Path(__file__).absolute().parents[1]
    texts = _kernel_texts((*KERNEL_HOMES, folder) if folder else KERNEL_HOMES)
    texts |= {path: path.read_bytes() for path in (package / "frame" / name for name in _MAKERS)}
    names = {name for text in texts.values() for name in _IMPORTS.findall(text)}
    for name in names:
        path = package.joinpath(*name.decode().split(".")).with_suffix(".py")
        if path not in texts and path.is_file():
            texts[path] = path.read_bytes()
    return dict(sorted(texts.items()))


@functools.cache
def image_path(folder: str = "") -> Path:
    """Where the image of exactly these sources for this machine is, or would be; of one more `folder`, if
    it has an image of its own."""
    digest = hashlib.sha256()
    for text in (_installed("numba"), _installed("llvmlite"), sys.version, platform.machine()):
        digest.update(text.encode() + b"\0")
    digest.update(_processor())
    package = Path(__file__).absolute().parents[1]
    for source, content in image_sources(folder).items():
        digest.update(str(source.relative_to(package)).encode() + b"\0" + content)
    return cache_folder() / f"kernels-{folder}{digest.hexdigest()[:16]}.image"


def _installed(package: str) -> str:
    """Where a package lies and since when; nothing of it is imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return ""
    return f"{spec.origin} {os.stat(spec.origin).st_mtime_ns}"


def _processor() -> bytes:
    """Read what the code generator looks at: the first processor's model and features."""
    try:
        with open("/proc/cpuinfo", "rb") as file:
            lines = file.read(_CPU_BYTES).split(b"\n\n", 1)[0].splitlines()
    except OSError:
        lines = []
    return b"\n".join(line for line in lines if line.startswith(_CPU_FIELDS))


def cache_folder() -> Path:
    """Folder for what can be made again, as images; made if missing, in a temporary place if it must be."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for folder in (
        base / "danube-fast",
        Path(tempfile.gettempdir()) / f"danube-fast-{os.getuid()}",
    ):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
        except OSError:
            continue
        # what lies there is run: no other user may have put it there
        if (
            status.st_uid == os.geteuid()
            and not status.st_mode & 0o022
            and os.access(folder, os.W_OK)
        ):
            return folder
    return Path(tempfile.mkdtemp(prefix="danube-fast-kernels-"))


def pack_image(names: list[str], code: bytes) -> bytes:
    """The file's bytes: names of the kernels in it and the object code."""
    listed = "\n".join(names).encode()
    rest = listed + code
    return _MAGIC + _HEAD.pack(zlib.crc32(rest), len(listed)) + rest


def _read(path: Path) -> tuple[list[str], bytes] | None:
    """Names and object code; None if the file is missing or not whole."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    start = len(_MAGIC) + _HEAD.size
    if len(data) < start or not data.startswith(_MAGIC):
        return None
    crc, size = _HEAD.unpack_from(data, len(_MAGIC))
    if zlib.crc32(data[start:]) != crc:
        return None
    return data[start : start + size].decode().split("\n"), data[start + size :]


def is_built(path: Path | None = None) -> bool:
    """Whether the image is there and whole: a process that starts now need not compile."""
    return _read(path or image_path()) is not None


def build_command(folder: str = "") -> list[str]:
    """The command that builds the image, in a child: it writes "done/total what" lines and ends with 0."""
    only = [folder] if folder else []
    return module_command("danube_fast.frame.image_builder", str(image_path(folder)), *only)


class Progress:
    """Says once that kernels are compiled, and shows at a terminal how far that is."""

    def __init__(self, note: Callable[[str], None] | None = None) -> None:
        """`note` says a line where lines have a form of their own; else stderr."""
        self._bar = sys.stderr is not None and sys.stderr.isatty()
        if note is not None:
            note(COMPILING_TEXT)
        elif sys.stderr is not None:
            print(f"danube-fast: {COMPILING_TEXT}", file=sys.stderr, flush=True)

    def show(self, line: str) -> None:
        """Show a "done/total what" line of the builder."""
        done, _, total = line.partition(" ")[0].partition("/")
        if self._bar and done.isdecimal() and total.isdecimal() and int(total):
            filled = _BAR_CHARACTERS * int(done) // int(total)
            bar = "#" * filled + "." * (_BAR_CHARACTERS - filled)
            print(f"\r[{bar}] {done}/{total}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Take the bar away."""
        if self._bar:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _build(folder: str) -> None:
    progress = Progress()
    said: list[str] = []
    with subprocess.Popen(
        build_command(folder), env=child_environment(), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as child:  # fmt: skip
        timer = threading.Timer(_BUILD_SECONDS, child.kill)
        timer.start()
        try:
            for line in child.stdout or ():
                progress.show(line)
                said = [*said[-9:], line]
            code = child.wait()
        finally:
            child.kill()
            timer.cancel()
            progress.end()
    if code == -signal.SIGKILL:
        raise Internal(
            f"compiling the kernels took over {_BUILD_SECONDS} s or was killed; is this host "
            "overloaded? Try again"
        )
    if code:
        raise Internal(f"the kernels could not be compiled: {''.join(said)[-1000:].strip()}")


class _MethodDef(ctypes.Structure):
    """PyMethodDef of the Python C API."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("text", ctypes.c_char_p),
    )


_new_builtin: Any = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
)(("PyCFunction_NewEx", ctypes.pythonapi))


class Image:
    """The image as this process has it in memory, for as long as the process lives."""

    def __init__(self, folder: str = "") -> None:
        import llvmlite.binding as llvm

        path = image_path(folder)
        found = _read(path)
        if found is None:
            _build(folder)
            found = _read(path)
        if found is None:
            raise Internal(f"{path} cannot be read though it was just written; check the disk")
        names, code = found
        self._names = frozenset(names)
        self._kept: list[Any] = []  # what C refers to
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten()
        )
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()

    def function(self, name: str) -> Callable[..., Any]:
        """A kernel by its module and name, as a built-in function.

        One that is not in the image raises Internal when it is called: what only other kernels call
        is not needed here.
        """
        if name not in self._names:
            return functools.partial(_missing, name)
        method = _MethodDef(
            name.rpartition(".")[2].encode(),
            self._engine.get_function_address(f"danube:{name}"),
            _METH_FASTCALL,
            None,
        )
        self._kept.append(method)
        return _new_builtin(ctypes.addressof(method), None, None)  # type: ignore[no-any-return]

    def set_crc_entry(self, address: int) -> None:
        """Let the C function at `address` compute crc32c."""
        word = self._engine.get_global_value_address(CRC_ENTRY)
        ctypes.c_void_p.from_address(word).value = address


def _missing(name: str, *arguments: object) -> NoReturn:
    raise Internal(f"{name} is not in the kernel image; start with DANUBE_KERNELS=numba to use it")
