"""State that the lanes of one producer share: its name and options, the window, errors for the next call.

A lane reports here what was sent, acked or given up. What went wrong is kept and raised by the next
send, flush or close, naming the first and the last message concerned.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from danube_fast.client.link.answers import Ticket
from danube_fast.client.link.buffers import Buffers, Sender, Sending
from danube_fast.client.produce.outgoing import Outgoing, Packer
from danube_fast.client.topics.routes import Routes, Topic
from danube_fast.client.values.limits import CLIENT_WINDOW_BYTES
from danube_fast.client.values.message import MessageId, new_id
from danube_fast.client.values.options import ProducerOptions
from danube_fast.errors import DanubeError

__all__ = ["ProducerState", "Remedies"]

_ERRORS_MAX = 1000
"""Distinct errors kept for the next call; they are raised as one."""


class Remedies(NamedTuple):
    """Remedies that the errors of a producer name."""

    unacked: str = "publish it again under the same producer name, or raise timeout="
    no_room: str = "send more slowly, or raise window_bytes_max= or timeout="
    not_flushed: str = "flush again to wait on"


class ProducerState:
    """State of one producer, without its lanes. Under the pump's lock."""

    remedies: ClassVar[Remedies] = Remedies()

    __slots__ = (
        "_errors", "_last", "_refusal", "_route", "_routes", "_window_bytes", "ack_class", "acked_messages", "name",
        "packer", "pump", "starved", "timeout_ns", "unacked_bytes",
    )  # fmt: skip

    def __init__(
        self, routes: Routes, buffers: Buffers, route: Topic, name: str, options: ProducerOptions
    ) -> None:
        self.name = name
        self.pump = routes.pump
        self.ack_class = f"{route.dispatch} {route.durability}"
        """Frames with the same are acked at the same moment."""
        self.timeout_ns = options.timeout_ns
        self.packer = Packer(buffers.pool(options.batch_bytes), options.codec)
        self.unacked_bytes = 0
        self.starved: dict[Sender, None] = {}
        """Lanes with nothing unacked for whose open messages the window had no room."""
        self.acked_messages = 0
        self._routes = routes
        self._route = route
        self._window_bytes = options.window_bytes
        self._last: MessageId | None = None
        """Of the message that was acked last."""
        self._errors: list[tuple[str, str, int, DanubeError]] = []
        self._refusal: DanubeError | None = None
        """Set once no further message can be taken: closed, or forked."""

    def changed(self) -> None:
        """Follow a lane that has opened or failed, or an error for the next call."""

    def keep_to_limits(self) -> None:
        """Lanes: pack as the brokers want it that have opened them so far."""

    @property
    def window_open(self) -> bool:
        """Whether the unacked bytes leave room for one more frame. With nothing unacked one may always be
        sent: topics that are refused must not stop the others."""
        own, most = self.unacked_bytes, self._window_bytes
        return not own or (own < most and self.pump.unacked_bytes < max(CLIENT_WINDOW_BYTES, most))

    # ------------------------------------------------------------ what lanes report

    def sent(self, frame_bytes: int) -> None:
        """Lane: count a frame that was packed."""
        self.unacked_bytes += frame_bytes
        self.pump.unacked_bytes += frame_bytes

    def completed(self, topic: str, sending: Sending) -> None:
        """Lane: release a frame that is acked or given up, and tell its callbacks."""
        self.unacked_bytes -= sending.frame_bytes
        self.pump.unacked_bytes -= sending.frame_bytes
        self.packer.pool.give_back(sending.buffer)
        if sending.error is None:
            self._last = new_id((topic, sending.offset + sending.message_count - 1))
            self.acked_messages += sending.message_count
        if sending.error is not None or sending.callbacks:
            self._tell_all(topic, sending)
        if self.starved and self.window_open:
            self._feed(sending.lane)

    def _tell_all(self, topic: str, sending: Sending) -> None:
        """Tell the callbacks of a frame, and keep an error that none of them hears."""
        error, count = sending.error, sending.message_count
        last = self._last if error is None else None
        told = 0
        for index, call in sending.callbacks or ():
            done = last
            if last is not None and index != count - 1:
                done = new_id((topic, sending.offset + index))
            told += self._tell(call, done, error)
        if error is not None and told < count:
            self._note_error(topic, sending.base_sequence, count, error)

    def _feed(self, acked: Sender) -> None:
        """Let lanes send that no ack of their own lets go, unlike `acked`."""
        for lane in tuple(self.starved):
            del self.starved[lane]
            if lane is not acked:
                lane.push_soon()

    def batch_dropped(self, topic: str, sequence: int, batch: Outgoing, error: DanubeError) -> None:
        """Lane: give messages up that were never packed, and would have had numbers from `sequence` on."""
        self.changed()
        told = sum(self._tell(call, None, error) for _, call in batch.callbacks or ())
        if told < len(batch.payloads):
            self._note_error(topic, sequence, len(batch.payloads), error)

    def _tell(self, call: Any, message_id: MessageId | None, error: DanubeError | None) -> int:
        """Tell a callback or a ticket of one message; 1 if the error need not be raised then."""
        if isinstance(call, Ticket):
            call.complete(message_id, error)
            return 1
        self.pump.callbacks.append((call, (message_id, error)))
        return 0

    def lost(self) -> None:
        """Lane: look the topic up again, as the worker does not have the partition."""
        self._routes.refresh(self._route)

    # ------------------------------------------------------------ errors

    def _note_error(self, topic: str, sequence: int, count: int, error: DanubeError) -> None:
        first, last = (f"{topic} sequence {n}" for n in (sequence, sequence + count - 1))
        if self._errors and type(self._errors[-1][3]) is type(error):
            begin, _, before, kept = self._errors[-1]
            self._errors[-1] = (begin, last, before + count, kept)
        elif len(self._errors) < _ERRORS_MAX:
            self._errors.append((first, last, count, error))
        self.changed()

    def _check_usable(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def _raise_errors(self) -> None:
        self._check_usable()
        if self._errors:
            first, last, _, error = self._errors[0]
            count = sum(entry[2] for entry in self._errors)
            last = self._errors[-1][1]
            self._errors.clear()
            self.changed()
            raise type(error)(
                f"{count} messages were not accepted, first {first}, last {last}: {error}"
            )
