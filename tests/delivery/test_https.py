"""The admin port of a secured broker over TLS: who gets what, certificates that change, and peers that mean no good."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from danube_fast.errors import InvalidArgument
from danube_fast.security.api_keys import new_api_key
from danube_fast.security.certificates import NewCertificate, fingerprint_of
from danube_fast.security.http_proofs import mtls_credential
from tests.delivery.https_rig import CLIENTS, RELOAD_SECONDS, WAIT_SECONDS, HttpsServer
from tests.delivery.test_security import SecuredServer
from tests.security.authority import Authority, write_pem
from tests.security.test_tls import make, replace
from tests.workers.broker import wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpsServer]:
    secured = HttpsServer(tmp_path_factory.mktemp("https"))
    with secured:
        secured.make_ann()
        secured.register()
        yield secured


def test_the_ready_line_names_https_and_the_certificate(server: HttpsServer) -> None:
    assert server.broker is not None
    ready = server.broker.ready
    assert ready["admin"] == f"https://127.0.0.1:{server.admin_port}"
    assert ready["certificate"] == server.tls.fingerprint
    with server.come_in("ann") as ann:
        status = ann.admin.cluster_status()
    assert status["admin"] == f"127.0.0.1:{server.admin_port}" and status["tls"]
    assert server.ask("/healthz", tls=ready["certificate"]).told == {"status": "ok"}


def test_the_port_answers_as_rights_say(server: HttpsServer) -> None:
    wait_until(
        "the end of a credential",
        lambda: server.ask("/metrics", "expired").code == 401,
        WAIT_SECONDS,
    )
    for client in ("", *CLIENTS, "stranger"):
        assert server.ask("/healthz", client).told == {"status": "ok"}
        ready = server.ask("/readyz", client).told
        assert ready["status"] == "ready"
        assert ("processes" in ready) == (client == "viewer")
    assert server.ask("/metrics").code == 401
    assert server.ask("/metrics", "stranger").code == 401
    assert server.ask("/metrics", "disabled").code == 401
    refused = server.ask("/metrics", "producer")
    assert refused.code == 403 and refused.told["code"] == "PermissionDenied"
    assert b"danube_fast_process_up" in server.ask("/metrics", "viewer").body


def test_refusals_are_in_the_audit_log(server: HttpsServer) -> None:
    assert server.ask("/secret-plans", "viewer").code == 403
    log = server.data_dir / "audit" / "audit.jsonl"

    def found() -> list[Any]:
        records = map(json.loads, log.read_text().splitlines())
        return [
            each
            for each in records
            if each["action"] == "http" and each.get("principal") == "viewer"
        ]

    (record,) = wait_until("a record of the refusal", found, WAIT_SECONDS)
    assert record["event"] == "denied" and record["resource"] == "/secret-plans"
    assert "127.0.0.1" in record["address"]


def test_a_certificate_of_no_known_ca_ends_in_the_handshake(server: HttpsServer) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):
        server.ask("/healthz", "unknown")


def test_an_api_key_comes_in_until_it_is_revoked(server: HttpsServer) -> None:
    made = new_api_key()
    with server.come_in("ann") as ann:
        ann.admin.add_api_key("viewer", made.id, made.salt, made.digest)
        bearer = {"Authorization": f"Bearer {made.text}"}
        assert server.ask("/metrics", **bearer).code == 200
        assert server.ask("/metrics", "producer", **bearer).code == 200
        assert server.ask("/metrics", Authorization=f"Bearer {made.text[:-1]}").code == 401
        ann.admin.delete_security("api_key", made.id)
        assert server.ask("/metrics", **bearer).code == 401
        assert server.ask("/metrics", "viewer", **bearer).code == 401
    assert server.broker is not None
    assert made.text[21:] not in server.broker.error_text()


def test_a_revoked_certificate_is_refused_on_an_open_connection(server: HttpsServer) -> None:
    der = ssl.PEM_cert_to_DER_cert(server.own["viewer"].certificate.read_text())
    connection = server.connect("viewer")
    try:
        with server.come_in("ann") as ann:
            for code in (200, 401, 200):
                connection.request("GET", "/metrics")
                response = connection.getresponse()
                assert (response.status, bool(response.read())) == (code, True)
                if code == 200:
                    ann.admin.delete_security("credential", mtls_credential(der))
                else:
                    ann.admin.set_credential(mtls_credential(der), "viewer")
            ann.admin.set_credential(mtls_credential(der), "viewer")
    finally:
        connection.close()


def test_other_servers_and_names_are_refused_by_clients(
    server: HttpsServer, tmp_path: Path
) -> None:
    other = make(tmp_path / "other")
    for tls in (str(other.certificate), other.fingerprint, ""):
        with pytest.raises(ssl.SSLCertVerificationError):
            server.ask("/healthz", tls=tls)
    context = server.context()
    with (
        socket.create_connection(("127.0.0.1", server.admin_port), WAIT_SECONDS) as plain,
        pytest.raises(ssl.SSLCertVerificationError, match=r"[Hh]ostname"),
    ):
        context.wrap_socket(plain, server_hostname="broker.example")


@pytest.mark.parametrize(
    "said", [b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00" * 300, b"\x16\x03\x01\xff\xff" + b"x" * 2000]
)  # fmt: skip
def test_what_is_no_tls_is_closed_and_told_nothing(server: HttpsServer, said: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.admin_port), WAIT_SECONDS) as plain:
        plain.settimeout(WAIT_SECONDS)
        plain.sendall(said)
        heard = b""
        with suppress(ConnectionError):
            while data := plain.recv(4096):
                heard += data
    assert b"HTTP" not in heard and len(heard) < 16, heard  # an alert at most
    assert server.ask("/healthz").code == 200


# ---------------------------------------------------------------- certificates that change


def test_a_certificate_is_renewed_under_open_connections(
    server: HttpsServer, tmp_path: Path
) -> None:
    assert server.metric("auth_required") == 1
    left = server.metric("tls_certificate_expiry_seconds")
    assert 29 * 86400 < left < 31 * 86400
    reloads = server.metric("tls_certificate_reloads_total")
    first = server.tls.fingerprint
    connection = server.connect("viewer", first)
    connection.request("GET", "/healthz")
    assert connection.getresponse().read()
    sock = connection.sock
    new = make(tmp_path / "new", days=90)
    replace(server.tls, new)

    def is_new() -> bool:
        try:
            return server.ask("/healthz", tls=new.fingerprint).code == 200
        except ssl.SSLCertVerificationError:
            assert server.ask("/healthz", tls=f"{new.fingerprint},{first}").code == 200
            return False

    wait_until("the new certificate", is_new, RELOAD_SECONDS)
    shutil.copy2(new.certificate, server.trusted)
    connection.request("GET", "/metrics")
    assert connection.getresponse().read() and connection.sock is sock, "it was closed"
    connection.close()
    assert server.metric("tls_certificate_reloads_total") == reloads + 1
    assert server.metric("tls_certificate_expiry_seconds") > 89 * 86400
    assert server.metric("tls_certificate_stale") == 0


def test_a_damaged_certificate_leaves_the_old_one_and_says_so_once(
    server: HttpsServer, tmp_path: Path
) -> None:
    assert server.broker is not None
    before = server.tls.certificate.read_bytes()
    server.tls.certificate.write_bytes(before[: len(before) // 2])
    wait_until("a look", lambda: server.metric("tls_certificate_stale") == 1, RELOAD_SECONDS)
    server.tls.certificate.write_bytes(before)
    wait_until("another", lambda: server.metric("tls_certificate_stale") == 0, RELOAD_SECONDS)
    assert server.broker.error_text().count("the TLS pair in use stays") == 1


def test_the_port_comes_back_with_the_coordinator(server: HttpsServer) -> None:
    server_key = server.tls.key.read_bytes()
    server.tls.key.write_bytes(b"damaged")
    pid = json.loads(server.ask("/readyz", "viewer").body)["processes"][0]["pid"]
    os.kill(pid, signal.SIGKILL)
    with server.come_in("ann") as ann:  # the broker serves, without its admin port
        assert ann.admin.cluster_status()["auth"] == "required"
        assert server.broker is not None
        text = server.broker.error_text
        wait_until("word of it", lambda: "the admin port waits" in text(), WAIT_SECONDS)
        fault = ann.admin.cluster_status()["tls_fault"]
        assert "the admin port waits" in fault and str(server.tls.key) in fault
    server.tls.key.write_bytes(server_key)
    assert server.ask("/healthz").code == 200
    assert server.ask("/metrics", "viewer").code == 200


# ---------------------------------------------------------------- commands


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command of `danube-fast`."""
    return subprocess.run(
        [sys.executable, "-m", "danube_fast.cli.main", *words], capture_output=True, text=True,
        timeout=WAIT_SECONDS, check=False, env={**os.environ, **variables},
    )  # fmt: skip


