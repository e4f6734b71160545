"""Topics without history, which are copied into the store for as long as a reader outside holds them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.clock import SystemClock
from danube_fast.errors import FailedPrecondition
from danube_fast.frame.view import FrameView
from danube_fast.history.manifest import ManifestReader
from danube_fast.history.reader import HistoryReader
from danube_fast.history.stores.local import LocalStore
from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import (
    MIB,
    NUMBER,
    SMALL,
    TOPIC,
    WAIT_SECONDS,
    keep_for_ever,
    nothing_waits,
    publish,
    read_all,
    uploader_pid,
    verify,
)
from tests.delivery.test_history_keeping import objects, records, sweep_has_passed
from tests.workers.broker import wait_until


@pytest.fixture
def broker(store: Path) -> Iterator[Broker]:
    """A broker that deletes quickly, and keeps what was acked for a while."""
    settings = {**SMALL, "history_delete_seconds": 2, "retention_seconds_min": 3600}
    with Broker(workers=2, store=f"file://{store}", **settings) as running:
        yield running


def stored(flushed: dict[str, Any], place: int = 0) -> list[int]:
    """Numbers of the messages that a reader of the store alone finds in one partition of a flush."""
    partition = flushed["partitions"][place]
    folder = Path(flushed["store"].removeprefix("file://"))
    outside = LocalStore(folder, SystemClock(), must_exist=True)
    identity = bytes.fromhex(flushed["identity"])
    manifest = ManifestReader(outside, identity, partition["partition_id"]).load()
    reader = HistoryReader(outside, partition["partition_id"], manifest)
    found: list[int] = []
    at = manifest.first_offset
    while at < partition["end_offset"]:
        fetched = reader.fetch(at, MIB)
        assert fetched is not None, f"nothing is behind offset {at}"
        begin = 0
        while begin < len(fetched.data):
            frame = FrameView(fetched.data, begin)
            for place, payload in enumerate(frame.payloads()):
                if frame.base_offset + place >= at and payload is not None:
                    found.append(NUMBER.unpack_from(payload)[0])
            begin += frame.frame_bytes
        at = fetched.end_offset
    return found


def test_a_topic_without_history_is_copied_until_its_hold_ends(broker: Broker, store: Path) -> None:
    with broker.client() as client:
        client.admin.create_topic(TOPIC)
        publish(client, 0, 6000)
        with pytest.raises(
            FailedPrecondition, match="set retention_policy, or flush it with a hold"
        ):
            client.admin.flush_history(TOPIC)
        first = client.admin.flush_history(TOPIC, hold_seconds=600)
        assert first["hold"] and first["partitions"][0]["end_offset"] == 6000
        assert stored(first) == list(range(6000))
        assert verify(store) == 6000
        copied = objects(store)
        sweep_has_passed(LocalStore(store, SystemClock()))
        assert objects(store) == copied and stored(first) == list(range(6000))
        # the second one adds what came since
        publish(client, 6000, 500)
        second = client.admin.flush_history(TOPIC, hold_seconds=600)
        assert copied < objects(store) and verify(store) == 6500
        assert stored(second) == list(range(6500))
        client.admin.release_history_hold(first["hold"])
        sweep_has_passed(LocalStore(store, SystemClock()))
        assert stored(second) == list(range(6500))
        client.admin.release_history_hold(second["hold"])
        wait_until("the deletion", lambda: not objects(store) and not records(store))
        # the broker's own readers never knew
        read_all(client, 0, 6500)
        assert nothing_waits(client)
        again = client.admin.flush_history(TOPIC, hold_seconds=600)
        assert stored(again) == list(range(6500)) and verify(store) == 6500


def test_an_uploader_that_knows_nothing_copies_anew(broker: Broker, store: Path) -> None:
    """What one before has uploaded is not gone on with: whether the log has the same past cannot be told, as it may
    have given up the messages."""
    with broker.client() as client:
        client.admin.create_topic(TOPIC, partitions=3)
        publish(client, 0, 3000)
        first = client.admin.flush_history(TOPIC, hold_seconds=600)
        before = objects(store)
        pid = uploader_pid(client)
        os.kill(pid, signal.SIGKILL)
        wait_until("another uploader", lambda: uploader_pid(client) not in (pid, 0))
        publish(client, 3000, 3000)
        second = client.admin.flush_history(TOPIC, hold_seconds=600)
        found = sorted(number for place in range(3) for number in stored(second, place))
        assert found == list(range(6000)) and verify(store) == 6000
        assert before <= objects(store), "objects of the first hold went"
        client.admin.release_history_hold(first["hold"])
        wait_until("the first copy's end", lambda: not before & objects(store))
        assert verify(store) == 6000
        client.admin.delete_topic(TOPIC)
        client.admin.release_history_hold(second["hold"])
        wait_until("the deletion", lambda: not objects(store) and not records(store))


def test_what_was_given_up_is_in_no_later_copy(broker: Broker, store: Path) -> None:
    with broker.client() as client:
        client.admin.create_topic(TOPIC)
        publish(client, 0, 2000)
        first = client.admin.flush_history(TOPIC, hold_seconds=600)
        publish(client, 2000, 1000)
        client.admin.purge_topic(TOPIC)
        publish(client, 3000, 1000)
        second = client.admin.flush_history(TOPIC, hold_seconds=600)
        assert stored(second) == list(range(3000, 4000))
        assert second["partitions"][0]["first_offset"] == 3000 == verify(store) + 2000
        client.admin.release_history_hold(first["hold"])
        client.admin.release_history_hold(second["hold"])
        wait_until("the deletion", lambda: not objects(store) and not records(store))


def test_a_copy_becomes_history(broker: Broker, store: Path) -> None:
    """The policy is changed while a copy is held: what is uploaded counts, and nothing is there twice."""
    with broker.client() as client:
        client.admin.create_topic(TOPIC)
        publish(client, 0, 3000)
        held = client.admin.flush_history(TOPIC, hold_seconds=600)
        client.admin.set_topic_policy(TOPIC, {"retention_policy": "forever"})
        publish(client, 3000, 3000)
        flushed = client.admin.flush_history(TOPIC)
        assert flushed["partitions"][0]["end_offset"] == 6000
        assert verify(store) == 6000
        client.admin.release_history_hold(held["hold"])
        sweep_has_passed(LocalStore(store, SystemClock()))
        assert stored(flushed) == list(range(6000))
        read_all(client, 0, 6000)
        client.admin.set_topic_policy(TOPIC, {"retention_policy": "until_acked"})
        wait_until("the deletion", lambda: not objects(store) and not records(store))
        held = client.admin.flush_history(TOPIC, hold_seconds=600)
        assert stored(held)[-1] == 5999


@pytest.mark.parametrize("kind", [{"durability": "memory"}, {"dispatch": "non_reliable"}])
def test_what_is_in_no_log_is_not_copied(broker: Broker, kind: dict[str, str]) -> None:
    with broker.client() as client:
        client.admin.create_topic(TOPIC, **kind)
        with pytest.raises(FailedPrecondition, match="not in a log, as it is non_reliable or"):
            client.admin.flush_history(TOPIC, hold_seconds=600, timeout=WAIT_SECONDS)


def test_publishers_and_flushes_at_the_same_time(broker: Broker, store: Path) -> None:
    """Flushes of one topic from several clients wait for each other, and each has all up to its time."""
    with broker.client() as client, broker.client() as other:
        client.admin.create_topic(TOPIC)
        keep_for_ever(client, "/default/beside")
        for start in range(0, 5000, 500):
            publish(client, start, 500)
            publish(client, start, 500, "/default/beside")
            flushed = other.admin.flush_history(TOPIC, hold_seconds=60)
            assert flushed["partitions"][0]["end_offset"] == start + 500
            assert stored(flushed) == list(range(start + 500))
            other.admin.release_history_hold(flushed["hold"])
        client.admin.flush_history("/default/beside")
        read_all(client, 0, 5000, "/default/beside")
        wait_until("the deletion", lambda: len(records_of(store)) == 1)


def records_of(store: Path) -> set[str]:
    """Partitions that have a manifest."""
    return {Path(key).parent.name for key in records(store)}
