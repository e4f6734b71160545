"""Rights on the admin port: each path with the right that it needs, and no other path.

    path in OPEN                    all may ask, and learn whether the broker is up
    path in NEEDS                   a principal with that permission on the cluster
    any other, also one of a route  no one

A broker that asks no one (`auth` is `none`) has no guard; its port is on loopback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from danube_fast.errors import (
    DanubeError,
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    Unavailable,
)
from danube_fast.types import Permission
from danube_fast.undecided import Undecided

__all__ = ["NEEDS", "OPEN", "Guard", "Guarded", "may_see_details"]

OPEN = frozenset({"/healthz", "/readyz"})
"""Paths whose answers say up or not, and more only to whom NEEDS_DETAILS lets."""
NEEDS: dict[str, Permission] = {"/metrics": Permission.LOOKUP}
"""Path -> permission on the cluster: metrics name every topic."""
NEEDS_DETAILS = Permission.LOOKUP
RETRY_SECONDS = "5"
T = TypeVar("T")
_ASK = {"WWW-Authenticate": 'Bearer realm="danube-fast"'}


class Guard(Protocol):
    """Proves who sends a request, and decides."""

    def principal_of_request(
        self, headers: Mapping[str, str], peer_certificate: bytes | None
    ) -> str | None:
        """Return the principal of a request; None: it proves no one. Raises InvalidArgument, Unavailable."""
        ...

    def authorize(self, principal: str, permission: Permission) -> None:
        """Return if the principal has the permission on the cluster. Raises PermissionDenied, Unavailable."""
        ...

    def note_denied(self, principal: str, address: str, path: str) -> None:
        """Note a request that was refused; `principal` is empty if it proved none."""
        ...


class Guarded:
    """An application behind a guard."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app, self._guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it; nothing of its body is read before."""
        if scope["type"] != "http":  # a route of that kind would need a rule of its own
            raise FailedPrecondition("the admin port serves requests of HTTP only; send one")
        if scope["path"] not in OPEN:
            refusal = await _when_decided(lambda: _refusal(self._guard, scope))
            if refusal is not None:
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _refusal(guard: Guard, scope: Scope) -> JSONResponse | None:
    """The answer to a request that is not let through."""
    principal: str | None = None
    try:
        principal = _principal(guard, scope)
        if principal is None:
            _note(guard, "", scope)
            text = (
                "this path needs an API key (Authorization: Bearer) or a registered client certificate; /healthz and "
                "/readyz need neither"
            )
            return _answer(PermissionDenied(text), HTTPStatus.UNAUTHORIZED, _ASK)
        needed = NEEDS.get(scope["path"])
        if needed is None:
            raise PermissionDenied(f"{principal} may not ask for this path; see docs/security.md")
        guard.authorize(principal, needed)
    except (InvalidArgument, PermissionDenied) as error:
        _note(guard, principal or "", scope)
        return _answer(error, HTTPStatus.FORBIDDEN)
    except Undecided:
        raise
    except Unavailable as error:
        return _answer(error, HTTPStatus.SERVICE_UNAVAILABLE, {"Retry-After": RETRY_SECONDS})
    return None


def _note(guard: Guard, principal: str, scope: Scope) -> None:
    client = scope.get("client")
    guard.note_denied(principal, str(client[0]) if client else "", scope["path"])


async def may_see_details(guard: Guard | None, request: Request) -> bool:
    """Whether the answer on an open path may say more than up or not."""
    return guard is None or await _when_decided(lambda: _may_see_details(guard, request))


async def _when_decided(ask: Callable[[], T]) -> T:
    """Ask, and again when a right is known that was not."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return ask()
        except Undecided as undecided:
            known = asyncio.Event()
            undecided.then(partial(_tell, loop, known))
        await known.wait()


def _tell(loop: asyncio.AbstractEventLoop, known: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the thread of the port has ended
        loop.call_soon_threadsafe(known.set)


def _may_see_details(guard: Guard, request: Request) -> bool:
    try:
        principal = _principal(guard, request.scope)
        if principal is not None:
            guard.authorize(principal, NEEDS_DETAILS)
    except Undecided:
        raise
    except DanubeError:
        return False
    return principal is not None


def _principal(guard: Guard, scope: Scope) -> str | None:
    names = [name for name, _ in scope["headers"]]
    if names.count(b"authorization") > 1:
        return None  # either of two may be meant
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    return guard.principal_of_request(headers, _certificate(scope))


def _certificate(scope: Scope) -> bytes | None:
    """The client's certificate in DER, as the connection has it."""
    state: dict[str, Any] = scope.get("state") or {}
    found = state.get("peer_certificate")
    return found if isinstance(found, bytes) else None


def _answer(error: DanubeError, code: int, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"code": type(error).__name__, "text": str(error)}, code, headers)
