"""Stores and disks that fail under a real broker: publishing goes on, readers get no wrong byte, and all drains."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.clock import SystemClock
from danube_fast.errors import DataLoss, FailedPrecondition, ResourceExhausted
from danube_fast.history.stores.local import LocalStore
from danube_fast.history.stores.store import ObjectStore
from danube_fast.testing.broker import Broker
from danube_fast.workers.uploader.state import CACHE_NAME
from tests.delivery.history_rig import (
    TOPIC,
    keep_for_ever,
    payloads,
    publish,
    read_all,
    read_until_error,
    uploader_pid,
    wait_for_trim,
)
from tests.delivery.s3_rig import (
    KIB,
    MIB,
    QUICK,
    manifests,
    opened,
    s3_url,
    uploaded_count,
    verify_store,
)
from tests.history.faulty_proxy import Fault, FaultyProxy
from tests.history.rig import change_object
from tests.history.s3_servers import ACCESS_KEY, SECRET_KEY, plain_client
from tests.workers.broker import wait_until

pytestmark = pytest.mark.timeout(300)
NUMBERS = itertools.count()
WAIT_SECONDS = 60.0
COUNT = 12_000
"""Messages of 1000 bytes: three objects, and much more than a segment."""
OBJECT_BYTES = 4 * MIB
SMALL: dict[str, Any] = {
    **QUICK, "segment_bytes": MIB, "segment_start_bytes": 256 * KIB, "wal_bytes_max": 24 * MIB, "tail_bytes_max": 64 * KIB,
    "history_object_bytes": OBJECT_BYTES, "history_part_bytes": MIB,
}  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store", SystemClock())


@contextlib.contextmanager
def running(url: str, **settings: Any) -> Iterator[tuple[Broker, Any]]:
    """A broker with a store, a topic that stays, and a client."""
    with Broker(store=url, **{**SMALL, **settings}) as broker, broker.client() as client:
        keep_for_ever(client)
        yield broker, client


def all_uploaded(store: ObjectStore, count: int) -> Callable[[], bool]:
    return lambda: uploaded_count(store) == count


def goes_on(client: Any, count: int = 100) -> None:
    """A new topic without history takes messages and gives them."""
    topic = f"/default/other-{next(NUMBERS)}"
    client.admin.create_topic(topic)
    publish(client, 0, count, topic)
    read_all(client, 0, count, topic)


def begins_to_read(client: Any) -> bool:
    """Whether the first message can be read."""
    try:
        with client.reader(TOPIC, start="earliest") as reader:
            return len(reader.receive_batch(1, timeout=WAIT_SECONDS)) > 0
    except (DataLoss, FailedPrecondition):
        return False


# ---------------------------------------------------------------- the way to the store


def test_a_bucket_that_is_missing_is_named_and_used_once_it_is_there(
    seaweed: str, proxy: FaultyProxy
) -> None:
    bucket = "made-later"
    with running(s3_url(proxy.url, "p", bucket)) as (broker, client):
        publish(client, 0, 2000)
        wait_until("the reason", lambda: re.search(f"{bucket}.*make the bucket", broker.log))
        goes_on(client)
        plain_client(seaweed).create_bucket(Bucket=bucket)
        with opened(s3_url(seaweed, "p", bucket)) as store:
            wait_until("the upload", all_uploaded(store, 2000))
        read_all(client, 0, 2000)


def test_wrong_credentials_are_told_and_corrected_ones_are_read(
    seaweed: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They stand in a file, and the broker goes on without a restart."""
    file = tmp_path / "credentials"
    entry = "[default]\naws_access_key_id = {}\naws_secret_access_key = {}\n"
    with opened(s3_url(seaweed, "credentials")) as store:
        assert uploaded_count(store) == 0  # with the right ones of the environment
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        file.write_text(entry.format(ACCESS_KEY, "a wrong one"))
        with running(s3_url(proxy.url, "credentials")) as (broker, client):
            publish(client, 0, 2000)
            wait_until("the reason", lambda: "check the credentials" in broker.log)
            assert uploaded_count(store) == 0
            goes_on(client)
            file.write_text(entry.format(ACCESS_KEY, SECRET_KEY))
            wait_until("the upload", all_uploaded(store, 2000))
            read_all(client, 0, 2000)