def test_health_is_asked_over_tls_without_a_secret(server: HttpsServer, tmp_path: Path) -> None:
    url = f"https://127.0.0.1:{server.admin_port}"
    pinned = server.broker.ready["certificate"] if server.broker is not None else ""
    pinned = f"{pinned},{certificate_of(server.trusted)}"
    for words, variables in (
        ((url, "--tls", str(server.trusted)), {}),
        ((url, "--live"), {"DANUBE_TLS": pinned}),
    ):
        done = run("health", *words, **variables)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert done.stdout in ("ready\n", "ok\n")
    done = run("health", url, "--tls", pinned, "-o", "json")
    assert json.loads(done.stdout) == {"status": "ready"}
    other = make(tmp_path / "other")
    for tls, code in ((str(other.certificate), 4), (other.fingerprint, 4), ("sha256:1", 2)):
        done = run("health", url, "--tls", tls)
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    assert run("health", url.replace("https", "http")).returncode == 5
    assert run("health", "danube://127.0.0.1").returncode == 2
    assert run("health", url + "/metrics").returncode == 2


def certificate_of(path: Path) -> str:
    return fingerprint_of(ssl.PEM_cert_to_DER_cert(path.read_text()))


def test_a_certificate_is_made_registered_and_revoked_by_commands(
    server: HttpsServer, tmp_path: Path
) -> None:
    folder = tmp_path / "new"
    done = run("security", "new-certificate", str(folder), "--name", "eve", "-o", "json")
    made = json.loads(done.stdout)
    assert made["fingerprint"] == certificate_of(folder / "tls.pem")
    again = run("security", "new-certificate", str(folder), "--name", "eve")
    assert again.returncode == 4 and "neither is overwritten" in again.stderr
    keys = keys_of(server)
    done = run(
        "security", "keys", "add", "viewer", "--certificate-of", str(folder / "tls.pem"), **keys
    )
    credential = made["fingerprint"].replace("sha256:", "mtls:")
    assert done.returncode == 0 and credential in done.stdout, done.stderr
    assert credential in run("security", "keys", "list", "-o", "json", **keys).stdout
    done = run("security", "keys", "revoke", credential, "--yes", **keys)
    assert done.returncode == 0, done.stderr
    assert credential not in run("security", "keys", "list", "-o", "json", **keys).stdout
    done = run("security", "keys", "add", "viewer", "--certificate-of", str(folder / "tls.key"), **keys)  # fmt: skip
    assert done.returncode == 2 and "holds no certificate" in done.stderr


