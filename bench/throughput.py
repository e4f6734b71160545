"""End-to-end throughput over ZeroMQ: one producer process, one consumer process, a real broker.

    python -m bench.throughput --durability fsync --messages 5000000

What is counted: messages from the first send to the last receive. What is proved meanwhile: every
payload arrived once, in order, byte for byte (the comparison costs the consumer about 20 ns a
message, inside the clock). Payloads are cut from random bytes before the clock starts, so nothing
compresses and no list is used twice; the consumer makes a `bytes` object of each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import danube_fast

BATCH_MESSAGES = 10_000
WAIT_SECONDS = 120
SEED = 7


def blocks(count: int, message_bytes: int) -> list[bytes]:
    """Incompressible bytes for `count` messages, BATCH_MESSAGES of them in each block."""
    source = random.Random(SEED)
    sizes = [min(BATCH_MESSAGES, count - start) for start in range(0, count, BATCH_MESSAGES)]
    return [source.randbytes(size * message_bytes) for size in sizes]


def payloads(block: bytes, message_bytes: int) -> list[bytes]:
    """A block cut into distinct payloads."""
    return [block[at : at + message_bytes] for at in range(0, len(block), message_bytes)]


@contextmanager
def broker(workers: int) -> Iterator[dict[str, Any]]:
    """A broker of its own in a temporary directory; yields its ready line."""
    with tempfile.TemporaryDirectory(prefix="danube-fast-bench-") as data_dir:
        command = [
            sys.executable, "-m", "danube_fast.cli.main", "serve", "--workers", str(workers),
            "--listen", "127.0.0.1:0", "--data-dir", data_dir, "--output", "json",
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                line = process.stdout.readline() if process.stdout else ""
                if not line:
                    raise SystemExit("the broker did not start; its reason stands above")
                yield json.loads(line)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(30)


def produce(pipe: Connection, url: str, topic: str, options: dict[str, Any]) -> None:
    """Producer process: prepare, wait for the go, send, report when it began."""
    message_bytes = options["message_bytes"]
    lists = [payloads(block, message_bytes) for block in blocks(options["messages"], message_bytes)]
    with (
        danube_fast.connect(url, transport="zmq") as client,
        client.producer(
            topic, dispatch=options["dispatch"], durability=options["durability"]
        ) as producer,
    ):
        pipe.send("ready")
        pipe.recv()
        cpu = time.process_time()
        began = time.monotonic()
        for some in lists:
            producer.send_many(some)
        producer.flush(timeout=WAIT_SECONDS)
        pipe.send((began, time.monotonic(), time.process_time() - cpu))
        pipe.recv()


class Verifier:
    """Compares what arrives with what was sent, in order, while it arrives."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._message_bytes = options["message_bytes"]
        self._blocks = blocks(options["messages"], self._message_bytes)
        self._pending: list[bytes] = []
        self.received = 0
        self.same = True

    def take(self, received: list[bytes]) -> None:
        """Check payloads; whole blocks are compared at once."""
        self.received += len(received)
        self._pending += received
        while len(self._pending) >= BATCH_MESSAGES or (self._pending and len(self._blocks) == 1):
            block = self._blocks[0] if self._blocks else b""
            count = len(block) // self._message_bytes
            if len(self._pending) < count or not count:
                self.same = self.same and bool(count)
                return
            self.same = self.same and b"".join(self._pending[:count]) == block
            del self._pending[:count]
            del self._blocks[0]

    @property
    def is_complete(self) -> bool:
        """Everything arrived once, in order, byte for byte, and nothing else."""
        return self.same and not self._pending and not self._blocks


def consume(pipe: Connection, url: str, topic: str, options: dict[str, Any]) -> None:
    """Consumer process: receive all and compare everything with what was sent."""
    wanted = options["messages"]
    verifier = Verifier(options)
    with danube_fast.connect(url, transport="zmq") as client:
        pipe.send("ready")
        pipe.recv()
        with client.consumer(topic, subscription="bench", initial_position="earliest") as consumer:
            pipe.send("subscribed")
            cpu = time.process_time()
            deadline = time.monotonic() + WAIT_SECONDS
            while verifier.received < wanted and time.monotonic() < deadline:
                batch = consumer.receive_batch(max_messages=BATCH_MESSAGES, timeout=2)
                verifier.take(batch.payloads())
                consumer.ack(batch)
            ended = time.monotonic()
            cpu = time.process_time() - cpu
        pipe.send((ended, cpu, verifier.received, verifier.is_complete))


def measure(url: str, topic: str, options: dict[str, Any]) -> dict[str, Any]:
    """One run; returns its figures. Raises SystemExit if anything was lost, doubled or changed."""
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe(), context.Pipe()]
    producer = context.Process(target=produce, args=(ends[0][1], url, topic, options))
    consumer = context.Process(target=consume, args=(ends[1][1], url, topic, options))
    to_producer, to_consumer = ends[0][0], ends[1][0]
    for process in (producer, consumer):
        process.start()
    try:
        to_producer.recv()
        to_consumer.recv()
        to_consumer.send("go")
        to_consumer.recv()
        to_producer.send("go")
        ended, consumer_cpu, got, same = to_consumer.recv()
        began, acked, producer_cpu = to_producer.recv()
        to_producer.send("bye")
    finally:
        for process in (producer, consumer):
            process.join(30)
            if process.is_alive():
                process.kill()
    if not same:
        raise SystemExit(f"{got} of {options['messages']} messages, and not those that were sent")
    seconds = ended - began
    return {
        "messages_per_s": options["messages"] / seconds,
        "acked_per_s": options["messages"] / (acked - began),
        "mb_per_s": options["messages"] * options["message_bytes"] / seconds / 1e6,
        "producer_cpu_s": producer_cpu,
        "consumer_cpu_s": consumer_cpu,
    }


def main() -> int:
    """Run, print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--durability", default="fsync", choices=["memory", "os", "fsync"])
    parser.add_argument("--dispatch", default="reliable", choices=["reliable", "non_reliable"])
    parser.add_argument("--messages", type=int, default=5_000_000)
    parser.add_argument("--message-bytes", type=int, default=100)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    arguments = vars(parser.parse_args())
    runs = arguments.pop("runs")
    results = []
    with broker(arguments.pop("workers")) as ready:
        for number in range(runs):
            result = measure(ready["url"], f"/default/bench-{number}", arguments)
            results.append(result)
            print(f"run {number + 1}: {result['messages_per_s'] / 1e6:.2f} M/s", file=sys.stderr)
    median = {
        name: round(statistics.median(result[name] for result in results), 3) for name in results[0]
    }
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}"
    print(json.dumps({**arguments, "runs": runs, "machine": machine, **median}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
