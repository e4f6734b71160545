"""The senders of requests to the admin port of a secured broker, by the coordinator's copy of the records.

Asked by the thread of the admin port, while the coordinator's loop changes the records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from danube_fast.clock import Clock
from danube_fast.errors import Unavailable
from danube_fast.security import api_keys
from danube_fast.security.certificates import certificate_dates
from danube_fast.security.http_proofs import principal_of_request
from danube_fast.security.records import Principal
from danube_fast.types import CLUSTER, Permission
from danube_fast.workers.process.access import Access
from danube_fast.workers.process.denials import Denial, Denials

__all__ = ["RequestAccess"]

ACTION = "http"
"""In the audit log, of a request that was refused."""
_TRIES = 5
T = TypeVar("T")


class RequestAccess:
    """The guard of the admin port."""

    def __init__(self, access: Access, clock: Clock, denials: Denials | None = None) -> None:
        """`denials`: where refusals are counted for the audit log."""
        self._access, self._clock, self._denials = access, clock, denials

    def principal_of_request(
        self, headers: Mapping[str, str], peer_certificate: bytes | None
    ) -> str | None:
        """Return the principal of a request; None: it proves no one. Raises InvalidArgument, Unavailable."""
        access = self._access
        if not access.is_fresh:
            raise Unavailable(
                "the coordinator has not heard for a while who may do what; try again"
            )
        shown = peer_certificate
        if shown is not None and self._clock.wall_ns() >= certificate_dates(shown)[1]:
            shown = None  # it has ended since the handshake
        return _whole(
            lambda: principal_of_request(
                headers,
                shown,
                access.registered_to,
                access.principal_of,
                self._principal_of_bearer,
            )
        )

    def authorize(self, principal: str, permission: Permission) -> None:
        """Return if the principal has the permission on the cluster. Raises PermissionDenied, Unavailable."""
        _whole(lambda: self._access.authorize(principal, permission, CLUSTER))

    def note_denied(self, principal: str, address: str, path: str) -> None:
        """Count a request that was refused; `principal` is empty if it proved none."""
        if self._denials is not None:
            self._denials.note(Denial(ACTION, principal, "", address, path))

    def _principal_of_bearer(self, text: str) -> str | None:
        """Return the principal of an API key; None: it is not one, or not any more. A token is for sign-on only."""
        policy = self._access.policy
        key = api_keys.find(policy, text, self._clock.wall_ns())
        if key is None:
            return None
        found = policy.get(f"principal/{key.principal}")
        return key.principal if isinstance(found, Principal) and not found.disabled else None


def _whole(ask: Callable[[], T]) -> T:
    """Ask the records, again if they have changed meanwhile. Raises Unavailable if they always do."""
    for _ in range(_TRIES):
        try:
            return ask()
        except RuntimeError:  # a table has changed while it was walked
            continue
    raise Unavailable("rights change too fast just now; try again")
