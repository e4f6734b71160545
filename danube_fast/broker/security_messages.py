"""Messages between the processes of one broker by which each of them knows who may do what.

    worker ------ FindSecurity, page by page ----------> coordinator
           <----- SecurityChanged, behind each change ---
           <----- SecurityConfirmed, every few seconds --
    sign-on ----- AddSignOns ---------------------------> coordinator --SecurityChanged--> all, and their answers
            <---- answer ------------------------------------'
    sign-on ----- IssuersRead, SignOnFailed, SignOnsTold -> coordinator
           <----- UseServerKey --------------------------

A record is JSON, as the metadata store keeps it (`danube_fast/security/records.py`).
"""

from __future__ import annotations

import msgspec

from danube_fast.broker.message import Message

__all__ = [
    "AddSignOns",
    "FindSecurity",
    "IssuersRead",
    "SecurityChanged",
    "SecurityConfirmed",
    "SecurityPage",
    "SignOnFailed",
    "SignOnsAdded",
    "SignOnsTold",
    "UseServerKey",
]


class SecurityPage(msgspec.Struct, frozen=True):
    """Some records, in the order of their keys."""

    version: int
    records: list[bytes]
    last: str
    """Key of the last one; empty: there are no more."""
    is_settling: bool = False
    """Whether the coordinator has started again, and may not have heard of all sign-ons."""


class FindSecurity(Message, frozen=True):
    """Ask for records behind a key; from then on the asker is told of changes."""

    after: str
    answer = SecurityPage


class SecurityChanged(Message, frozen=True):
    """Tell of a change: records that are new or different, and keys of those that are gone. A notice, or a call that
    is answered when the copy has the change."""

    version: int
    previous: int
    """The version before; a copy of another one has missed something."""
    records: list[bytes]
    removed: list[str]


class SecurityConfirmed(Message, frozen=True):
    """Tell that this is the newest version still. A notice."""

    version: int


class SignOnsAdded(msgspec.Struct, frozen=True):
    """Outcomes of `AddSignOns`, in its order: the code of an error and its text, or 0."""

    codes: list[int]
    texts: list[str]


class AddSignOns(Message, frozen=True):
    """Let keys in that tokens and API keys have vouched for, or refuse them one by one; answered when workers know them."""

    records: list[bytes]
    entries: list[str]
    """Digests of the entries of issuers that have just vouched for them, one for each; empty: no issuer has, or they are
    told again."""
    answer = SignOnsAdded


class SignOnsTold(Message, frozen=True):
    """Tell a coordinator that it has heard of all sign-ons by now that were there when it started. A notice."""


class SignOnFailed(Message, frozen=True):
    """Tell why the process of sign-on ends by itself. A notice."""

    fault: str


class IssuersRead(Message, frozen=True):
    """Tell whether the newest file of trusted issuers is in use: why it is not, or nothing; and which entries are in use.
    The coordinator ends the sign-ons of those that are gone or differ from what is stored. Answered when that is durable."""

    fault: str
    issuers: dict[str, str] | None = {}
    """Digests of their entries, by name; None: no file could be used yet, and what is stored stays."""
    port_fault: str = ""
    """Why the port of sign-on takes no connections; empty: it does."""


class UseServerKey(Message, frozen=True):
    """Ask a worker to have the server key that is in use now on its port. Answered with the public key that it has."""

    public: str
    answer = str
