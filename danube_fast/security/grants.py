"""Grants: the scopes at which roles are bound to one subject, and whether they cover a resource.

    literal scopes    text -> role names            looked up
    globs             by their literal namespace    scanned: few for one resource

A role is a name, whose permissions are a mask of bits that the caller has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from danube_fast.security.scopes import (
    NAMESPACE_PREFIX,
    SUBJECT_PREFIX,
    SYSTEM_NAMESPACE,
    Glob,
    ScopeKind,
    parse_scope,
)
from danube_fast.types import AUDIT_TOPIC, Permission

__all__ = ["BITS", "Grants", "Target", "mask_of", "target_of"]

BITS: dict[str, int] = {permission: 1 << i for i, permission in enumerate(Permission)}
_LOOKUP = BITS[Permission.LOOKUP]
_CONSUME = BITS[Permission.CONSUME]
_PRODUCE = BITS[Permission.PRODUCE]
_MANAGE_CLUSTER = BITS[Permission.MANAGE_CLUSTER]
_ON_SUBSCRIPTION = _CONSUME | _LOOKUP
"""All that a scope with a subscription grants on it."""
_NEVER = 1 << len(BITS)
"""In no mask."""
_AUDIT_BITS = {
    BITS[Permission.PRODUCE]: _NEVER,
    BITS[Permission.MANAGE_TOPIC]: _NEVER,
    _CONSUME: _CONSUME | BITS[Permission.MANAGE_CLUSTER],
}
"""Permissions on the topic of the audit log: the broker alone writes it, and no one changes or deletes it."""

# Longer than names of topics: a partition's name has an index behind it. What is no name is covered
# by cluster scope alone.
_TOPIC = re.compile(r"/([A-Za-z0-9_.-]+)/([A-Za-z0-9_.-]+)(?:#(.+))?", re.DOTALL)
_NAMESPACE = re.compile(r"[A-Za-z0-9_.-]+")

_ANY_NAMESPACE = "*"
"""Bucket of globs whose namespace has a wildcard."""


class Target(NamedTuple):
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

    def covers(self, target: Target) -> bool:
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


class Grants:
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

    def covers(self, target: Target, masks: Mapping[str, int]) -> bool:
        """Whether a scope below the cluster grants what is wanted. Flat, for speed: most of a check is here."""
        bit = target.bit
        for text in target.literals:
            roles = self.literals.get(text)
            if roles is not None:
                for role in roles:
                    if masks.get(role, 0) & bit:
                        return True
        if not self.patterns:
            return False
        begins, topic_begins = target.path.startswith, target.topic.startswith
        for name in target.buckets:
            bucket = self.patterns.get(name)
            if bucket is None:
                continue
            for pattern in bucket.values():
                if begins(pattern.prefix) and topic_begins(pattern.topic_prefix):
                    for role in pattern.roles:
                        if masks.get(role, 0) & bit and pattern.covers(target):
                            return True
        return False

    def scopes(self, permission: Permission, masks: Mapping[str, int]) -> list[str]:
        """Return the scopes that grant a permission; one of a subscription may stand there as `/namespace/topic#`, too."""
        bit = BITS[permission]
        found = [text for text, roles in self.literals.items() if _grants(roles, masks, bit)]
        for bucket in self.patterns.values():
            found += [text for text, each in bucket.items() if _grants(each.roles, masks, bit)]
        return found


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


def target_of(resource: str, bit: int) -> Target:
    """Take a resource apart, and say which scopes cover it."""
    if resource.startswith("/"):
        return _topic_target(resource, bit)
    if resource.startswith(NAMESPACE_PREFIX):
        namespace = resource[len(NAMESPACE_PREFIX) :]
        if _NAMESPACE.fullmatch(namespace):
            cluster_bits = _cluster_bits(namespace, bit)
            return Target(
                bit, cluster_bits, (resource,), _buckets(namespace), f"/{namespace}/", namespace
            )
    elif resource.startswith(SUBJECT_PREFIX):
        subject = resource[len(SUBJECT_PREFIX) :]
        return Target(bit, bit, (resource,), (SUBJECT_PREFIX,), subject)
    return Target(bit, bit)


def _topic_target(resource: str, bit: int) -> Target:
    found = _TOPIC.fullmatch(resource)
    if found is None:
        # no topic, so that no scope below the cluster covers it; `system` stays protected all the same
        return Target(bit, _cluster_bits(resource.split("/")[1], bit))
    namespace, topic, subscription = found.groups(default="")
    if f"/{namespace}/{topic}" == AUDIT_TOPIC:
        # no binding to it, to its namespace or to a subscription of it gives anything
        return Target(bit, _AUDIT_BITS.get(bit, bit))
    literals: tuple[str, ...]
    if not subscription:
        literals = (f"{NAMESPACE_PREFIX}{namespace}", resource)
        if bit == _LOOKUP:
            literals = (*literals, _lookup_key(resource))
    else:
        literals = (f"{NAMESPACE_PREFIX}{namespace}", f"/{namespace}/{topic}")
        if bit & _ON_SUBSCRIPTION:
            literals = (*literals, resource)
    return Target(
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


def mask_of(permissions: Iterable[Permission]) -> int:
    """Return the bits of some permissions."""
    mask = 0
    for permission in permissions:
        mask |= BITS[permission]
    return mask


def _grants(roles: Iterable[str], masks: Mapping[str, int], bit: int) -> bool:
    """Whether one of the roles has a permission."""
    return any(masks.get(role, 0) & bit for role in roles)
