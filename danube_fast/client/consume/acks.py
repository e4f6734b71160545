r"""Acks of one consumer: gathered as ranges, sent together, at the latest after `ACK_DELAY_NS`.

    ack(...) -> pending -> ACK -> sent -> ACK that is answered -> confirmed
                                     \ the session is lost: void, until acked again

Many pending, a receive that waits when nothing was sent for so long, or the timer thread send what is
pending; `flush` and, once a second, a send ask for an answer. Acks of messages from before a reconnect or a seek are quiet no-ops,
because the broker has given those messages back; only a flush has to say that acks were void, and
only if their messages were not acked again meanwhile.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from danube_fast.checks import check_seconds, check_text, check_whole
from danube_fast.client.consume.attachment import Attachment, Owner
from danube_fast.client.consume.batch import Batch
from danube_fast.client.consume.ranges import Ranges, Wire, merged, no_ranges, subtracted, to_wire
from danube_fast.client.link.calls import Call
from danube_fast.client.link.connection import Connection
from danube_fast.client.link.pump import Pump
from danube_fast.client.values.limits import (
    ACK_CONFIRM_NS,
    ACK_DELAY_NS,
    ACK_EARLY_NS,
    ACK_RANGES_MAX,
    FOREVER_NS,
)
from danube_fast.client.values.message import Message, MessageId, Received
from danube_fast.errors import FailedPrecondition, InvalidArgument, Unavailable
from danube_fast.net.protocol import Ack, Nack

__all__ = ["AckQueue", "acks_unsent", "delay_ms"]

_NOT_DUE = FOREVER_NS
_REASON_BYTES_MAX = 64 * 1024
_LOOKS = 2
"""How often a run is looked at that does not grow any more."""
_ACKS_LOST = (
    "the connection was lost before all acks were durable; messages whose acks did not arrive are "
    "delivered again, so go on receiving"
)


_Covered: TypeAlias = "dict[Call, dict[Attachment, Ranges[int]]]"


def _never_received(topic: str, offset: int) -> InvalidArgument:
    return InvalidArgument(
        f"this consumer never received message {offset} of {topic}; use the consumer that did"
    )


def acks_unsent(unsent: dict[str, list[int]]) -> Unavailable:
    """Return the error of acks that did not arrive before `close` was over, by topic as [start, end) pairs."""
    places = [
        f"{topic} {', '.join(f'{a} to {b - 1}' for a, b in list(zip(r[::2], r[1::2], strict=True))[:5])}"
        + (" and others" if len(r) > 10 else "")
        for topic, r in list(unsent.items())[:5]
    ]
    return Unavailable(
        f"the consumer is closed, and acks were lost, not sent or not answered in time: {'; '.join(places)}"
        f"{'; and more topics' if len(unsent) > 5 else ''}; these messages may be delivered again"
    )


def delay_ms(seconds: float | None) -> int:
    """Return a delay as NACK has it; None leaves it to the failure policy. Raises InvalidArgument."""
    return -1 if seconds is None else max(0, int(check_seconds(seconds, "delay") * 1000))


class AckQueue:
    """Ranges of offsets on their way from the application to the broker's log. Under the lock."""

    def __init__(self, owner: Owner, pump: Pump, attachments: list[Attachment]) -> None:
        self._owner = owner
        self._pump = pump
        self._attachments = attachments
        self._is_closed = False
        self.due_ns = _NOT_DUE
        self.run_source: Any = None
        """Frame whose messages are acked one by one, in order; None = there is none."""
        self.run_end = 0
        """One past the last offset acked of it. Written by the consumer's thread, without the lock."""
        self._run_start = 0
        self._run_delivery: Any = None
        self._looks = 0
        self._confirm_due_ns = 0
        self._sent_ns = 0
        self._queued: dict[Attachment, None] = {}
        """Of thousands of partitions, those that have something pending."""
        self._sent: dict[Attachment, Ranges[int]] = {}
        """Sent, and no answered ACK behind them yet."""
        self._confirming: dict[Call, dict[Attachment, Ranges[int]]] = {}
        """Acks that each ACK on its way covers, where that will be answered."""
        self._void: dict[Attachment, list[int]] = {}
        """Lost with their session, or acked when that was gone, and not acked again since."""
        self._lost: dict[Attachment, list[int]] = {}
        """Lost with their session: `close` tells of that part of what is void."""

    def add_one(self, message: Received) -> None:
        """Ack one message. If it follows the last one, `Consumer.ack` does not even come here: it only
        raises `run_end`, without the lock; `send` collects what the run has grown by."""
        source: Any = message._source
        offset = message.offset
        self._check_own(source.attachment, offset)
        if source is self.run_source and offset == self.run_end:
            self.run_end = offset + 1
            return
        self._collect()
        self.run_source = None
        attachment = source.attachment
        if source.generation == attachment.generation:
            self._run_start, self.run_end = offset, offset + 1
            self.run_source = self._run_delivery = source
            self._looks = _LOOKS
            if attachment.tracks:
                self._soon(attachment)
        else:
            self._lapse(attachment, source.generation, array("q", (offset, offset + 1)))

    def _collect(self) -> bool:
        """Queue what the run has grown by; False if that is nothing."""
        start, end = self._run_start, self.run_end
        if self._run_delivery is None or start == end:
            return False
        self._run_start = end
        if not self._run_delivery.attachment.tracks:
            return False
        attachment = self._run_delivery.attachment
        self._queued[attachment] = None
        pending = attachment.pending
        if pending and pending[-1] == start:
            pending[-1] = end
        else:
            pending.extend((start, end))
        self._arm()
        return True

    def _arm(self) -> None:
        """Send what is queued after a while at the latest."""
        if self.due_ns == _NOT_DUE:
            self.due_ns = self._pump.clock.monotonic_ns() + ACK_DELAY_NS
            self._pump.arm(self, self.due_ns)

    def _look_again(self, grown: bool) -> None:
        """Look again whether the run has grown, until it has stood still for a while."""
        if grown:
            self._looks = _LOOKS
        elif self._looks:
            self._looks -= 1
            self.run_source = None  # the next ack comes with the lock, and starts another run
        if self._looks:
            self._arm()

    def add(self, what: Any) -> None:
        """Ack what anything names: a message, a batch, ids, a list of these."""
        for attachment, ranges in list(self._ackable(what)):  # all of it, or nothing
            pending = attachment.pending
            if pending and pending[-1] == ranges[0]:
                pending[-1] = ranges[1]
                ranges = ranges[2:]
            pending.extend(ranges)
            self._soon(attachment)

    def add_up_to(self, message: Message) -> None:
        """Ack everything of the message's partition up to and with it."""
        for attachment, ranges in self._ackable(message):
            attachment.pending[:] = array("q", (0, ranges[-1]))
            self._soon(attachment)

    def _ackable(self, what: Any) -> Iterator[tuple[Attachment, Ranges[int]]]:
        """Attachment and flat ranges of everything that can be acked now. Raises InvalidArgument."""
        for attachment, generation, ranges in self.named(what):
            if generation != attachment.generation:
                self._lapse(attachment, generation, ranges)
            elif attachment.tracks:
                yield attachment, ranges

    def named(self, what: Any) -> Iterator[tuple[Attachment, int, Ranges[int]]]:
        """Attachment, its generation then, and flat ranges. Raises InvalidArgument."""
        if isinstance(what, Batch):
            for delivery, start, stop in what._pieces:
                self._check_own(delivery.attachment, delivery.base_offset)
                yield delivery.attachment, delivery.generation, delivery.ranges(start, stop)
        elif isinstance(what, Received):
            source: Any = what._source
            self._check_own(source.attachment, what.offset)
            one = array("q", (what.offset, what.offset + 1))
            yield source.attachment, source.generation, one
        elif isinstance(what, Message):
            yield from self.named(what.message_id)
        elif isinstance(what, MessageId):
            offset = check_whole(what.offset, "the offset of a message id", 0)
            found = next((a for a in self._attachments if a.topic == what.topic), None)
            if found is None or not found.has_received(offset):
                raise _never_received(what.topic, offset)
            self._check_own(found, offset)
            yield found, found.generation, array("q", (offset, offset + 1))
        elif isinstance(what, Iterable) and not isinstance(what, str | bytes):
            for item in what:
                yield from self.named(item)
        else:
            raise InvalidArgument(
                f"{type(what).__name__} names no message; give a Message, a Batch or a list of messages"
            )

    def _check_own(self, attachment: Attachment, offset: int) -> None:
        """Raise InvalidArgument for what another consumer, or a reader, has received, FailedPrecondition when the
        consumer is closed."""
        if attachment.consumer is not self._owner:
            raise _never_received(attachment.topic, offset)
        if self._is_closed:
            raise FailedPrecondition(
                "the consumer is closed; open another one, which gets again what was not acked"
            )

    def _lapse(self, attachment: Attachment, generation: int, ranges: Ranges[int]) -> None:
        """Note acks of messages of an older subscription as void. They come again, and only a flush says so,
        unless they were acked again by then."""
        if generation < attachment.sought_generation:
            return  # as a seek wants it
        if attachment.tracks:
            void = self._void.setdefault(attachment, [])
            void += ranges
            if len(void) > 4 * ACK_RANGES_MAX:
                # the latest of them will do to say that there are any
                self._void[attachment] = merged(void)[-2 * ACK_RANGES_MAX :]

    def restarted(self, attachment: Attachment, *, sought: bool) -> None:
        """Note what is under way as void: there is a new subscription after a lost session, or a seek."""
        self._end_run(attachment)
        lost = [*attachment.pending, *self._sent.pop(attachment, ())]
        for covered in self._confirming.values():
            lost += covered.pop(attachment, ())
        del attachment.pending[:]
        if sought:
            self._void.pop(attachment, None)
        else:
            self._lose(attachment, lost)

    def _lose(self, attachment: Attachment, lost: Iterable[int]) -> None:
        """Note acks that did not arrive, as far as is known."""
        for places in (self._void, self._lost) if lost else ():
            places[attachment] = merged([*places.get(attachment, ()), *lost])

    def rested(self, attachment: Attachment) -> None:
        """Note what was not sent as void: the consumer left in order, and what was sent arrives."""
        self._end_run(attachment)
        self._lose(attachment, attachment.pending)
        del attachment.pending[:]

    def _end_run(self, attachment: Attachment) -> None:
        """Queue all of the run, if it is of this attachment: that of another may be growing just now."""
        if self._run_delivery is not None and self._run_delivery.attachment is attachment:
            self.run_source = None  # first: what is acked from now on waits for the lock
            self._collect()
            self._run_delivery = None

    def _soon(self, attachment: Attachment) -> None:
        self._queued[attachment] = None
        if len(attachment.pending) > 2 * ACK_RANGES_MAX:
            self.send()
        else:
            self._arm()

    def go_on(self, attachment: Attachment) -> None:
        """Send what was acked while a seek was under way, after all."""
        if attachment.pending:
            self._soon(attachment)

    def on_time(self, now_ns: int) -> None:
        """Send acks that have waited long enough."""
        self.send()

    def send_unless_busy(self) -> None:
        """Send what is queued before a wait, if nothing was sent for a while. An application that gets message
        after message acks as many at a time as come within `ACK_EARLY_NS`."""
        if self._pump.clock.monotonic_ns() - self._sent_ns >= ACK_EARLY_NS:
            self.send()

    def send(self, *, durable: bool = False) -> list[Call]:
        """Send what is queued; with `durable` the calls that tell when all of it is on disk."""
        calls: list[Call] = []
        grown = self._collect()
        if self.due_ns == _NOT_DUE and not durable:
            return calls
        self.due_ns = _NOT_DUE
        self._pump.disarm(self)
        now = self._sent_ns = self._pump.clock.monotonic_ns()
        answered = durable or now >= self._confirm_due_ns
        if answered:
            self._confirm_due_ns = now + ACK_CONFIRM_NS
        for connection, mine in self._concerned(durable=durable).items():
            if connection.is_open:
                ready = [a for a in mine if a.pending and not a.seeks]
                entries = [(a.consumer_id, to_wire(self._take(a))) for a in ready]
                if answered and (entries or durable):
                    calls.append(self._send_answered(connection, entries, mine))
                elif entries:
                    connection.send(Ack(0, entries))
            elif durable:
                for attachment in mine:
                    self.restarted(attachment, sought=False)
        self._look_again(grown)
        return list({**dict.fromkeys(calls), **self._confirming}) if durable else calls

    def send_last(self, attachment: Attachment) -> None:
        """Send what is queued of an attachment that leaves its connection, and wait for the answer."""
        self._end_run(attachment)
        entries = []
        if attachment.pending and not attachment.seeks:
            entries = [(attachment.consumer_id, to_wire(self._take(attachment)))]
        if attachment in self._sent:
            self._send_answered(attachment.connection, entries, [attachment])

    def _concerned(self, *, durable: bool) -> dict[Connection, list[Attachment]]:
        """Attachments with something queued or not confirmed, by connection; all if it must be durable."""
        found: dict[Connection, list[Attachment]] = {}
        for attachment in self._attachments if durable else {**self._queued, **self._sent}:
            found.setdefault(attachment.connection, []).append(attachment)
        # what cannot be sent now stays queued
        self._queued = {a: None for a in self._queued if a.pending and not a.connection.is_open}
        return found

    def _take(self, attachment: Attachment) -> Ranges[int]:
        """Return what is pending, and count it as sent."""
        ranges = attachment.take_pending()
        sent = self._sent.setdefault(attachment, no_ranges())
        if sent and sent[-1] == ranges[0]:
            sent[-1] = ranges[1]
            sent.extend(ranges[2:])
        else:
            sent.extend(ranges)
        if attachment in self._void:
            left = subtracted(merged(self._void[attachment]), ranges.tolist())
            if left:
                self._void[attachment] = left
            else:
                del self._void[attachment]
        return ranges

    def _send_answered(
        self, connection: Connection, entries: list[tuple[int, Wire]], mine: list[Attachment]
    ) -> Call:
        """Send an ACK whose answer confirms it and everything sent before."""
        call = Call(Ack(connection.next_request(), entries), on_done=self._on_answer)
        self._confirming[call] = {a: self._sent.pop(a) for a in mine if a in self._sent}
        return connection.call(call)

    def _on_answer(self, call: Call) -> None:
        covered = self._confirming.pop(call, {})
        if call.error is not None:
            for attachment, ranges in covered.items():
                self._lose(attachment, ranges)

    @property
    def has_void(self) -> bool:
        """Whether acks may have been lost."""
        return bool(self._void)

    def topics_in_doubt(self) -> list[str]:
        """Topics whose acks may have been lost."""
        return list(dict.fromkeys(attachment.parent for attachment in self._void))

    def confirm_below(self, cursors: dict[str, int]) -> None:
        """Count everything below a partition's cursor as acked after all."""
        for attachment, ranges in list(self._void.items()):
            left = subtracted(merged(ranges), [0, max(0, cursors.get(attachment.topic, 0))])
            if left:
                self._void[attachment] = left
            else:
                del self._void[attachment]

    def raise_void(self) -> None:
        """After a flush: raise Unavailable, once, if acks were void and were not repeated."""
        if self._void:
            self._void.clear()
            self._lost.clear()
            raise Unavailable(_ACKS_LOST)

    def give_back(self, what: Any, delay_ms: int, reason: str) -> None:
        """Nack messages at once. Raises InvalidArgument, FailedPrecondition."""
        if reason != "":
            check_text(reason, "reason", bytes_max=_REASON_BYTES_MAX)
        for attachment, generation, ranges in list(self.named(what)):
            if generation == attachment.generation and attachment.connection.is_open:
                entry = [(attachment.consumer_id, ranges.tolist())]
                attachment.connection.send(Nack(entry, delay_ms, reason))

    def covered(self, calls: list[Call]) -> _Covered:
        """Return what the answers to these calls will confirm."""
        return {call: dict(self._confirming.get(call, {})) for call in calls}

    def unsent(self, covered: _Covered) -> dict[str, list[int]]:
        """Return the acks that were lost with a connection, or not answered, by topic."""
        found = {}
        for each, lost in self._lost.items():
            void = merged(self._void.get(each, []))
            if left := subtracted(void, subtracted(void, lost)):
                found[each.topic] = left
        for call, ranges_of in covered.items():
            for each, ranges in ranges_of.items() if call.error or not call.done else ():
                found[each.topic] = merged([*found.get(each.topic, ()), *ranges])
        return found

    def close(self) -> None:
        """Take and send no more acks."""
        self._is_closed = True
        self.run_source = None
        self._looks = 0
        self.due_ns = _NOT_DUE
        self._pump.disarm(self)
