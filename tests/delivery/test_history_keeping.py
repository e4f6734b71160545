"""How long history stays in the store, who may hold it, and who waits for whom."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.clock import SystemClock
from danube_fast.errors import (
    DanubeError,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from danube_fast.frame.view import FrameView
from danube_fast.history.holds import held_keys, make_hold, release_hold, renew_hold
from danube_fast.history.manifest import ManifestReader
from danube_fast.history.reader import HistoryReader
from danube_fast.history.stores.local import LocalStore
from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import (
    LOG_BYTES_MAX,
    MIB,
    NUMBER,
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

NUMBERS = itertools.count(1)


def files(store: Path, folder: str) -> set[str]:
    """Keys of the objects in a folder of the store; others may be deleted meanwhile, their folders too."""
    found = os.walk(store / folder)
    return {
        str((Path(parent) / name).relative_to(store))
        for parent, _, names in found
        for name in names
    }


def objects(store: Path) -> set[str]:
    """Names of the objects in the store."""
    return files(store, "objects")


def records(store: Path) -> set[str]:
    """Records of manifests in the store."""
    return files(store, "manifests")


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
        read_all(client, first, 30_000, start_max=22_000)  # it may go on until 10 MiB are left
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
        release_hold(opened, renew_hold(opened, hold.key, 7200, clock).key)
        wait_until("the deletion", lambda: objects(store) == named)
        read_all(client, 0, 1000)


def test_a_flush_waits_for_an_uploader_that_is_starting(broker: Broker) -> None:
    with broker.client() as client:
        keep_for_ever(client)
        publish(client, 0, 100)
    for _ in range(3):
        broker.restart()
        with broker.client() as client:
            (partition,) = client.admin.flush_history(TOPIC)["partitions"]
        assert partition["end_offset"] == 100


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


def sweep_has_passed(store: LocalStore) -> None:
    """Wait until the broker has deleted something that was made just now."""
    orphan = f"objects/00000000/{next(NUMBERS):012d}"
    store.create(orphan, b"left behind")
    wait_until("the deletion", lambda: store.head(orphan) is None)


def test_a_renewed_hold_outlives_the_first_and_a_released_one_ends(
    sweeping: Broker, store: Path
) -> None:
    opened, clock = LocalStore(store, SystemClock()), SystemClock()
    with sweeping.client() as client:
        keep_for_ever(client)
        publish(client, 0, 5000)
        first = client.admin.flush_history(TOPIC, hold_seconds=6)
        held = objects(store)
        renewed = client.admin.renew_history_hold(first["hold"], hold_seconds=600)
        assert held and renewed["hold"] != first["hold"]
        assert 590 <= renewed["expires"] - first["expires"] <= 595
        client.admin.delete_topic(TOPIC)
        wait_until(
            "the end of the first hold", lambda: clock.wall_ns() / 1e9 > first["expires"] + 1
        )
        sweep_has_passed(opened)
        assert not records(store) and objects(store) == held
        # of a renewal whose answer was lost, the reader knows the first key
        again = client.admin.renew_history_hold(first["hold"], hold_seconds=600)
        sweep_has_passed(opened)
        assert objects(store) == held
        for _ in range(2):
            assert client.admin.release_history_hold(again["hold"]) is None
        wait_until("the deletion", lambda: not objects(store))
        with pytest.raises(NotFound, match="flush the topic again with hold_seconds"):
            client.admin.renew_history_hold(again["hold"], hold_seconds=600)


def test_a_hold_that_was_not_renewed_is_gone(sweeping: Broker, store: Path) -> None:
    with sweeping.client() as client:
        keep_for_ever(client)
        publish(client, 0, 100)
        hold = client.admin.flush_history(TOPIC, hold_seconds=1)["hold"]
        client.admin.delete_topic(TOPIC)
        wait_until("the deletion", lambda: not objects(store))
        with pytest.raises(NotFound, match="flush the topic again with hold_seconds"):
            client.admin.renew_history_hold(hold, hold_seconds=600)


def test_the_store_alone_is_read_while_the_broker_sweeps(sweeping: Broker, store: Path) -> None:
    """A reader outside has a hold and the store's URL: it reads each message once, in order, though the topic is
    deleted meanwhile."""
    with sweeping.client() as client:
        keep_for_ever(client)
        publish(client, 0, 12_000)
        flushed = client.admin.flush_history(TOPIC, hold_seconds=600)
        (partition,) = flushed["partitions"]
        outside = LocalStore(
            Path(flushed["store"].removeprefix("file://")), SystemClock(), must_exist=True
        )
        identity = bytes.fromhex(flushed["identity"])
        manifest = ManifestReader(outside, identity, partition["partition_id"]).load()
        reader = HistoryReader(outside, partition["partition_id"], manifest)
        end = partition["end_offset"]
        expected = at = partition["first_offset"]
        held = objects(store)
        assert len(held) > 1
        while at < end:
            fetched = reader.fetch(at, MIB)
            assert fetched is not None, f"nothing is behind offset {at} of {end}"
            if at == 0:
                client.admin.delete_topic(TOPIC)
                wait_until("the manifests' end", lambda: not records(store))
                sweep_has_passed(LocalStore(store, SystemClock()))
            place = 0
            while place < len(fetched.data):
                frame = FrameView(fetched.data, place)
                for payload in frame.payloads():
                    assert payload is not None and NUMBER.unpack_from(payload)[0] == expected
                    expected += 1
                place += frame.frame_bytes
            at = fetched.end_offset
        assert expected == end == 12_000
        client.admin.release_history_hold(flushed["hold"])
        wait_until("the deletion", lambda: not held & objects(store))


WRONG_HOLDS: list[Any] = [
    "", "holds/", "holds/../objects/00000001/000000000001", "../holds/001767225600000-0123456789abcdef",
    "objects/00000001/000000000001", "manifests/0000000001/pruned", "holds/" + "0" * 100_000, 17, ["holds/"],
    {"hold": 1}, b"holds/001767225600000-0123456789abcdef", True,
]  # fmt: skip
WRONG_SECONDS: list[Any] = [0, -1, 1 << 40, 1 << 70, "60", 1.5, True, [60]]


def test_wrong_holds_are_refused(broker: Broker, store: Path) -> None:
    """Nothing of the store is touched, and the uploader goes on."""
    with broker.client() as client:
        keep_for_ever(client)
        publish(client, 0, 100)
        hold = client.admin.flush_history(TOPIC, hold_seconds=600)["hold"]
        before = {path for path in store.rglob("*") if path.is_file()}
        for wrong in WRONG_HOLDS:
            for operation, more in (
                ("renew_history_hold", {"hold_seconds": 60}), ("release_history_hold", {}),
            ):  # fmt: skip
                with pytest.raises(InvalidArgument):
                    client.admin.call(operation, hold=wrong, **more)
        for seconds in WRONG_SECONDS:
            with pytest.raises(InvalidArgument):
                client.admin.call("renew_history_hold", hold=hold, hold_seconds=seconds)
        for operation in ("renew_history_hold", "release_history_hold"):
            with pytest.raises(InvalidArgument):
                client.admin.call(operation)
        assert {path for path in store.rglob("*") if path.is_file()} == before
        client.admin.renew_history_hold(hold, hold_seconds=60)
        client.admin.release_history_hold(hold)


def test_holds_need_a_store() -> None:
    hold = "holds/001767225600000-0123456789abcdef"
    with Broker(workers=1) as broker, broker.client() as client:
        with pytest.raises(FailedPrecondition, match="start it with --store URL"):
            client.admin.renew_history_hold(hold, hold_seconds=60)
        with pytest.raises(FailedPrecondition, match="start it with --store URL"):
            client.admin.release_history_hold(hold)


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
