"""One connection as its guard knows it, and how much it may cost."""

from __future__ import annotations

import enum
from typing import NamedTuple

from danube_fast.clock import SECOND_NS
from danube_fast.net.peer_socket import UNIX_STEP_BYTES, bytes_received, unread_bytes

__all__ = ["Connection", "Limits", "Reason"]

KIB, MIB = 1024, 1024 * 1024
FIRST_BYTES_MAX = 2 * MIB
"""Most that a connection may send before one message of it is whole. A HELLO has some hundred bytes; what ZeroMQ had queued
goes before it when a client connects again."""
FIRST_BYTES_GROWING = 64 * KIB
"""The same while the process grows, and of any stranger then: many share one process."""
FIRST_BYTES_FLOODED = 4 * KIB
"""The same once it has grown by `GROWTH_BYTES_MAX`."""
GREETING_BYTES = 64
"""A connection that has sent no more has not even finished the greeting of ZeroMQ."""
SILENT_MAX = 4096
"""Connections at most that send nothing."""
SILENT_SHARE = 4
"""One part in so many of the descriptors is the bound, if that is less."""
STRANGERS_SHARE = 2
"""One part in so many of the descriptors at most is for connections without a session."""
STRANGERS_MIN = 16
"""So many are never too many."""
GROWTH_BYTES = 32 * MIB
"""Growth of the process from which on sessions are looked at."""
GROWTH_BYTES_MAX = 128 * MIB
"""Growth during which no message of a session came whole, though it sends, that ends the session; four times
`Limits.session_bytes` if that is more."""
COPIES = 3
"""Bytes of the process for one that is received of honest messages. Parts of a few bytes take far more: 64 each."""
COPIES_BYTES_MAX = 512 * MIB
"""Growth at most that is put down to bytes received, in addition to the bound above."""
UNHEARD_BYTES_MIN = MIB
"""A session that has sent less since its last message is not the cause of that."""
BACKLOG_NS_MAX = 5 * SECOND_NS
"""A loop that is behind for longer is no excuse for a stranger."""
BACKLOG_BYTES_MAX = 256 * MIB
"""Bytes behind the last message taken that end a session even if the loop is behind; clients have windows below. Twice
`Limits.session_bytes` if that is more."""


class Limits(NamedTuple):
    """Bounds of connections."""

    stranger_ns: int
    """A connection that is no session by then is cut."""
    session_bytes: int
    """Most that a session sends from one whole message to the next: the largest message, and what is on its way."""
    clients_max: int
    """Sessions that there may be."""
    failures_max: int = 0
    """Handshakes of one address that may fail in a second; 0: any number."""


class Reason(enum.StrEnum):
    """Why a connection was cut."""

    SILENT = "had not said hello in time"
    BYTES = "had sent too much before hello"
    CROWD = "were too many without a session"
    ENDLESS = "sent a message without an end"
    NAME = "had brought a name of their own"
    RIGHTS = "may not receive any more what waited for them"


class Connection:
    """One connection, by its descriptor."""

    __slots__ = (
        "accused_ns", "base", "bytes", "cookie", "fd", "heard_ns", "host", "identity", "is_cut", "is_session",
        "is_tcp", "memory", "received", "since_ns", "spoke",
    )  # fmt: skip

    def __init__(self, fd: int, cookie: int, now_ns: int) -> None:
        self.fd, self.cookie, self.since_ns = fd, cookie, now_ns
        self.identity = b""
        self.is_tcp = True
        self.is_session = self.is_cut = False
        self.spoke = False
        """A message of it was whole once."""
        self.bytes = self.base = 0
        """Received, now and when it was last heard."""
        self.memory = 0
        """Of the process, when it was last heard."""
        self.received = 0
        """By the process over all connections, when it was last heard."""
        self.heard_ns = -1
        self.accused_ns = 0
        self.host = ""

    def look(self) -> bool:
        """Read how much has come; False if the connection is gone."""
        count = bytes_received(self.fd) if self.is_tcp else None
        if count is None:
            self.is_tcp = False
            waiting = unread_bytes(self.fd)
            if waiting > 0:
                self.bytes += UNIX_STEP_BYTES
            return waiting >= 0
        self.bytes = max(count, self.bytes)
        return count >= 0

    def rebase(self, heard_ns: int, memory: int, received: int) -> None:
        """Begin to count anew: a message of it was whole."""
        self.heard_ns, self.base, self.accused_ns = heard_ns, self.bytes, 0
        self.memory, self.received = memory, received
