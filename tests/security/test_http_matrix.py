"""Who may send which request to the admin port: every route, by each kind of sender.

A route that is new has to be entered in the table here, and in `danube_fast.admin.guard`, with what it needs.
"""

from __future__ import annotations

import asyncio
import functools
import json
import ssl
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute

from danube_fast.admin import guard as guards
from danube_fast.admin import http_api
from danube_fast.admin.guard import Guarded
from danube_fast.admin.view import BrokerView
from danube_fast.clock import SECOND_NS, SystemClock
from danube_fast.errors import FailedPrecondition
from danube_fast.ring.control import ControlBlock, ProcessState
from danube_fast.ring.counters import CounterBlock
from danube_fast.roles import Processes
from danube_fast.security.api_keys import new_api_key
from danube_fast.security.certificates import _certificate_and_key
from danube_fast.security.http_proofs import (
    mtls_credential,
    principal_of_request,
    subject_credential,
)
from danube_fast.security.records import ApiKey, Binding, Credential, Principal, Role
from danube_fast.types import Permission
from danube_fast.workers.coordinator.request_access import RequestAccess
from danube_fast.workers.process.access import CONFIRMED_NS_MAX, Access
from danube_fast.workers.process.denials import Denials

EVERYONE = "up or down, to all"
ROUTES: dict[str, Permission | str] = {
    "/healthz": EVERYONE,
    "/readyz": EVERYONE,
    "/metrics": Permission.LOOKUP,
}
"""Route -> the permission on the cluster that it needs."""
SENDERS = ("none", "wrong", "unbound", "producer", "topic viewer", "viewer", "operator", "admin", "disabled", "expired")  # fmt: skip
GRANTED: dict[str, set[Permission]] = {
    "viewer": {Permission.LOOKUP},
    "producer": {Permission.LOOKUP, Permission.PRODUCE},
    "operator": set(Permission) - {Permission.MANAGE_CLUSTER, Permission.PRODUCE, Permission.CONSUME},
    "admin": set(Permission),
}  # fmt: skip
"""What a sender may do on the cluster."""


SCOPES = (
    "cluster", "namespace:shop", "namespace:*", "namespace:system", "/shop/orders", "/*/*", "/shop/orders#billing",
    "/*/*#*", "subject:orders", "subject:*",
)  # fmt: skip
EACH = [(permission, scope) for permission in Permission for scope in SCOPES]


class Stopped:
    """A clock of the test."""

    def __init__(self) -> None:
        self.now_ns = SystemClock().wall_ns()

    def wall_ns(self) -> int:
        return self.now_ns

    def monotonic_ns(self) -> int:
        return self.now_ns


@pytest.fixture
def view() -> Any:
    control, counters = ControlBlock.create(2), CounterBlock.create(2, 0)
    made = BrokerView(Processes.with_workers(1), control, counters, SystemClock())
    for process in range(2):
        control.announce(process, ProcessState.READY, epoch=1)
        control.beat(process, SystemClock().monotonic_ns())
    yield made
    control.close()
    counters.close()


@functools.cache
def certificate(sender: str) -> bytes:
    """In DER; good for 30 days."""
    pem, _ = _certificate_and_key([sender.replace(" ", "-")], 30, SystemClock().wall_ns())
    return ssl.PEM_cert_to_DER_cert(pem.decode())


def known(clock: Stopped) -> Access:
    """Records of all senders; each comes in by a certificate."""
    access = Access(clock)
    access.is_loaded = access.is_owner = True
    access.confirm()
    put = access.policy.put
    put(Role("seer", [Permission.LOOKUP]))
    for sender in SENDERS[2:]:
        name = sender.replace(" ", "-")
        put(Principal(name, disabled=sender == "disabled"))
        ends_ns = clock.wall_ns() - SECOND_NS if sender == "expired" else 0
        put(Credential(mtls_credential(certificate(sender)), name, ends_ns))
        role = {"topic viewer": "viewer", "disabled": "admin", "expired": "admin"}.get(sender, sender)  # fmt: skip
        if sender != "unbound":
            scope = "/shop/orders" if sender == "topic viewer" else "cluster"
            put(Binding(name, f"user:{name}", role, scope))
    return access


def guard_of(clock: Stopped | None = None) -> RequestAccess:
    clock = clock or Stopped()
    return RequestAccess(known(clock), clock)


