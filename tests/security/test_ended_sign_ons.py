"""Sign-ons that were ended stay out, whatever process has missed it: a coordinator that starts again, copies that are told
nothing, the process of sign-on that tells again what it knows."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from danube_fast.broker import messages as m
from danube_fast.clock import SECOND_NS, SystemClock
from danube_fast.errors import AlreadyExists, InvalidArgument, NotFound, Unavailable
from danube_fast.metadata.memory import MemoryStore
from danube_fast.roles import COORDINATOR
from danube_fast.security.curve import new_key_pair
from danube_fast.security.policy import Policy
from danube_fast.security.records import ApiKey, Principal, Revocation, SignOn, check_record
from danube_fast.security.sign_ons import LIFETIME_NS_MAX
from danube_fast.workers.coordinator import security
from danube_fast.workers.coordinator.administrators import stored
from danube_fast.workers.coordinator.security import SecurityDirectory
from danube_fast.workers.coordinator.sign_ons import SignOnChecks
from danube_fast.workers.process.access import Access
from danube_fast.workers.process.security_copy import SecurityCopy

WORKER, SIGN_ON = 2, 3
KEY = new_key_pair().public
PROOF = f"curve:{KEY}"
API_KEY = ApiKey("k" * 16, "pia", "00" * 16, "11" * 32)
NOW = 1_000 * SECOND_NS
HOLDERS = [f"sign_on/{KEY}", "principal/pia", "jwt:corp"]


class Clock(SystemClock):
    """A clock whose wall time can be set."""

    def __init__(self) -> None:
        super().__init__()
        self.moved_ns = 0

    def wall_ns(self) -> int:
        return super().wall_ns() + self.moved_ns


class Wire:
    """The mailbox of one process; messages arrive at once."""

    def __init__(self, broker: Broker, process: int) -> None:
        self._broker, self._process = broker, process
        self.handlers: dict[type, Any] = {}
        self.serve = self.handlers.__setitem__
        self.epoch_watchers: list[Any] = []
        self.pauses = 0
        self.turn_ns = 0

    def run_soon(self, work: Any) -> None:
        work()

    def notify(self, peer: int, message: Any) -> None:
        self.call(peer, message, lambda reply: None, 0)

    def call(self, peer: int, message: Any, on_reply: Any, timeout_ms: int) -> None:
        if peer in self._broker.deaf:
            on_reply(SimpleNamespace(value=None, error=Unavailable("it is stopped")))
            return

        def reply(value: Any = None) -> None:
            on_reply(SimpleNamespace(value=value, error=None))

        request = SimpleNamespace(message=message, peer=self._process, reply=reply)
        self._broker.wires[peer].handlers[type(message)](request)


class Broker:
    """A coordinator over a store, and the copies of a worker and of the process of sign-on."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.store = MemoryStore(self.clock)
        self.deaf: set[int] = set()
        """Processes that messages do not reach."""
        self.wires = {each: Wire(self, each) for each in (COORDINATOR, WORKER, SIGN_ON)}
        self.start()
        self.accesses = {each: Access(self.clock) for each in (WORKER, SIGN_ON)}
        self.copies: dict[int, SecurityCopy] = {}
        for process, access in self.accesses.items():
            boot: Any = SimpleNamespace(mailbox=self.wires[process], clock=self.clock)
            self.copies[process] = SecurityCopy(boot, access)
        self.directory.change([Principal("pia"), Principal("paul"), API_KEY])
        self.load()

    def start(self, told: tuple[int, ...] = ()) -> None:
        """Start the coordinator, or again behind a kill: then it knows what is in the store, and that those `told` have
        copies."""
        mailbox: Any = self.wires[COORDINATOR]
        access = Access(self.clock)
        self.directory = SecurityDirectory(self.store, mailbox, self.clock, access, told)
        SignOnChecks(self.store, self.directory, mailbox, self.clock)

    def start_both(self) -> None:
        """Start the coordinator and the process of sign-on again behind kills of both."""
        self.start()
        access = self.accesses[SIGN_ON] = Access(self.clock)
        boot: Any = SimpleNamespace(mailbox=self.wires[SIGN_ON], clock=self.clock)
        self.copies[SIGN_ON] = SecurityCopy(boot, access)

    def read(self, **digests: str) -> None:
        """Tell the coordinator which entries of issuers are in use."""
        message = m.IssuersRead("", digests)
        self.wires[SIGN_ON].call(COORDINATOR, message, lambda _: None, 1000)

    def load(self) -> None:
        for copy in self.copies.values():
            copy._load()

    def signed(self, key: str = KEY, principal: str = "pia", source: str = "jwt:corp") -> SignOn:
        now_ns = self.clock.wall_ns()
        return SignOn(key, principal, [], now_ns + 600 * SECOND_NS, source, True, now_ns)

    def add(self, *records: SignOn, entry: str = "") -> list[int]:
        """Codes of the outcomes of sign-ons that the process of sign-on asks for; `entry`: the one that vouches for them."""
        answers: list[m.SignOnsAdded] = []
        data = [msgspec.json.encode(record) for record in records]
        message = m.AddSignOns(data, [entry] * len(data))
        self.wires[SIGN_ON].call(
            COORDINATOR, message, lambda reply: answers.append(reply.value), 1000
        )
        return answers[0].codes

    def known_to(self, proof: str = PROOF) -> list[str | None]:
        """Whom a key stands for, in the coordinator and the copies."""
        own = self.directory.policy.principal_of(proof, self.clock.wall_ns())
        return [own, *(access.principal_of(proof) for access in self.accesses.values())]


