"""A scripted producer: numbered frames on some partitions of one worker, sent again until they are
acked, sometimes though they were acked, sometimes with a gap that must be refused.

As a client must, it keeps to the limits of WELCOME: a bundle that is too large is refused whenever it comes.
"""

from __future__ import annotations

import random
from typing import Any

from danube_fast.clock import MILLISECOND_NS
from danube_fast.errors import InvalidArgument
from danube_fast.frame.bundle import bundle_bytes, sealed_bundle
from danube_fast.frame.pack import encode_frame
from danube_fast.net import protocol as p
from danube_fast.testing.host import SimulatedHost, SimulatedWorker
from danube_fast.testing.loopback import Network
from danube_fast.testing.peer import Peer
from danube_fast.testing.publishing_model import PROBE, Violation, due_of

__all__ = ["ScriptedProducer"]

KEYS = (b"a1", b"a2", b"a3", b"b1", b"b2", None)
WINDOW_FRAMES = 6
OLD_KEPT = 12
BUNDLE_BYTES = 30_000

Messages = list[tuple[bytes, bytes | None]]


class _Lane:
    """One partition."""

    def __init__(self, partition_id: int, name: str) -> None:
        self.partition_id = partition_id
        self.name = name
        self.opened: dict[str, int] | None = None
        self.first = 0
        """Sequence of unacked[0]."""
        self.unacked: list[Messages] = []
        self.posted = 0
        self.ends: set[int] = set()
        """Where frames end that were acked out of order."""
        self.old: list[tuple[int, Messages, int]] = []
        """Acked lately: sequence, messages, offset."""
        self.is_opening = False
        self.epoch = 0


