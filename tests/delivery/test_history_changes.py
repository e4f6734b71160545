"""Topics that change while an object with their messages is half sent, on real processes and real S3."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from danube_fast.history.stores.store import ObjectStore
from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import (
    NUMBER,
    TOPIC,
    WAIT_SECONDS,
    log_bytes,
    payloads,
    publish,
    read_all,
    uploader_pid,
    worker_of,
)
from tests.delivery.s3_rig import (
    MIB,
    PART_BYTES,
    QUICK,
    checkpoint_of,
    manifests,
    opened,
    s3_url,
    uploaded_count,
    verify_store,
)
from tests.history.faulty_proxy import Fault, FaultyProxy
from tests.workers.broker import is_running, wait_until

pytestmark = pytest.mark.timeout(300)
NUMBERS = itertools.count()
OTHER = "/default/other"
COUNT = 33_000
"""Messages of 1000 bytes: more than six parts."""
SLOW: dict[str, Any] = {
    **QUICK, "wal_bytes_max": 512 * MIB, "history_object_bytes": 12 * PART_BYTES, "history_delete_seconds": 2,
}  # fmt: skip


class HalfSent:
    """A broker whose first object is in the middle of its upload, until `go_on`."""

    def __init__(
        self, broker: Broker, client: Any, store: ObjectStore, held: threading.Event
    ) -> None:
        self.broker, self.client, self.store = broker, client, store
        self._held = held

    def go_on(self) -> None:
        """Let the store take what it was sent."""
        self._held.set()

    def wait_for_upload(self, count: int) -> None:
        """Until the manifests name so many messages, and the store has no object and no part beside theirs."""
        wait_until("the upload", lambda: uploaded_count(self.store) == count)
        wait_until("the end of the checkpoint", lambda: checkpoint_of(self.broker) is None)
        assert list(self.store.uploads("objects/")) == []

        def is_clean() -> bool:
            named = {s.key for reader in manifests(self.store) for s in reader.manifest.sections}
            return {info.key for info in self.store.list("objects/")} == named

        wait_until("the deletion", is_clean)
        verify_store(self.store)
        assert "a task failed" not in self.broker.log


@contextlib.contextmanager
def half_sent(
    seaweed: str,
    proxy: FaultyProxy,
    topics: tuple[str, ...] = (TOPIC,),
    partitions: int | None = None,
    **settings: Any,
) -> Iterator[HalfSent]:
    """The store gives no answer before all is published: so one object has all topics."""
    prefix = f"half-sent-{next(NUMBERS)}"
    published, held = threading.Event(), threading.Event()
    proxy.faults.append(Fault(lambda method, path: True, held=published))
    fault = proxy.fail("PUT", "partNumber=2", held=held)
    with (
        Broker(store=s3_url(proxy.url, prefix), **{**SLOW, **settings}) as broker,
        broker.client() as client,
    ):
        for topic in topics:
            client.admin.create_topic(topic, partitions=partitions)
            client.admin.set_topic_policy(topic, {"retention_policy": "forever"})
            publish(client, 0, COUNT // len(topics), topic)
        published.set()
        try:
            wait_until("the second part", lambda: fault.met)
            wait_until("the checkpoint", lambda: checkpoint_of(broker) is not None)
            with opened(s3_url(seaweed, prefix)) as store:
                yield HalfSent(broker, client, store, held)
        finally:
            held.set()


def read_each_once(client: Any, topic: str, count: int) -> None:
    """Read all partitions, and expect each number once."""
    seen: list[int] = []
    with client.reader(topic, start="earliest") as reader:
        while len(seen) < count:
            batch = reader.receive_batch(1000, timeout=WAIT_SECONDS)
            assert len(batch), f"nothing came behind {len(seen)} messages"
            seen += [NUMBER.unpack_from(payload)[0] for payload in batch.payloads()]
    assert sorted(seen) == list(range(count))


@pytest.mark.parametrize("killed", [False, True])
def test_partitions_are_added(seaweed: str, proxy: FaultyProxy, killed: bool) -> None:
    """The object goes on with those that it has; the new ones come in others."""
    with half_sent(seaweed, proxy, partitions=2) as half:
        client = half.client
        client.admin.set_topic(TOPIC, partitions=4)
        if killed:
            os.kill(uploader_pid(client), signal.SIGKILL)
        with half.broker.client() as other, other.producer(TOPIC) as producer:
            for number, payload in enumerate(payloads(COUNT, 2000)):
                producer.send(payload, key=b"%d" % number)
        half.go_on()
        half.wait_for_upload(COUNT + 2000)
        assert len(manifests(half.store)) == 4
        read_each_once(client, TOPIC, COUNT + 2000)


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("gone", [TOPIC, OTHER])
def test_a_topic_is_deleted(seaweed: str, proxy: FaultyProxy, gone: str, killed: bool) -> None:
    """Its bytes leave the store soon, those of the topic that it shares the object with stay."""
    with half_sent(seaweed, proxy, (TOPIC, OTHER)) as half:
        client, left = half.client, OTHER if gone == TOPIC else TOPIC
        client.admin.delete_topic(gone)
        if killed:
            os.kill(uploader_pid(client), signal.SIGKILL)
        half.go_on()
        count = COUNT // 2

        def is_over() -> bool:
            found = {reader.manifest.topic for reader in manifests(half.store)}
            return found == {left} and uploaded_count(half.store) == count

        wait_until("the deletion", is_over)
        half.wait_for_upload(count)

        def is_rewritten() -> bool:
            return sum(info.size for info in half.store.list("objects/")) < 1.1 * count * 1000

        wait_until("the end of what was shared", is_rewritten)
        read_all(client, 0, count, left)


@pytest.mark.parametrize("killed", [False, True])
def test_a_topic_is_purged(seaweed: str, proxy: FaultyProxy, killed: bool) -> None:
    with half_sent(seaweed, proxy) as half:
        client = half.client
        client.admin.purge_topic(TOPIC)
        if killed:
            os.kill(uploader_pid(client), signal.SIGKILL)
        publish(client, COUNT, 1000)
        read_all(client, COUNT, COUNT + 1000)
        half.go_on()
        # what of it was sent before stays in the object, and is not read
        ends = lambda: [each.manifest.end_offset for each in manifests(half.store)]  # noqa: E731
        wait_until("the upload", lambda: COUNT + 1000 in ends())
        wait_until("the end of the checkpoint", lambda: checkpoint_of(half.broker) is None)
        read_all(client, COUNT, COUNT + 1000)
        verify_store(half.store)


def test_a_topic_moves(seaweed: str, proxy: FaultyProxy) -> None:
    """Its frames stand in another log from then on."""
    with half_sent(seaweed, proxy, workers=2) as half:
        client = half.client
        client.admin.move_topic(TOPIC, 1 - worker_of(client))
        publish(client, COUNT, 1000)
        half.go_on()
        half.wait_for_upload(COUNT + 1000)
        read_all(client, 0, COUNT + 1000)


def test_an_uploader_hangs(seaweed: str, proxy: FaultyProxy) -> None:
    """What it was about to upload stays in the log until another one has done so."""
    with half_sent(seaweed, proxy, heartbeat_timeout_ms=3000, segment_bytes=MIB) as half:
        client = half.client
        pid = uploader_pid(client)
        os.kill(pid, signal.SIGSTOP)
        half.go_on()
        client.admin.create_topic(OTHER)
        publish(client, 0, 6000, OTHER)
        assert is_running(pid)
        assert uploaded_count(half.store) == 0
        assert log_bytes(half.broker) > COUNT * 1000
        read_all(client, 0, COUNT)
        wait_until("its end", lambda: f"(pid {pid}) has not shown life" in half.broker.log)
        half.wait_for_upload(COUNT)
        read_all(client, 0, COUNT)
