"""Rotation of the server key in a running broker: which port has which key, and what kills in the middle leave."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

import danube_fast
from danube_fast.errors import DanubeError, FailedPrecondition
from danube_fast.security.curve import read_key_file
from danube_fast.workers.supervisor.output import auth_text
from tests.delivery.test_security import TOPIC, SecuredServer
from tests.workers.broker import is_running, wait_until

HANDSHAKE_SECONDS = 10.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SecuredServer]:
    secured = SecuredServer(tmp_path / "data", tmp_path)
    with secured:
        secured.make_ann()
        yield secured


def has_key(port: int, public: str, key_file: Path) -> bool:
    """Whether a CURVE handshake with the process behind a port comes about if that key is pinned."""
    pair = read_key_file(key_file)
    events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    events |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt_string(zmq.CURVE_SERVERKEY, public)
        dealer.setsockopt_string(zmq.CURVE_PUBLICKEY, pair.public)
        dealer.setsockopt_string(zmq.CURVE_SECRETKEY, pair.secret)
        monitor = dealer.get_monitor_socket(events)
        try:
            dealer.connect(f"tcp://127.0.0.1:{port}")
            assert monitor.poll(HANDSHAKE_SECONDS * 1000), "no handshake, and none that failed"
            return bool(recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)
        finally:
            dealer.disable_monitor()
            monitor.close()


def ports(server: SecuredServer) -> list[int]:
    """Of the coordinator and the workers."""
    return [server.port, *range(server.port + 2, server.port + 2 + server.workers)]


def all_have(server: SecuredServer, public: str) -> bool:
    return all(has_key(port, public, server.folder / "ann.key") for port in ports(server))


def pinned(server: SecuredServer, public: str, **options: Any) -> Any:
    """ann, who takes this key for the broker's."""
    options = {"transport": "tcp", "timeout": 20.0, **options}
    key = server.folder / "ann.key"
    return danube_fast.connect(server.url, server_key=public, key_file=key, **options)


def step(server: SecuredServer, public: str, word: str) -> dict[str, Any]:
    with pinned(server, public) as ann:
        found: dict[str, Any] = ann.admin.rotate_server_key(word)
        return found


def test_a_rotation_leads_every_port_from_one_key_to_the_next(server: SecuredServer) -> None:
    old = server.server_key
    assert all_have(server, old)
    prepared = step(server, old, "prepare")
    new, other = prepared["keys"]
    assert (prepared["stage"], prepared["active"], other) == ("prepared", old, old)
    assert all_have(server, old) and not has_key(server.port, new, server.folder / "ann.key")
    with pinned(server, old) as ann:
        assert ann.admin.cluster_status()["server_keys"] == [new, old]
    activated = step(server, old, "activate")
    assert activated["keys"] == [new, old] and activated["active"] == new
    wait_until("the new key at every port", lambda: all_have(server, new))
    assert not any(has_key(port, old, server.folder / "ann.key") for port in ports(server))
    retired = step(server, new, "retire")
    assert retired["keys"] == [new]
    assert {row["key"] for row in retired["processes"]} == {new}
    assert sorted(path.name for path in server.data_dir.glob("server.key*")) == ["server.key"]
    server.stop()
    broker = server.start()
    assert broker.ready["server_key"] == new and broker.ready["server_keys"] == [new]
    assert all_have(server, new)


def test_an_activation_can_be_undone(server: SecuredServer) -> None:
    old = server.server_key
    new = step(server, old, "prepare")["keys"][0]
    step(server, old, "activate")
    wait_until("the new key at every port", lambda: all_have(server, new))
    assert step(server, new, "revert")["active"] == old
    wait_until("the old key at every port", lambda: all_have(server, old))
    assert step(server, old, "revert")["keys"] == [old]


def test_steps_out_of_order_are_refused_with_what_to_do(server: SecuredServer) -> None:
    with server.come_in("ann") as ann:
        with pytest.raises(FailedPrecondition, match="server-key prepare"):
            ann.admin.rotate_server_key("activate")
        with pytest.raises(DanubeError, match="prepare, activate"):
            ann.admin.rotate_server_key("turn")


