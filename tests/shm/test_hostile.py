"""Clients that die at any instant, and one that tries to do harm: only they suffer.

DANUBE_LANE_KILLS=n kills more producers, DANUBE_SCRIBBLE_SECONDS=s lets the scribbler work longer.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.crash.rig import Server
from tests.shm.children import child, heard, held
from tests.shm.dying_producer import HEAD, payload_of
from tests.workers.broker import is_running, wait_until

KILLS = int(os.environ.get("DANUBE_LANE_KILLS", "12"))
SCRIBBLE_SECONDS = float(os.environ.get("DANUBE_SCRIBBLE_SECONDS", "5"))
SEED = int(os.environ.get("DANUBE_SCRIBBLE_SEED", "1"))
RING_BYTES = 64 * 1024
MESSAGES_MIN = 100
VISITS_MIN = 6
GROWTH_BYTES_MAX = 64 * 1024 * 1024


@pytest.mark.timeout(300 + 20 * KILLS)
def test_producers_killed_at_any_instant(tmp_path: Path) -> None:
    """Of each life a whole beginning is in the log, in order, with all that was acked to it."""
    draw = random.Random(SEED)
    acked: dict[int, int] = {}
    with Server(tmp_path / "data", workers=1, shm_ring_bytes=RING_BYTES) as server:
        worker = server.pid_of(1)
        for life in range(KILLS):
            with child(
                "-m", "tests.shm.dying_producer", server.url, "/default/t", str(life)
            ) as process:
                said = heard(process, HEAD.size)
                time.sleep(draw.random() * 0.05)
                process.kill()
                assert process.stdout is not None
                said += process.stdout.read()
            acked[life] = HEAD.unpack_from(said, (len(said) // HEAD.size - 1) * HEAD.size)[1]
        seen: dict[int, int] = dict.fromkeys(acked, 0)
        with server.client() as client:
            for message in client.reader("/default/t"):
                life, number = HEAD.unpack_from(message.payload)
                assert number == seen[life], (
                    f"life {life}: {number} stands where {seen[life]} should"
                )
                assert message.payload == payload_of(life, number), f"life {life}: {number} is torn"
                seen[life] += 1
        assert server.pid_of(1) == worker, "the worker died too"
        wait_until("the end of all rings", lambda: held(worker).maps == 0)
    assert {life: seen[life] >= count > 0 for life, count in acked.items()} == dict.fromkeys(
        acked, True
    )


def resident_bytes(pid: int) -> int:
    """Anonymous memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.timeout(300 + 3 * SCRIBBLE_SECONDS)
def test_a_scribbler_among_others(tmp_path: Path) -> None:
    with Server(tmp_path / "data", workers=1, shm_ring_bytes=RING_BYTES) as server:
        worker = server.pid_of(1)
        with server.client(transport="shm") as client:
            producer = client.producer("/default/t", durability="os")
            consumer = client.consumer("/default/t", subscription="s", initial_position="earliest")
            (connection,) = client._core.routes.workers.values()
            before = resident_bytes(worker)
            with child("-m", "tests.shm.scribbler", connection.endpoint, str(SEED)) as process:
                heard(process, 1)
                deadline = time.monotonic() + SCRIBBLE_SECONDS
                number = 0
                while time.monotonic() < deadline or number < MESSAGES_MIN:
                    payload = b"%d" % number
                    producer.publish(payload)
                    message = consumer.receive(timeout=60)
                    assert message is not None and message.payload == payload
                    consumer.ack(message)
                    number += 1
                assert process.poll() is None, "the scribbler ended"
                heard(process, VISITS_MIN)
            assert connection.has_rings
        assert is_running(worker) and server.pid_of(1) == worker, "the worker died"
        assert resident_bytes(worker) < before + GROWTH_BYTES_MAX
        wait_until("the end of all rings", lambda: held(worker).maps == 0)
        with server.client(transport="shm") as client:
            client.producer("/default/t").publish(b"after")
