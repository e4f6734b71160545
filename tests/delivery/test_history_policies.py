"""Policies on ages and sizes count messages that only the store has, at once after a restart and a move, too."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import (
    MIB,
    NUMBER,
    SMALL,
    TOPIC,
    WAIT_SECONDS,
    keep_for_ever,
    log_bytes,
    nothing_waits,
    publish,
    read_all,
    uploaded,
    wait_for_trim,
    worker_of,
)
from tests.workers.broker import wait_until

COUNT = 12_000
"""Messages of 1000 bytes: much more than the log keeps of them."""
PART = 2000
"""Messages of an object, where that matters."""
FRAME_BYTES = 1010
"""Of each message in the log, about."""


def kept(client: Any) -> int:
    """Bytes that the topic keeps, as its refusal tells; 0 while it is not refused."""
    refusal = client.admin.topic_stats(TOPIC)["partition_stats"][0]["refusal"]
    found = re.search(r"keeps (\d+) bytes.*storage_bytes_max", refusal)
    return int(found.group(1)) if found else 0


def is_refused(client: Any) -> Callable[[], bool]:
    return lambda: kept(client) > 0


def check_kept(client: Any, count: int) -> None:
    """All of it counts, and counts once."""
    wait_until("the refusal", is_refused(client))
    assert kept(client) == pytest.approx(count * 1000, rel=0.05)


def test_a_quota_counts_history_and_log_once(broker: Broker, store: Path) -> None:
    """While the log has all, when it has the rest only, after an end in order, a kill, and a move."""
    with broker.client() as client:
        keep_for_ever(client)
        publish(client, 0, COUNT)
        client.admin.set_topic_policy(TOPIC, {"storage_bytes_max": 10 * MIB})
        check_kept(client, COUNT)
        wait_until("the upload", uploaded(store, COUNT))
        wait_until("the frontier", lambda: nothing_waits(client))
        check_kept(client, COUNT)
        wait_until("the trim", lambda: log_bytes(broker) < 6 * MIB)
        check_kept(client, COUNT)
    broker.restart()
    with broker.client() as client:
        check_kept(client, COUNT)
        client.admin.move_topic(TOPIC, 1 - worker_of(client))
        check_kept(client, COUNT)
    broker.kill()
    broker.start()
    with broker.client() as client:
        check_kept(client, COUNT)
        client.admin.purge_topic(TOPIC)
        wait_until("room", lambda: not kept(client))
        publish(client, COUNT, 1000)
        read_all(client, COUNT, COUNT + 1000)


def test_a_quota_counts_what_is_behind_the_seam_after_a_restart(
    broker: Broker, store: Path
) -> None:
    """Neither part alone is above it."""
    with broker.client() as client:
        keep_for_ever(client, storage_bytes_max=COUNT * 1000 + 4 * MIB)
        publish(client, 0, COUNT)
        wait_until("the upload", uploaded(store, COUNT))
        wait_until("the trim", lambda: log_bytes(broker) < 6 * MIB)
    broker.restart()
    with broker.client() as client:
        publish(client, COUNT, 3000)
        assert not kept(client)
        publish(client, COUNT + 3000, 2000)
        check_kept(client, COUNT + 5000)


def unacked(client: Any) -> int:
    """Bytes that subscriptions did not ack, as the topic's refusal tells; 0 while it is not refused."""
    refusal = client.admin.topic_stats(TOPIC)["partition_stats"][0]["refusal"]
    found = re.search(r"has (\d+) bytes that its subscriptions did not ack", refusal)
    return int(found.group(1)) if found else 0


def check_unacked(client: Any, count: int) -> None:
    """So many messages, within an object: where in it the subscription is, is known about."""

    def counts() -> bool:
        return bool(unacked(client) == pytest.approx(count * 1000, rel=0.05))

    wait_until(f"the refusal with {count} messages", counts)


def seek(client: Any, offset: int) -> None:
    """Move the subscription."""
    with client.consumer(TOPIC, subscription="s") as consumer:
        consumer.seek(offset)


