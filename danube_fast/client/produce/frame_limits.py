"""How small the frames of one lane should be where a broker keeps a publish rate.

    told    by the broker when it opened the producer: a part of a second's worth, until it opens again
    felt    smaller ones, since a frame had to wait for long: the rate is new, or lower than it was

A frame is taken as a whole, so the one behind it waits for as long as it takes at the rate.
"""

from __future__ import annotations

from collections.abc import Mapping

from danube_fast.client.values.limits import (
    BATCH_BYTES_MAX,
    BATCH_BYTES_MIN,
    BATCH_MESSAGES_MAX,
    FOREVER_NS,
)
from danube_fast.clock import MILLISECOND_NS, SECOND_NS

__all__ = ["FrameLimits"]

_BYTES, _MESSAGES = _NAMES = "frame_bytes_max", "frame_messages_max"
LONG_WAIT_NS = 40 * MILLISECOND_NS
"""Frames that have to wait longer are made so small that they wait half as long."""
RELAX_NS = 10 * SECOND_NS
"""Behind so long without such a wait, frames may be half as large again."""


class FrameLimits:
    """The limits of one lane, by their names in the protocol."""

    __slots__ = ("_felt", "_told", "relax_ns")

    def __init__(self) -> None:
        self._told: dict[str, int] = {}
        self._felt: dict[str, int] = {}
        self.relax_ns = FOREVER_NS
        """When to call `relax`, monotonic."""

    def tell(self, reply: Mapping[str, int]) -> None:
        """Take the answer of an OPEN_PRODUCER."""
        self._told = {name: reply[name] for name in _NAMES if name in reply}
        self._felt, self.relax_ns = {}, FOREVER_NS

    def wait(self, wait_ns: int, frame_bytes: int, message_count: int, now_ns: int) -> bool:
        """Note that the broker lets a frame wait; whether frames are smaller from now on."""
        if wait_ns <= LONG_WAIT_NS or message_count < 2:
            return False
        part = LONG_WAIT_NS / 2 / wait_ns
        self._felt = {
            _BYTES: max(BATCH_BYTES_MIN, int(frame_bytes * part)),
            _MESSAGES: max(1, int(message_count * part)),
        }
        self.relax_ns = now_ns + RELAX_NS
        return True

    def relax(self, now_ns: int) -> None:
        """Let frames be larger than was felt to be right: the rate may be higher, or gone."""
        self._felt = {name: most + most // 2 + 1 for name, most in self._felt.items()}
        self.relax_ns = now_ns + RELAX_NS
        if self._felt[_BYTES] > BATCH_BYTES_MAX and self._felt[_MESSAGES] > BATCH_MESSAGES_MAX:
            self._felt, self.relax_ns = {}, FOREVER_NS

    def within(self, limits: Mapping[str, int]) -> Mapping[str, int]:
        """Return the limits of a connection (of WELCOME) with these, where they are lower."""
        found = dict(limits)
        for each in (self._told, self._felt):
            for name, most in each.items():
                found[name] = min(most, found.get(name, most))
        return found
