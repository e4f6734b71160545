"""Input made to hurt: the broker answers it or drops it, and goes on in the same processes.

The known lies have the answers that docs/protocol.md promises. The storm is random; its seed is printed
when it fails, and DANUBE_HOSTILE_SEED runs it again.
"""

from __future__ import annotations

import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from tests.protocol.raw import Peer, endpoint, example, resealed, run_example
from tests.protocol.storm import Storm, lz4_frame
from tests.workers.broker import Broker, Client, is_running

STORM_MESSAGES = 4000
STORM_SECONDS = 8.0
PART_TOO_LONG = 20 << 20
PONG, ERROR, PUBLISHED = 65, 66, 68
INTERNAL = 13
LAST_REQUEST = 999_999

raw = example()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("hostile") / "data", fake="", workers=1) as started:
        started.wait_ready()
        yield started


@pytest.fixture(scope="module")
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as made:
        yield made


@pytest.fixture(autouse=True)
def nobody_died(broker: Broker) -> Iterator[None]:
    """After each test the same processes serve a client that behaves."""
    yield
    result = run_example(endpoint(broker.ready), "/default/calm", "20")
    assert result.returncode == 0, result.stdout + result.stderr + broker.error_text()
    assert all(is_running(pid) for pid in broker.pids), broker.error_text()
    restarts = {entry["process"]: entry["restarts"] for entry in processes(broker)}
    assert not any(restarts.values()), f"{restarts}\n{broker.error_text()}"


def processes(broker: Broker) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = broker.status()["processes"]
    return found


@pytest.fixture
def partition(broker: Broker) -> tuple[int, str]:
    """Partition and worker endpoint of the topic that suffers."""
    with Client(broker) as client:
        row = client.lookup("/default/storm", {"durability": "os"}).value["partitions"][0]
    return row[0], row[3]


@pytest.fixture
def worker(context: zmq.Context[Any], partition: tuple[int, str]) -> Iterator[Peer]:
    with Peer(context, partition[1]) as peer:
        yield peer


def open_producer(worker: Peer, partition_id: int, name: str) -> tuple[int, int, int]:
    found = worker.ask(10, 1, partition_id, name)[2]
    return found["producer_id"], found["producer_epoch"], found["next_sequence"]


def publish(worker: Peer, bundle: bytes) -> list[int]:
    answer = worker.ask(11, 7, parts=(bundle,))
    assert answer[0] == PUBLISHED, answer
    ((request, pairs),) = answer[1]
    assert request == 7
    return pairs  # type: ignore[no-any-return]


# ---------------------------------------------------------------- lies with known answers

NOT_COMMANDS = {
    "nothing": b"",
    "reserved byte": b"\xc1",
    "no array": b"\x02",
    "array without op": b"\x90",
    "unknown op": msgpack.packb([99, 1]),
    "op of an answer": msgpack.packb([64, 1]),
    "op of a wrong type": msgpack.packb(["PING", 1]),
    "too short": msgpack.packb([4, 1]),
    "cut": msgpack.packb([4, 1, "/default/storm"])[:-4],
    "more behind it": msgpack.packb([2, 1]) + b"\0",
    "array that claims 2**32 - 1 fields": b"\xdd\xff\xff\xff\xff",
    "wrong type": msgpack.packb([2, "one"]),
    "number over 64 bits would be a float": msgpack.packb([2, 1e300]),
    "no UTF-8": b"\x93\x04\x01\xa2\xff\xfe",
    "nested without end": b"\x94\x04\x01\xa1a" + b"\x81\xa1a" * 50_000 + b"\0",
    "map of maps": b"\x94\x04\x01\xa1a\x81\x80\x01",
    "a megabyte of name": msgpack.packb([4, 1, 7, "x" * (1 << 20)]),
}


@pytest.mark.parametrize("at", ["bootstrap", "worker"])
@pytest.mark.parametrize("hello", [True, False], ids=["after-hello", "before-hello"])
def test_what_is_no_command_is_answered_with_an_error(
    broker: Broker, context: zmq.Context[Any], partition: tuple[int, str], at: str, hello: bool
) -> None:
    address = endpoint(broker.ready) if at == "bootstrap" else partition[1]
    with Peer(context, address, hello=hello) as peer:
        for what, data in NOT_COMMANDS.items():
            peer.socket.send(data)
            answer = peer.answer()
            assert answer[:3] == [ERROR, 0, 3], f"{what}: {answer}"


def test_before_hello_there_is_no_session(
    broker: Broker, context: zmq.Context[Any], partition: tuple[int, str]
) -> None:
    for address in (endpoint(broker.ready), partition[1]):
        with Peer(context, address, hello=False) as peer:
            for command in ([2, 5], [3, 5], [4, 5, "/default/x"], [10, 5, 1, "n"], [22, 5, []]):
                assert peer.ask(*command)[:3] == [ERROR, 5, 33]
            assert peer.ask(21, 1, 1, 1)[:3] == [ERROR, 0, 33]
            assert peer.ask(11, 5, parts=(raw.pack_bundle(1, []),))[:3] == [ERROR, 5, 33]
            for version in (0, 2, 2**63):
                assert peer.ask(1, 5, version, "x")[:3] == [ERROR, 5, 9]
            assert peer.ask(1, 5, 1, "x", {}, "", 0, 10**9, b"token")[7] is False  # not resumed
            assert peer.ask(2, 6)[:2] == [65, 6]


