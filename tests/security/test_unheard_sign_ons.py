"""Sign-ons that a process may not have heard of yet: it does not refuse their keys, so that clients ask again."""

from __future__ import annotations

import pytest

from danube_fast.clock import MILLISECOND_NS, SECOND_NS, Clock, SystemClock
from danube_fast.errors import PermissionDenied, Unavailable
from danube_fast.roles import COORDINATOR
from danube_fast.security.curve import new_key_pair
from danube_fast.security.records import Credential, Principal
from danube_fast.workers.coordinator.security import KNOWN_MS
from danube_fast.workers.process.access import SETTLES_NS, Access
from danube_fast.workers.process.mailbox import PAUSE_NS
from tests.security.test_ended_sign_ons import PROOF, WORKER, Broker, broker

__all__ = ["broker"]

OWN, ENDED = "uid:1000", f"curve:{new_key_pair().public}"


class Later(SystemClock):
    """A clock that is put forward."""

    moved_ns = 0

    def monotonic_ns(self) -> int:
        return super().monotonic_ns() + self.moved_ns


@pytest.fixture
def clock() -> Later:
    return Later()


@pytest.fixture
def access(clock: Later) -> Access:
    """Rights of pia, who is a local user with another key that has ended; her sign-on is not known."""
    made = _access(clock)
    made.policy.put(Principal("pia"))
    made.policy.put(Credential(OWN, "pia"))
    made.policy.put(Credential(ENDED, "pia", expires_ns=1))
    return made


def _access(clock: Clock) -> Access:
    made = Access(clock)
    made.is_loaded = True
    made.confirm()
    return made


def check_asks_again(access: Access) -> None:
    """See that the unknown key is refused in no way."""
    with pytest.raises(Unavailable):
        access.admits(PROOF)
    with pytest.raises(Unavailable):
        access.authenticate({}, PROOF)
    with pytest.raises(Unavailable):
        access.authenticate({"key": PROOF.removeprefix("curve:")}, OWN)


def check_refused(access: Access) -> None:
    assert not access.admits(PROOF)
    with pytest.raises(PermissionDenied):
        access.authenticate({}, PROOF)
    with pytest.raises(PermissionDenied):
        access.authenticate({"key": PROOF.removeprefix("curve:")}, OWN)


def test_a_process_that_was_held_up_refuses_no_key_before_it_has_heard(access: Access) -> None:
    check_refused(access)
    access.has_heard = lambda: False
    check_asks_again(access)
    assert access.admits(OWN), "what is known comes in"
    access.has_heard = lambda: True
    check_refused(access)


def test_behind_another_start_of_the_coordinator_no_key_is_refused_before_all_are_told(
    access: Access, clock: Later
) -> None:
    access.begin_again()
    check_asks_again(access)
    assert not access.admits(ENDED) and not access.admits("uid:7"), "those are no sign-ons"
    access.settle()
    check_refused(access)
    access.begin_again()
    clock.moved_ns += SETTLES_NS
    access.confirm()
    check_refused(access)


def test_a_copy_that_is_read_meanwhile_knows_it(broker: Broker) -> None:
    access = broker.accesses[WORKER]
    access.has_heard = lambda: True
    assert not access.admits(PROOF)
    coordinator = broker.directory.rights
    assert isinstance(coordinator, Access)
    coordinator.begin_again()
    broker.load()
    with pytest.raises(Unavailable, match="since the coordinator has started again"):
        access.admits(PROOF)


def test_workers_know_a_sign_on_that_have_not_asked_since_the_coordinator_has_started_again(
    broker: Broker,
) -> None:
    broker.start(told=(WORKER,))
    assert broker.add(broker.signed()) == [0]
    assert broker.accesses[WORKER].policy.principal_of(PROOF, broker.clock.wall_ns()) == "pia"


def test_a_process_that_starts_again_is_not_waited_for(broker: Broker) -> None:
    """Or each sign-on would wait for its start, which reads all."""
    for watcher in broker.wires[COORDINATOR].epoch_watchers:
        watcher(WORKER, 2)
    assert broker.add(broker.signed()) == [0]
    assert broker.accesses[WORKER].policy.principal_of(PROOF, broker.clock.wall_ns()) is None
    broker.copies[WORKER]._load()
    assert broker.accesses[WORKER].policy.principal_of(PROOF, broker.clock.wall_ns()) == "pia"


def test_a_sign_on_is_answered_behind_the_pause_that_a_worker_notices() -> None:
    """Or it would refuse the key: it has not been held up, as far as it knows."""
    assert KNOWN_MS * MILLISECOND_NS > PAUSE_NS
    assert SETTLES_NS > SECOND_NS
