"""A scripted consumer: takes what it gets, and acks it, or does not; by its temper.

good     acks soon, one by one, in ranges, in any order
lazy     acks some, late, and extends others
nacker   gives back, with delay and without
silent   takes, beats, and never says anything
thief    acks what others hold, too
"""

from __future__ import annotations

import random
from typing import Any

from danube_fast.clock import MILLISECOND_NS
from danube_fast.errors import FailedPrecondition
from danube_fast.frame.bundle import bundle_entries
from danube_fast.frame.view import FrameView
from danube_fast.net import protocol as p
from danube_fast.testing.host import SimulatedHost, SimulatedWorker
from danube_fast.testing.loopback import Network
from danube_fast.testing.peer import Peer

__all__ = ["TEMPERS", "ScriptedConsumer"]

TEMPERS = ("good", "good", "good", "lazy", "lazy", "nacker", "silent", "thief")


class ScriptedConsumer(Peer):
    """One process with a consumer on every partition of a subscription that its worker has."""

    def __init__(
        self, name: str, host: SimulatedHost, network: Network, worker: SimulatedWorker,
        draw: random.Random, *, partition_ids: list[int], subscription: str, kind: str, temper: str,
        options: dict[str, Any], permits: int, permits_bytes: int,
    ) -> None:  # fmt: skip
        super().__init__(name, host, network, worker, draw)
        self.partition_ids = partition_ids
        self.subscription = subscription
        self.kind = kind
        self.temper = temper
        self.options = options
        self.permits = permits, permits_bytes
        self.in_hand: dict[int, list[tuple[int, int]]] = {}
        """By consumer id: offsets that were neither acked nor given back."""
        self.reports = draw.random() < 0.6
        """Heartbeats say how far it is; at random, as it has no application."""
        self._frames: dict[int, list[list[int]]] = {}
        """By consumer id: offsets of every frame."""
        self._taken_until: dict[int, tuple[int, int]] = {}
        self._ids: dict[int, int] = {}
        """Consumer id -> partition."""
        self._next_id = 0
        self._taken = self._taken_bytes = 0
        self._place: str | int = "earliest"

    def begin(self) -> None:
        """Begin as a process does."""
        self.later(self.draw.randrange(100 * MILLISECOND_NS), self._step)

    def forget(self) -> None:
        """Lose what was in the memory of the process."""
        self.in_hand.clear()
        self._ids.clear()
        self._frames.clear()
        self._taken_until.clear()

    on_lost = forget

    def taken(self) -> list[tuple[int, int, int]]:
        """Report with a heartbeat how far the application is."""
        return [(each, *place) for each, place in self._taken_until.items() if each in self._ids]

    def _take(self) -> None:
        """Be somewhere further on in what came."""
        for consumer_id, frames in self._frames.items():
            number, _ = self._taken_until.get(consumer_id, (0, 0))
            number = self.draw.randrange(number, len(frames) + 1)
            offset = self.draw.choice(frames[number]) if number < len(frames) else 0
            place = max(self._taken_until.get(consumer_id, (0, 0)), (number, offset))
            self._taken_until[consumer_id] = place

    def on_open(self) -> None:
        """There is a session (again)."""
        self._taken = self._taken_bytes = 0
        messages, byte_count = self.permits
        self.send(p.Flow(1, byte_count, messages))
        for partition_id in self.partition_ids:
            self._subscribe(partition_id)

    def _subscribe(self, partition_id: int) -> None:
        if not self.is_open or partition_id in self._ids.values():
            return
        self._next_id += 1
        consumer_id = self._next_id
        self._ids[consumer_id] = partition_id
        self.in_hand[consumer_id] = []
        self._frames[consumer_id] = []

        def done(answer: Any) -> None:
            if isinstance(answer, p.Error):
                self._ids.pop(consumer_id, None)
                self.in_hand.pop(consumer_id, None)
                pause_ms = 300 if answer.code == FailedPrecondition.code else 100
                self.later(pause_ms * MILLISECOND_NS, lambda: self._subscribe(partition_id))

        self.ask(
            p.Subscribe(
                self.next_request(), consumer_id, 1, partition_id, self.subscription, self.kind,
                self._place, self.name, {**self.options, "reports_taken": self.reports},
            ),
            done,
        )  # fmt: skip

    def on_event(self, command: p.ConsumerEvent) -> None:
        """The worker says something of a consumer."""
        if command.kind == p.EventKind.CLOSED.value:
            partition_id = self._ids.pop(command.consumer_id, None)
            self.in_hand.pop(command.consumer_id, None)
            if partition_id is not None:
                self.later(200 * MILLISECOND_NS, lambda: self._subscribe(partition_id))

    def on_deliver(self, command: p.Deliver, bundles: list[bytes]) -> None:
        """Messages came."""
        ids = iter(command.consumer_ids)
        for bundle in bundles:
            for _, start, _ in bundle_entries(bundle):
                consumer_id = next(ids)
                view = FrameView(bundle, start)
                offsets = view.offsets().tolist()
                self._taken += len(offsets)
                self._taken_bytes += view.frame_bytes
                if consumer_id in self._frames:
                    self._frames[consumer_id].append(offsets)
                if consumer_id in self.in_hand:
                    now_ns = self.clock.now_ns
                    self.in_hand[consumer_id] += [(offset, now_ns) for offset in offsets]

    # ------------------------------------------------------------ steps

    def _step(self) -> None:
        self.later(self.draw.randrange(3 * MILLISECOND_NS, 80 * MILLISECOND_NS), self._step)
        if not self.is_open:
            return
        if self._taken and self.temper != "silent":
            self.send(p.Flow(1, self._taken_bytes, self._taken))
            self._taken = self._taken_bytes = 0
        if self.reports and self.draw.random() < 0.3:
            self._take()
        temper = "good" if self.is_calm and self.temper != "silent" else self.temper
        draw = self.draw
        if temper == "good":
            self._ack(1.0 if self.is_calm else 0.8)
        elif temper == "lazy":
            if draw.random() < 0.3:
                self._ack(0.5)
            elif draw.random() < 0.2:
                self._extend()
        elif temper == "nacker":
            if draw.random() < 0.4:
                self._nack()
            else:
                self._ack(0.6)
        elif temper == "thief":
            self._steal()
            self._ack(0.7)
        if not self.is_calm and temper != "silent" and draw.random() < 0.01:
            self._leave_or_seek()

    def _pick(self, share: float) -> list[tuple[int, list[int]]]:
        """Some of what is in hand, as flat ranges by consumer; it is not in hand any more."""
        entries = []
        for consumer_id, hand in self.in_hand.items():
            picked = [each for each in hand if share >= 1 or self.draw.random() < share]
            if not picked:
                continue
            chosen = {offset for offset, _ in picked}
            self.in_hand[consumer_id] = [each for each in hand if each[0] not in chosen]
            offsets = sorted(chosen)
            if self.draw.random() < 0.3:
                self.draw.shuffle(offsets)
            entries.append((consumer_id, _ranges(offsets)))
        return entries

    def _ack(self, share: float) -> None:
        entries = self._pick(share)
        if not entries:
            return
        if self.is_calm or self.draw.random() < 0.4:
            self.ask(p.Ack(self.next_request(), entries), lambda answer: None)
        else:
            self.send(p.Ack(0, entries))

    def _nack(self) -> None:
        entries = self._pick(0.4)
        if entries:
            delay_ms = self.draw.choice((-1, -1, 0, 50, 400, 1500))
            self.send(p.Nack(entries, delay_ms, "the script says so"))

    def _extend(self) -> None:
        entries = []
        for consumer_id, hand in self.in_hand.items():
            picked = sorted({offset for offset, _ in hand if self.draw.random() < 0.5})
            if picked:
                entries.append((consumer_id, _ranges(picked)))
        if entries:
            self.send(p.Extend(entries, self.draw.choice((0, 0, 300, 4000))))

    def _steal(self) -> None:
        """Ack a range that others may hold parts of, but not what we hold ourselves."""
        entries = []
        for consumer_id, hand in self.in_hand.items():
            mine = {offset for offset, _ in hand}
            top = max(mine, default=0) + 20
            pairs = _ranges([at for at in range(max(0, top - 40), top) if at not in mine])
            if pairs:
                entries.append((consumer_id, pairs))
        if entries:
            self.send(p.Ack(0, entries))

    def leave(self) -> None:
        """Close one of its consumers, one that holds something if there is any; it comes back."""
        holding = [each for each in self._ids if self.in_hand.get(each)] or list(self._ids)
        if self.is_open and holding:
            self._leave(self.draw.choice(holding))

    def _leave(self, consumer_id: int) -> None:
        partition_id = self._ids.pop(consumer_id)
        self.in_hand.pop(consumer_id, None)
        taken = self._taken_until.get(consumer_id, (0, 0)) if self.reports else None
        self.ask(p.CloseConsumer(self.next_request(), consumer_id, taken), lambda answer: None)
        pause_ns = self.draw.randrange(1 * MILLISECOND_NS, 1500 * MILLISECOND_NS)
        self.later(pause_ns, lambda: self._subscribe(partition_id))

    def _leave_or_seek(self) -> None:
        if not self._ids:
            return
        consumer_id = self.draw.choice(list(self._ids))
        if self.draw.random() < 0.6:
            self._leave(consumer_id)
        elif self.draw.random() < 0.5:
            place: str | int = self.draw.randrange(20)
            place = place if self.draw.random() < 0.5 else "earliest"

            def sought(answer: Any) -> None:
                if isinstance(answer, p.Result) and consumer_id in self.in_hand:
                    self.in_hand[consumer_id] = []

            self.ask(p.Seek(self.next_request(), consumer_id, place), sought)


def _ranges(offsets: list[int]) -> list[int]:
    """Offsets as flat [start, end) pairs, in their order."""
    pairs: list[int] = []
    for offset in offsets:
        if pairs and pairs[-1] == offset:
            pairs[-1] = offset + 1
        else:
            pairs += (offset, offset + 1)
    return pairs