def ask(
    app: Any, path: str, sender: str, method: str = "GET", headers: tuple[tuple[bytes, bytes], ...] = ()
) -> tuple[int, dict[bytes, bytes], bytes]:  # fmt: skip
    """Status, headers and body of the answer to a request."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    shown = None if sender == "none" else certificate(sender)
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "https",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": list(headers),
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "state": {"peer_certificate": shown},
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], dict(sent[0]["headers"]), body


def expected(path: str, sender: str) -> int:
    needed = ROUTES[path]
    if needed == EVERYONE:
        return 200
    if sender in ("none", "wrong", "disabled", "expired"):
        return 401
    return 200 if needed in GRANTED.get(sender, set()) else 403


def test_every_route_is_in_the_table(view: Any) -> None:
    app = http_api.create_app(view)
    assert isinstance(app, Starlette)
    paths = {route.path for route in app.routes}  # type: ignore[attr-defined]
    assert paths == set(ROUTES), "enter it with the right that it needs"
    assert set(ROUTES) == guards.OPEN | set(guards.NEEDS), "and in guard.py"
    assert {path for path, needed in ROUTES.items() if needed == EVERYONE} == guards.OPEN
    assert all(isinstance(route, Route) for route in app.routes)


@pytest.mark.parametrize("sender", SENDERS)
@pytest.mark.parametrize("path", sorted(ROUTES))
def test_a_request_is_answered_exactly_with_its_right(view: Any, path: str, sender: str) -> None:
    clock = Stopped()
    app = http_api.create_app(view, guard_of(clock))
    for method in ("GET", "HEAD"):
        code, headers, body = ask(app, path, sender, method)
        assert code == expected(path, sender), body
        assert (b"www-authenticate" in headers) == (code == 401)
    if code in (401, 403):
        _, _, body = ask(app, path, sender)
        assert json.loads(body)["code"] == "PermissionDenied"
    assert ask(app, path, sender, "POST")[0] in (401, 403, 405)


@pytest.mark.parametrize("path", sorted(ROUTES))
def test_a_request_by_each_permission_at_each_scope(view: Any, path: str) -> None:
    """Each user has one permission at one scope, and none has two."""
    clock = Stopped()
    access = known(clock)
    app = http_api.create_app(view, RequestAccess(access, clock))
    needed = ROUTES[path]
    for number, (permission, scope) in enumerate(EACH):
        name = f"user-{number}"
        access.policy.put(Principal(name))
        access.policy.put(Role(name, [permission]))
        access.policy.put(Binding(name, f"user:{name}", name, scope))
        bearer = ((b"authorization", f"Bearer {api_key(access, name)}".encode()),)
        is_viewer = (permission, scope) == (Permission.LOOKUP, "cluster")
        allowed = needed == EVERYONE or (permission, scope) == (needed, "cluster")
        code, _, body = ask(app, path, "none", headers=bearer)
        assert code == (200 if allowed else 403), f"{permission} at {scope}: {body!r}"
        if path == "/readyz":
            assert (b"processes" in body) == is_viewer, f"{permission} at {scope}: {body!r}"


@pytest.mark.parametrize("sender", SENDERS)
def test_an_open_path_says_more_to_viewers_only(view: Any, sender: str) -> None:
    app = http_api.create_app(view, guard_of())
    _, _, body = ask(app, "/readyz", sender)
    told = json.loads(body)
    assert told["status"] == "ready"
    is_viewer = Permission.LOOKUP in GRANTED.get(sender, set())
    assert (set(told) == {"status", "waiting_for", "processes"}) == is_viewer
    assert is_viewer or set(told) == {"status"}
    assert json.loads(ask(app, "/healthz", sender)[2]) == {"status": "ok"}


@pytest.mark.parametrize("path", ["/", "/metrics/", "//metrics", "/Metrics", "/healthz/", "/secret", "/healthz/../metrics", "/readyz%2f", "*", ""])  # fmt: skip
def test_other_paths_are_refused_whether_they_are_there_or_not(view: Any, path: str) -> None:
    app = http_api.create_app(view, guard_of())
    assert ask(app, path, "none")[0] == 401
    there = ask(app, path, "admin")
    assert there[0] == 403
    assert there[2] == ask(app, "/nowhere", "admin")[2]


def test_a_route_without_an_entry_is_refused_to_administrators() -> None:
    async def forgotten(request: Any) -> Any:
        return PlainTextResponse("secret")

    app = Guarded(Starlette(routes=[Route("/forgotten", forgotten)]), guard_of())
    assert ask(app, "/forgotten", "none")[0] == 401
    code, _, body = ask(app, "/forgotten", "admin")
    assert code == 403 and b"secret" not in body


def test_other_protocols_are_refused() -> None:
    async def endpoint(socket: Any) -> None:
        raise AssertionError("reached")

    app = Guarded(Starlette(routes=[WebSocketRoute("/metrics", endpoint)]), guard_of())

    async def nothing(*_: Any) -> Any:
        raise AssertionError("was used")

    for kind in ("websocket", "lifespan"):
        with pytest.raises(FailedPrecondition):
            asyncio.run(app({"type": kind, "path": "/healthz", "headers": []}, nothing, nothing))


def test_a_copy_that_is_not_fresh_lets_no_one_in(view: Any) -> None:
    clock = Stopped()
    access = known(clock)
    app = http_api.create_app(view, RequestAccess(access, clock))
    assert ask(app, "/metrics", "admin")[0] == 200
    clock.now_ns += CONFIRMED_NS_MAX
    code, headers, _ = ask(app, "/metrics", "admin")
    assert code == 503 and headers[b"retry-after"] == b"5"
    assert ask(app, "/healthz", "none")[0] == 200
    assert set(json.loads(ask(app, "/readyz", "admin")[2])) == {"status"}
    access.confirm()
    assert ask(app, "/metrics", "admin")[0] == 200
    access.policy.remove("binding/admin")
    assert ask(app, "/metrics", "admin")[0] == 403
    access.policy.remove(f"credential/{mtls_credential(certificate('admin'))}")
    assert ask(app, "/metrics", "admin")[0] == 401


def test_a_certificate_that_ends_on_an_open_connection_proves_nothing(view: Any) -> None:
    clock = Stopped()
    access = known(clock)
    app = http_api.create_app(view, RequestAccess(access, clock))
    assert ask(app, "/metrics", "admin")[0] == 200
    clock.now_ns += 30 * 24 * 3600 * SECOND_NS
    access.confirm()
    assert ask(app, "/metrics", "admin")[0] == 401
    assert ask(app, "/healthz", "admin")[0] == 200


def test_headers_that_claim_an_identity_prove_nothing(view: Any) -> None:
    """Whatever a client sets, it is the handshake or a secret that counts."""
    app = http_api.create_app(view, guard_of())
    mark = mtls_credential(certificate("admin"))
    for name, value in (
        (b"x-principal", b"admin"), (b"x-forwarded-user", b"admin"), (b"x-remote-user", b"admin"),
        (b"x-client-cert", certificate("admin")), (b"x-ssl-client-cert", certificate("admin")),
        (b"authorization", b"admin"), (b"authorization", b"Basic YWRtaW46YWRtaW4="), (b"authorization", b""),
        (b"authorization", b"Bearer"), (b"authorization", b"Bearer admin"),
        (b"authorization", b"Bearer " + mark.encode()), (b"authorization", b"mtls " + mark.encode()),
        (b"cookie", b"principal=admin"),
    ):  # fmt: skip
        assert ask(app, "/metrics", "none", headers=((name, value),))[0] == 401, (name, value)
    # a header that proves nothing is not made good by a certificate
    assert ask(app, "/metrics", "admin", headers=((b"authorization", b"Bearer x"),))[0] == 401
    twice = ((b"authorization", b"Bearer x"), (b"authorization", b"Bearer y"))
    assert ask(app, "/metrics", "admin", headers=twice)[0] == 401


def test_a_bearer_decides_alone() -> None:
    certificates = {mtls_credential(b"cert"): "by certificate"}
    keys = {"key": "by key"}.get

    def who(headers: dict[str, str], shown: bytes | None = None) -> str | None:
        return principal_of_request(
            headers, shown, certificates.__contains__, certificates.get, keys
        )

    assert who({}) is None and who({}, b"other") is None
    assert who({}, b"cert") == "by certificate"
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert who({"authorization": f"{scheme} key"}) == "by key"
    assert who({"authorization": "Bearer  key "}, b"cert") == "by key"
    assert who({"authorization": "Bearer nothing"}, b"cert") is None
    assert who({"authorization": "Digest key"}, b"cert") is None


def api_key(access: Access, principal: str, ends_ns: int = 0) -> str:
    """A new API key of a principal."""
    made = new_api_key()
    access.policy.put(ApiKey(made.id, principal, made.salt, made.digest, ends_ns))
    return made.text


@pytest.mark.parametrize("sender", SENDERS[2:])
def test_api_keys_stand_for_their_principals(view: Any, sender: str) -> None:
    clock = Stopped()
    access = known(clock)
    app = http_api.create_app(view, RequestAccess(access, clock))
    name = sender.replace(" ", "-")
    ends_ns = clock.wall_ns() + (SECOND_NS if sender != "expired" else -SECOND_NS)
    text = api_key(access, name, ends_ns)

    def code(bearer: str, path: str = "/metrics") -> int:
        return ask(app, path, "none", headers=((b"authorization", f"Bearer {bearer}".encode()),))[0]

    for path in ROUTES:
        assert code(text, path) == expected(path, sender)
    wrong = text[:-1] + ("A" if text[-1] != "A" else "B")
    other = api_key(access, "admin")
    mixed = text[:21] + other[21:]
    for bearer in (wrong, mixed, text[:-1], text + "A", text.upper(), text[4:], f"dfk_{text}"):
        assert code(bearer) == 401
    clock.now_ns += 2 * SECOND_NS
    access.confirm()
    assert code(text) == 401, "it has ended"
    assert code(other) == 200
    access.policy.remove(f"api_key/{other[4:20]}")
    assert code(other) == 401, "it was revoked"


def test_refusals_are_counted_for_the_audit_log(view: Any) -> None:
    """By principal and address; a secret is in none."""
    clock = Stopped()
    access = known(clock)
    denials = Denials(clock)
    app = http_api.create_app(view, RequestAccess(access, clock, denials))
    text = api_key(access, "producer")
    for _ in range(5):
        ask(app, "/metrics", "none", headers=((b"authorization", f"Bearer {text}x".encode()),))
        ask(app, "/metrics", "unbound")
        ask(app, "/secret\n" + "x" * 10_000, "admin")
    for path, sender in (("/metrics", "viewer"), ("/healthz", "none"), ("/readyz", "producer")):
        assert ask(app, path, sender)[0] == 200
    noted, lost = denials.take(clock.monotonic_ns())
    assert lost == 0 and len(noted) == 3
    assert [each.principal for each in noted] == ["", "unbound", "admin"]
    assert [each.action for each in noted] == ["http"] * 3
    assert noted[0].resource == noted[1].resource == "/metrics" and "127.0.0.1" in noted[0].address
    assert len(noted[2].resource) < 1000
    assert text[21:] not in str(noted)
    clock.now_ns += 20 * SECOND_NS
    again, _ = denials.take(clock.monotonic_ns())
    assert [each.count for each in again] == [4, 4, 4], "repetitions are one record"


def test_records_that_change_under_a_check_are_asked_again() -> None:
    class Restless(Access):
        changes = 3

        def principal_of(self, proof: str) -> str | None:
            if self.changes:
                self.changes -= 1
                raise RuntimeError("dictionary changed size during iteration")
            return "ann"

    access = Restless(Stopped())
    access.is_loaded = True
    access.confirm()
    assert RequestAccess(access, Stopped()).principal_of_request({}, certificate("ann")) == "ann"


# ---------------------------------------------------------------- subjects of certificates


def code_of(access: Access, clock: Stopped, view: Any, sender: str) -> int:
    access.confirm()
    return ask(http_api.create_app(view, RequestAccess(access, clock)), "/metrics", sender)[0]


def test_a_subject_lets_its_certificates_in_until_it_ends(view: Any) -> None:
    clock = Stopped()
    access = known(clock)
    put = access.policy.put
    subject = subject_credential(certificate("none known"))
    assert subject == "mtls:CN=none-known"

    def code() -> int:
        return code_of(access, clock, view, "none known")

    assert code() == 401
    put(Credential(subject, "viewer"))
    assert code() == 200
    assert code_of(access, clock, view, "wrong") == 401, "another subject"
    for other in ("mtls:CN=none-know", "mtls:CN=none-known,O=x", "mtls:cn=none-known"):
        access.policy.remove(f"credential/{subject}")
        put(Credential(other, "viewer"))
        assert code() == 401, other
    put(Credential(subject, "viewer", clock.wall_ns() + SECOND_NS))
    assert code() == 200
    clock.now_ns += SECOND_NS
    assert code() == 401, "it has ended"
    put(Credential(subject, "disabled"))
    assert code() == 401
    put(Credential(subject, "unbound"))
    assert code() == 403
    access.policy.remove(f"credential/{subject}")
    assert code() == 401


def test_a_registered_certificate_counts_before_its_subject(view: Any) -> None:
    """Also when its record lets it in no more: so one certificate of a subject is stopped."""
    clock = Stopped()
    access = known(clock)
    put = access.policy.put
    own, subject = mtls_credential(certificate("wrong")), subject_credential(certificate("wrong"))
    put(Credential(subject, "viewer"))

    def code() -> int:
        return code_of(access, clock, view, "wrong")

    assert code() == 200
    for name, ends_ns, expected_code in (
        ("unbound", 0, 403), ("disabled", 0, 401), ("admin", 0, 200), ("admin", clock.wall_ns() - 1, 401),
    ):  # fmt: skip
        put(Credential(own, name, ends_ns))
        assert code() == expected_code, name
    access.policy.remove(f"credential/{own}")
    assert code() == 200, "the subject counts again"