@pytest.mark.parametrize("victim", ["worker", "coordinator"])
def test_a_process_that_is_killed_meanwhile_has_the_key_in_use_when_it_is_back(
    server: SecuredServer, victim: str
) -> None:
    old = server.server_key
    new = step(server, old, "prepare")["keys"][0]
    assert server.broker is not None
    ready = server.broker.ready
    pid = ready["worker_pids"][0] if victim == "worker" else ready["coordinator_pid"]
    if victim == "worker":
        os.kill(pid, signal.SIGSTOP)  # it cannot answer, so the step is under way when it dies
        step(server, old, "activate")
    else:
        taken = threading.Thread(target=_try_to_activate, args=(server, old), daemon=True)
        taken.start()
        wait_until(
            "the new key in its place",
            lambda: read_key_file(server.data_dir / "server.key").public == new,
        )
    os.kill(pid, signal.SIGKILL)
    wait_until("the new key at every port", lambda: all_have_or_away(server, new))
    with pinned(server, new) as ann:
        wait_until(
            "all that is known", lambda: {row["key"] for row in ann.admin.describe_server_key()["processes"]} == {new}
        )  # fmt: skip
    assert step(server, new, "retire")["stage"] == "one_key"


def _try_to_activate(server: SecuredServer, public: str) -> None:
    try:
        step(server, public, "activate")
    except DanubeError:
        pass  # its coordinator was killed


def all_have_or_away(server: SecuredServer, public: str) -> bool:
    """As `all_have`; False while a port is away."""
    try:
        return all_have(server, public)
    except AssertionError:
        return False


def test_a_stopped_worker_follows_when_it_goes_on(tmp_path: Path) -> None:
    secured = SecuredServer(tmp_path / "data", tmp_path, heartbeat_timeout_ms=60_000)
    with secured:
        secured.make_ann()
        old = secured.server_key
        new = step(secured, old, "prepare")["keys"][0]
        assert secured.broker is not None
        pid = secured.broker.ready["worker_pids"][0]
        os.kill(pid, signal.SIGSTOP)
        try:
            found = step(secured, old, "activate")
            assert found["active"] == new
            assert {row["key"] for row in found["processes"]} != {new}
            wait_until(
                "the new key of the coordinator",
                lambda: has_key(secured.port, new, secured.folder / "ann.key"),
            )
            with pinned(secured, new) as ann, pytest.raises(FailedPrecondition, match="worker"):
                ann.admin.rotate_server_key("retire")
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until("the new key at every port", lambda: all_have_or_away(secured, new))
        assert step(secured, new, "retire")["keys"] == [new]


def kill_all(server: SecuredServer) -> None:
    """SIGKILL the supervisor, with which all die."""
    broker, server.broker = server.broker, None
    assert broker is not None and broker.process.stdout is not None
    pids = [*broker.pids, broker.process.pid]
    broker.process.kill()
    broker.process.wait()
    wait_until("the end of all", lambda: not any(map(is_running, pids)))
    broker.process.stdout.close()
    broker.errors.close()


def test_a_broker_that_is_killed_between_steps_says_which_key_it_has(server: SecuredServer) -> None:
    old = server.server_key
    new = step(server, old, "prepare")["keys"][0]
    kill_all(server)
    ready = server.start().ready
    assert (ready["server_key"], ready["server_keys"]) == (old, [new, old])
    assert all_have(server, old)
    step(server, old, "activate")
    kill_all(server)
    ready = server.start().ready
    assert (ready["server_key"], ready["server_keys"]) == (new, [new, old])
    assert all_have(server, new)
    assert step(server, new, "retire")["keys"] == [new]


def test_the_ready_line_for_people_names_both_keys(tmp_path: Path) -> None:
    shared: Any = SimpleNamespace(
        settings=SimpleNamespace(auth="required"), server_key="OLD", server_keys=["NEW", "OLD"],
        directory=SimpleNamespace(path=tmp_path), counters=SimpleNamespace(total=lambda counter: 0),
    )  # fmt: skip
    assert auth_text(shared).startswith("required; server key OLD\n           and NEW, while")


def test_a_client_by_shared_memory_notices_nothing(server: SecuredServer) -> None:
    with server.come_in("ann") as ann:
        ann.admin.create_namespace("shop")
        ann.admin.create_topic(TOPIC)
        server.add(ann.admin, "pia", ("producer", TOPIC), ("consumer", TOPIC))
        ann.admin.set_credential(f"uid:{os.geteuid()}", "pia")
    old = server.server_key
    with server.come_in("pia", transport="shm") as pia:
        producer = pia.producer(TOPIC)
        assert producer.publish(b"0").offset == 0
        new = step(server, old, "prepare")["keys"][0]
        step(server, old, "activate")
        wait_until("the new key at every port", lambda: all_have(server, new))
        assert [producer.publish(b"x").offset for _ in range(20)] == list(range(1, 21))
