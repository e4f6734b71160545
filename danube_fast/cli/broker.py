"""How commands reach a broker: one connection, one operation, one answer.

Before a client is opened each address is tried once, so that a host that is unknown, a port where nothing
listens, a server that is no broker and a broker that asks for a key are told apart at once.
"""

from __future__ import annotations

import contextlib
import inspect
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from danube_fast.cli.contexts.context_file import chosen_name, values, values_of
from danube_fast.cli.contexts.open_client import access_of, open_client
from danube_fast.cli.options import (
    DEFAULT_URL,
    OutputForm,
    OutputOption,
    UrlOption,
    command,
    example,
)
from danube_fast.cli.output import print_result, print_table

if TYPE_CHECKING:
    from danube_fast.client.values.access import Access
    from danube_fast.client.values.arguments import Transport

__all__ = ["Ask", "asking", "connect", "reach"]

CONNECT_SECONDS = 5.0
"""A person at a terminal waits for an answer, shorter than a program would."""
SIGN_ON_SECONDS = 3.0
"""Added for a sign-on: a broker waits 5 s for its authenticator before it says what is wrong."""

RESTART_SECONDS = 1.0
"""A port where nothing listens is tried for so long: the process behind it may be starting again."""
RETRY_SECONDS = 0.05
GREETING_SECONDS = 1.0
"""A broker that is busy may be slower: then only the client finds out."""
_SIGNATURE = b"\xff\0\0\0\0\0\0\0\x01\x7f"
"""How both sides of a ZeroMQ connection begin."""
_LINE_ENDS = b"\r\n\r\n"
"""Makes servers answer that wait for a line; a broker takes them for a version, and says its mechanism."""
_MECHANISM = slice(12, 32)
"""Where it stands in what a broker says."""
_CURVE = b"CURVE"


def _try_all(url: str, *, has_key: bool) -> None:
    """Raise Unavailable if no address of `url` can be that of a broker, with the first one's reason; PermissionDenied for
    a broker that asks who its clients are, without a key."""
    from danube_fast.client.link.url import parse_url
    from danube_fast.errors import PermissionDenied, Unavailable

    limit = time.monotonic() + RESTART_SECONDS
    while True:
        faults: list[Unavailable] = []
        for endpoint in parse_url(url):
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            try:
                mechanism = _try(host.strip("[]"), int(port))
                if mechanism == _CURVE and not has_key:
                    raise PermissionDenied(
                        f"the broker at {host}:{port} asks who you are, and no key is given: set DANUBE_SERVER_KEY and "
                        "DANUBE_KEY_FILE, or DANUBE_SIGN_ON and DANUBE_TOKEN_FILE, or use a context that has them "
                        "(danube-fast context add)"
                    )
                return
            except Unavailable as error:
                faults.append(error)
        is_away = any(isinstance(each.__cause__, ConnectionRefusedError) for each in faults)
        if not is_away or time.monotonic() >= limit:
            raise faults[0]
        time.sleep(RETRY_SECONDS)


def _try(host: str, port: int) -> bytes:
    """Return the mechanism that a broker names; empty: it is slow. Raises Unavailable."""
    from danube_fast.errors import Unavailable

    place = f"{host}:{port}"
    try:
        with socket.create_connection((host, port), timeout=CONNECT_SECONDS) as connection:
            connection.settimeout(GREETING_SECONDS)
            connection.sendall(_SIGNATURE + _LINE_ENDS)
            said = b""
            while len(said) < _MECHANISM.stop and (more := connection.recv(_MECHANISM.stop)):
                said += more
                if said[:1] != _SIGNATURE[:1]:
                    break
    except socket.gaierror as error:
        raise Unavailable(
            f"the host {host!r} is unknown ({error.strerror}); check the name in --url"
        ) from None
    except ConnectionRefusedError as error:
        raise Unavailable(
            f"nothing listens at {place} (connection refused); start a broker with `danube-fast serve`, check the port in "
            "--url, or try again if it is starting again"
        ) from error
    except ConnectionResetError:
        said = b""
    except TimeoutError:
        return b""
    except (OSError, UnicodeError) as error:
        raise Unavailable(f"{place} cannot be reached ({error}); check --url") from None
    if said[:1] != _SIGNATURE[:1]:
        what = "an HTTP server" if said.startswith(b"HTTP") else "something else"
        raise Unavailable(
            f"{place} is not a broker but {what}; a broker's clients connect to its --listen port "
            "(6650 by default), not to its admin port"
        )
    return said[_MECHANISM].rstrip(b"\0")


