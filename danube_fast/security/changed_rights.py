"""Whose rights may have come or gone: noted with each change of a policy's records, taken when what is open is looked at again.

binding                                    --> its subject, and the one before
user, credential, API key, other groups    --> the user
role, revocation, many at once             --> everyone
"""

from __future__ import annotations

from danube_fast.security.records import (
    ApiKey,
    Binding,
    Credential,
    Principal,
    Record,
    Revocation,
    SignOn,
)

__all__ = ["ChangedRights", "Subjects"]

Subjects = frozenset[str] | None
"""Subjects of bindings (`user:NAME`, `group:NAME`); None: all."""
SUBJECTS_MAX = 1000
"""More are everyone: nothing takes them from some copies."""


class ChangedRights:
    """Changes of one policy. A new sign-on is none, nor is one that ends: its session does."""

    def __init__(self) -> None:
        self.count = 0
        """Counts changes by which rights may have come or gone."""
        self._subjects: set[str] | None = set()

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
        self._subjects = None
        self.count += 1

    def take(self) -> Subjects:
        """Return whose rights may have changed since the last time."""
        taken, self._subjects = self._subjects, set()
        return None if taken is None else frozenset(taken)

    def _note(self, record: Record) -> None:
        subjects = self._subjects
        if subjects is None:
            return
        match record:
            case Binding(subject=subject):
                subjects.add(subject)
            case Principal(name=name):
                subjects.add(f"user:{name}")
            case Credential() | ApiKey() | SignOn():
                subjects.add(f"user:{record.principal}")
            case _:
                self._subjects = None
        if len(subjects) > SUBJECTS_MAX:
            self._subjects = None
