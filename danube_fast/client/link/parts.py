"""The parts of a client as its pump sees them: sockets to read, deadlines to serve."""

from __future__ import annotations

from typing import Protocol

from danube_fast.client.link.lookout import Link

__all__ = ["Socket", "Timed"]


class Timed(Protocol):
    """Something with a deadline that the timer thread serves."""

    def on_time(self, now_ns: int) -> object:
        """Serve the armed deadline, which is over. Under the lock. False: no call that waits has to look."""


class Socket(Protocol):
    """A connection, as the pump sees it."""

    def fileno(self) -> int:
        """Return the descriptor to sleep on."""

    def drain(self, lazily: bool = False) -> int:
        """Read what is there; how many messages that was. `lazily`: rings need not be armed, as the leader does that."""

    def readable(self) -> bool:
        """Whether something can be read now."""

    @property
    def has_rings(self) -> bool:
        """Whether its descriptor is raised again for whatever comes after a look."""

    @property
    def link(self) -> Link | None:
        """The rings that a leader may look at without the lock, if it has any."""

    def reset(self) -> None:
        """Reading was interrupted, perhaps in the middle of a message."""
