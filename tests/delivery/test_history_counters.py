"""What a broker counts of its history: exact numbers, on a folder and on S3 behind a proxy that fails."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any

import pytest

from danube_fast.errors import Unavailable
from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import (
    LOG_BYTES_MAX,
    SMALL,
    TOPIC,
    keep_for_ever,
    nothing_waits,
    publish,
    read_all,
    verify,
)
from tests.delivery.s3_rig import KIB, MIB, PART_BYTES, QUICK, s3_url
from tests.history.faulty_proxy import FaultyProxy
from tests.workers.broker import wait_until

pytestmark = pytest.mark.timeout(300)
NAMES = (
    "objects", "bytes", "puts", "parts", "request_retries", "round_retries", "cache_hits", "cache_misses", "deleted",
)  # fmt: skip
CALM: dict[str, Any] = {
    "history_flush_seconds": 3600, "history_delete_seconds": 24 * 3600, "history_object_bytes": 256 * MIB,
}  # fmt: skip
"""Nothing is uploaded or deleted unless it is asked for."""


def counted(client: Any) -> dict[str, int]:
    """Counters of history."""
    counters = client.admin.cluster_status()["counters"]
    return {name: int(counters[f"history_{name}"]) for name in NAMES}


def since(client: Any, before: dict[str, int]) -> dict[str, int]:
    """What was counted since then, but for the bytes: those that are not 0."""
    now = counted(client)
    return {
        name: now[name] - before[name]
        for name in NAMES
        if name != "bytes" and now[name] != before[name]
    }


def begun(client: Any) -> dict[str, int]:
    """Wait until the uploader has tried the store out; the counters."""
    wait_until("the store's trial", lambda: counted(client)["puts"] > 0 and is_ready(client))
    return counted(client)


def is_ready(client: Any) -> bool:
    """Whether the uploader has a store: a flush of nothing says so."""
    try:
        client.admin.flush_history(TOPIC)
    except Unavailable:
        return False
    return True


def test_each_request_that_writes_is_counted(store: Path) -> None:
    """An object in three parts, a small one, their manifests, a hold and its renewal."""
    settings = {**CALM, "history_part_bytes": MIB}
    with (
        Broker(workers=1, store=f"file://{store}", **settings) as broker,
        broker.client() as client,
    ):
        keep_for_ever(client)
        before = begun(client)
        publish(client, 0, 2500)
        client.admin.flush_history(TOPIC)
        # begin, three parts, complete, a record of the manifest
        assert since(client, before) == {"objects": 1, "puts": 6, "parts": 3}
        publish(client, 2500, 100)
        hold = client.admin.flush_history(TOPIC, hold_seconds=60)["hold"]
        assert since(client, before) == {"objects": 2, "puts": 9, "parts": 3}
        hold = client.admin.renew_history_hold(hold, hold_seconds=60)["hold"]
        client.admin.release_history_hold(hold)
        client.admin.flush_history(TOPIC)
        assert since(client, before) == {"objects": 2, "puts": 10, "parts": 3}
        assert verify(store) == 2600
        puts = counted(client)["puts"]
        with urllib.request.urlopen(f"{broker.admin_url}/metrics", timeout=60) as page:
            lines = page.read().decode().splitlines()
        assert f'danube_fast_history_puts_total{{process="uploader"}} {puts}.0' in lines
        assert (
            "# HELP danube_fast_history_puts_total requests that write to the object store" in lines
        )


def test_a_worker_that_starts_again_finds_what_was_fetched(store: Path) -> None:
    """While it lives it does not ask again: it keeps the files open."""
    settings = {**SMALL, "tail_bytes_max": 64 * KIB}
    with (
        Broker(workers=1, store=f"file://{store}", **settings) as broker,
        broker.client() as client,
    ):
        keep_for_ever(client)
        publish(client, 0, 2 * LOG_BYTES_MAX // 1000)  # half of it is in the store alone
        wait_until("the upload", lambda: nothing_waits(client))
        assert counted(client)["cache_misses"] == 0
        count = LOG_BYTES_MAX // 2 // 1000
        read_all(client, 0, count)
        first = counted(client)
        assert first["cache_misses"] >= 1  # the others came ahead
        broker.kill_worker()
        read_all(client, 0, count)
        second = counted(client)
        assert second["cache_hits"] > first["cache_hits"]
        assert second["cache_misses"] <= first["cache_misses"] + 1  # one piece ahead


# ---------------------------------------------------------------- S3


def writes_seen(proxy: FaultyProxy) -> int:
    """Requests of the proxy that write: no deletions."""
    return sum(method in ("PUT", "POST") and "?delete" not in path for method, path in proxy.seen)


def test_what_is_sent_again_is_counted(proxy: FaultyProxy) -> None:
    """A busy store is asked again by its client; when that gives up, by a new round."""
    settings = {**QUICK, **CALM}
    url = s3_url(proxy.url, "counted")
    with Broker(workers=1, store=url, **settings) as broker, broker.client() as client:
        keep_for_ever(client)
        before = begun(client)
        assert counted(client)["puts"] == writes_seen(proxy)
        proxy.fail("PUT", "partNumber=1", 2, status=503, code="SlowDown")
        proxy.fail("POST", "uploadId=", 1, status=500, code="InternalError")
        publish(client, 0, 2 * PART_BYTES // 1000 + 1000)
        client.admin.flush_history(TOPIC)
        assert since(client, before) == {
            "objects": 1, "puts": 6, "parts": 3, "request_retries": 3,
        }  # fmt: skip
        now = counted(client)
        assert now["puts"] + now["request_retries"] == writes_seen(proxy)

        # a small object: four tries, then another round
        proxy.fail("PUT", "/objects/", 4, status=503, code="SlowDown")
        publish(client, 0, 100)
        client.admin.flush_history(TOPIC)
        assert since(client, now) == {
            "objects": 1, "puts": 3, "request_retries": 3, "round_retries": 1,
        }  # fmt: skip
        now = counted(client)
        assert now["puts"] + now["request_retries"] == writes_seen(proxy)
