"""The hand: the frame whose messages the application takes one by one.

    messages   0 ... | start ..... stop | ... end      `left` has start to stop, the next one last
                taken   the part taken now   not begun

Credit goes back for what was taken before a part begins, so a part is what the application may keep for long
without a word to the broker. The application takes messages from `left` without a lock; everything else is done
under the pump's lock, or by the application's thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from danube_fast.client.consume.attachment import Attachment
    from danube_fast.client.consume.delivery import Delivery
    from danube_fast.client.message import Message

__all__ = ["Hand"]


class Hand:
    """The frame in hand of one inbox; none at first."""

    def __init__(self) -> None:
        self.delivery: Delivery | None = None
        self.left: list[Message] = []
        """Always the same list, so that a consumer may keep it."""
        self._messages: list[Message] = []
        self.stop = 0
        """End of the part that is taken now."""
        self.end = 0
        """End of the frame; 0 = it is void."""

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
        """Which message of the frame is next."""
        return self.stop - len(self.left)

    @property
    def here(self) -> tuple[Delivery, int] | None:
        """The frame and its next message, if it has one."""
        delivery, index = self.delivery, self.stop - len(self.left)
        return (delivery, index) if delivery is not None and index < self.end else None

    @property
    def behind_part(self) -> tuple[Delivery, int] | None:
        """The frame and its first message behind the part, if it has one."""
        delivery, stop = self.delivery, self.stop
        return (delivery, stop) if delivery is not None and stop < self.end else None

    def hold(self, delivery: Delivery, index: int) -> None:
        """Take a frame in hand from message `index` on, when the last one is used up."""
        self._messages = list(delivery.messages(0, delivery.count))
        self.delivery = delivery
        self.stop, self.end = index, delivery.count

    def begin_part(self, redelivered_max: int) -> bool:
        """The part of the frame that comes next; True if that is redelivered messages (see
        `Delivery.next_part`)."""
        delivery, start, is_redelivered = self.delivery, self.stop, False
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
        delivery.attachment.took(delivery)
        return is_redelivered

    def skip(self, stop: int) -> None:
        """Messages up to `stop` are taken in another way."""
        self.stop = max(self.stop, stop)
        self.left[self.stop - stop :] = []

    def return_credit(self) -> None:
        """For what the application took so far."""
        delivery, index = self.delivery, self.stop - len(self.left)
        if delivery is not None and index > delivery.returned:
            delivery.give_credit_back(index)

    def drop(self, attachment: Attachment) -> None:
        """A frame that came through the attachment is void: nothing more of it is taken."""
        if self.delivery is not None and self.delivery.attachment is attachment:
            self.delivery.give_credit_back(self.delivery.count)
            self.stop = self.end = 0
            self.left.clear()

    def forget(self) -> None:
        """Drop it and keep nothing. Messages are unknown to the garbage collector: in here they would keep the
        inbox, and all else, for ever."""
        self.stop = self.end = 0
        self.left.clear()
        self._messages, self.delivery = [], None
