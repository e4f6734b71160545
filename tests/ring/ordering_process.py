"""Which memory orderings kernels have in LLVM's IR, and in machine code for aarch64. Run by test_ordering.py.

python tests/ring/ordering_process.py

Prints JSON: by kernel, the ordered accesses and fences that stand in its own IR as it was generated; the instructions
of its optimised IR that touch words which another thread or process uses meanwhile; and for each set of features of an
aarch64 processor the code of the kernel with all that it calls. No code: this LLVM does not know the target.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

os.environ["DANUBE_KERNELS"] = "numba"

import llvmlite.binding as llvm
import numba
from numba.core.codegen import CPUCodeLibrary
from numba.core.dispatcher import Dispatcher

import danube_fast
from danube_fast.frame.image import kernel_sources

TRIPLE = "aarch64-unknown-linux-gnu"
FEATURES = ("", "+lse")
"""What a processor may have: exclusive loads and stores only, or instructions that exchange, too."""
STRAIGHT_WAYS = (
    "client.link.deliveries", "client.link.lookout", "client.produce.straight",
    "workers.shard.publish.serve_kernel", "workers.shard.publish.take_kernel",
    "workers.shard.publish.turn_kernel", "workers.shard.ring_out",
)  # fmt: skip
"""Modules whose kernels use atomics through others only."""
ORDERED = re.compile(
    r"= (load) atomic i64,? .* (\w+), align 8$|(store) atomic i64 .* (\w+), align 8$"
    r"|= (cmpxchg) .* (\w+ \w+)$|(fence) (\w+)$",
    re.MULTILINE,
)
COMPUTED = re.compile(r"\s*(%[^ ]+) = (?:add|sub|or|phi|select|inttoptr|getelementptr) (.*)")
OPERANDS = re.compile(r"%[\w.\"]+|-?\d{6,}")
ACCESS = re.compile(r"(?:= load|store|cmpxchg|atomicrmw) .*\bptr (%[\w.\"]+)")
SHARED = {
    "AT_HEAD", "AT_TAIL", "AT_CACHED_HEAD", "AT_CACHED_TAIL", "AT_VERSION", "AT_READER_SLEEPING", "AT_ROOM_ASKED",
    "_COUNT_FROM_WORD", "AT_BUCKET_KEY", "AT_BUCKET_MESSAGES", "AT_BUCKET_BYTES", "STATE", "REQUEST", "LINK", "_AT_TAIL",
    "_AT_HEAD", "_AT_SYNCED", "_AT_ERRNO", "_AT_STOP",
}  # fmt: skip
"""Offsets of words that another process or thread reads or writes meanwhile."""
MARK, MARK_STEP = 0x5EED_0000, 64


def modules() -> list[str]:
    """Those that use `ring/atomics.py`, and those of the straight ways."""
    package = Path(danube_fast.__file__).parent
    users = [
        ".".join(path.relative_to(package).with_suffix("").parts)
        for path in kernel_sources()
        if "from danube_fast.ring.atomics import" in path.read_text()
    ]
    return [f"danube_fast.{name}" for name in (*users, *STRAIGHT_WAYS)]


def kernels() -> list[Dispatcher]:
    """The kernels of these modules."""
    return [
        each
        for name in dict.fromkeys(modules())
        for each in vars(importlib.import_module(name)).values()
        if isinstance(each, Dispatcher) and each.py_func.__module__ == name
    ]


class Compiled(NamedTuple):
    """A kernel that was compiled once more."""

    name: str
    """Of its function."""
    own: str
    """Its IR as it was generated: without optimisation, and without what it calls."""
    optimized: str
    module: str
    """It and all that it calls, optimised."""


def compiled(function: Any, kernel: Dispatcher) -> Compiled:
    """Compile `function` as the kernel it stands for is."""
    generated: list[str] = []
    add = CPUCodeLibrary.add_ir_module

    def keep(self: Any, module: Any) -> None:
        generated.append(str(module))
        add(self, module)

    CPUCodeLibrary.add_ir_module = keep
    signature, nogil = kernel.signatures[0], kernel.targetoptions["nogil"]
    try:
        fresh = numba.njit(signature, nogil=nogil, error_model="numpy")(function)
    finally:
        CPUCodeLibrary.add_ir_module = add
    (result,) = fresh.overloads.values()
    name, module = result.fndesc.llvm_func_name, fresh.inspect_llvm(signature)
    return Compiled(name, body_of(name, "\n".join(generated)), body_of(name, module), module)


def marked(function: Any) -> Any:
    """A function for which offsets of shared words are numbers that are met nowhere else; None if it knows no such
    word."""
    names = SHARED & set(function.__code__.co_names) & function.__globals__.keys()
    if not names and "word" not in inspect.signature(function).parameters:
        return None
    marks = {name: MARK + index * MARK_STEP for index, name in enumerate(sorted(names))}
    return types.FunctionType(
        function.__code__, {**function.__globals__, **marks}, function.__name__
    )


def is_mark(operand: str) -> bool:
    """Whether it is such a number, maybe with a small one added."""
    return not operand.startswith("%") and 0 <= int(operand) - MARK < MARK_STEP * len(SHARED)


def accesses(body: str) -> list[str]:
    """Instructions of a function that read or write a shared word: its address is computed from a mark, or is the
    argument `word`."""
    lines, tainted = body.splitlines(), {"%arg.word"}
    found = True
    while found:
        found = False
        for line in lines:
            match = COMPUTED.match(line)
            if match is None or match[1] in tainted:
                continue
            if any(each in tainted or is_mark(each) for each in OPERANDS.findall(match[2])):
                tainted.add(match[1])
                found = True
    return [
        line.strip()
        for line in lines
        if (match := ACCESS.search(line)) is not None and match[1] in tainted
    ]


def body_of(name: str, text: str) -> str:
    """The definition of one function in a module's IR."""
    start = re.search(rf'^define [^\n]*@"?{re.escape(name)}"?\(', text, re.MULTILINE)
    if start is None:
        raise LookupError(f"no function {name}")
    return text[start.start() : text.index("\n}", start.start())]


def machine_code(kernel: Compiled) -> dict[str, list[str]]:
    """Code for aarch64 by features: of the kernel's own function, and of all that it calls, too. Empty if this LLVM
    cannot."""
    try:
        target = llvm.Target.from_triple(TRIPLE)
    except RuntimeError:
        return {}
    lines = [
        line
        for line in kernel.module.splitlines()
        if not line.startswith(("target triple", "target datalayout"))
    ]
    found = {}
    for features in FEATURES:
        machine = target.create_target_machine(features=features, opt=2)
        parsed = llvm.parse_assembly("\n".join(lines))
        parsed.triple, parsed.data_layout = TRIPLE, str(machine.target_data)
        parsed.verify()
        code = machine.emit_assembly(parsed)
        start = code.index(f"\n{kernel.name}:\n")
        found[features] = [code[start : code.index(".Lfunc_end", start)], code]
    return found


def main() -> int:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    found = {}
    for dispatcher in kernels():
        function = dispatcher.py_func
        kernel = compiled(function, dispatcher)
        ordered = [" ".join(filter(None, match)) for match in ORDERED.findall(kernel.own)]
        copy = marked(function)
        name = f"{function.__module__}.{function.__qualname__}"
        found[name.removeprefix("danube_fast.")] = {
            "ordered": sorted(ordered),
            "accesses": None if copy is None else accesses(compiled(copy, dispatcher).optimized),
            "code": machine_code(kernel),
        }
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
