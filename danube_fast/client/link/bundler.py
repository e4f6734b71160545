"""Bundles: frames of many lanes that go out together over one connection.

    lanes with something open --linger over, or an answer came--> frames --> one PUBLISH, one bundle

A batch that lingers while much of its ack class is unanswered is held until the newest of those bundles is
answered, and longer the more frames they have: the more there is to do, the more goes into one frame and one
bundle, and no application has to choose a linger. Bundles that are sent meanwhile do not put it off. A thread
that sends keeps the time itself; the timer thread only steps in when it stops sending.

All methods are called under the pump's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Protocol

import msgspec

from danube_fast.client.link.buffers import FRAME_AT, Sender, Sending
from danube_fast.client.link.joint import join
from danube_fast.client.link.pump import Pump
from danube_fast.client.values.limits import (
    ACK_TICK_NS,
    ANSWER_TICK_NS,
    BUNDLE_BYTES_MAX,
    BUSY_BUNDLES,
    BUSY_FRAMES,
    DRAIN_NS,
    FOREVER_NS,
    GATHER_NS_MAX,
    GATHER_NS_PER_FRAME,
)
from danube_fast.frame.bundle import sealed_bundle
from danube_fast.frame.layout import BUNDLE_ENTRY_BYTES, BUNDLE_HEADER_BYTES
from danube_fast.net.protocol import Publish, Status, encode

__all__ = ["Bundler"]

_SCAN_MAX = 64
"""Of the unanswered bundles only so many, the newest ones, are scanned for what a batch has to wait for."""
_DUPLICATE = int(Status.DUPLICATE)
_GATHERED = -1
"""Request number of a frame that goes out as soon as all are gathered."""


class Channel(Protocol):
    """The part of a connection that sends bundles."""

    pump: Pump

    def next_request(self) -> int:
        """Return a request number that was not used before."""

    def beat_soon(self) -> None:
        """Beat in the quick rhythm from now on."""

    def limit(self, name: str, default: int) -> int:
        """Return a limit of WELCOME."""

    def reset(self) -> None:
        """Begin anew after an interrupt: every lane sends then what it has."""

    def send_bundle(self, command: bytes, bundle: memoryview) -> None:
        """Send an encoded PUBLISH and its bundle."""


class _Held(msgspec.Struct, eq=False):
    """Lanes of one ack class whose open batches go when `request` is answered and `due_ns` is over."""

    request: int
    due_ns: int
    lanes: dict[Sender, None]


class Bundler:
    """Lanes that wait, frames that are gathered, and bundles that are not answered yet."""

    def __init__(self, connection: Channel) -> None:
        self._connection = connection
        self._pump = connection.pump
        self._lingering: dict[Sender, None] = {}
        self._held: dict[str, _Held] = {}
        """What waits for an answer, by ack class."""
        self._acked: dict[Sender, None] = {}
        """Lanes whose acks let go what is open, once all answers are read."""
        self._due_ns = FOREVER_NS
        """When the first linger is over."""
        self._gathered: dict[Sending, None] | None = None
        self._drained_ns = 0
        self.look_ns = 0
        """From that monotonic time on a thread that sends calls `keep_time`."""
        self.on_way: dict[int, list[Sending]] = {}
        """Frames of each unanswered PUBLISH, by request."""

    def is_busy(self, ack_class: str) -> bool:
        """Whether what may wait should wait for an answer."""
        return ack_class in self._held or self._newest(ack_class) is not None

    def _newest(self, ack_class: str) -> int | None:
        """Return the request of the newest unanswered bundle of a class, or None if little of that class is
        unanswered."""
        newest, bundles = None, 0
        for request, sendings in islice(reversed(self.on_way.items()), _SCAN_MAX):
            if sendings[0].lane.ack_class == ack_class:
                newest = request if newest is None else newest
                bundles += 1
                if bundles >= BUSY_BUNDLES or len(sendings) >= BUSY_FRAMES:
                    return newest
        return None

    # ------------------------------------------------------------ lanes that wait

    def linger(self, lane: Sender, now_ns: int, linger_ns: int) -> None:
        """Send the open batch of `lane`, which has just begun, when it has lingered."""
        if self._hold(lane):
            return
        self._lingering[lane] = None
        if now_ns + linger_ns < self._due_ns:
            self._due_ns = now_ns + linger_ns
            self.look_ns = min(self.look_ns, self._due_ns)
            self.look_for_answers()

    def _arm(self, tick_ns: int) -> None:
        """Let the timer thread look for answers that soon, and for a linger that is over."""
        self._pump.arm(self, min(self._due_ns, self._pump.clock.monotonic_ns() + tick_ns))

    def _hold(self, lane: Sender) -> bool:
        """Hold a lane until an answer comes and its time is over, if much of its class is unanswered; whether it is
        held. The timer thread looks for the answer if no other thread does."""
        held = self._held.get(lane.ack_class)
        if held is None:
            newest = self._newest(lane.ack_class)
            if newest is None:
                return False
            self._arm(ANSWER_TICK_NS)
            due_ns = self._pump.clock.monotonic_ns() + self._gather_ns(lane.ack_class)
            held = self._held[lane.ack_class] = _Held(newest, due_ns, {})
        held.lanes[lane] = None
        return True

    def _gather_ns(self, ack_class: str) -> int:
        """Return how long to gather for the frames of many lanes that are on the way."""
        frames = 0
        for sendings in islice(reversed(self.on_way.values()), _SCAN_MAX):
            if len(sendings) > 1 and sendings[0].lane.ack_class == ack_class:
                frames += len(sendings)
        return min(frames * GATHER_NS_PER_FRAME, GATHER_NS_MAX)

    def _hold_or_return(self, lanes: Iterable[Sender], released: set[str]) -> list[Sender]:
        """Hold those of `lanes` that are to wait for an answer, and return the others. Classes in `released` do not
        wait; a class that need not wait is added."""
        found = []
        for lane in lanes:
            if lane.ack_class in released or not self._hold(lane):
                released.add(lane.ack_class)
                found.append(lane)
        return found

    @property
    def _waits(self) -> bool:
        """Whether an open batch waits for an answer or a linger."""
        return bool(self._held or self._lingering)

    def keep_time(self, now_ns: int) -> None:
        """Look for answers now and then, and send what has lingered or was held for long enough; called by threads
        that send."""
        if now_ns - self._drained_ns >= DRAIN_NS:
            self._drained_ns = now_ns
            self._pump.try_drain()
        self._send_due(now_ns)
        self.look_ns = min(self._due_ns, self._drained_ns + DRAIN_NS)

    def _send_due(self, now_ns: int) -> None:
        """Send what was held for long enough, then what has lingered."""
        self.answered()
        if now_ns >= self._due_ns:
            self._send_all(self._take_lingered)

    def forget(self, lane: Sender) -> None:
        """Drop a lane that leaves this connection."""
        self._lingering.pop(lane, None)
        for held in self._held.values():
            held.lanes.pop(lane, None)

    def _take_lingering(self) -> dict[Sender, None]:
        lingering, self._lingering = self._lingering, {}
        self._due_ns = FOREVER_NS
        return lingering

    def _take_lingered(self) -> list[Sender]:
        """Take what has lingered, but for what is held for an answer."""
        return self._hold_or_return(self._take_lingering(), set())

    def _send_all(self, take: Callable[[], Iterable[Sender]]) -> None:
        """Send what is open in the lanes that `take` takes out, in as few bundles as may be."""
        joint: dict[str, list[Sender]] = {}
        try:
            lanes = take()
            gathers = self.gather()
            try:
                for lane in lanes:
                    if lane.joins:
                        joint.setdefault(lane.ack_class, []).append(lane)
                    else:
                        lane.push()
            finally:
                if gathers:
                    self.release()
            for some in joint.values():
                self._send_joint(some)
        except BaseException:
            self._connection.reset()
            raise

    def _send_joint(self, lanes: list[Sender]) -> None:
        clock = self._pump.clock
        while lanes := self._packable(lanes):
            sendings = join(lanes, self._bundle_bytes_max, clock.wall_ns())
            if not sendings:
                lanes.pop(0).push()
                continue
            now_ns = clock.monotonic_ns()
            for sending in sendings:
                sending.lane.packed(sending, now_ns)
            end = sendings[-1].frame_at + sendings[-1].frame_bytes
            self._publish(sendings, sendings[0].buffer.view[:end])
            del lanes[: len(sendings)]

    @staticmethod
    def _packable(lanes: list[Sender]) -> list[Sender]:
        """Return the lanes for which the window has room; the others wait for it (`ProducerState.starved`)."""
        found = []
        for lane in lanes:
            if lane.can_pack:
                found.append(lane)
            else:
                lane.push()  # sends nothing, and notes that it waits
        return found

    def push_acked(self, lane: Sender) -> None:
        """Send what is open in a lane, now or with those of the other lanes whose answers are being read."""
        if self._gathered is None:
            lane.push()
        else:
            self._acked[lane] = None

    def answered(self) -> None:
        """Send what waited for the answers that were just read."""
        if self._acked or self._waits:
            self._send_all(self._take_answered)

    def _take_answered(self) -> dict[Sender, None]:
        lanes: dict[Sender, None] = {}
        now_ns = self._pump.clock.monotonic_ns()
        released = {
            name
            for name, held in self._held.items()
            if now_ns >= held.due_ns and held.request not in self.on_way
        }
        for ack_class in released:
            lanes.update(self._held.pop(ack_class).lanes)
        acked, self._acked = self._acked, {}
        lanes.update((lane, None) for lane in acked if not lane.joins)
        # The others may wait, so that lanes which went in different bundles come together.
        plain = [lane for lane in acked if lane.joins]
        lanes.update(dict.fromkeys(self._hold_or_return(plain, released)))
        if self._lingering and (lanes or not self.on_way):
            lanes.update(self._take_lingering())
        return lanes

    def on_time(self, now_ns: int) -> None:
        """Send batches whose linger is over, and those that were held for long enough. The sockets have just
        been read."""
        self._send_due(now_ns)
        if self.on_way or self._held:
            self.look_for_answers()

    # ------------------------------------------------------------ frames that go out

    def gather(self) -> bool:
        """Keep frames back until `release`. False if they are kept back already: then another caller
        releases them."""
        if self._gathered is not None:
            return False
        self._gathered = {}
        return True

    def release(self) -> None:
        """Send what was gathered, in as few bundles as may be."""
        gathered, self._gathered = self._gathered, None
        if not gathered:
            return
        # Grouped by what their acks wait for: none shall wait for the sync of another.
        groups: dict[str, list[Sending]] = {}
        for sending in gathered:
            if sending.request == _GATHERED:  # and not given up since
                groups.setdefault(sending.lane.ack_class, []).append(sending)
        for group in groups.values():
            self._publish_all(group)

    def _publish_all(self, sendings: list[Sending]) -> None:
        most = self._bundle_bytes_max
        some: list[Sending] = []
        size = BUNDLE_HEADER_BYTES
        for sending in sendings:
            byte_count = BUNDLE_ENTRY_BYTES + sending.frame_bytes
            if some and size + byte_count > most:
                self._publish(some, self._bundle(some))
                some, size = [], BUNDLE_HEADER_BYTES
            some.append(sending)
            size += byte_count
        if some:
            self._publish(some, self._bundle(some))

    def send(self, sending: Sending) -> None:
        """Send a frame, now or with the others that are gathered."""
        if self._gathered is None:
            self._publish([sending], self._bundle([sending]))
        else:
            sending.request = _GATHERED
            self._gathered[sending] = None

    @property
    def _bundle_bytes_max(self) -> int:
        return min(BUNDLE_BYTES_MAX, self._connection.limit("bundle_bytes_max", BUNDLE_BYTES_MAX))

    def _bundle(self, sendings: list[Sending]) -> memoryview:
        """Return the bundle of some frames, wherever these lie."""
        if len(sendings) == 1 and sendings[0].frame_at == FRAME_AT:
            (sending,) = sendings
            return sending.buffer.bundle(sending.lane.partition_id, sending.frame_bytes)
        frames = [(each.lane.partition_id, each.frame()) for each in sendings]
        return memoryview(sealed_bundle(frames))

    def _publish(self, sendings: list[Sending], bundle: memoryview) -> None:
        connection = self._connection
        request = connection.next_request()
        connection.beat_soon()
        if not self.on_way:
            self.look_for_answers()
        self.on_way[request] = sendings
        for sending in sendings:
            sending.request = request
        connection.send_bundle(encode(Publish(request)), bundle)

    def look_for_answers(self) -> None:
        """Let the timer thread look for answers now and then, if no other thread does."""
        self._arm(ANSWER_TICK_NS if self._held else ACK_TICK_NS)

    def settle(self, entries: list[tuple[int, list[int]]], texts: dict[int, str]) -> None:
        """Hand frames their answers, as PUBLISHED has them."""
        if len(entries) == 1 and not texts and not self._waits and len(entries[0][1]) == 2:
            request, (status, offset) = entries[0]
            self.settle_one(request, status, offset)
            return
        gathers = self.gather()  # acks let open batches go: in as few bundles as may be
        try:
            for request, outcome in entries:
                self.on_published(request, outcome, texts)
        finally:
            if gathers:
                self.release()
        self.answered()

    def settle_one(self, request: int, status: int, offset: int) -> None:
        """Hand the frame of a PUBLISH with one its answer."""
        if self._waits:
            self.settle([(request, [status, offset])], {})
            return
        for sending in self.on_way.pop(request, ()):
            if sending.request != request:
                continue
            if status <= _DUPLICATE:
                sending.lane.acked(sending, offset)
            else:
                sending.lane.answered(sending, status, offset, "")

    def on_published(self, request: int, outcome: list[int], texts: dict[int, str]) -> None:
        """Hand each frame of one PUBLISH its answer: status and offset."""
        sendings = self.on_way.pop(request, [])
        if len(outcome) == 2 * len(sendings) and not any(outcome[::2]):  # all are OK, which is 0
            for sending, offset in zip(sendings, outcome[1::2], strict=True):
                if sending.request == request:
                    sending.lane.acked(sending, offset)
            return
        for index, sending in enumerate(sendings):
            # a bundle that was refused as a whole has one outcome
            place = 2 * index if len(outcome) > 2 * index else 0
            status, offset = outcome[place], outcome[place + 1]
            if sending.request == request:
                sending.lane.answered(sending, status, offset, texts.get(status, ""))

    def prune(self) -> None:
        """Forget bundles whose frames do not wait for that answer any more."""
        self.on_way = {
            request: sendings
            for request, sendings in self.on_way.items()
            if any(sending.request == request for sending in sendings)
        }

    def clear(self) -> None:
        """Forget what was on its way in the session before, and what waited: every lane sends anew."""
        self._held.clear()
        self._lingering.clear()
        self._acked.clear()
        self._gathered = None  # which an interrupt may have left
        self._due_ns = FOREVER_NS
        self.on_way.clear()
        self._pump.disarm(self)
