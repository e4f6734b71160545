"""The one question every command asks before it does anything: may this principal do that here?

A secured broker answers by roles and bindings (`policy.py`); without security all clients may do everything, and are
asked all the same, so that no command is forgotten.
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
