"""The rights of principals, as one process of a secured broker knows them: its copy of the records, and how fresh it is.

    connection: proof (CURVE key, uid) --principal_of--> principal --permits--> handle

The coordinator owns the records. A process that was not told for `CONFIRMED_NS_MAX` that its copy is the newest one lets
no client in and opens nothing; what is open goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from danube_fast.clock import SECOND_NS, Clock
from danube_fast.errors import PermissionDenied, Unavailable
from danube_fast.security.policy import Policy, PolicyAuthorizer
from danube_fast.types import REPLY_TOPICS, Permission
from danube_fast.workers.process.commands import OWN_SESSION

__all__ = ["BOOTSTRAP", "CONFIRMED_NS_MAX", "OVERFLOW", "Access"]

CONFIRMED_NS_MAX = 30 * SECOND_NS
BOOTSTRAP = "bootstrap-admin"
"""Principal of the key that a secured broker begins with."""


OVERFLOW = "uid:65534"
"""Every user of another user namespace looks like this one."""
_OF_REPLIES = Permission.LOOKUP, Permission.PRODUCE, Permission.CONSUME


def _is_reply(permission: Permission, resource: str) -> bool:
    """Whether that is about a reply topic: its name is a secret of the client that made it and of those it asks."""
    return resource.startswith(REPLY_TOPICS) and permission in _OF_REPLIES


class Access:
    """The Authenticator and the Authorizer of a secured process. ZAP's thread asks `admits`, the loop all else."""

    def __init__(self, clock: Clock) -> None:
        self.policy = Policy()
        self._authorizer = PolicyAuthorizer(self.policy)
        self._clock = clock
        self._confirmed_ns = -CONFIRMED_NS_MAX
        self.is_loaded = False
        """Whether the copy was ever whole."""
        self.loads = 0
        """How often it was read whole."""
        self.is_owner = False
        """Whether this is the coordinator's: the key that a broker begins with is good there only."""

    def confirm(self) -> None:
        """Note that the copy is the newest one now."""
        self._confirmed_ns = self._clock.monotonic_ns()

    @property
    def is_fresh(self) -> bool:
        """Whether the copy may be relied upon."""
        age_ns = self._clock.monotonic_ns() - self._confirmed_ns
        return self.is_loaded and age_ns < CONFIRMED_NS_MAX

    def admits(self, proof: str) -> bool:
        """Whether a connection with that proof may be made. Raises Unavailable."""
        self._check_fresh()
        return self.principal_of(proof) is not None

    def principal_of(self, proof: str) -> str | None:
        """Return the principal whom the proof names now; None: it names no one (any more)."""
        if proof == OVERFLOW:
            return None
        principal = self.policy.principal_of(proof, self._clock.wall_ns())
        return None if principal == BOOTSTRAP and not self.is_owner else principal

    def authenticate(self, claims: Mapping[str, Any], proof: str = "") -> str:
        """Return the principal of a connection; claims prove nothing. Raises PermissionDenied, Unavailable."""
        self._check_fresh()
        if not proof:
            raise Unavailable("what this connection proves was not read; say HELLO again")
        principal = self.principal_of(proof)
        if principal is None:
            kind, _, number = proof.partition(":")
            who = f"local user {number}" if kind == "uid" else "this key"
            raise PermissionDenied(
                f"{who} is not registered with this broker, or not any more; an administrator registers it with: "
                "danube-fast security keys add"
            )
        return principal

    def authorize(self, principal: str, permission: Permission, resource: str) -> None:
        """Return if the principal may do that. Raises PermissionDenied, Unavailable."""
        if resource == OWN_SESSION:  # what was opened was authorized then
            return
        self._check_fresh()
        if not _is_reply(permission, resource):
            self._authorizer.authorize(principal, permission, resource)

    def permits(self, principal: str, permission: Permission, resource: str) -> bool:
        """Whether the principal may do that, by the copy as it is."""
        return _is_reply(permission, resource) or self.policy.permits(
            principal, permission, resource
        )

    def _check_fresh(self) -> None:
        if not self.is_fresh:
            raise Unavailable(
                "this process has not heard for a while who may do what, and opens nothing meanwhile; try again"
            )
