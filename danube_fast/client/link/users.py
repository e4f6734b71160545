"""The states of a connection, and its two sides as it sees them: the client that it says hello for, and those that use it."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple, Protocol

from danube_fast.errors import DanubeError
from danube_fast.frame.view import FrameView
from danube_fast.net.protocol import PROTOCOL_VERSION, ConsumerEvent, Hello

__all__ = ["Identity", "Receiver", "State", "User"]


class State(enum.Enum):
    """Where a connection stands."""

    HANDSHAKE = 1
    OPEN = 2
    FAILED = 3
    CLOSED = 4


class Identity(NamedTuple):
    """Fields of HELLO that describe the client."""

    name: str
    auth: dict[str, Any]
    host_id: str
    process_id: int

    def hello(self, request: int, session: int, token: bytes, claims: dict[str, Any]) -> Hello:
        """Return the HELLO that asks for that session again; 0 for a new one."""
        return Hello(
            request, PROTOCOL_VERSION, self.name, {**self.auth, **claims}, self.host_id, self.process_id,
            session, token,
        )  # fmt: skip


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
