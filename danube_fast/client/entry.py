"""`connect` and `connect_async`: light to import; kernels load when a client is opened."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from danube_fast.client.faces import opens
from danube_fast.interpreter import check_interpreter

if TYPE_CHECKING:
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
    timeout: float = 10.0,
) -> Client:
    """Connect to a broker, e.g. `danube://127.0.0.1:6650` (or $DANUBE_URL).

    `url`: several hosts are tried in turn, `danube://h1:6650,h2:6650`; `name`: of this client, as the broker shows
    it; `transport`: "auto" takes shared memory on the broker's own host and ZeroMQ elsewhere, "shm" and "zmq"
    insist; `spin_us`: how many microseconds a waiting thread looks on before it sleeps (tuning.md); `timeout`:
    seconds to wait for the broker. `token` and `tls` are refused until the broker asks for them. Use the client
    as a context manager, or call `close()`.

        with danube_fast.connect() as client:
            client.publish("/default/hello", b"hello, world")

    Raises Unavailable when no broker answers in time, InvalidArgument for a malformed url, FailedPrecondition for
    `token` or `tls`, in a subinterpreter, and in a free-threaded build of Python.
    """
    check_interpreter()  # before NumPy, which would warn of it in many words
    from danube_fast.client.client import Client

    return Client(
        broker_url(url), name=name, token=token, tls=tls, transport=transport, spin_us=spin_us,
        timeout=timeout,
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
        broker_url(url), name=name, token=token, tls=tls, transport=transport, spin_us=spin_us
    )
    await client.open(timeout)
    return client
