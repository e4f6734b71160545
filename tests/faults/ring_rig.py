"""Clients over rings that publish one by one from threads of their own, and take what comes, while trouble is made.

A message is payload `payload_of(producer, number)`, numbers rise by one with every call of publish(), whatever came of
it. What a call or a consumer has told is written down and held against what the log holds in the end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import danube_fast
from danube_fast.errors import DanubeError
from tests.crash.payloads import ident_of, ident_text, number_of, payload_of, producer_of
from tests.crash.rig import Server
from tests.faults.rig import read_all
from tests.workers.broker import wait_until

__all__ = [
    "ALL",
    "FLEETING",
    "FSYNC",
    "MEMORY",
    "OS",
    "Call",
    "RingLoad",
    "RingPublisher",
    "check_log",
]

FSYNC, OS = "/default/ring-strict", "/default/ring-loose"
MEMORY, FLEETING = "/default/ring-kept", "/default/ring-fleeting"
ALL: dict[str, dict[str, Any]] = {
    FSYNC: {"durability": "fsync"},
    OS: {"durability": "os"},
    MEMORY: {"durability": "memory"},
    FLEETING: {"dispatch": "non_reliable"},
}
JOIN_SECONDS = 60.0


class Call(NamedTuple):
    """One publish() that has ended."""

    number: int
    offset: int
    """-1: it raised."""
    error: DanubeError | None
    began_ns: int
    ended_ns: int


class RingPublisher:
    """One named producer in a thread."""

    def __init__(self, client: danube_fast.Client, topic: str, index: int, **options: Any) -> None:
        self.topic, self.index = topic, index
        self.calls: list[Call] = []
        self.stopping = threading.Event()
        self.failure: BaseException | None = None
        self._producer = client.producer(topic, name=f"ring-{index}", **ALL[topic], **options)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Publish until `stop`."""
        self._thread.start()

    def _run(self) -> None:
        number = 0
        try:
            while not self.stopping.is_set():
                self._publish(number)
                number += 1
        except BaseException as error:
            self.failure = error

    def _publish(self, number: int) -> None:
        offset, failure, began_ns = -1, None, time.monotonic_ns()
        try:
            offset = self._producer.publish(payload_of(self.index, number)).offset
        except DanubeError as error:
            failure = error
        self.calls.append(Call(number, offset, failure, began_ns, time.monotonic_ns()))

    @property
    def errors(self) -> list[DanubeError]:
        """All that calls have raised."""
        return [call.error for call in [*self.calls] if call.error is not None]

    @property
    def acked(self) -> dict[int, int]:
        """Ident by offset of all that was acked."""
        return {
            call.offset: self.index << 48 | call.number
            for call in [*self.calls]
            if call.offset >= 0
        }

    def stop(self) -> None:
        """End the thread; a failure other than DanubeError is raised."""
        self.stopping.set()
        self._thread.join(JOIN_SECONDS)
        assert not self._thread.is_alive(), (
            f"a publish() of producer {self.index} on {self.topic} does not end"
        )
        if self.failure is not None:
            raise self.failure


