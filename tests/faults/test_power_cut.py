"""A power cut: what no sync had covered is gone, or half gone, on every file of the data directory.

One broker runs under load on a disk that keeps a journal, with everything that moves files: rolls,
trims, snapshots, failed syncs, kills. Then the power fails at instants of that journal, and on what
the disk holds then a broker must start and know everything that was promised by that instant.

DANUBE_POWER_CUTS=n makes more cuts, DANUBE_POWER_SEED=n other ones; DANUBE_POWER_RECORDING=folder
repeats the cuts of an earlier run, as a failure says.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from danube_fast.errors import Internal, ResourceExhausted, Unavailable
from danube_fast.net.protocol import Status
from danube_fast.wal.durable_writes import Way
from danube_fast.wal.layout import position_from_name
from tests.crash.payloads import ident_of, number_of, payload_of
from tests.faults.power import Kind, Recording
from tests.faults.rig import (
    SEGMENTS,
    Background,
    Disk,
    FaultyServer,
    RawProducer,
    Word,
    read_all,
)
from tests.workers.broker import wait_until

CUTS = int(os.environ.get("DANUBE_POWER_CUTS", "3"))
SEED = int(os.environ.get("DANUBE_POWER_SEED", "1"))
EARLIER = os.environ.get("DANUBE_POWER_RECORDING", "")
KILLS = max(2, CUTS // 2)
SECONDS = 4.0
TOPICS = {"/default/strict": "fsync", "/default/loose": "os", "/default/kept": "memory"}
STRICT, OS = "/default/strict", "/default/loose"
RINGS = "/default/rings"
"""An fsync topic of threads that publish one by one over rings."""
ALL_TOPICS = (*TOPICS, RINGS)
RING_THREADS = 3
SUBSCRIPTION = "s"
BEHIND = 200
"""So many of the newest messages the consumer leaves unacked."""
SETTINGS: dict[str, Any] = {
    "workers": 1,
    "segment_bytes": 512 * 1024,
    "segment_start_bytes": 64 * 1024,
    "retention_seconds_min": 1,
    "index_map_bytes": 1 << 20,
}


class Evidence:
    """What the broker said, each with the length of the journal when it was heard."""

    def __init__(self) -> None:
        self.acks: list[list[Any]] = []
        """[topic, sequence, count, offset, journal]"""
        self.seen: list[list[Any]] = []
        """[topic, offset, number, journal]"""
        self.sent: list[list[Any]] = []
        """[topic, offset] of messages whose ack was sent by the consumer."""
        self.durable: list[list[int]] = []
        """[offset, journal] of those of the strict topic whose ack is durable."""
        self.born = 0
        """All topics and the subscription were there."""


class Load:
    """Producers and consumers of one broker until it is killed."""

    def __init__(self, server: FaultyServer, evidence: Evidence) -> None:
        self.server = server
        self.evidence = evidence
        self.journal = server.disk.journal
        self.producers = [
            RawProducer(server, topic, index, durability=durability)
            for index, (topic, durability) in enumerate(TOPICS.items(), 1)
        ]
        for producer in self.producers:
            producer.journal = self.journal
            producer.publish()

    def size(self) -> int:
        """Length of the journal now."""
        assert self.journal is not None
        return self.journal.stat().st_size

    def newest_segment(self) -> int:
        """First position of the segment that is written."""
        names = (path.name for path in self.server.data_dir.rglob(f"*{SEGMENTS}"))
        positions = (position_from_name(name, SEGMENTS) for name in names)
        return max(position for position in positions if position is not None)

    def publish(self, producer: RawProducer, stopping: Any) -> None:
        """Frames of growing size, a few on their way; what is refused is sent again."""
        while not stopping.is_set():
            for count in (1, 3, 40, 1, 7):
                producer.send(count)
            producer.settle()
            refused = [a for a in producer.answers[-5:] if a.status != Status.OK]
            if refused:
                codes = {Internal.code, ResourceExhausted.code, Status.OUT_OF_SEQUENCE}
                assert {a.status for a in refused} <= codes, [a.status for a in refused]
                producer.next_sequence = min(a.sequence for a in refused)
                stopping.wait(0.005)
            stopping.wait(0.002)

    def publish_single(self, client: Any, place: int, stopping: Any) -> None:
        """One message after the other over rings; numbers of the threads lie apart."""
        producer = client.producer(RINGS, name=f"rings-{place}", durability="fsync")
        index, number = len(ALL_TOPICS), place << 32
        while not stopping.is_set():
            offset = producer.publish(payload_of(index, number)).offset
            self.evidence.acks.append([RINGS, number, 1, offset, self.size()])
            number += 1

    def consume(self, topic: str, stopping: Any) -> None:
        """Everything that comes is evidence; all but the newest is acked."""
        with (
            self.server.client() as client,
            client.consumer(
                topic, subscription=SUBSCRIPTION, type="shared", initial_position="earliest"
            ) as consumer,
        ):
            held: list[Any] = []
            while not stopping.is_set():
                batch = consumer.receive_batch(timeout=0.1)
                size = self.size()
                self.evidence.seen += [
                    [topic, m.offset, number_of(ident_of(m.payload)), size] for m in batch
                ]
                held += batch
                done, held = held[:-BEHIND], held[-BEHIND:]
                if not done:
                    continue
                self.evidence.sent += [[topic, m.offset] for m in done]
                consumer.ack(done)
                if topic == STRICT:
                    with contextlib.suppress(Unavailable):  # a sync failed: not durable, so far
                        consumer.flush_acks()
                        size = self.size()
                        self.evidence.durable += [[m.offset, size] for m in done]

    def run(self, client: Any) -> None:
        """Load and trouble, for a while; `client` has rings."""
        disk = self.server.disk
        crew = [
            Background(lambda stopping, producer=producer: self.publish(producer, stopping))
            for producer in self.producers
        ]
        crew += [
            Background(lambda stopping, place=place: self.publish_single(client, place, stopping))
            for place in range(RING_THREADS)
        ]
        crew += [
            Background(lambda stopping, topic=topic: self.consume(topic, stopping))
            for topic in ALL_TOPICS
        ]
        try:
            end = time.monotonic() + SECONDS
            disk.choose(SEGMENTS)
            for number in (1, 2):
                time.sleep(SECONDS / 4)
                disk.hold_syncs()
                disk.wait_held()
                held = self.newest_segment()
                wait_until(
                    "a segment of `os` messages that the failed sync then gives up",
                    lambda held=held: self.newest_segment() > held,
                )
                disk.release_syncs(failures=1)
                disk.wait_failed(number)
            time.sleep(max(0.0, end - time.monotonic()))
        finally:
            for member in crew:
                member.stopping.set()
            for member in crew:
                member.stop()
        for producer in self.producers:
            self.evidence.acks += [
                [producer.topic, a.sequence, a.count, a.offset, a.journal_bytes]
                for a in producer.answers
                if a.status == Status.OK
            ]
            producer.close()


def record(folder: Path, disk: Disk, way: Way) -> None:
    """Run a broker under load; its journal and the evidence stay in `folder`."""
    disk.journal = folder / "journal"
    evidence = Evidence()
    server = FaultyServer(folder / "data", disk, **SETTINGS, durable_writes=str(way))
    with server:
        load = Load(server, evidence)
        with server.client(transport="shm") as client:
            client.admin.create_topic(RINGS, durability="fsync")
            for topic in ALL_TOPICS:
                client.consumer(topic, subscription=SUBSCRIPTION, type="shared",
                                initial_position="earliest").close()  # fmt: skip
            evidence.born = load.size()
            load.run(client)
        server.kill("all")
    assert disk[Word.WRITES_DURABLE], "no group was written by one call"
    disk.journal = None
    (folder / "evidence").write_text(json.dumps(vars(evidence)))


class Aftermath:
    """One cut: the broker on what is left, and what it must know."""

    def __init__(self, evidence: Evidence, cut: int, about: str, safe: tuple[str, ...]) -> None:
        self.about = about
        self.safe = safe
        """Topics that must not lose anything."""
        self.acked: dict[str, dict[int, int]] = {topic: {} for topic in ALL_TOPICS}
        self.batches: list[list[Any]] = []
        for topic, sequence, count, offset, size in evidence.acks:
            if size <= cut:
                self.acked[topic].update({offset + i: sequence + i for i in range(count)})
                if topic == STRICT:
                    self.batches.append([sequence, count, offset])
        self.known: dict[str, dict[int, int]] = {t: dict(a) for t, a in self.acked.items()}
        for topic, offset, number, size in evidence.seen:
            if size <= cut:
                self.known[topic][offset] = number
        self.durable = {offset for offset, size in evidence.durable if size <= cut}
        self.sent: dict[str, set[int]] = {topic: set() for topic in ALL_TOPICS}
        for topic, offset in evidence.sent:
            self.sent[topic].add(offset)

    def check(self, condition: Any, text: str) -> None:
        """A rule."""
        assert condition, f"{text}\n{self.about}"

    def check_log(self, client: Any, topic: str) -> None:
        """One content per offset; what a safe topic promised is there, or trimmed."""
        found: dict[int, int] = {}
        for message in read_all(client, topic):
            number = number_of(ident_of(message.payload))
            self.check(message.offset not in found, f"{topic}@{message.offset} came twice")
            found[message.offset] = number
        numbers = list(found.values())
        self.check(len(set(numbers)) == len(numbers), f"{topic}: a message is there twice")
        for offset, number in found.items():
            known = self.known[topic].get(offset, number)
            self.check(known == number, f"{topic}@{offset} was {known} and is {number}")
        if topic in self.safe:
            missing = self.known[topic].keys() - found.keys() - self.sent[topic]
            self.check(not missing, f"{topic}: lost {sorted(missing)[:5]}, {len(missing)} in all")
            first, end = min(found, default=0), max(found, default=-1) + 1
            self.check(len(found) == end - first, f"{topic} is not dense")

    def check_cursor(self, client: Any, topic: str) -> None:
        """What was acked durably does not come again; what nobody acked comes, or a gap says that
        it is gone."""
        wanted = self.known[topic].keys() - self.sent[topic]
        with client.consumer(topic, subscription=SUBSCRIPTION, type="shared") as consumer:
            came: set[int] = set()
            deadline = time.monotonic() + 60
            while not wanted <= came and time.monotonic() < deadline:
                came.update(m.offset for m in consumer.receive_batch(timeout=0.1))
                if topic not in self.safe:
                    told = consumer.gaps
                    came |= {o for o in wanted for gap in told if gap.first <= o <= gap.last}
        lost = sorted(wanted - came)
        self.check(not lost, f"{topic}: {lost[:5]}, {len(lost)} in all, gone without a word")
        if topic == STRICT:
            again = came & self.durable
            self.check(not again, f"{sorted(again)[:5]} came again, {len(again)} durably acked")

    def check_producers(self, server: FaultyServer) -> None:
        """Resends are known, and no offset is given out twice."""
        for index, topic in enumerate(ALL_TOPICS, 1):
            known = self.known[topic]
            with RawProducer(server, topic, index) as producer:
                expected = producer.next_sequence
                if topic == STRICT:
                    sequence, count, offset = max(self.batches)
                    self.check(expected >= sequence + count, f"next sequence is {expected}")
                    answer = producer.publish(count, sequence=sequence)
                    self.check(
                        (answer.status, answer.offset) == (Status.DUPLICATE, offset),
                        f"resent {sequence} ({offset}): {answer.status} {answer.offset}",
                    )
                    producer.next_sequence = expected
                answer = producer.publish(3)
                self.check(answer.status == Status.OK, f"{topic}: {answer.status} {answer.text}")
                self.check(
                    answer.offset > max(known, default=-1),
                    f"{topic}: offset {answer.offset} again; {max(known, default=-1)} was seen",
                )


class Recorded:
    """One life of a broker, to be cut off anywhere."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = Path(os.path.realpath(folder / "data"))
        self.recording = Recording(folder / "journal")
        self.evidence = Evidence()
        vars(self.evidence).update(json.loads((folder / "evidence").read_text()))
        assert len(self.evidence.acks) > 100 and self.evidence.durable, "there was too little load"
        single = sum(ack[0] == RINGS for ack in self.evidence.acks)
        assert single > 100, f"only {single} messages came over rings"
        self.records = [r for r in self.recording.records if r.end >= self.evidence.born]

    def names(self) -> list[int]:
        """Instants right behind a change of a name: most is in suspense there."""
        kinds = (Kind.CREATE, Kind.RENAME, Kind.UNLINK)
        return [record.end for record in self.records if record.kind in kinds]

    def repairs(self) -> list[int]:
        """Instants at which a failed sync has made the new segment and not removed the old ones."""
        ends = []
        named = set(self.names())
        for before, after in itertools.pairwise(r for r in self.records if r.end in named):
            paths = before.path.partition("\0")[2], after.path
            segments = all(position_from_name(Path(p).name, SEGMENTS) is not None for p in paths)
            if segments and before.kind == Kind.RENAME and after.kind == Kind.UNLINK:
                ends.append(before.end)
        assert ends, "no failed sync gave up a segment"
        return ends


