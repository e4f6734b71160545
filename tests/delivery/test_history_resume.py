"""Uploads in parts of uploaders that are killed: they go on behind their checkpoint, on real processes and real S3."""

from __future__ import annotations

import collections
import os
import random
import re
import signal
from typing import Any

import pytest

from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import (
    TOPIC,
    keep_for_ever,
    publish,
    read_all,
    uploader_pid,
    worker_of,
)
from tests.delivery.s3_rig import (
    MIB,
    PART_BYTES,
    QUICK,
    PartId,
    checkpoint_of,
    opened,
    parts_seen,
    s3_url,
    uploaded_count,
    verify_store,
)
from tests.history.faulty_proxy import Fault, FaultyProxy
from tests.workers.broker import is_running, wait_until

pytestmark = pytest.mark.timeout(900)
KILLS = int(os.environ.get("DANUBE_HISTORY_KILLS", "0")) or 6
"""DANUBE_HISTORY_KILLS=50 is the long form."""
SEED = int(os.environ.get("DANUBE_HISTORY_SEED", "0")) or random.randrange(1, 1 << 32)
MESSAGES = 16_000
"""Published before each kill, 1000 bytes each: three parts."""
INSTANTS = [
    (("PUT", "partNumber"), 8),
    (("PUT", "partNumber"), 8),
    (("PUT", ""), 12),
    (("GET", ""), 8),
    (("POST", ""), 6),
]
"""Requests of an uploader before it is killed, and how many of them at most."""
SLOW: dict[str, Any] = {
    **QUICK, "wal_bytes_max": 512 * MIB, "history_object_bytes": 6 * PART_BYTES,
    "history_throttle_bytes_per_s": 15 * MIB,
}  # fmt: skip


class Tally:
    """Parts that were in a checkpoint must not be sent again."""

    def __init__(self, proxy: FaultyProxy) -> None:
        self._proxy = proxy
        self._kept: dict[PartId, int] = {}
        """How often a part had been sent when a checkpoint named it."""
        self._cut: set[str] = set()
        """Uploads that were cut short behind a checkpoint."""
        self.kinds: collections.Counter[str] = collections.Counter()

    def note(self, broker: Broker) -> None:
        """Take the checkpoint that a killed uploader has left."""
        checkpoint = checkpoint_of(broker)
        if checkpoint is None:
            self.kinds["none"] += 1
            return
        self.kinds["ended" if checkpoint.state is None else "in parts"] += 1
        seen = parts_seen(self._proxy)
        for part in checkpoint.parts:
            self._kept.setdefault(
                (checkpoint.upload_id, part.number), seen[checkpoint.upload_id, part.number]
            )
        if checkpoint.state is not None:
            self._cut.add(checkpoint.upload_id)

    def check(self) -> None:
        """Compare with what was sent since."""
        seen = parts_seen(self._proxy)
        for part, count in self._kept.items():
            assert seen[part] == count, f"part {part} was sent again behind its checkpoint"

    def completed(self) -> set[str]:
        """Uploads that went on after they were cut short, up to their end."""
        paths = [path for method, path in self._proxy.seen if method == "POST"]
        return {
            upload for upload in self._cut if any(f"uploadId={upload}" in path for path in paths)
        }


def living_uploader(client: Any) -> int:
    """Wait for an uploader; its pid. One that was killed is shown for a moment."""

    def found() -> int:
        pid = uploader_pid(client)
        return pid if pid and is_running(pid) else 0

    return int(wait_until("the uploader", found))


def kill_uploader(pid: int) -> None:
    """SIGKILL, and wait for its end."""
    os.kill(pid, signal.SIGKILL)
    wait_until("its end", lambda: not is_running(pid))


def test_parts_are_sent_once_however_often_the_uploader_is_killed(
    seaweed: str, proxy: FaultyProxy
) -> None:
    """It is killed at random requests. The manifests name each message once, the store has no other object, and what
    a checkpoint named was not sent again."""
    print(f"DANUBE_HISTORY_SEED={SEED}")
    chance = random.Random(SEED)
    tally = Tally(proxy)
    with (
        Broker(store=s3_url(proxy.url, "kills"), **SLOW) as broker,
        opened(s3_url(seaweed, "kills")) as store,
        broker.client() as client,
    ):
        keep_for_ever(client)
        for kill in range(KILLS):
            what, most = chance.choice(INSTANTS)
            wanted = proxy.count(*what) + chance.randrange(1, most)
            pid = living_uploader(client)
            publish(client, kill * MESSAGES, MESSAGES)
            wait_until(
                f"request {wanted} of {what}, or the end of the upload",
                lambda what=what, wanted=wanted, end=kill * MESSAGES + MESSAGES: (
                    proxy.count(*what) >= wanted or uploaded_count(store) == end
                ),
            )
            kill_uploader(pid)
            tally.note(broker)
            verify_store(store)
            tally.check()
        total = KILLS * MESSAGES
        wait_until("the upload", lambda: uploaded_count(store) >= total)
        wait_until("the end of the checkpoint", lambda: checkpoint_of(broker) is None)
        tally.check()
        named = verify_store(store)
        assert uploaded_count(store) == total
        assert {info.key for info in store.list("objects/")} == named
        read_all(client, 0, total)
    print(dict(tally.kinds))
    if KILLS >= 50:
        assert tally.kinds["in parts"]
        assert tally.completed()


