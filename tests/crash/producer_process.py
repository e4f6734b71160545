"""Producers in a process of their own: `python -m tests.crash.producer_process PLAN`.

PLAN is JSON: {"url", "parent", "producers": [{"topic", "name", "index", "style", "options",
"record", "pause"}]}. Each producer is a thread, all share a client. They publish until stdin ends,
then close, which waits for every ack, and print {name: messages sent}.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import danube_fast
from danube_fast.workers.process.boot import die_with_parent
from tests.crash.payloads import ACKED, FAILED, Recorder, partition_of, payload_of

BATCH_MESSAGES = 100
WINDOW_BYTES = 512 * 1024
BATCH_BYTES = 16 * 1024
KEYS = 16
TIMEOUT_SECONDS = 90.0
"""Longer than any restart: a producer of a test never gives a message up."""


class Publisher:
    """One named producer and its record."""

    def __init__(self, client: Any, plan: dict[str, Any], stop: threading.Event) -> None:
        self.name: str = plan["name"]
        self.sent = 0
        self._index: int = plan["index"]
        self._style: str = plan["style"]
        self._pause: float = plan["pause"]
        self._stop = stop
        self._record = Recorder(plan["record"])
        self._batch_times: dict[int, int] = {}
        self._answered = 0
        self._producer = client.producer(
            plan["topic"], name=self.name, window_bytes_max=WINDOW_BYTES,
            batch_bytes_max=BATCH_BYTES, timeout=TIMEOUT_SECONDS, **plan["options"],
        )  # fmt: skip

    def run(self) -> None:
        """Publish until told to stop, then wait for the acks."""
        step: Callable[[], None] = getattr(self, f"_{self._style}")
        while not self._stop.is_set():
            step()
            self._stop.wait(self._pause)
        self._producer.close(timeout=TIMEOUT_SECONDS)

    def _note(self, number: int, sent_ns: int, message_id: Any, error: Any) -> None:
        ident = self._index << 48 | number
        now_ns = time.monotonic_ns()
        if error is not None:
            print(f"{self.name}: {error!r}", file=sys.stderr, flush=True)
            self._record.add(FAILED, ident=ident, sent_ns=sent_ns, at_ns=now_ns)
            return
        self._record.add(
            ACKED, partition=partition_of(message_id.topic), ident=ident,
            offset=message_id.offset, sent_ns=sent_ns, at_ns=now_ns,
        )  # fmt: skip

    def _batch(self) -> None:
        """Whole lists to one partition; acks come in order."""
        first = self.sent
        self.sent += BATCH_MESSAGES
        self._batch_times[first // BATCH_MESSAGES] = time.monotonic_ns()
        payloads: list[bytes | None] = [payload_of(self._index, n) for n in range(first, self.sent)]
        self._producer.send_many(payloads, on_delivery=self._next_answered)

    def _next_answered(self, message_id: Any, error: Any) -> None:
        number = self._answered
        self._answered += 1
        batch, place = divmod(number, BATCH_MESSAGES)
        sent_ns = self._batch_times[batch]
        if place == BATCH_MESSAGES - 1:
            del self._batch_times[batch]
        self._note(number, sent_ns, message_id, error)

    def _keyed(self) -> None:
        """Single sends to many partitions by key, gathered into batches by the client."""
        for _ in range(BATCH_MESSAGES):
            number = self.sent
            self.sent += 1
            self._producer.send(
                payload_of(self._index, number),
                key=f"key-{number % KEYS}",
                on_delivery=functools.partial(self._note, number, time.monotonic_ns()),
            )

    def _single(self) -> None:
        """One message, one ack."""
        number = self.sent
        self.sent += 1
        sent_ns = time.monotonic_ns()
        self._note(number, sent_ns, self._producer.publish(payload_of(self._index, number)), None)


def main() -> int:
    """Run the plan; the exit code."""
    plan = json.loads(sys.argv[1])
    die_with_parent(plan["parent"])
    stop = threading.Event()
    with danube_fast.connect(
        plan["url"], name="crash-load", timeout=60, transport=plan.get("transport", "auto")
    ) as client:
        publishers = [Publisher(client, entry, stop) for entry in plan["producers"]]
        failures: list[str] = []

        def run(publisher: Publisher) -> None:
            try:
                publisher.run()
            except Exception as error:
                failures.append(f"{publisher.name}: {error!r}")
                print(failures[-1], file=sys.stderr, flush=True)

        threads = [threading.Thread(target=run, args=(each,)) for each in publishers]
        for thread in threads:
            thread.start()
        print("ready", flush=True)
        sys.stdin.read()
        stop.set()
        for thread in threads:
            thread.join()
    print(json.dumps({each.name: each.sent for each in publishers}), flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
