"""Addresses whose handshakes fail too often: the kernel drops what would be new connections of them, for a second.

    ZAP thread --note--> failures by address in this second --too many--> filter on the listening socket --> dropped SYN

A connection that is up is none of the listening socket's any more, so the filter never meets it. A client behind the same
address whose SYN was dropped sends it again by itself, after 1 s at first.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection

from danube_fast.clock import SECOND_NS

__all__ = ["FailedHandshakes", "sources_filter"]

_log = logging.getLogger(__name__)

HOLD_NS = SECOND_NS
HELD_MAX = 250
"""Addresses that are held off at once. A filter may have 4,096 instructions, and five are for each."""
_NOTED_MAX = 10_000
_LOG_NS = 60 * SECOND_NS
_IPV6_NETWORK_BYTES = 8
"""Of an IPv6 address: who has one has all 2^64 of its network."""
_NETWORK = 0xFFF00000
"""Where the kernel's filters see the header of IP begin (SKF_NET_OFF)."""
_LOAD_WORD, _LOAD_BYTE, _AND, _IF_EQUAL, _JUMP, _RETURN = 0x20, 0x30, 0x54, 0x15, 0x05, 0x06
_AT_VERSION, _AT_IPV4_SOURCE, _AT_IPV6_SOURCE = 0, 12, 8
_WHOLE_PACKET = 0xFFFFFFFF

Instruction = tuple[int, int, int, int]
"""Code, jumps if true and if not, operand: struct sock_filter."""


def sources_filter(sources: Collection[bytes]) -> list[Instruction]:
    """Write the filter that drops packets from these sources: IPv4 addresses, and networks of IPv6."""
    fours: list[Instruction] = []
    sixes: list[Instruction] = []
    for source in sources:
        words = [int.from_bytes(source[at : at + 4], "big") for at in range(0, len(source), 4)]
        if len(words) == 1:
            fours += [(_IF_EQUAL, 0, 1, words[0]), (_RETURN, 0, 0, 0)]
        else:
            sixes += [
                (_LOAD_WORD, 0, 0, _NETWORK + _AT_IPV6_SOURCE), (_IF_EQUAL, 0, 3, words[0]),
                (_LOAD_WORD, 0, 0, _NETWORK + _AT_IPV6_SOURCE + 4), (_IF_EQUAL, 0, 1, words[1]),
                (_RETURN, 0, 0, 0),
            ]  # fmt: skip
    accept = (_RETURN, 0, 0, _WHOLE_PACKET)
    return [
        (_LOAD_BYTE, 0, 0, _NETWORK + _AT_VERSION), (_AND, 0, 0, 0xF0), (_IF_EQUAL, 0, 1, 0x60),
        (_JUMP, 0, 0, len(fours) + 2), (_LOAD_WORD, 0, 0, _NETWORK + _AT_IPV4_SOURCE),
        *fours, accept, *sixes, accept,
    ]  # fmt: skip


def _source_of(address: str) -> bytes:
    """Return what a filter tells an address by; empty for what is no address of IP."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return b""
    mapped = getattr(found, "ipv4_mapped", None) or found
    return mapped.packed if mapped.version == 4 else mapped.packed[:_IPV6_NETWORK_BYTES]


class FailedHandshakes:
    """Count them, and hold addresses off. `note` is for any thread, all else for the guard's."""

    def __init__(self, most: int) -> None:
        """`most` of one address in a second; 0: no address is held off."""
        self._most = most
        self.drop: Callable[[Collection[bytes]], None] | None = None
        """Has the kernel drop new connections from these sources, and from no others; None: there is no such socket.
        Raises OSError."""
        self.fd = -1
        """Raised when there is something new; from `open` to `close`."""
        self._lock = threading.Lock()
        """Around the descriptor: no other file's is written to by a note that comes late."""
        self._noted: deque[str] = deque(maxlen=_NOTED_MAX)
        self._counts: Counter[bytes] = Counter()
        self._counted_ns = 0
        self._held: dict[bytes, int] = {}
        """By source: until when."""
        self._logged_ns = -_LOG_NS

    def open(self) -> None:
        """Begin to take notes."""
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def close(self) -> None:
        """Take no notes any more."""
        with self._lock:
            fd, self.fd = self.fd, -1
            if fd >= 0:
                os.close(fd)

    def note(self, address: str) -> None:
        """Note that a handshake from an address has failed."""
        if not self._most or self.drop is None:
            return
        with self._lock:
            if self.fd >= 0:
                self._noted.append(address)
                os.eventfd_write(self.fd, 1)

    @property
    def next_ns(self) -> int | None:
        """When an address is let in again; None: none is held off."""
        return min(self._held.values(), default=None)

    def do_work(self, now_ns: int) -> None:
        """Hold off the addresses with too many failures in this second, and let those in whose time is over."""
        address = self._count(now_ns) if self._noted else ""
        ended = [each for each, until_ns in self._held.items() if until_ns <= now_ns]
        for source in ended:
            del self._held[source]
        if self.drop is None or not (address or ended):
            return
        try:
            self.drop(self._held)
        except OSError as error:
            self._log(now_ns, f"new connections of an address cannot be held off: {error}")
            # the filter before may be in use still, with addresses whose time is over
            self._held.clear()
            with contextlib.suppress(OSError):
                self.drop(())
        else:
            if address:
                self._log(
                    now_ns,
                    f"{self._most} handshakes from {address} failed within a second: its new connections wait for a "
                    "second (handshakes_failed_per_second_max)",
                )

    def _count(self, now_ns: int) -> str:
        """Count what was noted; an address that is held off from now on, or nothing."""
        with self._lock:
            noted = list(self._noted)
            self._noted.clear()
            os.eventfd_read(self.fd)
        if now_ns - self._counted_ns >= SECOND_NS:
            self._counts.clear()
            self._counted_ns = now_ns
        found = ""
        for address in noted:
            source = _source_of(address)
            self._counts[source] += 1
            if source and self._counts[source] >= self._most and source not in self._held:
                self._counts[source] = 0
                if len(self._held) < HELD_MAX:
                    self._held[source] = now_ns + HOLD_NS
                    found = address
        return found

    def _log(self, now_ns: int, text: str) -> None:
        if now_ns - self._logged_ns >= _LOG_NS:
            self._logged_ns = now_ns
            _log.warning("%s", text)
