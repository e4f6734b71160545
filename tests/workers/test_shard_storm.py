"""Random work for a shard worker whose disk fails and who is killed, against a simple model.

Held against everything: an acked message of a logged topic is there, once, at the offset that was
told; an offset never stands for two messages; what was acked durably by a consumer does not come again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from danube_fast.broker import messages as m
from danube_fast.errors import ResourceExhausted
from danube_fast.frame.bundle import sealed_bundle
from tests.workers.shard_faults import HeldSyncs
from tests.workers.shard_rig import FakeRequest, RawClient, Rig

LOGS = 2
DURABILITIES = ("fsync", "os", "memory", "fsync")
STEPS = 250
BUNDLE_BYTES = 1 << 20
SUBSCRIPTION = "s"


class Lane:
    """One producer on one partition, which resends in order what was refused."""

    def __init__(self, partition_id: int, durability: str) -> None:
        self.partition_id = partition_id
        self.durability = durability
        self.opened: dict[str, int] = {}
        self.first = 0
        """Sequence of unacked[0]."""
        self.unacked: list[list[bytes]] = []
        """Payloads of the frames that were not acked, oldest first."""
        self.posted = 0
        """How many of them are under way."""
        self.ends: set[int] = set()
        """Where acked frames end, as sequences."""
        self.generation = 0
        self.made = 0
        self.change: FakeRequest | None = None
        """Of the durability, under way."""
        self.was_memory = False
        """Since the worker's start, so that it may forget what this lane sent."""

    def frames(self, draw: random.Random) -> list[list[bytes]]:
        """Up to three new frames."""
        made = []
        for _ in range(draw.randrange(1, 4)):
            size = draw.choice((0, 30, 3000, 300_000))
            count = draw.randrange(1, 5) if size < 100_000 else 1
            payloads = []
            for _ in range(count):
                payloads.append(b"%d:%d:" % (self.partition_id, self.made) + bytes(size))
                self.made += 1
            made.append(payloads)
        return made


