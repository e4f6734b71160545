"""The two sides of a connection as it sees them: the client that it says hello for, and those that use it."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from danube_fast.errors import DanubeError
from danube_fast.frame.view import FrameView
from danube_fast.net.protocol import ConsumerEvent

__all__ = ["Identity", "Receiver", "User"]


class Identity(NamedTuple):
    """Fields of HELLO that describe the client."""

    name: str
    auth: dict[str, Any]
    host_id: str
    process_id: int


class User(Protocol):
    """A lane or an attachment: something with state at the other end of a connection."""

    def on_session(self, resumed: bool) -> None:
        """Start over: the session is open (again)."""

    def on_lost(self) -> None:
        """Stop: the session is in doubt, and `on_session` follows when there is one again."""

    def on_away(self) -> None:
        """Look for the partition elsewhere: the broker has been silent for long."""

    def on_failure(self, error: DanubeError) -> None:
        """Give up: the connection has failed for good."""


class Receiver(Protocol):
    """The receiver of deliveries: an attachment, or what it left behind."""

    def on_frame(self, buffer: memoryview, start: int, frame_bytes: int) -> None:
        """Check a frame that arrived, and take it."""

    def on_checked(self, view: FrameView, place: tuple[int, ...]) -> None:
        """Take a frame that arrived and is sound, with its fields as `PLACE_FIELDS` has them."""

    def on_event(self, event: ConsumerEvent) -> None:
        """Take what the broker tells of the consumer."""
