"""Sign-on over real processes: API keys and tokens over HTTPS, keys that come in by them, and how they end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from danube_fast.errors import DanubeError, FailedPrecondition, PermissionDenied
from danube_fast.security.api_keys import NewApiKey, new_api_key
from danube_fast.security.certificates import new_certificate
from danube_fast.security.curve import new_key_pair
from tests.delivery.sign_on_rig import IssuerKey, JwksServer, SignOnServer, issuer_toml
from tests.delivery.test_security import TOPIC, refused
from tests.security.test_tls import replace
from tests.workers.broker import wait_until

ENDS_SECONDS = 5.0
"""What is promised."""
SLACK = 4


@pytest.fixture(scope="module")
def key() -> IssuerKey:
    return IssuerKey()


@pytest.fixture
def jwks(tmp_path: Path, key: IssuerKey) -> Iterator[JwksServer]:
    server = JwksServer(tmp_path)
    server.serve(key.jwk())
    yield server
    server.close()


@pytest.fixture
def server(tmp_path: Path, jwks: JwksServer) -> Iterator[SignOnServer]:
    ca = str(jwks.certificate.certificate)
    issuers = issuer_toml(jwks_url=jwks.url, jwks_ca=ca)
    with SignOnServer(tmp_path / "data", tmp_path, issuers) as broker:
        broker.make_ann()
        with broker.come_in("ann") as ann:
            ann.admin.create_namespace("shop")
            ann.admin.create_topic(TOPIC)
            broker.add(ann.admin, "pia", ("producer", TOPIC), ("consumer", TOPIC))
        yield broker


def add_api_key(admin: Any, user: str, **options: Any) -> NewApiKey:
    made = new_api_key()
    admin.add_api_key(user, made.id, made.salt, made.digest, **options)
    return made


def signed_on(server: SignOnServer, bearer: str, name: str) -> dict[str, Any]:
    """Sign a new key on, kept as the key file of that name."""
    public = server.new_key(name)
    status, answer = server.sign_on(bearer, public)
    assert status == 200, answer
    assert answer["server_keys"] == [server.server_key]
    return answer


def is_out(client: Any) -> bool:
    """Whether a client's publish is refused."""
    try:
        client.producer(TOPIC).publish(b"out")
    except PermissionDenied:
        return True
    except DanubeError:
        return False
    return False


def test_an_api_key_lets_a_key_in_and_ends_it(server: SignOnServer) -> None:
    with server.come_in("ann") as ann:
        made = add_api_key(ann.admin, "pia", label="cash desk")
        answer = signed_on(server, made.text, "new")
        assert answer["principal"] == "pia"
        assert 3500 < answer["expires_seconds"] <= 3600
        with server.come_in("new") as client:
            assert client.producer(TOPIC).publish(b"in").offset == 0
            refused(lambda: client.producer("/shop/other").publish(b"no"))
            refused(lambda: client.admin.list_security("api_key"))
            (row,) = ann.admin.list_security("api_key")
            assert row["id"] == made.id and row["label"] == "cash desk"
            (signed,) = ann.admin.list_sign_ons()
            assert signed["principal"] == "pia" and signed["source"] == f"api_key:{made.id}"
            assert made.digest not in str(row) and made.text[-43:] not in str([row, signed])
            ann.admin.delete_security("api_key", made.id)
            began = time.monotonic()
            wait_until("the end of the session", lambda: is_out(client), SLACK * ENDS_SECONDS)
            assert time.monotonic() - began < SLACK * ENDS_SECONDS
        assert ann.admin.list_sign_ons() == []
        refused(lambda: server.come_in("new", timeout=5.0))
        assert server.sign_on(made.text, server.keys["new"])[0] == 401


