"""A worker that has not heard for 30 s who may do what: it lets no client in and opens nothing, and what is open goes on."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from danube_fast.broker import messages as m
from danube_fast.clock import SECOND_NS, SystemClock
from danube_fast.errors import InvalidArgument, PermissionDenied, Unavailable
from danube_fast.metadata.memory import MemoryStore
from danube_fast.ring.handover import Refused, dial, take
from danube_fast.security.audit import ITEMS_MAX
from danube_fast.security.curve import new_key_pair
from danube_fast.security.records import Binding, Credential, Principal, Record
from danube_fast.security.server_keys import ServerKeys
from danube_fast.types import Permission
from danube_fast.workers.coordinator.security import SecurityDirectory
from danube_fast.workers.process.access import CONFIRMED_NS_MAX, OVERFLOW, Access
from danube_fast.workers.shard.access_checks import AccessChecks
from tests.workers.ring_client import MESSAGE_BYTES_MAX, Frozen, RingClient, fresh_endpoint
from tests.workers.shard_rig import WAIT_SECONDS, FakeMailbox, FakeRequest, RawClient, Rig

HELLO, PING, OPEN_PRODUCER, SUBSCRIBE = 1, 2, 10, 20
WELCOME, PONG, ERROR, RESULT = 64, 65, 66, 67
TOPIC = "/default/t1"
OWN = f"uid:{os.geteuid()}"
VERSION = 7
_NUMBERS = itertools.count(100)


class Told(FakeMailbox):
    """A mailbox whose coordinator hands out these records at once."""

    pauses = 0

    def __init__(self, records: list[Record]) -> None:
        super().__init__()
        self._page = m.SecurityPage(VERSION, [msgspec.json.encode(each) for each in records], "")

    @property
    def turn_ns(self) -> int:
        return SystemClock().monotonic_ns()

    def run_soon(self, action: Callable[[], None]) -> None:
        raise AssertionError("no authorizer of another package is asked here")

    def call(self, peer: int, message: m.Message, body: Any = b"", *, on_reply: Any, **_: Any) -> None:  # fmt: skip
        if isinstance(message, m.FindSecurity):
            on_reply(SimpleNamespace(error=None, value=self._page))
        else:
            super().call(peer, message, body, on_reply=on_reply)


class KeyedClient(RawClient):
    """A raw client with the key of pia, over tcp."""

    def _connect(self) -> Any:
        rig: Any = self.rig
        sock = rig.dealer()
        sock.connect(rig.url)
        return sock


class SecuredRig(Rig):
    """A secured worker, and pia, who has a key and is a local user; the clock of rights stands still."""

    def __init__(self, folder: Path) -> None:
        self.pair = new_key_pair()
        self.proof = f"curve:{self.pair.public}"
        records: list[Record] = [Principal("pia"), Credential(self.proof, "pia"), Credential(OWN, "pia")]  # fmt: skip
        records += [Binding(role, "user:pia", role, TOPIC) for role in ("producer", "consumer")]
        folder.mkdir()
        ServerKeys(folder).open()
        super().__init__(
            folder, mailbox=Told(records), ipc_endpoint=fresh_endpoint(), auth="required"
        )
        assert self.worker.secured is not None
        self.access = self.worker.secured.access
        self.rights_clock = Frozen(time.monotonic_ns())
        self.access.clock = self.rights_clock
        self.confirm()
        self.assign(1)

    def confirm(self) -> None:
        """Let the coordinator say that the copy is the newest one."""
        request = FakeRequest(m.SecurityConfirmed(VERSION))
        self.mailbox.handlers[m.SecurityConfirmed](request)

    def dealer(self) -> Any:
        """A socket with pia's key."""
        assert self.worker.secured is not None
        sock = self.context.socket(zmq.DEALER)
        sock.setsockopt(zmq.CURVE_PUBLICKEY, self.pair.public.encode())
        sock.setsockopt(zmq.CURVE_SECRETKEY, self.pair.secret.encode())
        sock.setsockopt(zmq.CURVE_SERVERKEY, self.worker.secured.keys.public.encode())
        return sock

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def handshake(self) -> int:
        """Connect once more; the event that a handshake ends with."""
        sock = self.dealer()
        monitor = sock.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)  # fmt: skip
        try:
            sock.connect(self.url)
            assert monitor.poll(WAIT_SECONDS * 1000), "the handshake does not end"
            return int(recv_monitor_message(monitor)["event"])
        finally:
            sock.disable_monitor()
            monitor.close(linger=0)
            sock.close(linger=0)

    def ask_for_rings(self, refusal: str) -> None:
        """Be refused rings, with that text."""
        sock = dial(self.ipc_endpoint)
        assert sock is not None
        with sock:
            self.worker.do_work()
            with pytest.raises(Refused, match=refusal):
                assert take(sock, MESSAGE_BYTES_MAX) is None, "there are rings"

    @property
    def checks(self) -> AccessChecks:
        """Look after what is open when rights change."""
        (found,) = [each for each in self.worker.upkeep._jobs if isinstance(each, AccessChecks)]
        return found

    def keyed(self) -> KeyedClient:
        client = KeyedClient(self)
        self.clients.append(client)
        return client

    def by_rings(self) -> RingClient:
        client = RingClient(self)
        self.clients.append(client)
        return client


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[SecuredRig]:
    made = SecuredRig(tmp_path / "data")
    yield made
    made.stop()