class RingTaker:
    """One consumer in a thread, alone on its subscription."""

    def __init__(self, client: danube_fast.Client, topic: str) -> None:
        self.topic = topic
        self.seen: dict[int, int] = {}
        """Ident by offset, in the order of the first times."""
        self.wrong: list[str] = []
        self.stopping = threading.Event()
        self.failure: BaseException | None = None
        self.consumer = client.consumer(topic, subscription="s", initial_position="earliest")
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Take until `stop`."""
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self.stopping.is_set():
                batch = list(self.consumer.receive_batch(100, timeout=0.1))
                for message in batch:
                    self._note(message.offset, ident_of(message.payload))
                if batch:
                    self.consumer.ack(batch)
        except BaseException as error:
            self.failure = error

    def _note(self, offset: int, ident: int) -> None:
        before = self.seen.setdefault(offset, ident)
        if before != ident or not ident:
            text = f"{self.topic}@{offset} was {ident_text(before)} and is {ident_text(ident)}"
            self.wrong.append(text)

    def stop(self) -> None:
        """End the thread."""
        self.stopping.set()
        self._thread.join(JOIN_SECONDS)
        assert not self._thread.is_alive(), f"the consumer of {self.topic} does not end"
        if self.failure is not None:
            raise self.failure

    def check_order(self) -> None:
        """Numbers of a producer come in order the first time."""
        last: dict[int, int] = {}
        for offset, ident in self.seen.items():
            producer, number = producer_of(ident), number_of(ident)
            assert number > last.get(producer, -1), (
                f"{self.topic}@{offset}: {ident_text(ident)} came behind {last[producer]}"
            )
            last[producer] = number


class RingLoad:
    """Publishers of all topics and a consumer for each, on clients of their own."""

    def __init__(
        self, server: Server, stack: ExitStack, publishers: dict[str, int] | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        counts = publishers or {FSYNC: 3, OS: 2, MEMORY: 1, FLEETING: 1}
        self.server = server
        clients = [stack.enter_context(server.client(transport="shm")) for _ in range(3)]
        self.takers: dict[str, RingTaker] = {}
        self.publishers: list[RingPublisher] = []
        for topic, count in counts.items():
            for _ in range(count):
                index = len(self.publishers) + 1
                client = clients[1 + index % 2]
                self.publishers.append(RingPublisher(client, topic, index, **options))
            self.takers[topic] = RingTaker(clients[0], topic)

    def of(self, *topics: str) -> list[RingPublisher]:
        """The publishers of topics."""
        return [each for each in self.publishers if each.topic in topics]

    @contextmanager
    def running(self) -> Iterator[None]:
        """All publish and take meanwhile. Ended whatever happens."""
        for member in (*self.takers.values(), *self.publishers):
            member.start()
        try:
            yield
        finally:
            for publisher in self.publishers:
                publisher.stopping.set()
            for publisher in self.publishers:
                publisher.stop()

    def wait_acks(self, count: int, *topics: str, seconds: float = 60.0) -> None:
        """Until each publisher (of those topics) has so many more acks."""
        chosen = self.of(*topics) if topics else self.publishers
        marks = [(each, len(each.acked) + count) for each in chosen]

        def missing() -> list[str]:
            return [
                f"{each.topic} {len(each.acked)}/{mark} {each.errors[-1:]}"
                for each, mark in marks
                if len(each.acked) < mark
            ]

        try:
            wait_until("acks", lambda: not missing(), seconds)
        except AssertionError:
            raise AssertionError(f"no {count} acks more within {seconds} s: {missing()}") from None

    def acked(self, topic: str) -> dict[int, int]:
        """Ident by offset of what was acked on a topic."""
        found: dict[int, int] = {}
        for publisher in self.of(topic):
            mine = publisher.acked
            both = found.keys() & mine.keys()
            assert not both, f"{topic}: offsets {sorted(both)[:5]} were acked to two producers"
            found |= mine
        return found

    def check(self, client: danube_fast.Client, *topics: str, about: str) -> None:
        """What was acked on topics is there, once, in order, and the consumers get all of it."""
        for topic in topics:
            found = check_log(client, topic, self.acked(topic), about)
            taker = self.takers[topic]
            wait_until(
                f"all {len(found)} messages of {topic} at its consumer, {about}",
                lambda f=found, t=taker: f.keys() <= t.seen.keys() or t.failure,
            )
            self._check_taker(taker, found, about)

    def _check_taker(self, taker: RingTaker, found: dict[int, int], about: str) -> None:
        seen = dict(taker.seen)
        wrong = {o: i for o, i in seen.items() if found.get(o) != i}
        assert not wrong, (
            f"{taker.topic} {about}: its consumer got what the log does not hold: "
            f"{[(o, ident_text(i)) for o, i in list(wrong.items())[:5]]}, {len(wrong)} in all"
        )
        assert list(seen) == sorted(seen), f"{taker.topic} {about}: offsets came out of order"

    def stop_takers(self) -> None:
        """End the consumers; what they saw was in order and whole."""
        for taker in self.takers.values():
            taker.stopping.set()
        for taker in self.takers.values():
            taker.stop()
            assert not taker.wrong, taker.wrong[:5]
            taker.check_order()


def check_log(
    client: danube_fast.Client, topic: str, acked: dict[int, int], about: str
) -> dict[int, int]:
    """Ident by offset of all that a topic holds: what was acked, at its offset; nothing twice, each producer's in
    order, offsets without holes."""
    found = {m.offset: ident_of(m.payload) for m in read_all(client, topic)}
    lost = {o: i for o, i in acked.items() if found.get(o) != i}
    assert not lost, (
        f"{topic} {about}: acked and lost {[(o, ident_text(i)) for o, i in list(lost.items())[:5]]}, "
        f"{len(lost)} of {len(acked)}"
    )
    assert list(found) == [*range(len(found))], f"{topic} {about}: offsets have holes"
    last: dict[int, int] = {}
    for offset, ident in found.items():
        producer, number = producer_of(ident), number_of(ident)
        assert number > last.get(producer, -1), (
            f"{topic}@{offset} {about}: {ident_text(ident)} stands behind {last[producer]}"
        )
        last[producer] = number
    return found
