"""Scopes of the names that lists show a principal, as an authorizer of another package gives them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from danube_fast.errors import InvalidArgument
from danube_fast.security.policy import Policy
from danube_fast.security.records import Binding, Principal
from danube_fast.types import Permission

__all__ = ["SCOPES_MAX", "LookupScopes"]

SCOPES_MAX = 1024
"""Of one principal; wider ones say the same with fewer."""
_WHO = "asker"


class LookupScopes:
    """Tells what some scopes cover. They are read as those of bindings are: `*` does not cover `system`, one of a
    subscription covers its topic, too."""

    def __init__(self, scopes: Iterable[str]) -> None:
        """Raises InvalidArgument for what is not a scope, and for too many; TypeError for one text, or nothing."""
        if isinstance(scopes, str | bytes):
            raise TypeError("it has returned one text; it returns a list of scopes")
        self._policy = Policy()
        self._policy.put(Principal(_WHO))
        for number, scope in enumerate(islice(scopes, SCOPES_MAX + 1)):
            if number == SCOPES_MAX:
                raise InvalidArgument(
                    f"it has returned more than {SCOPES_MAX} scopes; use wider ones"
                )
            self._policy.put(Binding(str(number), f"user:{_WHO}", "viewer", scope))

    def cover(self, resource: str) -> bool:
        """Whether one of them covers a topic, "/namespace/topic#subscription" or "namespace:NAME"."""
        return self._policy.permits(_WHO, Permission.LOOKUP, resource)
