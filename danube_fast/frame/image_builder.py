"""Builds the kernel image: `python -m danube_fast.frame.image_builder PATH`, a short-lived child.

    import every module with kernels: each notes its own        DANUBE_KERNELS=build
    compile each to LLVM code, a share in each of some processes (`image_compiler.py`)
    link it into one module, with a wrapper for each kernel that takes and gives Python's ints
    everything but the wrappers becomes private; optimise; emit one object

A wrapper is a C function as CPython calls built-in functions with METH_FASTCALL. It is written as
LLVM code here, since Numba's own ones need Numba in the process.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["DANUBE_KERNELS"] = "build"  # before anything of ours is imported

import llvmlite.binding as llvm

from danube_fast.children import module_command
from danube_fast.frame import image

if TYPE_CHECKING:
    from danube_fast.frame.image_compiler import Kernel

__all__ = ["main"]

_MODULE = "danube_fast.frame.image_builder"
_PROCESSES_MAX = 4
"""More would import Numba for less and less; the end, a third of the time, is one process anyway."""
_INLINING_THRESHOLD = 225
"""What LLVM has at level 2; that of level 3 makes the image larger, and no kernel faster."""
_PR_SET_PDEATHSIG = 1
_OLD_SECONDS = 30 * 86400
_TABLE = "danube_fast.frame.crc._table_extend"
_VIEW_BYTES = 80
"""sizeof(Py_buffer); its first word is the address."""

_PREAMBLE = f"""
@_Py_NoneStruct = external global i8
@{image.CRC_ENTRY} = global ptr @danube_crc32c_table
declare i32 @PyErr_BadArgument()
declare ptr @PyErr_Occurred()
declare i64 @PyLong_AsLongLong(ptr)
declare ptr @PyLong_FromLongLong(i64)
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare void @Py_IncRef(ptr)
declare i32 @PyObject_GetBuffer(ptr, ptr, i32)
declare void @PyBuffer_Release(ptr)

define i32 @danube_crc32c_extend(i32 %crc, i64 %address, i64 %count) {{
  %entry = load ptr, ptr @{image.CRC_ENTRY}
  %result = call i32 %entry(i32 %crc, i64 %address, i64 %count)
  ret i32 %result
}}

define ptr @"danube:{image.ADDRESS_OF}"(ptr %self, ptr %arguments, i64 %count) {{
  %right = icmp eq i64 %count, 1
  br i1 %right, label %take, label %wrong
wrong:
  %ignored = call i32 @PyErr_BadArgument()
  ret ptr null
take:
  %view = alloca [{_VIEW_BYTES} x i8], align 8
  %object = load ptr, ptr %arguments
  %status = call i32 @PyObject_GetBuffer(ptr %object, ptr %view, i32 0)
  %failed = icmp ne i32 %status, 0
  br i1 %failed, label %fail, label %give
fail:
  ret ptr null
give:
  %address = load i64, ptr %view
  call void @PyBuffer_Release(ptr %view)
  %result = call ptr @PyLong_FromLongLong(i64 %address)
  ret ptr %result
}}
"""

_TABLE_CODE = """
define i32 @danube_crc32c_table(i32 %crc, i64 %address, i64 %count) {{
  %result = alloca i64
  %fault = alloca ptr
  %wide = zext i32 %crc to i64
  %status = call i32 @"{core}"(ptr %result, ptr %fault, i64 %wide, i64 %address, i64 %count)
  %value = load i64, ptr %result
  %narrow = trunc i64 %value to i32
  ret i32 %narrow
}}
"""


def _wrapper(entry: Kernel, *, gives_none: bool) -> str:
    """The built-in function of one kernel."""
    core, count = entry.symbol, len(entry.arguments)
    lines = [
        f'define ptr @"danube:{entry.name}"(ptr %self, ptr %arguments, i64 %count) {{',
        f"  %right = icmp eq i64 %count, {count}",
        "  br i1 %right, label %take, label %wrong",
        "wrong:",
        "  %ignored = call i32 @PyErr_BadArgument()",
        "  ret ptr null",
        "take:",
        "  %result = alloca i64",
        "  %fault = alloca ptr",
        "  store i64 0, ptr %result",
    ]
    suspicious = "false"  # -1 may stand for an error
    for i in range(count):
        lines += [
            f"  %p{i} = getelementptr ptr, ptr %arguments, i64 {i}",
            f"  %o{i} = load ptr, ptr %p{i}",
            f"  %a{i} = call i64 @PyLong_AsLongLong(ptr %o{i})",
            f"  %m{i} = icmp eq i64 %a{i}, -1",
            f"  %s{i} = or i1 {suspicious}, %m{i}",
        ]
        suspicious = f"%s{i}"
    lines += [
        f"  br i1 {suspicious}, label %look, label %run",
        "look:",
        "  %error = call ptr @PyErr_Occurred()",
        "  %bad = icmp ne ptr %error, null",
        "  br i1 %bad, label %fail, label %run",
        "fail:",
        "  ret ptr null",
        "run:",
    ]
    arguments = ", ".join(["ptr %result", "ptr %fault", *(f"i64 %a{i}" for i in range(count))])
    call = f'  %status = call i32 @"{core}"({arguments})'
    if entry.nogil:
        lines += [
            "  %state = call ptr @PyEval_SaveThread()",
            call,
            "  call void @PyEval_RestoreThread(ptr %state)",
        ]
    else:
        lines.append(call)
    if gives_none:
        lines += ["  call void @Py_IncRef(ptr @_Py_NoneStruct)", "  ret ptr @_Py_NoneStruct", "}"]
    else:
        lines += [
            "  %value = load i64, ptr %result",
            "  %object = call ptr @PyLong_FromLongLong(i64 %value)",
            "  ret ptr %object",
            "}",
        ]
    return "\n".join(lines)


def _declare(folders: Sequence[str]) -> list[Kernel]:
    """Import every module with kernels; all kernels in the order of their declaration."""
    importlib.import_module("danube_fast.frame.crc")  # every image has its table
    package = Path(__file__).absolute().parents[1]
    for source in image.kernel_sources(folders):
        if source.stem not in ("kernel", "image"):
            parts = source.relative_to(package).with_suffix("").parts
            importlib.import_module(".".join(("danube_fast", *parts)))
    from danube_fast.frame.kernel import declared

    return declared


def _compile(entries: list[Kernel], number: int, count: int) -> bytes:
    """Compile every `count`-th kernel, from `number` on: one LLVM module, as bitcode. The first share shows how far
    all are."""
    from danube_fast.frame.image_compiler import compiled

    module = llvm.parse_assembly("")
    own = entries[number::count]
    for done, entry in enumerate(own):
        if number == 0:
            print(f"{done}/{len(own)} {entry.name}", flush=True)
        module.link_in(compiled(entry))
    if number == 0:
        print(f"{len(own)}/{len(own)} the rest, and optimise", flush=True)
    return bytes(module.as_bitcode())


@contextlib.contextmanager
def _helpers(
    path: Path, folders: Sequence[str], count: int
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Builders that compile all shares but the first and write them to their stdout."""
    with contextlib.ExitStack() as started:
        children = []
        for number in range(1, count):
            share = ("--share", str(number), str(count))
            command = module_command(_MODULE, str(path), *folders, *share)
            child = started.enter_context(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
            )
            started.callback(child.kill)
            children.append(child)
        yield children


