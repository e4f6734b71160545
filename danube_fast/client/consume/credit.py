"""Credit: how much a consumer lets a worker send ahead, in bytes and messages.

One flow per consumer and connection, shared by the consumer's partitions there. The broker subtracts
frame_bytes and message_count of every frame it delivers; credit goes back in quarters of the window
as the application takes frames. A new session starts a new flow with a full window.

All methods are called under the pump's lock.
"""

from __future__ import annotations

from danube_fast.client.link.connection import Connection
from danube_fast.client.values.limits import CREDIT_PARTS, SMALL_FRAMES_MIN
from danube_fast.errors import DanubeError
from danube_fast.frame.view import PLACE_FIELDS, FrameView
from danube_fast.net.protocol import ConsumerEvent, Flow

__all__ = ["Credit", "Departed"]


class Credit:
    """The flow of one consumer on one connection."""

    def __init__(self, connection: Connection, window_bytes: int, window_messages: int) -> None:
        self.connection = connection
        self.flow_id = 0
        self._window_bytes = max(1, window_bytes)
        self._window_messages = max(1, window_messages)
        self._step_bytes = max(1, window_bytes // CREDIT_PARTS)
        self._step_messages = max(1, window_messages // CREDIT_PARTS)
        self._taken_bytes = 0
        self._taken_messages = 0
        self._granted = False
        connection.users[self] = None
        self.on_session(resumed=False)

    def on_session(self, resumed: bool) -> None:
        """Start a new flow for a new session; attachments subscribe with it next."""
        self.flow_id = self.connection.next_request()
        self._taken_bytes = self._taken_messages = 0
        self._granted = False

    def on_lost(self) -> None:
        """Do nothing: the next session begins with a new flow."""

    def on_away(self) -> None:
        """Do nothing: attachments look for their partitions."""

    def on_failure(self, error: DanubeError) -> None:
        """Do nothing: attachments tell the consumer."""

    def grant(self) -> None:
        """Grant the full window, once, behind the first subscription that draws on it."""
        if not self._granted:
            self._granted = True
            self.connection.send(Flow(self.flow_id, self._window_bytes, self._window_messages))

    def take(self, frame_bytes: int, message_count: int, flow_id: int) -> None:
        """Count a frame that came under `flow_id` as taken, and give credit back in steps."""
        if flow_id != self.flow_id:
            return
        self._taken_bytes += frame_bytes
        self._taken_messages += message_count
        if (
            self._taken_bytes >= self._step_bytes or self._taken_messages >= self._step_messages
        ) and self.connection.is_open:
            given_bytes, given_messages = max(0, self._taken_bytes), max(0, self._taken_messages)
            self.connection.send(Flow(flow_id, given_bytes, given_messages))
            self._taken_bytes -= given_bytes
            self._taken_messages -= given_messages

    def part_of(self, frame_bytes: int, message_count: int) -> int:
        """Return how many messages of a frame the application takes before credit goes back for them: all of a frame that
        is a small part of the window, else a quarter, since it may be all that was granted."""
        is_small = (
            frame_bytes * SMALL_FRAMES_MIN <= self._window_bytes
            and message_count * SMALL_FRAMES_MIN <= self._window_messages
        )
        return message_count if is_small else -(-message_count // CREDIT_PARTS)

    def resize(self, window_bytes: int, window_messages: int) -> None:
        """Change the window: the difference is granted, or kept back, with what is taken next."""
        if self._granted:
            self._taken_bytes += window_bytes - self._window_bytes
            self._taken_messages += window_messages - self._window_messages
        self._window_bytes, self._window_messages = window_bytes, window_messages
        self._step_bytes = max(1, window_bytes // CREDIT_PARTS)
        self._step_messages = max(1, window_messages // CREDIT_PARTS)

    def close(self) -> None:
        """Forget the connection."""
        self.connection.users.pop(self, None)


class Departed:
    """Stands in for an attachment that has left, until the broker has said so: what was on its way goes to
    others, and its credit goes back."""

    def __init__(self, credit: Credit, flow_id: int) -> None:
        self._credit = credit
        self._flow_id = flow_id

    def on_frame(self, buffer: memoryview, start: int, frame_bytes: int) -> None:
        """Give the credit of a frame back that came too late."""
        count = PLACE_FIELDS.unpack_from(buffer, start)[2]
        self._credit.take(frame_bytes, count, self._flow_id)

    def on_checked(self, view: FrameView, place: tuple[int, ...]) -> None:
        """Give the credit of such a frame back that is sound."""
        self._credit.take(place[1], place[2], self._flow_id)

    def on_event(self, event: ConsumerEvent) -> None:
        """Ignore events of a consumer that has left."""
