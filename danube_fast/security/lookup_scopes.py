"""Scopes of the names that lists show a principal, as an authorizer of another package gives them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from danube_fast.errors import InvalidArgument
from danube_fast.security.grants import BITS, Grants, target_of
from danube_fast.security.scopes import parse_scope, topic_fronts
from danube_fast.types import CLUSTER, Permission

__all__ = ["PATTERNS_MAX", "SCOPES_MAX", "LookupScopes"]

SCOPES_MAX = 1024
"""Of one principal; wider ones say the same with fewer."""
PATTERNS_MAX = 64
"""Those with wildcards, each of which a list matches with each name."""
_ROLE = "lookup"
_BIT = BITS[Permission.LOOKUP]
_MASKS = {_ROLE: _BIT}


class LookupScopes:
    """Tells what some scopes cover. They are read as those of bindings are: wildcards do not cover `system`, and a scope of
    a subscription covers its topic, too."""

    def __init__(self, scopes: Iterable[str]) -> None:
        """Raises InvalidArgument for what is not a scope, and for too many; TypeError for one text, or nothing."""
        if isinstance(scopes, str | bytes):
            raise TypeError("it has returned one text; it returns a list of scopes")
        self._grants = Grants()
        self.count = patterns = 0
        """Scopes that there are."""
        for scope in islice(scopes, SCOPES_MAX + 1):
            text = parse_scope(scope).text
            self.count, patterns = self.count + 1, patterns + ("*" in text or "?" in text)
            if self.count > SCOPES_MAX or patterns > PATTERNS_MAX:
                raise InvalidArgument(
                    f"it has returned more than {SCOPES_MAX} scopes, or {PATTERNS_MAX} with wildcards; use wider ones"
                )
            self._grants.add(text, _ROLE)
        found = self._grants.scopes(Permission.LOOKUP, _MASKS)
        self.fronts = topic_fronts(found)
        """How all topics begin that they cover."""
        self.key = hash(tuple(sorted(found)))
        """The same for the same scopes, in this process."""

    def cover(self, resource: str) -> bool:
        """Whether one of them covers a topic, "/namespace/topic#subscription" or "namespace:NAME"."""
        grants = self._grants
        return CLUSTER in grants.literals or grants.covers(target_of(resource, _BIT), _MASKS)
