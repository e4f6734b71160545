"""Addresses whose handshakes fail too often: the kernel drops what would be new connections of them, for a second.

    ZAP thread: a key is refused   --note--> failures by address --too many--> filter on the listening socket --> dropped SYN
    the kernel: ended before that  ---take-> in this second

What ends before is told by the kernel only while it is worth it: when connections end that were no sessions, more than
half as many in a second as one address may have.
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
from danube_fast.net.early_ends import COSTLY, EarlyEnds

__all__ = ["FailedHandshakes"]

_log = logging.getLogger(__name__)

HOLD_NS = SECOND_NS
HELD_MAX = 250
"""Addresses that are held off at once. A filter may have 4,096 instructions, and five are for each."""
_NOTED_MAX = 10_000
_LOG_NS = 60 * SECOND_NS
_LISTEN_NS = 10 * SECOND_NS
"""For so long the kernel tells of ends, after the last second that had many."""
_IPV6_NETWORK_BYTES = 8
"""Of an IPv6 address: who has one has all 2^64 of its network."""


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
        self.ends: EarlyEnds | None = None
        """Of the same socket; None: there is none."""
        self.fd = -1
        """Raised when there is something new; from `open` to `close`."""
        self._lock = threading.Lock()
        """Around the descriptor: no other file's is written to by a note that comes late."""
        self._noted: deque[str] = deque(maxlen=_NOTED_MAX)
        self._counts: Counter[bytes] = Counter()
        """By source; one that failed is `COSTLY`."""
        self._counted_ns = 0
        self._ended = 0
        """Connections of any address, in this second."""
        self._listens_until_ns = 0
        """0: the kernel tells nothing."""
        self._held: dict[bytes, int] = {}
        """By source: until when."""
        self._logged_ns = -_LOG_NS

    def open(self) -> None:
        """Begin to take notes."""
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def close(self) -> None:
        """Take no notes any more; the guard's thread has ended."""
        if self.ends is not None:
            self.ends.close()
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

    def note_end(self) -> None:
        """Note that a connection has ended which was no session; for the guard's thread."""
        self._ended += 1

    @property
    def next_ns(self) -> int | None:
        """When there is work: an address is let in again, or the kernel need tell no more; None: neither."""
        listens = [self._listens_until_ns] if self._listens_until_ns else []
        return min((*self._held.values(), *listens), default=None)

    def do_work(self, now_ns: int) -> None:
        """Hold off the addresses with too many failures in this second, and let those in whose time is over."""
        self._listen(now_ns)
        if now_ns - self._counted_ns >= SECOND_NS:
            self._counts.clear()
            self._counted_ns, self._ended = now_ns, 0
        address = self._count(now_ns)
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
        """Count what failed; an address that is held off from now on, or nothing."""
        found = ""
        for address, weight in self._take_notes() + (self.ends.take() if self.ends else []):
            source = _source_of(address)
            self._counts[source] += weight
            if source and self._counts[source] >= self._most * COSTLY and source not in self._held:
                self._counts[source] = 0
                if len(self._held) < HELD_MAX:
                    self._held[source] = now_ns + HOLD_NS
                    found = address
        return found

    def _take_notes(self) -> list[tuple[str, int]]:
        if not self._noted:
            return []
        with self._lock:
            noted = [(address, COSTLY) for address in self._noted]
            self._noted.clear()
            os.eventfd_read(self.fd)
        return noted

    def _listen(self, now_ns: int) -> None:
        """Have the kernel tell of ends while there are many."""
        if self.ends is None or not self._most:
            return
        if self._ended > self._most // 2:
            self._ended = 0
            try:
                self.ends.open()
                self._listens_until_ns = now_ns + _LISTEN_NS
            except OSError as error:
                self._log(
                    now_ns, f"handshakes that fail before a key is known are not counted: {error}"
                )
        elif self._listens_until_ns and now_ns >= self._listens_until_ns:
            self._listens_until_ns = 0
            self.ends.close()

    def _log(self, now_ns: int, text: str) -> None:
        if now_ns - self._logged_ns >= _LOG_NS:
            self._logged_ns = now_ns
            _log.warning("%s", text)
