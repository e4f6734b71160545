"""The one question every command asks before it does anything: may this principal do that here?

A secured broker answers by roles and bindings (`policy.py`); without security all clients may do everything, and are
asked all the same, so that no command is forgotten.
"""

from __future__ import annotations

from typing import Protocol

from danube_fast.errors import PermissionDenied, Unavailable
from danube_fast.types import Permission
from danube_fast.visible import Visible

__all__ = ["AllowAll", "Authorizer", "Permission"]


class Authorizer(Protocol):
    """Decides what principals may do."""

    def authorize(self, principal: str, permission: Permission, resource: str) -> None:
        """Return if `principal` has `permission` on `resource` (a topic, a namespace, "cluster").

        Raises PermissionDenied that names all three otherwise.
        """
        ...

    def visible_to(self, principal: str) -> Visible:
        """Return what lists show to `principal`: what it may look up.

        Raises Unavailable, which does not depend on what there is to show.
        """

        def shows(resource: str) -> bool:
            try:
                self.authorize(principal, Permission.LOOKUP, resource)
            except (PermissionDenied, Unavailable):
                return False
            return True

        return Visible(shows)


class AllowAll(Authorizer):
    """Lets every principal do everything."""

    def authorize(self, principal: str, permission: Permission, resource: str) -> None:
        """Return."""
