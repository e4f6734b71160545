"""kill -9 of any process in the middle of a move, again and again, while producers and consumers are at
work; after a kill of all, another number of workers takes the same logs.

    load: that of test_kills.py
    round: a few moves in peace, then one during which somebody is killed (old worker, new worker,
           coordinator, the whole broker), at a moment drawn from the time that a move takes
    end:   read everything back and hold it against what anybody ever saw; nobody else has anything

DANUBE_CRASH_ROUNDS=n makes it n rounds, DANUBE_CRASH_SEED another order and other moments.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from danube_fast.errors import DanubeError
from tests.crash.history import History
from tests.crash.rig import SLACK, Server, rounds
from tests.crash.test_kills import RECOVERY_SECONDS, SEED, Load, judge, stop_clients
from tests.workers.broker import is_running, wait_until

ROUNDS = rounds(4)
WORKERS = 3
VICTIMS = ("old", "new", "coordinator", "all")
TOPICS = ("/default/f4", "/default/o2", "/default/s1", "/default/f1", "/default/o1", "/default/n1")
MOVE_SECONDS = 0.06
"""About what a move takes here, with some room."""
PEACEFUL_MOVES = 3
PAUSE_FACTOR = 5
"""Moves, not messages, are what there should be many of."""
REFUSALS = ("restarted", "down", "in time", "already", "moved", "lost", "no answer", "up",
            "reached")  # fmt: skip
"""What a move that did not come about says, one of them."""


class Traffic:
    """Moves topics to and fro."""

    def __init__(self, server: Server, draw: random.Random, history: History) -> None:
        self.server = server
        self.draw = draw
        self.history = history
        self.moved = self.refused = 0

    def plan(self, client: Any) -> tuple[str, int, int, int]:
        """A topic, one of its partitions, the worker that has it, and another one."""
        topic = self.draw.choice(TOPICS)
        placement = self.draw.choice(client.admin.describe_topic(topic)["placement"])
        index = int(placement["partition"].rpartition("-part-")[2] or 0) if "-part-" in placement[
            "partition"
        ] else 0  # fmt: skip
        here = int(placement["worker"])
        others = [worker for worker in range(self.server.workers) if worker != here]
        return topic, index, here, self.draw.choice(others)

    def move(self, client: Any, topic: str, index: int, worker: int) -> None:
        """One move; it may be refused, for a reason that can be understood."""
        self.history.kills_ns.append(time.monotonic_ns())  # it ends sessions of consumers, too
        try:
            (done,) = client.admin.move_topic(topic, worker, partition=index, timeout=60)["moved"]
        except DanubeError as error:
            self.refused += 1
            if not any(word in str(error) for word in REFUSALS):
                raise self.history.fail(f"a move was refused with {error!r}") from error
            return
        self.moved += 1
        if done["paused_ms"] > 1000 * SLACK:
            raise self.history.fail(f"publishers of {topic} waited for {done['paused_ms']} ms")


def strike(traffic: Traffic) -> None:
    """A move, and a kill in the middle of it."""
    server, draw = traffic.server, traffic.draw
    victim = draw.choice(VICTIMS)
    if server.workers == 1:
        victim = "all"
    with server.client() as client:
        topic, index, here, there = "", 0, 0, 0
        if server.workers > 1:
            topic, index, here, there = traffic.plan(client)
        assert server.broker is not None
        pids = [int(entry["pid"]) for entry in server.status()["processes"]]
        doomed = {
            "old": [pids[1 + here]], "new": [pids[1 + there]], "coordinator": [pids[0]],
            "all": [*pids, server.broker.process.pid],
        }[victim]  # fmt: skip
        mover = threading.Thread(target=traffic.move, args=(client, topic, index, there))
        if topic:
            mover.start()
        time.sleep(draw.random() * MOVE_SECONDS)
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        if victim != "coordinator":
            traffic.history.kills_ns.append(time.monotonic_ns())
        if victim == "all":
            server.broker.process.wait(60)
        wait_until(f"end of {victim}", lambda: not any(map(is_running, doomed)))
        if victim == "all":
            server._release()
            server.workers = draw.choice((1, 2, WORKERS))
            server.start()
        if topic:
            mover.join(120)
            assert not mover.is_alive(), "a move never ended"


@pytest.mark.timeout(300 + 60 * ROUNDS)
@pytest.mark.parametrize("log", ["kept", "trimmed"])
def test_a_kill_in_the_middle_of_a_move(tmp_path: Path, log: str) -> None:
    draw = random.Random(f"{SEED} moves {log}")
    history = History("")
    retention = {} if log == "kept" else {"retention_seconds_min": 0}
    with ExitStack() as stack:
        server = stack.enter_context(Server(tmp_path / "data", workers=WORKERS, **retention))
        load = Load(tmp_path, server, history, stack, holes=False, pause_factor=PAUSE_FACTOR)
        traffic = Traffic(server, draw, history)
        for number in range(ROUNDS):
            history.about = f"seed {SEED}, log {log}, round {number}"
            load.wait_for_acks(5, 1000, RECOVERY_SECONDS)
            with server.client() as client:
                for _ in range(PEACEFUL_MOVES if server.workers > 1 else 0):
                    topic, index, _, there = traffic.plan(client)
                    traffic.move(client, topic, index, there)
            strike(traffic)
            for resender in load.resenders:
                resender.halt()
                resender.resend()
                resender.start()
            load.wait_for_acks(1, 0, RECOVERY_SECONDS)
        assert traffic.moved > ROUNDS, f"{traffic.moved} moved, {traffic.refused} were refused"
        for resender in load.resenders:
            resender.halt()
            resender.resend()
        sent = stop_clients(load)
        server.stop()
        server.changes["retention_seconds_min"] = 24 * 3600  # nothing goes while it is read
        server.workers = 2
        server.start()
        judge(load, server, sent, trimmed=log == "trimmed")
