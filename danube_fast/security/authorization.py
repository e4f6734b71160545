"""The one question every command asks before it does anything: may this principal do that here?

A secured broker answers by roles and bindings (`policy.py`); without security all clients may do everything, and are
asked all the same, so that no command is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from danube_fast.errors import PermissionDenied
from danube_fast.types import Permission

__all__ = ["AllowAll", "Authorizer", "Permission"]


class Authorizer(Protocol):
    """Decides what principals may do."""

    def authorize(self, principal: str, permission: Permission, resource: str) -> None:
        """Return if `principal` has `permission` on `resource` (a topic, a namespace, "cluster").

        Raises PermissionDenied that names all three otherwise.
        """
        ...

    def visible_to(self, principal: str) -> Callable[[str], bool]:
        """Return a function that tells whether lists show a resource to `principal`: those that it may look up.

        Raises Unavailable, PermissionDenied; neither depends on what there is to show.
        """

        def is_visible(resource: str) -> bool:
            try:
                self.authorize(principal, Permission.LOOKUP, resource)
            except PermissionDenied:
                return False
            return True

        return is_visible


class AllowAll(Authorizer):
    """Lets every principal do everything."""

    def authorize(self, principal: str, permission: Permission, resource: str) -> None:
        """Return."""
