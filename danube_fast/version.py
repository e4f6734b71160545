"""The version of this package, without importing the rest of it."""

from __future__ import annotations

__all__ = ["VERSION"]

VERSION = "0.1.0"