def test_a_token_brings_principal_and_groups(server: SignOnServer, key: IssuerKey) -> None:
    with server.come_in("ann") as ann:
        ann.admin.create_topic("/shop/audits")
        ann.admin.set_binding("auditors", "group:auditors", "consumer", "/shop/audits")
    answer = signed_on(server, key.token(groups=["auditors", "bad name"]), "grouped")
    assert answer["principal"] == "pia" and 50 <= answer["expires_seconds"] <= 60
    signed_on(server, key.token(), "plain")
    with server.come_in("grouped") as grouped, server.come_in("plain") as plain:
        for client in (grouped, plain):
            client.producer(TOPIC).publish(b"registered rights")
        grouped.consumer("/shop/audits", subscription="a").close()
        refused(lambda: plain.consumer("/shop/audits", subscription="a"))  # same user, other token
        # a new token for the same key, without the group: what it gave is closed
        consumer = grouped.consumer("/shop/audits", subscription="b")
        status, _ = server.sign_on(key.token(), server.keys["grouped"])
        assert status == 200

        def is_closed() -> bool:
            try:
                consumer.receive(timeout=0.2)
            except PermissionDenied:
                return True
            return False

        wait_until("the end of a consumer whose group is gone", is_closed, SLACK * ENDS_SECONDS)
        assert grouped.producer(TOPIC).publish(b"the session goes on").offset >= 2


def test_a_signed_on_client_does_what_others_do(server: SignOnServer, key: IssuerKey) -> None:
    """Its principal is written down in many places: failure policies, reply topics, audit, lists of clients."""
    with server.come_in("ann") as ann:
        ann.admin.create_topic("/shop/dead")
        ann.admin.set_binding("dead", "user:pia", "producer", "/shop/dead")
        ann.admin.set_binding("desk", "group:desk", "producer", "namespace:shop")
    signed_on(server, key.token(groups=["desk"]), "new")
    policy = {
        "max_redelivery_count": 1, "poison_policy": "dead_letter", "dead_letter_topic": "/shop/dead",
    }  # fmt: skip
    with server.come_in("new") as client, server.come_in("pia") as answering:
        client.consumer(TOPIC, subscription="s", failure_policy=policy).close()
        answering.subscribe(TOPIC, "answers", lambda message: b"pong")
        assert client.request(TOPIC, b"ping", timeout=20).payload == b"pong"
        assert client.producer("/shop/made-by-it").publish(b"1").offset == 0
        refused(lambda: client.producer("/other/topic").publish(b"no"))
        refused(lambda: client.admin.delete_topic(TOPIC))
        with server.come_in("ann") as ann:
            names = {row["principal"] for row in ann.admin.list_clients()}
            assert names == {"ann", "pia"}
            wait_until(
                "the audit of what was denied",
                lambda: any(row.get("principal") == "pia" for row in ann.admin.list_audit(denied=True)),
                30,
            )  # fmt: skip


def test_a_sign_on_ends_with_its_token_and_is_renewed(server: SignOnServer, key: IssuerKey) -> None:
    signed_on(server, key.token(exp=time.time() + 8), "short")
    signed_on(server, key.token(exp=time.time() + 8), "renewed")
    with server.come_in("short") as short, server.come_in("renewed") as renewed:
        producer = renewed.producer(TOPIC, name="renewed")
        producer.publish(b"before")
        short.producer(TOPIC).publish(b"before")
        assert server.sign_on(key.token(), server.keys["renewed"])[0] == 200
        wait_until("the end of a sign-on", lambda: is_out(short), 8 + SLACK * ENDS_SECONDS)
        assert producer.publish(b"after").offset >= 2


def test_a_key_stays_with_its_user(server: SignOnServer, key: IssuerKey) -> None:
    with server.come_in("ann") as ann:
        server.add(ann.admin, "paul")
        signed_on(server, key.token(), "mine")
        status, answer = server.sign_on(key.token(sub="paul"), server.keys["mine"])
        assert (status, answer["code"]) == (409, "FailedPrecondition")
        status, answer = server.sign_on(key.token(), server.keys["ann"])  # registered
        assert (status, answer["code"]) == (409, "FailedPrecondition")
        with pytest.raises(FailedPrecondition):
            ann.admin.set_credential(f"curve:{server.keys['mine']}", "paul")


