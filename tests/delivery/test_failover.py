"""Failover: a standby goes on where a killed or stopped consumer was, without a gap, in order."""

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
from tests.workers.broker import ROOT, wait_until

TOPIC = "/default/watched"
MESSAGES = 20_000
PROMOTION_SECONDS = 3.0
SLACK = 5
WAIT_SECONDS = 60.0


def consumer_process(
    server: Server, kind: str, transport: str, topic: str = TOPIC
) -> subprocess.Popen[str]:
    """A consumer on subscription `s` that is attached by now."""
    plan = {
        "url": server.url, "topic": topic, "subscription": "s", "type": kind,
        "transport": transport,
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.delivery.consumer_process", json.dumps(plan)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def receive_all(consumer: Any, wanted_end: int) -> list[danube_fast.Message]:
    """Until the message before `wanted_end` has come."""
    got: list[danube_fast.Message] = []
    deadline = time.monotonic() + WAIT_SECONDS
    while not got or got[-1].offset < wanted_end - 1:
        batch = consumer.receive_batch(timeout=1)
        got += list(batch)
        consumer.ack(batch)
        assert time.monotonic() < deadline, f"{len(got)} messages after {WAIT_SECONDS} s"
    return got


@pytest.mark.parametrize("transport", ["zmq", "shm"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_standby_is_promoted_and_goes_on_behind_the_last_ack(
    tmp_path: Path, transport: str, how: signal.Signals
) -> None:
    with (
        Server(tmp_path / "data", workers=1) as server,
        danube_fast.connect(server.url) as client,
        client.producer(TOPIC, durability="os") as producer,
    ):
        active = consumer_process(server, "failover", transport)
        try:
            standby = client.consumer(TOPIC, subscription="s", type="failover")
            producer.send_many([b"%d" % n for n in range(MESSAGES)])
            producer.flush(timeout=WAIT_SECONDS)
            assert active.stdout is not None
            seen = [int(active.stdout.readline().split()[0]) for _ in range(50)]
            assert seen == list(range(50))
            assert standby.receive(timeout=0.5) is None, "a standby gets nothing"
            os.kill(active.pid, how)
            began = time.monotonic()
            first = standby.receive(timeout=PROMOTION_SECONDS * SLACK)
            promoted = time.monotonic() - began
            assert first is not None, f"nobody was promoted in {PROMOTION_SECONDS * SLACK} s"
            assert promoted < PROMOTION_SECONDS * SLACK
            standby.ack(first)
            rest = receive_all(standby, MESSAGES)
            if how is signal.SIGSTOP:
                os.kill(active.pid, signal.SIGCONT)
                producer.publish(b"late")
                (late,) = receive_all(standby, MESSAGES + 1)
                assert late.offset == MESSAGES, "who was promoted stays so"
        finally:
            active.kill()
            active.wait(WAIT_SECONDS)
            active.stdout.close()
    offsets = [first.offset, *(message.offset for message in rest)]
    assert offsets == list(range(offsets[0], MESSAGES)), "a gap, or another order"
    # the 50 that were read are acked durably; the killed one may have acked as many more as a pipe holds lines
    assert 50 <= offsets[0] < MESSAGES // 2
    assert {message.redelivery_count for message in rest} <= {0, 1}


def test_the_next_in_line_is_who_came_next(tmp_path: Path) -> None:
    with (
        Server(tmp_path / "data", workers=1) as server,
        danube_fast.connect(server.url) as client,
        client.producer(TOPIC) as producer,
    ):
        line = [
            client.consumer(TOPIC, subscription="s", type="failover", name=f"c{n}")
            for n in range(3)
        ]
        for n, consumer in enumerate(line):
            producer.publish(b"%d" % n)
            message = consumer.receive(timeout=WAIT_SECONDS)
            assert message is not None
            assert message.offset == n
            consumer.ack(message)
            consumer.close()
        described = client.admin.describe_subscription(TOPIC, "s")
        assert (described["lag_messages"], described["consumers"]) == (0, [])


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_an_exclusive_subscription_is_free_when_its_process_is_killed(
    tmp_path: Path, transport: str
) -> None:
    """A process that is restarted at once is not refused until the session timeout."""
    session_timeout_ms = 120_000
    with (
        Server(tmp_path / "data", workers=1, session_timeout_ms=session_timeout_ms) as server,
        danube_fast.connect(server.url) as client,
    ):
        client.admin.create_topic(TOPIC)
        holder = consumer_process(server, "exclusive", transport)
        with pytest.raises(danube_fast.FailedPrecondition, match="holds it"):
            client.consumer(TOPIC, subscription="s")
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate(timeout=WAIT_SECONDS)

        def is_free() -> bool:
            try:
                client.consumer(TOPIC, subscription="s").close()
            except danube_fast.FailedPrecondition:  # the end of the connection was not read yet
                return False
            return True

        wait_until(
            "the subscription to be free, in half the session timeout", is_free, WAIT_SECONDS
        )
