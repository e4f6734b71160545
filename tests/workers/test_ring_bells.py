"""Signals that a sleeping worker takes by kernel: each is heard once, so none may be dropped."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from danube_fast.ring.duplex_kernel import BELL_IN, word_of
from danube_fast.workers.shard.publish import ring_intake
from danube_fast.workers.shard.publish.turn_layout import JobWord
from tests.workers.broker import Broker
from tests.workers.ring_client import fresh_endpoint
from tests.workers.ring_turn_rig import Publisher, intake_of, warmed
from tests.workers.shard_rig import Rig

SIGNALS = 10_000
CLIENTS = 5
SECONDS = 60.0


@pytest.fixture
def rig(rigs: Callable[..., Rig]) -> Rig:
    return rigs(ipc_endpoint=fresh_endpoint())


def asleep_until_answered(rig: Rig, *publishers: Publisher) -> None:
    """Have the worker sleep, and turn when it is told to, until all is answered: it looks into no ring that is armed."""
    deadline = time.monotonic() + SECONDS
    while sum([each.hear() < len(each.requests) for each in publishers]):
        assert time.monotonic() < deadline, "a signal was lost"
        if rig.worker._idle.sleep(1):
            rig.worker.do_work()


def test_each_of_many_signals_in_a_row_is_heard(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_intake, "_SERVING_NS_MAX", 0)
    rig.assign(1, durability="memory")
    publisher = Publisher(rig, 1)
    warmed(rig, publisher)
    rings = rig.worker.transports.rings
    assert rings is not None
    for _ in range(SIGNALS):
        assert not rings.awake, "the worker is not armed"
        publisher.post()
        asleep_until_answered(rig, publisher)
        publisher.requests.clear()
        publisher.answers.clear()
    assert publisher.sent == SIGNALS + 1


def test_no_signal_is_taken_without_room_in_the_list(rig: Rig) -> None:
    """More clients signal at once than the job lists."""
    publishers = []
    for partition in range(1, CLIENTS + 1):
        rig.assign(partition, durability="memory")
        publishers.append(Publisher(rig, partition))
    warmed(rig, *publishers)
    intake_of(rig)._words[JobWord.LINKS_MAX] = 2
    for turn in range(2, 50):
        for publisher in publishers:
            publisher.post()
        asleep_until_answered(rig, *publishers)
        assert [len(each.answers) for each in publishers] == [turn] * CLIENTS


def test_the_table_of_sides_grows_with_bells_and_forgets_them(rig: Rig) -> None:
    rig.assign(1, durability="memory")
    rings = rig.worker.transports.rings
    assert rings is not None
    rings._grow_sides(4)
    publishers = [Publisher(rig, 1, f"p{number}") for number in range(CLIENTS)]
    bells = [word_of(row, BELL_IN) for row in rings._sides if row]
    assert len(bells) == CLIENTS and max(bells) < rings.sides[1]
    for publisher in publishers:
        publisher.post()
        asleep_until_answered(rig, publisher)
        publisher.client.socket.close()
    rig.turn(lambda: len(rings) == 0, "the end of all rings")
    assert not rings._sides.any()


def test_processes_of_the_broker_ignore_sigpipe(tmp_path: Path) -> None:
    """A client that closes its end of the pipe would end a worker."""
    with Broker(tmp_path / "data", fake="", workers=1) as broker:
        broker.wait_ready()
        for pid in broker.ready["worker_pids"]:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            ignored = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn"))
            assert ignored >> (signal.SIGPIPE - 1) & 1
