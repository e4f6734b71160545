"""`connect` and `connect_async`: light to import; kernels load when a client is opened."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from danube_fast.client.faces import opens
from danube_fast.interpreter import check_interpreter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from danube_fast.client.async_client import AsyncClient
    from danube_fast.client.client import Client
    from danube_fast.client.values.arguments import Token, Transport

__all__ = ["broker_url", "connect", "connect_async"]


def broker_url(url: str | None) -> str:
    """Where the broker listens: at `url`, else where $DANUBE_URL says, else at the default."""
    from danube_fast.client.link.url import DEFAULT_URL

    return url or os.environ.get("DANUBE_URL") or DEFAULT_URL


def connect(
    url: str | None = None,
    *,
    name: str | None = None,
    token: Token | None = None,
    sign_on: str | None = None,
    tls: str | Path | None = None,
    transport: Transport = "auto",
    spin_us: int = 0,
    server_key: str | Sequence[str] | None = None,
    key_file: str | Path | None = None,
    server_uid: int | None = None,
    timeout: float = 10.0,
) -> Client:
    """Connect to a broker, e.g. `danube://127.0.0.1:6650` (or $DANUBE_URL).

    `url`: several hosts are tried in turn, `danube://h1:6650,h2:6650`; `name`: of this client, as the broker shows
    it; `transport`: "auto" takes shared memory on the broker's own host and ZeroMQ elsewhere, "shm" and "zmq"
    insist, "tcp" takes ZeroMQ over tcp even there; `spin_us`: how many microseconds a waiting thread looks on before it
    sleeps (tuning.md); `timeout`: seconds to wait for the broker. Use the client as a context manager, or call `close()`.

    There are two ways into a secured broker. A key: `server_key` is the broker's public CURVE key, 40 characters of
    Z85; while it is rotated several, as a list or with blanks between. All that goes over tcp is encrypted, and a broker
    that has none of these keys is refused. `key_file` is the file with this client's key pair, which is registered with
    the broker: two lines, `public = "..."` and `secret = "..."`, mode 0600.

    Or a token: `token` is an API key or a JWT, or a function that returns one; `sign_on`, `https://HOST:PORT`, is where
    it goes, with a key that this client draws. The answer brings the server's keys, so that `server_key` need not be
    given (if it is, it must be among them). `tls` says how that address proves itself: the path of a file with CAs, or
    `sha256:` and the fingerprint of its certificate; without it by the CAs of this system. The client signs on again by
    itself, in a thread of its own: before the sign-on ends, and when the broker has forgotten it. The function is called
    there for each sign-on and may block; nothing of the client waits for it that is open.

    On the broker's own host the kernel says whose process listens: only this user, root and user `server_uid` are believed
    to be the broker, and clients go by tcp else; with `server_uid` and neither `server_key` nor `sign_on` they are refused.

        with danube_fast.connect() as client:
            client.publish("/default/hello", b"hello, world")

    Raises Unavailable when no broker answers in time, or no sign-on; InvalidArgument for a malformed url or `sign_on`;
    FailedPrecondition for a key file that is missing or not private, for a function `token` that raises another error
    than one of danube-fast, in a subinterpreter, and in a free-threaded build of Python; PermissionDenied when the
    broker has other keys than `server_key`, asks for a key and none is given, does not know this client's, or refuses
    the token, and when `sign_on` does not prove itself.
    """
    check_interpreter()  # before NumPy, which would warn of it in many words
    from danube_fast.client.client import Client

    return Client(
        broker_url(url), name=name, token=token, sign_on=sign_on, tls=tls, transport=transport, spin_us=spin_us,
        server_key=server_key, key_file=key_file, server_uid=server_uid, timeout=timeout,
    )  # fmt: skip


@opens
async def connect_async(
    url: str | None = None,
    *,
    name: str | None = None,
    token: Token | None = None,
    sign_on: str | None = None,
    tls: str | Path | None = None,
    transport: Transport = "auto",
    spin_us: int = 0,
    server_key: str | Sequence[str] | None = None,
    key_file: str | Path | None = None,
    server_uid: int | None = None,
    timeout: float = 10.0,  # noqa: ASYNC109 - the same signature as connect()
) -> AsyncClient:
    """Connect to a broker from an event loop.

        async with danube_fast.connect_async() as client:
            await client.publish("/default/hello", b"hello, world")

    Parameters and errors are those of `connect`.
    """
    check_interpreter()
    from danube_fast.client.async_client import AsyncClient

    client = AsyncClient(
        broker_url(url), name=name, token=token, sign_on=sign_on, tls=tls, transport=transport, spin_us=spin_us,
        server_key=server_key, key_file=key_file, server_uid=server_uid,
    )  # fmt: skip
    await client.open(timeout)
    return client