@pytest.mark.parametrize(("part", "whole"), [(4, False), (4, True)])
def test_an_upload_goes_on_behind_the_parts_that_are_sent(
    seaweed: str, proxy: FaultyProxy, part: int, whole: bool
) -> None:
    """Its uploader, or the whole broker, is killed while the store takes for ever to take one of them."""
    fault = proxy.fail("PUT", f"partNumber={part}", delay_seconds=3)
    tally = Tally(proxy)
    prefix = f"one-{part}-{whole}"
    with (
        Broker(store=s3_url(proxy.url, prefix), **SLOW) as broker,
        opened(s3_url(seaweed, prefix)) as store,
        broker.client() as client,
    ):
        keep_for_ever(client)
        publish(client, 0, 33_000)
        wait_until("the slow part", lambda: fault.met)

        def is_kept() -> bool:
            found = checkpoint_of(broker)
            return found is not None and len(found.parts) == part - 1

        wait_until("the checkpoint", is_kept)
        if whole:
            broker.kill()
        else:
            kill_uploader(living_uploader(client))
        tally.note(broker)
        assert tally.kinds == {"in parts": 1}
        if whole:
            broker.start()
        wait_until("the upload", lambda: uploaded_count(store) == 33_000)
        wait_until("the end of the checkpoint", lambda: checkpoint_of(broker) is None)
        tally.check()
        assert tally.completed()
        assert {info.key for info in store.list("objects/")} == verify_store(store)
        read_all(client, 0, 33_000)


@pytest.mark.parametrize("method", ["POST", "PUT"], ids=["complete", "manifest"])
def test_a_kill_around_the_making_of_the_object(
    seaweed: str, proxy: FaultyProxy, method: str
) -> None:
    """The store has made the object, or is about to, when its uploader is killed: it is there once, and named once."""
    what = re.compile(r"/objects/.*uploadId=" if method == "POST" else "/manifests/")
    prefix = f"made-{method}"
    fault = Fault(lambda m, path: m == method and bool(what.search(path)), delay_seconds=2)
    proxy.faults.append(fault)
    with (
        Broker(store=s3_url(proxy.url, prefix), **SLOW) as broker,
        opened(s3_url(seaweed, prefix)) as store,
        broker.client() as client,
    ):
        keep_for_ever(client)
        publish(client, 0, 33_000)
        wait_until("the slow request", lambda: fault.met)
        kill_uploader(living_uploader(client))
        checkpoint = checkpoint_of(broker)
        assert checkpoint is not None
        assert checkpoint.state is None
        before = parts_seen(proxy)
        wait_until("the upload", lambda: uploaded_count(store) == 33_000)
        wait_until("the end of the checkpoint", lambda: checkpoint_of(broker) is None)
        after = parts_seen(proxy)
        assert {part: after[part] for part in before} == before
        assert {info.key for info in store.list("objects/")} == verify_store(store)
        read_all(client, 0, 33_000)


def test_an_upload_that_is_gone_begins_anew(seaweed: str, proxy: FaultyProxy) -> None:
    """The store has dropped the parts while no uploader was there."""
    fault = proxy.fail("PUT", "partNumber=4", delay_seconds=3)
    with (
        Broker(store=s3_url(proxy.url, "gone"), **SLOW) as broker,
        opened(s3_url(seaweed, "gone")) as store,
        broker.client() as client,
    ):
        keep_for_ever(client)
        publish(client, 0, 33_000)
        wait_until("the slow part", lambda: fault.met)
        wait_until("the checkpoint", lambda: checkpoint_of(broker))
        kill_uploader(living_uploader(client))
        checkpoint = checkpoint_of(broker)
        assert checkpoint is not None
        store.abort(checkpoint.upload)
        wait_until("the upload", lambda: uploaded_count(store) == 33_000)
        keys = verify_store(store)
        assert checkpoint.key not in keys
        assert {info.key for info in store.list("objects/")} == keys
        read_all(client, 0, 33_000)


def test_a_partition_that_has_moved_meanwhile_begins_anew_or_goes_on(
    seaweed: str, proxy: FaultyProxy
) -> None:
    """Its frames stand in another log then: whatever the new uploader finds first, each message is named once."""
    fault = proxy.fail("PUT", "partNumber=4", delay_seconds=3)
    with (
        Broker(store=s3_url(proxy.url, "moved"), **{**SLOW, "workers": 2}) as broker,
        opened(s3_url(seaweed, "moved")) as store,
        broker.client() as client,
    ):
        keep_for_ever(client)
        publish(client, 0, 33_000)
        wait_until("the slow part", lambda: fault.met)
        wait_until("the checkpoint", lambda: checkpoint_of(broker))
        pid = living_uploader(client)
        worker = worker_of(client)
        kill_uploader(pid)
        client.admin.move_topic(TOPIC, 1 - worker)
        wait_until("the upload", lambda: uploaded_count(store) == 33_000)
        wait_until("the end of the checkpoint", lambda: checkpoint_of(broker) is None)
        assert {info.key for info in store.list("objects/")} == verify_store(store)
        read_all(client, 0, 33_000)
        assert "a task failed" not in broker.log