def reach(url: str, context: str = "") -> tuple[str, Access]:
    """Return the broker to ask, that of the context in use if `url` is empty, and the way in there, once one of its
    addresses has answered. `context`: takes both from the context of that name alone. Raises Unavailable, InvalidArgument,
    PermissionDenied, NotFound."""
    found = values_of(context) if context else values()
    url = url or found["url"].text or DEFAULT_URL
    with _naming_context(context):
        access = access_of(found, context)
        _try_all(url, has_key=bool(access.key_file or access.sign_on))
    return url, access


@contextlib.contextmanager
def _naming_context(context: str = "") -> Iterator[None]:
    """Add the name of the context to errors, by default that of the one in use."""
    from danube_fast.errors import DanubeError

    try:
        yield
    except DanubeError as error:
        if context:
            raise type(error)(
                f"{error}; the context {context} alone counts here: danube-fast context show {context}"
            ) from error
        name = chosen_name()
        if not name:
            raise
        raise type(error)(
            f"{error}; the context in use is {name}: danube-fast context show"
        ) from error


def connect(url: str, transport: Transport = "auto", context: str = "") -> Any:
    """Return a client of the broker at `url`, or of the context in use if that is empty; a context manager. How to come
    in is said by the environment, or by the context; by that named `context` alone, if there is one. Raises Unavailable,
    InvalidArgument, PermissionDenied, NotFound."""
    url, access = reach(url, context)
    with _naming_context(context):
        seconds = CONNECT_SECONDS + (SIGN_ON_SECONDS if access.sign_on else 0)
        return open_client(url, access, seconds, transport=transport)


class Ask(NamedTuple):
    """The broker that a command asks, and the form in which it prints the answer."""

    url: str
    form: OutputForm

    def connect(self) -> Any:
        """Return a client of the broker; a context manager."""
        return connect(self.url)

    def __call__(self, name: str, /, **arguments: Any) -> Any:
        """Run an administrative operation by name; its answer."""
        with connect(self.url) as client:
            return getattr(client.admin, name)(**arguments)

    def show(self, value: Any, text: str | None = None) -> None:
        """Print an answer as `print_result` does."""
        print_result(self.form, value, text)

    def table(self, rows: Sequence[Mapping[str, Any]], empty: str) -> None:
        """Print rows as `print_table` does."""
        print_table(self.form, rows, empty)


def asking(
    app: typer.Typer | None, *lines: str, name: str | None = None, **settings: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enter a function as a command that has --url and --output too, and gets an `Ask` of them first. `lines`: what
    a person would type; `app` None: it is entered elsewhere."""

    def enter(function: Callable[..., None]) -> Callable[..., None]:
        def run(*, url: str, output: OutputForm, **arguments: Any) -> None:
            function(Ask(url, output), **arguments)

        found = inspect.signature(function, eval_str=True)
        own = [each.replace(kind=each.KEYWORD_ONLY) for each in found.parameters.values()]
        common = inspect.signature(_common, eval_str=True).parameters.values()
        run.__signature__ = found.replace(parameters=[*own[1:], *common])  # type: ignore[attr-defined]
        run.__name__, run.__doc__ = function.__name__, function.__doc__
        if app is not None:
            app.command(name, epilog=example(*lines), **settings)(run)
        return command(*lines)(run)

    return enter


def _common(*, url: UrlOption = "", output: OutputOption = OutputForm.TEXT) -> None:
    """The options of every command that asks a broker."""
