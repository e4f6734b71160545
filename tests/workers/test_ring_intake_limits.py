"""Publishes over rings at the limits: reservations, full logs, full tables, ends, fairness, references, memory."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from danube_fast.broker.admission.layout import PartitionWord
from danube_fast.ring.duplex_kernel import WAITS, word_of
from danube_fast.workers.shard.publish.ring_intake import RingIntake
from danube_fast.workers.shard.worker import MESSAGES_PER_TURN_MAX
from tests.workers.ring_client import RingClient, fresh_endpoint, ring_client
from tests.workers.shard_faults import FullLog, post_publish, settled
from tests.workers.shard_rig import RawClient, Rig

PUBLISHES = 100_000
NONE_DRIFT_MAX = 500
GROWTH_BYTES_MAX = 24 * 1024 * 1024
TURNS_MAX = 4
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def rig(rigs: Callable[..., Rig]) -> Rig:
    return rigs(ipc_endpoint=fresh_endpoint())


def intake_of(rig: Rig) -> RingIntake:
    """What takes plain publishes."""
    taking: RingIntake = rig.worker.transports.take_plain.__self__  # type: ignore[attr-defined]
    return taking


class Counted:
    """Counts the messages that the kernel takes."""

    def __init__(self, rig: Rig) -> None:
        self.taken = 0
        self._take = rig.worker.transports.take_plain
        rig.worker.transports.take_plain = self

    def __call__(self, limit: int) -> int | None:
        taken = self._take(limit)
        self.taken += taken or 0
        return taken


class Publisher:
    """Publishes frames of one message, numbered in their order."""

    def __init__(self, rig: Rig, partition: int, name: str) -> None:
        self.client: RingClient = ring_client(rig)
        self.partition = partition
        self.opened = self.client.open_producer(partition, name)
        self.sent = 0
        self.answers: list[list[int]] = []

    def post(self, count: int, size: int = 8) -> None:
        """Send so many, or have them wait for room."""
        for _ in range(count):
            payload = b"%08d" % self.sent + bytes(size - 8)
            frame = self.client.frame(self.opened, self.sent, [payload])
            post_publish(self.client, (self.partition, frame))
            self.sent += 1

    def hear(self) -> int:
        """Collect answers; how many there are."""
        self.client.pump()
        for command in self.client.waiting:
            if command[0] == 68:
                self.answers += [statuses for _, statuses in command[1]]
        self.client.waiting.clear()
        return len(self.answers)


def finish(rig: Rig, *publishers: Publisher) -> None:
    """Turn until all is answered."""
    for publisher in publishers:
        rig.turn(lambda p=publisher: p.hear() == p.sent, "answers to all publishes")


def post_all(rig: Rig, count: int, *publishers: Publisher) -> None:
    """Publish so many, a few in each turn: what the kernel stops at is for Python until the turn ends."""
    for _ in range(count // 10):
        for publisher in publishers:
            publisher.post(10)
        finish(rig, *publishers)


# ---------------------------------------------------------------- offsets, logs, tables


@pytest.mark.parametrize("options", [
    {"durability": "memory"}, {"durability": "os"}, {"dispatch": "non_reliable"},
])  # fmt: skip
def test_reservations_that_run_out_in_one_call(rig: Rig, options: dict[str, str]) -> None:
    rig.assign(1, **options)
    publisher = Publisher(rig, 1, "p")
    counted = Counted(rig)
    partition = rig.worker.state.catalog.by_id[1]
    partition.reserve_block = 7
    row = rig.worker.state.tables.partitions[partition.slot]
    row[PartitionWord.RESERVED_UNTIL] = row[PartitionWord.NEXT_OFFSET] + 3
    post_all(rig, 200, publisher)
    assert counted.taken > 80
    assert sorted(publisher.answers) == [[0, offset] for offset in range(200)]


def test_a_log_that_refuses_and_takes_again(rig: Rig) -> None:
    rig.assign(1)
    publisher = Publisher(rig, 1, "p")
    publisher.post(10)
    finish(rig, publisher)
    settled(rig)
    disk = FullLog(rig)
    publisher.post(20)
    finish(rig, publisher)
    refused = publisher.answers[10:]
    assert {statuses[0] for statuses in refused} == {8, 32} or refused == [[8, 0]] * 20
    assert refused[0] == [8, 0]
    disk.mend()
    publisher.sent, publisher.answers = 10, [[0, 0]] * 10
    counted = Counted(rig)
    post_all(rig, 300, publisher)
    assert [each for each in publisher.answers if each[0]] == []
    assert counted.taken > 200
    settled(rig)
    publisher.client.subscribe(1)
    assert publisher.client.receive(310) == [(at, b"%08d" % at) for at in range(310)]


def test_a_write_that_fails_takes_back_what_the_kernel_admitted(rig: Rig) -> None:
    rig.assign(1)
    publisher = Publisher(rig, 1, "p")
    publisher.post(1)
    finish(rig, publisher)
    settled(rig)
    counted = Counted(rig)
    log = rig.worker.state.logs[0]
    log.append = FullLog._refuse  # type: ignore[method-assign,assignment]
    log.lend = lambda: None  # type: ignore[method-assign]
    publisher.post(50)
    finish(rig, publisher)
    assert counted.taken == 50
    assert publisher.answers[1:] == [[8, 0]] * 50
    del log.append, log.lend
    publisher.sent, publisher.answers = 1, [[0, 0]]
    publisher.post(50)
    finish(rig, publisher)
    assert publisher.answers[1:] == [[0, offset] for offset in range(1, 51)]


def test_a_table_of_results_that_is_nearly_full(rig: Rig) -> None:
    rig.assign(1)
    rig.worker.state.tables.grow_results(64)
    rig.worker.state.tables.results = rig.worker.state.tables.results[:64]
    rig.worker.state.tables._publish()
    one, other = Publisher(rig, 1, "p"), Publisher(rig, 1, "q")
    counted = Counted(rig)
    post_all(rig, 150, one, other)
    assert counted.taken > 200
    for publisher in (one, other):
        publisher.post(150)
    many = one.client.open_producer(1, "many")
    frames = [(1, one.client.frame(many, at, [b"%d" % at])) for at in range(60)]
    request = post_publish(one.client, *frames)
    statuses = one.client.answer(request)[1]
    assert statuses[::2] == [0] * 60
    finish(rig, one, other)
    offsets = [each[1] for publisher in (one, other) for each in publisher.answers] + statuses[1::2]
    assert sorted(offsets) == list(range(660))


def test_what_an_ended_client_left_in_its_ring_counts(rig: Rig) -> None:
    rig.assign(1)
    publisher = Publisher(rig, 1, "p")
    publisher.post(40)
    assert publisher.client.socket.is_sent
    publisher.client.socket.close()
    rings = rig.worker.transports.rings
    assert rings is not None
    rig.turn(lambda: len(rings) == 0, "the end of the link")
    settled(rig)
    reader = rig.client()
    reader.subscribe(1)
    assert reader.receive(40) == [(at, b"%08d" % at) for at in range(40)]
    assert rig.worker.state.sessions.by_number(publisher.client.session) is None


# ---------------------------------------------------------------- fairness


def flood(publishers: list[Publisher], each: int = MESSAGES_PER_TURN_MAX) -> None:
    """Fill their rings, so that one turn cannot take all."""
    for publisher in publishers:
        publisher.hear()
        publisher.post(each)
        assert publisher.client.socket.is_sent, "the ring is too small for this test"


def turn_while_busy(
    rig: Rig, publishers: list[Publisher], until: Callable[[], Any], what: str
) -> None:
    """Turn a few times, with more in the rings of these than one turn takes."""
    for _ in range(TURNS_MAX):
        flood(publishers, 2 * MESSAGES_PER_TURN_MAX // len(publishers))
        rig.worker.do_work()
        if until():
            return
    raise AssertionError(f"{what} did not come within {TURNS_MAX} turns")


def test_two_busy_clients_are_served_alike(rig: Rig) -> None:
    rig.assign(1, dispatch="non_reliable")
    both = [Publisher(rig, 1, name) for name in "ab"]
    for _ in range(5):
        flood(both)
        before = [publisher.hear() for publisher in both]
        rig.worker.do_work()
        after = [publisher.hear() for publisher in both]
        served = [now - then for now, then in zip(after, before, strict=True)]
        assert abs(served[0] - served[1]) <= 1 and sum(served) >= MESSAGES_PER_TURN_MAX, served


def test_one_message_a_call_serves_busy_clients_in_turn(rig: Rig) -> None:
    rig.assign(1, dispatch="non_reliable")
    publishers = [Publisher(rig, 1, name) for name in "abc"]
    flood(publishers, 50)
    used = [publisher.client.socket.duplex._out.used_bytes for publisher in publishers]
    rig.worker.transports.rings.look()
    for _ in range(9):
        assert intake_of(rig).take(1) == 1
    left = [publisher.client.socket.duplex._out.used_bytes for publisher in publishers]
    taken = [before - now for before, now in zip(used, left, strict=True)]
    assert min(taken) * 2 > max(taken), f"bytes taken of each: {taken}"


@pytest.mark.parametrize("kind", ["rings", "zmq"])
def test_busy_rings_do_not_keep_others_waiting(rig: Rig, kind: str) -> None:
    rig.assign(1, dispatch="non_reliable")
    both = [Publisher(rig, 1, name) for name in "ab"]
    quiet: RawClient = rig.client() if kind == "zmq" else ring_client(rig)
    flood(both)
    request = quiet.post(2)
    if kind == "zmq":
        rig.worker.server.socket.poll(10_000)
    turn_while_busy(rig, both, lambda: quiet._answer(request), "the answer to the PING")


def test_a_command_between_publishes_does_not_wait_for_busy_rings(rig: Rig) -> None:
    rig.assign(1, dispatch="non_reliable")
    busy, mixed = Publisher(rig, 1, "a"), Publisher(rig, 1, "b")
    flood([busy], 4 * MESSAGES_PER_TURN_MAX)
    request = mixed.client.post(2)
    mixed.post(1)
    turn_while_busy(rig, [busy], lambda: mixed.client._answer(request), "the answer to the PING")


def test_an_ended_client_is_closed_while_others_are_busy(rig: Rig) -> None:
    rig.assign(1, dispatch="non_reliable")
    busy, other = Publisher(rig, 1, "a"), Publisher(rig, 1, "b")
    rings = rig.worker.transports.rings
    assert rings is not None
    flood([busy], 2 * MESSAGES_PER_TURN_MAX)
    other.client.socket.close()
    turn_while_busy(rig, [busy], lambda: len(rings) == 1, "the end of its rings")


# ---------------------------------------------------------------- references and memory


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE_BYTES


def publish_all(rig: Rig, publisher: Publisher, count: int, size: int) -> int:
    """Publish so many in turns of 200; the least references to None that there were. The tail leaves one in place of
    each frame that it has dropped, until there are many."""
    least = sys.getrefcount(None)
    for _ in range(count // 200):
        publisher.post(200, size)
        rig.turn(lambda: publisher.hear() == 200, "answers to 200 publishes")
        assert [each for each in publisher.answers if each[0]] == []
        publisher.answers.clear()
        least = min(least, sys.getrefcount(None))
    return least


def test_references_and_memory_stay_after_many_publishes(rigs: Callable[..., Rig]) -> None:
    rig = rigs(ipc_endpoint=fresh_endpoint(), tail_bytes_max=100_000)
    rig.assign(1, dispatch="non_reliable")
    publisher = Publisher(rig, 1, "p")
    counted = Counted(rig)
    holders: list[Any] = counted._take.__self__._holders  # type: ignore[attr-defined]
    gc.collect()  # what other tests have left
    before, memory = publish_all(rig, publisher, PUBLISHES // 10, 1000), resident_bytes()
    publish_all(rig, publisher, PUBLISHES, 1000)
    assert counted.taken >= PUBLISHES
    drift = publish_all(rig, publisher, PUBLISHES // 10, 1000) - before
    assert abs(drift) < NONE_DRIFT_MAX, f"{drift} references to None"
    assert holders == [None] * len(holders)
    grown = resident_bytes() - memory
    assert grown < GROWTH_BYTES_MAX, f"{grown} bytes more after {PUBLISHES} publishes of 1,000"


def test_a_client_whose_ring_was_full_once_is_still_let_rest_by_the_kernel(
    rigs: Callable[..., Rig],
) -> None:
    rig = rigs(ipc_endpoint=fresh_endpoint(), shm_ring_bytes=4096)
    rig.assign(1, dispatch="non_reliable")
    publisher = Publisher(rig, 1, "p")
    rings = rig.worker.transports.rings
    assert rings is not None
    (link,) = rings._links.values()

    def is_full() -> bool:
        publisher.post(1)
        return rig.worker.delivery.waiting

    rig.turn(is_full, "answers that find no room")
    assert word_of(link.row, WAITS) == 1
    finish(rig, publisher)
    rig.turn(lambda: not rings.awake, "the rest of the link")
    assert word_of(link.row, WAITS) == 0, "all that comes goes the ordinary way first"
    counted = Counted(rig)
    publisher.post(5)
    finish(rig, publisher)
    assert counted.taken == 5 and publisher.answers[-1][0] == 0
