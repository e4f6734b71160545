"""How far the application is in what a consumer was sent, as the broker wants to know it.

    frame 0 ... frame n | in hand: taken up to an offset | queue        `taken` = (n, that offset)

A heartbeat says it of every partition from which something was taken since the last one, and the command
that closes a consumer says it, too: so what waited in the queue only does not count as delivered. Messages
that wait for a handler (`subscribe`) are not taken either.

A redelivered message may be what killed the process that had it, so it is reported before the application has
it: `receive` hands these out one by one, `receive_batch` those that come for the second time in a batch of
their own, and a handler begins when the broker has answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from danube_fast.client.link.pump import Steps, Wait, deadline_after

if TYPE_CHECKING:
    from danube_fast.client.consume.attachment import Attachment
    from danube_fast.client.consume.delivery import Delivery
    from danube_fast.client.consume.inbox import Inbox
    from danube_fast.client.link.calls import Call
    from danube_fast.client.message import Message

__all__ = ["OPTION", "Progress"]

ANSWER_SECONDS_MAX = 1.0
OPTION = {"reports_taken": True}
"""Of SUBSCRIBE: this client reports."""


class Progress:
    """What the application has taken of one inbox."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._apart: dict[tuple[Delivery, int], None] = {}
        """Frame and offset of what waits for a handler. Used without the lock: one call of a dictionary
        each."""
        self.report: Call | None = None
        """Redelivered messages are handed out when this is answered."""
        self.has_handlers = False
        """What the inbox hands out waits for a handler, and is reported when that begins."""

    def wait(self, delivery: Delivery, offset: int) -> None:
        """A message was taken out of the inbox and waits for a handler."""
        self._apart[delivery, offset] = None

    def begin(self, delivery: Delivery, message: Message) -> Steps[None] | None:
        """A handler takes a message. Returns the steps to run before, which report a redelivered one; else None."""
        self._apart.pop((delivery, message.offset), None)
        if not (delivery.is_again and message.redelivery_count):
            return None
        return self._report_steps(delivery)

    def _report_steps(self, delivery: Delivery) -> Steps[None]:
        attachment, report = delivery.attachment, None
        with self._inbox.pump.lock:
            if delivery.generation == attachment.generation:
                report = attachment.report_now(with_part=False)
        yield from self._answered_steps(report)

    def report_part(self, delivery: Delivery) -> None:
        """Under the lock: report the redelivered messages of this frame that are handed out next."""
        if not self.has_handlers:
            self.report = delivery.attachment.report_now(with_part=True)

    def answered_steps(self) -> Steps[None]:
        """Wait until the broker has answered the report of what is handed out next, a second at most."""
        report, self.report = self.report, None
        return self._answered_steps(report)

    def _answered_steps(self, report: Call | None) -> Steps[None]:
        if report is not None:
            deadline_ns = deadline_after(self._inbox.pump.clock, ANSWER_SECONDS_MAX)
            yield Wait(lambda: report.done, deadline_ns)

    def of(self, attachment: Attachment, *, with_part: bool = False) -> tuple[int, int]:
        """Under the lock: frames of the partition that were taken, and the offset in the next one below which
        all was. `with_part`: with the part of the frame in hand that the application takes next."""
        taken = attachment.taken_frames, 0
        hand = self._inbox.hand
        in_hand = hand.behind_part if with_part else hand.here
        if in_hand is not None and in_hand[0].attachment is attachment:
            delivery, index = in_hand
            if delivery.generation == attachment.generation:
                taken = delivery.number, delivery.offset_list(index, index + 1)[0]
        waiting = [
            (delivery.number, offset)
            for delivery, offset in list(self._apart)
            if delivery.attachment is attachment and delivery.generation == attachment.generation
        ]
        return min([taken, *waiting])

    def may_go_on(self, attachment: Attachment) -> bool:
        """Under the lock: whether the application may take more of the partition's frames in hand."""
        in_hand = self._inbox.hand.here
        held = [delivery for delivery, _ in list(self._apart)]
        held += [] if in_hand is None else [in_hand[0]]
        return any(delivery.attachment is attachment for delivery in held)
