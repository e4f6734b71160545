"""Turns of kernels over rings at the edges: who may be served by them, credit, names, room in rings, changes between turns."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgpack
import pytest

from danube_fast.broker import messages as m
from danube_fast.errors import Status
from danube_fast.frame.bundle import sealed_bundle
from danube_fast.workers.shard.publish.turn_layout import JOB, OutletKind
from tests.workers.ring_client import RingClient, fresh_endpoint, ring_client
from tests.workers.ring_turn_rig import (
    DELIVERED_TOO,
    Publisher,
    QuickDisk,
    expected,
    intake_of,
    numbers,
    outlets_of,
    served_again,
    warmed,
    watch_served,
)
from tests.workers.shard_rig import Rig


@pytest.fixture
def rig(rigs: Callable[..., Rig]) -> Rig:
    return rigs(ipc_endpoint=fresh_endpoint())


@pytest.mark.parametrize("consumer", [(1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_a_consumer_whose_number_is_too_large_for_kernels_is_served(
    rig: Rig, consumer: int
) -> None:
    rig.assign(1, durability="memory")
    publisher = Publisher(rig, 1)
    warmed(rig, publisher)
    client = ring_client(rig)
    client.subscribe(1, consumer_id=consumer)
    client.receive(1)
    publisher.post(5)
    publisher.finish()
    publisher.post(5)
    publisher.finish()
    rig.turn(lambda: client.pump() or len(client.delivered) == 10, "deliveries")
    assert {number for number, _ in client.delivered} == {consumer}
    assert client.receive(10) == expected(1, 11)


def test_the_core_is_offered_behind_a_message_alone_unless_others_kept_it(rig: Rig) -> None:
    rig.assign(1, durability="memory")
    publisher = Publisher(rig, 1)
    warmed(rig, publisher)
    words = intake_of(rig)._words
    words[JOB.YIELD_PAUSE], words[JOB.YIELD_BACKOFF] = 1, 800
    publisher.post(5)
    publisher.finish()
    assert (words[JOB.YIELD_PAUSE], words[JOB.YIELD_BACKOFF]) == (1, 800), "others come behind it"
    publisher.post()
    publisher.finish()
    assert (words[JOB.YIELD_PAUSE], words[JOB.YIELD_BACKOFF]) == (0, 800), "it was offered"
    publisher.post()
    publisher.finish()
    assert words[JOB.YIELD_BACKOFF] != 800, "it was not offered again"


HOG = "import os; os.sched_setaffinity(0, {{{}}}); print(flush=True)\nwhile True: pass"


def test_a_core_that_other_work_keeps_is_not_offered_to_it_for_a_while(rig: Rig) -> None:
    cores = os.sched_getaffinity(0)
    rig.assign(1, durability="memory")
    publisher = Publisher(rig, 1)
    warmed(rig, publisher)
    words = intake_of(rig)._words
    command = [sys.executable, "-c", HOG.format(min(cores))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as hog:
        try:
            assert hog.stdout is not None
            hog.stdout.readline()
            os.sched_setaffinity(0, {min(cores)})
            for _ in range(1000):
                publisher.post()
                publisher.finish()
                if words[JOB.YIELD_PAUSE]:
                    break
            assert words[JOB.YIELD_PAUSE] > 0, "1,000 messages later the core is still offered"
        finally:
            os.sched_setaffinity(0, cores)
            hog.kill()


@pytest.mark.parametrize("request_number", [(1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_a_request_number_comes_back_however_large_it_is(rig: Rig, request_number: int) -> None:
    rig.assign(1, durability="memory")
    publisher = Publisher(rig, 1)
    warmed(rig, publisher)
    frame = publisher.client.frame(publisher.opened, 1, [b"x"])
    head = msgpack.packb([11, request_number])
    publisher.client.socket.send_multipart([head, sealed_bundle([(1, frame)])])
    answer = rig.turn(lambda: publisher.client._answer(request_number), "the answer")
    assert answer[1] == [0, 1]


# ---------------------------------------------------------------- room in rings


def narrow(rigs: Callable[..., Rig], durability: str) -> tuple[Rig, Publisher, RingClient]:
    """A worker with small rings, a publisher, and a client that consumes what it publishes."""
    rig = rigs(ipc_endpoint=fresh_endpoint(), shm_ring_bytes=4096)
    rig.assign(1, durability=durability)
    publisher = Publisher(rig, 1)
    client = ring_client(rig)
    warmed(rig, publisher)
    client.subscribe(1)
    client.receive(1)
    return rig, publisher, client


@pytest.mark.parametrize("durability", ["memory", "os", "fsync"])
def test_a_consumer_without_room_gets_all_later_and_once(
    rigs: Callable[..., Rig], durability: str
) -> None:
    rig, publisher, client = narrow(rigs, durability)
    disk = QuickDisk(rig)
    shown: list[bool] = []
    outlets = outlets_of(rig)
    show = outlets.show

    def note(*args: Any, is_delivered: bool) -> None:
        shown.append(is_delivered)
        show(*args, is_delivered=is_delivered)

    outlets.show = note  # type: ignore[method-assign]
    for _ in range(300):
        publisher.post()
        publisher.finish()
        if False in shown:
            break
    assert False in shown and True in shown, "no kernel found a full ring"
    for _ in range(20):  # the client takes nothing
        publisher.post(3)
        publisher.finish()
    total = publisher.sent
    assert client.receive(total - 1) == expected(1, total)
    publisher.post(5)
    publisher.finish()
    assert client.receive(5) == expected(total, total + 5)
    disk.stop()


@pytest.mark.parametrize("durability", ["memory", "os", "fsync"])
def test_a_publisher_without_room_is_answered_later(
    rigs: Callable[..., Rig], durability: str
) -> None:
    rig, publisher, client = narrow(rigs, durability)
    answered: list[int] = []
    intake = rig.worker.intake
    answer = intake.answer_served
    intake.answer_served = lambda *args: answered.append(answer(*args) or 1)  # type: ignore[method-assign]
    disk = QuickDisk(rig)
    for _ in range(600):
        publisher.post()
        rig.turn(lambda: numbers(client)[-1:] == [publisher.sent - 1], "the delivery")
        if answered:
            break
    assert answered, "no kernel found a full ring"
    publisher.post(10)
    total = publisher.sent
    assert publisher.finish() == [[0, at] for at in range(total)]
    assert client.receive(total - 1) == expected(1, total)
    assert rig.worker.intake.frames_answered == total
    disk.stop()


# ---------------------------------------------------------------- names of producers


class Listener:
    """Checks that a client is told the name of a producer before the first of its frames, on each of its links."""

    def __init__(self, client: RingClient) -> None:
        self.client = client
        self.named: list[Any] = []
        self.order: list[tuple[str, Any]] = []
        take = client.socket.recv_multipart

        def listen(flags: int = 0) -> list[bytes]:
            parts = take(flags)
            command = msgpack.unpackb(parts[0], strict_map_key=False)
            if command[0] in (69, 71):
                self.order.append(("names" if command[0] == 71 else "frame", command))
            return parts

        client.socket.recv_multipart = listen  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", ["exclusive", "failover"])
def test_names_of_producers_come_before_their_frames_whoever_gets_them(rig: Rig, kind: str) -> None:
    rig.assign(1, durability="memory")
    publishers = [Publisher(rig, 1, name) for name in "ab"]
    served = warmed(rig, *publishers)
    clients = [ring_client(rig) for _ in range(2)]
    listeners = [Listener(client) for client in clients]
    base = 2
    for turn in range(4):
        consumer = turn + 1
        client, listener = clients[turn % 2], listeners[turn % 2]
        listener.order.clear()
        client.names.clear()
        assert client.subscribe(1, "s", kind=kind, consumer_id=consumer)[0] == 67
        if turn == 0:
            rig.turn(lambda c=client: len(numbers(c, 1)) == 2, "what was there before")
            client.delivered.clear()
        for _ in range(5):
            for publisher in publishers:
                publisher.post()
                publisher.finish()
        rig.turn(lambda c=client, n=consumer: len(numbers(c, n)) >= 10, "deliveries")
        assert numbers(client, consumer) == list(range(base, base + 10))
        base += 10
        producers = {publisher.opened["producer_id"] for publisher in publishers}
        assert client.names.keys() == producers, "not all producers were named"
        for producer in producers:
            heads = [command[2] for what, command in listener.order if what == "names"]
            assert sum(producer in names for names in heads) == 1, f"{producer} named: {heads}"
        assert listener.order[0][0] == "names", "a frame came before the name of its producer"
        client.delivered.clear()
        client.ask(22, [[consumer, [0, base]]])
        client.ask(25, consumer)
    assert served[OutletKind.MEMORY + DELIVERED_TOO] > 10, served


def test_a_standby_takes_over_and_hands_back(rig: Rig) -> None:
    rig.assign(1, durability="memory")
    publisher = Publisher(rig, 1)
    served = warmed(rig, publisher)
    clients = [ring_client(rig) for _ in range(2)]
    for client in clients:
        client.subscribe(1, kind="failover")
    got: list[int] = []
    for _ in range(4):
        for _ in range(5):
            publisher.post()
            publisher.finish()
        wanted = publisher.sent - len(got)
        rig.turn(
            lambda n=wanted: sum(len(numbers(client)) for client in clients) >= n, "deliveries"
        )
        active = [client for client in clients if numbers(client)]
        assert len(active) == 1, "two consumers of a failover subscription got messages"
        got += numbers(active[0])
        assert publisher.opened["producer_id"] in active[0].names, "the producer was not named"
        active[0].delivered.clear()
        active[0].names.clear()
        active[0].ask(22, [[1, [0, publisher.sent]]])
        active[0].ask(25, 1)
        active[0].subscribe(1, kind="failover")
    assert got == list(range(publisher.sent))
    assert served[OutletKind.MEMORY + DELIVERED_TOO], served


# ---------------------------------------------------------------- changes between turns


def publish_rounds(publisher: Publisher, count: int) -> None:
    """Publish so many, each in turns of its own."""
    for _ in range(count):
        publisher.post()
        publisher.finish()


@pytest.mark.parametrize("durability", ["memory", "os", "fsync"])
@pytest.mark.parametrize("other", ["subscription", "reader", "shared"])
def test_who_comes_between_turns_gets_everything_once(
    rig: Rig, durability: str, other: str
) -> None:
    rig.assign(1, durability=durability)
    publisher = Publisher(rig, 1)
    served = warmed(rig, publisher)
    clients = [ring_client(rig) for _ in range(2)]
    clients[0].subscribe(1, "one", kind="shared")
    publish_rounds(publisher, 20)
    kinds = {
        "subscription": ("two", "exclusive"),
        "reader": ("", "reader"),
        "shared": ("one", "shared"),
    }
    name, kind = kinds[other]
    assert clients[1].subscribe(1, name, kind=kind)[0] == 67
    seen = served.total()
    publish_rounds(publisher, 20)
    assert served.total() == seen, "kernels served a partition of two"
    total = publisher.sent
    if other == "shared":
        rig.turn(lambda: sum(len(numbers(client)) for client in clients) == total, "all")
        assert sorted(numbers(clients[0]) + numbers(clients[1])) == list(range(total))
        assert len(numbers(clients[1])) == 10
    else:
        for client in clients:
            rig.turn(lambda c=client: len(numbers(c)) == total, "all")
            assert numbers(client) == list(range(total))
    clients[1].ask(25, 1)
    if other == "reader":
        kind_served = {"memory": 1, "os": 2, "fsync": 3}[durability]
        served_again(rig, served, publisher, kind_served)


@pytest.mark.parametrize(
    ("before", "after"), [*itertools.permutations(("fsync", "os", "memory"), 2)]
)
def test_a_durability_that_changes_while_kernels_serve(rig: Rig, before: str, after: str) -> None:
    rig.assign(1, durability=before)
    publisher = Publisher(rig, 1)
    warmed(rig, publisher)
    client = ring_client(rig)
    client.subscribe(1)
    publish_rounds(publisher, 10)
    publisher.post(30)
    rig.assign(1, durability=after)
    publisher.finish()
    accepted = [answer[1] for answer in publisher.outcomes if answer[0] == 0]
    refused = [answer for answer in publisher.outcomes if answer[0] != 0]
    assert accepted == list(range(len(accepted)))
    assert all(answer[0] in (8, Status.OUT_OF_SEQUENCE) for answer in refused), refused
    publisher.sent = len(accepted)
    served = watch_served(rig)
    served_again(rig, served, publisher, {"memory": 1, "os": 2, "fsync": 3}[after])
    total = publisher.sent
    assert client.receive(total) == expected(0, total)
    assert rig.stats()[0]["end_offset"] == total


def test_a_partition_that_is_deleted_while_kernels_serve(rig: Rig) -> None:
    for partition in (1, 2):
        rig.assign(partition, durability="memory")
    gone, other = Publisher(rig, 1), Publisher(rig, 2)
    served = warmed(rig, gone, other)
    for publisher in (gone, other):
        publisher.post(5)
    rig.operation(m.Unassign([1]))
    for publisher in (gone, other):
        publisher.post(5)
        publisher.finish()
    accepted = [answer for answer in gone.outcomes if answer[0] == 0]
    assert gone.outcomes[: len(accepted)] == [[0, at] for at in range(len(accepted))]
    refused = {answer[0] for answer in gone.outcomes[len(accepted) :]}
    assert refused and refused <= {Status.TOPIC_DELETED, Status.NOT_OWNER}
    assert other.outcomes == [[0, at] for at in range(11)]
    publish_rounds(other, 3)
    assert served[OutletKind.MEMORY]
    rig.assign(1, durability="memory", incarnation=2)
    again = Publisher(rig, 1, "again", gone.client)
    publish_rounds(again, 5)
    assert again.outcomes == [
        [0, at] for at in range(again.outcomes[0][1], again.outcomes[0][1] + 5)
    ]


def test_what_is_not_plain_goes_the_ordinary_way(rig: Rig) -> None:
    for partition in (1, 2):
        rig.assign(partition, durability="memory")
    rig.assign(3, durability="memory", policy={"message_bytes_max": 100})
    rig.assign(4, durability="memory", policy={"publish_messages_per_second": 1000})
    publishers = {partition: Publisher(rig, partition) for partition in (1, 2, 3, 4)}
    served = warmed(rig, *publishers.values())
    client = ring_client(rig)
    for partition in (1, 2):
        client.subscribe(partition, consumer_id=partition)
    publish_rounds(publishers[1], 2)
    publish_rounds(publishers[2], 2)
    seen = served.total()
    assert seen, "kernels served nothing"
    publishers[1].post(deliver_at=[1 << 62])
    publishers[1].finish()
    publish_rounds(publishers[4], 3)
    assert served.total() == seen, (
        "kernels served a delayed message, or one that a rate is charged for"
    )
    publishers[1].post()
    publishers[2].post(keys=[b"k"])
    publishers[2].post(codec=1, size=2000)
    publishers[2].post(attributes=[{"a": "b"}])
    for partition in (1, 2):
        publishers[partition].finish()
    assert publishers[2].outcomes == [[0, at] for at in range(6)]
    publishers[3].post(size=101)
    publishers[3].finish()
    publishers[3].sent = 1
    publishers[3].post(size=100)
    publishers[3].finish()
    assert [answer[0] for answer in publishers[3].outcomes] == [0, 3, 0]
    rig.turn(lambda: len(numbers(client, 2)) == 6 and len(numbers(client, 1)) == 4, "deliveries")
    assert numbers(client, 1) == [0, 1, 2, 4], "a delayed message came early"
    (keyed,) = [view for number, view in client.delivered if number == 2 and view.offsets()[0] == 3]
    assert keyed.keys() == [b"k"]
    (packed,) = [
        view for number, view in client.delivered if number == 2 and view.offsets()[0] == 4
    ]
    assert packed.payloads() == [b"%08d" % 4 + bytes(1992)]


# ---------------------------------------------------------------- sessions


@pytest.mark.parametrize("says_bye", [False, True])
def test_another_session_on_a_link_does_not_publish_as_the_first(rig: Rig, says_bye: bool) -> None:
    rig.assign(1, durability="memory")
    publisher = Publisher(rig, 1)
    served = warmed(rig, publisher)
    publisher.post(3)
    client = publisher.client
    if says_bye:
        client.post(3)
    client.post(1, 1, "raw", {})
    publisher.post(3)
    rig.turn(
        lambda: publisher.hear() >= 4 and publisher.requests[-1] in publisher.answers, "answers"
    )
    assert [publisher.answers[each][0] for each in publisher.requests[-3:]] == [Status.FENCED] * 3
    assert rig.stats()[0]["end_offset"] == 4
    publisher.opened = client.open_producer(1, "p")
    publisher.sent = publisher.opened["next_sequence"]
    assert publisher.sent == 4
    seen = served.total()
    publisher.requests.clear()
    publisher.answers.clear()
    publish_rounds(publisher, 5)
    assert publisher.outcomes == [[0, at] for at in range(4, 9)]
    assert served.total() > seen, "kernels served the new session nothing"


# ---------------------------------------------------------------- many


def test_more_links_messages_and_partitions_than_one_turn_has_room_for(
    rigs: Callable[..., Rig],
) -> None:
    rig = rigs(ipc_endpoint=fresh_endpoint(), shm_ring_bytes=64 * 1024)
    for partition in range(1, 301):
        rig.assign(partition, durability="memory")
    clients = [ring_client(rig) for _ in range(70)]
    publishers = [
        Publisher(rig, partition, client=clients[partition % 70]) for partition in range(1, 301)
    ]
    served = watch_served(rig)
    for _ in range(3):
        for publisher in publishers:
            publisher.post(2)
        rig.worker._idle.sleep(1)
        for publisher in publishers:
            publisher.finish()
    for publisher in publishers:
        assert publisher.outcomes == [[0, at] for at in range(6)]
    assert served[OutletKind.MEMORY] > 300, served
