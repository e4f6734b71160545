"""Clients that sign on with a token at a broker in processes of its own: renewals, kills, revocation, rotated keys.

A producer and a consumer are at work meanwhile: nothing that was acked is lost, no message comes twice as another one,
and the order stays.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import danube_fast
from danube_fast.errors import DanubeError, PermissionDenied
from danube_fast.security.api_keys import new_api_key
from danube_fast.security.curve import new_key_pair, write_key_file
from tests.client.fake_sign_on import FakeSignOn, certificate, granted, refusal
from tests.delivery.sign_on_rig import IssuerKey, SignOnServer, issuer_toml
from tests.delivery.test_security import TOPIC, SecuredServer, refused
from tests.workers.broker import ROOT, wait_until

DENIED_SECONDS = 5.0
"""As soon is promised that a client hears of a token that was taken back."""
SLACK = 4
LOAD_SECONDS = 60.0
OF_CLIENTS = ("DANUBE_SERVER_KEY", "DANUBE_KEY_FILE", "DANUBE_CONTEXT")


@pytest.fixture(scope="module")
def issuer() -> IssuerKey:
    return IssuerKey()


@pytest.fixture
def server(tmp_path: Path, issuer: IssuerKey) -> Iterator[SignOnServer]:
    import json

    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [issuer.jwk()]}))
    keys.chmod(0o644)
    with SignOnServer(tmp_path / "data", tmp_path, issuer_toml(jwks_file=str(keys))) as broker:
        broker.make_ann()
        with broker.come_in("ann") as ann:
            ann.admin.create_namespace("shop")
            ann.admin.create_topic(TOPIC)
            broker.add(ann.admin, "pia", ("producer", TOPIC), ("consumer", TOPIC))
        yield broker


def way_in(server: SignOnServer, token: Any, **options: Any) -> dict[str, Any]:
    """Options of `connect`."""
    return {
        "url": server.url, "token": token, "sign_on": server.sign_on_url, "transport": "zmq",
        "tls": server.certificate.fingerprint, "timeout": 30.0, **options,
    }  # fmt: skip


def api_key(server: SignOnServer, user: str = "pia") -> tuple[str, str]:
    """A new API key of a user: its text and its id."""
    made = new_api_key()
    with server.come_in("ann") as ann:
        ann.admin.add_api_key(user, made.id, made.salt, made.digest)
    return made.text, made.id


class Load:
    """A producer and a consumer, each with a client and a thread of its own."""

    def __init__(self, connect: Callable[[str], Any], topic: str = TOPIC) -> None:
        """`connect`: a client with that name."""
        self._connect, self._topic = connect, topic
        self._stop = threading.Event()
        self._has_all = threading.Event()
        """Set when nothing is published any more."""
        self.acked: list[int] = []
        """Offsets, in the order of their numbers."""
        self.received: list[tuple[int, int]] = []
        """Offset, number."""
        self.faults: list[BaseException] = []
        self.clients: list[Any] = []
        self._threads = [
            threading.Thread(target=self._run, args=(run, name), name=name)
            for run, name in ((self._produce, "producer"), (self._consume, "consumer"))
        ]

    def _run(self, run: Callable[[Any], None], name: str) -> None:
        try:
            with self._connect(name) as client:
                self.clients.append(client)
                run(client)
        except Exception as error:  # the test tells
            self.faults.append(error)

    def _produce(self, client: Any) -> None:
        producer = client.producer(self._topic, name="load", timeout=LOAD_SECONDS)
        while not self._stop.is_set():
            self.acked.append(producer.publish(b"%d" % len(self.acked)).offset)

    def _consume(self, client: Any) -> None:
        consumer = client.consumer(self._topic, subscription="s", initial_position="earliest")
        end = None
        while not self._has_all.is_set() or len(set(self.received)) < len(self.acked):
            end = end or (time.monotonic() + LOAD_SECONDS if self._has_all.is_set() else None)
            assert end is None or time.monotonic() < end, "messages that were acked do not come"
            message = consumer.receive(timeout=1.0)
            if message is not None:
                self.received.append((message.offset, int(message.payload)))
                consumer.ack(message)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def goes_on(self) -> float:
        """Wait until more was acked and received than up to now; how many seconds that took."""
        began = time.monotonic()
        acked, received = len(self.acked), len(self.received)

        def more() -> bool:
            has_come = len(self.acked) > acked + 20 and len(self.received) > received + 20
            return bool(self.faults) or has_come

        wait_until("progress of producer and consumer", more, LOAD_SECONDS)
        assert not self.faults, self.faults
        return time.monotonic() - began

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * LOAD_SECONDS)
            self._has_all.set()
            assert not thread.is_alive(), f"the {thread.name} does not end"

    def check(self) -> None:
        """Nothing is lost, and all is in order."""
        assert not self.faults, self.faults
        assert self.acked == list(range(len(self.acked))), (
            "a message is stored twice, or not at all"
        )
        firsts = list(dict.fromkeys(self.received))
        assert firsts == [(number, number) for number in range(len(self.acked))]


def sign_ons(client: Any) -> Any:
    """What keeps a client signed on."""
    return client._core._trust.sign_on


def test_a_renewal_keeps_the_sessions(server: SignOnServer, issuer: IssuerKey) -> None:
    drawn: list[str] = []

    def token() -> str:
        drawn.append(issuer.token(exp=int(time.time()) + 6))
        return drawn[-1]

    with Load(lambda name: danube_fast.connect(**way_in(server, token, name=name))) as load:
        load.goes_on()
        sessions = [client._core.routes.bootstrap._session for client in load.clients]
        began = time.monotonic()
        wait_until("some renewals", lambda: len(drawn) >= 8, LOAD_SECONDS)
        assert time.monotonic() - began > 6, "renewed too often"
        load.goes_on()
        for client, session in zip(load.clients, sessions, strict=True):
            assert client._core.routes.bootstrap._session == session
            assert sign_ons(client).generation == 1
    load.check()


@pytest.mark.parametrize("role", ["worker", "coordinator", "sign_on", "all"])
def test_kills_lose_nothing(server: SignOnServer, role: str) -> None:
    text, _ = api_key(server)
    url = server.sign_on_url

    def connect(name: str) -> Any:
        return danube_fast.connect(**way_in(server, text, name=name, sign_on=url))

    with Load(connect) as load:
        load.goes_on()
        pids = server.pids()
        for name, pid in pids.items():
            if role == "all" or name.startswith(role):
                os.kill(pid, signal.SIGKILL)
        load.goes_on()
    load.check()


class OwnPort:
    """A sign-on port of the test, at a broker that knows of none: it registers keys, which the test removes."""

    def __init__(self, server: SecuredServer, folder: Path) -> None:
        pem = certificate(folder / "own-tls")
        self._admin = server.come_in("ann")
        self._server = server
        self.is_good = True
        self.seconds = 3600
        self.port = FakeSignOn(pem, self._grant)
        self.options = {
            "url": server.url, "token": "dfk_token", "sign_on": self.port.url, "transport": "zmq",
            "tls": pem.fingerprint, "timeout": 30.0,
        }  # fmt: skip

    def _grant(self, token: str, key: str) -> Any:
        if not self.is_good:
            return refusal(401, "PermissionDenied", "this API key was taken back")
        self._admin.admin.set_credential(f"curve:{key}", "pia", expires_seconds=self.seconds)
        return granted([self._server.server_key], principal="pia", seconds=self.seconds)

    def forget(self) -> None:
        """End what was signed on."""
        for row in self._admin.admin.list_security("credential"):
            if row["expires_ns"]:
                self._admin.admin.delete_security("credential", row["credential"])

    def close(self) -> None:
        self.port.close()
        self._admin.close()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[tuple[SecuredServer, OwnPort]]:
    with SecuredServer(tmp_path / "data", tmp_path) as server:
        server.make_ann()
        with server.come_in("ann") as ann:
            ann.admin.create_namespace("shop")
            ann.admin.create_topic(TOPIC)
            server.add(ann.admin, "pia", ("producer", TOPIC), ("consumer", TOPIC))
        port = OwnPort(server, tmp_path)
        yield server, port
        port.close()


@pytest.mark.parametrize("kill", [False, True], ids=["alive", "killed"])
def test_a_sign_on_that_the_broker_has_forgotten(
    own: tuple[SecuredServer, OwnPort], kill: bool
) -> None:
    """Workers end the sessions, or are new; the clients sign on anew by themselves, with the same key."""
    server, port = own
    with Load(lambda name: danube_fast.connect(**port.options, name=name)) as load:
        load.goes_on()
        if kill:
            with server.come_in("ann") as ann:
                processes = ann.admin.cluster_status()["processes"]
            pids = [row["pid"] for row in processes if row["process"].startswith("worker")]
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)  # none of them hears of it before its end
            port.forget()
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        else:
            port.forget()
        wait_until(
            "new sign-ons",
            lambda: load.faults or all(sign_ons(each).generation >= 2 for each in load.clients),
            LOAD_SECONDS,
        )
        load.goes_on()
        assert all(sign_ons(each).generation <= 4 for each in load.clients), "signed on too often"
    load.check()
    assert len({key for _, key in port.port.asked}) == 2


def test_a_renewal_that_is_refused_ends_the_client(own: tuple[SecuredServer, OwnPort]) -> None:
    _, port = own
    port.seconds = 4
    with danube_fast.connect(**port.options) as client:
        producer = client.producer(TOPIC)
        producer.publish(b"in")
        port.is_good = False

        def is_out() -> bool:
            try:
                producer.publish(b"out")
            except PermissionDenied as error:
                return "taken back" in str(error)
            return False

        wait_until("a refusal", is_out, SLACK * DENIED_SECONDS)


def test_a_token_that_is_taken_back(server: SignOnServer) -> None:
    text, key_id = api_key(server)
    with (
        danube_fast.connect(**way_in(server, text)) as client,
        server.come_in("ann") as ann,
    ):
        producer = client.producer(TOPIC)
        producer.publish(b"in")
        ann.admin.delete_security("api_key", key_id)
        began = time.monotonic()

        def is_out() -> str:
            try:
                producer.publish(b"out")
            except PermissionDenied as error:
                return str(error)
            return ""

        said = wait_until("a refusal", is_out, SLACK * DENIED_SECONDS)
        seconds = time.monotonic() - began
        assert "refuses the sign-on" in said and "get a new one from an administrator" in said
        assert text not in said and text.rpartition("_")[2] not in said
        assert "refuses the sign-on" in refused(lambda: client.producer(TOPIC))
        print(f"refused after {seconds:.2f} s")
    assert "refuses the sign-on" in refused(lambda: danube_fast.connect(**way_in(server, text)))


def test_a_user_that_is_disabled(server: SignOnServer) -> None:
    text, _ = api_key(server)
    with danube_fast.connect(**way_in(server, text)) as client, server.come_in("ann") as ann:
        producer = client.producer(TOPIC)
        producer.publish(b"in")
        ann.admin.set_principal("pia", disabled=True)

        def is_out() -> bool:
            try:
                producer.publish(b"out")
            except PermissionDenied as error:
                return "sign-on" in str(error)
            return False

        wait_until("a refusal of the sign-on", is_out, SLACK * DENIED_SECONDS)


@pytest.mark.parametrize("transport", ["auto", "zmq"])
def test_a_client_on_the_brokers_host_is_the_tokens_user(
    server: SignOnServer, transport: str
) -> None:
    """The local user that it runs as is registered as no one, so there are no rings for it."""
    text, _ = api_key(server)
    with danube_fast.connect(**way_in(server, text, transport=transport)) as client:
        assert client.producer(TOPIC).publish(b"1").offset == 0
        refused(lambda: client.producer("/shop/other").publish(b"no"))


def test_an_asynchronous_client(server: SignOnServer) -> None:
    text, _ = api_key(server)

    async def main() -> None:
        async with danube_fast.connect_async(**way_in(server, text)) as client:
            producer = await client.producer(TOPIC)
            assert (await producer.publish(b"1")).offset == 0
            for pid in server.pids().values():
                os.kill(pid, signal.SIGKILL)
            assert (await producer.publish(b"2")).offset == 1

    asyncio.run(main())


@pytest.mark.parametrize("pins", ["given", "signed-on"])
def test_a_broker_that_restarts_with_another_key(
    server: SignOnServer, tmp_path: Path, pins: str
) -> None:
    """The clients have both keys, or ask for them."""
    old = server.server_key
    pair = new_key_pair()
    text, _ = api_key(server)
    url = server.sign_on_url
    server.changes["sign_on"] = url.removeprefix("https://")  # a restart keeps the port

    def connect(name: str) -> Any:
        if pins == "signed-on":
            return danube_fast.connect(**way_in(server, text, name=name, sign_on=url))
        return danube_fast.connect(
            server.url, server_key=[old, pair.public], key_file=tmp_path / "pia.key", name=name,
            transport="zmq", timeout=30.0,
        )  # fmt: skip

    with Load(connect) as load:
        load.goes_on()
        server.stop()
        for path in server.data_dir.glob("server.*"):
            path.unlink()
        write_key_file(server.data_dir / "server.key", pair)
        server.start()
        assert server.server_key == pair.public
        seconds = load.goes_on()
        print(f"went on {seconds:.2f} s behind the ready line")
        for client in load.clients:
            assert client._core._trust.server_keys[0] == pair.public
    load.check()
    assert seconds < SLACK * 3


def test_rotation_brings_new_keys_with_a_sign_on(server: SignOnServer) -> None:
    """A client that signs on needs no pins: it learns of both keys, then of the new one alone."""
    text, _ = api_key(server)
    with Load(lambda name: danube_fast.connect(**way_in(server, text, name=name))) as load:
        load.goes_on()
        with server.come_in("ann") as ann:
            new = ann.admin.rotate_server_key("prepare")["keys"][0]
        with server.come_in("ann") as ann:
            ann.admin.rotate_server_key("activate")
        load.goes_on()
        wait_until("the new key at the clients", lambda: _have(load, new), LOAD_SECONDS)
        load.goes_on()
    load.check()


def _have(load: Load, key: str) -> bool:
    return all(client._core._trust.server_keys[0] == key for client in load.clients)


def test_an_unknown_token_and_a_wrong_certificate(server: SignOnServer, tmp_path: Path) -> None:
    from danube_fast.security.certificates import new_certificate

    text = refused(
        lambda: danube_fast.connect(**way_in(server, "dfk_0123456789abcdef_" + "x" * 43))
    )
    assert "refuses the sign-on" in text and "x" * 43 not in text
    other = new_certificate(tmp_path / "other", ["127.0.0.1"])
    key, _ = api_key(server)
    text = refused(lambda: danube_fast.connect(**way_in(server, key, tls=other.fingerprint)))
    assert "no token was sent" in text
    with pytest.raises(DanubeError, match="other keys of the broker"):
        danube_fast.connect(**way_in(server, key, server_key=new_key_pair().public))


def test_commands_sign_on_by_the_environment(server: SignOnServer, tmp_path: Path) -> None:
    text, _ = api_key(server)
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(f"{text}\n")
    environment = {
        **{name: value for name, value in os.environ.items() if name not in OF_CLIENTS},
        "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(tmp_path), "DANUBE_URL": server.url,
        "DANUBE_SIGN_ON": server.sign_on_url, "DANUBE_TOKEN_FILE": str(token),
        "DANUBE_TLS": server.certificate.fingerprint,
    }  # fmt: skip

    def run(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "danube_fast.cli.main", *words],
            env={**environment, **changes}, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    done = run("topics", "list", "-o", "json")
    assert done.returncode == 0 and TOPIC in done.stdout, done.stderr
    wrong = run("topics", "list", DANUBE_TLS="sha256:" + "0" * 64)
    token.chmod(0o640)
    readable = run("topics", "list")
    token.chmod(0o600)
    token.write_text(f"{text[:-1]}!")
    refusal_ = run("topics", "list")
    for failed, words in (
        (wrong, "no token was sent"),
        (readable, "chmod 600"),
        (refusal_, "refuses the sign-on"),
    ):
        assert failed.returncode not in (0, 1) and words in failed.stderr, failed.stderr
        assert len(failed.stderr.splitlines()) == 1 and text[:-1] not in failed.stderr


def test_a_program_that_closes_nothing_ends_at_once(server: SignOnServer) -> None:
    """Neither the thread that waits for a renewal nor one that waits for a server holds it up."""
    text, _ = api_key(server)
    code = """
import socket, sys, threading, time
import danube_fast
options = dict(sign_on=sys.argv[2], tls=sys.argv[3], token=sys.stdin.read(), transport="zmq")
client = danube_fast.connect(sys.argv[1], timeout=30, **options)
client.publish(sys.argv[4], b"1")
silent = socket.create_server(("127.0.0.1", 0))
options["sign_on"] = f"https://127.0.0.1:{silent.getsockname()[1]}"
threading.Thread(target=danube_fast.connect, args=(sys.argv[1],), kwargs=options, daemon=True).start()
silent.accept()
print(time.monotonic(), flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, server.url, server.sign_on_url, server.certificate.fingerprint, TOPIC],
        input=text, capture_output=True, text=True, timeout=90, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - float(done.stdout) < 5, "the interpreter waits at its end"
