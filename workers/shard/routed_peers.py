r"""Peers of the ROUTER as kernels know them: each has a row like that of rings, and is told apart by IN, which is 0.

    IN 0    OUT identity    CAPACITY libzmq's functions    BELL_OUT the ROUTER    WAITS 0    SESSION    HEAD

Identities end with numbers, one after the other, whose low bits are the place of a row. Where another peer with a session
stands already, a peer has none, and its messages go the ordinary way.
"""

from __future__ import annotations

import numpy as np

from danube_fast.frame.kernel import kernel
from danube_fast.frame.memory import load_i64, load_u8
from danube_fast.net.port import SEND_LAST, SEND_MORE
from danube_fast.net.port_kernels import FUNCTIONS, send_copy
from danube_fast.net.session import ROUTED
from danube_fast.net.zap import NAME_BYTES
from danube_fast.ring.duplex_kernel import (
    BELL_OUT,
    CAPACITY,
    HEAD,
    HEAD_BYTES_MAX,
    OUT,
    SESSION,
    word_of,
)
from danube_fast.ring.layout import WORD_BYTES

__all__ = [
    "IDENTITY_BYTES",
    "LAST_LINK",
    "LEFT",
    "RoutedPeers",
    "find_peer",
    "send_pair",
    "send_part",
]

IDENTITY_BYTES = 5
"""Of the identities that ROUTER makes: a zero, and a number. Those of a ZapThread have `NAME_BYTES`."""
LEFT = HEAD + HEAD_BYTES_MAX // WORD_BYTES
"""Publishes of it that kernels leave to Python, as the last one was large."""
LAST_LINK = LEFT + 1
"""Its link in the job that took a message of it last."""
_SIZE = LAST_LINK + 1
"""Bytes of its identity."""
_ROW_WORDS = _SIZE + 1
_ROW_BYTES = _ROW_WORDS * WORD_BYTES
PEERS_MAX = 4096
_AT_IDENTITY = OUT * WORD_BYTES
_HIGH_BITS = 8


@kernel("int64(int64,int64,int64)")
def find_peer(table: int, identity: int, size: int) -> int:
    """The row of the peer whose identity lies there, padded with zeros to a word; 0 if it has none, or no session."""
    if size < IDENTITY_BYTES or size > WORD_BYTES:
        return 0
    low = load_u8(identity + size - 2) << _HIGH_BITS | load_u8(identity + size - 1)
    row = table + (low & (PEERS_MAX - 1)) * _ROW_BYTES
    if word_of(row, SESSION) == 0 or word_of(row, OUT) != load_i64(identity):
        return 0
    return row if word_of(row, _SIZE) == size else 0


@kernel("int64(int64)")
def _address(row: int) -> int:
    """Begin a message for a peer; less than 0 if it is gone, or its queue is full."""
    return send_copy(
        word_of(row, CAPACITY),
        word_of(row, BELL_OUT),
        row + _AT_IDENTITY,
        word_of(row, _SIZE),
        SEND_MORE,
    )


@kernel("int64(int64,int64,int64)")
def send_part(row: int, part: int, part_bytes: int) -> int:
    """Send a message of one part; less than 0 if nothing was sent."""
    if _address(row) < 0:
        return -1
    return send_copy(word_of(row, CAPACITY), word_of(row, BELL_OUT), part, part_bytes, SEND_LAST)


@kernel("int64(int64,int64,int64,int64,int64)")
def send_pair(row: int, head: int, head_bytes: int, body: int, body_bytes: int) -> int:
    """Send a message of two parts; less than 0 if nothing was sent."""
    if _address(row) < 0:
        return -1
    functions, router = word_of(row, CAPACITY), word_of(row, BELL_OUT)
    send_copy(functions, router, head, head_bytes, SEND_MORE)
    return send_copy(functions, router, body, body_bytes, SEND_LAST)


class RoutedPeers:
    """The rows of a worker's ROUTER. Used by its loop only."""

    def __init__(self, router: int) -> None:
        """`router`: address of the socket."""
        self.router = router
        self._rows = np.zeros((PEERS_MAX, _ROW_WORDS), np.int64)
        self.address: int = self._rows.ctypes.data
        """Of the table; it stays as long as this object."""
        self._identities: dict[int, bytes] = {}
        """By place, of those that have a session."""

    def __len__(self) -> int:
        return len(self._identities)

    def add(self, identity: bytes, session: int) -> None:
        """Give a peer a row, if its place is free."""
        place = self._place(identity)
        if len(identity) not in (IDENTITY_BYTES, NAME_BYTES) or identity[:1] != ROUTED:
            return
        if self._identities.setdefault(place, identity) != identity:
            return
        row = self._rows[place]
        word = identity.ljust(WORD_BYTES, b"\0")
        row[OUT], row[_SIZE] = int.from_bytes(word, "little", signed=True), len(identity)
        row[CAPACITY], row[BELL_OUT] = FUNCTIONS, self.router
        row[SESSION] = session

    def row_of(self, identity: bytes) -> int:
        """Find the address of a peer's row; 0 if it has none."""
        place = self._place(identity)
        known = self._identities.get(place) == identity
        return self.address + place * _ROW_BYTES if known else 0

    def identity_of(self, row: int) -> bytes:
        """Find the peer whose row has that address."""
        return self._identities[(row - self.address) // _ROW_BYTES]

    def forget(self, identity: bytes) -> None:
        """Let kernels take nothing of a peer any more, and send it nothing."""
        place = self._place(identity)
        if self._identities.get(place) == identity:
            del self._identities[place]
            self._rows[place, SESSION] = 0

    @staticmethod
    def _place(identity: bytes) -> int:
        return int.from_bytes(identity[-2:], "big") & (PEERS_MAX - 1)
