"""Connections of an HTTP port, bounded in number and time, with TLS or without.

    accepted --TLS handshake--> waits for a request --> answers --> waits ...
             HANDSHAKES_MAX     CONNECTIONS_MAX: then the oldest of the busiest address is closed for a new one

Each step of the client must be done in REQUEST_SECONDS; the work of the application takes none of it. Connections that
stay in their handshake close none that are further.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:  # an admin port without TLS has no use for it
    from danube_fast.security.tls import ServerTls

__all__ = ["CONNECTIONS_MAX", "HANDSHAKES_MAX", "REQUEST_SECONDS", "limited_protocol", "source_of"]

REQUEST_SECONDS = 10.0
"""A handshake must be made, a request sent, and its answer read, each in this time."""
CONNECTIONS_MAX = 32
"""That have ended their handshake."""
HANDSHAKES_MAX = 64
"""Connections that have not ended their handshake."""
_NETWORK_BYTES = 8


class _Waiting:
    """Connections in one stage: so many, each waits for its peer for so long.

    Too many: the oldest of the address that has most of them is closed, so a crowd of one host closes its own.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._timers: dict[Any, asyncio.TimerHandle] = {}
        """The one that has waited longest first."""
        self._counts: dict[str, int] = {}
        """By source."""

    def add(self, connection: Any) -> None:
        """Begin to wait, anew if it does already."""
        self.discard(connection)
        loop = asyncio.get_running_loop()
        self._timers[connection] = loop.call_later(REQUEST_SECONDS, connection.give_up)
        self._counts[connection.source] = self._counts.get(connection.source, 0) + 1
        if len(self._timers) > self._most:
            source = max(self._counts, key=self._counts.__getitem__)
            next(each for each in self._timers if each.source == source).give_up()

    def pause(self, connection: Any) -> None:
        """Wait for as long as it takes: not the peer is awaited."""
        timer = self._timers.get(connection)
        if timer is not None:
            timer.cancel()

    def discard(self, connection: Any) -> None:
        """Wait no more."""
        timer = self._timers.pop(connection, None)
        if timer is None:
            return
        timer.cancel()
        self._counts[connection.source] -= 1
        if not self._counts[connection.source]:
            del self._counts[connection.source]


def source_of(transport: Any) -> str:
    """Name where a connection comes from: an address; of IPv6 its network, as each host has many."""
    peer = transport.get_extra_info("peername")
    address = str(peer[0]) if peer else ""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is None:
        return found.packed[:_NETWORK_BYTES].hex()
    return address


def limited_protocol(
    tls: ServerTls | None = None, connections_max: int = CONNECTIONS_MAX,
    handshakes_max: int = HANDSHAKES_MAX,
) -> type[Any]:  # fmt: skip
    """Make the protocol of one port for uvicorn; with `tls` it speaks TLS only.

    The state of a request has `peer_certificate`: the client's certificate in DER, verified, or None.
    """
    waiting, handshaking = _Waiting(connections_max), _Waiting(handshakes_max)

    class Connection(_Connection):
        def __init__(self, **options: Any) -> None:
            super().__init__(waiting, tls, **options)

    if tls is None:
        return Connection
    context, live = tls.context, tls

    class Handshake(_Handshake):
        def __init__(self, **options: Any) -> None:
            super().__init__(handshaking, context, lambda: Connection(**options))

        def connection_made(self, transport: Any) -> None:
            if live.fingerprint:
                super().connection_made(transport)
            else:
                transport.abort()  # clients try again then; the alert of a handshake tells them that it is no use

    return Handshake


class _Connection(H11Protocol):
    """A connection whose requests are plain to read."""

    def __init__(self, waiting: _Waiting, tls: ServerTls | None, **options: Any) -> None:
        super().__init__(**options)
        self._waiting, self._tls = waiting, tls
        self._is_trusted: Callable[[], bool] = lambda: True
        """Whether the certificate that the client has shown still counts."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.source = source_of(transport)
        connection = transport.get_extra_info("ssl_object")
        der = connection.getpeercert(binary_form=True) if connection is not None else None
        if der is not None and self._tls is not None:
            self._is_trusted = functools.partial(self._tls.trusts, connection)
        self.app_state = {**self.app_state, "peer_certificate": der}
        self._waiting.add(self)

    def data_received(self, data: bytes) -> None:
        if not self._is_trusted():
            self.give_up()  # its certificate may be revoked: the client is to prove itself anew
            return
        super().data_received(data)
        self._pause_while_at_work()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._waiting.add(self)  # the application waits for the reader of its answer

    def resume_writing(self) -> None:
        super().resume_writing()
        self._pause_while_at_work()

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.discard(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._waiting.add(self)
        if not self._is_trusted():
            self.transport.close()  # this answer goes out, and nothing behind it is read
        super().on_response_complete()  # it may begin with a request that has come meanwhile
        self._pause_while_at_work()

    def _pause_while_at_work(self) -> None:
        """Stop the clock of the client if the application has all of its request, has not answered yet, and does not wait
        for the client to read."""
        cycle = self.cycle
        is_at_work = cycle is not None and not cycle.more_body and not cycle.response_complete
        if is_at_work and not self.flow.write_paused:
            self._waiting.pause(self)

    def give_up(self) -> None:
        """Close the connection at once."""
        self._waiting.discard(self)
        self.transport.abort()


class _Handshake(asyncio.Protocol):
    """A connection that is not encrypted yet."""

    def __init__(
        self, waiting: _Waiting, tls: ssl.SSLContext, then: Callable[[], _Connection]
    ) -> None:
        """`then` makes what goes on behind the handshake."""
        self._waiting, self._tls, self._then = waiting, tls, then
        self._early: list[bytes] = []
        """Arrived with the last message of the handshake."""
        self._is_lost = False

    def connection_made(self, transport: Any) -> None:
        self._transport, self.source = transport, source_of(transport)
        self._waiting.add(self)
        # kept: the loop itself has weak references to tasks
        self._task = asyncio.get_running_loop().create_task(self._shake_hands())

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._waiting.discard(self)

    def give_up(self) -> None:
        """Close the connection at once."""
        self._waiting.discard(self)
        self._transport.abort()

    async def _shake_hands(self) -> None:
        """Encrypt the connection, and hand it on."""
        loop = asyncio.get_running_loop()
        try:
            # its own timeout is longer than ours
            secure: Any = await loop.start_tls(self._transport, self, self._tls, server_side=True)
        except OSError:  # an SSLError is one; and so are all ways of leaving
            return
        finally:
            self._waiting.discard(self)
        if secure is None or self._is_lost or secure.is_closing():
            return
        connection = self._then()
        secure.set_protocol(connection)
        connection.connection_made(secure)
        for data in self._early:
            connection.data_received(data)
