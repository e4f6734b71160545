"""The turn of kernels over the ROUTER: what it takes, what it leaves to Python and hands over, and whom it sends to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from danube_fast.frame.bundle import sealed_bundle
from danube_fast.net.zap import NAME_BYTES
from danube_fast.workers.shard.publish.take_kernel import _LEFT_MAX
from danube_fast.workers.shard.publish.turn_layout import COMMAND_ROOM, OutletKind
from danube_fast.workers.shard.routed_peers import PEERS_MAX, RoutedPeers, find_peer
from tests.workers import ring_turn_rig, test_ring_turn_edges
from tests.workers.ring_client import fresh_endpoint, ring_client
from tests.workers.ring_turn_rig import (
    DELIVERED_TOO,
    Publisher,
    expected,
    intake_of,
    numbers,
    payload,
    warmed,
)
from tests.workers.shard_faults import wait
from tests.workers.shard_rig import RawClient, Rig

HELLO, PING, ACK, PUBLISH, NO_SESSION, ERROR, RESULT, PUBLISHED = 1, 2, 22, 11, 65, 66, 67, 68
LARGE_BYTES = 100_000
ROOM_BYTES = 64 * 1024
"""Of a group: less than a large bundle."""
FLOOD_MAX, FLOOD_BYTES = 20_000, 8000
EDGES = [
    test_ring_turn_edges.test_a_standby_takes_over_and_hands_back,
    test_ring_turn_edges.test_a_partition_that_is_deleted_while_kernels_serve,
    test_ring_turn_edges.test_what_is_not_plain_goes_the_ordinary_way,
]


@pytest.fixture
def rig(rigs: Callable[..., Rig]) -> Rig:
    return rigs(ipc_endpoint=fresh_endpoint())


def publisher_of(rig: Rig, partition: int = 1, name: str = "p") -> Publisher:
    """A publisher over the ROUTER whose next message kernels may serve."""
    publisher = Publisher(rig, partition, name, rig.client())
    for _ in range(2):  # before the first one its peer was not known
        publisher.post()
        publisher.finish()
    return publisher


@pytest.mark.parametrize("durability", ["memory", "os", "fsync"])
def test_kernels_serve_publishers_and_consumers_of_the_router(rig: Rig, durability: str) -> None:
    rig.assign(1, durability=durability)
    publisher, consumer = publisher_of(rig), rig.client()
    consumer.subscribe(1)
    assert consumer.receive(2) == expected(0, 2)
    served = warmed(rig, publisher)
    kind = {"memory": OutletKind.MEMORY, "os": OutletKind.OS, "fsync": OutletKind.FSYNC}[durability]
    for _ in range(50):
        publisher.post()
        publisher.finish()
        rig.turn(lambda: not rig.worker.state.journals[0].busy, "rest")
    assert consumer.receive(51) == expected(2, 53)
    assert served[kind + DELIVERED_TOO] > 0, served
    assert publisher.outcomes == [[0, offset] for offset in range(53)]


def test_rings_and_router_share_a_partition(rig: Rig) -> None:
    rig.assign(1, durability="memory")
    publishers = publisher_of(rig, 1, "a"), Publisher(rig, 1, "b", ring_client(rig))
    consumers = rig.client(), ring_client(rig)
    for number, consumer in enumerate(consumers):
        consumer.subscribe(1, f"s{number}")
        consumer.receive(2)
    for _ in range(100):
        for publisher in publishers:
            publisher.post()
    for publisher in publishers:
        publisher.finish()
    assert sorted(offset for each in publishers for _, offset in each.outcomes) == [*range(202)]
    rows = [consumer.receive(200) for consumer in consumers]
    assert rows[0] == rows[1]
    assert [offset for offset, _ in rows[0]] == [*range(2, 202)]


def test_large_bundles_between_small_ones(rig: Rig) -> None:
    """A large one is copied once; those behind it are left to Python for a while, then kernels try again."""
    rig.assign(1, durability="os")
    publisher, consumer = publisher_of(rig), rig.client()
    consumer.subscribe(1)
    consumer.receive(2)
    sizes = [8, LARGE_BYTES, 8, LARGE_BYTES, *[8] * (2 * _LEFT_MAX), LARGE_BYTES, 8]
    for size in sizes:
        publisher.post(size=size)
    publisher.finish()
    assert publisher.outcomes == [[0, offset] for offset in range(2 + len(sizes))]
    rows = [(at, payload(at, size)) for at, size in enumerate(sizes, 2)]
    assert consumer.receive(len(sizes)) == rows


def test_bundles_for_which_there_is_no_room_are_not_copied_each_time(
    rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What kernels receive and cannot take is copied: the next ones stay in the memory that ZeroMQ has read them into."""
    rig = rigs(ipc_endpoint=fresh_endpoint(), group_bytes_max=ROOM_BYTES)
    rig.assign(1, durability="os")
    publisher = publisher_of(rig)
    server, copied = rig.worker.server, []

    def hold(*message: Any, **more: Any) -> None:
        copied.extend(message[2])
        keep(*message, **more)

    keep = server.hold
    monkeypatch.setattr(server, "hold", hold)
    publisher.post(2 * _LEFT_MAX, size=LARGE_BYTES)
    publisher.finish()
    assert publisher.outcomes == [[0, offset] for offset in range(2 + 2 * _LEFT_MAX)]
    assert 1 <= len(copied) <= 3


