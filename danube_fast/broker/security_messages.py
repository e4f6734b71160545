"""Messages between the processes of one broker by which each of them knows who may do what.

    worker ------ FindSecurity, page by page ----------> coordinator
           <----- SecurityChanged, behind each change ---
           <----- SecurityConfirmed, every few seconds --

A record is JSON, as the metadata store keeps it (`danube_fast/security/records.py`).
"""

from __future__ import annotations

import msgspec

from danube_fast.broker.message import Message

__all__ = ["FindSecurity", "SecurityChanged", "SecurityConfirmed", "SecurityPage"]


class SecurityPage(msgspec.Struct, frozen=True):
    """Some records, in the order of their keys."""

    version: int
    records: list[bytes]
    last: str
    """Key of the last one; empty: there are no more."""


class FindSecurity(Message, frozen=True):
    """Ask for records behind a key; from then on the asker is told of changes."""

    after: str
    answer = SecurityPage


class SecurityChanged(Message, frozen=True):
    """Tell of a change: records that are new or different, and keys of those that are gone. A notice."""

    version: int
    previous: int
    """The version before; a copy of another one has missed something."""
    records: list[bytes]
    removed: list[str]


class SecurityConfirmed(Message, frozen=True):
    """Tell that this is the newest version still. A notice."""

    version: int