@pytest.mark.parametrize("name", ["nick", "bootstrap-admin", "disabled"])
def test_who_may_not_come_in_is_refused(server: SignOnServer, key: IssuerKey, name: str) -> None:
    with server.come_in("ann") as ann:
        ann.admin.set_principal("disabled", disabled=True)
        status, answer = server.sign_on(key.token(sub=name), new_key_pair().public)
        assert status == (401 if name == "bootstrap-admin" else 403), answer
        assert answer["code"] == "PermissionDenied"
        if name == "bootstrap-admin":
            with pytest.raises(FailedPrecondition):
                add_api_key(ann.admin, name)


def test_a_user_that_is_disabled_or_deleted_is_out(server: SignOnServer, key: IssuerKey) -> None:
    with server.come_in("ann") as ann:
        for how in ("disabled", "deleted"):
            server.add(ann.admin, "pit", ("producer", TOPIC))
            signed_on(server, key.token(sub="pit"), how)
            with server.come_in(how) as client:
                client.producer(TOPIC).publish(b"in")
                if how == "disabled":
                    ann.admin.set_principal("pit", disabled=True)
                else:
                    ann.admin.delete_security("principal", "pit")
                wait_until("the end", lambda client=client: is_out(client), SLACK * ENDS_SECONDS)
            ann.admin.set_principal("pit", disabled=False)
            (server.folder / "pit.key").unlink()
        ann.admin.set_principal("pit")
        refused(lambda: server.come_in("deleted", timeout=5.0))  # not by one of the same name


def test_two_live_keys_and_no_third(server: SignOnServer) -> None:
    with server.come_in("ann") as ann:
        first = add_api_key(ann.admin, "pia", expires_seconds=1)
        second = add_api_key(ann.admin, "pia")

        def expired() -> bool:
            return server.sign_on(first.text, new_key_pair().public)[0] == 401

        wait_until("the end of the first key", expired, 20)
        third = add_api_key(ann.admin, "pia")
        ids = {row["id"] for row in ann.admin.list_security("api_key")}
        assert ids == {second.id, third.id}, "an expired key makes room"
        with pytest.raises(FailedPrecondition, match="tokens remove"):
            add_api_key(ann.admin, "pia")
        ann.admin.delete_security("principal", "pia")
        assert ann.admin.list_security("api_key") == []


@pytest.mark.parametrize("role", ["coordinator", "worker-0", "worker-1", "sign_on"])
def test_kills_leave_signed_on_clients_in(server: SignOnServer, key: IssuerKey, role: str) -> None:
    token = key.token(exp=time.time() + 300)
    signed_on(server, token, "new")
    pids = server.pids()
    with server.come_in("new") as client:
        producer = client.producer(TOPIC, name="p")
        offsets = [producer.publish(b"before").offset]
        os.kill(pids[role], signal.SIGKILL)

        def publishes() -> bool:
            try:
                offsets.append(producer.publish(b"after").offset)
            except DanubeError:
                return False
            return True

        wait_until(f"a publish behind the kill of {role}", publishes)

        def comes_in() -> bool:
            try:
                if server.sign_on(token, server.keys["new"])[0] != 200:
                    return False
                with server.come_in("new", timeout=5.0) as other:
                    return bool(other.producer(TOPIC).publish(b"again").offset)
            except (DanubeError, OSError):
                return False

        wait_until(f"a client behind the kill of {role}", comes_in)
        assert producer.publish(b"at last").offset > offsets[0]
        wait_until(f"the restart of {role}", lambda: server.pids()[role] != pids[role])


