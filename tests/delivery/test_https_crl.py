"""The admin port and lists of revoked client certificates."""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Iterator

import pytest

from danube_fast.cli.exposure import records
from danube_fast.cli.host import Verdict
from danube_fast.clock import SystemClock
from tests.delivery.https_rig import RELOAD_SECONDS, HttpsServer
from tests.security.authority import Authority, write_pem
from tests.workers.broker import wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpsServer]:
    secured = HttpsServer(tmp_path_factory.mktemp("crl"), revokes=True)
    with secured:
        secured.make_ann()
        secured.register()
        yield secured


def is_refused(server: HttpsServer, client: str) -> bool:
    """Whether the handshake of a new connection fails."""
    try:
        assert server.ask("/metrics", client).code in (200, 401, 403)
    except (ssl.SSLError, ConnectionError, http.client.RemoteDisconnected):
        return True
    return False


@pytest.mark.parametrize("client", ["stranger", "below"])
def test_a_revoked_certificate_is_refused_within_seconds(server: HttpsServer, client: str) -> None:
    """On new connections and on one that is never idle; of `below` the CA is revoked that signed it."""
    assert 23 * 3600 < server.metric("tls_client_crl_expiry_seconds") < 25 * 3600
    assert not is_refused(server, client)
    busy = server.connect(client)
    busy.request("GET", "/healthz")
    assert busy.getresponse().read()
    sock = busy.sock
    server.authority.revoke(server.between if client == "below" else server.own[client])
    server.write_lists()
    began, ended = time.monotonic(), False
    while not ended:
        assert time.monotonic() - began < RELOAD_SECONDS, "the open connection goes on"
        try:
            busy.request("GET", "/healthz")
            assert busy.getresponse().read() and busy.sock is sock
        except (OSError, http.client.HTTPException):
            ended = True
    busy.close()
    assert is_refused(server, client)
    for other in ("viewer", "producer", "unknown"):
        assert not is_refused(server, other), other
    assert server.ask("/healthz").code == 200
    print(
        f"\nan open connection of a revoked certificate ended after {time.monotonic() - began:.1f} s"
    )


def test_a_damaged_list_leaves_the_old_one_and_says_so_once(server: HttpsServer) -> None:
    assert server.broker is not None
    sound = server.crl.read_bytes()
    faults = {
        "cut short": sound[: len(sound) // 2],
        "has expired already": server.authority.crl(hours=-1),
        "is older than the one that was in use": server.authority.crl(begin_days=31),
        "'CN=ca' is not signed by this CA": server.authority.crl(signer=Authority()),
        "'CN=evil' is of no CA of clients": sound + Authority("CN=evil").crl(),
    }
    for said, content in faults.items():
        write_pem(server.crl, content)
        wait_until("a look", lambda: server.metric("tls_certificate_stale") == 1, RELOAD_SECONDS)
        assert not is_refused(server, "viewer")
        with server.come_in("ann") as ann:
            status = ann.admin.cluster_status()
            assert str(server.crl) in status["tls_fault"] and said in status["tls_fault"]
            found = {each.check: each for each in records(ann, status, SystemClock().wall_ns())}
            assert found["TLS files"].verdict is Verdict.FAILURE
            assert said in found["TLS files"].seen
        server.write_lists()
        wait_until("another", lambda: server.metric("tls_certificate_stale") == 0, RELOAD_SECONDS)
    text = server.broker.error_text()
    assert {said: text.count(said) for said in faults} == dict.fromkeys(faults, 1)


def test_a_ca_without_a_list_is_told(server: HttpsServer) -> None:
    """The root alone has one: all clients of the CA below it are refused."""
    assert server.broker is not None

    def fault() -> str:
        with server.come_in("ann") as ann:
            return str(ann.admin.cluster_status()["tls_fault"])

    assert fault() == ""
    write_pem(server.crl, server.authority.crl())
    said = wait_until("the fault", fault, RELOAD_SECONDS)
    assert said.startswith("1 of ") and str(server.crl) in said and "all their clients" in said
    assert "1 of the CAs of clients have no list" in server.broker.error_text()
    server.write_lists()
    wait_until("the end of the fault", lambda: not fault(), RELOAD_SECONDS)
