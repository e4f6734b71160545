r"""One sign-on: a request and an answer over HTTPS, both bounded in bytes and time.

    POST /v1/sign-on, Authorization: Bearer ..., {"public_key"} --> 200 {"principal", "expires_seconds", "server_keys"}
                                                                \-> 4xx, 5xx {"code", "text"}, Retry-After

The token goes out only when the server has proved itself by its certificate. Redirects are not followed, proxies not
asked: the token is for that server alone.
"""

from __future__ import annotations

import enum
import http.client
import io
import socket
import ssl
import threading
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from danube_fast import errors
from danube_fast.client.values.limits import (
    SERVER_KEYS_MAX,
    SIGN_ON_ANSWER_BYTES_MAX,
    SIGN_ON_EXPIRES_SECONDS_MAX,
    SIGN_ON_SECONDS,
)
from danube_fast.clock import Clock
from danube_fast.errors import (
    DanubeError,
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    Unavailable,
)
from danube_fast.net.sign_on import PATH, Grant, Refusal, SignOnRequest
from danube_fast.security.curve import is_public_key
from danube_fast.security.tls import client_context

__all__ = ["Address", "Exchange", "Outlook", "SignOnError", "parse_address"]

_HTTPS_PORT = 443
_PORT_MAX = 65_535
_TEXT_CHARACTERS_MAX = 300
_REFUSALS = frozenset(
    {
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.UNAUTHORIZED,
        HTTPStatus.FORBIDDEN,
        HTTPStatus.CONFLICT,
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    }
)
_DIGITS_MAX = 6
"""Of a Retry-After in seconds."""


class Outlook(enum.Enum):
    """Whether the same sign-on may succeed later."""

    PASSES = 1
    """The network, or a server that has no time: soon."""
    LASTS = 2
    """The wrong certificate, another service, a fault of the application: when it has been mended."""
    DISPUTED = 3
    """The broker knows something else of this key, perhaps by an attempt of ours that is still under way."""
    FINAL = 4
    """The broker has refused this token."""


class SignOnError(Exception):
    """A sign-on that came to nothing."""

    def __init__(self, error: DanubeError, outlook: Outlook, retry_seconds: float = 0.0) -> None:
        super().__init__(str(error))
        self.error = error
        """For the application."""
        self.outlook = outlook
        self.retry_seconds = retry_seconds
        """How long the server wants to be left alone, at least."""


