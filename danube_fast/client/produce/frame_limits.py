"""How small a broker wants the frames of one lane, where it keeps a publish rate, and when to ask that again."""

from __future__ import annotations

from collections.abc import Mapping

from danube_fast.clock import MILLISECOND_NS, SECOND_NS

__all__ = ["FrameLimits"]

_NAMES = "frame_bytes_max", "frame_messages_max"
LONG_WAIT_NS = 60 * MILLISECOND_NS
"""Frames as small as the broker wants them wait less, unless the rate is new, or lower than it was."""
_PAUSE_NS, _PAUSE_NS_MAX = 2 * SECOND_NS, 600 * SECOND_NS
"""It is asked at most this often: half as often each time that the answer is the same."""


class FrameLimits:
    """Limits as the broker told them when it opened the producer."""

    __slots__ = ("_heard_ns", "_pause_ns", "is_asked", "known")

    def __init__(self) -> None:
        self.known: dict[str, int] = {}
        self.is_asked = False
        """Whether the producer is to be opened again for them."""
        self._heard_ns, self._pause_ns = 0, _PAUSE_NS

    def heard(self, reply: Mapping[str, int], now_ns: int) -> None:
        """Take the answer of an OPEN_PRODUCER."""
        found = {name: reply[name] for name in _NAMES if name in reply}
        is_new = not self._heard_ns or found != self.known
        self.known = found
        self._waited(now_ns, _PAUSE_NS if is_new else 2 * self._pause_ns)

    def refused(self, now_ns: int) -> None:
        """Ask no more for a while: the producer may not be opened again just now."""
        self._waited(now_ns, 2 * self._pause_ns)

    def _waited(self, now_ns: int, pause_ns: int) -> None:
        self._heard_ns, self._pause_ns = now_ns, min(pause_ns, _PAUSE_NS_MAX)
        self.is_asked = False

    def throttled(self, wait_ns: int, message_count: int, now_ns: int) -> None:
        """Note that a frame of so many messages has to wait so long."""
        if wait_ns > LONG_WAIT_NS and message_count > 1:
            self.is_asked = now_ns - self._heard_ns > self._pause_ns

    def within(self, limits: Mapping[str, int]) -> Mapping[str, int]:
        """Return the limits of a connection (of WELCOME) with these, where they are lower."""
        return {
            **limits,
            **{name: min(most, limits.get(name, most)) for name, most in self.known.items()},
        }
