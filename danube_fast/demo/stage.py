"""The stage of the demo: the broker and all that talk to it, started, listened to, told to stop.

Consumers report which offsets they have, so the demo knows by itself when a subscription is complete.
Every wait has a bound and an end that says what was missing.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from danube_fast.client.values.arguments import SubscriptionType, Transport
from danube_fast.clock import SystemClock
from danube_fast.demo.crew import Child, Crew
from danube_fast.demo.progress import View
from danube_fast.demo.words import (
    GO,
    STOP,
    ConsumeTask,
    Done,
    Event,
    Failed,
    ProduceTask,
    Progress,
    Ready,
    Task,
)
from danube_fast.errors import DeadlineExceeded, Internal

__all__ = ["PARTITIONS", "PRODUCERS", "SUBSCRIPTIONS", "TOPIC", "WORKERS", "Party", "Stage"]

TOPIC = "/default/flights"
WORKERS = 2
PARTITIONS = 4
PRODUCERS = 3
SUBSCRIPTIONS: tuple[tuple[str, SubscriptionType, tuple[Transport, ...]], ...] = (
    ("billing", "exclusive", ("zmq",)),
    ("boarding", "shared", ("shm", "zmq")),
    ("tower", "failover", ("shm", "zmq")),
    ("gates", "key_shared", ("zmq", "shm")),
)
"""Name, type, and for each consumer how it reaches the broker."""
SEGMENT_START_BYTES = 512 * 1024
SEGMENT_BYTES = 32 * 1024 * 1024
"""A broker keeps spare segments; the default of 128 MiB would be a lot for a temporary folder. A small first one is
given back soon."""

BROKER_TIMEOUT_SECONDS = 240.0
"""The first start on a machine compiles the kernels, about a minute on a fast one."""
MEMBERS_TIMEOUT_SECONDS = 90.0
DONE_TIMEOUT_SECONDS = 30.0
END_TIMEOUT_SECONDS = 5.0
"""Between the end of a process's pipes and its own."""
LISTEN_SECONDS = 0.05


class Party:
    """One subscription, or all producers: its processes and how far they are."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.children: list[Child] = []
        self.counts: dict[str, int] = {}
        self.done: dict[str, Done] = {}
        self._seen: dict[int, np.ndarray[Any, np.dtype[np.bool_]]] = {}

    def add(self, event: Progress, child: Child) -> None:
        """A member's report."""
        self.counts[child.name] = event.messages
        for partition, start, stop in event.ranges:
            seen = self._seen.get(partition, np.zeros(0, bool))
            if stop > len(seen):
                seen = np.concatenate((seen, np.zeros(max(stop, 2 * len(seen)) - len(seen), bool)))
                self._seen[partition] = seen
            seen[start:stop] = True

    @property
    def handed(self) -> int:
        """Messages that members reported, repeated ones too."""
        return sum(self.counts.values())

    @property
    def distinct(self) -> int:
        """Different offsets over all partitions."""
        return sum(int(np.count_nonzero(seen)) for seen in self._seen.values())

    def in_partitions(self, partitions: list[int]) -> int:
        """Different offsets of some partitions."""
        return sum(int(np.count_nonzero(self._seen[p])) for p in partitions if p in self._seen)


