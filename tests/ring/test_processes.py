"""Rings and doorbells between real processes: order, content, sleep, and death at any instant."""

from __future__ import annotations

import select
import zlib
from typing import Any

import pytest

from danube_fast.ring.control import ControlBlock
from danube_fast.ring.doorbell import Doorbell
from danube_fast.ring.layout import ring_bytes
from danube_fast.ring.memory import create_eventfd, create_memfd, format_ring, map_fd
from danube_fast.ring.repair import read_ring
from danube_fast.ring.spsc import SpscRing
from tests.ring.records import pop_all


def make_ring(peers: Any, capacity_bytes: int) -> int:
    fd: int = peers.own(create_memfd("test-ring", ring_bytes(capacity_bytes)))
    format_ring(map_fd(fd), capacity_bytes)
    return fd


@pytest.mark.parametrize(
    ("rounds", "capacity_bytes", "by_one"), [(150, 1 << 18, 0), (12, 1 << 12, 1)]
)
def test_millions_of_records_in_order(
    peers: Any, rounds: int, capacity_bytes: int, by_one: int
) -> None:
    """Through a roomy ring in batches, and one by one through a ring that is full all the time."""
    fd = make_ring(peers, capacity_bytes)
    consumer = peers.start("stream_consumer", fd, 7, rounds, by_one)
    producer = peers.start("stream_producer", fd, 7, rounds)
    total = rounds * 16 * 1021
    assert producer.result() == total
    assert consumer.result() == [total, -1]


def test_no_wake_up_is_lost(peers: Any) -> None:
    """Two processes that sleep on each other, turn by turn; a lost wake-up ends in a timeout."""
    count = 20_000
    rings = [make_ring(peers, 1024) for _ in range(2)]
    control = ControlBlock.create(2)
    peers.own(control.fd)
    bells = [peers.own(create_eventfd()) for _ in range(2)]
    both = [
        peers.start("ping_pong", side, rings[1 - side], rings[side], control.fd, *bells, count)
        for side in (0, 1)
    ]
    for peer in both:
        right, sleeps, lost = peer.result()
        assert lost == 0, f"asleep at number {right} although a record was there"
        assert right == count
        assert sleeps > 0, "never slept; nothing was tested"


def check_lives(records: list[bytes], seen: dict[int, int]) -> None:
    """Each record is whole; those of a life are dense from 0, lives come one after the other."""
    for record in records:
        assert zlib.crc32(record[:-4]).to_bytes(4, "little") == record[-4:], "torn record"
        life, index = int.from_bytes(record[:4], "little"), int.from_bytes(record[4:8], "little")
        assert index == seen.get(life, 0), f"life {life} continues at {index}"
        assert not seen or life >= max(seen), f"life {life} comes after {max(seen)}"
        seen[life] = index + 1


def test_killed_producers_leave_whole_records(peers: Any) -> None:
    lives = 120
    fd = make_ring(peers, 1 << 14)
    memory = map_fd(fd)
    ring = SpscRing.attach(memory)
    control = ControlBlock.create(2)
    peers.own(control.fd)
    bells = [peers.own(create_eventfd()) for _ in range(2)]
    bell = Doorbell(bells[0], control.doorbell_address(0))
    poller = select.poll()
    poller.register(bell.fileno(), select.POLLIN)
    nursery = peers.start("killed_producer", fd, control.fd, *bells, lives)
    seen: dict[int, int] = {}
    while True:
        ended = not nursery.running
        records = pop_all(ring)
        check_lives(records, seen)
        if ended and not records:
            break
        peers.check_time()
        bell.prepare_sleep()
        if not ring.readable:
            poller.poll(20)  # a producer that was killed before it rang rings nobody
        bell.cancel_sleep()
        bell.drain()
    assert nursery.result() == lives
    assert len(seen) > 10, "nearly every life ended before its first record; nothing was tested"
    assert read_ring(memory).fault == ""


def test_killed_consumers_lose_nothing(peers: Any) -> None:
    """Numbers through consumers that are killed: none missing, and one at most twice per death."""
    lives = 120
    first, second = make_ring(peers, 1 << 13), make_ring(peers, 1 << 13)
    outgoing, incoming = SpscRing.attach(map_fd(first)), SpscRing.attach(map_fd(second))
    nursery = peers.start("killed_consumer", first, second, lives)
    sent, expected, repeated = 0, 0, 0
    while True:
        ended = not nursery.running
        for _ in range(64):
            if not outgoing.try_push(sent.to_bytes(8, "little"), bytes(sent % 90)):
                break
            sent += 1
        records = pop_all(incoming)
        for record in records:
            number = int.from_bytes(record[:8], "little")
            assert record[8:] == bytes(number % 90)
            repeated += number == expected - 1
            assert number in (expected, expected - 1), f"{number} where {expected} was due"
            expected = max(expected, number + 1)
        if ended and not records:
            break
        peers.check_time()
        if not records:
            select.select([], [], [], 0.0005)
    assert nursery.result() == lives
    assert repeated <= lives
    assert expected > lives, "hardly anything went through; nothing was tested"
    left = pop_all(outgoing, 1 << 20)
    assert [int.from_bytes(record[:8], "little") for record in left][-1] == sent - 1
    assert sent - len(left) in (expected, expected - 1)