@pytest.fixture(scope="module", params=[Way.DSYNC, Way.DIRECT])
def recorded(
    request: pytest.FixtureRequest, disk_library: Path, tmp_path_factory: pytest.TempPathFactory
) -> Recorded:
    """A life of a broker that makes small groups durable in one way or the other."""
    if EARLIER:
        return Recorded(Path(EARLIER))
    folder = tmp_path_factory.mktemp("recorded")
    disk = Disk(disk_library, folder)
    record(folder, disk, request.param)
    disk.close()
    return Recorded(folder)


def cut_off(
    recorded: Recorded, cuts: list[int], draw: random.Random, disk: Disk, folder: Path,
    *, power: bool,
) -> None:  # fmt: skip
    """Cut the broker's life off at each of `cuts`, and look at what its successor knows."""
    for number, cut in enumerate(cuts):
        target = folder / f"cut-{number}"
        chance = recorded.recording.build(cut, recorded.root, target, draw, power=power)
        about = (
            f"cut {number} at {cut} of {recorded.records[-1].end}: {chance}; again: "
            f"DANUBE_POWER_RECORDING={recorded.folder} DANUBE_POWER_SEED={SEED} "
            f"DANUBE_POWER_CUTS={CUTS} ./run test {Path(__file__).name}; the disk is in {target}"
        )
        if power:
            disk.boot_id = folder / f"boot-{number}"
            disk.boot_id.write_text(f"boot-{SEED}-{number}\n")
        safe = (STRICT, RINGS) if power else (STRICT, RINGS, OS)
        aftermath = Aftermath(recorded.evidence, cut, about, safe)
        go_on_after(FaultyServer(target, disk, **SETTINGS), aftermath)
        shutil.rmtree(target)


