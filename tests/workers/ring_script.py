"""Random commands for two workers in lockstep, of which one takes plain publishes with a kernel and one does not.

Script.round() -> actions, the same for both -> Side.play(): bytes of its own rig -> answers and deliveries
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgpack

from danube_fast.frame.bundle import sealed_bundle
from danube_fast.frame.layout import Codec
from danube_fast.frame.pack import encode_frame
from tests.workers.ring_client import Frozen, RingClient, fresh_endpoint, ring_client
from tests.workers.shard_faults import HeldSyncs, wait
from tests.workers.shard_rig import Rig

CLIENTS = 3
TURNS_MAX = 3000
QUIET_TURNS = 4
START_NS = 1_700_000_000_000_000_000
TURN_NS = 1_100_000
"""More than a group waits for its siblings."""
TOPICS: dict[int, dict[str, Any]] = {
    1: {"durability": "fsync"}, 2: {"durability": "os"}, 3: {"durability": "memory"},
    4: {"dispatch": "non_reliable"}, 5: {"durability": "fsync"}, 6: {"durability": "os"},
}  # fmt: skip
OWNERS = {1: 0, 2: 1, 3: 2, 4: 0, 6: 2}
"""Which client publishes to a partition: offsets tell in which order messages of one client came. All publish to 5."""
SHARED = 5
UNKNOWN = (0, 77, 100_000, 0xFFFF_FFFF)
PING = 2
WAITING_TURN_NS = 50_000
"""About what a turn takes: no session may end while ZeroMQ's thread brings a message."""
Lane = tuple[int, int, str]
"""Client, partition, name of the producer."""


def lanes() -> list[Lane]:
    """List all producers."""
    named = [(owner, partition, name) for partition, owner in OWNERS.items() for name in "ab"]
    return named + [(client, SHARED, f"c{client}") for client in range(CLIENTS)]


@dataclasses.dataclass
class Entry:
    """A frame of a bundle."""

    lane: Lane
    sequence: int
    payloads: list[bytes | None]
    partition: int
    epoch_ahead: int = 0
    columns: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Action:
    """One message of a client: a command, or a PUBLISH of `entries`."""

    client: int
    command: list[Any] | None = None
    entries: list[Entry] = dataclasses.field(default_factory=list)
    shape: str = ""
    damage: str = ""
    places: tuple[float, ...] = ()
    size: int = 0


