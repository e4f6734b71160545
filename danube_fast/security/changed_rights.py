"""Whose rights may have come or gone: noted with each change of a policy's records, taken when what is open is looked at again.

binding                                    --> its subject, inside its scope; and those before
user, credential, API key, other groups    --> the user, everywhere
role, revocation, many at once             --> everyone
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from danube_fast.security.records import (
    ApiKey,
    Binding,
    Credential,
    Principal,
    Record,
    Revocation,
    SignOn,
)
from danube_fast.security.scopes import front_of
from danube_fast.types import CLUSTER

__all__ = ["ChangedRights", "Changes"]

NOTED_MAX = 1000
"""More are everyone: nothing takes them from some copies."""


class Changes(NamedTuple):
    """Whose rights may have changed, and where."""

    fronts: Mapping[str, list[str]] = {}
    """By subject of bindings (`user:NAME`, `group:NAME`), how the names of such topics begin."""
    has_groups: bool = False


class ChangedRights:
    """Changes of one policy. A new sign-on is none, nor is one that ends: its session does."""

    def __init__(self) -> None:
        self.count = 0
        """Counts changes by which rights may have come or gone."""
        self._noted: set[tuple[str, str]] | None = set()
        """Subjects and scopes."""

    def put(self, old: Record | None, record: Record) -> None:
        """Note that a record is new, or has replaced the old one of its key."""
        if isinstance(record, SignOn) and (
            not isinstance(old, SignOn) or old.groups == record.groups
        ):
            return
        self._note(record)
        if old is not None:
            self._note(old)
        self.count += 1

    def removed(self, record: Record) -> None:
        """Note that a record is gone."""
        if not isinstance(record, SignOn | Revocation):
            self._note(record)
            self.count += 1

    def all(self) -> None:
        """Note that rights of everyone may be others."""
        self._noted = None
        self.count += 1

    def take(self) -> Changes | None:
        """Return whose rights may have changed since the last time, and where; None: all of everyone."""
        taken, self._noted = self._noted, set()
        if taken is None:
            return None
        fronts: dict[str, list[str]] = {}
        has_groups = False
        for subject, scope in taken:
            fronts.setdefault(subject, []).append(front_of(scope))
            has_groups = has_groups or not subject.startswith("user:")
        return Changes(fronts, has_groups)

    def _note(self, record: Record) -> None:
        noted = self._noted
        if noted is None:
            return
        match record:
            case Binding():
                noted.add((record.subject, record.scope))
            case Principal():
                noted.add((f"user:{record.name}", CLUSTER))
            case Credential() | ApiKey() | SignOn():
                noted.add((f"user:{record.principal}", CLUSTER))
            case _:
                self._noted = None
        if len(noted) > NOTED_MAX:
            self._noted = None
