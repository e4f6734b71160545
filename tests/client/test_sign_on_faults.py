"""Faults of a sign-on port: each is one sentence that says what to do next, and the token stays where it is."""

from __future__ import annotations

import socket
import ssl
import time
from pathlib import Path
from typing import Any

import pytest

import danube_fast
from danube_fast.errors import (
    DanubeError,
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    Unavailable,
)
from tests.client.fake_sign_on import (
    FakeSignOn,
    certificate,
    granted,
    read_request,
    refusal,
    reply,
    silent,
)
from tests.client.sign_on_site import KEY, NOWHERE, TOKEN, Site, fails


def test_certificates_that_prove_nothing(site: Site, tmp_path: Path) -> None:
    stranger = certificate(tmp_path / "other")
    cases: list[tuple[str, str]] = [
        (str(stranger.certificate), "self-signed certificate"),
        (stranger.fingerprint, "another certificate than the pinned one"),
    ]
    for tls, words in cases:
        fails(lambda tls=tls: site.connect(tls=tls), PermissionDenied, words, "no token was sent")
    fails(lambda: site.connect(tls=None), PermissionDenied, "self-signed", "as tls=")
    fails(lambda: site.connect(tls="sha256:12"), InvalidArgument, "64 digits")
    fails(lambda: site.connect(tls=str(tmp_path / "none.pem")), DanubeError, "none.pem")
    assert not site.port.asked and site.port.connections >= 3


@pytest.mark.parametrize("case", ["expired", "another-name"])
def test_a_certificate_that_is_not_good_any_more_or_here(tmp_path: Path, case: str) -> None:
    pem = (
        certificate(tmp_path, days=-1) if case == "expired" else certificate(tmp_path, names=("else.where",))
    )  # fmt: skip
    port = FakeSignOn(pem, lambda token, key: granted([KEY]))
    options = {"token": TOKEN, "sign_on": port.url, "tls": str(pem.certificate), "timeout": 30.0}
    try:
        words = ("has expired", "renew it") if case == "expired" else ("127.0.0.1", "as tls=")
        fails(lambda: danube_fast.connect(NOWHERE, **options), PermissionDenied, *words)
    finally:
        port.close()
    assert not port.asked


def test_a_token_that_is_refused(site: Site) -> None:
    fails(lambda: site.connect(token="dfk_wrong"), PermissionDenied, "no such key", "pass a token=")
    for answer, kind in [
        (refusal(403, "FailedPrecondition", "ann is disabled"), PermissionDenied),
        (refusal(400, "InvalidArgument", "no public key"), InvalidArgument),
        (refusal(413, "Status", "too long"), PermissionDenied),
        ((401, {}, b"\xff\0not JSON"), PermissionDenied),
        ((401, {}, [1]), PermissionDenied),
    ]:
        site.refusals.append(answer)
        fails(site.connect, kind, "refuses the sign-on")
    assert len(site.port.asked) == 6, "a refusal is asked about again"


def test_a_key_in_dispute_is_asked_for_once_more(site: Site) -> None:
    """An attempt of the client may still have been under way."""
    said = refusal(409, "FailedPrecondition", "this key signs on just now")
    site.refusals.append(said)
    with site.connect():
        pass
    site.refusals += [said, said]
    fails(site.connect, FailedPrecondition, "signs on just now")
    assert len(site.port.asked) == 4


def test_a_function_is_asked_once_more_for_a_token_that_is_refused(site: Site) -> None:
    """That which it returned may have ended on its way."""
    tokens = ["ended", TOKEN, "wrong", "wrong", TOKEN]
    with site.connect(token=lambda: tokens.pop(0)):
        pass
    fails(lambda: site.connect(token=lambda: tokens.pop(0)), PermissionDenied, "no such key")
    assert tokens == [TOKEN]


def test_a_long_text_of_a_refusal_is_cut(site: Site) -> None:
    site.refusals.append(refusal(403, "PermissionDenied", "\x1b[31m" + "x" * 5000))
    error = fails(site.connect, PermissionDenied)
    assert len(str(error)) < 500 and "\x1b" not in str(error)