@pytest.fixture
def broker() -> Iterator[Broker]:
    made = Broker()
    yield made
    made.store.close()


def test_the_rig_lets_keys_in_that_sign_on(broker: Broker) -> None:
    assert broker.add(broker.signed()) == [0]
    assert broker.known_to() == ["pia"] * 3
    broker.start()
    broker.load()
    assert broker.known_to() == [None, "pia", "pia"], "copies know it still"
    assert broker.add(*broker.accesses[SIGN_ON].policy.sign_ons.all()) == [0]
    assert broker.known_to() == ["pia"] * 3


@pytest.mark.parametrize(
    "holder", [*HOLDERS, "api_key:" + "k" * 16], ids=["key", "user", "issuer", "api-key"]
)
def test_an_end_is_felt_by_all_and_by_no_other(broker: Broker, holder: str) -> None:
    source = holder if holder.startswith("api_key:") else "jwt:corp"
    other = broker.signed(new_key_pair().public, "paul", "jwt:other")
    made = broker.signed(source=source)
    assert broker.add(made, other) == [0, 0]
    before = broker.accesses[WORKER].version
    assert broker.directory.end_sign_ons(holder) == 1
    assert broker.known_to() == [None] * 3
    assert broker.known_to(f"curve:{other.public_key}") == ["paul"] * 3
    assert broker.accesses[WORKER].policy.sign_ons.all() == [other], "its memory is given back"
    assert broker.accesses[WORKER].version != before, "workers look at their sessions"
    assert broker.add(made) == [Unavailable.code], "what was verified before"
    assert broker.add(broker.signed(source=source)) == [0], "what was made with it is good"
    assert broker.known_to() == ["pia"] * 3


@pytest.mark.parametrize("holder", HOLDERS, ids=["key", "user", "issuer"])
@pytest.mark.parametrize("deaf", [WORKER, SIGN_ON])
def test_a_kill_behind_the_end_brings_nothing_back(broker: Broker, holder: str, deaf: int) -> None:
    broker.add(broker.signed())
    broker.deaf.add(deaf)
    broker.directory.end_sign_ons(holder)
    broker.deaf.clear()
    again = broker.accesses[deaf].policy.sign_ons.all()
    assert len(again) == 1, "it has missed the end"
    broker.start()
    assert broker.add(*again) == [Unavailable.code], "the process of sign-on tells what it knew"
    broker.load()
    assert broker.known_to() == [None] * 3


@pytest.mark.parametrize("deaf", [WORKER, SIGN_ON])
def test_a_user_made_again_does_not_get_the_sign_ons_of_the_one_before(
    broker: Broker, deaf: int
) -> None:
    broker.add(broker.signed())
    broker.deaf.add(deaf)
    broker.directory.remove_record("principal", "pia")
    broker.directory.put_principal("pia", None, disabled=None)
    broker.deaf.clear()
    again = broker.accesses[deaf].policy.sign_ons.all()
    broker.start()
    assert broker.add(*again) != [0]
    broker.load()
    assert broker.known_to() == [None] * 3
    assert broker.add(broker.signed()) == [0], "the new one signs on"


