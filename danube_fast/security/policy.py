"""Policy: all records in memory, and the answer to who may do what. Default deny.

    subject ("user:alice", "group:ops")
      +-- literal scopes    text -> role names            looked up
      +-- globs, by their literal namespace               scanned: few for one resource
    role name -> mask of permissions                      resolved when asked

A put or a remove touches one record. Bindings keep the names of roles, not their permissions: a change of
a role counts at once, and a binding whose role is missing grants nothing until the role is made.

Nothing here reads a clock, a disk or a socket. A policy is not safe to change in one thread while another
asks; each process has a copy of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from danube_fast.clock import SECOND_NS
from danube_fast.errors import PermissionDenied
from danube_fast.security.authentication import Identity
from danube_fast.security.changed_rights import ChangedRights
from danube_fast.security.grants import BITS, Grants, mask_of, target_of
from danube_fast.security.ordered_keys import OrderedKeys
from danube_fast.security.records import (
    API_KEY_SOURCE,
    BUILTIN_ROLES,
    ApiKey,
    Binding,
    Credential,
    Principal,
    Record,
    Revocation,
    Role,
    SignOn,
    check_key,
    check_record,
    key_of,
)
from danube_fast.security.sign_ons import KEPT_MAX, SignOns
from danube_fast.types import CLUSTER, Permission

__all__ = ["Policy", "PolicyAuthorizer"]

ENDED_NS = 5 * SECOND_NS
"""How long a sign-on is known that has ended."""


class Policy:
    """Holds all records and decides."""

    def __init__(self) -> None:
        self.version = 0
        """Version of the records. Set by the caller that feeds them; never changed here."""
        self._records: dict[str, Record] = {}
        self._keys: OrderedKeys | None = None
        """Of the records, once a page was asked for: copies of workers need none."""
        self._subjects: dict[str, tuple[str, ...]] = {}
        """Subjects of bindings that each enabled principal goes by."""
        self._credentials: dict[str, Credential] = {}
        self.sign_ons = SignOns(self._records, self._subjects)
        self.changes = ChangedRights()
        self._masks: dict[str, int] = {}
        self._grants: dict[str, Grants] = {}
        self._add_builtin_roles()

    def __len__(self) -> int:
        return len(self._records)

    def put(self, record: Record) -> None:
        """Add a record, or replace the one of its key. Raises InvalidArgument and changes nothing."""
        check_record(record)
        self.take(record)

    def take(self, record: Record) -> None:
        """Put a record that was checked before it was stored or sent."""
        key = key_of(record)
        old = self._records.get(key)
        if isinstance(old, Binding):
            self._unbind(old)
        self._records[key] = record
        if old is None and self._keys is not None:
            self._keys.add(key)
        match record:
            case Binding():
                grants = self._grants.get(record.subject)
                if grants is None:
                    grants = self._grants[record.subject] = Grants()
                grants.add(record.scope, record.role)
            case Role():
                self._masks[record.name] = mask_of(record.permissions)
            case Principal():
                if record.disabled:
                    self._subjects.pop(record.name, None)
                else:  # in one step: another thread may be asking
                    groups = [f"group:{group}" for group in record.groups]
                    self._subjects[record.name] = (f"user:{record.name}", *groups)
            case Credential():
                self._credentials[record.credential] = record
            case SignOn():
                self.sign_ons.put(record)
                while self.sign_ons.weight > KEPT_MAX:
                    self.discard(self.sign_ons.first_to_end())
            case Revocation():
                self._remove_all(self.sign_ons.revoke(record))
        self.changes.put(old, record)

    def remove(self, key: str) -> bool:
        """Discard the record of that key; whether there was one. Raises InvalidArgument for built-in roles."""
        check_key(key)
        return self.discard(key)

    def discard(self, key: str) -> bool:
        """Remove the record of that key, and sign-ons that were made by it; whether there was one."""
        record = self._records.pop(key, None)
        if record is None:
            return False
        if self._keys is not None:
            self._keys.remove(key)
        match record:
            case Binding():
                self._unbind(record)
            case Role():
                del self._masks[record.name]
            case Principal():
                self._subjects.pop(record.name, None)
                self._remove_all(self.sign_ons.held_by(key))
            case Credential():
                del self._credentials[record.credential]
            case ApiKey():
                self._remove_all(self.sign_ons.held_by(f"{API_KEY_SOURCE}{record.id}"))
            case SignOn():
                self.sign_ons.discard(record)
        self.changes.removed(record)
        return True

    def _remove_all(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.discard(key)

    def purge(self, now_ns: int) -> None:
        """Remove the sign-ons that have ended `ENDED_NS` before that wall time: until then their sessions are sent away,
        and one that is renewed at the last moment with other groups counts as a change."""
        self._remove_all(self.sign_ons.removable(now_ns - ENDED_NS))

    def clear(self) -> None:
        """Remove all records."""
        self._records.clear()
        self._keys = None
        self._subjects.clear()
        self._credentials.clear()
        self._grants.clear()
        self._masks.clear()
        self.changes.all()
        self.sign_ons = SignOns(self._records, self._subjects)
        self._add_builtin_roles()

    def get(self, key: str) -> Record | None:
        """Return the record of that key. Built-in roles are no records."""
        return self._records.get(key)

    def page(self, after: str, limit: int) -> list[Record]:
        """Return at most `limit` records behind the key `after`, in the order of keys; "" starts."""
        if self._keys is None:
            self._keys = OrderedKeys(sorted(self._records))
        return [self._records[key] for key in self._keys.behind(after, max(limit, 0))]

    def all_keys(self) -> list[str]:
        """Return the keys of all records, in any order."""
        return list(self._records)

    def principal_of(self, credential: str, now_ns: int) -> str | None:
        """Return the principal that a credential proves at that wall time, None if it proves none."""
        record = self._credentials.get(credential)
        if record is None:
            return self.sign_ons.principal_of(credential, now_ns)
        if record.expires_ns and now_ns >= record.expires_ns:
            return None
        return record.principal if record.principal in self._subjects else None

    def subjects_of(self, principal: str) -> tuple[str, ...] | None:
        """Return the subjects of bindings that a principal goes by; None: it may do nothing."""
        subjects = self._subjects.get(principal)
        if isinstance(principal, Identity):
            return self.sign_ons.subjects_of(principal, subjects)
        return subjects

    def permits(
        self, principal: str, permission: Permission, resource: str, groups: Sequence[str] = ()
    ) -> bool:
        """Whether a principal has a permission on a resource; `groups` adds to those of its record, and so do those that
        the sign-on of an Identity has claimed.

        Resources are "cluster", "namespace:NAME", "/namespace/topic", "/namespace/topic#subscription",
        "subject:NAME"; only cluster scope covers any other text.
        """
        subjects = self.subjects_of(principal)
        if subjects is None:
            return False
        if groups:
            subjects = (*subjects, *[f"group:{group}" for group in groups])
        target = target_of(resource, BITS[permission])
        cluster_bits, masks = target.cluster_bits, self._masks
        cluster_mask = 0
        for subject in subjects:
            grants = self._grants.get(subject)
            if grants is None:
                continue
            roles = grants.literals.get(CLUSTER)
            if roles is not None:
                for role in roles:
                    cluster_mask |= masks.get(role, 0)
                if cluster_mask & cluster_bits == cluster_bits:
                    return True
            if grants.covers(target, masks):
                return True
        return False

    def scopes_of(self, subjects: Iterable[str], permission: Permission) -> list[str]:
        """Return the scopes within which some subjects have a permission; see `Grants.scopes`."""
        found: list[str] = []
        for subject in subjects:
            grants = self._grants.get(subject)
            if grants is not None:
                found += grants.scopes(permission, self._masks)
        return found

    def _unbind(self, binding: Binding) -> None:
        grants = self._grants[binding.subject]
        grants.discard(binding.scope, binding.role)
        if not grants.literals and not grants.patterns:
            del self._grants[binding.subject]

    def _add_builtin_roles(self) -> None:
        for role in BUILTIN_ROLES.values():
            self._masks[role.name] = mask_of(role.permissions)


class PolicyAuthorizer:
    """Asks a policy. Says the same whether the resource exists or not."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def authorize(self, principal: str, permission: Permission, resource: str) -> None:
        """Return if the policy permits; raises PermissionDenied that says how to change that."""
        if not self._policy.permits(principal, permission, resource):
            raise PermissionDenied(
                f"{_one_line(principal)} may not {permission} {_one_line(resource)}; an administrator "
                "can bind a role: danube-fast security bindings add --help says how"
            )


def _one_line(text: str) -> str:
    """Text of a client, safe to stand in a log."""
    return text if text.isprintable() else repr(text)
