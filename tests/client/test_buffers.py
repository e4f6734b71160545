"""Send buffers: two sizes, kept within a bound."""

from __future__ import annotations

from typing import Any

import danube_fast
from danube_fast.client.link import buffers
from danube_fast.client.link.buffers import BufferPool

MIB = 1024 * 1024


def test_small_frames_take_small_buffers() -> None:
    pool = BufferPool(MIB)
    small, large = pool.take(300), pool.take(MIB)
    assert small.capacity_bytes < large.capacity_bytes == MIB
    for buffer in (small, large):
        pool.give_back(buffer)
    assert pool.take(300) is small
    assert pool.take(small.capacity_bytes + 1) is large
    assert pool.take(300) is not small


def test_what_is_kept_is_bounded() -> None:
    pool = BufferPool(MIB)
    lone = pool.take(5 * MIB)
    assert lone.capacity_bytes == 5 * MIB
    taken = [pool.take(MIB) for _ in range(buffers._KEPT_BYTES_MAX // MIB + 3)]
    for buffer in (lone, *taken):
        pool.give_back(buffer)
    again = [pool.take(MIB) for _ in taken]
    assert sum(any(new is old for old in taken) for new in again) == len(taken) - 3
    assert pool.take(5 * MIB) is not lone


def test_a_buffer_of_another_pool_is_not_kept() -> None:
    """Frames of two producers may share a buffer of the one, and the other's pool is given it in the end."""
    for other in (4096, 256 * 1024, 2 * MIB):
        pool, buffer = BufferPool(MIB), BufferPool(other).take(other)
        if buffer.capacity_bytes == pool.take(1).capacity_bytes:
            continue
        pool.give_back(buffer)
        assert pool.take(MIB).capacity_bytes == MIB
        assert pool.take(1) is not buffer


def test_a_pool_of_the_smallest_batches() -> None:
    pool = BufferPool(4096)
    buffer = pool.take(100)
    assert buffer.capacity_bytes == 4096
    pool.give_back(buffer)
    assert pool.take(4096) is buffer


def test_a_batch_that_is_larger_than_it_looked(broker: Any, client: danube_fast.Client) -> None:
    """Keys are not counted where a batch was cut: it goes in several frames then, and nothing is lost."""
    broker.hold_acks = True
    producer = client.producer("/default/t", linger_us=1_000_000)
    keys = [b"%04d" % number * 500 for number in range(1000)]
    for number, key in enumerate(keys):
        producer.send(b"%d" % number, key=key)
    broker.release_acks()
    producer.flush(timeout=60)
    consumer = client.consumer("/default/t", subscription="s", initial_position="earliest")
    got = []
    while len(got) < len(keys):
        message = consumer.receive(timeout=60)
        assert message is not None, f"{len(got)} of {len(keys)} messages came"
        got.append((message.payload, message.key))
    assert got == [(b"%d" % number, key) for number, key in enumerate(keys)]
