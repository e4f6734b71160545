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

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from danube_fast.clock import SECOND_NS
from danube_fast.errors import PermissionDenied
from danube_fast.security.authentication import Identity
from danube_fast.security.changed_rights import ChangedRights
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
from danube_fast.security.scopes import (
    NAMESPACE_PREFIX,
    SUBJECT_PREFIX,
    SYSTEM_NAMESPACE,
    Glob,
    ScopeKind,
    parse_scope,
)
from danube_fast.security.sign_ons import KEPT_MAX, SignOns
from danube_fast.types import AUDIT_TOPIC, CLUSTER, Permission

__all__ = ["Policy", "PolicyAuthorizer"]

ENDED_NS = 5 * SECOND_NS
"""How long a sign-on is known that has ended."""
_BITS: dict[str, int] = {permission: 1 << i for i, permission in enumerate(Permission)}
_LOOKUP = _BITS[Permission.LOOKUP]
_CONSUME = _BITS[Permission.CONSUME]
_PRODUCE = _BITS[Permission.PRODUCE]
_MANAGE_CLUSTER = _BITS[Permission.MANAGE_CLUSTER]
_ON_SUBSCRIPTION = _CONSUME | _LOOKUP
"""All that a scope with a subscription grants on it."""
_NEVER = 1 << len(_BITS)
"""In no mask."""
_AUDIT_BITS = {
    _BITS[Permission.PRODUCE]: _NEVER,
    _BITS[Permission.MANAGE_TOPIC]: _NEVER,
    _CONSUME: _CONSUME | _BITS[Permission.MANAGE_CLUSTER],
}
"""Permissions on the topic of the audit log: the broker alone writes it, and no one changes or deletes it."""

# Longer than names of topics: a partition's name has an index behind it. What is no name is covered
# by cluster scope alone.
_TOPIC = re.compile(r"/([A-Za-z0-9_.-]+)/([A-Za-z0-9_.-]+)(?:#(.+))?", re.DOTALL)
_NAMESPACE = re.compile(r"[A-Za-z0-9_.-]+")

_ANY_NAMESPACE = "*"
"""Bucket of globs whose namespace has a wildcard."""


class _Target(NamedTuple):
    """A resource together with the permission that is wanted on it."""

    bit: int
    cluster_bits: int
    """Permissions that roles at cluster scope must have, all of them."""
    literals: tuple[str, ...] = ()
    """Literal scopes that cover the resource."""
    buckets: tuple[str, ...] = ()
    """Where globs are that may cover it."""
    path: str = ""
    """Begins with the prefix of every pattern that covers the resource."""
    namespace: str = ""
    topic: str = ""
    subscription: str = ""


class _Pattern:
    """A scope with a wildcard, and the roles bound there. A part that is None fits without a look."""

    __slots__ = (
        "_namespace",
        "_subject",
        "_subscription",
        "_topic",
        "prefix",
        "roles",
        "topic_prefix",
    )

    def __init__(self, text: str) -> None:
        scope = parse_scope(text)
        self.roles: dict[str, int] = {}
        self._namespace = None if scope.is_namespace_literal else Glob(scope.namespace)
        self._topic = Glob(scope.topic) if scope.topic else None
        self._subscription = Glob(scope.subscription) if scope.subscription else None
        self._subject = Glob(scope.subject) if scope.subject else None
        self.topic_prefix = self._topic.prefix if self._topic is not None else ""
        """Literal front of the topics that are covered, as `prefix` may end before it."""
        if self._subject is not None:
            self.prefix = self._subject.prefix
        elif self._namespace is not None:
            self.prefix = f"/{self._namespace.prefix}"
        else:
            self.prefix = f"/{scope.namespace}/{self.topic_prefix}"
        """Literal front of the paths that are covered: most others differ here."""

    def covers(self, target: _Target) -> bool:
        """Whether the scope covers a target in one of whose buckets it is."""
        if self._subject is not None:
            return self._subject.matches(target.path)
        if self._namespace is not None and not self._namespace.matches(target.namespace):
            return False
        if self._topic is None:
            return True
        if not target.topic or not self._topic.matches(target.topic):
            return False
        if self._subscription is None:
            return True
        if not target.subscription:
            return target.bit == _LOOKUP
        return bool(target.bit & _ON_SUBSCRIPTION) and self._subscription.matches(
            target.subscription
        )