def test_a_coordinator_that_starts_again_is_told_who_is_in(
    server: SignOnServer, key: IssuerKey
) -> None:
    signed_on(server, key.token(exp=time.time() + 300), "new")
    os.kill(server.pids()["coordinator"], signal.SIGKILL)

    def comes_in() -> bool:
        try:
            with server.come_in("new", timeout=5.0) as client:
                return client.producer(TOPIC).publish(b"in").offset >= 0
        except DanubeError:
            return False

    wait_until("a client that has signed on before", comes_in)
    with server.come_in("ann") as ann:
        assert [row["principal"] for row in ann.admin.list_sign_ons()] == ["pia"]


def test_refused_sign_ons_are_audited_without_their_secrets(
    server: SignOnServer, key: IssuerKey
) -> None:
    wrong, expired = new_api_key().text, key.token(exp=1)
    for _ in range(20):
        assert server.sign_on(wrong, new_key_pair().public)[0] == 401
    assert server.sign_on(expired, new_key_pair().public)[0] == 401
    assert server.sign_on(key.token(sub="eve"), new_key_pair().public)[0] == 403
    with server.come_in("ann") as ann:

        def denied() -> list[dict[str, Any]]:
            rows = [row for row in ann.admin.list_audit() if row["action"] == "sign_on"]
            return rows if any(row.get("principal") == "eve" for row in rows) else []

        rows = wait_until("records of refused sign-ons", denied, 30)
        text = str(ann.admin.list_audit())
    assert {row.get("address") for row in rows} == {"127.0.0.1"}
    assert any("unknown" in row.get("resource", "") for row in rows)
    assert len(rows) < 10, "a flood is aggregated"
    assert server.broker is not None
    for secret in (wrong, wrong[21:], expired, expired.rpartition(".")[2]):
        assert secret not in text and secret not in server.broker.error_text()


def test_rights_taken_while_the_coordinator_was_away_are_felt(
    server: SignOnServer, key: IssuerKey
) -> None:
    signed_on(server, key.token(exp=time.time() + 300), "new")
    pids = server.pids()
    with server.come_in("new") as client:
        client.producer(TOPIC).publish(b"in")
        os.kill(pids["coordinator"], signal.SIGKILL)

        def disabled() -> bool:
            try:
                with server.come_in("ann", timeout=5.0) as ann:
                    ann.admin.set_principal("pia", disabled=True)
            except DanubeError:
                return False
            return True

        wait_until("a change behind the kill", disabled)
        wait_until("the end of the session", lambda: is_out(client), SLACK * ENDS_SECONDS)


def test_keys_that_rotate_and_a_server_of_keys_that_is_down(
    server: SignOnServer, key: IssuerKey, jwks: JwksServer
) -> None:
    def status_of(token: str) -> int:
        return server.sign_on(token, new_key_pair().public)[0]

    assert status_of(key.token()) == 200
    jwks.answer = (503, {}, b"")
    assert status_of(key.token()) == 200, "keys that are known are good while their server is down"
    new = IssuerKey(kid="two")
    jwks.serve(new.jwk())
    wait_until("the new key", lambda: status_of(new.token()) == 200, 60)
    assert status_of(key.token()) == 401, "the old key is gone with the fetch of the new one"
    before = jwks.requests
    for number in range(50):
        assert status_of(IssuerKey(kid=f"invented-{number}").token()) == 401
    assert jwks.requests - before <= 3, "an unknown kid must not cause a fetch each"


