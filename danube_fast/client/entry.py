"""`connect` and `connect_async`: light to import; kernels load when a client is opened."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from danube_fast.client.link.faces import opens

if TYPE_CHECKING:
    from danube_fast.client.async_client import AsyncClient
    from danube_fast.client.client import Client
    from danube_fast.client.values.arguments import Transport

__all__ = ["connect", "connect_async"]


def _url(url: str | None) -> str:
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

    `transport`: "auto" takes shared memory on the broker's own host and ZeroMQ elsewhere, "shm" and
    "zmq" insist. Who waits looks on for `spin_us` microseconds before it sleeps (tuning.md).
    `token` and `tls` are refused until the broker asks for them.
    Several hosts are tried in turn: `danube://h1:6650,h2:6650`. Raises Unavailable when none answers
    within `timeout` seconds. Use it as a context manager, or call `close()`.
    """
    from danube_fast.client.client import Client

    return Client(
        _url(url), name=name, token=token, tls=tls, transport=transport, spin_us=spin_us,
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
    """`connect` for an event loop: `async with danube_fast.connect_async(...) as client`, or await it."""
    from danube_fast.client.async_client import AsyncClient

    client = AsyncClient(
        _url(url), name=name, token=token, tls=tls, transport=transport, spin_us=spin_us
    )
    await client.open(timeout)
    return client