class Address(NamedTuple):
    """Where sign-on is served."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"https://{host}:{self.port}"


def parse_address(text: Any) -> Address:
    """Read `https://HOST:PORT`. Raises InvalidArgument, which repeats nothing: there may be a secret in it."""
    try:
        found = urlsplit(text) if isinstance(text, str) and text.isprintable() else None
        port = found.port if found is not None else None
    except ValueError:
        found = port = None
    if found is not None and found.scheme == "http":
        raise InvalidArgument(
            "sign_on= begins with http://, over which everyone on the way reads the token: secrets need https://"
        )
    if found is None or found.scheme != "https" or not found.hostname or port == 0:
        raise InvalidArgument("sign_on= is not an address; write https://HOST:PORT")
    if found.path.rstrip("/") or found.query or found.fragment or "@" in found.netloc:
        raise InvalidArgument(
            "sign_on= is the address of a host alone; write https://HOST:PORT, and pass the token as token="
        )
    return Address(found.hostname, port or _HTTPS_PORT)


class Exchange:
    """Signs on at one address. `perform` is called by one thread; `abort` by any."""

    def __init__(self, address: Address, tls: str, clock: Clock) -> None:
        """`tls`: as for `client_context`."""
        self.address = address
        self._tls = tls
        self._clock = clock
        self._lock = threading.Lock()
        self._handle: socket.socket | None = None
        """A second descriptor of the connection that is open."""
        self._is_aborted = False

    def abort(self) -> None:
        """End a sign-on that is under way, and every later one, with an error."""
        with self._lock:
            self._is_aborted = True
            if self._handle is not None:
                _shut(self._handle)

    def perform(self, token: str, public_key: str) -> Grant:
        """Sign a public key on. Raises SignOnError, whose frames hold the token: its `error` was never raised itself."""
        deadline_ns = self._clock.monotonic_ns() + int(SIGN_ON_SECONDS * 1e9)
        try:
            context = client_context(self._tls)
        except DanubeError as error:
            raise SignOnError(error.with_traceback(None), Outlook.LASTS) from None
        try:
            status, retry_after, body = self._post(context, token, public_key, deadline_ns)
        except ssl.SSLCertVerificationError as error:
            raise SignOnError(self._untrusted(error), Outlook.LASTS) from None
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise self._unreachable("the connection was closed") from None
        except ssl.SSLError as error:
            raise SignOnError(self._without_tls(error), Outlook.LASTS) from None
        except (socket.gaierror, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or "no name of a host"
            raise SignOnError(
                Unavailable(
                    f"the host {self.address.host!r} of sign_on= is unknown ({reason}); check the name"
                ),
                Outlook.PASSES,
            ) from None
        except TimeoutError:
            raise SignOnError(
                Unavailable(
                    f"{self.address} did not answer a sign-on within {SIGN_ON_SECONDS:g} s; look whether that host "
                    "and its broker are well"
                ),
                Outlook.PASSES,
            ) from None
        except ConnectionError as error:  # one of them is an HTTPException, too
            raise self._unreachable(error.strerror or "the connection was closed") from None
        except (http.client.HTTPException, ValueError):
            raise self._strange() from None
        except OSError as error:
            raise self._unreachable(error.strerror or type(error).__name__) from None
        return self._grant(status, retry_after, body)

    # ------------------------------------------------------------ the wire

    def _post(
        self, context: ssl.SSLContext, token: str, public_key: str, deadline_ns: int
    ) -> tuple[int, str, bytes]:
        """Send the request; status, Retry-After and body of the answer. Raises OSError, HTTPException."""
        body = msgspec.json.encode(SignOnRequest(public_key))
        host = str(self.address).removeprefix("https://")
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\nAccept: application/json\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        try:
            # from here on the descriptor belongs to what wraps it
            plain = self._connect(deadline_ns)
            with context.wrap_socket(plain, server_hostname=self.address.host) as connection:
                connection.settimeout(self._left(deadline_ns))
                connection.sendall(head.encode("ascii") + body)
                answer = http.client.HTTPResponse(
                    _Answer(connection, deadline_ns, self._clock), method="POST"  # type: ignore[arg-type]
                )  # fmt: skip
                answer.begin()
                content = answer.read(SIGN_ON_ANSWER_BYTES_MAX)
                return answer.status, answer.headers.get("Retry-After") or "", content
        finally:
            with self._lock:
                handle, self._handle = self._handle, None
            if handle is not None:
                handle.close()

    def _connect(self, deadline_ns: int) -> socket.socket:
        """Connect to the first address of the host that can be reached. Raises OSError."""
        found = socket.getaddrinfo(self.address.host, self.address.port, type=socket.SOCK_STREAM)
        failure: OSError | None = None
        for index, (family, kind, protocol, _, place) in enumerate(found):
            connection = socket.socket(family, kind, protocol)
            try:
                with self._lock:
                    if self._is_aborted:
                        raise ConnectionAbortedError("the client was closed")
                    handle, self._handle = self._handle, connection.dup()
                if handle is not None:
                    handle.close()
                # an address that drops all packets leaves time for the others
                connection.settimeout(self._left(deadline_ns) / (len(found) - index))
                connection.connect(place)
                connection.settimeout(self._left(deadline_ns))
                return connection
            except OSError as error:
                connection.close()
                failure = error
        raise failure or OSError("no address")

    def _left(self, deadline_ns: int) -> float:
        return _seconds_left(self._clock, deadline_ns)

    # ------------------------------------------------------------ what came of it

    def _grant(self, status: int, retry_after: str, body: bytes) -> Grant:
        """Judge an answer. Raises SignOnError."""
        if status == HTTPStatus.OK:
            try:
                grant = msgspec.json.decode(body, type=Grant)
            except (msgspec.DecodeError, UnicodeError):
                raise self._strange() from None
            keys = grant.server_keys
            are_sound = 0 < len(keys) <= SERVER_KEYS_MAX and all(map(is_public_key, keys))
            if not are_sound or not 0 < grant.expires_seconds <= SIGN_ON_EXPIRES_SECONDS_MAX:
                raise self._strange()
            return grant
        if status in _REFUSALS:
            outlook = Outlook.DISPUTED if status == HTTPStatus.CONFLICT else Outlook.FINAL
            raise SignOnError(self._refusal(status, body), outlook)
        if status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            seconds = (
                float(retry_after)
                if retry_after.isdecimal() and len(retry_after) <= _DIGITS_MAX
                else 0.0
            )
            wait = f" and asks to wait {seconds:g} s" if seconds else ""
            _, text = _said(body)
            reason = f"HTTP {status}: {text}" if text else f"HTTP {status}"
            raise SignOnError(
                Unavailable(
                    f"{self.address} cannot sign on now ({reason}){wait}; the client asks again by itself"
                ),
                Outlook.PASSES,
                seconds,
            )  # fmt: skip
        what = "a redirect, which is not followed" if 300 <= status < 400 else f"HTTP {status}"
        raise SignOnError(
            FailedPrecondition(
                f"{self.address} answers a sign-on with {what}; give the address of the broker's own sign-on port as "
                "sign_on="
            ),
            Outlook.LASTS,
        )

    def _refusal(self, status: int, body: bytes) -> DanubeError:
        """Make the error that the server names; PermissionDenied if it names none."""
        code, text = _said(body)
        kind = getattr(errors, code, None) if code in errors.__all__ else None
        if not (isinstance(kind, type) and issubclass(kind, DanubeError)) or status in (401, 403):
            kind = PermissionDenied
        return kind(
            f"{self.address} refuses the sign-on: {text or f'HTTP {status}'}; pass a token= that is good there"
        )

    def _untrusted(self, error: ssl.SSLCertVerificationError) -> DanubeError:
        reason = getattr(error, "verify_message", "") or str(error)
        remedy = (
            "renew it there"
            if "expired" in reason
            else "pass its CA's file, or its fingerprint, as tls="
        )
        return PermissionDenied(
            f"the certificate of {self.address} is not trusted ({reason}), and no token was sent; {remedy}"
        )  # fmt: skip

    def _without_tls(self, error: ssl.SSLError) -> DanubeError:
        reason = (error.reason or "no reason given").lower().replace("_", " ")
        return FailedPrecondition(
            f"no TLS connection to {self.address} comes about ({reason}); check that sign_on= is the broker's sign-on "
            "port"
        )

    def _unreachable(self, reason: str) -> SignOnError:
        return SignOnError(
            Unavailable(
                f"{self.address} cannot be reached for a sign-on ({reason}); check sign_on=, and that the broker "
                "serves sign-on there"
            ),
            Outlook.PASSES,
        )

    def _strange(self) -> SignOnError:
        return SignOnError(
            Unavailable(
                f"{self.address} answers a sign-on with what is none, or with more than {SIGN_ON_ANSWER_BYTES_MAX} "
                "bytes; check that sign_on= is the broker's sign-on port"
            ),
            Outlook.PASSES,
        )


class _Answer(io.RawIOBase):
    """Reads a connection up to a number of bytes and a time; looks like a socket to `http.client`."""

    def __init__(self, connection: ssl.SSLSocket, deadline_ns: int, clock: Clock) -> None:
        super().__init__()
        self._connection, self._deadline_ns, self._clock = connection, deadline_ns, clock
        self._left = SIGN_ON_ANSWER_BYTES_MAX

    def readable(self) -> bool:
        """Say that it is for reading."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some bytes. Raises ValueError for more than an answer may have, TimeoutError, OSError."""
        if self._left <= 0:
            raise ValueError("more than an answer may have")
        self._connection.settimeout(_seconds_left(self._clock, self._deadline_ns))
        with memoryview(buffer) as view:
            count = self._connection.recv_into(view[: self._left])
        self._left -= count
        return count

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return the file that `http.client` reads."""
        return io.BufferedReader(self)


def _said(body: bytes) -> tuple[str, str]:
    """Return the code and the text of a refusal, which is printable and short; empty where there is none."""
    try:
        said = msgspec.json.decode(body, type=Refusal)
    except (msgspec.DecodeError, UnicodeError):
        return "", ""
    text = "".join(each for each in said.text if each.isprintable())
    return said.code, text[:_TEXT_CHARACTERS_MAX]


def _seconds_left(clock: Clock, deadline_ns: int) -> float:
    """Seconds until a deadline. Raises TimeoutError when it is over."""
    left_ns = deadline_ns - clock.monotonic_ns()
    if left_ns <= 0:
        raise TimeoutError
    return left_ns / 1e9


def _shut(handle: socket.socket) -> None:
    try:
        handle.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is not connected any more, or not yet: closing it ends that