def test_the_command_line_makes_an_api_key(server: SignOnServer) -> None:
    environment = {
        **os.environ,
        "DANUBE_URL": server.url,
        "DANUBE_SERVER_KEY": server.server_key,
        "DANUBE_KEY_FILE": str(server.folder / "ann.key"),
    }

    def run(*arguments: str) -> Any:
        command = ["-m", "danube_fast.cli.main", "security", "tokens", *arguments, "-o", "json"]
        done = subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    made = run("add", "pia", "--label", "desk")
    path = server.folder / "pia.token"
    filed = run("add", "pia", "--to-file", str(path), "--expires-seconds", "600")
    assert path.stat().st_mode & 0o777 == 0o600 and "api_key" not in filed
    listed = run("list")
    assert {row["id"] for row in listed} == {made["id"], filed["id"]}
    for text in (made["api_key"], path.read_text().strip()):
        assert text not in str(listed)
        assert server.sign_on(text, new_key_pair().public)[0] == 200
    run("remove", made["id"], "--yes")
    assert server.sign_on(made["api_key"], new_key_pair().public)[0] == 401
    with pytest.raises(AssertionError, match="exists"):
        run("add", "pia", "--to-file", str(path))
    assert server.broker is not None
    log = server.broker.error_text()
    assert path.read_text().strip() not in log and made["api_key"] not in log


def test_requests_that_are_no_sign_on(server: SignOnServer, key: IssuerKey) -> None:
    public, good = new_key_pair().public, key.token()
    body = json.dumps({"public_key": public})
    bearer = {"Authorization": f"Bearer {good}"}

    def ask(method: str, path: str, body: Any, headers: dict[str, str]) -> tuple[int, str]:
        connection = server.connection()
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            text = response.read().decode()
            code = json.loads(text)["code"] if text.startswith("{") else text
            return response.status, code
        finally:
            connection.close()

    assert ask("POST", "/v1/other", body, bearer) == (404, "NotFound")
    assert ask("GET", "/v1/sign-on", None, bearer)[0] == 405
    assert ask("POST", "/v1/sign-on", body, {}) == (401, "PermissionDenied")
    assert ask("POST", "/v1/sign-on", body, {"Authorization": "Basic YTpi"})[0] == 401
    for wrong in ("", "{", "[]", '{"public_key": 7}', json.dumps({"public_key": public[:-1]})):
        assert ask("POST", "/v1/sign-on", wrong, bearer) == (400, "InvalidArgument")
    assert ask("POST", "/v1/sign-on", "x" * 2000, bearer)[0] == 413
    huge = {"Authorization": "Bearer " + "x" * (17 * 1024)}
    assert ask("POST", "/v1/sign-on", body, huge)[0] == 413
    endless = {"Authorization": "Bearer " + "x" * (100 * 1024)}
    with contextlib.suppress(OSError):  # closed while the client still writes
        assert ask("POST", "/v1/sign-on", body, endless)[0] in (400, 413)
    connection = server.connection()
    for expected in (401, 200, 401):  # one connection
        text = good if expected == 200 else "dfk_unknown"
        connection.request("POST", "/v1/sign-on", body, {"Authorization": f"Bearer {text}"})
        response = connection.getresponse()
        assert response.status == expected
        response.read()
    connection.close()


def test_the_port_speaks_https_alone(server: SignOnServer) -> None:
    parts = urlsplit(server.sign_on_url)
    assert parts.scheme == "https"
    with socket.create_connection((parts.hostname, parts.port or 0), timeout=20) as plain:
        plain.sendall(b"POST /v1/sign-on HTTP/1.1\r\nHost: x\r\n\r\n")
        assert not plain.recv(1000).startswith(b"HTTP")


def test_a_new_certificate_is_taken_while_it_serves(server: SignOnServer, tmp_path: Path) -> None:
    new = new_certificate(tmp_path / "new", ["127.0.0.1"])
    replace(server.certificate, new)  # the file that clients of this rig trust is the same

    def is_new() -> bool:
        try:
            return server.sign_on("dfk_unknown", new_key_pair().public)[0] == 401
        except ssl.SSLCertVerificationError:
            return False

    wait_until("the new certificate", is_new, 20.0)


def test_health_of_the_sign_on_port_says_what_it_is(server: SignOnServer) -> None:
    words = "health", server.sign_on_url, "--tls", str(server.certificate.certificate)
    done = subprocess.run(
        [sys.executable, "-m", "danube_fast.cli.main", *words], capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 5 and "it may be that of sign-on" in done.stderr, done
