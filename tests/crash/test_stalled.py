"""A consumer that stands still across a kill: what it had received comes to light although another
consumer of the subscription has acked the same meanwhile. The kill test's rules must tell that from a
broker's fault."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.crash.history import History
from tests.crash.payloads import ACK_SENT, RECEIVED, payload_of, read_records
from tests.crash.rig import Member, Server
from tests.workers.broker import wait_until

TOPIC = "/default/o2"
MESSAGES = 8_000
PARTS = 20
SECONDS = 60.0


def offsets(paths: list[Path], kind: int, generation_min: int = 0) -> set[int]:
    """Offsets that these consumers noted as that, under a subscription that is not older."""
    found: set[int] = set()
    for path in paths:
        records = read_records(path)
        chosen = (records["kind"] == kind) & (records["generation"] >= generation_min)
        found |= set(records["offset"][chosen].tolist())
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_what_a_stalled_consumer_had_in_hand_is_no_fault(tmp_path: Path, transport: str) -> None:
    history = History(f"stalled, {transport}")
    history.noticed_ns = int(2 * SECONDS * 1e9)
    paths = [tmp_path / f"taker{number}.seen" for number in range(2)]
    with Server(tmp_path / "data", workers=1) as server, server.client() as client:
        client.admin.create_topic(TOPIC, dispatch="reliable", durability="os")
        plans = [
            {"url": server.url, "topic": TOPIC, "subscription": "team", "type": "shared",
             "acks": True, "name": path.stem, "record": str(path), "seed": 1,
             "transport": transport, "stalls_at": stalls_at}
            for path, stalls_at in zip(paths, (3, 0), strict=True)
        ]  # fmt: skip
        with (
            Member("consumer_process", plans[0], tmp_path / "0") as stalled,
            Member("consumer_process", plans[1], tmp_path / "1") as other,
        ):
            stalled.wait_ready()
            other.wait_ready()
            producer = client.producer(TOPIC)

            def publish(first: int, count: int) -> None:
                producer.send_many([payload_of(1, first + i) for i in range(count)])
                producer.flush(timeout=SECONDS)

            for part in range(PARTS):
                if part == PARTS // 2:  # the rest comes to one that stands still, too
                    wait_until("the stall", lambda: is_stopped(stalled.process.pid), SECONDS)
                publish(part * MESSAGES // PARTS, MESSAGES // PARTS)
            history.kills_ns.append(server.kill("all"))
            server.start()
            wait_until("acks", lambda: len(offsets(paths, ACK_SENT)) == MESSAGES, SECONDS)
            os.kill(stalled.process.pid, signal.SIGCONT)
            count = MESSAGES

            def new_subscription() -> bool:
                nonlocal count
                publish(count, 10)
                count += 10
                return bool(offsets(paths[:1], RECEIVED, 2))

            wait_until("a message under a new subscription", new_subscription, SECONDS)
            wait_until("the end", lambda: len(offsets(paths, ACK_SENT)) == count, SECONDS)
            stalled.finish()
            other.finish()
        records = [history.read_consumer(TOPIC, path, ordered=False) for path in paths]
        history.settle(TOPIC, client.reader(TOPIC))
        assert history.cursor(TOPIC, records, []) > MESSAGES // 2
        assert history.excused > 0, "nothing was in hand of the consumer that stood still"


def is_stopped(pid: int) -> bool:
    """Whether a process stands still after SIGSTOP."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