def test_credentials_that_stop_working(seaweed: str, proxy: FaultyProxy) -> None:
    with (
        running(s3_url(proxy.url, "stop")) as (broker, client),
        opened(s3_url(seaweed, "stop")) as store,
    ):
        publish(client, 0, 1000)
        wait_until("the upload", all_uploaded(store, 1000))
        refusal = Fault(lambda method, path: True, 1 << 30, status=403, code="AccessDenied")
        proxy.faults.append(refusal)
        publish(client, 1000, 6000)
        wait_until("the reason", lambda: "AccessDenied" in broker.log)
        goes_on(client)
        assert uploaded_count(store) == 1000
        refusal.left = 0
        wait_until("the upload", all_uploaded(store, 7000))
        verify_store(store)
        read_all(client, 0, 7000)


def test_a_clock_that_is_wrong_is_told(seaweed: str, proxy: FaultyProxy) -> None:
    """The store refuses all until it is set; then all drains by itself."""
    with (
        running(s3_url(proxy.url, "clock")) as (_, client),
        opened(s3_url(seaweed, "clock")) as store,
    ):
        publish(client, 0, 1000)
        wait_until("the upload", all_uploaded(store, 1000))
        skew = Fault(lambda method, path: True, 1 << 30, status=403, code="RequestTimeTooSkewed")
        proxy.faults.append(skew)
        publish(client, 1000, 1000)
        wait_until(
            "the reason",
            lambda: "set the clock" in client.admin.cluster_status()["history"]["fault"],
        )
        goes_on(client)
        skew.left = 0
        wait_until("the upload", all_uploaded(store, 2000))
        verify_store(store)
        read_all(client, 0, 2000)


PART = Fault(lambda m, path: m == "PUT" and "partNumber=" in path)
WHOLE = Fault(lambda m, path: m == "POST" and "/objects/" in path and "uploadId=" in path)
MANIFEST = Fault(lambda m, path: m == "PUT" and "/manifests/" in path)
ANSWERS: list[tuple[str, list[dict[str, Any]], list[Fault]]] = [
    ("no store's own answer", [{"status": 404}], [PART, MANIFEST]),
    (
        "busy",
        [
            {"status": 429, "code": "SlowDown"}, {"status": 500, "code": "InternalError"},
            {"status": 503, "code": "ServiceUnavailable"},
        ],
        [PART, WHOLE, MANIFEST],
    ),
    (
        "slow, cut or lost",
        [{"delay_seconds": 0.5}, {"cut_at": 0}, {"loses_answer": True}],
        [PART, WHOLE, MANIFEST],
    ),
    ("the upload is gone", [{"status": 404, "code": "NoSuchUpload"}], [PART]),
]  # fmt: skip


def test_all_drains_by_itself_after_answers_that_are_wrong_late_or_lost(
    seaweed: str, proxy: FaultyProxy
) -> None:
    """Each of them meets parts, the making of objects, and manifests: each message is uploaded once."""
    settings = {
        "wal_bytes_max": 256 * MIB, "history_part_bytes": 5 * MIB, "history_object_bytes": 16 * MIB,
    }  # fmt: skip
    with (
        running(s3_url(proxy.url, "answers"), **settings) as (_, client),
        opened(s3_url(seaweed, "answers")) as store,
    ):
        end = 0
        for name, answers, requests in ANSWERS:
            proxy.faults[:] = [
                Fault(each.wanted, 1, **answer) for each in requests for answer in answers
            ]
            deadline = time.monotonic() + WAIT_SECONDS
            while not all(fault.met for fault in proxy.faults):  # it may all be in one part
                assert time.monotonic() < deadline, f"not all was met: {name}"
                publish(client, end, 8000)
                end += 8000
                wait_until(f"the upload: {name}", all_uploaded(store, end))
        verify_store(store)
        read_all(client, 0, end)


# ---------------------------------------------------------------- what is in the store


