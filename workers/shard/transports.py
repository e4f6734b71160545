"""The two transports of a worker: its ROUTER for all clients, and rings for clients of this host.

Commands, sessions and answers are the same behind both; only the identity tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from danube_fast.broker.admission.layout import INT64_MAX
from danube_fast.config import Settings
from danube_fast.frame.kernel import address_of
from danube_fast.net.greeting import message_bytes_max
from danube_fast.net.server import PART_BYTES_MAX_SLACK, PeerGone, Server, WouldBlock
from danube_fast.net.session import ROUTED
from danube_fast.ring.duplex_kernel import SESSION
from danube_fast.ring.handover import RingServer
from danube_fast.workers.shard.ring_out import PLAIN_BYTES_MAX, send_delivery, send_published
from danube_fast.workers.shard.routed_peers import RoutedPeers

__all__ = ["Transports"]

_ROUTED = ROUTED[0]
ORDINARY_PART = 16
"""However many plain publishes wait, one part in so many of the limit is for all other commands."""


class Transports:
    """Receive from and send to `Server` and `RingServer` as one. Used by the worker's loop only."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.rings: RingServer | None = None
        self.drained = False
        """Whether the last `receive` took all messages."""
        self._rings_first = False
        self.take_plain: Callable[[int], int | None] = lambda _: 0
        """Takes up to so many messages by itself, and returns how many; None: all are left where they are for the
        moment. See `RingIntake`."""
        self.peers: RoutedPeers | None = None
        """Peers of the ROUTER, once there are rings too."""
        self.plain_count = 0
        """Messages that it took during the last `receive`."""

    def open_rings(
        self, ipc_endpoint: str, settings: Settings, admits: Callable[[int], bool] | None = None
    ) -> None:
        """Serve rings too; if they are switched off, clients are told so. `admits`: which local users may have some, by
        default the broker's own. Raises Unavailable."""
        size = settings.shm_ring_bytes
        if ipc_endpoint:
            self.rings = RingServer(
                ipc_endpoint,
                ring_bytes=1 << (size - 1).bit_length() if size else 0,
                links_max=settings.shm_clients_max,
                message_bytes_max=message_bytes_max(settings) + PART_BYTES_MAX_SLACK,
                huge=settings.shm_huge_pages,
                admits=admits,
            )
            self.peers = RoutedPeers(self.server.handle)

    def receive(self, limit: int) -> Iterator[tuple[bytes, Any, list[Any]]]:
        """Take up to `limit` waiting messages: identity, command (valid until the next one), parts behind it.
        Never blocks. The transports take turns in going first."""
        self.drained = False
        self.plain_count = 0
        rings = self.rings
        if rings is None:
            yield from self.server.receive(limit)
            self.drained = self.server.drained
            return
        rings.look()
        taken = self.take_plain(limit)
        if taken is None:
            return
        self.plain_count = taken
        left = max(limit - taken, limit // ORDINARY_PART)
        self._rings_first = not self._rings_first
        ends = (rings, self.server) if self._rings_first else (self.server, rings)
        for end in ends:
            yield from end.receive(left)
        self.drained = self.server.drained and rings.drained

    def room(self, identity: bytes, size: int) -> tuple[Any, int]:
        """Allocate a part of a message for this client; the part, and the address of its `size` bytes. Raises
        MemoryError."""
        if identity[0] == _ROUTED:
            part = self.server.room(size)
            return part, part.address
        copied = bytearray(size)
        return copied, address_of(copied)

    def send(self, identity: bytes, parts: list[Any]) -> None:
        """Queue one message for a client. Raises PeerGone or WouldBlock; then nothing was sent."""
        if identity[0] == _ROUTED:
            self.server.send(identity, parts)
            return
        sent = self.rings.send(identity, parts) if self.rings is not None else None
        if not sent:
            raise PeerGone if sent is None else WouldBlock

    def send_published(self, identity: bytes, request: int, status: int, offset: int) -> bool:
        """Send the answer to a PUBLISH of one frame by a kernel; False if that cannot be."""
        row = self.free_row(identity) if 0 <= request <= INT64_MAX else 0
        return row != 0 and send_published(row, request, status, offset) >= 0

    def send_delivery(self, identity: bytes, consumer_id: int, bundle: Any) -> bool:
        """Send a bundle of one frame to a consumer by a kernel; False if that cannot be."""
        if identity[0] == _ROUTED and len(bundle) > PLAIN_BYTES_MAX:
            return False  # ZeroMQ takes a large part without a copy
        row = self.free_row(identity) if 0 <= consumer_id <= INT64_MAX else 0
        return row != 0 and send_delivery(row, consumer_id, address_of(bundle), len(bundle)) >= 0

    def proof_of(self, identity: bytes) -> str:
        """Return what the transport proves of the client whose message `receive` has just given; see `Authenticator`."""
        if identity[0] == _ROUTED:
            return self.server.proof
        return "" if self.rings is None else f"uid:{self.rings.user_of(identity)}"

    def address_of(self, identity: bytes) -> str:
        """Return where the client is whose message `receive` has just given; empty if that was told before."""
        if identity[0] == _ROUTED:
            return self.server.address
        return "" if self.rings is None else self.rings.address_of(identity)

    def revoke(self, identity: bytes) -> None:
        """End the connection of a client, whose session has ended, with what is queued for it."""
        if identity[0] == _ROUTED:
            self._cut(identity)
        elif self.rings is not None:
            self.rings.end(identity)

    def drop_queued(self, identity: bytes) -> None:
        """Drop what ZeroMQ has queued for a client, which lost a right to receive: it comes back by a new connection."""
        if identity[0] == _ROUTED:
            self._cut(identity, if_untaken=True)

    def _cut(self, identity: bytes, *, if_untaken: bool = False) -> None:
        if self.server.guard is not None:
            self.server.guard.end(identity, if_untaken=if_untaken)

    def end_session(self, identity: bytes) -> None:
        """Let kernels take nothing of a client any more before it has a session again."""
        link = self.rings.link(identity) if self.rings is not None else None
        if link is not None:
            link.words[SESSION] = 0
        elif self.peers is not None:
            self.peers.forget(identity)

    def free_row(self, identity: bytes) -> int:
        """Address of the words of a client, if a kernel may send it something; or 0."""
        if identity[0] == _ROUTED:
            return 0 if self.peers is None else self.peers.row_of(identity)
        if self.rings is None:
            return 0
        link = self.rings.link(identity)
        return 0 if link is None or link.slices else link.row

    def look_after(self, *, silent: bool) -> None:
        """Mind the descriptors and addresses; if `silent`, close rings whose client has sent nothing since the last
        time."""
        self.server.mind_descriptors()
        if self.rings is None:
            return
        self.rings.listen()
        if silent:
            self.rings.close_silent()

    def take_gone(self) -> list[tuple[bytes, bool]]:
        """Take the identities whose connection has ended, each once, and whether their process still runs. A
        ROUTER tells of none."""
        if self.rings is None or not self.rings.gone:
            return []
        gone, self.rings.gone = self.rings.gone, []
        return gone

    def readable(self) -> bool:
        """Whether messages wait that no descriptor will tell of."""
        return (self.rings is not None and self.rings.awake) or self.server.readable()

    def filenos(self) -> list[int]:
        """List the descriptors to sleep on, whenever nothing is `readable`."""
        ends = self.server, self.rings
        return [end.fileno() for end in ends if end is not None]

    def close(self) -> None:
        """Close both, and drop what is queued."""
        self.server.close()
        if self.rings is not None:
            self.rings.close()
