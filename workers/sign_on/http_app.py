"""The HTTP application of sign-on: one route, bounded requests, answers in JSON (`danube_fast/net/sign_on.py`)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Protocol

import msgspec

from danube_fast.errors import (
    DanubeError,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from danube_fast.net.sign_on import PATH, Grant, Refusal, SignOnRequest
from danube_fast.security.curve import is_public_key
from danube_fast.security.tokens import TOKEN_BYTES_MAX

__all__ = ["ROUTES", "NotProved", "SignOnService", "create_app"]

_log = logging.getLogger(__name__)

ROUTES = {PATH: "POST"}
"""Path -> method: all that this port serves."""
BODY_BYTES_MAX = 1024
UNPROVED = (
    "this API key or token is not accepted; get a new one from an administrator, or from its issuer"
)
"""Said for whatever is wrong with it."""
_BEARER = b"bearer "
_STATUS: tuple[tuple[type[DanubeError], int], ...] = (
    (InvalidArgument, HTTPStatus.BAD_REQUEST),
    (PermissionDenied, HTTPStatus.FORBIDDEN),
    (NotFound, HTTPStatus.NOT_FOUND),
    (FailedPrecondition, HTTPStatus.CONFLICT),
    (ResourceExhausted, HTTPStatus.TOO_MANY_REQUESTS),
    (Unavailable, HTTPStatus.SERVICE_UNAVAILABLE),
)
_RETRY_SECONDS: dict[int, int] = {
    HTTPStatus.TOO_MANY_REQUESTS: 60,
    HTTPStatus.SERVICE_UNAVAILABLE: 1,
}
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class NotProved(Exception):
    """A bearer's text that vouches for no one."""


class SignOnService(Protocol):
    """Signs keys on."""

    async def sign_on(self, text: str, public_key: str, address: str) -> Grant:
        """Let a key in for what a text vouches for. Raises NotProved, DanubeError."""


class _Refused(Exception):
    """A request that is no sign-on."""

    def __init__(self, status: int, error: DanubeError) -> None:
        super().__init__(str(error))
        self.status, self.error = status, error


def create_app(
    service: SignOnService,
) -> Callable[[dict[str, Any], Receive, Send], Awaitable[None]]:
    """Make the application, in terms of ASGI."""

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            text, public_key = await _read(scope, receive)
            client = scope.get("client")
            answer = await service.sign_on(text, public_key, client[0] if client else "")
        except NotProved:
            await _fail(send, HTTPStatus.UNAUTHORIZED, PermissionDenied(UNPROVED))
        except _Refused as refused:
            await _fail(send, refused.status, refused.error)
        except DanubeError as error:
            status = next(
                (each for kind, each in _STATUS if isinstance(error, kind)),
                HTTPStatus.INTERNAL_SERVER_ERROR,
            )
            await _fail(send, status, error)
        except Exception:
            _log.exception("a sign-on failed")
            await _fail(
                send,
                HTTPStatus.INTERNAL_SERVER_ERROR,
                Internal("sign-on failed; see the broker's log"),
            )
        else:
            await _send(send, HTTPStatus.OK, msgspec.json.encode(answer))

    return app


async def _read(scope: dict[str, Any], receive: Receive) -> tuple[str, str]:
    """Read a request: the bearer's text and the public key. Raises _Refused."""
    method = ROUTES.get(scope["path"])
    if method is None:
        raise _Refused(
            HTTPStatus.NOT_FOUND, NotFound(f"there is no {scope['path']!a:.100}; POST {PATH}")
        )
    if scope["method"] != method:
        raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, InvalidArgument(f"{method} to {PATH}"))
    found = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(found) != 1 or found[0][: len(_BEARER)].lower() != _BEARER:
        text = "send one header, Authorization: Bearer and an API key or a token"
        raise _Refused(HTTPStatus.UNAUTHORIZED, PermissionDenied(text))
    bearer = found[0][len(_BEARER) :].strip()
    if len(bearer) > TOKEN_BYTES_MAX:
        text = f"a token has at most {TOKEN_BYTES_MAX} bytes; let its issuer leave claims out"
        raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, ResourceExhausted(text))
    body, is_more = b"", True
    while is_more:
        message = await receive()
        if message["type"] != "http.request":
            raise _Refused(HTTPStatus.BAD_REQUEST, InvalidArgument("the request ended early"))
        body += message.get("body", b"")
        is_more = message.get("more_body", False)
        if len(body) > BODY_BYTES_MAX:
            text = f"the body has at most {BODY_BYTES_MAX} bytes"
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, ResourceExhausted(text))
    try:
        public_key = msgspec.json.decode(body, type=SignOnRequest).public_key
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        public_key = ""
    if not is_public_key(public_key):
        text = 'send {"public_key": "..."} with the 40 characters of a CURVE key in Z85'
        raise _Refused(HTTPStatus.BAD_REQUEST, InvalidArgument(text))
    return bearer.decode("latin-1"), public_key


async def _fail(send: Send, status: int, error: DanubeError) -> None:
    body = msgspec.json.encode(Refusal(type(error).__name__, str(error)))
    await _send(send, status, body)


async def _send(send: Send, status: int, body: bytes) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"cache-control", b"no-store"),
    ]
    if status in _RETRY_SECONDS:
        headers.append((b"retry-after", b"%d" % _RETRY_SECONDS[status]))
    if status == HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
