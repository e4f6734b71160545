"""Sign-ons in the records: who may do what by them, what ends them, and how many there may be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from danube_fast.broker import messages as m
from danube_fast.clock import SECOND_NS, SystemClock
from danube_fast.errors import DanubeError, InvalidArgument
from danube_fast.security import api_keys
from danube_fast.security.api_keys import new_api_key
from danube_fast.security.authentication import Identity
from danube_fast.security.curve import new_key_pair
from danube_fast.security.policy import ENDED_NS, Policy
from danube_fast.security.records import (
    ApiKey,
    Binding,
    Credential,
    Principal,
    Record,
    SignOn,
    check_record,
    key_of,
)
from danube_fast.security.sign_ons import LIFETIME_NS_MAX
from danube_fast.types import Permission
from danube_fast.workers.coordinator import sign_ons
from danube_fast.workers.coordinator.sign_ons import SignOnChecks
from danube_fast.workers.process.access import Access
from danube_fast.workers.process.security_copy import SecurityCopy

NOW = 1_000 * SECOND_NS
END = NOW + 60 * SECOND_NS
KEY = new_key_pair().public
PROOF = f"curve:{KEY}"
TOPIC = "/shop/orders"
LOOK = Permission.LOOKUP
API_KEY = ApiKey("k" * 16, "pia", "00" * 16, "11" * 32)


def signed(
    key: str = KEY, principal: str = "pia", groups: tuple[str, ...] = (), expires_ns: int = END,
    source: str = "jwt:corp", registered: bool = True,
) -> SignOn:  # fmt: skip
    return SignOn(key, principal, list(groups), expires_ns, source, registered)


def policy_of(*records: Record) -> Policy:
    policy = Policy()
    for record in (Principal("pia"), *records):
        policy.put(record)
    return policy


def test_a_sign_on_stands_for_its_principal_until_it_ends() -> None:
    policy = policy_of(signed())
    assert policy.principal_of(PROOF, END - 1) == "pia"
    assert policy.principal_of(PROOF, END) is None
    policy.put(signed(expires_ns=END + SECOND_NS))  # renewed
    assert policy.principal_of(PROOF, END) == "pia"
    policy.purge(END + ENDED_NS)
    assert policy.get(f"sign_on/{KEY}") is not None
    policy.purge(END + SECOND_NS + ENDED_NS)
    assert policy.get(f"sign_on/{KEY}") is None
    assert policy.sign_ons.weight == 0 and policy.sign_ons.all() == []


def test_a_registered_key_counts_before_a_sign_on() -> None:
    policy = policy_of(Principal("paul"), signed(), Credential(PROOF, "paul"))
    assert policy.principal_of(PROOF, NOW) == "paul"


@pytest.mark.parametrize("how", ["disabled", "removed", "other"])
def test_a_principal_that_may_not_come_in_ends_its_sign_ons(how: str) -> None:
    policy = policy_of(signed(), Principal("paul"))
    if how == "disabled":
        policy.put(Principal("pia", disabled=True))
        assert policy.principal_of(PROOF, NOW) is None
        policy.put(Principal("pia"))
        assert policy.principal_of(PROOF, NOW) == "pia"
    elif how == "removed":
        policy.remove("principal/pia")
        policy.put(Principal("pia"))
        assert policy.principal_of(PROOF, NOW) is None, "one of the same name is another one"
    else:
        policy.remove("principal/paul")
        assert policy.principal_of(PROOF, NOW) == "pia"


def test_an_api_key_ends_its_sign_ons() -> None:
    made = signed(source=f"api_key:{API_KEY.id}")
    policy = policy_of(API_KEY, made)
    assert policy.principal_of(PROOF, NOW) == "pia"
    policy.put(msgspec.structs.replace(API_KEY, expires_ns=NOW))
    assert policy.principal_of(PROOF, NOW) is None
    policy.put(msgspec.structs.replace(API_KEY, principal="paul"))
    assert policy.principal_of(PROOF, NOW) is None
    policy.put(API_KEY)
    policy.remove(key_of(API_KEY))
    assert policy.get(f"sign_on/{KEY}") is None
    policy.put(API_KEY)
    assert policy.principal_of(PROOF, NOW) is None


def test_an_unregistered_principal_needs_an_issuer_that_is_trusted_with_all() -> None:
    policy = policy_of(
        signed(principal="eve", groups=("ops",), registered=False),
        Binding("b", "group:ops", "viewer", "cluster"),
    )
    identity = Identity("eve", PROOF)
    assert policy.principal_of(PROOF, NOW) == "eve"
    assert policy.permits(identity, LOOK, TOPIC)
    assert not policy.permits("eve", LOOK, TOPIC), "without its sign-on it is no one"
    policy.put(Principal("eve", disabled=True))
    assert policy.principal_of(PROOF, NOW) is None
    assert not policy.permits(identity, LOOK, TOPIC)
    policy.put(signed(principal="eve", groups=("ops",)))
    policy.remove("principal/eve")
    policy.put(signed(principal="eve", groups=("ops",)))
    assert policy.principal_of(PROOF, NOW) is None
    assert not policy.permits(identity, LOOK, TOPIC)


def test_claimed_groups_are_the_connections_own() -> None:
    other = new_key_pair().public
    policy = policy_of(
        Principal("paul"), signed(groups=("ops",)), signed(other),
        Binding("b", "group:ops", "viewer", TOPIC),
    )  # fmt: skip
    assert policy.permits(Identity("pia", PROOF), LOOK, TOPIC)
    assert not policy.permits(Identity("pia", f"curve:{other}"), LOOK, TOPIC)
    assert not policy.permits(Identity("paul", PROOF), LOOK, TOPIC)
    assert not policy.permits("pia", LOOK, TOPIC)
    policy.put(Principal("pia", groups=["ops"]))
    assert policy.permits(Identity("pia", f"curve:{other}"), LOOK, TOPIC)


def test_new_sign_ons_are_no_loss() -> None:
    """Each loss is a pass over everything that clients have open."""
    policy = policy_of()
    before = policy.changes.count
    for number in range(10):
        policy.put(signed(new_key_pair().public, groups=("a",), expires_ns=END + number))
    policy.put(signed(groups=("a",)))
    policy.put(signed(groups=("a",), expires_ns=END + 1))
    policy.purge(END + ENDED_NS)
    assert policy.changes.count == before
    policy.put(signed(groups=("b",)))
    assert policy.changes.count == before + 1, "groups have gone"
    policy.remove("principal/pia")
    assert policy.changes.count == before + 2


def test_one_that_is_renewed_just_behind_its_end_with_fewer_groups_is_a_loss() -> None:
    """What was opened by a group that is gone must not stay open, though the session was not looked at meanwhile."""
    policy = policy_of(signed(groups=("ops",)))
    before = policy.changes.count
    policy.purge(END + SECOND_NS)
    policy.put(signed(expires_ns=END + 60 * SECOND_NS))
    assert policy.changes.count == before + 1


def test_many_that_end_at_one_time_leave_the_others_in_order() -> None:
    policy = policy_of(Principal("adam"), signed(expires_ns=END + SECOND_NS))
    keys = [new_key_pair().public for _ in range(200)]
    for key in keys:
        policy.put(signed(key))
    policy.purge(END + ENDED_NS)
    left = [key_of(record) for record in policy.page("", 1000)]
    assert left == ["principal/adam", "principal/pia", f"sign_on/{KEY}"] and len(policy) == 3
    for key in keys:
        policy.put(signed(key))
    policy.remove("principal/pia")
    assert [key_of(record) for record in policy.page("", 1000)] == ["principal/adam"]


def test_rights_of_groups_that_a_sign_on_brings_concern_it_alone() -> None:
    access = Access(SystemClock())
    policy = access.policy
    for record in (Principal("pia"), signed(groups=("ops",))):
        policy.put(record)
    signed_on, other = Identity("pia", PROOF), Identity("pia", "uid:7")
    since = access.version
    access.take_changed(since)
    policy.put(Binding("b", "group:ops", "viewer", "cluster"))
    changed = access.take_changed(since)
    assert access.changed_fronts(signed_on, changed) and not access.changed_fronts(other, changed)
    since = access.version
    policy.put(signed(groups=()))
    changed = access.take_changed(since)
    assert "" in access.changed_fronts(signed_on, changed), "its groups have gone"


def test_renewals_do_not_pile_up() -> None:
    policy = policy_of()
    for number in range(5000):
        policy.put(signed(expires_ns=END + number))
    assert len(policy.sign_ons._ends) < 2000
    assert policy.sign_ons.weight_of("pia") == 1
    assert policy.sign_ons.ended(END + 4998) == []
    assert policy.sign_ons.ended(END + 4999) == [f"sign_on/{KEY}"]


def test_a_copy_keeps_so_many_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("danube_fast.security.policy.KEPT_MAX", 10)
    policy = policy_of()
    keys = [new_key_pair().public for _ in range(8)]
    for number, key in enumerate(keys):
        policy.put(signed(key, groups=("a",), expires_ns=END - number))
    kept = [record.public_key for record in policy.sign_ons.all()]
    assert kept == keys[:5], "those that end first have gone"


@pytest.mark.parametrize(
    "record",
    [
        signed("x" * 39), signed(principal="a b"), signed(groups=("a", "a")), signed(groups=("a/b",)),
        signed(expires_ns=0), signed(source="corp"), signed(source="other:corp"), signed(source="jwt:"),
        msgspec.structs.replace(API_KEY, id="short"), msgspec.structs.replace(API_KEY, salt="xx" * 16),
        msgspec.structs.replace(API_KEY, digest=""), msgspec.structs.replace(API_KEY, expires_ns=-1),
        msgspec.structs.replace(API_KEY, label="a\nb"), msgspec.structs.replace(API_KEY, principal=""),
    ],
    ids=range(14),
)  # fmt: skip
def test_a_record_that_makes_no_sense_is_refused(record: Record) -> None:
    with pytest.raises(InvalidArgument):
        check_record(record)


# ---------------------------------------------------------------- API keys


def test_an_api_key_is_known_by_its_digest() -> None:
    made = new_api_key()
    assert made.text.startswith(f"dfk_{made.id}_") and made.text not in repr(made)
    record = ApiKey(made.id, "pia", made.salt, made.digest)
    policy = policy_of(record)
    assert api_keys.find(policy, made.text, NOW) == record
    other = new_api_key()
    assert made.digest != other.digest and made.salt != other.salt
    wrong = [
        other.text, made.text[:-1], made.text + "A", made.text.upper(), made.text[:21] + other.text[21:],
        other.text[:21] + made.text[21:], "", "dfk_", made.text + "\n", made.text[:-1] + "\u00e9",
    ]  # fmt: skip
    for text in wrong:
        assert api_keys.find(policy, text, NOW) is None, text
    policy.put(msgspec.structs.replace(record, expires_ns=END))
    assert api_keys.find(policy, made.text, END - 1) is not None
    assert api_keys.find(policy, made.text, END) is None


# ---------------------------------------------------------------- the coordinator's checks


class Coordinator:
    """As much of it as the checks need."""

    def __init__(self, *records: Record) -> None:
        self.policy = policy_of(*records)
        self.told: list[Any] = []
        handlers: dict[type, Any] = {}
        mailbox: Any = SimpleNamespace(serve=handlers.__setitem__)
        self.is_enforced = True
        clock: Any = SimpleNamespace(wall_ns=lambda: NOW)
        store: Any = SimpleNamespace(get=lambda key: None)
        SignOnChecks(store, self, mailbox, clock)  # type: ignore[arg-type]
        self._add = handlers[m.AddSignOns]

    def keep(self, records: list[SignOn], asker: int, on_done: Any) -> None:
        for record in records:
            self.policy.put(record)
        on_done()

    def add(self, *records: SignOn) -> list[int]:
        """Codes of the outcomes."""
        answers: list[m.SignOnsAdded] = []
        data = [msgspec.json.encode(record) for record in records]
        message = m.AddSignOns(data, [""] * len(data))
        self._add(SimpleNamespace(message=message, reply=answers.append, peer=3))
        (answer,) = answers
        return answer.codes


def codes(*names: str) -> list[int]:
    by_name = {kind.__name__: kind.code for kind in DanubeError.__subclasses__()}
    return [0 if name == "" else by_name[name] for name in names]


def test_each_sign_on_is_checked_by_itself() -> None:
    other, third = (new_key_pair().public for _ in range(2))
    coordinator = Coordinator(Principal("paul"), Principal("out", disabled=True), API_KEY,
                              Credential(f"curve:{third}", "pia"))  # fmt: skip
    assert coordinator.add(signed(), signed(other, "eve"), signed(other, "out")) == codes(
        "", "PermissionDenied", "PermissionDenied"
    )
    assert coordinator.add(
        signed(other, source="api_key:" + "x" * 16),
        signed(other, "paul", source=f"api_key:{API_KEY.id}"),
        signed(other, source=f"api_key:{API_KEY.id}"),
    ) == codes("PermissionDenied", "PermissionDenied", "")
    assert coordinator.add(
        signed(third), signed(principal="paul"), signed(expires_ns=NOW), signed("0" * 40),
        signed(expires_ns=NOW + LIFETIME_NS_MAX + 1), signed(principal="bootstrap-admin", registered=False),
    ) == codes(
        "FailedPrecondition", "FailedPrecondition", "PermissionDenied", "InvalidArgument",
        "PermissionDenied", "PermissionDenied",
    )  # fmt: skip
    assert coordinator.add(signed(), signed()) == codes("", "Unavailable")
    assert coordinator.policy.principal_of(PROOF, NOW) == "pia"


def test_one_principal_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sign_ons, "PRINCIPAL_WEIGHT_MAX", 6)
    monkeypatch.setattr(sign_ons, "WEIGHT_MAX", 9)
    coordinator = Coordinator(Principal("paul"), Principal("eve"))
    keys = [new_key_pair().public for _ in range(5)]
    mine = [signed(key, groups=("a",)) for key in keys]
    assert coordinator.add(*mine) == codes("", "", "", "ResourceExhausted", "ResourceExhausted")
    assert coordinator.add(mine[0]) == codes(""), "a renewal weighs nothing"
    paul = [signed(new_key_pair().public, "paul") for _ in range(4)]
    assert coordinator.add(*paul) == codes("", "", "", "ResourceExhausted")
    coordinator.policy.purge(END + ENDED_NS)
    assert coordinator.policy.sign_ons.weight == 0


# ---------------------------------------------------------------- copies


def test_a_copy_that_is_read_anew_keeps_sign_ons_whose_source_is_good() -> None:
    """The coordinator has started again and knows no sign-on."""
    asked: list[Any] = []
    handlers: dict[type, Any] = {}
    watchers: list[Any] = []
    mailbox: Any = SimpleNamespace(
        serve=handlers.__setitem__, epoch_watchers=watchers, pauses=0, turn_ns=0, run_soon=None,
        call=lambda peer, message, on_reply, timeout_ms: asked.append(on_reply),
    )  # fmt: skip
    clock = SystemClock()
    boot: Any = SimpleNamespace(mailbox=mailbox, clock=clock)
    access = Access(clock)
    copy = SecurityCopy(boot, access)
    now_ns = clock.wall_ns()
    keys = {name: new_key_pair().public for name in ("jwt", "key", "gone", "paul", "ended")}
    end = now_ns + 60 * SECOND_NS
    gone = msgspec.structs.replace(API_KEY, id="g" * 16)
    before: list[Record] = [
        API_KEY, gone, Principal("pia"), Principal("paul"), Credential("uid:7", "pia"),
        signed(keys["jwt"], expires_ns=end),
        signed(keys["key"], source=f"api_key:{API_KEY.id}", expires_ns=end),
        signed(keys["gone"], source=f"api_key:{gone.id}", expires_ns=end),
        signed(keys["paul"], "paul", expires_ns=end),
        signed(keys["ended"], expires_ns=now_ns - ENDED_NS),
    ]  # fmt: skip
    after: list[Record] = [API_KEY, Principal("pia")]

    def load(records: list[Record], version: int) -> None:
        copy._load()
        page = m.SecurityPage(version, [msgspec.json.encode(record) for record in records], "")
        asked.pop()(SimpleNamespace(value=page, error=None))

    def known() -> set[str]:
        proofs = {name: f"curve:{key}" for name, key in keys.items()}
        return {name for name, proof in proofs.items() if access.principal_of(proof) is not None}

    load(before, 9)
    assert known() == {"jwt", "key", "gone", "paul"}
    load(after, 3)
    assert known() == {"jwt", "key"}
    assert access.principal_of("uid:7") is None
    copy.do_work(clock.monotonic_ns())
    assert len(access.policy.sign_ons.all()) == 2
