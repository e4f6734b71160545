"""Where danube-fast refuses to run: in subinterpreters, and in builds without a GIL.

Kernels read and make Python objects by their addresses, as they lie in ordinary builds, and the GIL keeps others
away meanwhile. They are loaded once in a process, for its main interpreter; NumPy does not serve others either.
"""

from __future__ import annotations

import importlib
import sysconfig

from danube_fast.errors import FailedPrecondition

__all__ = ["check_interpreter", "is_free_threaded", "is_subinterpreter"]

_MODULES = ("_interpreters", "_xxsubinterpreters")
"""The one since Python 3.13, and the one before. What makes subinterpreters without either, as mod_wsgi in a Python
that leaves both out, is not noticed."""


def is_free_threaded() -> bool:
    """Tell whether this Python was built without a GIL; its objects lie otherwise even if it runs with one."""
    return bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def is_subinterpreter() -> bool:
    """Tell whether the caller runs in another interpreter than the main one of its process."""
    for name in _MODULES:
        try:
            interpreters = importlib.import_module(name)
        except ImportError:
            continue
        return bool(interpreters.get_current() != interpreters.get_main())
    return False


def check_interpreter() -> None:
    """Raise FailedPrecondition where kernels cannot run."""
    if is_free_threaded():
        raise FailedPrecondition(
            "this is a free-threaded build of Python, and danube-fast's kernels rely on the GIL; use the ordinary build "
            "of the same version, and processes for more than one core"
        )
    if is_subinterpreter():
        raise FailedPrecondition(
            "this is a subinterpreter, and danube-fast's kernels serve only the main interpreter of a process; use "
            "processes, such as multiprocessing with spawn (under mod_wsgi: WSGIApplicationGroup %{GLOBAL})"
        )