def test_a_backlog_counts_history_after_restarts_and_moves(broker: Broker, store: Path) -> None:
    """Of a subscription at the first message, and of one in the midst of history; when there is room, it is open again."""
    with broker.client() as client:
        keep_for_ever(client)
        client.consumer(TOPIC, subscription="s", initial_position="earliest").close()
        publish(client, 0, COUNT)
        wait_until("the upload", uploaded(store, COUNT))
        wait_until("the trim", lambda: log_bytes(broker) < 6 * MIB)
    broker.restart()
    with broker.client() as client:
        client.admin.set_topic_policy(TOPIC, {"backlog_bytes_max": 7 * MIB})
        check_unacked(client, COUNT)
        client.admin.move_topic(TOPIC, 1 - worker_of(client))
        check_unacked(client, COUNT)
        seek(client, COUNT // 4)
        check_unacked(client, COUNT * 3 // 4)
    broker.kill()
    broker.start()
    with broker.client() as client:
        check_unacked(client, COUNT * 3 // 4)
        seek(client, COUNT // 2)
        wait_until("room", lambda: not unacked(client))
        publish(client, COUNT, 1000)


def test_a_backlog_in_history_is_evicted_after_a_restart(store: Path, tmp_path: Path) -> None:
    """By whole objects: never more than the policy says, and one object less at most."""
    settings = {**SMALL, "workers": 1, "store": f"file://{store}", "data_dir": tmp_path / "data"}
    with Broker(**settings) as broker, broker.client() as client:
        keep_for_ever(client)
        client.consumer(TOPIC, subscription="s", initial_position="earliest").close()
        for start in range(0, COUNT, PART):
            publish(client, start, PART)
            wait_until("the upload", uploaded(store, start + PART))
        wait_for_trim(broker, client, COUNT * 1000)
    with Broker(**settings) as broker, broker.client() as client:
        policy = {"backlog_bytes_max": 5 * MIB, "backlog_policy": "evict"}
        client.admin.set_topic_policy(TOPIC, policy)
        wait_until("the eviction", lambda: subscription(client, "s")["cursor"] > 0)
        most = COUNT - 5 * MIB // FRAME_BYTES
        assert most - PART <= subscription(client, "s")["cursor"] <= most
        read_all(client, 0, COUNT)


def test_old_messages_in_history_are_passed_over(store: Path) -> None:
    """By a subscription without consumers, by one that begins there, and while a reader reads the same messages; not
    those that are young."""
    with Broker(workers=1, store=f"file://{store}", **SMALL) as broker, broker.client() as client:
        keep_for_ever(client)
        client.consumer(
            TOPIC, subscription="idle", type="exclusive", initial_position="earliest"
        ).close()
        publish(client, 0, COUNT)
        published = time.monotonic()
        wait_until("the upload", uploaded(store, COUNT))
        wait_for_trim(broker, client, COUNT * 1000)
        read_all(client, 0, COUNT)  # pieces of history are here from now on
        wait_until("their age", lambda: time.monotonic() - published > 10)
        client.admin.set_topic_policy(TOPIC, {"message_ttl_ms": 10_000})
        wait_until("their end", lambda: subscription(client, "idle")["cursor"] >= COUNT)
        assert subscription(client, "idle")["expired"] == COUNT
        with client.consumer(
            TOPIC, subscription="new", type="exclusive", initial_position="earliest"
        ) as consumer:
            deadline, sent = time.monotonic() + WAIT_SECONDS, COUNT
            batch: Any = ()
            while not len(batch):
                assert time.monotonic() < deadline
                publish(client, sent, 100)
                sent += 100
                batch = consumer.receive_batch(100, timeout=1)
            numbers = [NUMBER.unpack_from(payload)[0] for payload in batch.payloads()]
            assert numbers[0] >= COUNT
        read_all(client, 0, sent)  # readers get all


def test_the_end_of_a_time_to_live_may_lie_within_history(store: Path) -> None:
    """What is too old goes, what is not is delivered from the store, without a gap."""
    with Broker(workers=1, store=f"file://{store}", **SMALL) as broker, broker.client() as client:
        keep_for_ever(client)
        publish(client, 0, COUNT)
        old = time.time()
        wait_until("a time between", lambda: time.time() - old > 4)
        publish(client, COUNT, COUNT)
        wait_until("the upload", uploaded(store, 2 * COUNT))
        wait_for_trim(broker, client, 2 * COUNT * 1000)
        ttl_ms = int((time.time() - old - 0.5) * 1000)  # nothing of the second half for 3 s
        client.admin.set_topic_policy(TOPIC, {"message_ttl_ms": ttl_ms})
        with client.consumer(
            TOPIC, subscription="s", type="exclusive", initial_position="earliest"
        ) as consumer:
            batch = consumer.receive_batch(10, timeout=WAIT_SECONDS)
            first = NUMBER.unpack_from(batch.payloads()[0])[0]
            assert COUNT <= first < 2 * COUNT
            client.admin.set_topic_policy(TOPIC, {"message_ttl_ms": 3_600_000})
            expected = first + len(batch)
            while expected < 2 * COUNT:
                batch = consumer.receive_batch(1000, timeout=WAIT_SECONDS)
                assert len(batch), f"nothing came behind message {expected}"
                for payload in batch.payloads():
                    number = NUMBER.unpack_from(payload)[0]
                    assert number == expected
                    expected += 1


def subscription(client: Any, name: str) -> dict[str, Any]:
    """What the broker tells of a subscription."""
    found = client.admin.topic_stats(TOPIC)["partition_stats"][0]["subscriptions"]
    return dict(next(each for each in found if each["subscription"] == name))
