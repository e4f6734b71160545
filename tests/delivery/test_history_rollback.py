"""An older copy of the data directory is put back while the store has gone on: told, and never a wrong byte."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.errors import FailedPrecondition
from danube_fast.history.epochs import EPOCHS_PREFIX
from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import (
    NUMBER,
    SMALL,
    TOPIC,
    WAIT_SECONDS,
    keep_for_ever,
    manifests,
    nothing_waits,
    publish,
    read_all,
    uploaded,
    uploader_pid,
    verify,
)
from tests.workers.broker import wait_until

pytestmark = pytest.mark.timeout(300)
OTHER = "/default/other"
NEW = 100_000
"""Number of the first message that is published behind the copy."""
SETTINGS: dict[str, Any] = {**SMALL, "workers": 1, "history_delete_seconds": 2}


@contextlib.contextmanager
def running(folder: Path, **more: Any) -> Iterator[tuple[Broker, Any]]:
    """A broker with data and store in a folder, and a client."""
    store, settings = f"file://{folder / 'store'}", {**SETTINGS, **more}
    with (
        Broker(store=store, data_dir=folder / "data", **settings) as broker,
        broker.client() as client,
    ):
        yield broker, client


def put_back(folder: Path) -> None:
    """Give the broker the data of the copy."""
    shutil.rmtree(folder / "data")
    shutil.copytree(folder / "copy", folder / "data")


def put_back_an_older_copy(folder: Path, lives: int) -> None:
    """3000 messages are in the copy, and 3000 behind it in the store; it was started `lives` times for them."""
    store = folder / "store"
    with running(folder) as (_, client):
        keep_for_ever(client)
        publish(client, 0, 3000)
        wait_until("the upload", uploaded(store, 3000))
        wait_until("the frontier", lambda: nothing_waits(client))
    shutil.copytree(folder / "data", folder / "copy")
    for life in range(lives):
        count = 3000 // lives
        with running(folder) as (_, client):
            publish(client, 3000 + life * count, count)
            wait_until("the upload", uploaded(store, 3000 + (life + 1) * count))
            wait_until("the frontier", lambda client=client: nothing_waits(client))
    put_back(folder)


def check_reads(client: Any, new: int, lives: int) -> None:
    """What the copy has, then what was published behind it, each once and in order. After two lives even the uploader
    is older than the one that the store knows: it reads no history then, and says why."""
    expected = [*range(3000), *range(NEW, NEW + new)]
    got: list[int] = []
    refusal = ""
    try:
        with client.reader(TOPIC, start="earliest") as reader:
            while len(got) < len(expected):
                batch = reader.receive_batch(1000, timeout=WAIT_SECONDS)
                assert len(batch), f"nothing came behind {len(got)} messages"
                got += [NUMBER.unpack_from(payload)[0] for payload in batch.payloads()]
    except FailedPrecondition as error:
        refusal = str(error)
    if lives == 2 and refusal:
        assert re.search(f"{TOPIC}.*older copy", refusal)
        assert got == expected[: len(got)]
    else:
        assert got == expected, refusal


def is_told(client: Any, text: str) -> bool:
    return bool(re.search(text, client.admin.cluster_status()["history"]["fault"]))


@pytest.mark.parametrize("lives", [1, 2])
def test_an_older_log_is_told_and_not_uploaded(tmp_path: Path, lives: int) -> None:
    """While it is shorter than its history, and when it has grown beyond; other topics are uploaded."""
    store = tmp_path / "store"
    put_back_an_older_copy(tmp_path, lives)
    before = {number: log.manifest.number for number, log in manifests(store).items()}
    with running(tmp_path) as (broker, client):
        publish(client, NEW, 1000)
        wait_until("the reason", lambda: is_told(client, f"{TOPIC}.*older copy.*put back"))
        check_reads(client, 1000, lives)
        keep_for_ever(client, OTHER)
        publish(client, 0, 1000, OTHER)
        wait_until("the upload of others", uploaded(store, 7000))
        publish(client, NEW + 1000, 5000)
        check_reads(client, 6000, lives)
        os.kill(uploader_pid(client), signal.SIGKILL)  # the next one looks at it anew
        wait_until("the next uploader", lambda: uploader_pid(client))
        publish(client, 1000, 1000, OTHER)
        wait_until("the upload of others", uploaded(store, 8000))
        wait_until("the reason", lambda: is_told(client, f"{TOPIC}.*older copy.*put back"))
        check_reads(client, 6000, lives)
        read_all(client, 0, 2000, OTHER)
        assert "a task failed" not in broker.log
    after = {number: log.manifest.number for number, log in manifests(store).items()}
    assert after.items() >= before.items()
    assert verify(store) == 8000


def test_an_older_log_is_told_when_all_of_its_history_has_expired(tmp_path: Path) -> None:
    """The manifest names nothing then, and ends behind the copy; the log has grown beyond it."""
    store = tmp_path / "store"
    with running(tmp_path) as (_, client):
        keep_for_ever(client)
        publish(client, 0, 3000)
        wait_until("the upload", uploaded(store, 3000))
        wait_until("the frontier", lambda: nothing_waits(client))
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    with running(tmp_path) as (_, client):
        publish(client, 3000, 3000)
        wait_until("the upload", uploaded(store, 6000))
        policy = {"retention_policy": "until_expired", "retention_seconds": 1}
        client.admin.set_topic_policy(TOPIC, policy)
        wait_until(
            "retention",
            lambda: not any(log.manifest.sections for log in manifests(store).values()),
        )
    put_back(tmp_path)
    with running(tmp_path) as (_, client):
        publish(client, NEW, 5000)
        wait_until("the reason", lambda: is_told(client, f"{TOPIC}.*older copy"))
        os.kill(uploader_pid(client), signal.SIGKILL)  # the next one looks at all of the log
        wait_until("the next uploader", lambda: uploader_pid(client))
        wait_until("the reason", lambda: is_told(client, f"{TOPIC}.*has expired.*older copy"))
        read_all(client, NEW, NEW + 5000, position=3000)
        keep_for_ever(client, OTHER)
        publish(client, 0, 1000, OTHER)
        wait_until("the upload of others", uploaded(store, 1000))


def test_an_object_that_is_lost_before_its_owner_knows_of_it_is_made_again(tmp_path: Path) -> None:
    """The log has its messages still, so it can be compared without the object, and uploaded again."""
    store = tmp_path / "store"
    with running(tmp_path) as (_, client):
        keep_for_ever(client)
        publish(client, 0, 3000)
        wait_until("the upload", uploaded(store, 3000))
        wait_until("the frontier", lambda: nothing_waits(client))
    with running(tmp_path, history_flush_seconds=3600) as (_, client):
        publish(client, 3000, 1000)
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    with running(tmp_path) as (_, client):
        wait_until("the upload", uploaded(store, 4000))
    put_back(tmp_path)
    (log,) = manifests(store).values()
    lost = log.manifest.sections[-1].key
    (store / lost).unlink()
    with running(tmp_path) as (broker, client):
        publish(client, 4000, 500)
        wait_until("the upload", uploaded(store, 4500))
        assert re.search(f"{lost}.*uploaded again", broker.log)
        read_all(client, 0, 4500)
    assert verify(store) == 4500


def test_a_store_that_is_away_uses_up_no_epochs(tmp_path: Path) -> None:
    """An older copy would find one of them free, and not know that there were later ones."""
    store = tmp_path / "later" / "store"
    settings = {**SETTINGS, "store": f"file://{store}"}
    with Broker(**settings) as broker, broker.client() as client:
        keep_for_ever(client)
        publish(client, 0, 1000)
        wait_until(
            "some tries",
            lambda: client.admin.cluster_status()["counters"]["history_round_retries"] >= 3,
        )
        store.parent.mkdir()
        wait_until("the upload", uploaded(store, 1000))
    assert [path.name for path in (store / EPOCHS_PREFIX).iterdir()] == ["00000001"]


def put_back_a_copy_without_a_topic(folder: Path) -> None:
    """1000 messages are in the copy, and as many in the store of a topic that was made behind it."""
    store = folder / "store"
    with running(folder) as (_, client):
        keep_for_ever(client)
        publish(client, 0, 1000)
        wait_until("the upload", uploaded(store, 1000))
    shutil.copytree(folder / "data", folder / "copy")
    with running(folder) as (_, client):
        keep_for_ever(client, "/default/lost")
        publish(client, 0, 1000, "/default/lost")
        wait_until("the upload", uploaded(store, 2000))
    put_back(folder)


def test_a_number_that_was_given_twice_is_told(tmp_path: Path) -> None:
    """A topic of the time behind the copy is in the store, and another one gets the number of its partition."""
    store = tmp_path / "store"
    put_back_a_copy_without_a_topic(tmp_path)
    with running(tmp_path) as (_, client):
        keep_for_ever(client, OTHER)
        publish(client, NEW, 2000, OTHER)
        wait_until("the reason", lambda: is_told(client, f"/default/lost.*{OTHER}.*older copy"))
        read_all(client, NEW, NEW + 2000, OTHER)
        assert {log.manifest.topic for log in manifests(store).values()} == {TOPIC, "/default/lost"}


def test_an_older_copy_deletes_nothing_of_topics_that_it_does_not_know(tmp_path: Path) -> None:
    """However often its uploader begins anew, with epochs that the store has not seen."""
    store = tmp_path / "store"
    put_back_a_copy_without_a_topic(tmp_path)
    told = "nothing is deleted just now.*newer data of this broker"
    with running(tmp_path) as (broker, client):
        for _ in range(3):
            seen = len(re.findall(told, broker.log))
            wait_until("sweeps", lambda seen=seen: len(re.findall(told, broker.log)) >= seen + 6)
            os.kill(uploader_pid(client), signal.SIGKILL)
            wait_until("the next uploader", lambda: uploader_pid(client))
        seen = len(re.findall(told, broker.log))
        wait_until("sweeps", lambda: len(re.findall(told, broker.log)) >= seen + 6)
        read_all(client, 0, 1000)
    assert len(manifests(store)) == 2
    assert verify(store) == 2000


def test_only_deletions_on_record_reach_the_store(tmp_path: Path) -> None:
    """The epoch of the copy is new to the store, as that of a copy of a running broker is."""
    store = tmp_path / "store"
    put_back_a_copy_without_a_topic(tmp_path)
    shutil.rmtree(store / EPOCHS_PREFIX)
    orphan = store / "objects" / "00000000" / "000000000001"
    orphan.parent.mkdir()
    orphan.write_bytes(b"left behind")
    with running(tmp_path) as (broker, client):
        wait_until("a sweep", lambda: not orphan.exists())
        assert "nothing is deleted just now" not in broker.log
        assert {log.manifest.topic for log in manifests(store).values()} == {TOPIC, "/default/lost"}
        assert verify(store) == 2000
        client.admin.delete_topic(TOPIC)
        wait_until("the deletion", lambda: len(manifests(store)) == 1)
    assert verify(store) == 1000
