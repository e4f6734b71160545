"""Compiles kernels for the image: from Python to LLVM code that is not optimised yet, and no further.

Numba compiles a function for its own process: with wrappers for Python, linked with copies of all it calls,
optimised, turned into machine code and made callable. In the process that builds the image nothing is called,
and the image is linked and optimised as a whole, so each kernel would pay for all that in vain.

    @kernel              Kernel(name, signature)     all that other kernels need: their calls name its symbol
    all are declared     compiled(kernel)            Numba's types and lowering; one LLVM function

This needs Numba's compiler (`compile_extra`, as `numba.pycc` calls it), its code libraries and its descriptors
of external functions; the tests of the image notice at once if a new Numba changes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numba.core.codegen
import numba.core.compiler
import numba.core.compiler_lock
import numba.core.funcdesc
import numba.core.registry
import numba.core.sigutils
import numba.core.typing

from danube_fast.errors import Internal

__all__ = ["Kernel", "compiled"]

_core: Any = numba.core
_target: Any = _core.registry.cpu_target
_OPTIONS = {
    "nopython": True,
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}


class Kernel:
    """A kernel while the image is built. Other kernels call it by its symbol; Python may not."""

    def __init__(self, function: Callable[..., Any], signature: str, *, nogil: bool) -> None:
        self.name = f"{function.__module__}.{function.__qualname__}"
        self.function = function
        self.nogil = nogil
        self.arguments, self.result = _core.sigutils.normalize_signature(signature)
        if self.result is None:
            raise Internal(f"{self.name}: the signature does not say what it returns")
        whole = _core.typing.signature(self.result, *self.arguments)
        template = _core.typing.make_concrete_template(self.name, key=self, signatures=[whole])
        self._numba_type_ = numba.types.Function(template)  # what Numba takes it for in a kernel
        called = _core.funcdesc.ExternalFunctionDescriptor(self.symbol, self.result, self.arguments)
        _target.target_context.insert_user_function(self, called)

    @property
    def symbol(self) -> str:
        """Name of its LLVM function: i32 (result, fault, arguments ...)."""
        return f"kernel:{self.name}"

    def __repr__(self) -> str:
        return self.name

    def __call__(self, *arguments: object) -> NoReturn:
        """Refuse: there is no machine code yet."""
        raise Internal(f"{self.name} was called while the kernel image is built")


class _Library(_core.codegen.CPUCodeLibrary):  # type: ignore[misc]
    """Code of one kernel alone. Numba's would get copies of all it calls, and optimise those with it."""

    def add_linking_library(self, library: Any) -> None:
        """Keep what the kernel calls of Numba."""
        self._linking_libraries.append(library)

    def add_llvm_module(self, ll_module: Any) -> None:
        """Take the code as it is."""
        self._final_module.link_in(ll_module)

    def whole(self) -> Any:
        """The LLVM module, with those functions of Numba that it calls."""
        module = self._final_module
        missing = {function.name for function in module.functions if function.is_declaration}
        for library in self._linking_libraries:
            called = library._get_module_for_linking()
            if any(
                not known.is_declaration and known.name in missing for known in called.functions
            ):
                module.link_in(called, preserve=True)
        return module


def compiled(kernel: Kernel) -> Any:
    """The LLVM module of one kernel. It declares other kernels, and is not optimised."""
    flags = _core.compiler.Flags()
    _target.options.parse_as_flags(flags, _OPTIONS)
    flags.no_compile = True
    context = _target.target_context
    library = _Library(context.codegen(), kernel.name)
    with _core.compiler_lock.global_compiler_lock:
        result = _core.compiler.compile_extra(
            _target.typing_context, context, kernel.function, kernel.arguments, kernel.result,
            flags, locals={}, library=library,
        )  # fmt: skip
        module = library.whole()
    module.get_function(result.fndesc.llvm_func_name).name = kernel.symbol
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name != kernel.symbol:
            value.linkage = "internal"  # another process may give the same name to something else
    return module