class ScriptedProducer(Peer):
    """One process that publishes."""

    def __init__(
        self, name: str, host: SimulatedHost, network: Network, worker: SimulatedWorker,
        draw: random.Random, partition_ids: list[int], messages_max: int,
    ) -> None:  # fmt: skip
        super().__init__(name, host, network, worker, draw)
        self.partition_ids = partition_ids
        self.lanes: list[_Lane] = []
        self.made = 0
        self.messages_max = messages_max

    repeats = False
    """Often sends again what is on its way."""
    payload_sizes: tuple[int, ...] = (0, 0, 20, 300)
    """Bytes of most messages beside their text."""
    bundle_bytes = BUNDLE_BYTES
    """A bundle of so many bytes takes no more frames."""
    delays_ms = 0
    """Some messages are due later, by so much at most."""
    delays_share = 0.0
    """How many of them."""

    def begin(self) -> None:
        """Begin as a process does."""
        self.lanes = [_Lane(each, self.name) for each in self.partition_ids]
        self.later(self.draw.randrange(50 * MILLISECOND_NS), self._step)

    def forget(self) -> None:
        """Lose what was in the memory of the process."""
        self.lanes = []

    @property
    def is_done(self) -> bool:
        """Everything that was begun is acked."""
        return self.is_alive and not any(lane.unacked for lane in self.lanes)

    def on_open(self) -> None:
        """There is a session (again)."""
        for lane in self.lanes:
            self._open(lane)

    def on_lost(self) -> None:
        """The session is gone, or in doubt."""
        for lane in self.lanes:
            lane.opened, lane.posted, lane.is_opening = None, 0, False
            lane.ends.clear()

    def _open(self, lane: _Lane) -> None:
        if lane.is_opening or not self.is_open:
            return
        lane.is_opening = True
        lane.opened = None

        def done(answer: Any) -> None:
            lane.is_opening = False
            if isinstance(answer, p.Error):
                self.later(200 * MILLISECOND_NS, lambda: self._open(lane))
                return
            lane.opened = answer.value
            lane.posted = 0
            lane.ends.clear()
            expected, epoch = answer.value["next_sequence"], answer.value["producer_epoch"]
            if lane.epoch and epoch != lane.epoch + 1:
                lane.unacked.clear()  # another session used the name: what became of these is not known
            lane.epoch = epoch
            if not lane.unacked or expected < lane.first:  # what was acked may be lost, too
                lane.first = expected
                lane.old.clear()
            # what was acked out of order may have been lost, too
            lane.old = [each for each in lane.old if each[0] < expected]

        self.ask(p.OpenProducerUnnamed(self.next_request(), lane.partition_id, lane.name), done)

    # ------------------------------------------------------------ steps

    def _step(self) -> None:
        self.later(self.draw.randrange(2 * MILLISECOND_NS, 60 * MILLISECOND_NS), self._step)
        if self.is_open:
            self._publish()

    def _new_messages(self, lane: _Lane) -> Messages:
        messages: Messages = []
        room = self.limits["message_bytes_max"]
        for _ in range(self.draw.randrange(1, 6)):
            self.made += 1
            size = self.draw.choice(self.payload_sizes) if self.draw.random() < 0.97 else 9_000
            number = self.host.next_number()
            text = b"%s:%d:%d:" % (self.name.encode(), lane.partition_id, number)
            if self.delays_ms and self.draw.random() < self.delays_share:
                text += b"@%d:" % (
                    self.clock.wall_ns() + self.draw.randrange(self.delays_ms) * MILLISECOND_NS
                )
            if len(text) + size > room:
                size = 0  # its frame alone would be over the limit
            messages.append((text + bytes(size), self.draw.choice(KEYS)))
            room -= len(text) + size
        return messages

    def _publish(self) -> None:
        frames: list[tuple[int, Any]] = []
        sent: list[tuple[_Lane, int, Messages]] = []
        for lane in self.lanes:
            if lane.opened is None or self.draw.random() < 0.3:
                continue
            if self.repeats and lane.posted and self.draw.random() < 0.5:
                self._repeat(lane)
                continue
            if not self.is_calm and self.draw.random() < 0.06:
                self._trick(lane)
                continue
            may_make = len(lane.unacked) < WINDOW_FRAMES and not self.is_calm
            if lane.posted == len(lane.unacked) and may_make and self.made < self.messages_max:
                lane.unacked.append(self._new_messages(lane))
            sequence = lane.first + sum(map(len, lane.unacked[: lane.posted]))
            for messages in lane.unacked[lane.posted :]:
                sizes = [len(each) for _, each in frames]
                if sum(sizes) > self.bundle_bytes:
                    break
                frame = self._frame(lane, sequence, messages)
                if frames and bundle_bytes([*sizes, len(frame)]) > self.limits["bundle_bytes_max"]:
                    break
                frames.append((lane.partition_id, frame))
                sequence += len(messages)
                sent.append((lane, sequence, messages))
                lane.posted += 1
        if not frames:
            return
        life, opened = self.life, [lane.opened for lane, _, _ in sent]

        def published(outcome: Any) -> None:
            if isinstance(outcome, p.Error):
                outcome = [outcome.code, 0]
            for place, (lane, end, messages) in enumerate(sent):
                if life == self.life and lane.opened is opened[place]:
                    at = 2 * place if len(outcome) > 2 * place else 0
                    self._published(lane, end, messages, outcome[at], outcome[at + 1])

        request = p.Publish(self.next_request())
        self.ask(request, published, bytes(sealed_bundle(frames)))

    def _frame(self, lane: _Lane, sequence: int, messages: Messages) -> bytearray:
        opened = lane.opened or {}
        keys = [key for _, key in messages]
        due = [due_of(payload) or None for payload, _ in messages]
        return encode_frame(
            [payload for payload, _ in messages],
            keys=keys if any(key is not None for key in keys) else None,
            deliver_at=due if any(due) else None,
            producer_id=opened["producer_id"],
            base_sequence=sequence,
            producer_epoch=opened["producer_epoch"],
            publish_time_ns=self.clock.wall_ns(),
        )

    def _published(
        self, lane: _Lane, end: int, messages: Messages, status: int, offset: int
    ) -> None:
        if status in (p.Status.OK, p.Status.DUPLICATE):
            lane.ends.add(end)
            lane.old.append((end - len(messages), messages, offset))
            del lane.old[:-OLD_KEPT]
            while lane.unacked and lane.first + len(lane.unacked[0]) in lane.ends:
                lane.first += len(lane.unacked.pop(0))
                lane.ends.discard(lane.first)
                lane.posted = max(0, lane.posted - 1)
            return
        if status == 6:
            raise Violation(f"{self.name}: what was sent lately is too old to be known")
        if status == InvalidArgument.code:
            raise Violation(f"{self.name}: refused whenever it is sent again")
        if status in (p.Status.FENCED, p.Status.NOT_OWNER):
            lane.opened = None
            self.later(100 * MILLISECOND_NS, lambda: self._open(lane))
        if status == p.Status.OUT_OF_SEQUENCE and lane.unacked and messages is lane.unacked[0]:
            lane.opened = None  # nothing before it is missing: it is not open
            self.later(100 * MILLISECOND_NS, lambda: self._open(lane))
        lane.posted = 0  # from the first that is not acked on, again

    # ------------------------------------------------------------ tricks

    def _repeat(self, lane: _Lane) -> None:
        """A frame that is on its way, once more: its ack is worth no less than the first one's."""
        place = self.draw.randrange(lane.posted)
        sequence = lane.first + sum(map(len, lane.unacked[:place]))
        frame = self._frame(lane, sequence, lane.unacked[place])
        bundle = bytes(sealed_bundle([(lane.partition_id, frame)]))
        self.ask(p.Publish(self.next_request()), lambda outcome: None, bundle)

    def _trick(self, lane: _Lane) -> None:
        """A frame that was acked, once more; or one that must be refused, as one before it is missing."""
        if lane.posted and self.draw.random() < 0.4:
            self._repeat(lane)
            return
        if lane.old and self.draw.random() < 0.7:
            sequence, messages, offset = self.draw.choice(lane.old)

            def again(outcome: Any) -> None:
                if isinstance(outcome, list) and outcome[0] == 1 and outcome[1] != offset:
                    raise Violation(f"{self.name}: {sequence} stood at {offset}, now {outcome}")

            frame = self._frame(lane, sequence, messages)
        else:
            ahead = lane.first + sum(map(len, lane.unacked)) + self.draw.randrange(1, 9)
            frame = self._frame(lane, ahead, [(PROBE + b" %d" % self.next_request(), b"a1")])

            def again(outcome: Any) -> None:
                """The model knows what is right."""

        bundle = bytes(sealed_bundle([(lane.partition_id, frame)]))
        self.ask(p.Publish(self.next_request()), again, bundle)
