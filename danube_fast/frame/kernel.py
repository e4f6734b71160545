"""How kernels are declared and called.

    @kernel("int64(int64,int64)")       a function that Numba compiles; all values are int64
    intrinsic, external                 what kernels are made of: LLVM code of our own, C functions

A process takes compiled kernels out of the image (`image.py`) and never imports Numba. Those started
with DANUBE_KERNELS=numba (for kernels that are not part of the package) compile them as they are
declared. The one that builds the image only notes them (`image_compiler.py`); none can be called there.

Where kernels cannot run, importing this module raises FailedPrecondition (`interpreter.py`).

`direct(f)` is what Python calls, 40 ns. Pass exactly as many ints as the signature has.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from danube_fast.interpreter import check_interpreter

if TYPE_CHECKING:
    from danube_fast.frame.image_compiler import Kernel

__all__ = [
    "BUILDING",
    "COMPILING",
    "address_of",
    "declared",
    "direct",
    "external",
    "intrinsic",
    "kernel",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])

check_interpreter()

_MODE = os.environ.get("DANUBE_KERNELS", "")
BUILDING = _MODE == "build"
"""Whether this process builds the image (a constant of the process)."""
COMPILING = BUILDING or _MODE == "numba"
"""Whether Numba is in this process (a constant of the process)."""

declared: list[Kernel] = []
"""In the order of their declaration; empty unless BUILDING."""

if COMPILING:
    import numba
    import numba.core.config
    import numba.core.sigutils
    import numba.core.typing
    import numba.extending
    import numpy as np

    from danube_fast.frame.image import image_path

    _numba: Any = numba

    if BUILDING:
        from danube_fast.frame.image_compiler import Kernel
    else:
        # Numba's own cache looks only at the file of a function, not at those of its callees
        _numba.core.config.CACHE_DIR = str(image_path().with_suffix(".numba"))

    def address_of(buffer: Any) -> int:
        """Address of the first byte of a contiguous bytes-like object."""
        return int(np.frombuffer(buffer, np.uint8).ctypes.data)

else:
    from danube_fast.frame.image import ADDRESS_OF, BENCH, Image

    image = Image()
    _image_of_bench = functools.cache(lambda: Image(BENCH))
    address_of: Callable[[Any], int] = image.function(ADDRESS_OF)  # type: ignore[no-redef]
    """Address of the first byte of a contiguous bytes-like object. BufferError if it is not one.

    The caller keeps the object alive.
    """


def kernel(signature: str, *, nogil: bool = False) -> Callable[[_Function], _Function]:
    """Compile for exactly one signature. `nogil` releases the GIL while it runs."""

    def apply(function: _Function) -> _Function:
        if BUILDING:
            declared.append(Kernel(function, signature, nogil=nogil))
            return declared[-1]  # type: ignore[return-value]
        if not COMPILING:
            name = f"{function.__module__}.{function.__qualname__}"
            is_bench = name.startswith(f"danube_fast.{BENCH}.")
            found = _image_of_bench() if is_bench else image
            return found.function(name)  # type: ignore[return-value]
        decorate: Any = numba.njit(signature, cache=True, nogil=nogil, error_model="numpy")
        return decorate(function)  # type: ignore[no-any-return]

    return apply


def direct(function: Any) -> Callable[..., Any]:
    """The unchecked entry point of a compiled kernel."""
    if BUILDING or not COMPILING:
        return function  # type: ignore[no-any-return]
    (overload,) = function.overloads.values()
    return overload.entry_point  # type: ignore[no-any-return]


def intrinsic(define: Callable[..., Any]) -> Any:
    """A function for kernels whose code `define` generates: see Numba's `intrinsic`.

    Import Numba and llvmlite.ir inside `define`: most processes do without.
    """
    return _numba.extending.intrinsic(define) if COMPILING else define


def external(name: str, signature: str) -> Any:
    """A C function of this process for kernels; signature as Numba writes it."""
    if not COMPILING:
        return None
    arguments, result = _numba.core.sigutils.normalize_signature(signature)
    return _numba.types.ExternalFunction(name, _numba.core.typing.signature(result, *arguments))
