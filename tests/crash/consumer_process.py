"""A consumer in a process of its own: `python -m tests.crash.consumer_process PLAN`.

PLAN is JSON: {"url", "parent", "topic", "subscription", "type", "name", "record", "acks", "holes", "seed",
"transport", "stalls_at"}. It writes down what it receives before it acks it, and what is durably
acked once `flush_acks` has returned. With `holes` there are messages that it never acks; with
`stalls_at` it stops itself with so many batches received, the last of them in hand. Until stdin ends.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from typing import Any

import danube_fast
from danube_fast.errors import DeadlineExceeded, Unavailable
from danube_fast.workers.process.boot import die_with_parent
from tests.crash.payloads import ACK_SENT, DURABLE, RECEIVED, Recorder, ident_of, partition_of

BATCH_MESSAGES = 400
SKIP_SHARE = 0.3
"""Share of the batches of which some messages stay unacked."""
SKIP_MESSAGES_MAX = 5
FLUSH_SECONDS = 0.05


class Taker:
    """One consumer, its acks and its record."""

    def __init__(self, consumer: Any, plan: dict[str, Any]) -> None:
        self._consumer = consumer
        self._acks: bool = plan["acks"]
        self._holes: bool = plan.get("holes", False)
        self._record = Recorder(plan["record"])
        self._draw = random.Random(plan["seed"])
        self._unflushed: list[Any] = []
        self._flushed_at = time.monotonic()
        self._until_stall: int = plan.get("stalls_at", 0)

    def turn(self) -> None:
        """Receive, write down, ack, sometimes make the acks durable."""
        batch = list(self._consumer.receive_batch(BATCH_MESSAGES, timeout=0.05))
        if batch and self._until_stall:
            self._until_stall -= 1
            if not self._until_stall:
                os.kill(os.getpid(), signal.SIGSTOP)
        for message in batch:
            self._note(RECEIVED, message)
        if not self._acks:
            return
        if batch and self._holes and self._draw.random() < SKIP_SHARE:
            start = self._draw.randrange(len(batch))
            del batch[start : start + self._draw.randint(1, SKIP_MESSAGES_MAX)]
        for message in batch:
            self._note(ACK_SENT, message)
        self._consumer.ack(batch)
        self._unflushed += batch
        if time.monotonic() - self._flushed_at > FLUSH_SECONDS:
            self.flush()

    def _note(self, kind: int, message: Any) -> None:
        self._record.add(
            kind, partition=partition_of(message.topic),
            generation=message._source.generation & 0xFFFF,
            redelivery=message.redelivery_count, ident=ident_of(message.payload),
            offset=message.offset, at_ns=time.monotonic_ns(),
        )  # fmt: skip

    def flush(self) -> None:
        """Make the acks durable; those of before a reconnect are void, as documented."""
        acked, self._unflushed = self._unflushed, []
        self._flushed_at = time.monotonic()
        try:
            self._consumer.flush_acks()
        except (Unavailable, DeadlineExceeded):
            return
        for message in acked:
            source: Any = message._source
            if source.generation == source.attachment.generation:
                self._note(DURABLE, message)


def main() -> int:
    """Run the plan; the exit code."""
    plan = json.loads(sys.argv[1])
    die_with_parent(plan["parent"])
    stop = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        stop.set()

    with (
        danube_fast.connect(
            plan["url"], name=plan["name"], timeout=60, transport=plan.get("transport", "auto")
        ) as client,
        client.consumer(
            plan["topic"], subscription=plan["subscription"], type=plan["type"],
            initial_position="earliest", name=plan["name"],
        ) as consumer,
    ):  # fmt: skip
        taker = Taker(consumer, plan)
        threading.Thread(target=listen, daemon=True).start()
        print("ready", flush=True)
        while not stop.is_set():
            taker.turn()
        if plan["acks"]:
            taker.flush()
    print("done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
