"""What is sent ahead is bounded by permits: an idle consumer gets the rest, however slow another one is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

import danube_fast
from danube_fast.client.values.limits import PREFETCH_PER_HANDLER
from tests.crash.rig import Server
from tests.workers.broker import ROOT

MESSAGES = 5000
WAIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("permits") / "data", workers=1) as running:
        yield running


def slow_process(server: Server, topic: str, kind: str) -> subprocess.Popen[str]:
    """A process with one slow handler, subscribed by now."""
    plan = {"url": server.url, "topic": topic, "type": kind, "concurrency": 1}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.delivery.slow_handler_process", json.dumps(plan)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("kind", ["shared", "key_shared"])
def test_a_slow_handler_starves_no_idle_process(server: Server, kind: str) -> None:
    topic = f"/default/slow-{kind}"
    with (
        danube_fast.connect(server.url) as client,
        client.producer(topic, batch_bytes_max=1 << 20, linger_us=1_000_000) as producer,
        slow_process(server, topic, kind) as slow,
    ):
        assert slow.stdin is not None and slow.stdout is not None
        try:
            keys = [f"k{n}" for n in range(MESSAGES)]
            producer.send_many([b"%d" % n for n in range(MESSAGES)], keys=keys)
            producer.flush(timeout=WAIT_SECONDS)
            begun = [int(slow.stdout.readline())]
            idle = client.consumer(topic, subscription="s", type=kind)
            got: list[int] = []
            wanted = MESSAGES - PREFETCH_PER_HANDLER - 1
            if kind == "key_shared":
                wanted = MESSAGES // 4  # about half of the keys are those of the slow one
            while len(got) < wanted:
                batch = idle.receive_batch(timeout=WAIT_SECONDS)
                assert batch, f"{len(got)} of {wanted} came to an idle consumer"
                got += batch.offsets.tolist()
                idle.ack(batch)
            idle.flush_acks()
            (slow_one,) = (
                each
                for each in client.admin.describe_subscription(topic, "s")["consumers"]
                if each["message_credit"] < PREFETCH_PER_HANDLER
            )
            assert 1 <= slow_one["unacked"] <= PREFETCH_PER_HANDLER + 1
            idle.close()
            slow.stdin.write("go\n")
            slow.stdin.flush()
            while len(begun) + len(got) < MESSAGES:
                begun.append(int(slow.stdout.readline()))
            assert sorted(begun + got) == list(range(MESSAGES)), "each was handled once"
        finally:
            slow.kill()


def test_permits_bound_what_one_consumer_gets_of_a_large_batch(server: Server) -> None:
    topic = "/default/ten-permits"
    with danube_fast.connect(server.url) as client:
        producer = client.producer(topic, batch_bytes_max=1 << 20, linger_us=1_000_000)
        few = client.consumer(topic, subscription="s", type="shared", permits_messages=10)
        producer.send_many([b"%d" % n for n in range(MESSAGES)])
        producer.flush(timeout=WAIT_SECONDS)
        first = few.receive(timeout=WAIT_SECONDS)
        assert first is not None
        other = client.consumer(topic, subscription="s", type="shared")
        got = 0
        while got < MESSAGES - 11:
            batch = other.receive_batch(timeout=WAIT_SECONDS)
            assert batch, f"{got} of {MESSAGES} came to the other consumer"
            got += len(batch)
            other.ack(batch)
        producer.close()