def keys_of(server: HttpsServer) -> dict[str, str]:
    """What makes ann the user of commands."""
    return {
        "DANUBE_URL": server.url, "DANUBE_SERVER_KEY": server.server_key,
        "DANUBE_KEY_FILE": str(server.folder / "ann.key"),
    }  # fmt: skip


def test_a_subject_is_registered_renewed_and_revoked_by_commands(
    server: HttpsServer, tmp_path: Path
) -> None:
    keys, ca = keys_of(server), server.authority
    subject = r"CN=orders\, new+OU=Köln,O=Shop"
    for name in ("first", "renewed"):
        server.own[name] = ca.issue(tmp_path / name, subject)
    server.own["spoof"] = Authority().issue(tmp_path / "spoof", subject)

    def code(client: str) -> int:
        return server.ask("/metrics", client).code

    assert code("first") == code("renewed") == 401
    add = "security", "keys", "add"
    done = run(*add, "viewer", "--certificate-subject", r"OU=Köln+CN=orders\2C new,O=Shop", **keys)
    assert done.returncode == 0 and f"mtls:{subject}" in done.stdout, done.stderr
    assert code("first") == code("renewed") == 200
    with pytest.raises((ssl.SSLError, ConnectionError)):
        code("spoof")
    done = run(
        *add, "producer", "--certificate-subject-of", str(server.own["first"].certificate), **keys
    )
    assert done.returncode != 0 and "belongs to viewer" in done.stderr
    done = run(*add, "disabled", "--certificate-of", str(server.own["first"].certificate), **keys)
    assert done.returncode == 0, done.stderr
    assert (code("first"), code("renewed")) == (401, 200), "one certificate is stopped"
    listed = json.loads(run("security", "keys", "list", "-o", "json", **keys).stdout)
    assert {each["credential"]: each["principal"] for each in listed}[f"mtls:{subject}"] == "viewer"
    done = run("security", "audit", "-o", "json", **keys)
    shown = [each for each in json.loads(done.stdout) if each["action"] == "set_credential"]
    assert f"mtls:{subject}" in [each.get("arguments", {}).get("credential") for each in shown]
    done = run("security", "keys", "revoke", f"mtls:{subject}", "--yes", **keys)
    assert done.returncode == 0, done.stderr
    assert code("renewed") == 401
    refused = {
        "CN=orders, O=Shop": 2, "": 2, f"CN={'x' * 60},O={'y' * 60},OU={'z' * 60},L={'k' * 60}": 2,
    }  # fmt: skip
    for text, returncode in refused.items():
        done = run(*add, "viewer", "--certificate-subject", text, **keys)
        assert done.returncode == returncode and "certificate" in done.stderr, (text, done)
    with server.come_in("ann") as ann, pytest.raises(InvalidArgument, match="write mtls:CN=a"):
        ann.admin.set_credential("mtls:CN=\\61", "viewer")


