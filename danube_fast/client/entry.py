"""`connect` and `connect_async`: light to import; kernels load when a client is opened."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from danube_fast.client.faces import opens
from danube_fast.interpreter import check_interpreter

if TYPE_CHECKING:
    from pathlib import Path

    from danube_fast.client.async_client import AsyncClient
    from danube_fast.client.client import Client
    from danube_fast.client.values.arguments import Transport

__all__ = ["broker_url", "connect", "connect_async"]


def broker_url(url: str | None) -> str:
    """Where the broker listens: at `url`, else where $DANUBE_URL says, else at the default."""
    from danube_fast.client.link.url import DEFAULT_URL

    return url or os.environ.get("DANUBE_URL") or DEFAULT_URL


def connect(
    url: str | None = None,
    *,
    name: str | None = None,
    token: str | None = None,
    tls: Any = None,
    transport: Transport = "auto",
    spin_us: int = 0,
    server_key: str | None = None,
    key_file: str | Path | None = None,
    server_uid: int | None = None,
    timeout: float = 10.0,
) -> Client:
    """Connect to a broker, e.g. `danube://127.0.0.1:6650` (or $DANUBE_URL).

    `url`: several hosts are tried in turn, `danube://h1:6650,h2:6650`; `name`: of this client, as the broker shows
    it; `transport`: "auto" takes shared memory on the broker's own host and ZeroMQ elsewhere, "shm" and "zmq"
    insist; `spin_us`: how many microseconds a waiting thread looks on before it sleeps (tuning.md); `timeout`:
    seconds to wait for the broker. `token` and `tls` are refused until the broker asks for them. Use the client
    as a context manager, or call `close()`.

    `server_key`: the broker's public CURVE key, 40 characters of Z85: all that goes over tcp is encrypted, and a broker
    that does not have that key is refused; `key_file`: the file with this client's key pair, which is registered with
    the broker: two lines, `public = "..."` and `secret = "..."`, mode 0600. On the broker's own host the kernel says
    whose process listens: with `server_key` or `server_uid` only this user, root and user `server_uid` are believed to
    be the broker.

        with danube_fast.connect() as client:
            client.publish("/default/hello", b"hello, world")

    Raises Unavailable when no broker answers in time, InvalidArgument for a malformed url, FailedPrecondition for
    `token` or `tls`, for a key file that is missing or not private, in a subinterpreter, and in a free-threaded build
    of Python; PermissionDenied when the broker has another key than `server_key`, or does not know this client's.
    """
    check_interpreter()  # before NumPy, which would warn of it in many words
    from danube_fast.client.client import Client

    return Client(
        broker_url(url), name=name, token=token, tls=tls, transport=transport, spin_us=spin_us,
        server_key=server_key, key_file=key_file, server_uid=server_uid, timeout=timeout,
    )  # fmt: skip


@opens
async def connect_async(
    url: str | None = None,
    *,
    name: str | None = None,
    token: str | None = None,
    tls: Any = None,
    transport: Transport = "auto",
    spin_us: int = 0,
    server_key: str | None = None,
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
        broker_url(url), name=name, token=token, tls=tls, transport=transport, spin_us=spin_us,
        server_key=server_key, key_file=key_file, server_uid=server_uid,
    )  # fmt: skip
    await client.open(timeout)
    return client
