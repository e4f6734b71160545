"""The one question every command asks before it does anything: may this principal do that here?

Until roles and bindings exist everybody may do everything; the question is asked all the same, so
that no command has to be found and changed on the day they do.
"""

from __future__ import annotations

from danube_fast.types import Permission

__all__ = ["Permission", "authorize"]


def authorize(principal: str, permission: Permission, resource: str) -> None:
    """Return if `principal` has `permission` on `resource` (a topic, a namespace, or "cluster").

    Raises PermissionDenied that names all three otherwise.
    """
