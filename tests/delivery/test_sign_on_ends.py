"""Sign-ons that are ended over real processes: felt everywhere, also behind kills; what was ended signs on again by itself."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

import danube_fast
from danube_fast.errors import DanubeError, InvalidArgument, PermissionDenied
from danube_fast.security.api_keys import new_api_key
from danube_fast.security.audit import fingerprint
from danube_fast.security.curve import new_key_pair, read_key_file
from danube_fast.security.tls import client_context
from tests.delivery.sign_on_rig import IssuerKey, SignOnServer, issuer_toml
from tests.delivery.test_security import TOPIC, refused
from tests.workers.broker import is_running, wait_until

ENDS_SECONDS = 5.0
"""What is promised."""
SLACK = 4
OTHER_ISSUER = "https://other.example.com/"


@pytest.fixture(scope="module")
def key() -> IssuerKey:
    return IssuerKey()


def issuers(folder: Path, *, other: bool = True, **changes: Any) -> str:
    """The file of issuers: `corp`, with these changes, and another one."""
    keys = str(folder / "keys.json")
    text = issuer_toml(jwks_file=keys, **changes)
    return text + issuer_toml(name="other", issuer=OTHER_ISSUER, jwks_file=keys) if other else text


@pytest.fixture
def server(tmp_path: Path, key: IssuerKey) -> Iterator[SignOnServer]:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [key.jwk()]}))
    keys.chmod(0o644)
    with SignOnServer(tmp_path / "data", tmp_path, issuers(tmp_path)) as broker:
        broker.make_ann()
        with broker.come_in("ann") as ann:
            ann.admin.create_namespace("shop")
            ann.admin.create_topic(TOPIC, partitions=4)
            for user in ("pia", "paul"):
                broker.add(ann.admin, user, ("producer", "/shop/*"), ("consumer", "/shop/*"))
        yield broker


def sign_on(server: SignOnServer, bearer: str, name: str) -> None:
    """Sign the key of that name on; a new one if there is none. What is down just now is asked again."""
    public = server.keys.get(name) or server.new_key(name)

    def outcome() -> Any:
        try:
            status, answer = server.sign_on(bearer, public)
        except OSError:
            return None
        return None if status == 503 else (status, answer)

    status, answer = wait_until("an answer to a sign-on", outcome)
    assert status == 200, answer


def connections_of(server: SignOnServer, user: str) -> int:
    """Connections of a user to all processes."""
    with server.come_in("ann") as ann:
        return sum(row["principal"] == user for row in ann.admin.list_clients())


def is_gone(server: SignOnServer, user: str) -> bool:
    """Whether a user has no connection to any process."""
    try:
        return not connections_of(server, user)
    except DanubeError:  # the coordinator is starting again
        return False


def work(client: Any, name: str) -> Any:
    """A producer and a consumer on all workers; the producer."""
    producer = client.producer(TOPIC, name=name)
    client.consumer(TOPIC, subscription=name)
    for number in range(8):
        producer.publish(b"in", key=b"%d" % number)
    return producer


@pytest.mark.parametrize(
    ("how", "killed"),
    [("key", ""), ("key", "coordinator"), ("user", "coordinator"), ("issuer", "sign_on"),
     ("issuer", "coordinator"), ("api key", ""), ("api key", "worker-1")],
)  # fmt: skip
def test_an_end_is_felt_everywhere_and_outlives_a_kill(
    server: SignOnServer, key: IssuerKey, how: str, killed: str
) -> None:
    bearer = key.token(exp=time.time() + 300)
    other = key.token(exp=time.time() + 300, sub="paul", iss=OTHER_ISSUER)
    source = "jwt:corp"
    pids = server.pids()
    with server.come_in("ann") as ann:
        if how == "api key":
            made = new_api_key()
            ann.admin.add_api_key("pia", made.id, made.salt, made.digest)
            bearer, source = made.text, f"api_key:{made.id}"
        sign_on(server, bearer, "mine")
        sign_on(server, other, "others")
        (row,) = ann.admin.list_sign_ons(principal="pia")
        assert row["public_key"] == server.keys["mine"] and row["source"] == source
        assert ann.admin.list_sign_ons(source=source) == [row]
        assert len(ann.admin.list_sign_ons()) == 2 == len(ann.admin.list_sign_ons(limit=5))
        with server.come_in("mine") as mine, server.come_in("others") as others:
            work(mine, "mine")
            working = work(others, "others")
            assert connections_of(server, "pia") == 3, "the coordinator and two workers"
            whose = {
                "key": {"public_key": server.keys["mine"]}, "user": {"principal": "pia"},
            }.get(how, {"source": source})  # fmt: skip
            assert ann.admin.end_sign_ons(**whose) == {"ended": 1}
            if killed:
                os.kill(pids[killed], signal.SIGKILL)
            began = time.monotonic()
            wait_until(
                "the end of all sessions", lambda: is_gone(server, "pia"), SLACK * ENDS_SECONDS
            )
            assert time.monotonic() - began < SLACK * ENDS_SECONDS
            refused(lambda: server.come_in("mine", timeout=5.0))
            assert working.publish(b"the others' goes on", key=b"0").offset >= 0
    with server.come_in("ann") as ann:
        wait_until(
            "the other sign-on, told again",
            lambda: [row["principal"] for row in ann.admin.list_sign_ons()] == ["paul"],
        )
        sign_on(server, bearer, "mine")  # what it was made with was not taken back
        with server.come_in("mine") as mine:
            assert mine.producer(TOPIC).publish(b"again").offset >= 0


def test_an_ended_client_comes_back_by_itself_until_its_user_is_disabled(
    server: SignOnServer, key: IssuerKey
) -> None:
    token = key.token(exp=time.time() + 300)
    client = danube_fast.connect(
        server.url, token=token, sign_on=server.sign_on_url, transport="tcp",
        tls=server.certificate.fingerprint, timeout=30.0,
    )  # fmt: skip
    with client, server.come_in("ann") as ann:
        producer = client.producer(TOPIC, name="p")
        offsets = [producer.publish(b"before", key=b"k").offset]
        (before,) = ann.admin.list_sign_ons()
        assert ann.admin.end_sign_ons(principal="pia") == {"ended": 1}
        again = wait_until("its next sign-on", lambda: ann.admin.list_sign_ons(principal="pia"), 60)
        assert again[0]["made_ns"] > before["made_ns"]
        offsets.append(producer.publish(b"after", key=b"k").offset)
        assert offsets == [0, 1]
        ann.admin.set_principal("pia", disabled=True)

        def is_out() -> bool:
            try:
                producer.publish(b"out", key=b"k")
            except PermissionDenied:
                return True
            except DanubeError:
                return False
            return False

        wait_until("the end", is_out, 60)


@pytest.mark.parametrize("how", ["ended", "made again"])
def test_what_a_stopped_process_knows_still_does_not_come_back(
    server: SignOnServer, key: IssuerKey, how: str
) -> None:
    """The process of sign-on is stopped, so that it hears of nothing, and then tells the next coordinator what it knew."""
    sign_on(server, key.token(exp=time.time() + 300), "old")
    pids = server.pids()
    os.kill(pids["sign_on"], signal.SIGSTOP)
    try:
        os.kill(pids["coordinator"], signal.SIGKILL)

        def changed() -> bool:
            try:
                with server.come_in("ann", timeout=5.0) as ann:
                    if how == "ended":
                        ann.admin.end_sign_ons(principal="pia")
                        return True
                    ann.admin.delete_security("principal", "pia")
                    ann.admin.set_principal("pia")
                    ann.admin.set_binding("again", "user:pia", "producer", TOPIC)
            except DanubeError:
                return False
            return True

        wait_until("a change by the next coordinator", changed)
    finally:
        os.kill(pids["sign_on"], signal.SIGCONT)
    sign_on(server, key.token(sub="paul", exp=time.time() + 300), "paul's")

    def listed() -> list[str]:
        with server.come_in("ann") as ann:
            return [row["principal"] for row in ann.admin.list_sign_ons()]

    assert "pia" not in listed()
    refused(lambda: server.come_in("old", timeout=5.0))
    assert "pia" not in listed()
    sign_on(server, key.token(exp=time.time() + 300), "old")
    with server.come_in("old") as client:
        assert client.producer(TOPIC).publish(b"signed on anew").offset >= 0


def test_ends_are_refused_and_recorded(server: SignOnServer) -> None:
    with server.come_in("ann") as ann, server.come_in("pia") as pia:
        refused(lambda: pia.admin.list_sign_ons())
        refused(lambda: pia.admin.end_sign_ons(principal="pia"))
        assert ann.admin.end_sign_ons(source="jwt:corp") == {"ended": 0}
        public = new_key_pair().public
        assert ann.admin.end_sign_ons(public_key=public) == {"ended": 0}
        shown = fingerprint(f"curve:{public}")
        with pytest.raises(InvalidArgument):
            ann.admin.delete_security("sign_on", server.keys["pia"])

        def recorded() -> bool:
            rows = [row for row in ann.admin.list_audit() if row["action"] == "end_sign_ons"]
            events = {(row["principal"], row["event"]) for row in rows}
            arguments = [row.get("arguments", {}) for row in rows]
            return (
                {("ann", "begin"), ("ann", "end"), ("pia", "denied")} <= events
                and any(each.get("source") == "jwt:corp" for each in arguments)
                and any(each.get("public_key") == shown for each in arguments)
            )

        wait_until("records in the audit log", recorded, 30)


# ---------------------------------------------------------------- another file of issuers


def write_issuers(server: SignOnServer, text: str) -> None:
    """Put another file in place of the one that is there."""
    new = server.folder / "issuers.new"
    new.write_text(text)
    new.chmod(0o644)
    new.rename(server.folder / "issuers.toml")


def issuers_fault(server: SignOnServer) -> str:
    with server.come_in("ann") as ann:
        return str(ann.admin.cluster_status()["issuers_fault"])


def metric(server: SignOnServer, bearer: str) -> str:
    """The line of /metrics about the file of issuers."""
    connection = http.client.HTTPSConnection(
        "127.0.0.1",
        server.port + 1,
        timeout=30,
        context=client_context(server.certificate.fingerprint),
    )
    try:
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {bearer}"})
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    (line,) = [line for line in lines if line.startswith("danube_fast_issuers_stale")]
    return line


@pytest.mark.parametrize("killed", ["", "coordinator", "sign_on"])
def test_an_issuer_is_withdrawn_without_a_restart(
    server: SignOnServer, key: IssuerKey, killed: str
) -> None:
    mine = key.token(exp=time.time() + 300)
    other = key.token(exp=time.time() + 300, sub="paul", iss=OTHER_ISSUER)
    third = {"name": "third", "issuer": "https://third.example.com/"}
    keys = str(server.folder / "keys.json")
    pids = server.pids()
    sign_on(server, mine, "mine")
    sign_on(server, other, "others")
    with server.come_in("mine") as client, server.come_in("others") as others:
        work(client, "mine")
        working = work(others, "others")
        text = issuer_toml(name="other", issuer=OTHER_ISSUER, jwks_file=keys)
        write_issuers(server, text + issuer_toml(jwks_file=keys, **third))
        if killed:
            os.kill(pids[killed], signal.SIGKILL)
        wait_until("the end of all sessions", lambda: is_gone(server, "pia"), SLACK * ENDS_SECONDS)
        assert working.publish(b"another issuer's goes on", key=b"0").offset >= 0
    refused(lambda: server.come_in("mine", timeout=5.0))
    wait_until("a refusal", lambda: server.sign_on(mine, server.keys["mine"])[0] == 401)
    sign_on(server, key.token(iss=third["issuer"]), "new")
    with server.come_in("ann") as ann:
        sources = {row["source"] for row in ann.admin.list_sign_ons()}
        assert sources == {"jwt:other", "jwt:third"}
        notes = [row for row in ann.admin.list_audit() if row["action"] == "end_sign_ons"]
        assert {(row["event"], row["resource"]) for row in notes} == {("note", "jwt:corp")}
    write_issuers(server, issuers(server.folder))
    wait_until("its return", lambda: server.sign_on(mine, server.keys["mine"])[0] == 200)


def admits(server: SignOnServer, name: str, port: int) -> bool:
    """Whether a process of the broker takes a connection with the key of that name, by its own copy of the records."""
    pair = read_key_file(server.folder / f"{name}.key")
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.curve_publickey, client.curve_secretkey = pair.public.encode(), pair.secret.encode()
        client.curve_serverkey = server.server_key.encode()
        monitor = client.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        client.connect(f"tcp://127.0.0.1:{port}")
        try:
            assert monitor.poll(30_000), "no handshake has ended in time"
            event = recv_monitor_message(monitor)
        finally:
            client.disable_monitor()
            monitor.close()
        return int(event["event"]) == zmq.EVENT_HANDSHAKE_SUCCEEDED


@pytest.mark.parametrize("change", ["differs", "gone"])
def test_an_entry_that_changes_while_both_processes_are_dead_ends_its_sign_ons(
    server: SignOnServer, key: IssuerKey, change: str
) -> None:
    mine = key.token(exp=time.time() + 300)
    sign_on(server, mine, "mine")
    sign_on(server, key.token(exp=time.time() + 300, sub="paul", iss=OTHER_ISSUER), "others")
    text = issuers(server.folder, audience=["danube", "else"])
    if change == "gone":
        text = issuer_toml(
            name="other", issuer=OTHER_ISSUER, jwks_file=str(server.folder / "keys.json")
        )
    pids = server.pids()
    assert server.broker is not None
    supervisor, ports = server.broker.process.pid, server.broker.ready["worker_ports"]

    def admitted(name: str) -> list[bool]:
        return [admits(server, name, port) for port in ports]

    assert admitted("mine") == [True, True] == admitted("others")
    os.kill(supervisor, signal.SIGSTOP)  # it starts none meanwhile
    try:
        for name in ("coordinator", "sign_on"):
            os.kill(pids[name], signal.SIGKILL)
            wait_until("its end", lambda name=name: not is_running(pids[name]))
        write_issuers(server, text)
        assert admitted("mine") == [True, True], "workers know it still"
    finally:
        os.kill(supervisor, signal.SIGCONT)
    wait_until("the end in all workers", lambda: admitted("mine") == [False, False], 60)
    assert admitted("others") == [True, True], "another issuer's goes on"
    with server.come_in("ann") as ann:
        notes = [row for row in ann.admin.list_audit() if row["action"] == "end_sign_ons"]
        assert {(row["event"], row["resource"]) for row in notes} == {("note", "jwt:corp")}
    if change == "differs":
        sign_on(server, mine, "mine")
        with server.come_in("mine") as client:
            assert client.producer(TOPIC).publish(b"signed on anew").offset >= 0


def test_a_file_of_issuers_that_cannot_be_used_leaves_the_old_one(
    server: SignOnServer, key: IssuerKey
) -> None:
    sign_on(server, key.token(exp=time.time() + 300), "mine")
    made = new_api_key()
    with server.come_in("ann") as ann:
        ann.admin.add_api_key("ann", made.id, made.salt, made.digest)
    assert issuers_fault(server) == "" and metric(server, made.text).endswith(" 0.0")
    with server.come_in("mine") as client:
        producer = client.producer(TOPIC)
        write_issuers(server, "[[issuer]\n")
        fault = wait_until("a report", lambda: issuers_fault(server), 20)
        assert "issuers.toml" in fault and metric(server, made.text).endswith(" 1.0")
        pid = server.pids()["coordinator"]
        os.kill(pid, signal.SIGKILL)

        def told_again() -> bool:
            try:
                return server.pids()["coordinator"] != pid and issuers_fault(server) == fault
            except DanubeError:
                return False

        wait_until("a report to the next coordinator", told_again)
        sign_on(server, key.token(), "another")
        assert producer.publish(b"in", key=b"k").offset >= 0
        write_issuers(server, issuers(server.folder))
        wait_until("a good one", lambda: issuers_fault(server) == "", 20)
        assert producer.publish(b"in still", key=b"k").offset >= 1
    assert server.broker is not None
    assert server.broker.error_text().count("the file of trusted issuers in use stays") == 1