@pytest.mark.timeout(300 + 60 * CUTS)
def test_a_power_cut(recorded: Recorded, tmp_path: Path, disk: Disk) -> None:
    draw = random.Random(SEED)
    ends = [record.end for record in recorded.records]
    cuts = [draw.choice(recorded.names() if n % 2 else ends) for n in range(CUTS)]
    cut_off(recorded, cuts, draw, disk, tmp_path, power=True)


@pytest.mark.timeout(300 + 60 * KILLS)
def test_a_kill_between_two_calls(recorded: Recorded, tmp_path: Path, disk: Disk) -> None:
    """What no timing of a real signal would hit; `os` topics lose nothing either."""
    draw = random.Random(SEED)
    cuts = [draw.choice(recorded.names() if n % 2 else recorded.repairs()) for n in range(KILLS)]
    cut_off(recorded, cuts, draw, disk, tmp_path, power=False)


def go_on_after(server: FaultyServer, aftermath: Aftermath) -> None:
    """Start on what is left and compare."""
    with contextlib.ExitStack() as stack:
        stack.push(server.__exit__)
        try:
            server.start()
        except AssertionError as error:
            raise AssertionError(f"{error}\n{aftermath.about}") from None
        client = stack.enter_context(server.client())
        for topic in ALL_TOPICS:
            aftermath.check_log(client, topic)
        for topic in ALL_TOPICS:
            aftermath.check_cursor(client, topic)
        aftermath.check_producers(server)
        server.kill("all")
