r"""How many administrative changes a user may make: each writes lines into the audit log, which keeps so many bytes.

change of a user without manage_cluster --charge--> within its rate --> the audit log, then the change
                                              \-----> above it -----> refused, and counted as a denial
"""

from __future__ import annotations

from danube_fast.clock import SECOND_NS, Clock
from danube_fast.errors import PermissionDenied, ResourceExhausted
from danube_fast.security.audit import AuditRecord, encode_record
from danube_fast.security.authorization import Authorizer
from danube_fast.types import CLUSTER, Permission
from danube_fast.workers.process.denials import Denial, Denials

__all__ = ["BURST_SECONDS", "ChangeRates"]

BURST_SECONDS = 10
"""A user that was quiet may make the changes of so many seconds at once."""
UNIT_BYTES = 1024
"""A change whose line is longer counts once more for each of these."""
KEPT_MAX = 1024
"""Users that are remembered before those are looked for that were quiet long enough."""


class ChangeRates:
    """Charge the changes of each user. Used by the coordinator's loop only."""

    def __init__(
        self, per_second: int, clock: Clock, authorizer: Authorizer, denials: Denials
    ) -> None:
        """`per_second`: of one user, 0: unbounded; `denials`: where refusals are counted."""
        self._per_second, self._clock = per_second, clock
        self._authorizer, self._denials = authorizer, denials
        self._paid_until_ns: dict[str, int] = {}
        """By user: when all that it was charged has been paid by the time that passes."""

    def charge(
        self, principal: str, record: AuditRecord, *, proof: str = "", address: str = ""
    ) -> None:
        """Charge a change that a user wants, from a connection or without one. Raises ResourceExhausted if it has made too
        many."""
        if not self._per_second:
            return
        now_ns, user = self._clock.monotonic_ns(), str(principal)
        paid_ns = max(self._paid_until_ns.get(user, 0), now_ns)
        wait_ns = paid_ns - now_ns - BURST_SECONDS * SECOND_NS
        if wait_ns < 0:
            units = 1 + len(encode_record(record)) // UNIT_BYTES
            self._paid_until_ns[user] = paid_ns + units * SECOND_NS // self._per_second
            self._forget(now_ns)
        elif not self._is_exempt(principal):
            outcome = ResourceExhausted.__name__
            refused = record.action, principal, proof, address, record.resource, outcome
            self._denials.note(Denial(*refused, record.request, reason=outcome))
            raise ResourceExhausted(
                f"{user} has made more than {self._per_second} administrative changes a second, which the audit log bounds; "
                f"try again in {wait_ns / SECOND_NS + 1:.0f} s, or ask an administrator to raise admin_changes_per_second_max"
            )

    def _is_exempt(self, principal: str) -> bool:
        """Whether it is an administrator, who could make more users, or another log."""
        try:
            self._authorizer.authorize(principal, Permission.MANAGE_CLUSTER, CLUSTER)
        except PermissionDenied:
            return False
        return True

    def _forget(self, now_ns: int) -> None:
        """Forget users whose changes are all paid, if there are many."""
        kept = self._paid_until_ns
        if len(kept) > KEPT_MAX:
            self._paid_until_ns = {user: paid for user, paid in kept.items() if paid > now_ns}
