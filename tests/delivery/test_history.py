"""Topics that are larger than the log: uploaded to a store, trimmed, and read across the seam, on real processes."""

from __future__ import annotations

import datetime as dt
import os
import signal
import threading
from pathlib import Path

import pytest

from danube_fast.errors import (
    DanubeError,
)
from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import (
    KIB,
    LOG_BYTES_MAX,
    NUMBER,
    SMALL,
    TOPIC,
    WAIT_SECONDS,
    first_offset,
    keep_for_ever,
    log_bytes,
    nothing_waits,
    publish,
    read_all,
    uploaded,
    uploader_pid,
    verify,
    worker_of,
)
from tests.workers.broker import wait_until


def test_a_topic_is_larger_than_its_log(broker: Broker, store: Path) -> None:
    """Three times as much as all logs may hold is published, kept for ever, and read back."""
    with broker.client() as client:
        keep_for_ever(client)
        total = 3 * LOG_BYTES_MAX // 1000
        publish(client, 0, total)
        # what arrives while a snapshot is on its way to the disk comes on top
        assert log_bytes(broker) <= LOG_BYTES_MAX * 3 // 2
        wait_until("the upload", uploaded(store, total))
        wait_until("the trim", lambda: log_bytes(broker) < LOG_BYTES_MAX // 2)
        read_all(client, 0, total)
        read_all(client, total // 2, total, position=total // 2)
        assert first_offset(client) == 0
    assert verify(store) == total


def test_a_consumer_passes_the_seam_while_all_goes_on(broker: Broker, store: Path) -> None:
    """One from the beginning catches up with a producer: each message once, in order."""
    with broker.client() as client:
        keep_for_ever(client)
        publish(client, 0, 20_000)
        wait_until("the upload", uploaded(store, 20_000))
        stopped = threading.Event()
        sent = 20_000

        def go_on() -> None:
            nonlocal sent
            with broker.client() as other:
                while not stopped.is_set():
                    publish(other, sent, 1000)
                    sent += 1000

        thread = threading.Thread(target=go_on)
        thread.start()
        try:
            expected = 0
            with client.consumer(
                TOPIC, subscription="s", type="exclusive", initial_position="earliest"
            ) as consumer:
                while expected < 60_000:
                    batch = consumer.receive_batch(1000, timeout=WAIT_SECONDS)
                    assert len(batch), f"nothing came behind message {expected}"
                    for payload in batch.payloads():
                        assert NUMBER.unpack_from(payload)[0] == expected
                        expected += 1
                    consumer.ack(batch)
        finally:
            stopped.set()
            thread.join(WAIT_SECONDS)
    verify(store)


def test_history_outlives_restarts(broker: Broker, store: Path) -> None:
    """Stopped in order and killed: what was uploaded is read, and the upload goes on behind it."""
    with broker.client() as client:
        keep_for_ever(client)
        publish(client, 0, 10_000)
        wait_until("the upload", uploaded(store, 10_000))
    broker.restart()
    with broker.client() as client:
        read_all(client, 0, 10_000)
        publish(client, 10_000, 10_000)
        wait_until("the upload", uploaded(store, 20_000))
    broker.kill()
    broker.start()
    with broker.client() as client:
        read_all(client, 0, 20_000)
        assert first_offset(client) == 0
    assert verify(store) == 20_000


def test_the_uploader_is_killed_again_and_again(broker: Broker, store: Path) -> None:
    """Manifests are consistent at every instant, and nothing is uploaded twice or left out."""
    with broker.client() as client:
        keep_for_ever(client)
        for kill in range(8):
            publish(client, kill * 4000, 4000)
            pid = 0

            def found() -> bool:
                nonlocal pid
                pid = uploader_pid(client)
                return pid > 0

            wait_until("the uploader", found)
            os.kill(pid, signal.SIGKILL)
            if (store / "manifests").exists():
                verify(store)
        wait_until("the upload", uploaded(store, 32_000))
        read_all(client, 0, 32_000)
    assert verify(store) == 32_000


def test_a_worker_is_killed_while_its_history_is_read(broker: Broker, store: Path) -> None:
    with broker.client() as client:
        keep_for_ever(client)
        publish(client, 0, 20_000)
        wait_until("the upload", uploaded(store, 20_000))
        with client.consumer(
            TOPIC,
            subscription="s",
            type="exclusive",
            initial_position="earliest",
            permits_bytes=256 * KIB,
        ) as consumer:
            seen: set[int] = set()
            killed = False
            while len(seen) < 20_000:
                batch = consumer.receive_batch(500, timeout=WAIT_SECONDS)
                assert len(batch), f"nothing came after {len(seen)} messages"
                seen |= {NUMBER.unpack_from(payload)[0] for payload in batch.payloads()}
                consumer.ack(batch)
                if not killed and len(seen) > 5000:
                    killed = True
                    broker.kill_worker(worker_of(client))
        assert seen == set(range(20_000))


def test_a_broker_with_history_does_not_start_without_its_store(tmp_path: Path) -> None:
    settings = {"workers": 1, "data_dir": tmp_path / "data", **SMALL}
    store = tmp_path / "store"
    with Broker(store=f"file://{store}", **settings) as broker, broker.client() as client:
        keep_for_ever(client)
        publish(client, 0, 5000)
        wait_until("the upload", uploaded(store, 5000))
        wait_until("the frontier", lambda: nothing_waits(client))
    with pytest.raises(DanubeError, match="started without"):
        Broker(**settings).stop()


def test_moves_take_history_along(broker: Broker, store: Path) -> None:
    """A partition moves with what is in the log only; history is read on from its new worker."""
    with broker.client() as client:
        keep_for_ever(client)
        publish(client, 0, 10_000)
        wait_until("the upload", uploaded(store, 10_000))
        for move in range(3):
            worker = worker_of(client)
            client.admin.move_topic(TOPIC, 1 - worker)
            publish(client, 10_000 + 1000 * move, 1000)
            read_all(client, 0, 11_000 + 1000 * move)
        wait_until("the upload", uploaded(store, 13_000))
        read_all(client, 0, 13_000)
        assert first_offset(client) == 0
    assert verify(store) == 13_000


def test_a_purge_takes_history_away(broker: Broker, store: Path) -> None:
    with broker.client() as client:
        keep_for_ever(client)
        publish(client, 0, 10_000)
        wait_until("the upload", uploaded(store, 10_000))
        client.admin.purge_topic(TOPIC)
        publish(client, 10_000, 1000)
        read_all(client, 10_000, 11_000)
        wait_until("the upload", uploaded(store, 1000))


def test_a_policy_without_history_gives_it_up(broker: Broker, store: Path) -> None:
    """A topic that is kept until it is acked again begins with what the log has."""
    with broker.client() as client:
        keep_for_ever(client)
        publish(client, 0, 20_000)
        wait_until("the upload", uploaded(store, 20_000))
        wait_until("the trim", lambda: log_bytes(broker) < LOG_BYTES_MAX // 2)
        client.admin.set_topic_policy(TOPIC, {"retention_policy": None})
        first = first_offset(client)
        assert 0 < first <= 20_000
        read_all(client, first, 20_000)


def test_topics_without_history_go_on_while_the_store_is_away(tmp_path: Path) -> None:
    """The broker is ready without its store; it names the store, and uploads when it is there."""
    missing = tmp_path / "later" / "store"
    with Broker(workers=1, store=f"file://{missing}", **SMALL) as broker, broker.client() as client:
        keep_for_ever(client)
        publish(client, 0, 1000)
        client.admin.create_topic("/default/other")
        publish(client, 0, 1000, "/default/other")
        wait_until("the reason in the log", lambda: str(missing) in broker.log)
        missing.parent.mkdir()
        wait_until("the upload", uploaded(missing, 1000))


def test_wrong_store_urls_are_told(tmp_path: Path) -> None:
    with pytest.raises(DanubeError, match="nonsense://"):
        Broker(store="nonsense://bucket").stop()


def test_a_time_leads_into_history(broker: Broker, store: Path) -> None:
    """A reader and a seek by time begin at the first message from then on, wherever that is."""
    with broker.client() as client:
        client.admin.create_topic(TOPIC)
        values = {"retention_policy": "until_expired", "retention_seconds": 3600}
        client.admin.set_topic_policy(TOPIC, values)
        publish(client, 0, 8000)
        between = dt.datetime.now(dt.UTC)
        publish(client, 8000, 12_000)
        wait_until("the upload", uploaded(store, 20_000))
        wait_until("the trim", lambda: log_bytes(broker) < LOG_BYTES_MAX // 2)
        read_all(client, 8000, 20_000, position=between)
        read_all(client, 0, 20_000, position="-30m")
        with client.consumer(
            TOPIC, subscription="s", type="exclusive", initial_position="latest"
        ) as consumer:
            consumer.seek(between)
            first = consumer.receive_batch(1, timeout=WAIT_SECONDS)
            assert first.offsets.tolist() == [8000]
            consumer.seek(dt.datetime.now(dt.UTC))
            publish(client, 20_000, 1)
            last = consumer.receive_batch(1, timeout=WAIT_SECONDS)
            assert last.offsets.tolist() == [20_000]
        assert first_offset(client) == 0  # nothing is an hour old
