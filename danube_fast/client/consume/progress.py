"""How far the application is in what a consumer was sent, as the broker wants to know it.

    frame 0 ... frame n | current: taken up to an offset | queue        `taken` = (n, that offset)

A heartbeat says it of every partition from which something was taken since the last one, and the command
that closes a consumer says it, too: so what waited in the queue only does not count as delivered. Messages
that wait for a handler (`subscribe`) are not taken either.

A redelivered message may be what killed the process that had it, so it is reported before the application has
it: `receive` returns these one by one, `receive_batch` those that come for the second time in a batch of
their own, and a handler begins when the broker has answered.
"""

from __future__ import annotations

from danube_fast.client.consume.acks import AckQueue
from danube_fast.client.consume.attachment import Attachment
from danube_fast.client.consume.delivery import Delivery
from danube_fast.client.consume.frames import Frames
from danube_fast.client.link.calls import Call, OnLoss, Report
from danube_fast.client.link.pump import Pump
from danube_fast.client.link.steps import Steps, Wait, deadline_after
from danube_fast.client.values.message import Message
from danube_fast.client.values.options import READER
from danube_fast.net.protocol import Ping

__all__ = ["Progress"]

ANSWER_SECONDS_MAX = 10.0
"""Far above what a loaded broker takes: a message that is handed out unreported dies without a count. A lost
session ends the wait."""


class Progress:
    """Follows what the application of one consumer has taken."""

    def __init__(self, pump: Pump, frames: Frames, acks: AckQueue) -> None:
        self._pump = pump
        self._frames = frames
        self._acks = acks
        self._apart: dict[tuple[Delivery, int], None] = {}
        """Frame and offset of what waits for a handler. Used without the lock: one call of a dictionary
        each."""
        self._reporter = self.report
        self.call: Call | None = None
        """Redelivered messages are returned when this report is answered."""
        self.has_handlers = False
        """Messages wait for a handler, and are reported when that begins."""

    # ------------------------------------------------------------ handlers

    def wait(self, delivery: Delivery, offset: int) -> None:
        """Note a message that was taken and waits for a handler."""
        self._apart[delivery, offset] = None

    def begin(self, delivery: Delivery, message: Message) -> Steps[None] | None:
        """Note that a handler takes a message. Returns the steps to run before, which report a redelivered one;
        else None."""
        self._apart.pop((delivery, message.offset), None)
        if not (delivery.is_again and message.redelivery_count):
            return None
        return self._report_steps(delivery)

    def _report_steps(self, delivery: Delivery) -> Steps[None]:
        attachment, call = delivery.attachment, None
        with self._pump.lock:
            if delivery.generation == attachment.generation:
                call = self._send(attachment, with_part=False)
        yield from self._wait_steps(call)

    # ------------------------------------------------------------ reports

    def took(self, delivery: Delivery) -> None:
        """Report a frame that was begun, or all of which was taken, with the next heartbeat."""
        attachment = delivery.attachment
        if delivery.generation == attachment.generation and attachment.connection.takes_reports:
            attachment.taken_frames = delivery.number + 1
            attachment.connection.reporters[attachment] = self._reporter

    def report(self, attachment: Attachment) -> Report | None:
        """Say for a heartbeat how far the application is. None: there is nothing to say."""
        if not attachment.consumer_id or attachment.consumer.type == READER:
            return None
        if self._may_go_on(attachment):
            attachment.connection.reporters[attachment] = self._reporter
        return attachment.consumer_id, *self.of(attachment)

    def report_part(self, delivery: Delivery) -> None:
        """Under the lock: report the redelivered messages of this frame that are returned next."""
        if not self.has_handlers:
            self.call = self._send(delivery.attachment, with_part=True)

    def answered_steps(self) -> Steps[None]:
        """Wait until the broker has answered the report of what is returned next, or the session is lost; ten seconds
        at most."""
        call, self.call = self.call, None
        return self._wait_steps(call)

    def _wait_steps(self, call: Call | None) -> Steps[None]:
        if call is not None:
            deadline_ns = deadline_after(self._pump.clock, ANSWER_SECONDS_MAX)
            yield Wait(lambda: call.done, deadline_ns)

    def _send(self, attachment: Attachment, *, with_part: bool) -> Call | None:
        """Report how far the application is; None if the broker takes no reports."""
        connection = attachment.connection
        if not attachment.consumer_id or not connection.is_open or not connection.takes_reports:
            return None
        self._acks.send()  # first: what was acked must not fail with what is reported
        taken = self.of(attachment, with_part=with_part)
        ping = Ping(connection.next_request(), [(attachment.consumer_id, *taken)])
        return connection.call(Call(ping, OnLoss.FORGET))

    def of(self, attachment: Attachment, *, with_part: bool = False) -> tuple[int, int]:
        """Under the lock: return the frames of the partition that were taken, and the offset in the next one below which
        all was. `with_part`: with the part of the current frame that the application takes next."""
        taken = attachment.taken_frames, 0
        current = self._frames.behind_part if with_part else self._frames.here
        if current is not None and current[0].attachment is attachment:
            delivery, index = current
            if delivery.generation == attachment.generation:
                taken = delivery.number, delivery.offset_list(index, index + 1)[0]
        waiting = [
            (delivery.number, offset)
            for delivery, offset in list(self._apart)
            if delivery.attachment is attachment and delivery.generation == attachment.generation
        ]
        return min([taken, *waiting])

    def _may_go_on(self, attachment: Attachment) -> bool:
        """Under the lock: whether the application may take more of the partition's frames that it has begun."""
        current = self._frames.here
        begun = [delivery for delivery, _ in list(self._apart)]
        begun += [] if current is None else [current[0]]
        return any(delivery.attachment is attachment for delivery in begun)
