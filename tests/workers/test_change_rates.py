"""Charges for administrative changes: so many a second of a user, long ones count more, administrators are exempt."""

from __future__ import annotations

from typing import Any

import pytest

from danube_fast.clock import SECOND_NS
from danube_fast.errors import PermissionDenied, ResourceExhausted
from danube_fast.net.session import Session
from danube_fast.security.audit import AuditRecord
from danube_fast.testing.virtual_clock import VirtualClock
from danube_fast.types import CLUSTER, Permission
from danube_fast.workers.coordinator.change_rates import BURST_SECONDS, KEPT_MAX, ChangeRates
from danube_fast.workers.process.denials import Denials

RATE = 20
BURST = RATE * BURST_SECONDS


class Rig:
    """Users, of whom `ann` is an administrator."""

    def __init__(self, per_second: int = RATE) -> None:
        self.clock = VirtualClock()
        self.denials = Denials(self.clock)
        self.rates = ChangeRates(per_second, self.clock, self, self.denials)

    def authorize(self, principal: str, permission: Permission, resource: str) -> None:
        assert (permission, resource) == (Permission.MANAGE_CLUSTER, CLUSTER)
        if principal != "ann":
            raise PermissionDenied("no")

    def change(self, user: str, **arguments: Any) -> None:
        session = Session(3, b"token", b"\0one", "raw", user)
        record = AuditRecord(event="", action="create_topic", resource="/a/t", arguments=arguments)
        self.rates.charge(session, record)

    def made(self, user: str, **arguments: Any) -> int:
        """Changes until one is refused."""
        for count in range(10 * BURST):
            try:
                self.change(user, **arguments)
            except ResourceExhausted:
                return count
        return 10 * BURST


def test_a_user_has_a_burst_and_then_its_rate() -> None:
    rig = Rig()
    assert rig.made("pia") == BURST
    assert rig.made("pia") == 0 and rig.made("max") == BURST, "each has its own"
    rig.clock.now_ns += SECOND_NS
    assert rig.made("pia") == RATE
    rig.clock.now_ns += 100 * BURST_SECONDS * SECOND_NS
    assert rig.made("pia") == BURST, "no more than the burst behind a long quiet"


def test_a_change_with_a_long_line_counts_as_several() -> None:
    assert Rig().made("pia", values="x" * 4096) == BURST // 5


def test_an_administrator_is_exempt_and_zero_is_no_bound() -> None:
    assert Rig().made("ann") == 10 * BURST
    assert Rig(0).made("pia") == 10 * BURST


def test_a_refusal_says_what_to_do_and_is_counted() -> None:
    rig = Rig()
    rig.made("pia")
    with pytest.raises(ResourceExhausted, match=r"try again in 1 s.*admin_changes_per_second_max"):
        rig.change("pia")
    (record,), _ = rig.denials.take(0)
    assert (record.event, record.outcome) == ("denied", "ResourceExhausted")
    assert (record.principal, record.action, record.resource) == ("pia", "create_topic", "/a/t")


def test_users_that_are_quiet_are_forgotten() -> None:
    rig = Rig()
    rig.made("pia")
    for number in range(3 * KEPT_MAX):
        rig.change(f"user-{number}")
        rig.clock.now_ns += SECOND_NS // RATE
    assert len(rig.rates._paid_until_ns) <= KEPT_MAX + 1
    assert rig.made("pia") == BURST
