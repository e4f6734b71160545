"""The admin port and lists of revoked client certificates."""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Iterator

import pytest

from tests.delivery.https_rig import RELOAD_SECONDS, HttpsServer
from tests.security.authority import write_pem
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


def test_a_revoked_certificate_is_refused_within_seconds(server: HttpsServer) -> None:
    """On new connections and on one that is never idle."""
    assert 23 * 3600 < server.metric("tls_client_crl_expiry_seconds") < 25 * 3600
    assert not is_refused(server, "stranger")
    busy = server.connect("stranger")
    busy.request("GET", "/healthz")
    assert busy.getresponse().read()
    sock = busy.sock
    server.authority.revoke(server.own["stranger"])
    write_pem(server.crl, server.authority.crl())
    began, ended = time.monotonic(), False
    while not ended:
        assert time.monotonic() - began < RELOAD_SECONDS, "the open connection goes on"
        try:
            busy.request("GET", "/healthz")
            assert busy.getresponse().read() and busy.sock is sock
        except (OSError, http.client.HTTPException):
            ended = True
    busy.close()
    assert is_refused(server, "stranger")
    for client in ("viewer", "producer", "unknown"):
        assert not is_refused(server, client), client
    assert server.ask("/healthz").code == 200
    print(
        f"\nan open connection of a revoked certificate ended after {time.monotonic() - began:.1f} s"
    )


def test_a_damaged_list_leaves_the_old_one_and_says_so_once(server: HttpsServer) -> None:
    assert server.broker is not None
    sound = server.crl.read_bytes()
    for content in (sound[: len(sound) // 2], server.authority.crl(hours=-1)):
        write_pem(server.crl, content)
        wait_until("a look", lambda: server.metric("tls_certificate_stale") == 1, RELOAD_SECONDS)
        assert not is_refused(server, "viewer")
        with server.come_in("ann") as ann:
            assert str(server.crl) in ann.admin.cluster_status()["tls_fault"]
        write_pem(server.crl, server.authority.crl())
        wait_until("another", lambda: server.metric("tls_certificate_stale") == 0, RELOAD_SECONDS)
    text = server.broker.error_text()
    assert text.count("cut short") == 1 and text.count("has expired already") == 1
