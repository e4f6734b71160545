"""Errors of a job as ours: Spark's are long texts about Java, in which the one that counts is a line of a traceback.

PythonException: ... danube_fast.errors.DataLoss: offsets 10 to 20 of ... are lost      -> DataLoss
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from danube_fast import errors
from danube_fast.errors import DanubeError, Internal, InvalidArgument

__all__ = ["WriteWarning", "find_own", "translated"]

_OWN = re.compile(r"danube_fast\.errors\.(\w+): (.*)")
_DEPTH_MAX = 20
_WRONG_STATES = ("22", "42")
"""Classes of SQLSTATE, by the standard: data that do not fit, a statement that is wrong."""


class WriteWarning(UserWarning):
    """Rows of a write are not published, or may be published twice."""


def find_own(error: BaseException) -> DanubeError | None:
    """Find the error of ours in one of PySpark's, or in what caused it; None: there is none."""
    at: BaseException | None = error
    for _ in range(_DEPTH_MAX):
        if at is None or isinstance(at, DanubeError):
            return at
        found = _OWN.findall(_text(at))
        if found:
            name, text = found[-1]
            kind = getattr(errors, name, Internal)
            return kind(text.strip())
        at = getattr(at, "_cause", None) or at.__cause__
    return None


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raise errors of ours in place of PySpark's. A statement or data that are wrong are InvalidArgument; what else has
    no error of ours inside is Internal. PySpark's own ask Java for their text, which is gone when the session has ended."""
    try:
        yield
    except Exception as error:
        own = find_own(error)
        if own is error:
            raise
        if own is not None:
            raise own from None
        if getattr(error, "_desc", None):
            kind = InvalidArgument if _state(error).startswith(_WRONG_STATES) else Internal
            raise kind(f"{type(error).__name__}: {_text(error).strip()}") from error
        raise


def _state(error: Any) -> str:
    """SQLSTATE of an error; empty: it has none."""
    return getattr(error, "getSqlState", lambda: "")() or ""


def _text(error: Any) -> str:
    return getattr(error, "_desc", None) or str(error)
