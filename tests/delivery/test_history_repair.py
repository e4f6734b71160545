"""A real broker on a store whose manifests were damaged: it names the repair, and goes on from what that has made."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from danube_fast.clock import SystemClock
from danube_fast.errors import DataLoss
from danube_fast.history.audit import LOST, verify_history
from danube_fast.history.layout import object_key
from danube_fast.history.manifest import MANIFESTS_PREFIX, Section
from danube_fast.history.stores.local import LocalStore
from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import (
    TOPIC,
    keep_for_ever,
    publish,
    read_all,
    read_until_error,
    wait_for_trim,
)
from tests.delivery.s3_rig import KIB, MIB, QUICK, manifests, uploaded_count, verify_store
from tests.history.rig import change_object, make_frame, put_object
from tests.workers.broker import wait_until

pytestmark = pytest.mark.timeout(300)
COUNT = 6000
PART = 2000
SMALL: dict[str, Any] = {
    **QUICK, "segment_bytes": MIB, "segment_start_bytes": 256 * KIB, "wal_bytes_max": 24 * MIB, "tail_bytes_max": 64 * KIB,
    "history_object_bytes": MIB, "history_part_bytes": MIB,
}  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store", SystemClock())


def history(*words: str) -> tuple[int, str]:
    """Run `danube-fast history`: its exit code, and what it says."""
    done = subprocess.run(
        [sys.executable, "-m", "danube_fast.cli.main", "history", *words], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def records(store: LocalStore) -> list[str]:
    """Keys of the records of the only manifest."""
    return [info.key for info in store.list(MANIFESTS_PREFIX) if info.size]


def fill(store: LocalStore, settings: dict[str, Any]) -> list[Section]:
    """Upload messages until the log has lost the first of them; what the manifest names."""
    with Broker(store=store.url, **settings) as broker, broker.client() as client:
        keep_for_ever(client)
        for start in range(0, COUNT, PART):
            publish(client, start, PART)
            wait_until("the upload", lambda end=start + PART: uploaded_count(store) == end)
        wait_for_trim(broker, client, COUNT * 1000)
    return manifests(store)[0].manifest.sections


def test_a_broker_goes_on_after_a_repair(store: LocalStore, tmp_path: Path) -> None:
    settings = {**SMALL, "data_dir": tmp_path / "data"}
    sections = fill(store, settings)
    change_object(store, records(store)[-2], lambda data: data.__setitem__(40, data[40] ^ 1))
    with Broker(store=store.url, **settings) as broker, broker.client() as client:
        end, error = read_until_error(client, COUNT)
        assert end == 0
        assert isinstance(error, DataLoss)
        assert f"danube-fast history repair --store {store.url}" in str(error)
        publish(client, COUNT, 1)
        wait_until("the reason", lambda: re.search("history:.*history repair", broker.log))
    code, said = history("repair", "--store", store.url)
    assert code == 1 and "stop the broker, then add --yes" in said
    assert history("repair", "--store", store.url, "--yes")[0] == 0
    code, said = history("repair", "--store", store.url)
    assert code == 0 and said.endswith(": nothing to repair\n")
    assert history("verify", "--store", store.url)[0] == 0
    assert manifests(store)[0].manifest.sections == sections
    with Broker(store=store.url, **settings) as broker, broker.client() as client:
        read_all(client, 0, COUNT)
        go_on_from(store, client)
        read_all(client, 0, COUNT)
    verify_store(store)


def go_on_from(store: LocalStore, client: Any) -> None:
    """Publish more, and expect it in the store."""
    before = uploaded_count(store)
    publish(client, COUNT, 500)
    wait_until("the upload", lambda: uploaded_count(store) >= before + 500)


def test_what_the_frontier_had_and_no_object_has_is_told(store: LocalStore, tmp_path: Path) -> None:
    """The newest record is lost, and its object: only the owner of the partition knows that there was one."""
    settings = {**SMALL, "data_dir": tmp_path / "data"}
    last = fill(store, settings)[-1]
    newest = records(store)[-1]
    partition_id = str(int(newest.split("/")[1]))
    store.delete([newest, last.key])
    with Broker(store=store.url, **settings) as broker, broker.client() as client:
        end, error = read_until_error(client, COUNT)
        assert end == 0
        assert f"history repair --store {store.url} --adopt {partition_id}" in str(error)
    words = ["repair", "--store", store.url, "--adopt", partition_id]
    assert history(*words, "--yes")[0] == 0
    with Broker(store=store.url, **settings) as broker, broker.client() as client:
        wait_until("the loss", lambda: is_told(client, last))
        go_on_from(store, client)
    (damage,) = verify_history(store).damages
    assert (damage.reason, damage.end_offset) == (LOST, COUNT)
    assert damage.base_offset == last.base_offset


def test_objects_of_a_record_that_is_missing_are_not_swept(
    store: LocalStore, tmp_path: Path
) -> None:
    """A listing shows a manifest that looks whole without it; its owner knows better."""
    settings = {**SMALL, "data_dir": tmp_path / "data"}
    sections = fill(store, settings)
    newest = records(store)[-1]
    store.delete([newest])
    with Broker(store=store.url, **settings, history_delete_seconds=1) as broker:
        wait_until(
            "a sweep", lambda: "nothing is deleted just now" in broker.log and newest in broker.log
        )
    partition_id = str(int(newest.split("/")[1]))
    assert history("repair", "--store", store.url, "--adopt", partition_id, "--yes")[0] == 0
    assert manifests(store)[0].manifest.sections == sections
    with Broker(store=store.url, **settings) as broker, broker.client() as client:
        read_all(client, 0, COUNT)


def test_objects_that_a_repair_tells_of_are_not_swept(store: LocalStore, tmp_path: Path) -> None:
    """They are held, until the operator has decided."""
    settings = {**SMALL, "data_dir": tmp_path / "data"}
    last = fill(store, settings)[-1]
    partition_id = int(records(store)[-1].split("/")[1])
    frames = [make_frame(partition_id, COUNT + offset, [b"x"]) for offset in range(3)]
    identity = manifests(store)[0].identity
    told = put_object(store, {partition_id: frames}, epoch=0, identity=identity)[0].key
    swept = object_key(0, 1)
    assert history("repair", "--store", store.url)[0] == 0
    code, said = history("repair", "--store", store.url, "--yes")
    hold = re.search(r"danube-fast (history release holds/[0-9a-f-]+)", said)
    assert code == 0 and f"unnamed {told}: offsets {COUNT} to {COUNT + 3}" in said and hold
    store.create(swept, b"left behind")
    with Broker(store=store.url, **settings, history_delete_seconds=1) as broker:
        wait_until("the deletion", lambda: store.head(swept) is None)
        assert store.head(told) is not None and store.head(last.key) is not None
        assert history(*hold[1].split()[1:], "--url", broker.url)[0] == 0
        wait_until("the deletion", lambda: store.head(told) is None)


def test_a_topic_that_no_record_tells_is_asked_for(store: LocalStore, tmp_path: Path) -> None:
    """All records are damaged: the broker, which knows the topic, names the command."""
    settings = {**SMALL, "data_dir": tmp_path / "data"}
    sections = fill(store, settings)
    keys = records(store)
    for key in keys:
        change_object(store, key, lambda data: data.__setitem__(40, data[40] ^ 1))
    code, said = history("repair", "--store", store.url, "--yes")
    partition_id = int(keys[0].split("/")[1])
    assert (code, f"add --adopt {partition_id}=TOPIC" in said) == (0, True)
    said = f"history repair --store {store.url} --adopt {partition_id}={TOPIC} --yes"
    with Broker(store=store.url, **settings) as broker, broker.client() as client:
        publish(client, COUNT, 1)
        wait_until("the reason", lambda: said in broker.log)
    assert history(*said.split()[1:])[0] == 0
    assert manifests(store)[0].manifest.sections == sections
    with Broker(store=store.url, **settings) as broker, broker.client() as client:
        go_on_from(store, client)
        read_all(client, 0, COUNT)


def is_told(client: Any, last: Section) -> bool:
    """Whether a reader gets all up to the last section, and is told that this is lost."""
    end, error = read_until_error(client, COUNT)
    assert isinstance(error, DataLoss), error
    assert (end, f"offsets {last.base_offset} to {COUNT}") == (
        last.base_offset,
        f"offsets {end} to {COUNT}",
    )
    return "are lost" in str(error)
