"""Whether a broker has an administrator who can come in, or makes the key that it begins with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from danube_fast.clock import SystemClock
from danube_fast.metadata.memory import MemoryStore
from danube_fast.security.curve import new_key_pair
from danube_fast.security.records import Binding, Credential, Principal
from danube_fast.workers.coordinator.security import SecurityDirectory
from danube_fast.workers.process.access import Access
from tests.workers.shard_rig import FakeMailbox


@pytest.fixture
def directory() -> Iterator[SecurityDirectory]:
    mailbox: Any = FakeMailbox()
    clock = SystemClock()
    yield SecurityDirectory(MemoryStore(clock), mailbox, clock, Access(clock))
    mailbox.close()


@pytest.mark.parametrize(
    ("credential", "comes_in"),
    [(f"curve:{new_key_pair().public}", True), ("uid:1000", False), (f"mtls:{'ab' * 32}", False)],
    ids=["curve", "uid", "mtls"],
)
def test_an_administrator_who_can_come_in_has_a_key(
    directory: SecurityDirectory, credential: str, comes_in: bool
) -> None:
    """The HTTPS ports take no operation, and no client begins at the coordinator by its local user."""
    directory.change(
        [Principal("ann"), Binding("ann", "user:ann", "admin", "cluster"), Credential(credential, "ann")]
    )  # fmt: skip
    assert directory.has_administrator() is comes_in
