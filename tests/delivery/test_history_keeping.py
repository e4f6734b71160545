"""How long history stays in the store, who may hold it, and who waits for whom."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.clock import SystemClock
from danube_fast.errors import (
    DanubeError,
    DeadlineExceeded,
    FailedPrecondition,
    ResourceExhausted,
    Unavailable,
)
from danube_fast.history.holds import held_keys, make_hold, release_hold, renew_hold
from danube_fast.history.stores.local import LocalStore
from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import (
    LOG_BYTES_MAX,
    MIB,
    SMALL,
    TOPIC,
    WAIT_SECONDS,
    first_offset,
    keep_for_ever,
    log_bytes,
    manifests,
    nothing_waits,
    payloads,
    publish,
    read_all,
    uploaded,
    verify,
)
from tests.workers.broker import wait_until


def objects(store: Path) -> set[str]:
    """Names of the objects in the store."""
    return {
        str(path.relative_to(store)) for path in (store / "objects").rglob("*") if path.is_file()
    }


@pytest.fixture
def sweeping(store: Path) -> Iterator[Broker]:
    """A broker that deletes quickly."""
    settings = {**SMALL, "history_delete_seconds": 2}
    with Broker(workers=2, store=f"file://{store}", **settings) as running:
        yield running


def test_old_messages_leave_the_store(sweeping: Broker, store: Path) -> None:
    """`retention_bytes` counts log and history once; what is over goes by whole objects, then from the store."""
    with sweeping.client() as client:
        client.admin.create_topic(TOPIC)
        values = {"retention_policy": "until_expired", "retention_bytes": 10 * MIB}
        client.admin.set_topic_policy(TOPIC, values)
        publish(client, 0, 30_000)
        wait_until("the upload", uploaded(store, 1))

        def is_bounded() -> bool:
            if not nothing_waits(client):
                return False
            logs = manifests(store).values()
            kept = sum(s.byte_count for log in logs for s in log.manifest.sections)
            return len(objects(store)) <= 5 and kept <= 15 * MIB and first_offset(client) > 10_000

        wait_until("the deletion", is_bounded)
        first = first_offset(client)
        assert first < 22_000
        read_all(client, first, 30_000)
    verify(store)


def test_a_deleted_topic_leaves_the_store(sweeping: Broker, store: Path) -> None:
    """Its own objects go, and those that it shares are written again without it."""
    other = "/default/other"
    with sweeping.client() as client:
        keep_for_ever(client)
        keep_for_ever(client, other)
        publish(client, 0, 1000)
        publish(client, 0, 1000, other)
        wait_until("the upload", uploaded(store, 2000))
        before = objects(store)
        client.admin.delete_topic(TOPIC)

        def is_gone() -> bool:
            return (len(manifests(store)) == 1 and not before & objects(store)) or len(before) > 1

        wait_until("the deletion", is_gone)
        wait_until("the records", lambda: len(manifests(store)) == 1)
        read_all(client, 0, 1000, other)
        assert verify(store) == 1000


def test_orphans_are_swept_and_held_objects_stay(sweeping: Broker, store: Path) -> None:
    """An object that no manifest names goes, unless a reader outside has a hold on it."""
    with sweeping.client() as client:
        keep_for_ever(client)
        publish(client, 0, 1000)
        wait_until("the upload", uploaded(store, 1000))
        named = objects(store)
        opened, clock = LocalStore(store, SystemClock()), SystemClock()
        orphan, held = "objects/00000000/000000000001", "objects/00000000/000000000002"
        opened.create(orphan, b"left behind")
        opened.create(held, b"read by others")
        hold = make_hold(opened, [held], 3600, clock.wall_ns())
        wait_until("the deletion", lambda: objects(store) == named | {held})
        release_hold(opened, renew_hold(opened, hold, 7200, clock.wall_ns()))
        wait_until("the deletion", lambda: objects(store) == named)
        read_all(client, 0, 1000)


def test_a_flush_uploads_at_once(store: Path) -> None:
    """All up to now is in the store when it returns, and held for a reader that has nothing else."""
    settings = {**SMALL, "history_flush_seconds": 3600, "history_delete_seconds": 2}
    with (
        Broker(workers=2, store=f"file://{store}", **settings) as broker,
        broker.client() as client,
    ):
        client.admin.create_topic(TOPIC, partitions=3)
        client.admin.set_topic_policy(TOPIC, {"retention_policy": "forever"})
        publish(client, 0, 3000)
        flushed = client.admin.flush_history(TOPIC, hold_seconds=600)
        assert flushed["store"] == f"file://{store}"
        assert sum(each["end_offset"] for each in flushed["partitions"]) == 3000
        assert verify(store) == 3000
        opened = LocalStore(store, SystemClock())
        assert held_keys(opened, SystemClock().wall_ns()) == objects(store)
        again = client.admin.flush_history(TOPIC)
        assert again["partitions"] == flushed["partitions"] and not again["hold"]
        client.admin.create_topic("/default/acked")
        with pytest.raises(FailedPrecondition, match="has no history"):
            client.admin.flush_history("/default/acked")
        status = client.admin.cluster_status()["history"]
        assert status["store"] == f"file://{store}" and not status["fault"]


def test_the_status_tells_why_nothing_is_uploaded(tmp_path: Path) -> None:
    missing = tmp_path / "later" / "store"
    with Broker(workers=1, store=f"file://{missing}", **SMALL) as broker, broker.client() as client:
        keep_for_ever(client)
        publish(client, 0, 1000)
        wait_until(
            "the reason", lambda: str(missing) in client.admin.cluster_status()["history"]["fault"]
        )
        with pytest.raises(Unavailable, match=str(missing)):
            client.admin.flush_history(TOPIC)
        missing.parent.mkdir()
        wait_until("the upload", uploaded(missing, 1000))
        wait_until("all is well", lambda: not client.admin.cluster_status()["history"]["fault"])


def fill(client: Any) -> int:
    """Publish until the broker refuses, as too much waits for the store; how many messages were accepted."""
    sent = 0
    while True:
        producer = client.producer(TOPIC, timeout=2)
        try:
            producer.send_many(payloads(sent, 500))
            producer.flush()
        except (ResourceExhausted, DeadlineExceeded) as error:
            told = str(error)
            break
        finally:
            with contextlib.suppress(DanubeError):
                producer.close(timeout=0)
        sent += 500
    assert "/later/store" in told
    assert "history_backlog_bytes_max" in told
    assert "make the folder or correct the store's URL" in told, told
    return sent


def test_others_go_on_while_the_store_is_away(tmp_path: Path) -> None:
    """A topic with history is refused, and names the store; one without writes three times what the logs may hold,
    and they stay within that and a segment. All drains by itself when the store is there."""
    missing = tmp_path / "later" / "store"
    other = "/default/acked"
    with Broker(workers=1, store=f"file://{missing}", **SMALL) as broker, broker.client() as client:
        keep_for_ever(client)
        client.admin.create_topic(other)
        sent = fill(client)
        with client.consumer(other, subscription="s", type="exclusive") as consumer:
            for start in range(0, 3 * LOG_BYTES_MAX // 1000, 2000):
                publish(client, start, 2000, other)
                seen = 0
                while seen < 2000:
                    batch = consumer.receive_batch(2000, timeout=WAIT_SECONDS)
                    assert len(batch), f"nothing came behind message {start + seen}"
                    consumer.ack(batch)
                    seen += len(batch)
                # a burst is two segments: what is over goes when the log is looked at next
                wait_until("the trim", lambda: log_bytes(broker) <= LOG_BYTES_MAX + MIB)
        missing.parent.mkdir()
        wait_until("the upload", uploaded(missing, sent))
        publish(client, sent, 1000)
        read_all(client, 0, sent + 1000)
