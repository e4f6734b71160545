"""Scopes: where a binding grants its role. Texts that are parsed once, and globs that match in bounded time.

    cluster                 everything
    namespace:GLOB          namespaces, their topics, the subscriptions of these
    /GLOB/GLOB              topics and their subscriptions
    /GLOB/GLOB#GLOB         subscriptions
    subject:GLOB            subjects of schemas

In a GLOB '*' stands for any characters and '?' for one, never for '/' or '#'; all else is literal.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from typing import NamedTuple

from danube_fast.errors import InvalidArgument
from danube_fast.types import CLUSTER, SYSTEM_NAMESPACE
from danube_fast.visible import narrowest

__all__ = [
    "NAMESPACE_PREFIX",
    "SUBJECT_PREFIX",
    "SYSTEM_NAMESPACE",
    "Glob",
    "Scope",
    "ScopeKind",
    "front_of",
    "parse_scope",
    "topic_fronts",
]

NAMESPACE_PREFIX = "namespace:"
SUBJECT_PREFIX = "subject:"

_SEGMENT_GLOB = re.compile(r"[A-Za-z0-9_.*?-]{1,128}\Z")
# Names of subscriptions and subjects are freer: printable ASCII but blanks, and what separates or
# looks like a character class or an escape.
_NAME_GLOB = re.compile(r"[!-~]{1,256}\Z")
_NOT_IN_NAME_GLOB = frozenset("/#[]\\")


class ScopeKind(enum.Enum):
    """Kinds of scopes, by the parts that they have."""

    CLUSTER = enum.auto()
    NAMESPACE = enum.auto()
    TOPIC = enum.auto()
    SUBSCRIPTION = enum.auto()
    SUBJECT = enum.auto()


class Scope(NamedTuple):
    """A scope that has been checked. Parts that its kind does not have are empty."""

    kind: ScopeKind
    text: str
    namespace: str = ""
    topic: str = ""
    subscription: str = ""
    subject: str = ""

    @property
    def is_namespace_literal(self) -> bool:
        """Whether the scope names one namespace."""
        return "*" not in self.namespace and "?" not in self.namespace


def parse_scope(text: str) -> Scope:
    """Check `text` and take it apart. Raises InvalidArgument that says what a scope looks like."""
    if not isinstance(text, str):
        raise _not_a_scope(text)
    if text == CLUSTER:
        return Scope(ScopeKind.CLUSTER, text)
    if text.startswith(NAMESPACE_PREFIX):
        namespace = text[len(NAMESPACE_PREFIX) :]
        if _SEGMENT_GLOB.match(namespace):
            return Scope(ScopeKind.NAMESPACE, text, namespace)
    elif text.startswith(SUBJECT_PREFIX):
        subject = text[len(SUBJECT_PREFIX) :]
        if _is_name_glob(subject):
            return Scope(ScopeKind.SUBJECT, text, subject=subject)
    elif text.startswith("/"):
        path, mark, subscription = text.partition("#")
        parts = path.split("/")
        if len(parts) == 3 and _SEGMENT_GLOB.match(parts[1]) and _SEGMENT_GLOB.match(parts[2]):
            if not mark:
                return Scope(ScopeKind.TOPIC, text, parts[1], parts[2])
            if _is_name_glob(subscription):
                return Scope(ScopeKind.SUBSCRIPTION, text, parts[1], parts[2], subscription)
    raise _not_a_scope(text)


def front_of(scope: str) -> str:
    """Return how all begin that a checked scope covers, of topics and subscriptions."""
    if scope == CLUSTER:
        return ""
    front = scope.partition("*")[0].partition("?")[0]
    namespace = front.removeprefix(NAMESPACE_PREFIX)
    if namespace == front:
        return front
    return f"/{namespace}" if len(front) < len(scope) else f"/{namespace}/"


def topic_fronts(scopes: Iterable[str]) -> tuple[str, ...]:
    """Return how the names of all topics begin that checked scopes may cover; see `danube_fast/visible.py`."""
    topics = [scope.partition("#")[0] for scope in scopes if not scope.startswith(SUBJECT_PREFIX)]
    return narrowest(map(front_of, topics))


class Glob:
    """A pattern of '*' and '?' over one segment.

    Written without regular expressions: compiling one takes longer than a put may, and a backtracking
    match of many stars takes time without bound.
    """

    __slots__ = ("_ends_free", "_first", "_last", "_middle", "_size", "_starred", "prefix")

    def __init__(self, text: str) -> None:
        pieces = text.split("*")
        self._starred = len(pieces) > 1
        self._first = pieces[0]
        self._last = pieces[-1] if self._starred else ""
        self._middle = tuple(piece for piece in pieces[1:-1] if piece)
        self._size = len(text) - len(pieces) + 1
        self.prefix = self._first.partition("?")[0]
        """Literal characters in front; most texts that do not match differ here."""
        self._ends_free = self._starred and self._first == self.prefix and not self._last
        self._ends_free = self._ends_free and not self._middle

    def matches(self, text: str) -> bool:
        """Whether the whole of `text` fits."""
        if not text.startswith(self.prefix) or "/" in text or "#" in text:
            return False
        if self._ends_free:
            return True
        size = len(text)
        if size < self._size or (size > self._size and not self._starred):
            return False
        end = size - len(self._last)
        if not _fits(self._first, text, 0) or not _fits(self._last, text, end):
            return False
        # The leftmost place is as good as any: what follows has the most room.
        start = len(self._first)
        for piece in self._middle:
            found = _find(piece, text, start, end)
            if found < 0:
                return False
            start = found + len(piece)
        return True


def _is_name_glob(text: str) -> bool:
    return _NAME_GLOB.match(text) is not None and _NOT_IN_NAME_GLOB.isdisjoint(text)


def _not_a_scope(text: object) -> InvalidArgument:
    return InvalidArgument(
        f"{text!a:.300} is not a scope; write cluster, namespace:NAME, /NAMESPACE/TOPIC, "
        "/NAMESPACE/TOPIC#SUBSCRIPTION or subject:NAME, each name of 1 to 128 letters, digits, '_', "
        "'.' or '-' (subscriptions and subjects: 256 printable ASCII characters but blank, '/', '#', "
        "'[', ']' and '\\'), with '*' and '?' where you like"
    )


def _fits(piece: str, text: str, start: int) -> bool:
    """Whether `piece`, which may have '?', stands in `text` at `start`."""
    if "?" not in piece:
        return text.startswith(piece, start)
    if len(text) - start < len(piece):
        return False
    return all(mark in ("?", text[start + i]) for i, mark in enumerate(piece))


def _find(piece: str, text: str, start: int, end: int) -> int:
    """Leftmost place of `piece`, which may have '?', in `text[start:end]`; -1 without one."""
    if "?" not in piece:
        return text.find(piece, start, end)
    for place in range(start, end - len(piece) + 1):
        if _fits(piece, text, place):
            return place
    return -1
