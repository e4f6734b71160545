"""Who may send which request to the port of sign-on: every route, by each kind of sender, to a broker.

A route that is new has to be entered in the table here, with what each sender is told.
"""

from __future__ import annotations

import ast
import inspect
import json
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from danube_fast.net import sign_on
from danube_fast.security.api_keys import new_api_key
from danube_fast.security.certificates import new_certificate
from danube_fast.security.curve import new_key_pair
from danube_fast.security.tls import client_context
from danube_fast.workers.sign_on import http_app
from tests.delivery.sign_on_rig import IssuerKey, SignOnServer, issuer_toml
from tests.delivery.test_security import TOPIC
from tests.delivery.test_sign_on import add_api_key
from tests.workers.broker import wait_until

USERS = ("producer", "admin", "unbound", "disabled")
SENDERS = {
    "none": 401,
    "another scheme": 401,
    "two headers": 401,
    "an empty one": 401,
    "nonsense": 401,
    "a certificate alone": 401,
    "an API key of producer": 200,
    "an API key of admin": 200,
    "an API key of unbound": 200,  # may do nothing then
    "an API key of disabled": 403,
    "an API key that has ended": 401,
    "an API key that was removed": 401,
    "an API key that is none": 401,
    "an API key with another's secret": 401,
    "a token of producer": 200,
    "a token of disabled": 403,
    "a token of a user without a record": 403,
    "a token that has ended": 401,
    "a token for another audience": 401,
    "a token of another issuer": 401,
    "a token by another key": 401,
}
"""Sender -> what it is told."""
ROUTES: dict[str, tuple[str, dict[str, int]]] = {"/v1/sign-on": ("POST", SENDERS)}
"""Route -> its method, and who is told what."""
OTHERS = (
    "/", "/v1", "/v1/", "/v1/sign-on/", "/v1/sign-on/x", "//v1/sign-on", "/V1/sign-on", "/v1/sign-off",
    "/healthz", "/readyz", "/metrics", "/docs", "/openapi.json",
)  # fmt: skip
METHODS = ("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS")


class Rig(NamedTuple):
    """A broker, and what each sender shows."""

    server: SignOnServer
    headers: dict[str, list[str]]
    """Sender -> values of Authorization."""
    certificate: Any


def bearers(server: SignOnServer, key: IssuerKey) -> dict[str, str]:
    """What senders say who say one thing."""
    found = {
        "an empty one": "",
        "nonsense": "producer",
        "an API key that is none": new_api_key().text,
    }
    with server.come_in("ann") as ann:
        for user in USERS:
            ann.admin.set_principal(user, disabled=user == "disabled")
            if user in ("producer", "admin"):
                ann.admin.set_binding(user, f"user:{user}", user, "cluster" if user == "admin" else TOPIC)  # fmt: skip
            found[f"an API key of {user}"] = add_api_key(ann.admin, user).text
        own, other = found["an API key of producer"], found["an API key of admin"]
        found["an API key with another's secret"] = own[:21] + other[21:]
        found["an API key that has ended"] = add_api_key(
            ann.admin, "producer", expires_seconds=1
        ).text
        removed = add_api_key(ann.admin, "admin")
        ann.admin.delete_security("api_key", removed.id)
    found["an API key that was removed"] = removed.text
    return found | {
        "a token of producer": key.token(sub="producer"),
        "a token of disabled": key.token(sub="disabled"),
        "a token of a user without a record": key.token(sub="stranger"),
        "a token that has ended": key.token(sub="producer", exp=int(time.time()) - 1),
        "a token for another audience": key.token(sub="producer", aud="other"),
        "a token of another issuer": key.token(sub="producer", iss="https://other.example/"),
        "a token by another key": IssuerKey().token(sub="producer"),
    }


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("matrix")
    key = IssuerKey()
    jwks = folder / "jwks.json"
    jwks.write_text(json.dumps({"keys": [key.jwk()]}))
    jwks.chmod(0o644)
    with SignOnServer(
        folder / "data", folder, issuer_toml(jwks_file=str(jwks), algorithms=["ES256"]), workers=1
    ) as server:
        server.make_ann()
        said = bearers(server, key)
        headers = {sender: [f"Bearer {text}"] for sender, text in said.items()}
        good = said["an API key of admin"]
        headers |= {
            "none": [], "a certificate alone": [], "another scheme": [f"Basic {good}"],
            "two headers": [f"Bearer {good}", f"Bearer {good}"],
        }  # fmt: skip
        made = Rig(server, headers, new_certificate(folder / "client", ["admin"]))
        ended = headers["an API key that has ended"]
        wait_until(
            "the end of an API key", lambda: ask(made, "/v1/sign-on", "POST", ended)[0] == 401
        )
        yield made


def ask(
    rig: Rig, path: str, method: str, headers: list[str], *, shows: bool = False
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer; `shows`: with a certificate."""
    connection = rig.server.connection()
    if shows:
        context = client_context(str(rig.server.certificate.certificate))
        context.load_cert_chain(rig.certificate.certificate, rig.certificate.key)
        connection._context = context  # type: ignore[attr-defined]
    body = json.dumps({"public_key": new_key_pair().public}).encode()
    try:
        connection.putrequest(method, path)
        for value in headers:
            connection.putheader("Authorization", value)
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def paths_in(module: ModuleType) -> set[str]:
    """Texts of a module that may be paths."""
    tree = ast.parse(inspect.getsource(module))
    texts = [each.value for each in ast.walk(tree) if isinstance(each, ast.Constant)]
    return {text for text in texts if isinstance(text, str) and text.startswith("/")}


def test_every_route_is_in_the_table() -> None:
    served = {path: method for path, (method, _) in ROUTES.items()}
    assert served == http_app.ROUTES, "enter it with what each sender is told"
    known = paths_in(http_app) | paths_in(sign_on)
    assert known == set(ROUTES), "a path beside the table of routes"


@pytest.mark.parametrize("sender", SENDERS)
@pytest.mark.parametrize("path", sorted(ROUTES))
def test_a_request_is_answered_by_who_sends_it(rig: Rig, path: str, sender: str) -> None:
    method, senders = ROUTES[path]
    assert set(senders) == set(rig.headers), "a sender without an entry"
    shows = sender == "a certificate alone"
    status, headers, body = ask(rig, path, method, rig.headers[sender], shows=shows)
    assert status == senders[sender], body
    assert ("www-authenticate" in headers) == (status == 401)
    assert headers["cache-control"] == "no-store"
    told = json.loads(body)
    if status == 200:
        assert told["server_keys"] == [rig.server.server_key]
        assert told["principal"] == sender.split()[-1]
    else:
        assert set(told) == {"code", "text"} and told["code"] == "PermissionDenied"
        assert not any(value.split()[-1] in told["text"] for value in rig.headers[sender] if " " in value.strip())  # fmt: skip
    for other in METHODS:
        assert ask(rig, path, other, rig.headers[sender])[0] == 405, other


@pytest.mark.parametrize("path", OTHERS)
def test_nothing_else_is_there_for_any_sender(rig: Rig, path: str) -> None:
    for sender in ("none", "nonsense", "an API key of admin", "a token of producer"):
        for method in ("GET", "POST"):
            status, _, body = ask(rig, path, method, rig.headers[sender])
            assert status == 404, (sender, method, body)
            assert json.loads(body)["code"] == "NotFound"