def flip(data: bytearray) -> None:
    data[len(data) // 2] ^= 1


def cut(data: bytearray) -> None:
    del data[len(data) // 2 :]


@pytest.mark.parametrize("change", [flip, cut, None], ids=["flipped", "truncated", "missing"])
def test_a_damaged_object_is_data_loss_and_no_wrong_byte(
    store: LocalStore, change: Callable[[bytearray], None] | None
) -> None:
    """The reader gets all before it, then an error that names it; once it is put back, all is read."""
    with running(store.url) as (broker, client):
        publish(client, 0, COUNT)
        wait_until("the upload", all_uploaded(store, COUNT))
        wait_for_trim(broker, client, OBJECT_BYTES)
        sections = manifests(store)[0].manifest.sections
        damaged = sections[0]
        whole = store.read(damaged.key)
        if change is None:
            store.delete([damaged.key])
        else:
            change_object(store, damaged.key, change)
        end, error = read_until_error(client, COUNT)
        assert isinstance(error, DataLoss)
        assert damaged.key in str(error)
        found = re.search(r"offsets (\d+) to (\d+)", str(error))
        assert found, error
        first, behind = map(int, found.groups())
        assert damaged.base_offset <= first < behind <= damaged.end_offset
        assert damaged.base_offset <= end <= first
        if change is flip:  # all but the block is read
            assert end == first > damaged.base_offset
            assert behind < damaged.end_offset
        goes_on(client)
        publish(client, COUNT, 100)  # the topic itself goes on, too
        read_all(client, sections[1].base_offset, COUNT, position=sections[1].base_offset)
        store.delete([damaged.key])
        store.create(damaged.key, whole)
        wait_until("an end of the error", lambda: begins_to_read(client))  # known for a second more
        read_all(client, 0, COUNT + 100)


def test_an_archived_object_is_named_to_its_reader(seaweed: str, proxy: FaultyProxy) -> None:
    """It is not lost: once it is restored, all is read."""
    with (
        running(s3_url(proxy.url, "archive")) as (broker, client),
        opened(s3_url(seaweed, "archive")) as store,
    ):
        publish(client, 0, COUNT)
        wait_until("the upload", all_uploaded(store, COUNT))
        wait_for_trim(broker, client, OBJECT_BYTES)
        key = manifests(store)[0].manifest.sections[0].key
        archive = Fault(
            lambda method, path: method == "GET" and key in path, 1 << 30, status=403,
            code="InvalidObjectState",
        )  # fmt: skip
        proxy.faults.append(archive)
        end, error = read_until_error(client, COUNT)
        assert end == 0
        assert isinstance(error, FailedPrecondition)
        assert re.search(f"{key}.*archive.*restore it", str(error))
        goes_on(client)
        publish(client, COUNT, 100)  # the topic itself goes on, too
        archive.left = 0
        wait_until("an end of the error", lambda: begins_to_read(client))
        read_all(client, 0, COUNT + 100)


def test_the_store_of_another_broker_is_left_alone(store: LocalStore) -> None:
    """It is named in the log; publishing goes on until too much waits, and then says why."""
    with running(store.url) as (_, client):
        publish(client, 0, 3000)
        wait_until("the upload", all_uploaded(store, 3000))
    before = sorted(store.list())
    with running(store.url) as (broker, client):
        wait_until("the reason", lambda: "history of another broker" in broker.log)
        goes_on(client)
        sent = publish_until_refused(client)
        assert sent >= 4000
        goes_on(client)
        assert sorted(store.list()) == before
        read_all(client, 0, sent)


def publish_until_refused(client: Any) -> int:
    """Publish until too much waits for the store, which is told with its cause; how many were taken."""
    sent, deadline = 0, time.monotonic() + WAIT_SECONDS
    while True:
        assert time.monotonic() < deadline, "all was taken"
        producer = client.producer(TOPIC, timeout=2)
        refusal = ""
        try:
            producer.send_many(payloads(sent, 500))
            producer.flush(timeout=WAIT_SECONDS)
            sent += 500
        except ResourceExhausted as error:
            refusal = str(error)
        finally:
            with contextlib.suppress(ResourceExhausted):
                producer.close()
        if refusal:
            assert re.search("wait for the object store.*history of another broker", refusal)
            return sent


def test_another_store_than_before(store: LocalStore, tmp_path: Path) -> None:
    """An empty one: what is missing is named, reads end with an error, and nothing is skipped."""
    settings = {**SMALL, "data_dir": tmp_path / "data"}
    with Broker(store=store.url, **settings) as broker, broker.client() as client:
        keep_for_ever(client)
        publish(client, 0, COUNT)
        wait_until("the upload", all_uploaded(store, COUNT))
        wait_for_trim(broker, client, OBJECT_BYTES)
    other = LocalStore(tmp_path / "other", SystemClock())
    with Broker(store=other.url, **settings) as broker, broker.client() as client:
        end, error = read_until_error(client, COUNT)
        assert end == 0
        assert isinstance(error, DataLoss | FailedPrecondition)
        assert re.search(f"{other.url}.*manifests/.* is missing", str(error))
        publish(client, COUNT, 500)
        wait_until(
            "the reason", lambda: re.search("history:.*is missing, and was there", broker.log)
        )
        assert list(other.list("objects/")) == []
    with Broker(store=store.url, **settings) as broker, broker.client() as client:
        read_all(client, 0, COUNT + 500)
        wait_until("the upload", all_uploaded(store, COUNT + 500))
        verify_store(store)


# ---------------------------------------------------------------- this host


def test_an_uploader_that_hangs_is_replaced(store: LocalStore) -> None:
    with running(store.url, heartbeat_timeout_ms=3000) as (broker, client):
        publish(client, 0, 1000)
        wait_until("the upload", all_uploaded(store, 1000))
        pid = uploader_pid(client)
        os.kill(pid, signal.SIGSTOP)
        publish(client, 1000, 1000)
        wait_until("its end", lambda: f"(pid {pid}) has not shown life" in broker.log)
        wait_until("the upload", all_uploaded(store, 2000))
        assert uploader_pid(client) != pid
        verify_store(store)
        read_all(client, 0, 2000)


def test_readers_wait_while_there_is_no_room_for_what_they_read(
    seaweed: str, proxy: FaultyProxy
) -> None:
    """The folder for it cannot be made; the log of the broker says so, and once it can be, they go on."""
    with (
        running(s3_url(proxy.url, "room")) as (broker, client),
        opened(s3_url(seaweed, "room")) as store,
    ):
        publish(client, 0, COUNT)
        wait_until("the upload", all_uploaded(store, COUNT))
        wait_for_trim(broker, client, OBJECT_BYTES)
        folder = broker.data_dir / CACHE_NAME
        folder.write_text("in the way")
        with client.reader(TOPIC, start="earliest") as reader:
            wait_until("the reason", lambda: re.search(f"{folder}.*some room", broker.log))
            assert len(reader.receive_batch(10, timeout=0)) == 0
            goes_on(client)
            folder.unlink()
            batch = reader.receive_batch(10, timeout=WAIT_SECONDS)
            assert [bytes(each) for each in batch.payloads()] == payloads(0, len(batch))
        read_all(client, 0, COUNT)


def test_a_damaged_log_holds_up_its_own_topic_only(tmp_path: Path) -> None:
    """Its messages are not uploaded, the log of the broker says where, and those of another topic are."""
    folder, second = tmp_path / "later" / "store", "/default/second"
    with running(f"file://{folder}") as (broker, client):
        keep_for_ever(client, second)
        publish(client, 0, 500)
        publish(client, 0, 500, second)
        (message,) = payloads(7, 1)
        segments = sorted(broker.data_dir.rglob("*.seg"))
        damaged = next(path for path in segments if message in path.read_bytes())
        with damaged.open("r+b") as file:
            at = file.read().index(message)  # the first topic was published first
            file.seek(at + 20)
            file.write(b"?")
        folder.parent.mkdir()
        with opened(f"file://{folder}") as store:
            wait_until("the upload", all_uploaded(store, 500))
            assert {log.manifest.topic for log in manifests(store)} == {second}
            verify_store(store)
        assert re.search(f"history: {damaged}.*the crc of the frame's body is wrong", broker.log)
        publish(client, 500, 100)
