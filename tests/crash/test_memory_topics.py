"""Messages of a non_reliable topic pass through memory only: what reaches the disk does not depend on
their number. DANUBE_CRASH_MESSAGES=n takes n instead of ten millions.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.rig import Server
from tests.workers.broker import wait_until

MESSAGES = int(os.environ.get("DANUBE_CRASH_MESSAGES", "10000000"))
PAYLOADS: list[bytes | None] = [bytes([i % 256]) * 100 for i in range(10_000)]
DISK_BYTES_MAX = 1_000_000
QUIET_SECONDS = 0.5


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "data", segment_bytes=4 << 20) as started:
        yield started


def written_bytes(server: Server) -> int:
    """Bytes that all processes of the broker have sent towards the disk."""
    total = 0
    for process in server.status()["processes"]:
        lines = Path(f"/proc/{process['pid']}/io").read_text().splitlines()
        total += int(dict(line.split(": ") for line in lines)["write_bytes"])
    return total


def settled(server: Server) -> int:
    """`written_bytes`, once it has stood still for a while: spare segments are made, markers written."""
    state = [written_bytes(server), time.monotonic()]

    def is_still() -> bool:
        now = written_bytes(server)
        if now != state[0] or any(server.data_dir.rglob("*.tmp")):  # a spare is being made
            state[:] = [now, time.monotonic()]
        return time.monotonic() - state[1] > QUIET_SECONDS

    wait_until("quiet", is_still)
    return int(state[0])


def stream(server: Server, count: int) -> int:
    """Publish `count` messages past a consumer; how many of them it saw."""
    topic = "/default/sensors"
    seen = 0
    done = threading.Event()
    with (
        server.client() as client,
        client.producer(topic, dispatch="non_reliable") as producer,
        server.client() as other,
        other.consumer(topic, subscription="s") as consumer,
    ):

        def watch() -> None:
            nonlocal seen
            while True:
                ending = done.is_set()
                batch = consumer.receive_batch(timeout=0.1)
                seen += len(batch)
                if ending and not batch:
                    return

        thread = threading.Thread(target=watch)
        thread.start()
        for _ in range(0, count, len(PAYLOADS)):
            producer.send_many(PAYLOADS)
        producer.flush(timeout=60)
        done.set()
        thread.join()
    return seen


@pytest.mark.timeout(600)
def test_messages_that_are_not_reliable_stay_off_the_disk(server: Server) -> None:
    stream(server, len(PAYLOADS))  # the topic is made, its first offsets are reserved
    grown = []
    for count in (MESSAGES // 10, MESSAGES):
        before = settled(server)
        assert stream(server, count) > 0
        grown.append(settled(server) - before)
    few, many = grown
    assert many < DISK_BYTES_MAX, f"{MESSAGES} messages sent {many} bytes to the disk"
    # reservations double in size, so ten times the messages are a handful of records more
    assert many - few < DISK_BYTES_MAX // 4, f"{grown} bytes for 1 and for 10 parts"
