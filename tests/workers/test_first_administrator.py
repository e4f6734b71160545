"""Whether a broker has an administrator who can come in, or makes the key that it begins with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.clock import SECOND_NS, SystemClock
from danube_fast.errors import FailedPrecondition, InvalidArgument
from danube_fast.metadata.memory import MemoryStore
from danube_fast.ring.counters import Counter
from danube_fast.security.curve import new_key_pair, read_key_file, write_key_file
from danube_fast.security.records import Binding, Credential, Principal, Record, Role
from danube_fast.types import CLUSTER, Permission
from danube_fast.workers.coordinator.administrators import is_first_key
from danube_fast.workers.coordinator.coordinator import Coordinator
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


GROUP = "group:ops"
HOUR_NS = 3600 * SECOND_NS
KEY = f"curve:{new_key_pair().public}"
LAST = [
    ("the user", [], lambda of: of.remove_record("principal", "ann")),
    ("the key", [], lambda of: of.remove_record("credential", KEY)),
    ("the binding", [], lambda of: of.remove_record("binding", "ann")),
    ("a user that is disabled", [], lambda of: of.put_principal("ann", None, disabled=True)),
    ("another role", [], lambda of: of.put_binding("ann", "user:ann", "viewer", "cluster")),
    ("another scope", [], lambda of: of.put_binding("ann", "user:ann", "admin", "/a/*")),
    ("the role", [Role("boss", [Permission.MANAGE_CLUSTER]), Binding("ann", "user:ann", "boss", CLUSTER)],
     lambda of: of.remove_record("role", "boss")),
    ("a weaker role", [Role("boss", [Permission.MANAGE_CLUSTER]), Binding("ann", "user:ann", "boss", CLUSTER)],
     lambda of: of.put_role("boss", [Permission.LOOKUP])),
    ("the group", [Principal("ann", groups=["ops"]), Binding("ann", GROUP, "admin", CLUSTER)],
     lambda of: of.put_principal("ann", [], disabled=None)),
    ("a key that ends soon", [], lambda of: of.put_credential(KEY, "ann", expires_seconds=60, label="")),
    ("the key that lasts", [Credential(f"curve:{new_key_pair().public}", "ann", SystemClock().wall_ns() + HOUR_NS)],
     lambda of: of.remove_record("credential", KEY)),
]  # fmt: skip
"""How the last administrator goes: its records, what changes them."""


def is_there(directory: SecurityDirectory, *more: Record) -> None:
    """Make ann an administrator, with these records in place of her usual ones."""
    usual = [Principal("ann"), Binding("ann", "user:ann", "admin", CLUSTER), Credential(KEY, "ann")]
    for records in (usual, more):
        directory.change(records)


@pytest.mark.parametrize(("records", "change"), [each[1:] for each in LAST], ids=[each[0] for each in LAST])  # fmt: skip
def test_the_last_administrator_stays(
    directory: SecurityDirectory, records: list[Record], change: Callable[[SecurityDirectory], None]
) -> None:
    is_there(directory, *records)
    before = directory.policy.page("", 100)
    with pytest.raises(FailedPrecondition, match=r"no administrator.*users add.*--force"):
        change(directory)
    assert directory.policy.page("", 100) == before and directory.has_administrator()
    other = f"curve:{new_key_pair().public}"
    directory.change(
        [Principal("bob"), Binding("bob", "user:bob", "admin", CLUSTER), Credential(other, "bob")]
    )
    change(directory)
    assert directory.has_administrator(), "bob is one"


@pytest.mark.parametrize("kind", ["revocation", "sign_on", "nonsense"])
def test_records_that_no_command_is_about_are_not_deleted(
    directory: SecurityDirectory, kind: str
) -> None:
    is_there(directory)
    directory.end_sign_ons("jwt:corp")
    before = directory.policy.page("", 100)
    with pytest.raises(InvalidArgument, match="no kind of records; write principal"):
        directory.remove_record(kind, "jwt:corp", force=True)
    assert directory.policy.page("", 100) == before


def test_users_go_while_no_one_is_asked_who_they_are() -> None:
    mailbox: Any = FakeMailbox()
    clock = SystemClock()
    store = MemoryStore(clock)
    SecurityDirectory(store, mailbox, clock, Access(clock)).change([Principal("pia")])
    unsecured = SecurityDirectory(store, mailbox, clock, None)
    unsecured.remove_record("principal", "pia")
    assert unsecured.policy.get("principal/pia") is None
    mailbox.close()


def test_a_binding_of_the_cluster_that_makes_no_administrator_costs_nothing(
    directory: SecurityDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_there(directory, Role("seer", [Permission.LOOKUP]))
    for role in ("viewer", "seer"):
        directory.change([Binding("pia", "group:pia", role, CLUSTER)])
        with monkeypatch.context() as patch:
            patch.setattr("danube_fast.workers.coordinator.administrators.Policy", None)
            directory.remove_record("binding", "pia")


def test_the_last_administrator_is_deleted_by_force(directory: SecurityDirectory) -> None:
    is_there(directory)
    directory.remove_record("principal", "ann", force=True)
    assert not directory.has_administrator() and directory.policy.get(f"credential/{KEY}") is None


def test_a_first_key_that_is_removed_waits_no_more(
    directory: SecurityDirectory, tmp_path: Path
) -> None:
    levels: dict[Counter, int] = {}
    counters = SimpleNamespace(set=lambda name, value: levels.update({name: int(value)}))
    coordinator: Any = SimpleNamespace(
        security=directory, _boot=SimpleNamespace(counters=counters), _record=lambda *_: None,
        connections=SimpleNamespace(),
    )  # fmt: skip
    key_file = tmp_path / "bootstrap-admin.key"
    Coordinator._begin_security(coordinator, key_file)
    assert levels[Counter.FIRST_KEYS] == 1
    public = read_key_file(key_file).public
    directory.remove_record("credential", f"curve:{public}")
    assert levels[Counter.FIRST_KEYS] == 0


def test_a_first_key_of_another_user_is_called_so(
    directory: SecurityDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    is_there(directory)
    pair = new_key_pair()
    write_key_file(tmp_path / "bootstrap-admin.key", pair)
    directory.change([Credential(f"curve:{pair.public}", "ann")])
    assert not is_first_key(directory.policy, tmp_path / "bootstrap-admin.key")
    assert "its key is one of ann" in caplog.text and "on record" not in caplog.text


def test_the_first_administrator_has_no_other_binding(directory: SecurityDirectory) -> None:
    """Nor another user the one of its name, which the next start puts back."""
    directory.begin(new_key_pair().public)
    is_there(directory)
    for binding, subject in (("late", "user:bootstrap-admin"), ("bootstrap-admin", "user:ann")):
        with pytest.raises(FailedPrecondition, match=r"make a user of your own|another name"):
            directory.put_binding(binding, subject, "viewer", CLUSTER)
    directory.remove_record("binding", "bootstrap-admin")
    with pytest.raises(FailedPrecondition, match="another name"):
        directory.put_binding("bootstrap-admin", "user:ann", "viewer", CLUSTER)


@pytest.mark.parametrize("resource", ["/shop/orders#billing 1", "/shop/orders#a/b", "/shop/orders#a#b", "cluster", "subject:x"])  # fmt: skip
def test_rights_are_asked_for_any_subscription(directory: SecurityDirectory, resource: str) -> None:
    is_there(directory)
    assert directory.check("ann", Permission.CONSUME, resource) == {
        "allowed": True,
        "registered": True,
    }


@pytest.mark.parametrize("resource", ["/shop/*", "/shop/order?", "namespace:*", "/shop/orders#*", "/shop/orders#", "shop#x", "/shop#x"])  # fmt: skip
def test_rights_are_asked_for_one_thing(directory: SecurityDirectory, resource: str) -> None:
    is_there(directory)
    with pytest.raises(InvalidArgument, match=r"one thing|not a scope"):
        directory.check("ann", Permission.CONSUME, resource)


def test_what_is_no_administrators_goes_without_a_word(directory: SecurityDirectory) -> None:
    """Nor is anything refused in a broker that has no administrator with a key yet."""
    directory.change([Principal("pia"), Binding("pia", "user:pia", "viewer", CLUSTER)])
    directory.remove_record("binding", "pia")
    directory.change([Principal("uma"), Binding("uma", "user:uma", "admin", CLUSTER), Credential("uid:7", "uma")])  # fmt: skip
    directory.remove_record("principal", "uma")
    is_there(directory, Credential("uid:7", "ann"))
    directory.remove_record("credential", "uid:7")
    directory.put_principal("ann", ["ops"], disabled=None)
    directory.remove_record("principal", "pia")