def test_rings_go_on_beside_a_bundle_for_which_there_is_no_room(rigs: Callable[..., Rig]) -> None:
    """A bundle that was received and is left to Python lies apart from those that are taken behind it."""
    rig = rigs(ipc_endpoint=fresh_endpoint(), group_bytes_max=ROOM_BYTES)
    rig.assign(1, durability="os")
    routed, ringed = publisher_of(rig), Publisher(rig, 1, "over rings", ring_client(rig))
    for _ in range(20):
        ringed.post(5)
        routed.post(size=LARGE_BYTES)
        for _ in range(2 * _LEFT_MAX):
            routed.post()
        wait(lambda: rig.worker.server._port.readable(), "a PUBLISH at the worker")
        ringed.finish()
        routed.finish()
    assert all(status == 0 for status, _ in routed.outcomes + ringed.outcomes)
    offsets = sorted(offset for _, offset in routed.outcomes + ringed.outcomes)
    assert offsets == [*range(len(offsets))]


@pytest.mark.parametrize("parts", [0, 2, 3, 70])
def test_a_publish_with_any_number_of_parts_is_refused(rig: Rig, parts: int) -> None:
    rig.assign(1, durability="memory")
    publisher = publisher_of(rig)
    client = publisher.client
    frame = client.frame(publisher.opened, publisher.sent, [b"x"])
    bundle = bytes(sealed_bundle([(1, frame)]))
    client.socket.send_multipart([msgpack.packb([PUBLISH, 77]), *[bundle] * parts])
    publisher.post()
    publisher.finish()
    assert publisher.outcomes[-1] == [0, 2]
    client.pump()
    errors = [each[1] for each in client.waiting if each[0] == ERROR]
    assert errors == ([] if parts > 64 else [77])


