"""The base of all messages between the processes of one broker."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

__all__ = ["Message"]


class Message(msgspec.Struct, frozen=True):
    """One operation, with its arguments."""

    answer: ClassVar[Any] = None
    """Type of the answer's value; None: there is nothing to say but that it is done."""