class Side:
    """One of the two rigs, with its clients."""

    def __init__(
        self, directory: Path, *, straight: bool, serves: bool = False, routed: Iterable[int] = (),
        **settings: Any,
    ) -> None:  # fmt: skip
        """`straight`: a kernel takes plain publishes. `serves`: and writes, shows and answers those that it can.
        `routed`: clients that come over ZeroMQ."""
        self.rig = Rig(directory, ipc_endpoint=fresh_endpoint(), **settings)
        self.clock = self.rig.worker.state.clock = self.rig.boot.clock = Frozen(START_NS)
        self.taken = 0
        take = self.rig.worker.transports.take_plain
        if not serves:
            take.__self__._outlets._outlet = lambda *_: None  # type: ignore[attr-defined]
        self.rig.worker.transports.take_plain = (
            (lambda limit: self._count(take(limit))) if straight else (lambda _: 0)
        )
        for partition, options in TOPICS.items():
            self.rig.assign(partition, **options)
        self.routed = tuple(routed)
        self.soundings = 1 << 50
        self.clients: list[Any] = [
            self.rig.client() if number in self.routed else ring_client(self.rig)
            for number in range(CLIENTS)
        ]
        self.opened: dict[Lane, dict[str, int]] = {}
        self.answers: list[list[Any]] = [[] for _ in self.clients]
        self.delivered: dict[tuple[int, int], list[tuple[int, bytes | None]]] = {}

    def _count(self, taken: int | None) -> int | None:
        self.taken += taken or 0
        return taken

    # ------------------------------------------------------------ a round

    def play(self, actions: list[Action]) -> None:
        """Send these, and turn until all is answered; the disk stands still until all were taken."""
        self._turn_until_quiet("what came before the round", synced=True)
        disk = HeldSyncs(self.rig)
        for action in actions:
            head, parts = self._made(action)
            self.clients[action.client].socket.send_multipart([head, *parts])
        self._turn_until_quiet("the round", synced=False)
        disk.release()
        self._wait_for_the_disk()
        self._turn_until_quiet("the round's syncs", synced=True)

    def _turn_until_quiet(self, what: str, *, synced: bool) -> None:
        quiet = 0
        for _ in range(TURNS_MAX):
            self.clock.now += TURN_NS
            self.rig.worker.do_work()
            heard = sum(self._hear(number) for number in range(CLIENTS))
            is_busy = heard or self.is_busy(synced=synced)
            quiet = 0 if is_busy else quiet + 1
            if quiet == QUIET_TURNS:
                if self.is_sounded(synced=synced):
                    return
                quiet = 0
            if synced and self.rig.worker.state.journals[0].busy:
                self._wait_for_the_disk()
        raise AssertionError(f"{what} did not come to rest within {TURNS_MAX} turns")

    def is_busy(self, *, synced: bool) -> bool:
        """Whether the worker has something to do; `synced`: or waits for the disk."""
        worker = self.rig.worker
        log, journal = worker.state.logs[0], worker.state.journals[0]
        is_waiting = journal.busy or log.synced_position < log.written_position
        return bool(
            not self.is_sent or worker.transports.readable() or worker.delivery.waiting
            or (synced and is_waiting)
        )  # fmt: skip

    @property
    def is_sent(self) -> bool:
        """Whether nothing of a client waits for room in its rings."""
        return all(getattr(client.socket, "is_sent", True) for client in self.clients)

    def is_sounded(self, *, synced: bool) -> bool:
        """Have each client of the ROUTER ask for an answer, twice: what it sent before has come in then, and what was
        sent to it before has reached it. Whether nothing has happened meanwhile."""
        worker = self.rig.worker

        def done() -> list[int]:
            intake, delivery, log = worker.intake, worker.delivery, worker.state.logs[0]
            return [
                intake.frames_in, intake.frames_answered, delivery.messages_out,
                log.written_position, log.synced_position,
            ]  # fmt: skip

        before, heard = done(), 0
        for number in self.routed * 2:
            self._ask(self.clients[number])
            heard += self._hear(number)
        return not heard and done() == before and not self.is_busy(synced=synced)

    def _ask(self, client: Any) -> None:
        """Have a client send a PING, and turn until it is answered."""
        self.soundings += 1
        asked = self.soundings
        client.send(PING, asked)

        def is_answered() -> bool:
            self.clock.now += WAITING_TURN_NS
            client.pump()
            found = [each for each in client.waiting if each[0] != 68 and each[1] == asked]
            for each in found:
                client.waiting.remove(each)
            return bool(found)

        self.rig.turn(is_answered, "the answer to a PING")

    def _wait_for_the_disk(self) -> None:
        """Let the syncs that are queued end, all of them: a turn that sees a part of them answers in another order."""
        syncs = self.rig.worker.state.logs[0].syncs
        wait(lambda: not syncs.backlog, "the end of the syncs")

    def _hear(self, number: int) -> int:
        """Keep what came for a client: its answers one by one, deliveries by consumer."""
        client = self.clients[number]
        client.pump()
        heard = len(client.waiting) + len(client.delivered) + len(client.events)
        for command in client.waiting:
            if command[0] != 68:
                self.answers[number].append(_comparable(command))
                continue
            for request, statuses in command[1]:
                texts = sorted(command[2].get(code, "") for code in set(statuses[::2]))
                self.answers[number].append((68, request, statuses, texts))
        self.answers[number] += [("event", *event) for event in client.events]
        self._keep(number)
        for consumer, view in client.delivered:
            rows = zip(view.offsets().tolist(), view.payloads(), strict=True)
            self.delivered.setdefault((number, consumer), []).extend(rows)
        client.waiting, client.delivered, client.events = [], [], []
        return heard

    def _keep(self, number: int) -> None:
        """Look at the deliveries that a client has just got."""

    # ------------------------------------------------------------ the bytes of an action

    def _made(self, action: Action) -> tuple[bytes, list[bytes]]:
        if action.command is not None:
            return msgpack.packb(action.command), []
        frames = [(entry.partition, self._frame(entry)) for entry in action.entries]
        bundle = bytearray(sealed_bundle(frames)) + bytes(action.size)
        _damage(bundle, action)
        request = self.clients[action.client].request = self.clients[action.client].request + 1
        return _head(action.shape, request), _parts(action.shape, bytes(bundle))

    def _frame(self, entry: Entry) -> bytearray:
        opened = self.opened[entry.lane]
        return encode_frame(
            entry.payloads, producer_id=opened["producer_id"], base_sequence=entry.sequence,
            producer_epoch=opened["producer_epoch"] + entry.epoch_ahead, publish_time_ns=1,
            **entry.columns,
        )  # fmt: skip

    def open_all(self) -> dict[Lane, int]:
        """Have every client a session and every lane a producer; the next sequence of each lane."""
        for client in self.clients:
            if client.ask(2)[0] == 66:
                client.ask(1, 1, "raw", {})
        for lane in lanes():
            self.opened[lane] = self.clients[lane[0]].open_producer(lane[1], lane[2])
        for number in range(CLIENTS):
            self._hear(number)
        return {lane: opened["next_sequence"] for lane, opened in self.opened.items()}

    # ------------------------------------------------------------ the end

    def everything(self, partition: int) -> list[tuple[int, bytes | None]]:
        """Read what a partition keeps, from the first offset to the last."""
        client: RingClient = ring_client(self.rig)
        reply = client.ask(20, 1, 1, partition, "", "reader", "earliest")
        assert reply[0] == 67, reply
        client.send(21, 1, 1 << 40, 1 << 40)
        count = reply[2]["end_offset"] - reply[2]["first_offset"]
        rows = client.receive(count) if TOPICS[partition].get("durability") in LOGGED else []
        return list(rows)