def test_a_command_larger_than_the_room_of_kernels(rig: Rig) -> None:
    rig.assign(1, durability="memory")
    publisher = publisher_of(rig)
    acks = [[1, [0, offset]] for offset in range(COMMAND_ROOM // 3)]
    assert len(msgpack.packb(acks)) > COMMAND_ROOM
    assert publisher.client.ask(ACK, acks)[0] in (RESULT, ERROR)
    publisher.post()
    publisher.finish()
    assert publisher.outcomes[-1] == [0, 2]


def test_a_peer_that_names_itself_is_ignored(rig: Rig) -> None:
    rig.assign(1, durability="memory")
    publisher = publisher_of(rig)
    stranger = rig.context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.IDENTITY, b"\x01" + bytes(200))
    stranger.connect(f"tcp://127.0.0.1:{rig.port}")
    try:
        stranger.send_multipart([msgpack.packb([HELLO, 1, 1, "raw", {}])])
        for _ in range(20):
            publisher.post()
            publisher.finish()
        assert not stranger.poll(0)
    finally:
        stranger.close(linger=0)


def test_another_session_on_a_connection_does_not_publish_as_the_first(rig: Rig) -> None:
    rig.assign(1, durability="memory")
    publisher = publisher_of(rig)
    client = publisher.client
    assert client.ask(HELLO, 1, "raw", {})[0] == 64
    frame = client.frame(publisher.opened, publisher.sent, [b"x"])
    for _ in range(3):
        assert client.publish((1, frame))[0] == 34, "the producer was opened by the session before"
    publisher.opened = client.open_producer(1, "p")
    assert publisher.opened["next_sequence"] == publisher.sent
    publisher.post(3)
    publisher.finish()
    assert publisher.outcomes[-1] == [0, 4]


def test_a_consumer_that_is_gone_loses_nothing_for_others(rig: Rig) -> None:
    rig.assign(1, durability="memory")
    publisher, gone, heir = publisher_of(rig), rig.client(), rig.client()
    for consumer in (gone, heir):
        consumer.subscribe(1, kind="failover")
        consumer.ask(PING)
    gone.receive(2)
    warmed(rig, publisher)
    gone.socket.close(linger=0)
    for _ in range(20):
        publisher.post()
        publisher.finish()
    # what the dead one has is delivered again, as nothing was acked
    heir_rows = rig.turn(
        lambda: (heir.pump(), dict(rows_of(heir)))[1].keys() >= {*range(23)} and rows_of(heir),
        "all messages at the consumer that is left",
    )
    assert dict(heir_rows) == dict(expected(0, 23))


def rows_of(client: RawClient) -> list[tuple[int, Any]]:
    """Offsets and payloads that a client got."""
    return [
        row
        for _, view in client.delivered
        for row in zip(view.offsets().tolist(), view.payloads(), strict=True)
    ]


def test_a_consumer_that_does_not_read_gets_all_later_and_once(rig: Rig) -> None:
    """ZeroMQ's queues fill: what kernels could not send waits in the session's outbox, and what comes behind it, too."""
    rig.assign(1, durability="memory")
    publisher, consumer = publisher_of(rig), rig.client()
    consumer.subscribe(1)
    consumer.receive(2)
    served = warmed(rig, publisher)
    sent = 0
    while not rig.worker.delivery.waiting:  # the system's own buffers grow as it likes
        assert sent < FLOOD_MAX, "the queues of ZeroMQ hold more than this test sends"
        publisher.post(100, size=FLOOD_BYTES)
        publisher.finish()
        sent += 100
    assert served[OutletKind.MEMORY + DELIVERED_TOO] > 0, served
    rig.turn(lambda: (consumer.pump(), len(numbers(consumer)) >= sent + 1)[1], "all messages later")
    assert numbers(consumer) == [*range(2, sent + 3)]
    publisher.post(10)
    publisher.finish()
    rig.turn(lambda: (consumer.pump(), len(numbers(consumer)) >= sent + 11)[1], "the last ones")


def test_what_a_kernel_holds_goes_first(rig: Rig) -> None:
    """Commands and publishes of one client are handled in their order, be it by kernels or by Python."""
    rig.assign(1, durability="memory")
    publisher = publisher_of(rig)
    client = publisher.client
    for number in range(200):
        publisher.post()
        client.send(PING, 1_000_000 + number)
    publisher.finish()
    client.ask(PING)
    pings = [each[1] for each in client.waiting if each[1] >= 1_000_000]
    assert pings == [1_000_000 + number for number in range(200)]
    assert publisher.outcomes == [[0, offset] for offset in range(202)]


def test_a_held_message_keeps_the_worker_awake(rig: Rig) -> None:
    rig.assign(1, durability="memory")
    publisher = publisher_of(rig)
    taking, client = intake_of(rig), publisher.client
    client.send(PING, 5)
    wait(lambda: rig.worker.server._port.readable(), "a PING at the worker")
    assert taking.sleep(1000, lambda timeout_ms: []), "a client's message did not end the sleep"
    assert rig.worker.transports.readable()
    rig.worker.do_work()
    rig.turn(lambda: (client.pump(), [5 in each[:2] for each in client.waiting])[1], "the answer")
    assert not rig.worker.server.holds


def test_names_of_both_kinds_beside_each_other() -> None:
    peers = RoutedPeers(1)
    memory = np.zeros(1, np.int64)
    short, long = b"\0abc\xff", b"\0abc\xfe\xfd\xfc\xff"
    twin = short.ljust(NAME_BYTES, b"\0")

    def found(name: bytes) -> int:
        memory.view(np.uint8)[:] = 0
        memory.view(np.uint8)[: len(name)] = list(name)
        return int(find_peer(peers.address, memory.ctypes.data, len(name)))

    for name in (short, long):
        peers.add(name, 7)
        assert found(name) == peers.row_of(name) != 0
        assert peers.identity_of(found(name)) == name
    assert not found(twin) and not found(b"\0abc") and not peers.row_of(twin)
    peers.forget(long)
    assert not found(long) and found(short)


def test_peers_whose_numbers_have_the_same_low_bits() -> None:
    peers = RoutedPeers(1)
    first, second = (b"\0" + (7 + PEERS_MAX * n).to_bytes(4, "big") for n in (1, 2))
    peers.add(first, 1)
    peers.add(second, 2)
    assert peers.row_of(first) and not peers.row_of(second)
    assert peers.identity_of(peers.row_of(first)) == first
    peers.forget(second)
    assert peers.row_of(first) and len(peers) == 1
    peers.forget(first)
    assert not peers.row_of(first)
    peers.add(second, 2)
    assert peers.identity_of(peers.row_of(second)) == second
    for other in (b"", b"\0", b"\0abc", b"\0abcde", b"\1abcd"):
        peers.add(other, 3)
        assert not peers.row_of(other)


@pytest.mark.parametrize("test", EDGES, ids=lambda test: test.__name__)
def test_edges_of_turns_over_the_router(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, test: Callable[[Rig], None]
) -> None:
    for module in (test_ring_turn_edges, ring_turn_rig):
        monkeypatch.setattr(module, "ring_client", lambda rig: rig.client())
    test(rig)