# ---------------------------------------------------------------- starts


def start(folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`danube-fast serve` that is expected to refuse."""
    return run("serve", "--data-dir", str(folder / "data"), *options, **variables)


def test_a_start_says_which_file_of_tls_is_wrong(tmp_path: Path) -> None:
    made, other = make(tmp_path / "tls"), make(tmp_path / "other")
    certificate, key = str(made.certificate), str(made.key)
    pair = {"DANUBE_TLS_CERTIFICATE": certificate, "DANUBE_TLS_KEY": key}
    cas = write_pem(tmp_path / "cas.pem", Authority("CN=ca").pem)
    crl = write_pem(tmp_path / "clients.crl", Authority("CN=ca").crl())
    cases: list[tuple[dict[str, str], str]] = [
        ({"DANUBE_TLS_CERTIFICATE": certificate}, "needs tls_key"),
        ({"DANUBE_TLS_KEY": key}, "needs tls_certificate"),
        ({"DANUBE_TLS_CLIENT_CA": certificate}, "means nothing without TLS"),
        ({**pair, "DANUBE_TLS_CLIENT_CRL": certificate}, "set tls_client_ca too"),
        (
            {**pair, "DANUBE_TLS_CLIENT_CA": certificate, "DANUBE_TLS_CLIENT_CRL": certificate},
            "is no file of revoked client certificates",
        ),
        (
            {**pair, "DANUBE_TLS_CLIENT_CA": str(cas), "DANUBE_TLS_CLIENT_CRL": str(crl)},
            f"{crl} is no file of revoked client certificates (its list in the name of 'CN=ca' is not signed by this CA",
        ),
        (
            {"DANUBE_TLS_CERTIFICATE": certificate, "DANUBE_TLS_KEY": str(other.key)},
            "cannot be used together",
        ),
        (
            {"DANUBE_TLS_CERTIFICATE": certificate, "DANUBE_TLS_KEY": str(tmp_path / "none")},
            "there is no TLS key file",
        ),
    ]
    for variables, text in cases:
        done = start(tmp_path, "--listen", "127.0.0.1:0", **variables)
        assert done.returncode != 0 and text in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


def test_other_addresses_need_both_auth_and_tls(tmp_path: Path) -> None:
    made = make(tmp_path / "tls")
    tls = {"DANUBE_TLS_CERTIFICATE": str(made.certificate), "DANUBE_TLS_KEY": str(made.key)}
    given = "--listen", "127.0.0.1:0", "--admin", "0.0.0.0:0"
    for options, variables in (((), {}), ((), tls), (("--auth", "required"), {})):
        done = start(tmp_path, *given, *options, **variables)
        assert done.returncode != 0, done.stdout
        assert "--auth required with tls_certificate and tls_key" in done.stderr


def test_without_tls_a_secured_admin_port_asks_all_the_same(tmp_path: Path) -> None:
    """On loopback, where other local users are."""
    with SecuredServer(tmp_path / "data", tmp_path, workers=1) as secured:
        secured.make_ann()
        made = new_api_key()
        with secured.come_in("ann") as ann:
            ann.admin.add_api_key("ann", made.id, made.salt, made.digest)
        for headers, code in (({}, 401), ({"Authorization": f"Bearer {made.text}"}, 200)):
            connection = http.client.HTTPConnection("127.0.0.1", secured.port + 1, timeout=WAIT_SECONDS)  # fmt: skip
            connection.request("GET", "/metrics", headers=headers)
            response = connection.getresponse()
            assert response.status == code
            body = response.read()
            assert (b"danube_fast_auth_required 1.0" in body) == (code == 200)
            connection.request("GET", "/readyz")
            assert json.loads(connection.getresponse().read()) == {"status": "ready"}
            connection.close()


def expired_pair(folder: Path) -> NewCertificate:
    return make(folder, days=1, ago_days=3)


def test_an_expired_certificate_is_served_and_shows(server: HttpsServer, tmp_path: Path) -> None:
    """A broker does not stop for it: the metric tells, and clients with a CA refuse."""
    old = expired_pair(tmp_path / "old")
    kept = [path.read_bytes() for path in (server.tls.certificate, server.tls.key)]
    shutil.copy2(old.certificate, server.tls.certificate)
    shutil.copy2(old.key, server.tls.key)

    def is_old() -> bool:
        with suppress(ssl.SSLCertVerificationError):
            return server.ask("/healthz", tls=old.fingerprint).code == 200
        return False

    wait_until("the expired certificate", is_old, RELOAD_SECONDS)
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        server.ask("/healthz", tls=str(old.certificate))
    text = server.ask("/metrics", "viewer", tls=old.fingerprint).body.decode()
    line = next(line for line in text.splitlines() if line.startswith("danube_fast_tls_certificate_expiry"))  # fmt: skip
    assert float(line.split()[1]) < 0
    for path, content in zip((server.tls.certificate, server.tls.key), kept, strict=True):
        path.write_bytes(content)
    wait_until("the certificate before", lambda: not is_old(), RELOAD_SECONDS)
    assert server.ask("/healthz").code == 200