LOGGED = ("fsync", "os")


def _comparable(command: list[Any]) -> tuple[Any, ...]:
    if command[0] == 64:
        return (64, command[1])
    return tuple(command)


def _damage(bundle: bytearray, action: Action) -> None:
    if action.damage == "flip":
        for place in action.places:
            at = int(place * len(bundle))
            bundle[at] ^= 1 + at % 255
    elif action.damage == "head":
        for place in action.places:
            bundle[int(place * min(len(bundle), 80))] ^= 1 + int(place * 254)
    elif action.damage == "cut":
        del bundle[int(action.places[0] * len(bundle)) :]
    elif action.damage == "longer":
        bundle += bytes(1 + int(action.places[0] * 40))


def _head(shape: str, request: int) -> bytes:
    heads: dict[str, list[Any]] = {
        "extra": [11, request, 5], "float": [11, float(request)], "float op": [11.0, request],
        "zero": [11, 0], "huge": [11, 1 << 63], "large": [11, (1 << 63) - 1], "below": [11, -1],
        "far below": [11, -1000], "short": [11], "text": [11, "1"], "none": [11, None], "true": [True, request],
        "empty": [], "nested": [11, [request]],
    }  # fmt: skip
    if shape == "wide":
        return b"\x92\x0b\xcf" + request.to_bytes(8, "big")
    if shape == "wide array":
        return b"\xdc\x00\x02\x0b\xce" + request.to_bytes(4, "big")
    if shape == "trailing":
        return bytes(msgpack.packb([11, request])) + b"\x00"
    if shape == "long":
        return b"\x92\x0b\xd9\x20" + b"7" * 32
    return bytes(msgpack.packb(heads.get(shape, [11, request])))


def _parts(shape: str, bundle: bytes) -> list[bytes]:
    if shape == "no part":
        return []
    return [bundle, b""] if shape == "three parts" else [bundle]


SHAPES = (
    "extra", "float", "float op", "zero", "huge", "large", "below", "far below", "short", "text", "none", "true",
    "empty", "nested", "wide", "wide array", "trailing", "long", "no part", "three parts",
)  # fmt: skip
ODD_CONSUMERS = (1 << 63, (1 << 64) - 1, (1 << 63) - 1, -1, -1000)
DAMAGES = ("flip", "head", "cut", "longer")


