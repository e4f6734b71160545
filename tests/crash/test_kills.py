"""kill -9 of any process, or of all at once, while producers and consumers are at work.

    load: 7 named producers in 2 processes (fsync, os, non_reliable; whole batches, keys over several
          partitions, one by one), 2 more in the protocol's own words, 4 consumers
    round: wait for load, SIGKILL, (start again), resend what was acked before, go on
    end:   read everything back and hold it against what anybody ever saw

Once with a log that keeps everything, once with one that is trimmed behind the cursors all the while,
so that segments are used again with the frames of before in them.

The clients of the load are never touched: they must go on by themselves. DANUBE_CRASH_ROUNDS=n makes
it n rounds, DANUBE_CRASH_SEED another order and other moments.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.crash.history import History
from tests.crash.payloads import RECORD_DTYPE, partition_of, read_records
from tests.crash.resender import Resender
from tests.crash.rig import Member, Server, rounds

SEED = int(os.environ.get("DANUBE_CRASH_SEED", "20240917"))
ROUNDS = rounds(8)
TRANSPORTS = ("shm", "zmq")
"""Clients take turns."""
VICTIMS = ("worker", "coordinator", "supervisor", "all")
ACKS_BEFORE_KILL = 5000
RECOVERY_SECONDS = 60.0
DRAIN_SECONDS = 60.0

FSYNC: dict[str, Any] = {"dispatch": "reliable", "durability": "fsync"}
OS: dict[str, Any] = {"dispatch": "reliable", "durability": "os"}
PLANS: list[list[dict[str, Any]]] = [
    [
        {"topic": "/default/f4", "index": 1, "style": "keyed", "options": {**FSYNC, "partitions": 4}},
        {"topic": "/default/o2", "index": 2, "style": "keyed", "options": {**OS, "partitions": 2}},
        {"topic": "/default/n1", "index": 3, "style": "batch",
         "options": {"dispatch": "non_reliable"}},
        {"topic": "/default/s1", "index": 4, "style": "single", "options": FSYNC},
    ],
    [
        {"topic": "/default/f1", "index": 5, "style": "batch", "options": FSYNC},
        {"topic": "/default/o1", "index": 6, "style": "batch", "options": OS},
        {"topic": "/default/s1", "index": 7, "style": "single", "options": FSYNC},
    ],
]  # fmt: skip
PAUSES = {"batch": 0.02, "keyed": 0.02, "single": 0.002}
DURABLE_TOPICS = ("/default/f4", "/default/o2", "/default/s1", "/default/f1", "/default/o1")
TAKERS: list[dict[str, Any]] = [
    {"topic": "/default/f4", "subscription": "solo", "type": "exclusive", "acks": True},
    {"topic": "/default/o2", "subscription": "team", "type": "shared", "acks": True},
    {"topic": "/default/o2", "subscription": "team", "type": "shared", "acks": True},
    {"topic": "/default/n1", "subscription": "eyes", "type": "exclusive", "acks": False},
]


class Load:
    """Everybody who publishes and consumes, and what they wrote down."""

    def __init__(
        self,
        folder: Path,
        server: Server,
        history: History,
        stack: ExitStack,
        *,
        holes: bool,
        pause_factor: int = 1,
    ) -> None:
        self.folder = folder
        self.history = history
        self.producers: list[tuple[dict[str, Any], Path]] = []
        self.takers: list[tuple[dict[str, Any], Path]] = []
        self.producer_members: list[Member] = []
        self.taker_members: list[Member] = []
        context: zmq.Context[Any] = zmq.Context()
        stack.callback(context.term)
        self.resenders = [
            Resender(context, server.url, history, topic=f"/default/r{durability}",
                     name=f"resend-{durability}", index=index, durability=durability)
            for index, durability in ((10, "fsync"), (11, "os"))
        ]  # fmt: skip
        for resender in self.resenders:
            stack.callback(resender.close)
            assert resender.connect() == 0
        with server.client() as client:
            for entry in PLANS[0]:
                client.admin.create_topic(entry["topic"], **entry["options"])
        for number, entry in enumerate(TAKERS):
            path = folder / f"taker{number}.seen"
            plan = {**entry, "url": server.url, "name": f"taker{number}", "record": str(path),
                    "holes": holes, "seed": SEED + number, "transport": TRANSPORTS[number % 2]}  # fmt: skip
            self.takers.append((plan, path))
            taker = Member("consumer_process", plan, folder / f"taker{number}")
            self.taker_members.append(stack.enter_context(taker))
        for taker in self.taker_members:
            taker.wait_ready()
        for number, plan in enumerate(PLANS):
            for entry in plan:
                name = f"p{entry['index']}"
                path = folder / f"{name}.acks"
                entry = {
                    **entry,
                    "name": name,
                    "record": str(path),
                    "pause": PAUSES[entry["style"]] * pause_factor,
                }
                self.producers.append((entry, path))
            mine = [entry for entry, _ in self.producers[-len(plan) :]]
            member = Member(
                "producer_process",
                {"url": server.url, "producers": mine, "transport": TRANSPORTS[number % 2]},
                folder / f"load{number}",
            )
            self.producer_members.append(stack.enter_context(member))
        for member in self.producer_members:
            member.wait_ready()
        for resender in self.resenders:
            resender.start()

    def ack_counts(self) -> list[int]:
        """Acked messages of each producer."""
        return [
            path.stat().st_size // RECORD_DTYPE.itemsize if path.exists() else 0
            for _, path in self.producers
        ]

    def wait_for_acks(self, each: int, total: int, seconds: float) -> None:
        """Until every producer has `each` more acks and all together `total`."""
        start = self.ack_counts()
        deadline = time.monotonic() + seconds
        while True:
            self.check_alive()
            new = [now - then for now, then in zip(self.ack_counts(), start, strict=True)]
            if min(new) >= each and sum(new) >= total:
                return
            if time.monotonic() > deadline:
                raise self.history.fail(f"within {seconds} s only {new} acks came")
            time.sleep(0.01)

    def check_alive(self) -> None:
        """No client has given up."""
        for member in (*self.producer_members, *self.taker_members):
            if member.process.poll() is not None:
                raise self.history.fail(f"{member.name} ended: {member.error_text()}")

    def acks_since(self, counts: list[int]) -> list[Any]:
        """The records of each producer but its first `counts`."""
        return [
            read_records(path, first)
            for (_, path), first in zip(self.producers, counts, strict=True)
        ]

    def read_acks(self) -> None:
        """All acks into the history."""
        for entry, path in self.producers:
            self.history.read_producer(entry["topic"], path)


def strike(load: Load, server: Server, victim: str, draw: random.Random) -> int:
    """One kill, somewhere in the load; its time."""
    load.wait_for_acks(5, ACKS_BEFORE_KILL, RECOVERY_SECONDS)
    time.sleep(draw.random() * 0.1)
    if victim == "coordinator":
        return strike_coordinator(load, server)
    killed_ns = server.kill(victim, 1 + draw.randrange(server.workers))
    if victim in ("supervisor", "all"):
        for resender in load.resenders:
            resender.halt()
        server.start()
    else:
        time.sleep(0.05)
        for resender in load.resenders:
            resender.halt()
    return killed_ns


def strike_coordinator(load: Load, server: Server) -> int:
    """Kill the coordinator; that must not disturb what goes on until there is another."""
    assert server.broker is not None
    supervisor = server.broker.process.pid
    os.kill(supervisor, signal.SIGSTOP)  # nothing is started again meanwhile
    try:
        killed_ns = server.kill("coordinator")
        load.wait_for_acks(0, ACKS_BEFORE_KILL, RECOVERY_SECONDS)
    finally:
        os.kill(supervisor, signal.SIGCONT)
    for resender in load.resenders:
        resender.halt()
    return killed_ns


def check_it_hit(load: Load, killed_ns: int, counts: list[int], flying: int) -> None:
    """The kill fell into load: messages were acked between the one before and it (`counts`: how many
    there were then), some batches were on their way (`flying` of them of producers that do not tell
    by themselves)."""
    recent = 0
    for records in load.acks_since(counts):
        at, sent = records["at_ns"], records["sent_ns"]
        recent += int((at < killed_ns).sum())
        flying += int(((sent < killed_ns) & (at > killed_ns)).sum())
    if recent < ACKS_BEFORE_KILL or not flying:
        raise load.history.fail(f"the kill missed: {recent} acked before, {flying} on their way")


def drain(client: Any, topic: str, subscription: str, wanted: int) -> list[tuple[int, int]]:
    """All that is left for a subscription: at least `wanted` messages, and what comes on top."""
    rest: list[tuple[int, int]] = []
    with client.consumer(topic, subscription=subscription, type="shared"
                         if subscription == "team" else "exclusive") as consumer:  # fmt: skip
        deadline = time.monotonic() + DRAIN_SECONDS
        while time.monotonic() < deadline:
            batch = consumer.receive_batch(timeout=0.5)
            rest += [(partition_of(message.topic), message.offset) for message in batch]
            if not batch and len(rest) >= wanted:
                break
    return rest


@pytest.mark.timeout(300 + 60 * ROUNDS)
@pytest.mark.parametrize("log", ["kept", "trimmed"])
def test_any_process_killed_under_load(tmp_path: Path, log: str) -> None:
    draw = random.Random(f"{SEED} {log}")
    count = ROUNDS if log == "kept" else max(ROUNDS // 2, 1)
    victims = [victim for _ in range(0, count, 4) for victim in draw.sample(VICTIMS, 4)][:count]
    history = History("")
    retention = {} if log == "kept" else {"retention_seconds_min": 0}
    with ExitStack() as stack:
        server = stack.enter_context(Server(tmp_path / "data", **retention))
        load = Load(tmp_path, server, history, stack, holes=log == "kept")
        for number, victim in enumerate(victims):
            history.about = f"seed {SEED}, log {log}, victims {victims}, round {number}"
            counts = load.ack_counts()
            killed_ns = strike(load, server, victim, draw)
            if victim != "coordinator":
                history.kills_ns.append(killed_ns)
            flying = sum(resender.on_way_at(killed_ns) for resender in load.resenders)
            for resender in load.resenders:
                resender.resend()
                resender.start()
            load.wait_for_acks(1, 0, RECOVERY_SECONDS)
            check_it_hit(load, killed_ns, counts, flying)
        for resender in load.resenders:
            resender.halt()
            resender.resend()
            assert resender.duplicates > 20 * count
        sent = stop_clients(load)
        if log == "trimmed":
            server.stop()
            server.changes["retention_seconds_min"] = 24 * 3600  # nothing goes while it is read
            server.start()
        judge(load, server, sent, trimmed=log == "trimmed")


def stop_clients(load: Load) -> dict[str, int]:
    """An orderly end; how many messages each producer sent."""
    for taker in load.taker_members:
        taker.finish()
    sent: dict[str, int] = {}
    for member in load.producer_members:
        sent |= json.loads(member.finish())
    load.read_acks()
    return sent


def judge(load: Load, server: Server, sent: dict[str, int], *, trimmed: bool) -> None:
    """Hold what is there against what was seen."""
    history = load.history
    records = [
        history.read_consumer(plan["topic"], path, ordered=plan["type"] == "exclusive")
        for plan, path in load.takers
    ]
    producers = [
        (entry["topic"], entry["index"], sent[entry["name"]])
        for entry, _ in load.producers
        if entry["topic"] in DURABLE_TOPICS
    ]
    producers += [(each.topic, each.index, each.next_sequence) for each in load.resenders]
    gone = 0
    with server.client() as client:
        for topic in {topic for topic, _, _ in producers}:
            history.settle(topic, client.reader(topic), trimmed=trimmed)
            gone += len(history.trimmed(topic))
        assert (gone > 1000) == trimmed, f"{gone} messages were trimmed"
        for producer in producers:
            history.complete(*producer)
        for topic, subscription in (("/default/f4", "solo"), ("/default/o2", "team")):
            mine = [
                record
                for (plan, _), record in zip(load.takers, records, strict=True)
                if plan["subscription"] == subscription
            ]
            rest = drain(client, topic, subscription, history.unacked_count(topic, mine))
            durable = history.cursor(topic, mine, rest)
            assert durable > 1000, f"only {durable} messages were acked"
