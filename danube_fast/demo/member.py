"""A producer or consumer of the demo, a process of its own: `python -m danube_fast.demo.member TASK`.

It uses the public client as any program would. Reconnecting after a worker's death is the client's
business: there is not a line about it here.

    stdin ("go", "stop") --> watcher thread --> two events      stdout: words.Event, one a line
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import BinaryIO

import msgspec

import danube_fast
from danube_fast.clock import SystemClock
from danube_fast.demo import dataset
from danube_fast.demo.records import ranges_of, records_of
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
from danube_fast.errors import DanubeError

__all__ = ["main"]

GO_TIMEOUT_SECONDS = 120.0
CONNECT_TIMEOUT_SECONDS = 30.0
FLUSH_TIMEOUT_SECONDS = 60.0
RECEIVE_TIMEOUT_SECONDS = 0.1
"""How long a consumer waits in vain before it looks whether it should stop."""
REPORT_INTERVAL_NS = 100_000_000
TICK_SECONDS = 0.05
"""A paced producer sends what is due once in so long."""
UNPACED_TICK_MESSAGES = 4096
BATCH_MESSAGES_MAX = 10_000


class _Orders:
    """The orders of the demo."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.stop = threading.Event()
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            if line.strip() == GO:
                self.go.set()
            elif line.strip() == STOP:
                break
        self.stop.set()
        self.go.set()


def _say(event: Event) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
    sys.stdout.buffer.flush()


def _wait_for_go(orders: _Orders) -> None:
    _say(Ready())
    orders.go.wait(GO_TIMEOUT_SECONDS)


def produce(task: ProduceTask, orders: _Orders) -> None:
    """Publish our share at our pace; done when everything is acked."""
    clock = SystemClock()
    rows, carriers = dataset.load(Path(task.data_path), task.messages)
    rows, carriers = rows[task.share :: task.shares], carriers[task.share :: task.shares]
    with (
        danube_fast.connect(task.url, name=task.name, timeout=CONNECT_TIMEOUT_SECONDS) as client,
        client.producer(
            task.topic, name=task.name, dispatch="reliable", durability="fsync"
        ) as producer,
    ):
        _wait_for_go(orders)
        per_tick = max(1, int(task.messages_per_s * TICK_SECONDS))
        if not task.messages_per_s:
            per_tick = UNPACED_TICK_MESSAGES
        first_ns, began_ns = clock.wall_ns(), clock.monotonic_ns()
        began_ns += int(TICK_SECONDS * 1e9) * task.share // task.shares  # not all at once
        reported_ns = 0
        for start in range(0, len(rows), per_tick):
            if task.messages_per_s:
                due_ns = began_ns + int(start / task.messages_per_s * 1e9)
                wait_ns = due_ns - clock.monotonic_ns()
                if wait_ns > 0:
                    orders.stop.wait(wait_ns / 1e9)
            if orders.stop.is_set():
                return
            stop = min(start + per_tick, len(rows))
            producer.send_many(rows[start:stop], keys=carriers[start:stop])
            if clock.monotonic_ns() - reported_ns >= REPORT_INTERVAL_NS:
                reported_ns = clock.monotonic_ns()
                _say(Progress(stop))
        producer.flush(timeout=FLUSH_TIMEOUT_SECONDS)
        _say(Progress(len(rows)))
        _say(Done(len(rows), first_ns, clock.wall_ns()))


def consume(task: ConsumeTask, orders: _Orders) -> None:
    """Receive, write down, ack, until told to stop."""
    with (
        danube_fast.connect(
            task.url, name=task.name, transport=task.transport, timeout=CONNECT_TIMEOUT_SECONDS
        ) as client,
        client.consumer(
            task.topic,
            subscription=task.subscription,
            type=task.type,
            initial_position="earliest",
            name=task.name,
        ) as consumer,
        Path(task.record_path).open("wb") as record,
    ):
        _wait_for_go(orders)
        count = _receive(consumer, record, orders)
        consumer.flush_acks()
    _say(Done(count))


def _receive(consumer: danube_fast.Consumer, record: BinaryIO, orders: _Orders) -> int:
    """The loop of `consume`; how many messages came."""
    clock = SystemClock()
    count, reported_ns = 0, 0
    ranges: list[tuple[int, int, int]] = []
    while not orders.stop.is_set():
        batch = consumer.receive_batch(BATCH_MESSAGES_MAX, timeout=RECEIVE_TIMEOUT_SECONDS)
        receive_ns = clock.wall_ns()
        if len(batch):
            records = records_of(batch, receive_ns)
            record.write(records.tobytes())
            consumer.ack(batch)
            ranges += ranges_of(records)
            count += len(batch)
        now_ns = clock.monotonic_ns()
        if ranges and now_ns - reported_ns >= REPORT_INTERVAL_NS:
            _say(Progress(count, ranges))
            reported_ns, ranges = now_ns, []
    return count


def main() -> int:
    """Do the task that the command line holds; the exit code."""
    task = msgspec.json.decode(sys.argv[1], type=Task)
    orders = _Orders()
    try:
        if isinstance(task, ProduceTask):
            produce(task, orders)
        else:
            consume(task, orders)
    except DanubeError as error:
        _say(Failed(f"{type(error).__name__}: {error}"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
