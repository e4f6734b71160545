"""What a simulation raises when the broker broke a promise."""

from __future__ import annotations

__all__ = ["Violation"]


class Violation(Exception):
    """A promise was broken; the text says which, and where."""
