"""A consumer that is stopped or slow slows nobody else down, and costs the broker no memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import danube_fast
from tests.crash.rig import Server
from tests.workers.broker import ROOT

TOPIC = "/default/shared-fate"
MESSAGES = 40_000
MESSAGE_BYTES = 1024
TAIL_BYTES = 8 * 1024 * 1024
GROWTH_BYTES_MAX = 64 * 1024 * 1024
"""The tail that the worker keeps here, a consumer's credit (16 MiB), and as much again; what is
published meanwhile is 160 MB."""
WAIT_SECONDS = 60.0


def anonymous_bytes(pid: int) -> int:
    """RssAnon of a process."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


def exchange(producer: Any, consumer: Any, start: int) -> None:
    """Publish MESSAGES and take them all in the other subscription."""
    padding = bytes(MESSAGE_BYTES)
    began = time.monotonic()
    numbers = range(start, start + MESSAGES)
    producer.send_many([(b"%d " % number + padding)[:MESSAGE_BYTES] for number in numbers])
    producer.flush(timeout=WAIT_SECONDS)
    received = 0
    while received < MESSAGES and time.monotonic() - began < WAIT_SECONDS:
        batch = consumer.receive_batch(10_000, timeout=1)
        received += len(batch)
        consumer.ack(batch)
    assert received == MESSAGES, f"{received} of {MESSAGES} messages within {WAIT_SECONDS} s"


@pytest.mark.parametrize("kind", ["stopped", "slow"])
def test_only_the_late_consumer_is_late(tmp_path: Path, kind: str) -> None:
    rounds = 4
    plan = {
        "topic": TOPIC, "subscription": "late", "pause": 0.2 if kind == "slow" else 0,
        "wanted": (rounds + 1) * MESSAGES,
    }  # fmt: skip
    with (
        Server(tmp_path / "data", workers=1, tail_bytes_max=TAIL_BYTES) as server,
        danube_fast.connect(server.url) as client,
        client.producer(TOPIC, durability="os") as producer,
        client.consumer(TOPIC, subscription="swift", initial_position="earliest") as consumer,
    ):
        exchange(producer, consumer, 0)
        command = [sys.executable, "-m", "tests.neighbours.consumer_process"]
        command.append(json.dumps({**plan, "url": server.url}))
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as late:
            try:
                assert late.stdout is not None
                assert late.stdout.readline() == "ready\n"
                if kind == "stopped":
                    os.kill(late.pid, signal.SIGSTOP)
                before = anonymous_bytes(server.pid_of(1))
                for i in range(rounds):
                    exchange(producer, consumer, (i + 1) * MESSAGES)
                grown = anonymous_bytes(server.pid_of(1)) - before
                if kind == "stopped":
                    os.kill(late.pid, signal.SIGCONT)
                out, _ = late.communicate(timeout=2 * WAIT_SECONDS)
            finally:
                late.kill()
    assert grown < GROWTH_BYTES_MAX, f"the worker has grown by {grown} bytes"
    assert json.loads(out) == {"seen": (rounds + 1) * MESSAGES, "right": True}