def test_bundles_that_lie(worker: Peer, partition: tuple[int, str]) -> None:
    partition_id, _ = partition
    owner = open_producer(worker, partition_id, "bundles")
    frame = raw.pack_frame([(b"k", b"v")], *owner)
    good = raw.pack_bundle(partition_id, [frame])
    size = len(frame)
    for lie in (
        b"",
        good[:7],
        good[:-8],
        good + bytes(8),
        raw.pack_bundle(partition_id, []),
        struct.pack("<II", raw.BUNDLE_MAGIC ^ 1, 1) + good[8:],
        struct.pack("<II", raw.BUNDLE_MAGIC, 2) + good[8:],
        struct.pack("<II", raw.BUNDLE_MAGIC, 2**32 - 1) + good[8:],
        good[:8] + struct.pack("<II", partition_id, size + 8) + frame,
        good[:8] + struct.pack("<II", partition_id, 2**32 - 8) + frame,
        struct.pack("<IIIIII", raw.BUNDLE_MAGIC, 2, partition_id, 64, partition_id, size - 64)
        + frame,
    ):
        assert publish(worker, lie)[0] == 3
    assert publish(worker, raw.pack_bundle(partition_id + 1000, [frame]))[0] == 36
    assert publish(worker, good)[0] == 0


def test_frames_that_lie(worker: Peer, partition: tuple[int, str]) -> None:
    partition_id, _ = partition
    owner = open_producer(worker, partition_id, "frames")
    frame = raw.pack_frame([(b"k", b"value"), (None, b"two")], *owner)
    first_entry = 128 + 8
    lies = [
        (0, "I", 0),
        (4, "B", 2),
        (5, "B", 3),
        (5, "B", 1),
        (6, "H", 1),
        (6, "H", 2),
        (8, "I", 128),
        (8, "I", len(frame) + 8),
        (12, "I", 0),
        (12, "I", 3),
        (12, "I", 2**32 - 1),
        (16, "I", 0),
        (32, "Q", 2**64 - 1),
        (58, "B", 8),
        (59, "B", 1),
        (128, "I", 0),
        (128, "I", 2**32 - 1),
        (132, "I", 1),
        (first_entry, "H", 6),
        (first_entry, "H", 65_535),
        (first_entry + 4, "I", 2**32 - 4),
    ]
    for change in lies[:3] + lies[4:]:
        changed = resealed(frame, raw.crc32c, change)
        pairs = publish(worker, raw.pack_bundle(partition_id, [changed]))
        assert pairs[0] == 3, f"{change}: {pairs}"
    for position in range(8, len(frame), 5):
        if not 64 <= position < 128:  # the broker's half is nobody's word
            changed = bytearray(frame)
            changed[position] ^= 0x40
            assert publish(worker, raw.pack_bundle(partition_id, [bytes(changed)]))[0] in (3, 34)
    ahead = raw.pack_frame([(None, b"x")], owner[0], owner[1], owner[2] + 5)
    assert publish(worker, raw.pack_bundle(partition_id, [ahead]))[0] == 32
    strange = raw.pack_frame([(None, b"x")], owner[0] ^ 1, owner[1], owner[2])
    assert publish(worker, raw.pack_bundle(partition_id, [strange]))[0] == 34
    assert publish(worker, raw.pack_bundle(partition_id, [frame]))[0] == 0


def test_a_frame_that_does_not_decompress_is_nobodys_end(
    worker: Peer, partition: tuple[int, str]
) -> None:
    """Even when the broker must take it apart, to deliver a part of it again."""
    partition_id, _ = partition
    owner = open_producer(worker, partition_id, "compressed")
    good = raw.pack_frame([(b"k%d" % i, b"value" * 9) for i in range(10)], *owner)
    packed = lz4_frame(good)
    assert len(packed) < len(good)
    huge = resealed(packed, raw.crc32c, (12, "I", 2**32 - 1))
    assert publish(worker, raw.pack_bundle(partition_id, [huge])) == [3, 0]
    torn = resealed(packed[:160] + b"\xff" * 16 + packed[176:], raw.crc32c)
    worker.ask(20, 2, 1, 1, partition_id, "taker", "shared", "latest")
    worker.send(21, 1, 1 << 20, 1 << 20)
    status, offset = publish(worker, raw.pack_bundle(partition_id, [torn]))
    if status == 0:
        worker.wait_deliveries(1)
        worker.send(23, [[1, [offset + 2, offset + 5, offset + 7, offset + 8]]])
        worker.wait_deliveries(2)
        assert worker.ask(22, 3, [[1, [offset, offset + 10]]])[:2] == [67, 3]
    assert worker.ask(25, 4, 1)[:2] == [67, 4]


