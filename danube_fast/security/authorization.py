"""The one question every command asks before it does anything: may this principal do that here?

Until roles and bindings exist all clients may do everything; the question is asked all the same, so
that no command has to be found and changed on the day they do.
"""

from __future__ import annotations

from typing import Protocol

from danube_fast.types import Permission

__all__ = ["AllowAll", "Authorizer", "Permission"]


class Authorizer(Protocol):
    """Decides what principals may do."""

    def authorize(self, principal: str, permission: Permission, resource: str) -> None:
        """Return if `principal` has `permission` on `resource` (a topic, a namespace, "cluster").

        Raises PermissionDenied that names all three otherwise.
        """
        ...


class AllowAll:
    """Lets every principal do everything."""

    def authorize(self, principal: str, permission: Permission, resource: str) -> None:
        """Return."""