class Stage:
    """Broker, producers, consumers."""

    def __init__(self, crew: Crew, folder: Path, view: View) -> None:
        self.crew = crew
        self.folder = folder
        self.view = view
        self.clock = SystemClock()
        self.broker: Child | None = None
        self.ready: dict[str, Any] = {}
        """The broker's ready line."""
        self.producers = Party("published")
        self.subscriptions = [Party(name) for name, _, _ in SUBSCRIPTIONS]
        self._parties: dict[str, Party] = {}
        """By name of the member."""
        self._connected: set[str] = set()
        self._is_ending = False

    @property
    def store(self) -> Path:
        """Folder of the object store."""
        return self.folder / "store"

    @property
    def store_url(self) -> str:
        """URL of the object store."""
        return f"file://{self.store}"

    # ------------------------------------------------------------ listening

    def listen(self) -> None:
        """Take in what all members say, for a moment. Raises Internal when one cannot go on."""
        for child, stream, line in self.crew.listen(LISTEN_SECONDS):
            if stream == "end":
                self._ended(child)
            elif child is self.broker:
                self._from_broker(stream, line)
            elif stream == "stdout":
                self._from_member(child, line)

    def _ended(self, child: Child) -> None:
        try:
            code: int | str = child.process.wait(END_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            code = "its pipes closed"
        party = self._parties.get(child.name)
        if party is None or code or not (self._is_ending or child.name in party.done):
            raise Internal(
                f"the demo's {child.name} ended early, with {code}; its last words: "
                f"{child.last_words()}{self._of_the_broker(child)}"
            )

    def _from_broker(self, stream: str, line: bytes) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            return  # a line of a log; the last ones are kept for failures
        if not isinstance(event, dict):
            return
        if stream == "stdout" and event.get("event") == "ready":
            self.ready = event
        elif event.get("event") == "note":
            self.view.say(f"broker: {event.get('text')}", "dim")

    def _from_member(self, child: Child, line: bytes) -> None:
        party = self._parties[child.name]
        event: Any = msgspec.json.decode(line, type=Event)
        if isinstance(event, Ready):
            self._connected.add(child.name)
        elif isinstance(event, Progress):
            party.add(event, child)
        elif isinstance(event, Done):
            party.done[child.name] = event
        elif isinstance(event, Failed):
            raise Internal(
                f"the demo's {child.name} could not go on: {event.text}{self._of_the_broker(child)}"
            )

    def _of_the_broker(self, child: Child) -> str:
        """Quote what the broker said last, for failures of others."""
        if self.broker is None or child is self.broker:
            return ""
        return f"; the broker's last words: {self.broker.last_words()}"

    def _until(self, seconds: float, what: str) -> Iterator[None]:
        """Listen again and again; DeadlineExceeded when the caller still asks after `seconds`."""
        deadline_ns = self.clock.monotonic_ns() + int(seconds * 1e9)
        while self.clock.monotonic_ns() < deadline_ns:
            self.listen()
            yield
        words = self.broker.last_words() if self.broker else "nothing"
        raise DeadlineExceeded(
            f"{what} within {seconds:g} s; is this host busy? Run the demo again. The broker's last "
            f"words: {words}"
        )

    # ------------------------------------------------------------ the broker

    def start_broker(self) -> None:
        """Start `danube-fast serve`; it takes some seconds."""
        self.view.say(f"starting a broker with {WORKERS} workers in {self.folder}")
        self.broker = self.crew.start(
            "broker",
            "danube_fast.cli.main",
            *("serve", "--workers", str(WORKERS), "--listen", "127.0.0.1:0", "--output", "json"),
            *("--data-dir", str(self.folder / "data"), "--store", self.store_url),
            DANUBE_SEGMENT_BYTES=str(SEGMENT_BYTES),
            DANUBE_SEGMENT_START_BYTES=str(SEGMENT_START_BYTES),
        )

    def wait_for_broker(self) -> None:
        """Until its ready line."""
        for _ in self._until(BROKER_TIMEOUT_SECONDS, "the broker was not ready"):
            if self.ready:
                break
        self.view.say(f"broker ready at {self.ready['url']}, workers {self.ready['worker_pids']}")

    # ------------------------------------------------------------ the members

    def start_members(self, data_path: Path, messages: int, messages_per_s: float) -> None:
        """Start producers of together `messages` flights, and consumers; until all are connected."""
        count = sum(len(lanes) for _, _, lanes in SUBSCRIPTIONS)
        self.view.say(f"starting {PRODUCERS} producers and {count} consumers")
        for party, (name, type_name, lanes) in zip(self.subscriptions, SUBSCRIPTIONS, strict=True):
            for number, lane in enumerate(lanes):
                member = f"{name}-{number}"
                self._start(
                    party,
                    ConsumeTask(
                        url=self.ready["url"],
                        topic=TOPIC,
                        name=member,
                        subscription=name,
                        type=type_name,
                        transport=lane,
                        record_path=str(self.folder / member),
                    ),
                )
        for share in range(PRODUCERS):
            self._start(
                self.producers,
                ProduceTask(
                    url=self.ready["url"],
                    topic=TOPIC,
                    name=f"loader-{share}",
                    data_path=str(data_path),
                    messages=messages,
                    share=share,
                    shares=PRODUCERS,
                    messages_per_s=messages_per_s / PRODUCERS,
                ),
            )
        for _ in self._until(MEMBERS_TIMEOUT_SECONDS, "producers and consumers were not connected"):
            if len(self._connected) == len(self._parties):
                return

    def _start(self, party: Party, task: Task) -> None:
        self._parties[task.name] = party
        text = msgspec.json.encode(task).decode()
        party.children.append(self.crew.start(task.name, "danube_fast.demo.member", text))

    def order(self, word: str) -> None:
        """Tell all producers and consumers."""
        for party in (self.producers, *self.subscriptions):
            for child in party.children:
                child.order(word)

    def go(self) -> None:
        """Let them begin."""
        self.order(GO)

    def stop_members(self) -> None:
        """Consumers ack, write down the rest and end."""
        self._is_ending = True
        self.order(STOP)
        for _ in self._until(DONE_TIMEOUT_SECONDS, "consumers did not end"):
            if all(len(party.done) == len(party.children) for party in self.subscriptions):
                return

    def records_of(self, party: Party) -> list[Path]:
        """Files that the consumers of a subscription wrote."""
        return [self.folder / child.name for child in party.children]