def outcomes(rig: SecuredRig, client: RawClient) -> dict[str, list[Any]]:
    """What a client is answered that begins anew, and opens something."""
    number = next(_NUMBERS)
    return {
        "producer": client.ask(OPEN_PRODUCER, 1, f"p{number}"),
        "consumer": client.ask(SUBSCRIBE, number, 1, 1, f"s{number}", "exclusive", "earliest"),
        "reader": client.ask(SUBSCRIBE, number + 1000, 1, 1, "", "reader", "earliest"),
        "session": client.ask(HELLO, 1, "again", {}),
    }


@pytest.mark.parametrize("lane", ["tcp", "rings"])
def test_without_word_for_30_s_nothing_new_and_what_is_open_goes_on(
    rig: SecuredRig, lane: str
) -> None:
    make = rig.keyed if lane == "tcp" else rig.by_rings
    client, other = make(), make()
    opened = client.open_producer(1)
    client.subscribe(1)

    rig.rights_clock.now += CONFIRMED_NS_MAX - 1
    assert CONFIRMED_NS_MAX == 30 * SECOND_NS
    assert rig.access.admits(rig.proof)
    assert rig.handshake() == zmq.EVENT_HANDSHAKE_SUCCEEDED
    make()
    told = outcomes(rig, other)
    kinds = {what: reply[0] for what, reply in told.items()}
    assert kinds == dict.fromkeys(told, RESULT) | {"session": WELCOME}, told

    rig.rights_clock.now += 1
    with pytest.raises(Unavailable, match="has not heard"):
        rig.access.admits(rig.proof)
    with pytest.raises(Unavailable, match="has not heard"):
        rig.access.authorize("pia", Permission.PRODUCE, TOPIC)
    assert rig.handshake() == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    rig.ask_for_rings(refusal="not registered")
    for what, reply in outcomes(rig, other).items():
        assert reply[0] == ERROR and reply[2] == Unavailable.code, (what, reply)

    for number in range(3):
        # a change that says nothing of the topic: all that pia has open is looked at
        rig.access.policy.put(Binding("other", "user:pia", "consumer", f"/other/t{number}"))
        rig.turn(lambda: not rig.checks.is_busy, "a pass over what is open")
        frame = client.frame(opened, number, [b"%d" % number])
        assert client.publish((1, frame)) == [0, number]
        assert client.receive(1) == [(number, b"%d" % number)]
        client.ack(number, number + 1)
    assert client.ask(PING)[0] == PONG

    rig.confirm()
    assert rig.handshake() == zmq.EVENT_HANDSHAKE_SUCCEEDED
    make()
    assert other.ask(HELLO, 1, "again", {})[0] == WELCOME
    assert {reply[0] for reply in outcomes(rig, other).values()} == {RESULT, WELCOME}


