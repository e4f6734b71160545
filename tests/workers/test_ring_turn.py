"""What kernels write, show, deliver and answer over rings is what the ordinary way would have made of it.

The same random script for a worker whose kernels serve and for one without them. When a frame becomes visible is each
worker's own business; which answer it gets, where it lies, and that every consumer gets it once, is not.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.net.greeting import bundle_bytes_max
from danube_fast.workers.shard.publish.turn_layout import OutletKind
from tests.workers.ring_script import (
    LOGGED,
    ODD_CONSUMERS,
    OWNERS,
    QUIET_TURNS,
    SHARED,
    TOPICS,
    TURN_NS,
    TURNS_MAX,
    Action,
    Entry,
    Script,
    Side,
)
from tests.workers.ring_turn_rig import watch_served

CASES = int(os.environ.get("DANUBE_TURN_CASES", "10"))
SEED = int(os.environ.get("DANUBE_TURN_SEED", "1"))
CASES_MIN = 10
ROUNDS = 6
SUBSCRIBE, ACK, PUBLISH, PUBLISHED, RESULT, ERROR = 20, 22, 11, 68, 67, 65
SESSION_ENDS = (1, 3)
ALL_CREDIT = 1 << 29
Key = tuple[int, int]
Row = tuple[int, int, bytes, bool]
"""Partition, offset, payload, and whether it is a redelivery."""


class TurnScript(Script):
    """Rounds in which consumers are attached from the start; in an `exact` one no session ends and nothing is acked,
    so that each subscription gets each message once."""

    def __init__(self, draw: random.Random, bundle_bytes_max: int, *, exact: bool) -> None:
        super().__init__(draw, bundle_bytes_max)
        self.exact = exact
        self.plain_share = draw.choice((0.0, 0.7, 0.95))
        self.held: list[bool] = []

    def _other(self) -> Action:
        while True:
            action = super()._other()
            command = action.command or []
            if not self.exact:
                return action
            if command[0] == SUBSCRIBE and command[2] in ODD_CONSUMERS:
                continue  # its number may be another one's already
            if command[0] not in (*SESSION_ENDS, ACK):
                return action

    def _action(self) -> Action:
        if self.draw.random() >= self.plain_share:
            return super()._action()
        client = self._client()
        action = Action(client, entries=[self._plain(client)])
        self.sent.append(action)
        return action

    def _plain(self, client: int) -> Entry:
        """Draw a frame that kernels can serve, if its partition has an outlet."""
        lane = self.draw.choice([lane for lane in self.next if lane[0] == client])
        count = self.draw.choice((1, 1, 2, 7))
        size = self.draw.choice((0, 20, 300))
        payloads: list[bytes | None] = [
            b"%d:%d " % (self.number, i) + bytes(size) for i in range(count)
        ]
        self.number += 1
        entry = Entry(lane, self.next[lane], payloads, lane[1])
        self.next[lane] += count
        return entry

    def first(self) -> list[Action]:
        """Draw consumers of some partitions, one or two of each: of its own client, or of another one."""
        actions = []
        for partition in sorted(TOPICS):
            for _ in range(self.draw.choice((0, 1, 1, 1, 2))):
                self.consumer += 1
                self.request += 1
                client = self.draw.randrange(len(CLIENTS))
                kind = self.draw.choice(("exclusive", "shared", "failover", "reader"))
                name = f"{kind}-{self.draw.randrange(2)}"
                if kind == "exclusive":  # which of two clients comes first is left open
                    name = f"{kind}-{self.consumer}"
                elif kind == "reader":
                    name = ""
                actions.append(
                    Action(
                        client,
                        command=[
                            SUBSCRIBE, self.request, self.consumer, 1, partition, name, kind, "earliest",
                        ],
                    )
                )  # fmt: skip
        for client in CLIENTS:
            credit = self.draw.choice(((1 << 28, 1 << 28), (20_000, 1000), (1 << 28, 10)))
            actions.append(Action(client, command=[21, 1, *credit]))
        return actions


CLIENTS = range(3)


class TurnSide(Side):
    """A rig whose deliveries are kept with the partition they are of; the disk moves unless a round holds it."""

    def __init__(
        self, directory: Path, *, serves: bool, seed: int, routed: tuple[int, ...], **settings: Any
    ) -> None:
        super().__init__(directory, straight=serves, serves=serves, routed=routed, **settings)
        self.draw = random.Random(seed)
        self.pace = self.draw.choice((0.1, 0.6, 1.0))
        self.serves = serves
        self.name = "kernel" if serves else "ordinary"
        self.served = watch_served(self.rig) if serves else Counter[int]()
        self.rows: dict[Key, list[Row]] = {}
        self.subscribed: dict[Key, tuple[int, str]] = {}

    def play_freely(self, actions: list[Action]) -> None:
        """Send these, a few at a time, and turn until all is answered."""
        for action in actions:
            head, parts = self._made(action)
            self.clients[action.client].socket.send_multipart([head, *parts])
            self._note_subscription(action)
            if self.draw.random() < self.pace:
                self._turn_once()
        self._turn_until_quiet("the round", synced=True)

    def play(self, actions: list[Action]) -> None:
        for action in actions:
            self._note_subscription(action)
        super().play(actions)

    def _note_subscription(self, action: Action) -> None:
        command = action.command
        if command is not None and command[0] == SUBSCRIBE:
            key = action.client, command[2]
            name = command[5] or f"the reader {key}"  # each reader gets all
            self.subscribed.setdefault(key, (command[4], name))

    def _turn_once(self) -> None:
        if self.serves and self.draw.random() < 0.7:
            self.rig.worker._idle.sleep(1)
        self.clock.now += TURN_NS
        self.rig.worker.do_work()

    def is_busy(self, *, synced: bool) -> bool:
        if not synced:
            return super().is_busy(synced=False)
        worker = self.rig.worker
        log, journal = worker.state.logs[0], worker.state.journals[0]
        rings = worker.transports.rings
        links = rings._links.values() if rings is not None else ()
        return bool(
            any(link.slices for link in links) or worker.state.ready or worker.reader.fetches
            or worker.transports.readable() or worker.delivery.waiting or journal.busy
            or not self.is_sent or (log.synced_position < log.written_position and journal.busy)
        )  # fmt: skip

    def _turn_until_quiet(self, what: str, *, synced: bool) -> None:
        if not synced:
            super()._turn_until_quiet(what, synced=synced)
            return
        quiet = 0
        for _ in range(TURNS_MAX):
            self._turn_once()
            heard = sum(self._hear(number) for number in CLIENTS)
            busy = heard or self.is_busy(synced=synced)
            quiet = 0 if busy else quiet + 1
            if quiet == QUIET_TURNS:
                if self.is_sounded(synced=synced):
                    return
                quiet = 0
            if self.rig.worker.state.journals[0].busy:
                self._wait_for_the_disk()
        raise AssertionError(f"{what} did not come to rest within {TURNS_MAX} turns")

    def _keep(self, number: int) -> None:
        client = self.clients[number]
        for consumer, view in client.delivered:
            counts = view.redelivery_counts()
            again = [False] * view.message_count if counts is None else (counts > 0).tolist()
            rows = zip(view.offsets().tolist(), view.payloads(), again, strict=True)
            self.rows.setdefault((number, consumer), []).extend(
                (view.partition_id, offset, payload or b"", was_sent)
                for offset, payload, was_sent in rows
            )

    def grant_all(self) -> None:
        """Let every consumer have what is left for it."""
        for client in self.clients:
            client.send(21, 1, ALL_CREDIT, ALL_CREDIT)
        self._turn_until_quiet("what was left for consumers", synced=True)


# ---------------------------------------------------------------- comparing


def published(side: Side, number: int, begin: int) -> dict[int, list[Any]]:
    """Find the answers to PUBLISHes of a client, by request; those of one number in their order. Texts are left out:
    a code has one text in a message, whichever of its requests it was for."""
    found: dict[int, list[Any]] = {}
    for entry in side.answers[number][begin:]:
        if entry[0] == PUBLISHED:
            found.setdefault(entry[1], []).append(entry[2])
    return found


def others(side: Side, number: int, begin: int) -> list[Any]:
    """Find what else was answered, without what depends on the time."""
    return [
        entry[:2] for entry in side.answers[number][begin:] if entry[0] not in (PUBLISHED, "event")
    ]


def plain_requests(side: Side, actions: list[Action]) -> Iterator[tuple[int, int, int]]:
    """Find PUBLISHes of one frame that are what they seem: client, request, and partition."""
    numbers = [client.request for client in side.clients]
    for action in actions:
        if action.command is None:
            numbers[action.client] += 1
            if not action.shape and not action.damage and len(action.entries) == 1:
                yield action.client, numbers[action.client], action.entries[0].lane[1]


def shared_requests(side: Side, actions: list[Action]) -> set[tuple[int, int]]:
    """Client and number of requests with frames for the partition to which several clients publish."""
    found: set[tuple[int, int]] = set()
    numbers = [client.request for client in side.clients]
    for action in actions:
        if action.command is None:
            numbers[action.client] += 1
            if any(entry.lane[1] == SHARED for entry in action.entries):
                found.add((action.client, numbers[action.client]))
    return found


def check_answers(
    kernel: TurnSide, ordinary: TurnSide, begins: list[list[int]], shared: set[tuple[int, int]],
    *, ends: bool, again: str,
) -> None:  # fmt: skip
    """Each request has the same answer on both sides. `ends`: a session ended, so that some have none."""
    for number in CLIENTS:
        one, other = (
            published(side, number, begin[number])
            for side, begin in zip((kernel, ordinary), begins, strict=True)
        )
        if not ends:
            assert one.keys() == other.keys(), f"answered by one side only; again: {again}"
        for request in one.keys() & other.keys():
            if request < 1 or request > 1 << 40 or (ends and len(one[request]) != 1):
                continue  # made up by the script, for several requests
            mine, theirs = one[request], other[request]
            if (number, request) in shared:
                mine, theirs = ([each[::2] for each in answers] for answers in (mine, theirs))
            assert mine == theirs, (
                f"{mine} and {theirs}: client {number}, request {request}; again: {again}"
            )
        if not ends:
            mine, theirs = (
                sorted(others(side, number, begin[number]), key=str)
                for side, begin in zip((kernel, ordinary), begins, strict=True)
            )
            assert mine == theirs, f"other answers to client {number}; again: {again}"


def check_order(
    side: TurnSide, begins: list[int], plain: dict[tuple[int, int], int], again: str
) -> None:
    """Frames of one partition that one client published are answered in their order."""
    last: dict[tuple[int, int], int] = {}
    for number in CLIENTS:
        for entry in side.answers[number][begins[number] :]:
            if entry[0] != PUBLISHED or entry[2][:1] != [0] or (number, entry[1]) not in plain:
                continue
            lane = number, plain[number, entry[1]]
            offset = entry[2][1]
            assert offset > last.get(lane, -1), (
                f"client {number}, partition {lane[1]}: offset {offset} was answered behind "
                f"{last[lane]}; again: {again}"
            )
            last[lane] = offset


def check_deliveries(
    side: TurnSide, stored: dict[int, dict[int, bytes | None]], *, exact: bool, again: str
) -> None:
    """Consumers got what is stored, in ascending order; if `exact`, each subscription got each message once."""
    got: dict[tuple[int, str], Counter[int]] = {}
    for key, rows in side.rows.items():
        last: dict[int, int] = {}
        for partition, offset, payload, is_again in rows:
            what = f"consumer {key}, partition {partition}, offset {offset}; again: {again}"
            if partition in stored:
                assert stored[partition].get(offset, b"none such") == payload, what
            if exact:
                assert not is_again, f"a redelivery: {what}"
                assert offset > last.get(partition, -1), f"behind {last.get(partition)}: {what}"
                assert side.subscribed[key][0] == partition, what
                got.setdefault(side.subscribed[key], Counter())[offset] += 1
            last[partition] = offset
    for (partition, name), counts in got.items():
        twice = sorted(offset for offset, count in counts.items() if count > 1)
        assert not twice, f"{name} of {partition} got {twice} twice; again: {again}"
        if partition in stored:
            lost = sorted(stored[partition].keys() - counts.keys())
            assert not lost, f"{side.name}: {name} of {partition} never got {lost}; again: {again}"


def check_ends(kernel: TurnSide, ordinary: TurnSide, *, exact: bool, again: str) -> None:
    """Both keep the same; whatever was delivered is what is kept."""
    ends = [
        [(row["partition_id"], row["first_offset"], row["end_offset"]) for row in side.rig.stats()]
        for side in (kernel, ordinary)
    ]
    assert ends[0] == ends[1], f"partitions stand at {ends}; again: {again}"
    kept = []
    for side in (kernel, ordinary):
        stored = {
            partition: dict(side.everything(partition))
            for partition, options in TOPICS.items()
            if options.get("durability") in LOGGED
        }
        check_deliveries(side, stored, exact=exact, again=again)
        kept.append(stored)
    for partition in kept[0]:
        one, other = (stored[partition] for stored in kept)
        assert one.keys() == other.keys(), f"offsets of {partition}; again: {again}"
        if partition in OWNERS:
            assert one == other, f"partition {partition}; again: {again}"
        else:
            assert sorted(map(str, one.values())) == sorted(map(str, other.values())), again
    memory = [
        {
            (partition, offset): payload
            for rows in side.rows.values()
            for partition, offset, payload, _ in rows
            if partition in OWNERS
        }
        for side in (kernel, ordinary)
    ]
    for place in memory[0].keys() & memory[1].keys():
        assert memory[0][place] == memory[1][place], f"{place}; again: {again}"


SERVED = Counter[int]()
"""Frames that kernels served, by kind, in all cases of this module."""


@pytest.mark.parametrize("case", range(CASES))
def test_what_kernels_serve_is_what_the_ordinary_way_makes_of_it(tmp_path: Path, case: int) -> None:
    seed = SEED + case
    again = (
        f"DANUBE_TURN_SEED={seed} DANUBE_TURN_CASES=1 pytest -n 0 tests/workers/test_ring_turn.py"
    )
    draw = random.Random(seed)
    settings = {
        "message_bytes_max": 64 * 1024,
        "shm_ring_bytes": draw.choice((4096, 16 * 1024, 1 << 20)),
        "tail_bytes_max": draw.choice((0, 1 << 24)),
    }
    exact = draw.random() < 0.6
    routed = draw.choice(((), (1,), (0, 1, 2)))
    kernel = TurnSide(tmp_path / "kernel", serves=True, seed=seed, routed=routed, **settings)
    ordinary = TurnSide(tmp_path / "ordinary", serves=False, seed=seed, routed=routed, **settings)
    sides = kernel, ordinary
    script = TurnScript(draw, bundle_bytes_max(kernel.rig.settings), exact=exact)
    try:
        for side_round in range(ROUNDS):
            following = kernel.open_all()
            assert following == ordinary.open_all(), f"sequences differ; again: {again}"
            begins = [[len(answers) for answers in side.answers] for side in sides]
            actions = script.first() if side_round == 0 else []
            actions += script.round(following)
            plain = {(c, r): partition for c, r, partition in plain_requests(kernel, actions)}
            shared = shared_requests(kernel, actions)
            is_held = draw.random() < 0.3
            for side in sides:
                (side.play if is_held else side.play_freely)(actions)
            ends = any(a.command and a.command[0] in SESSION_ENDS for a in actions)
            check_answers(kernel, ordinary, begins, shared, ends=ends, again=again)
            for side, begin in zip(sides, begins, strict=True):
                check_order(side, begin, plain, again)
        for side in sides:
            side.open_all()
            side.grant_all()
        check_ends(kernel, ordinary, exact=exact, again=again)
        counts = [
            (intake.frames_in, intake.messages_in, intake.bytes_in, intake.duplicates)
            for intake in (side.rig.worker.intake for side in sides)
        ]
        assert counts[0] == counts[1], f"counters {counts}; again: {again}"
        if exact:
            answered = [side.rig.worker.intake.frames_answered for side in sides]
            assert answered[0] == answered[1], f"answered {answered}; again: {again}"
        SERVED.update(kernel.served)
    finally:
        for side in sides:
            side.rig.stop()


def test_kernels_served_frames_of_each_kind() -> None:
    """Runs behind the cases above: a script that kernels serve nothing of tests nothing."""
    if CASES < CASES_MIN or not SERVED:
        pytest.skip(f"fewer than {CASES_MIN} cases ran in this process")
    for kind in OutletKind:
        assert SERVED[kind] > 0, f"no frame of kind {kind.name} was served: {SERVED}"
