"""Recent frames in memory cost about what `tail_bytes_max` counts, however small they are."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from danube_fast.testing import Broker

THREADS = 4
PUBLISHED = 500
KIB_MAX = 2.0
"""A frame of one message of 100 bytes, with the objects around it; 0.6 were measured."""


def anonymous_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_a_small_frame_in_the_tail_costs_little(transport: str) -> None:
    with Broker() as broker, broker.client(transport=transport) as client:
        (pid,) = broker.worker_pids
        producers = [client.producer(f"/default/t{n}", durability="os") for n in range(THREADS)]

        def publish_all() -> None:
            def publish(number: int) -> None:
                for _ in range(PUBLISHED):
                    producers[number].publish(bytes(100))

            threads = [threading.Thread(target=publish, args=(n,)) for n in range(THREADS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        publish_all()  # tables and caches have their size afterwards
        before = anonymous_kib(pid)
        publish_all()
        each = (anonymous_kib(pid) - before) / (THREADS * PUBLISHED)
        assert each < KIB_MAX, f"{each:.1f} KiB for a frame of less than 0.4 KiB"