class _Grants:
    """Everything bound to one subject. Roles are counted: two bindings may say the same."""

    __slots__ = ("literals", "patterns")

    def __init__(self) -> None:
        self.literals: dict[str, dict[str, int]] = {}
        self.patterns: dict[str, dict[str, _Pattern]] = {}

    def add(self, scope: str, role: str) -> None:
        """Bind a role. A literal scope is not taken apart: most are, and changes cost little."""
        if "*" in scope or "?" in scope:
            bucket = self.patterns.setdefault(_bucket_of(scope), {})
            pattern = bucket.get(scope)
            if pattern is None:
                pattern = bucket[scope] = _Pattern(scope)
            pattern.roles[role] = pattern.roles.get(role, 0) + 1
            return
        for text in _literals_of(scope):
            roles = self.literals.setdefault(text, {})
            roles[role] = roles.get(role, 0) + 1

    def discard(self, scope: str, role: str) -> None:
        """Undo one `add` of the same."""
        if "*" in scope or "?" in scope:
            name = _bucket_of(scope)
            bucket = self.patterns[name]
            _count_down(bucket[scope].roles, role)
            if not bucket[scope].roles:
                del bucket[scope]
            if not bucket:
                del self.patterns[name]
            return
        for text in _literals_of(scope):
            _count_down(self.literals[text], role)
            if not self.literals[text]:
                del self.literals[text]


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
        self._grants: dict[str, _Grants] = {}
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
                    grants = self._grants[record.subject] = _Grants()
                grants.add(record.scope, record.role)
            case Role():
                self._masks[record.name] = _mask_of(record.permissions)
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
        target = _target_of(resource, _BITS[permission])
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
            if self._covers(grants, target):
                return True
        return False

    def _covers(self, grants: _Grants, target: _Target) -> bool:
        """Whether a scope below the cluster grants what is wanted. Flat, for speed: most of a check is here."""
        bit, masks = target.bit, self._masks
        for text in target.literals:
            roles = grants.literals.get(text)
            if roles is not None:
                for role in roles:
                    if masks.get(role, 0) & bit:
                        return True
        if not grants.patterns:
            return False
        begins, topic_begins = target.path.startswith, target.topic.startswith
        for name in target.buckets:
            bucket = grants.patterns.get(name)
            if bucket is None:
                continue
            for pattern in bucket.values():
                if begins(pattern.prefix) and topic_begins(pattern.topic_prefix):
                    for role in pattern.roles:
                        if masks.get(role, 0) & bit and pattern.covers(target):
                            return True
        return False

    def _unbind(self, binding: Binding) -> None:
        grants = self._grants[binding.subject]
        grants.discard(binding.scope, binding.role)
        if not grants.literals and not grants.patterns:
            del self._grants[binding.subject]

    def _add_builtin_roles(self) -> None:
        for role in BUILTIN_ROLES.values():
            self._masks[role.name] = _mask_of(role.permissions)


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


def _mask_of(permissions: Iterable[Permission]) -> int:
    mask = 0
    for permission in permissions:
        mask |= _BITS[permission]
    return mask


def _count_down(roles: dict[str, int], role: str) -> None:
    roles[role] -= 1
    if not roles[role]:
        del roles[role]


def _bucket_of(text: str) -> str:
    scope = parse_scope(text)
    if scope.kind is ScopeKind.SUBJECT:
        return SUBJECT_PREFIX
    return scope.namespace if scope.is_namespace_literal else _ANY_NAMESPACE


def _literals_of(scope: str) -> tuple[str, ...]:
    """Keys of a literal scope; one of a subscription is also found by its topic, for lookups."""
    topic, mark, _ = scope.partition("#")
    return (scope, _lookup_key(topic)) if mark else (scope,)


def _lookup_key(topic: str) -> str:
    """Key under which the scopes of a topic's subscriptions are found. No scope has this text."""
    return f"{topic}#"


def _target_of(resource: str, bit: int) -> _Target:
    """Take a resource apart, and say which scopes cover it."""
    if resource.startswith("/"):
        return _topic_target(resource, bit)
    if resource.startswith(NAMESPACE_PREFIX):
        namespace = resource[len(NAMESPACE_PREFIX) :]
        if _NAMESPACE.fullmatch(namespace):
            cluster_bits = _cluster_bits(namespace, bit)
            return _Target(
                bit, cluster_bits, (resource,), _buckets(namespace), f"/{namespace}/", namespace
            )
    elif resource.startswith(SUBJECT_PREFIX):
        subject = resource[len(SUBJECT_PREFIX) :]
        return _Target(bit, bit, (resource,), (SUBJECT_PREFIX,), subject)
    return _Target(bit, bit)


def _topic_target(resource: str, bit: int) -> _Target:
    found = _TOPIC.fullmatch(resource)
    if found is None:
        # no topic, so that no scope below the cluster covers it; `system` stays protected all the same
        return _Target(bit, _cluster_bits(resource.split("/")[1], bit))
    namespace, topic, subscription = found.groups(default="")
    if f"/{namespace}/{topic}" == AUDIT_TOPIC:
        # no binding to it, to its namespace or to a subscription of it gives anything
        return _Target(bit, _AUDIT_BITS.get(bit, bit))
    literals: tuple[str, ...]
    if not subscription:
        literals = (f"{NAMESPACE_PREFIX}{namespace}", resource)
        if bit == _LOOKUP:
            literals = (*literals, _lookup_key(resource))
    else:
        literals = (f"{NAMESPACE_PREFIX}{namespace}", f"/{namespace}/{topic}")
        if bit & _ON_SUBSCRIPTION:
            literals = (*literals, resource)
    return _Target(
        bit,
        _cluster_bits(namespace, bit),
        literals,
        _buckets(namespace),
        f"/{namespace}/{topic}",
        namespace,
        topic,
        subscription,
    )


def _buckets(namespace: str) -> tuple[str, ...]:
    """Where the globs are that may cover a namespace; wildcards never cover `system`."""
    return (namespace,) if namespace == SYSTEM_NAMESPACE else (namespace, _ANY_NAMESPACE)


def _cluster_bits(namespace: str, bit: int) -> int:
    """Permissions that roles at cluster scope must have: the messages of `system` are not for every operator."""
    if namespace == SYSTEM_NAMESPACE:
        if bit == _PRODUCE:
            return _NEVER
        if bit == _CONSUME:
            return _CONSUME | _MANAGE_CLUSTER
    return bit


def _one_line(text: str) -> str:
    """Text of a client, safe to stand in a log."""
    return text if text.isprintable() else repr(text)