def test_a_clock_that_is_set_back_leaves_nothing_behind(broker: Broker) -> None:
    broker.clock.moved_ns = 100 * SECOND_NS
    broker.add(broker.signed())
    broker.clock.moved_ns = 0
    broker.directory.end_sign_ons("principal/pia")
    assert broker.known_to() == [None] * 3


def test_revocations_go_when_all_that_they_ended_is_over(broker: Broker) -> None:
    def kept() -> set[str]:
        return {
            each.holder for each in stored(broker.directory.policy) if isinstance(each, Revocation)
        }

    broker.directory.end_sign_ons("principal/pia")
    broker.directory.end_sign_ons("jwt:corp")
    broker.directory.end_sign_ons("jwt:corp")
    assert kept() == {"principal/pia", "jwt:corp"}
    broker.clock.moved_ns = LIFETIME_NS_MAX + SECOND_NS
    before = broker.accesses[WORKER].version
    broker.directory.end_sign_ons("jwt:other")
    assert kept() == {"jwt:other"}
    assert broker.accesses[WORKER].version[0] == before[0] + 1, "one pass, for the new one"
    assert broker.accesses[WORKER].policy.get("revocation/jwt:corp") is None


def test_an_entry_that_differs_ends_the_sign_ons_that_it_has_let_in(broker: Broker) -> None:
    other = new_key_pair().public
    broker.read(corp="1", other="1")
    assert broker.add(broker.signed(), broker.signed(other, "paul", "jwt:other")) == [0, 0]
    broker.read(other="1", corp="1")
    assert broker.known_to() == ["pia"] * 3, "the entry is the same"
    broker.read(corp="2", other="1")
    assert broker.known_to() == [None] * 3
    assert broker.known_to(f"curve:{other}") == ["paul"] * 3
    assert broker.add(broker.signed()) == [0]
    broker.read(other="1")
    assert broker.known_to() == [None] * 3, "it is gone"


@pytest.mark.parametrize("now", [{"corp": "2"}, {}, {"corp": "1"}], ids=["differs", "gone", "same"])
def test_an_entry_that_changes_while_both_processes_are_down_ends_what_workers_know_still(
    broker: Broker, now: dict[str, str]
) -> None:
    broker.read(corp="1")
    broker.add(broker.signed())
    broker.start_both()
    broker.load()
    assert broker.known_to() == [None, "pia", None], "a worker alone knows it"
    broker.read(**now)
    is_in = now == {"corp": "1"}
    assert broker.known_to() == [None, "pia" if is_in else None, None]


def test_no_entry_lets_in_that_is_not_stored(broker: Broker) -> None:
    """What was verified by an entry of which the coordinator has not heard could not be found later."""
    assert broker.add(broker.signed(), entry="1") == [Unavailable.code]
    broker.read(corp="1")
    assert broker.add(broker.signed(), entry="2") == [Unavailable.code]
    assert broker.add(broker.signed(), entry="1") == [0]
    broker.start()
    assert broker.add(broker.signed(), entry="1") == [0], "it is stored"


def test_a_key_is_found_by_its_kind_alone(broker: Broker) -> None:
    broker.add(broker.signed())
    sign_ons = broker.directory.policy.sign_ons
    assert sign_ons.held_by(f"sign_on/{KEY}") == [f"sign_on/{KEY}"]
    assert sign_ons.held_by(KEY) == [] == sign_ons.held_by(f"principal/{KEY}")


@pytest.mark.parametrize(
    "holder",
    ["", "pia", "sign_on/" + "x" * 39, "principal/a b", "jwt:", "other:corp", "api_key/x", "jwt"],
)
def test_what_has_no_sign_ons_is_refused(broker: Broker, holder: str) -> None:
    with pytest.raises(InvalidArgument):
        broker.directory.end_sign_ons(holder)
    with pytest.raises(InvalidArgument):
        check_record(Revocation("principal/pia", -1))