def test_a_part_over_the_limit_costs_only_its_connection(
    broker: Broker, context: zmq.Context[Any], partition: tuple[int, str]
) -> None:
    for address in (endpoint(broker.ready), partition[1]):
        with Peer(context, address) as peer, Peer(context, address) as other:
            peer.send(11, 5, parts=(bytes(PART_TOO_LONG),))
            assert peer.ask(2, 6)[:3] == [ERROR, 6, 33]  # ZeroMQ connected again by itself
            assert other.ask(2, 6)[:2] == [65, 6]


# ---------------------------------------------------------------- the storm


def what_is_kept(broker: Broker) -> tuple[int, dict[str, int]]:
    """End of the topic that suffered, and the cursors of its subscriptions."""
    with Client(broker) as client:
        (found,) = client.admin("topic_stats", topic="/default/storm")["partition_stats"]
    cursors = {entry["subscription"]: entry["cursor"] for entry in found["subscriptions"]}
    return found["end_offset"], cursors


def chosen_seed() -> int:
    """A new one each time, unless the environment asks for one; pytest shows it on a failure."""
    seed = int(os.environ.get("DANUBE_HOSTILE_SEED", 0)) or random.SystemRandom().getrandbits(32)
    print(f"DANUBE_HOSTILE_SEED={seed}")
    return seed


def storm_at(
    context: zmq.Context[Any],
    address: str,
    storm: Storm,
    *,
    is_worker: bool,
    count: int = STORM_MESSAGES,
) -> int:
    """Throw messages for a while; the number of answers. Fails on an answer INTERNAL."""
    peer = Peer(context, address)
    answers = 0
    deadline = time.monotonic() + STORM_SECONDS
    try:
        for i in range(count):
            if i % 20 == 0:  # a new connection now and then begins without HELLO
                answers += answered(peer)
                peer.close()
                has_session = i % 300 != 0
                peer = Peer(context, address, hello=has_session)
                if is_worker and has_session:
                    storm.owner = open_producer(peer, storm.partition_id, "storm")
                    peer.send(20, 1, 1, 1, storm.partition_id, "storm", "shared", "earliest")
                    peer.send(21, 1, 1 << 24, 1 << 24)
            peer.socket.send_multipart(storm.message())
            if time.monotonic() > deadline:
                break
        return answers + answered(peer)
    finally:
        peer.close()


def answered(peer: Peer) -> int:
    """How many answers come before that to a last PING. Fails on an answer INTERNAL."""
    count = 0
    peer.send(2, LAST_REQUEST)
    while True:
        answer = peer.receive()
        assert answer is not None, "no answer to the PING behind the storm"
        assert answer[0] != ERROR or answer[2] != INTERNAL, answer
        if answer[0] in (PONG, ERROR) and answer[1] == LAST_REQUEST:
            return count
        count += 1


def test_a_storm(broker: Broker, context: zmq.Context[Any], partition: tuple[int, str]) -> None:
    seed = chosen_seed()
    partition_id, address = partition
    storm = Storm(seed, partition_id, (1, 1, 0))
    assert storm_at(context, address, storm, is_worker=True) > 20
    assert storm_at(context, endpoint(broker.ready), storm, is_worker=False) > 20


def test_noise_below_zeromq(broker: Broker) -> None:
    seed = chosen_seed()
    chance = random.Random(seed)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\0" + bytes(31)
    for port in (endpoint(broker.ready).rpartition(":")[2], *broker.ready["worker_ports"]):
        for start in (b"", b"GET / HTTP/1.1\r\n\r\n", greeting, greeting + b"\x06" + b"\xff" * 8):
            with socket.create_connection(("127.0.0.1", int(port)), timeout=60) as connection:
                try:
                    connection.sendall(start + chance.randbytes(chance.randint(0, 5000)))
                except ConnectionError:
                    continue  # thrown out already


def test_what_got_in_harms_nobody_after_a_restart(
    tmp_path: Path, context: zmq.Context[Any]
) -> None:
    seed = chosen_seed()
    for start in range(2):
        with Broker(tmp_path / "data", fake="", workers=1) as broker:
            broker.wait_ready()
            with Client(broker) as client:
                (row,) = client.lookup("/default/storm", {"durability": "os"}).value["partitions"]
            if start == 0:
                storm_at(context, row[3], Storm(seed, row[0], (1, 1, 0)), is_worker=True, count=400)
                before = what_is_kept(broker)
            else:
                assert what_is_kept(broker) == before
            result = run_example(endpoint(broker.ready), "/default/calm", "20")
            assert result.returncode == 0, result.stdout + result.stderr + broker.error_text()
            assert not any(entry["restarts"] for entry in processes(broker)), broker.error_text()
            assert broker.stop() == 0, broker.error_text()
