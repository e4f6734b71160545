"""Authorizers of other packages: rules beside roles, such as those of OPA or Cedar.

An entry point of the group `danube_fast.authorizers` gives a callable; it takes the text behind the colon of the setting
`authorizer` (`NAME` or `NAME:TEXT`) and returns an `Authorizer`. Roles and bindings are asked first: another package can
only take rights away, so that a fault of its rules gives none. One that cannot answer denies.

    roles and bindings --permit--> authorizer of another package --permits--> handle

It is asked in the loops of the coordinator and of the workers, when handles open and when rights have changed, never for a
message: it answers from memory. If its rules change while the broker runs, its attribute `version`, a number, changes: then
all that is open is looked at again.
"""

from __future__ import annotations

import logging

from danube_fast.clock import MILLISECOND_NS, Clock
from danube_fast.errors import FailedPrecondition, PermissionDenied
from danube_fast.security.authorization import Authorizer, Permission
from danube_fast.security.entry_points import EntryPointGroup, FaultLog

__all__ = ["GuardedAuthorizer", "check_authorizer", "load_authorizer"]

_log = logging.getLogger(__name__)

_GROUP = EntryPointGroup(
    "danube_fast.authorizers", "authorizer", "authorize", "principal, permission, resource"
)
SLOW_NS = 50 * MILLISECOND_NS
"""An answer that takes longer holds up all clients of a process, and is logged."""


class GuardedAuthorizer:
    """Ask the authorizer of another package; its faults deny."""

    def __init__(self, name: str, inner: Authorizer, clock: Clock) -> None:
        self._name, self._inner, self._clock = name, inner, clock
        self._faults = FaultLog(_log, clock)

    @property
    def version(self) -> int:
        """Number of its rules; 0 if it has none, or tells none."""
        try:
            return int(getattr(self._inner, "version", 0))
        except Exception:  # whatever a foreign package raises
            return 0

    def authorize(self, principal: str, permission: Permission, resource: str) -> None:
        """Return if it permits that. Raises PermissionDenied."""
        began_ns = self._clock.monotonic_ns()
        try:
            self._inner.authorize(principal, permission, resource)
        except PermissionDenied:
            raise
        except Exception as error:  # whatever a foreign package raises
            self._faults.warn(
                "the authorizer %s cannot decide, which denies: %r", self._name, error
            )
            raise PermissionDenied(
                f"the authorizer {self._name} could not decide whether {principal} may {permission} {resource}; see the "
                "broker's log"
            ) from None
        finally:
            took_ns = self._clock.monotonic_ns() - began_ns
            if took_ns > SLOW_NS:
                took_ms = took_ns // MILLISECOND_NS
                self._faults.warn(
                    "the authorizer %s has taken %d ms to answer; all clients wait for it: it has to answer from memory",
                    self._name, took_ms,
                )  # fmt: skip

    def permits(self, principal: str, permission: Permission, resource: str) -> bool:
        """Whether it permits that."""
        try:
            self.authorize(principal, permission, resource)
        except PermissionDenied:
            return False
        return True


def check_authorizer(text: str, auth: str) -> None:
    """Check the setting before anything begins; loads no package. Raises InvalidArgument for a name that no package has,
    FailedPrecondition in a broker that asks no one who they are."""
    if auth == "none":
        raise FailedPrecondition(
            "authorizer is set, and this broker asks no one who they are; serve it with --auth required"
        )
    _GROUP.check(text)


def load_authorizer(text: str, clock: Clock) -> GuardedAuthorizer | None:
    """Load the authorizer that the setting names; None if it names none. Raises InvalidArgument if it cannot be loaded."""
    if not text:
        return None
    return GuardedAuthorizer(text.partition(":")[0], _GROUP.load(text), clock)
