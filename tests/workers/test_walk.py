"""One message on its walk from publish() to its ack: the numbers may only fall.

Each is the smallest of some messages, for a turn may also do what the clock asks.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import danube_fast
from tests.workers.broker import Broker
from tests.workers.walk import WALK_FILE, Tracer

TOPIC = "/default/walk"
MESSAGES = 400
LEGS = ("publish, client", "served by kernels, worker", "receive and ack, client", "ack, worker")
CEILINGS = {
    "zmq": ((34, 28, 19), (154, 124, 48), (116, 82, 26), (272, 212, 60)),
    "shm": ((34, 28, 19), (154, 122, 48), (116, 84, 26), (272, 200, 60)),
}
"""By lane: calls, stays and files of each leg, some percent above what was counted last. Lower them when the walk
becomes shorter."""
FILES_MAX = 87
"""Distinct files of all legs."""

MARKS = {
    "served by kernels, worker": "workers/shard/publish/ring_intake.py:_hand_on",
    "ack, worker": "workers/shard/deliver/consumer_commands.py:_ack",
}
"""What happens in no other turn of a worker."""


class Leg:
    """One leg of the walk: the shortest of those that were seen, and the least of each number, for the shortest may do
    what others do at another time."""

    def __init__(self) -> None:
        self.shortest: dict[str, Any] | None = None
        self._least = (sys.maxsize,) * 3

    def add(self, *stretches: dict[str, Any]) -> None:
        """One more message went this way, through one or several threads."""
        files = dict.fromkeys(name for each in stretches for name in each["files"])
        walked = {
            "calls": sum(each["calls"] for each in stretches),
            "stays": sum(each["stays"] for each in stretches),
            "files": list(files),
        }
        size = walked["calls"], walked["stays"], len(files)
        calls, stays, file_count = map(min, size, self._least)
        self._least = calls, stays, file_count
        if self.shortest is None or walked["calls"] < self.shortest["calls"]:
            self.shortest = walked

    @property
    def size(self) -> tuple[int, int, int]:
        """Calls, stays, files."""
        assert self.shortest is not None, "nothing went this way"
        return self._least


def walk(data_dir: Path, transport: str) -> dict[str, Leg]:
    """Send messages one after the other; the legs of their walk."""
    out = data_dir.parent / "walk.json"
    legs = {name: Leg() for name in LEGS}
    pumps: list[Tracer] = []

    def trace_thread(*_: Any) -> None:
        tracer = Tracer()
        pumps.append(tracer)
        sys.setprofile(tracer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(WALK_FILE, str(out))
        broker = Broker(data_dir, fake="tests.workers.walk", workers=1)
    main = Tracer()

    def begin() -> None:
        for tracer in (main, *pumps):
            tracer.begin()

    with broker:
        url = broker.wait_ready()["url"]
        threading.setprofile(trace_thread)
        try:
            with danube_fast.connect(url, transport=transport) as client:  # type: ignore[arg-type]
                client.admin.create_topic(TOPIC, durability="fsync")
                consumer = client.consumer(TOPIC, subscription="s")
                producer = client.producer(TOPIC)
                for number in range(MESSAGES):
                    begin()
                    sys.setprofile(main)
                    producer.publish(b"%d" % number)
                    sys.setprofile(None)
                    legs["publish, client"].add(main.end(), *(each.end() for each in pumps))
                    begin()
                    sys.setprofile(main)
                    message = consumer.receive(timeout=60)
                    assert message is not None and message.payload == b"%d" % number
                    consumer.ack(message)
                    consumer.flush_acks()
                    sys.setprofile(None)
                    leg = legs["receive and ack, client"]
                    leg.add(main.end(), *(each.end() for each in pumps))
        finally:
            threading.setprofile(None)  # type: ignore[arg-type]
            sys.setprofile(None)
    for stretch in json.loads(out.read_text()):
        functions = set(stretch["functions"])
        for name, function in MARKS.items():
            if function in functions:
                legs[name].add(stretch)
    return legs


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_the_walk_of_one_message_grows_no_longer(
    tmp_path: Path, transport: str, capsys: pytest.CaptureFixture[str]
) -> None:
    legs = walk(tmp_path / "data", transport)
    missing = [name for name, leg in legs.items() if leg.shortest is None]
    assert not missing, f"nothing went this way: {missing}"
    sizes = {name: leg.size for name, leg in legs.items()}
    files = {name for leg in legs.values() for name in (leg.shortest or {})["files"]}
    with capsys.disabled():
        print(f"\n{transport:26}{'calls':>8}{'stays':>8}{'files':>8}")
        for name, size in sizes.items():
            print(f"  {name:24}{size[0]:8}{size[1]:8}{size[2]:8}")
        total = [sum(column) for column in zip(*sizes.values(), strict=True)]
        print(f"  {'all, distinct files':24}{total[0]:8}{total[1]:8}{len(files):8}")
    for (name, size), most in zip(sizes.items(), CEILINGS[transport], strict=True):
        assert all(now <= limit for now, limit in zip(size, most, strict=True)), (
            f"the walk grew: {name} has {size} calls, stays and files, at most {most} before"
        )
    assert len(files) <= FILES_MAX, sorted(files)