def test_a_user_that_is_not_known_has_none_to_end(broker: Broker) -> None:
    with pytest.raises(
        NotFound, match="there is no user paula, and no sign-on of that name; see: "
    ):
        broker.directory.end_sign_ons("principal/paula")
    assert broker.directory.policy.get("revocation/principal/paula") is None
    assert broker.directory.end_sign_ons("principal/paul") == 0, "a user without a sign-on"
    guest = msgspec.structs.replace(broker.signed(principal="guest"), registered=False)
    assert broker.add(guest) == [0]
    assert broker.directory.end_sign_ons("principal/guest") == 1, "no user, and signed on"
    assert broker.directory.end_sign_ons("principal/guest") == 0, "asked a second time"
    for holder in ("jwt:unknown", f"sign_on/{KEY}"):
        assert broker.directory.end_sign_ons(holder) == 0


def test_a_list_goes_page_by_page(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "SCANNED_MAX", 5)
    keys = sorted(new_key_pair().public for _ in range(13))
    broker.add(
        *(broker.signed(key, "paul" if place % 4 else "pia") for place, key in enumerate(keys))
    )

    def listed(limit: int, principal: str = "", source: str = "") -> list[str]:
        found: list[str] = []
        after, pages = "", 0
        while pages == 0 or after:
            page = broker.directory.list_sign_ons(after, limit, principal, source)
            after, pages = page["after"], pages + 1
            assert len(page["sign_ons"]) <= limit
            found += [row["public_key"] for row in page["sign_ons"]]
        return found

    assert listed(3) == keys and listed(100) == keys
    assert listed(2, "pia") == keys[::4]
    assert listed(100, "", "jwt:corp") == keys and listed(100, "pia", "jwt:other") == []
    broker.clock.moved_ns = 601 * SECOND_NS
    assert listed(100) == [], "one that has ended is none"


def test_many_that_are_revoked_are_removed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removing 400,000 would hold up a worker for seconds."""
    monkeypatch.setattr("danube_fast.security.sign_ons.REVOKED_AT_ONCE", 4)
    policy = Policy()
    keys = [new_key_pair().public for _ in range(10)]
    made = [SignOn(key, "pia", [], NOW + SECOND_NS, "jwt:corp", True, NOW) for key in keys]
    for record in (Principal("pia"), *made, Revocation("jwt:corp", NOW)):
        policy.put(record)
    assert len(policy.sign_ons) == 6
    assert not any(policy.principal_of(f"curve:{key}", NOW) for key in keys)
    left = policy.sign_ons.all()[2]
    policy.put(msgspec.structs.replace(left, made_ns=NOW + 1))  # signed on again
    policy.purge(NOW)
    policy.purge(NOW)
    assert [record.public_key for record in policy.sign_ons.all()] == [left.public_key]
    assert policy.principal_of(f"curve:{left.public_key}", NOW) == "pia"


def test_a_copy_takes_none_that_is_revoked() -> None:
    policy = Policy()
    made = SignOn(KEY, "pia", [], NOW + SECOND_NS, "jwt:corp", True, NOW)
    for record in (Principal("pia"), Revocation("jwt:corp", NOW), made):
        policy.put(record)
    assert policy.principal_of(PROOF, NOW) is None
    policy.put(msgspec.structs.replace(made, made_ns=NOW + 1))
    assert policy.principal_of(PROOF, NOW) == "pia"
    policy.put(Revocation("principal/pia", NOW))
    assert policy.principal_of(PROOF, NOW) == "pia"


def test_an_api_key_that_is_asked_for_again_is_made_once(broker: Broker) -> None:
    """A client that has heard no answer asks with the same key."""
    add = broker.directory.add_api_key
    options: dict[str, Any] = {"salt": "00" * 16, "expires_seconds": 60, "label": "desk"}
    for _ in range(3):
        add("a" * 16, "pia", digest="22" * 32, **options)
    broker.start()
    broker.directory.add_api_key("a" * 16, "pia", digest="22" * 32, **options)
    assert [row["id"] for row in broker.directory.describe("api_key", "", 10)] == [
        "a" * 16,
        "k" * 16,
    ]
    for who, digest in (("paul", "22" * 32), ("pia", "33" * 32)):
        with pytest.raises(AlreadyExists):
            broker.directory.add_api_key("a" * 16, who, digest=digest, **options)
