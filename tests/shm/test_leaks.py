"""Rings of workers that ended are given back at once, not when the garbage collector comes."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator

import pytest

from danube_fast.testing import Broker

WAIT_SECONDS = 60.0


KINDS = ("/memfd", "pipe:", "anon_inode:[eventfd]")


def held_for_rings() -> int:
    """Descriptors of shared memory and bells that this process has."""
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{entry}").startswith(KINDS)
        except OSError:
            continue
    return count


@pytest.fixture
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_garbage_collection")
def test_a_client_keeps_no_rings_of_workers_that_ended() -> None:
    with (
        Broker() as broker,
        broker.client(transport="shm") as client,
        client.producer("/default/t", durability="os") as producer,
        client.consumer("/default/t", subscription="s") as consumer,
    ):
        before = held_for_rings()
        for _ in range(3):
            dead = broker.kill_worker()
            producer.publish(b"x")
            message = consumer.receive(timeout=WAIT_SECONDS)
            assert message is not None
            consumer.ack(message)
            deadline = time.monotonic() + WAIT_SECONDS
            while dead in broker.worker_pids:
                assert time.monotonic() < deadline, "the worker did not come back"
                time.sleep(0.01)
        del message
        deadline = time.monotonic() + WAIT_SECONDS
        # ZeroMQ closes sockets, which have an eventfd each, by and by
        while held_for_rings() != before:
            assert time.monotonic() < deadline, f"{held_for_rings()} are held, {before} before"
            producer.publish(b"x")
            time.sleep(0.01)