class Storm:
    """A worker, its clients, and what must be true."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.draw = random.Random(seed)
        self.lanes = [Lane(i + 1, durability) for i, durability in enumerate(DURABILITIES)]
        self.known: dict[tuple[int, int], bytes] = {}
        """(partition, offset) -> payload, from acks and deliveries."""
        self.acked: dict[tuple[int, int], bytes] = {}
        """What a publisher was told to be accepted, of logged topics."""
        self.done: set[tuple[int, int]] = set()
        """What the consumer acked durably."""
        self.held: dict[int, set[int]] = {}
        self.requests: dict[int, Callable[[Any], None]] = {}
        self.disks: dict[int, HeldSyncs] = {}
        self.start(first=True)

    # ------------------------------------------------------------ life

    def start(self, *, first: bool = False) -> None:
        self.rig = Rig(self.directory, log_count=LOGS, tail_bytes_max=200_000)
        if first:
            for lane in self.lanes:
                self.rig.assign(
                    lane.partition_id, log_id=lane.partition_id % LOGS, durability=lane.durability
                )
        self.requests.clear()
        self.client = RawClient(self.rig)
        self.rig.clients.append(self.client)
        for lane in self.lanes:
            in_force = self.rig.worker.state.catalog.by_id[lane.partition_id].assigned.durability
            if "memory" in (lane.durability, in_force) or lane.was_memory:
                lane.generation += 1
                lane.unacked, lane.first, lane.ends = [], 0, set()
            lane.durability, lane.change = in_force, None
            lane.was_memory = in_force == "memory"
            name = f"p{lane.partition_id}-{lane.generation}"
            lane.opened = self.client.open_producer(lane.partition_id, name)
            lane.posted = 0
            reply = self.client.subscribe(
                lane.partition_id, SUBSCRIPTION, consumer_id=lane.partition_id, kind="shared"
            )
            assert reply[0] == 67, reply
            self.held[lane.partition_id] = set()

    def end(self, how: str) -> None:
        for disk in self.disks.values():
            disk.release()
        self.disks.clear()
        for slot in range(LOGS):
            log = self.rig.worker.state.logs[slot]
            log.__dict__.pop("reserve", None)
            log.__dict__.pop("append", None)
        getattr(self.rig, how)()

    # ------------------------------------------------------------ steps

    def step(self) -> None:
        self.draw.choice(
            [self.publish] * 6 + [self.turn] * 6 + [self.ack, self.ack, self.hold, self.release]
            + [self.fail, self.refuse, self.restart, self.change]
        )()  # fmt: skip
        self.look()

    def publish(self) -> None:
        """One bundle with frames of several lanes, old ones first."""
        bundle: list[tuple[int, bytearray]] = []
        sent: list[tuple[Lane, int]] = []
        for lane in self.draw.sample(self.lanes, self.draw.randrange(1, len(self.lanes) + 1)):
            if lane.posted == len(lane.unacked):
                lane.unacked += lane.frames(self.draw)
            sequence = lane.first + sum(map(len, lane.unacked[: lane.posted]))
            for payloads in lane.unacked[lane.posted :]:
                if sum(len(frame) for _, frame in bundle) > BUNDLE_BYTES:
                    break
                frame = self.client.frame(lane.opened, sequence, payloads)
                bundle.append((lane.partition_id, frame))
                sequence += len(payloads)
                sent.append((lane, sequence))
                lane.posted += 1
        request = self.client.post(11, parts=(sealed_bundle(bundle),))
        self.requests[request] = lambda reply: self.published(sent, reply[1])

    def published(self, sent: list[tuple[Lane, int]], statuses: list[int]) -> None:
        assert len(statuses) == 2 * len(sent)
        for (lane, end), status, offset in zip(sent, statuses[::2], statuses[1::2], strict=True):
            if status in (0, 1):
                self.accepted(lane, end, offset)
            else:
                assert status in (8, 13, 14, 32), (status, lane.partition_id)
                lane.posted = 0

    def accepted(self, lane: Lane, end: int, offset: int) -> None:
        """The frame whose sequences end at `end` was accepted. One that went before may still wait
        for another log, together with the rest of its bundle."""
        at = lane.first
        for payloads in lane.unacked:
            at += len(payloads)
            if at == end:
                lane.ends.add(end)
                for i, payload in enumerate(payloads):
                    self.saw(lane.partition_id, offset + i, payload)
                    if lane.durability != "memory" and lane.change is None:
                        self.acked[lane.partition_id, offset + i] = payload
        while lane.unacked and lane.first + len(lane.unacked[0]) in lane.ends:
            lane.first += len(lane.unacked.pop(0))
            lane.posted = max(0, lane.posted - 1)

    def ack(self) -> None:
        """The consumer acks some of what it holds, and hears when that is durable."""
        entries, mine = [], []
        for partition_id, held in self.held.items():
            some = [offset for offset in held if self.draw.random() < 0.5]
            held.difference_update(some)
            entries.append([partition_id, [edge for at in some for edge in (at, at + 1)]])
            mine += [(partition_id, offset) for offset in some]
        request = self.client.post(22, entries)

        def answered(reply: Any) -> None:
            if reply[0] == 67:
                self.done.update(mine)

        self.requests[request] = answered

    def turn(self) -> None:
        for _ in range(self.draw.randrange(1, 30)):
            self.rig.worker.do_work()

    def hold(self) -> None:
        slot = self.draw.randrange(LOGS)
        if slot not in self.disks:
            self.disks[slot] = HeldSyncs(self.rig, slot)

    def release(self) -> None:
        if self.disks:
            self.disks.pop(self.draw.choice(list(self.disks))).release()

    def fail(self) -> None:
        """The oldest sync that waits succeeds, perhaps; the others fail."""
        failing = [slot for slot, disk in self.disks.items() if disk.held]
        if not failing or self.draw.random() < 0.5:
            return
        disk = self.disks.pop(self.draw.choice(failing))
        if len(disk.held) > 1 and self.draw.random() < 0.5:
            disk.release_first()
        disk.fail()
        disk.log._faults.clear()  # or three of them would end the log

    def refuse(self) -> None:
        """A write or a reservation finds no room, for a while."""
        log: Any = self.rig.worker.state.logs[self.draw.randrange(LOGS)]
        name = self.draw.choice(("reserve", "append"))
        log.__dict__.pop(name, None)
        real = getattr(log, name)
        left = [self.draw.randrange(1, 5)]

        def full(*args: Any, **kwargs: Any) -> Any:
            if left[0]:
                left[0] -= 1
                raise ResourceExhausted("no room just now")
            return real(*args, **kwargs)

        setattr(log, name, full)

    def change(self) -> None:
        """Another durability, while messages are under way."""
        lane = self.draw.choice(self.lanes)
        if lane.change is not None:
            return
        wanted = self.draw.choice(DURABILITIES)
        number = lane.partition_id
        entry = m.Assignment(
            number, f"/default/t{number}", 0, "reliable", wanted, number % LOGS, incarnation=1
        )
        lane.change = FakeRequest(m.Assign([entry]))
        lane.was_memory = lane.was_memory or wanted == "memory"
        self.rig.worker.assignments._assign(lane.change)  # type: ignore[arg-type]

    def changed(self) -> None:
        for lane in self.lanes:
            if lane.change is not None and lane.change.done:
                if lane.change.error is None:
                    lane.durability = lane.change.message.partitions[0].durability
                lane.change = None

    def restart(self) -> None:
        if self.draw.random() < 0.5:
            self.end(self.draw.choice(("stop", "crash")))
            self.start()

    # ------------------------------------------------------------ looking

    def look(self) -> None:
        """Take what came, and compare."""
        self.client.pump()
        for request in list(self.requests):
            reply = self.client._answer(request)
            if reply is not None:
                self.requests.pop(request)(reply)
        self.changed()
        taken, self.client.delivered = self.client.delivered, []
        for consumer_id, view in taken:
            view.check(stamped=True)
            for offset, payload in zip(view.offsets(), view.payloads(), strict=True):
                key = (consumer_id, int(offset))
                assert key not in self.done, f"{key} was acked durably and came again"
                self.saw(*key, payload or b"")
                self.held[consumer_id].add(int(offset))

    def saw(self, partition_id: int, offset: int, payload: bytes) -> None:
        known = self.known.setdefault((partition_id, offset), payload)
        assert known == payload, (
            f"offset {offset} of {partition_id}: {known[:20]!r}, {payload[:20]!r}"
        )

    def finish(self) -> None:
        """Calm: everything unacked goes in, then all is read from the start."""
        while self.disks:
            self.release()

        def calm() -> bool:
            if not self.requests and any(lane.unacked for lane in self.lanes):
                self.publish()
            self.look()
            return not self.requests and not any(lane.unacked for lane in self.lanes)

        self.rig.turn(calm, "everything in")
        self.end("crash")
        self.start()
        for lane in self.lanes:
            self.check_all(lane)
        self.rig.stop()

    def check_all(self, lane: Lane) -> None:
        wanted = {key[1]: value for key, value in self.acked.items() if key[0] == lane.partition_id}
        reader = RawClient(self.rig)
        self.rig.clients.append(reader)
        reader.subscribe(lane.partition_id, "", kind="reader", consumer_id=1)
        found: dict[int, bytes] = {}
        while not wanted.keys() <= found.keys():
            for offset, payload in reader.receive(1):
                assert offset not in found
                found[offset] = payload
        assert wanted == {offset: found[offset] for offset in wanted}
        assert len(set(found.values())) == len(found), "a message is there twice"
        assert list(found) == sorted(found)


@pytest.mark.parametrize("seed", range(6))
def test_a_storm(tmp_path: Path, seed: int) -> None:
    storm = Storm(tmp_path / "data", seed)
    try:
        for _ in range(STEPS):
            storm.step()
        storm.finish()
    finally:
        if not storm.rig.context.closed:
            storm.end("crash")
