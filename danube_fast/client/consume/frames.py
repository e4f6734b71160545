"""Frames of one consumer: those that wait, and the one whose messages the application takes one by one.

    queue | messages   0 ... | start ..... stop | ... end      `left` has start to stop, the next one last
                       taken   the part taken now   not begun

Credit goes back for what was taken before a part begins, so a part is what the application may keep for long
without a word to the broker. The application takes frames from `queue` and messages from `left` without a lock;
everything else is done under the pump's lock, or by the application's thread.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

from danube_fast.client.consume.attachment import Attachment
from danube_fast.client.consume.delivery import Delivery
from danube_fast.client.values.message import Message

__all__ = ["Frames"]


class Frames:
    """The frames that came and are not taken yet; no current one at first."""

    def __init__(self) -> None:
        self.queue: collections.deque[Delivery] = collections.deque()
        """Checked frames. Those of an older generation of their attachment are skipped when their turn comes."""
        self.current: Delivery | None = None
        self.left: list[Message] = []
        """Always the same list, so that a consumer may keep it."""
        self.stop = 0
        """End of the part that is taken now."""
        self.end = 0
        """End of the current frame; 0 = it is void."""
        self.taken = 0
        """Frames that were taken out of the queue."""
        self._messages: list[Message] = []

    def take(self) -> Message | None:
        """Take the next message of the part, None if there is none."""
        try:
            return self.left.pop() if self.left else None
        except IndexError:
            return None  # another thread has closed us just now

    def __iter__(self) -> Iterator[Message]:
        """Take what is left of the part; an interrupted iteration loses none."""
        while (message := self.take()) is not None:
            yield message

    @property
    def index(self) -> int:
        """Which message of the current frame is next."""
        return self.stop - len(self.left)

    @property
    def position(self) -> tuple[int, int]:
        """Changes whenever the application takes something."""
        return self.taken, self.index

    @property
    def here(self) -> tuple[Delivery, int] | None:
        """The current frame and its next message, if it has one."""
        delivery, index = self.current, self.stop - len(self.left)
        return (delivery, index) if delivery is not None and index < self.end else None

    @property
    def behind_part(self) -> tuple[Delivery, int] | None:
        """The current frame and its first message behind the part, if it has one."""
        delivery, stop = self.current, self.stop
        return (delivery, stop) if delivery is not None and stop < self.end else None

    def open(self, delivery: Delivery, index: int) -> None:
        """Make a frame the current one, from message `index` on, when the last one is used up."""
        self._messages = list(delivery.messages(0, delivery.count))
        self.current = delivery
        self.stop, self.end = index, delivery.count

    def open_taken(self, delivery: Delivery) -> None:
        """Make a frame of one message the current one, which is taken at once."""
        self.current, self._messages = delivery, []
        self.stop = self.end = delivery.returned = 1
        delivery.credit.take(delivery.frame_bytes, 1, delivery.flow_id)

    def begin_part(self, redelivered_max: int) -> bool:
        """Begin the next part of the current frame; True if that is redelivered messages (see
        `Delivery.next_part`)."""
        delivery, start, is_redelivered = self.current, self.stop, False
        if delivery is None or start >= self.end:
            return False  # dropped just now
        if delivery.is_again:
            part, is_redelivered = delivery.next_part(start, redelivered_max)
        else:
            part = delivery.credit.part_of(delivery.frame_bytes, delivery.count)
        self.stop = min(self.end, start + part)
        self.left += self._messages[start : self.stop][::-1]
        # a single message counts as taken at once
        delivery.give_credit_back(self.stop if part == 1 else start)
        return is_redelivered

    def skip(self, stop: int) -> None:
        """Leave out messages up to `stop`, which were taken in a batch."""
        self.stop = max(self.stop, stop)
        self.left[self.stop - stop :] = []

    def return_credit(self) -> None:
        """Give back the credit of what the application took so far."""
        delivery, index = self.current, self.stop - len(self.left)
        if delivery is not None and index > delivery.returned:
            delivery.give_credit_back(index)

    def has_waiting(self, attachment: Attachment) -> bool:
        """Whether a frame that came through the attachment waits, or is not used up. Under the lock."""
        waiting = [*self.queue, *(self.here or ())[:1]]
        return any(each.attachment is attachment for each in waiting)

    def drop(self, attachment: Attachment) -> None:
        """Take nothing more of the current frame, if it came through the attachment."""
        if self.current is not None and self.current.attachment is attachment:
            self.current.give_credit_back(self.current.count)
            self.stop = self.end = 0
            self.left.clear()

    def forget(self) -> None:
        """Drop the current frame and keep nothing. Messages are unknown to the garbage collector: in here they
        would keep the consumer, and all else, for ever."""
        self.stop = self.end = 0
        self.left.clear()
        self._messages, self.current = [], None