def _compile_all(path: Path, folders: Sequence[str]) -> tuple[list[Kernel], list[bytes]]:
    """All kernels and their code, compiled in as many processes as there are processors."""
    count = min(len(os.sched_getaffinity(0)), _PROCESSES_MAX)
    with _helpers(path, folders, count) as children:
        entries = _declare(folders)
        parts = [_compile(entries, 0, count)]
        for child in children:
            parts.append(child.communicate()[0])
            if child.returncode:
                raise RuntimeError(f"a process that compiles kernels ended with {child.returncode}")
    return entries, parts


def _link(entries: list[Kernel], parts: Iterable[bytes]) -> tuple[Any, list[str]]:
    """One LLVM module of all kernels and their wrappers; the names of those."""
    from numba import types

    module = llvm.parse_assembly("")
    for part in parts:
        module.link_in(llvm.parse_bitcode(part))
    code, names = [_PREAMBLE], [image.ADDRESS_OF]
    for entry in entries:
        if entry.name == _TABLE:
            code.append(_TABLE_CODE.format(core=entry.symbol))
        if any(argument != types.int64 for argument in entry.arguments):
            continue  # called by kernels only
        if entry.result not in (types.int64, types.none):
            continue
        names.append(entry.name)
        words = ", i64" * len(entry.arguments)
        code.append(f'declare i32 @"{entry.symbol}"(ptr, ptr{words})')
        code.append(_wrapper(entry, gives_none=entry.result == types.none))
    module.link_in(llvm.parse_assembly("\n".join(code)))
    missing = [entry.name for entry in entries if module.get_function(entry.symbol).is_declaration]
    if missing:
        raise RuntimeError(f"no code of {missing[0]}; were files changed meanwhile?")
    return module, names


def _emit(module: Any) -> bytes:
    """Optimised object code; only wrappers and the crc's word have names in it."""
    from numba.core.registry import cpu_target

    seen = (image.CRC_ENTRY,)
    for value in (*module.functions, *module.global_variables):
        if (
            not value.is_declaration
            and not value.name.startswith("danube:")
            and value.name not in seen
        ):
            value.linkage = "private"
    machine = cpu_target.target_context.codegen()._tm
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.inlining_threshold = _INLINING_THRESHOLD
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return bytes(machine.emit_object(module))


def _build(path: Path, folders: Sequence[str]) -> None:
    linked, names = _link(*_compile_all(path, folders))
    data = image.pack_image(names, _emit(linked))
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    for other in path.parent.glob("kernels-*.image"):
        with contextlib.suppress(OSError):
            if other.stat().st_mtime < time.time() - _OLD_SECONDS:
                other.unlink()


def main() -> int:
    """Build the image at the path given unless it is there; one builder at a time."""
    # if its parent ends, no process waits for it any more
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    gc.disable()  # most of what Numba makes lives to the end: looking for the rest takes 7 % of the time
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("folders", nargs="*", default=image.KERNEL_HOMES)
    parser.add_argument("--share", type=int, nargs=2, help="number and count: write only bitcode")
    given = parser.parse_args()
    try:
        if given.share is not None:
            sys.stdout.buffer.write(_compile(_declare(given.folders), *given.share))
            return 0
        with given.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not image.is_built(given.path):
                _build(given.path, given.folders)
    except Exception as error:  # one line for the operator, not a traceback
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"{text}; is the installation of danube-fast and Numba whole?", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
