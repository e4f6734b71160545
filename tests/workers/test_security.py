"""Authenticator and Authorizer are components: both kinds of processes ask the ones that they are given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from danube_fast.clock import SystemClock
from danube_fast.config import Settings
from danube_fast.errors import PermissionDenied
from danube_fast.metadata.memory import MemoryStore
from danube_fast.roles import Owner, Processes
from danube_fast.security import Authorizer, Permission
from danube_fast.visible import Visible
from danube_fast.workers.coordinator.coordinator import Coordinator
from danube_fast.workers.coordinator.watches import _is_told
from danube_fast.workers.process.environment import Environment
from tests.workers.shard_rig import FakeMailbox, RawClient, Rig

PASSWORD = "open sesame"
ERROR = 66
LOOKUP, ADMIN, WATCH, OPEN_PRODUCER = 4, 5, 6, 10


class Passwords:
    """Takes one password."""

    def authenticate(self, claims: Mapping[str, Any], proof: str = "") -> str:
        if claims.get("password") != PASSWORD:
            raise PermissionDenied("the password is wrong or missing; give the right one")
        return str(claims["principal"])


class ReadOnly(Authorizer):
    """Lets everybody look and consume, and ann do everything. Keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Permission, str]] = []
        self.revoked = False
        """Lets no one do anything."""

    def authorize(self, principal: str, permission: Permission, resource: str) -> None:
        self.asked.append((principal, permission, resource))
        if self.revoked or (
            principal != "ann" and permission not in (Permission.LOOKUP, Permission.CONSUME)
        ):
            raise PermissionDenied(f"{principal} has no {permission} on {resource}")


class Secured(Environment):
    """An environment with both."""

    def __init__(self) -> None:
        super().__init__()
        self.authenticator = Passwords()
        self.authorizer = self.rules = ReadOnly()

    def make_store(self, *_: Any, **__: Any) -> Any:
        return MemoryStore(SystemClock())


@pytest.fixture
def environment() -> Secured:
    return Secured()


def claims(name: str, password: str = PASSWORD) -> dict[str, Any]:
    return {"principal": name, "password": password}


def test_a_worker_asks_both(tmp_path: Path, environment: Secured) -> None:
    rig = Rig(tmp_path, environment=environment)
    try:
        rig.assign(1)
        for wrong in ({}, claims("ann", "guess")):
            with pytest.raises(AssertionError, match="password"):
                rig.client(wrong)  # WELCOME is expected, an error comes
        bob, ann = rig.client(claims("bob")), rig.client(claims("ann"))
        refused = bob.ask(OPEN_PRODUCER, 1, "p")
        assert refused[0] == ERROR and refused[2] == PermissionDenied.code
        assert "bob" in refused[3] and "/default/t1" in refused[3]
        assert bob.subscribe(1)
        assert ann.publish((1, ann.frame(ann.open_producer(1), 0, [b"x"])))[0] == 0
        asked = environment.rules.asked
        assert ("bob", Permission.CONSUME, "/default/t1#s") in asked
        assert ("ann", Permission.PRODUCE, "/default/t1") in asked
    finally:
        rig.stop()


def test_a_right_that_goes_while_history_is_asked_is_gone(
    tmp_path: Path, environment: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, environment=environment)
    try:
        rig.assign(1)
        asked: list[Any] = []
        monkeypatch.setattr(rig.worker.times, "may_hold", lambda *_: True)
        monkeypatch.setattr(rig.worker.times, "find", lambda *question: asked.append(question[-1]))
        bob = rig.client(claims("bob"))
        for number, revoked in ((1, False), (2, True)):
            request = bob.post(20, number, 1, 1, f"s{number}", "exclusive", {"time_ns": 1})
            rig.turn(lambda: asked, "the question")
            environment.rules.revoked = revoked
            asked.pop()(0, None)
            reply = bob.answer(request)
            assert (reply[0] == ERROR and reply[2] == PermissionDenied.code) == revoked, reply
        names = [sub["subscription"] for sub in rig.stats([1])[0]["subscriptions"]]
        assert names == ["s1"]
    finally:
        rig.stop()


class CoordinatorRig:
    """A coordinator without its process, as far as a raw client needs it."""

    def __init__(self, directory: Path, environment: Environment) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.mailbox = FakeMailbox()
        self.port = 0
        processes = Processes.with_workers(1)
        config = SimpleNamespace(
            epoch=1,
            accept_rollback=False, data_dir=str(directory), host_id="rig", worker_count=1,
            processes=processes, owners=[Owner("rig", 0)], process_of_log=lambda log_id: 1,
            advertise="127.0.0.1", ipc_endpoints=["", ""], admin_fd=-1, logs=[],
            tcp_host="127.0.0.1", tcp_port=0, ipc_endpoint="",
        )  # fmt: skip
        ready = SimpleNamespace(state=None, epoch=0)
        boot: Any = SimpleNamespace(
            config=config, settings=Settings(data_dir=str(directory)), clock=SystemClock(),
            mailbox=self.mailbox, heartbeat=lambda: None, set_state=self._set_state,
            control=SimpleNamespace(status=lambda process: ready, port=lambda process: 1),
            counters=SimpleNamespace(set=lambda counter, value: None), stop_requested=False,
        )  # fmt: skip
        self.coordinator = Coordinator(boot, self.context, environment)
        self.coordinator.start()
        self.clients: list[RawClient] = []

    turn = Rig.turn
    client = Rig.client

    @property
    def worker(self) -> Coordinator:
        """What `turn` drives."""
        return self.coordinator

    def _set_state(self, state: Any, port: int = 0) -> None:
        self.port = port or self.port

    def stop(self) -> None:
        self.coordinator.stop()
        for client in self.clients:
            client.socket.close(linger=0)
        self.context.destroy(linger=0)
        self.mailbox.close()


def test_the_coordinator_asks_both(tmp_path: Path, environment: Secured) -> None:
    rig: Any = CoordinatorRig(tmp_path, environment)
    try:
        with pytest.raises(AssertionError, match="password"):
            rig.client(claims("ann", "guess"))
        bob = rig.client(claims("bob"))
        for command in (
            (ADMIN, "create_topic", {"topic": "/default/a"}),
            (LOOKUP, "/default/a", {"dispatch": "reliable"}),
        ):
            refused = bob.ask(*command)
            assert refused[0] == ERROR and refused[2] == PermissionDenied.code, refused
        assert bob.ask(ADMIN, "list_topics", {})[2] == []
        bob.ask(WATCH, "", ["/default/*"], 0)
        ann = rig.client(claims("ann"))
        ann.post(ADMIN, "create_topic", {"topic": "/default/a"})
        rig.turn(lambda: rig.coordinator.topics.topic("/default/a"), "the topic")
        asked = environment.rules.asked
        assert ("bob", Permission.MANAGE_TOPIC, "/default/a") in asked
        assert ("bob", Permission.PRODUCE, "namespace:default") in asked
        assert ("ann", Permission.MANAGE_TOPIC, "/default/a") in asked
    finally:
        rig.stop()


def test_a_watch_does_not_tell_the_names_of_reply_topics() -> None:
    assert not _is_told("/system/reply-1", Visible(lambda topic: True))
    assert _is_told("/system/audit", Visible(lambda topic: True))