class Script:
    """Draws rounds; keeps what it believes to be the next sequence of each lane."""

    def __init__(self, draw: random.Random, bundle_bytes_max: int) -> None:
        self.draw, self.bundle_bytes_max = draw, bundle_bytes_max
        self.next: dict[Lane, int] = {}
        self.sent: list[Action] = []
        self.number = 0
        self.request = 1_000_000
        self.consumer = 0
        self.alone: int | None = None
        """The only client of this round; what several do at once may be answered in another order."""

    def round(self, following: dict[Lane, int]) -> list[Action]:
        """Draw the actions of one round."""
        self.next, self.sent = dict(following), []
        self.alone = self.draw.choice((None, *range(CLIENTS)))
        return [self._action() for _ in range(self.draw.choice((1, 3, 10, 40, 80)))]

    def _client(self) -> int:
        return self.draw.randrange(CLIENTS) if self.alone is None else self.alone

    def _action(self) -> Action:
        kind = self.draw.random()
        if kind < 0.15:
            return self._other()
        client = self._client()
        if kind < 0.25 and (mine := [each for each in self.sent if each.client == client]):
            return dataclasses.replace(self.draw.choice(mine), damage="", shape="", size=0)
        count = 1 if self.draw.random() < 0.75 else self.draw.randrange(2, 9)
        action = Action(client, entries=[self._entry(client) for _ in range(count)])
        if kind > 0.9:
            action.damage = self.draw.choice(DAMAGES)
            action.places = tuple(self.draw.random() for _ in range(self.draw.randrange(1, 4)))
        elif kind > 0.82:
            action.shape = self.draw.choice(SHAPES)
        elif kind > 0.815:
            action.size = self.bundle_bytes_max
        self.sent.append(action)
        return action

    def _entry(self, client: int) -> Entry:
        draw = self.draw
        lane = draw.choice([each for each in lanes() if each[0] == client])
        count = draw.choice((1, 1, 1, 2, 5))
        size = draw.choice((0, 1, 30, 30, 500, 6000))
        payloads: list[bytes | None] = [
            None if draw.random() < 0.05 else b"%d:%d " % (self.number, i) + bytes(size)
            for i in range(count)
        ]
        self.number += 1
        entry = Entry(lane, self.next[lane], payloads, lane[1])
        fault = draw.random()
        if fault < 0.04:
            entry.sequence += draw.randrange(1, 5)
        elif fault < 0.08:
            entry.sequence = max(0, entry.sequence - draw.randrange(1, 5))
        elif fault < 0.1:
            entry.partition = draw.choice(UNKNOWN)
        elif fault < 0.12:
            entry.epoch_ahead = draw.choice((-1, 1))
        else:
            self.next[lane] += count
        if draw.random() < 0.2:
            entry.columns["codec"] = Codec.LZ4
        if draw.random() < 0.2:
            entry.columns["keys"] = [b"k%d" % i for i in range(count)]
        return entry

    def _other(self) -> Action:
        draw = self.draw
        client = self._client()
        self.request += 1
        request = self.request
        lane = draw.choice([each for each in lanes() if each[0] == client])
        self.consumer += 1
        consumer = self.consumer if draw.random() < 0.8 else draw.choice(ODD_CONSUMERS)
        kinds = ["ping", "ping", "open", "subscribe", "subscribe", "ack", "flow"]
        partition = draw.choice([each for each, owner in OWNERS.items() if owner == client])
        if self.alone is not None:
            kinds.append("end")
            partition = draw.choice(sorted(OWNERS))
        kind = draw.choice(kinds)
        commands: dict[str, list[Any]] = {
            "ping": [2, request], "open": [10, request, lane[1], lane[2]],
            "subscribe": [
                20, request, consumer, 1, partition, f"s{draw.randrange(3)}", "shared", "earliest",
            ],
            "ack": [22, request, [[draw.randrange(1, self.consumer + 1), [0, draw.randrange(1, 50)]]]],
            "flow": [21, 1, draw.choice((1, 100, 1 << 20)), draw.choice((1, 5, 100))],
            "end": draw.choice(([3, request], [1, request, 1, "raw", {}], [99, request])),
        }  # fmt: skip
        return Action(client, command=commands[kind])