@pytest.mark.parametrize("status", [301, 307, 404, 405])
def test_another_service_and_redirects(site: Site, status: int) -> None:
    site.refusals += [(status, {"Location": f"https://127.0.0.1:{site.port.port}/v1/sign-on"}, b"")]
    fails(site.connect, FailedPrecondition, "sign-on port")
    assert len(site.port.asked) == 1, "a redirect was followed, or asked for again"


def test_busy_servers_are_asked_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.refusals += [refusal(503, "Unavailable", "the authenticator does not decide")] * 9
    words = "(HTTP 503: the authenticator does not decide)"
    assert words in str(fails(lambda: site.connect(timeout=0.5), Unavailable))
    site.refusals.clear()
    site.port.asked.clear()
    for pause in ("SIGN_ON_BACKOFF_NS", "SIGN_ON_BACKOFF_NEEDED_NS_MAX"):
        monkeypatch.setattr(f"danube_fast.client.sign_on.renewal.{pause}", 50_000_000)
    site.refusals += [
        refusal(503, "Unavailable", "starting", **{"Retry-After": "1"}),
        refusal(429, "ResourceExhausted", "too many"),
        (500, {}, b"<html>"),
        (200, {}, b"{"),
        (200, {}, {"principal": "ann", "expires_seconds": 5, "server_keys": []}),
        (200, {}, {"principal": "ann", "expires_seconds": -5, "server_keys": [KEY]}),
        (200, {}, {"principal": "ann", "expires_seconds": 5, "server_keys": ["x"]}),
    ]
    began = time.monotonic()
    with site.connect() as client:
        client.publish("/default/t", b"1")
    assert time.monotonic() - began >= 1, "Retry-After is not heeded"
    assert len(site.port.asked) == 8


def drip(connection: ssl.SSLSocket) -> None:
    read_request(connection)
    connection.sendall(b"HTTP/1.1 200 Said\r\n")
    while True:
        connection.sendall(b"X")
        time.sleep(0.02)


def huge(connection: ssl.SSLSocket) -> None:
    read_request(connection)
    connection.sendall(b"HTTP/1.1 200 Said\r\n\r\n")
    while True:
        connection.sendall(b" " * 65_536)


def many_headers(connection: ssl.SSLSocket) -> None:
    read_request(connection)
    connection.sendall(b"HTTP/1.1 200 Said\r\n")
    while True:
        connection.sendall(b"X-Header: " + b"y" * 4000 + b"\r\n")


def garbage(connection: ssl.SSLSocket) -> None:
    read_request(connection)
    connection.sendall(b"SSH-2.0-something\r\n\r\n")


def hangs_up(connection: ssl.SSLSocket) -> None:
    read_request(connection)


def half(connection: ssl.SSLSocket) -> None:
    read_request(connection)
    connection.sendall(reply(200, {}, granted([KEY])[2])[:-5])


@pytest.mark.parametrize(
    ("serve", "words"),
    [
        (drip, "did not answer a sign-on within 0.5 s"),
        (silent, "did not answer a sign-on within 0.5 s"),
        (huge, "more than 65536 bytes"),
        (many_headers, "check that sign_on="),
        (garbage, "check that sign_on="),
        (hangs_up, "cannot be reached"),
        (half, "check that sign_on="),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_answers_are_bounded(
    site: Site, serve: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("danube_fast.client.sign_on.exchange.SIGN_ON_SECONDS", 0.5)
    site.port.serve = serve
    fails(lambda: site.connect(timeout=2), Unavailable, words)


def test_hosts_that_are_not_there(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = f"https://127.0.0.1:{taken.getsockname()[1]}"
    fails(
        lambda: site.connect(sign_on=free, timeout=1), Unavailable, "cannot be reached", "refused"
    )
    unknown = "https://no-such-host.invalid:1"

    def resolve(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    fails(lambda: site.connect(sign_on=unknown, timeout=1), Unavailable, "no-such-host.invalid", "is unknown")  # fmt: skip


def test_a_port_without_tls(site: Site) -> None:
    url = f"https://127.0.0.1:{site.broker.port}"
    fails(lambda: site.connect(sign_on=url, timeout=3), DanubeError, "check")