@pytest.fixture
def access() -> Access:
    """What a process knows where a record for the overflow uid was there before such records were refused."""
    made = Access(SystemClock())
    for user in (OVERFLOW, "uid:65533", "uid:65535"):
        made.policy.put(Principal("pia"))
        made.policy.put(Credential(user, "pia"))
    made.is_loaded = True
    made.confirm()
    return made


def test_a_user_that_the_kernel_cannot_name_is_refused_whatever_is_registered(
    access: Access,
) -> None:
    assert OVERFLOW == "uid:65534"
    for user in ("uid:65533", "uid:65535"):
        assert access.admits(user) and access.authenticate({}, user) == "pia"
    assert not access.admits(OVERFLOW)
    assert access.principal_of(OVERFLOW) is None
    with pytest.raises(PermissionDenied, match="local user 65534 is not registered"):
        access.authenticate({"principal": "pia"}, OVERFLOW)


def test_a_user_that_the_kernel_cannot_name_is_not_registered() -> None:
    mailbox: Any = FakeMailbox()
    clock = SystemClock()
    directory = SecurityDirectory(MemoryStore(clock), mailbox, clock, Access(clock))
    directory.change([Principal("pia")])
    with pytest.raises(InvalidArgument, match="every user of another user namespace; register the user that"):  # fmt: skip
        directory.put_credential(OVERFLOW, "pia", expires_seconds=0, label="")
    assert directory.policy.get(f"credential/{OVERFLOW}") is None
    directory.put_credential("uid:65533", "pia", expires_seconds=0, label="")
    mailbox.close()


def test_a_user_that_is_changed_is_told_as_it_is_now() -> None:
    mailbox: Any = FakeMailbox()
    clock = SystemClock()
    directory = SecurityDirectory(MemoryStore(clock), mailbox, clock, Access(clock))
    made = directory.put_principal("pia", ["ops"], disabled=True)
    assert made == {"name": "pia", "groups": ["ops"], "disabled": True}
    assert directory.put_principal("pia", None, disabled=None) == made, "it stays disabled"
    assert not directory.put_principal("pia", None, disabled=False)["disabled"]
    mailbox.close()


@pytest.mark.parametrize("what", ["credentials", "roles", "groups"])
def test_one_change_of_a_user_has_no_more_than_its_record_in_the_log_shows(what: str) -> None:
    """Repetitions in front would hide what it is about."""
    mailbox: Any = FakeMailbox()
    clock = SystemClock()
    directory = SecurityDirectory(MemoryStore(clock), mailbox, clock, Access(clock))
    first, last = ("uid:7", "uid:8") if what == "credentials" else ("viewer", "admin")
    lists: dict[str, list[str]] = {"groups": [], what: [first] * ITEMS_MAX + [last]}
    text = rf"17 {what} in one change.*{ITEMS_MAX}.*" + (
        "user itself" if what == "groups" else "several changes"
    )
    with pytest.raises(InvalidArgument, match=text):
        directory.put_principal("pia", lists.pop("groups"), disabled=None, **lists)
    assert directory.policy.get("principal/pia") is None
    mailbox.close()


def test_commands_of_administrators_are_known(rig: SecuredRig) -> None:
    is_administrator = rig.worker.commands.is_administrator
    assert not is_administrator("pia") and not is_administrator("eve")
    rig.access.policy.put(Binding("rules", "user:pia", "admin", "cluster"))
    assert is_administrator("pia")
    rig.access.policy.put(Principal("pia", disabled=True))
    assert not is_administrator("pia")
