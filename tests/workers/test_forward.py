"""Publishing through a worker that does not own the partition: real processes, raw sockets."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from danube_fast.frame.bundle import sealed_bundle
from tests.workers.broker import Broker, Client, wait_until
from tests.workers.shard_rig import WAIT_SECONDS, RawClient


class Wire:
    """A worker in another process, as `RawClient` wants its rig."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.context: zmq.Context[Any] = zmq.Context()

    def turn(self, until: Callable[[], Any], what: str) -> Any:
        """Wait until `until` gives something true."""
        return wait_until(what, until, WAIT_SECONDS)


def port_of(row: list[Any]) -> int:
    return int(str(row[3]).rsplit(":", 1)[1])


def test_a_client_of_one_worker_publishes_to_partitions_of_both(tmp_path: Path) -> None:
    with Broker(tmp_path / "data", fake="", segment_bytes=4 << 20) as broker:
        ready = broker.wait_ready()
        with Client(broker) as client:
            rows = client.lookup("/default/t", {"partitions": 2}).value["partitions"]
        assert {row[2] for row in rows} == {0, 1}
        wire = Wire(port_of(rows[0]))
        raw = RawClient(wire)  # type: ignore[arg-type]
        opened = [raw.open_producer(row[0]) for row in rows]
        for i in range(50):
            frames = [
                (row[0], raw.frame(o, i, [b"m%d" % i])) for row, o in zip(rows, opened, strict=True)
            ]
            assert raw.publish(*frames) == [0, i, 0, i]
        again = raw.frame(opened[1], 49, [b"m49"])
        assert raw.publish((rows[1][0], again)) == [1, 49]

        other = Wire(port_of(rows[1]))
        consumer = RawClient(other)  # type: ignore[arg-type]
        consumer.subscribe(rows[1][0])
        assert consumer.receive(50) == [(i, b"m%d" % i) for i in range(50)]

        os.kill(ready["worker_pids"][1], signal.SIGKILL)
        frame = raw.frame(opened[1], 50, [b"m50"])
        deadline = time.monotonic() + WAIT_SECONDS
        while True:  # the owner is gone: look up and open again, as the status says
            reply = raw.ask(11, parts=(sealed_bundle([(rows[1][0], frame)]),))
            if reply[1][0] in (0, 1):
                break
            assert reply[1][0] in (34, 36), reply
            assert time.monotonic() < deadline, "the partition did not come back"
            answer = raw.ask(10, rows[1][0], "p")
            if answer[0] == 67:
                frame = raw.frame(answer[2], 50, [b"m50"])
                assert answer[2]["next_sequence"] in (50, 51)
        assert reply[1][1] == 50
        for end in (wire, other):
            end.context.destroy(linger=0)
