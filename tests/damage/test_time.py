"""The wall clock jumps, both ways, under a broker at work: nothing is reordered, expires or stalls."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from danube_fast.clock import SystemClock
from danube_fast.config import Settings
from danube_fast.wal.log import Log
from tests.crash.rig import SMALL, Server

SOURCE = Path(__file__).with_name("clock.c")
DAY_NS = 86_400 * 10**9
JUMPS_NS = (400 * DAY_NS, -400 * DAY_NS, 3600 * 10**9, -7 * DAY_NS, 0)
AT_FIRST = 3000
"""Messages before the first jump: some segments, acked, which a day's retention still keeps."""
WAIT_SECONDS = 60.0
"""No message may take longer; the shortest jump is an hour."""


@pytest.fixture(scope="module")
def clock_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """clock.c, compiled. Fails, and does not skip, when there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, "these tests need a C compiler: install gcc or clang"
    library = tmp_path_factory.mktemp("clock") / "clock.so"
    command = [compiler, "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-o"]
    subprocess.run([*command, str(library), str(SOURCE), "-ldl"], check=True, timeout=60)
    return library


def payload_of(number: int) -> bytes:
    return b"%d " % number + bytes(1000)


class WallClock:
    """The broker's, as far as it differs from ours."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(4096))

    def shift(self, ns: int) -> None:
        """Set it."""
        with self.path.open("r+b") as file:
            file.write(struct.pack("<q", ns))


def test_jumps_both_ways_change_nothing(
    tmp_path: Path, clock_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall = WallClock(tmp_path / "clock")
    monkeypatch.setenv("LD_PRELOAD", str(clock_library))
    monkeypatch.setenv("DANUBE_CLOCK_FILE", str(wall.path))
    server = Server(tmp_path / "data", workers=1, session_timeout_ms=60_000)
    with server:
        monkeypatch.undo()
        assert os.environ.get("LD_PRELOAD") is None
        jumped: list[int] = []
        sent: list[int] = []
        stop = threading.Event()
        with server.client() as client, server.client() as other:
            idle = other.producer("/default/idle", name="seldom")
            first = idle.publish(b"once")

            def publish() -> None:
                with client.producer("/default/t", name="p", durability="fsync") as producer:
                    for number in range(AT_FIRST):
                        producer.send(payload_of(number))
                    producer.flush(timeout=60)
                    while not stop.is_set():
                        sent.append(producer.publish(payload_of(AT_FIRST + len(sent))).offset)
                        time.sleep(0.002)

            thread = threading.Thread(target=publish)
            thread.start()
            try:
                with other.consumer(
                    "/default/t", subscription="s", initial_position="earliest"
                ) as consumer:
                    received = 0
                    for jump_ns in (0, *JUMPS_NS):
                        wall.shift(jump_ns)
                        jumped.append(jump_ns)
                        until = time.monotonic() + 1.2
                        while time.monotonic() < until or received < AT_FIRST:
                            message = consumer.receive(timeout=WAIT_SECONDS)
                            assert message is not None, f"nothing came after the jumps {jumped}"
                            assert (message.offset, message.payload) == (
                                received,
                                payload_of(received),
                            )
                            assert message.redelivery_count == 0
                            consumer.ack(message)
                            received += 1
            finally:
                stop.set()
                thread.join(WAIT_SECONDS)
            assert not thread.is_alive(), "the producer stalled"
            assert sent == [AT_FIRST + n for n in range(len(sent))]
            assert idle.publish(b"again").offset == first.offset + 1
            assert not any(entry["restarts"] for entry in server.status()["processes"])
        found = sorted(path.name for path in (tmp_path / "data/logs/0000").glob("0*.seg"))
        assert len(found) >= 3, f"too few segments to expire any: {found}"
        assert int(found[0][:20]) == 0, f"a segment of just now expired: {found}"
        server.stop()
    times = append_times(tmp_path / "data" / "logs" / "0000")
    assert times == sorted(times), "append times went back"
    assert times[-1] - times[0] > 300 * DAY_NS, "the broker's clock did not jump"


def append_times(directory: Path) -> list[int]:
    """Of all messages of the busy topic, in the order of the log."""
    settings = msgspec.structs.replace(Settings(), **SMALL)
    for snapshot in directory.glob("*.snap"):
        snapshot.unlink()  # so that all of it is replayed
    log = Log.open(directory, log_id=0, settings=settings, clock=SystemClock())
    rows = np.concatenate([block.rows.copy() for block in log.replay()])
    log.close()
    busiest = np.bincount(rows["partition_id"][rows["partition_id"] < 1 << 20]).argmax()
    return [int(time_ns) for time_ns in rows["append_time_ns"][rows["partition_id"] == busiest]]
