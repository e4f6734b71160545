"""History has given up messages, and their owner was not told: consumers are, and nothing else is passed over.

It comes to that by a kill between the record and its being told, and where the broker's data are put back as they were
before messages expired. Here the record is made by hand while the broker is stopped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.clock import SystemClock
from danube_fast.history.manifest import ManifestLog
from danube_fast.history.stores.local import LocalStore
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
    uploaded,
    wait_for_trim,
)
from tests.workers.broker import wait_until

pytestmark = pytest.mark.timeout(300)
OBJECT_MESSAGES, OBJECTS, MORE = 1000, 3, 500
LONG_SECONDS = 10**8
UPLOADED = OBJECT_MESSAGES * OBJECTS


@contextlib.contextmanager
def running(folder: Path, **more: Any) -> Iterator[tuple[Broker, Any]]:
    """A broker with data and store in a folder, and a client."""
    settings = {**SMALL, "workers": 1, "store": f"file://{folder / 'store'}", **more}
    with Broker(data_dir=folder / "data", **settings) as broker, broker.client() as client:
        yield broker, client


def give_up(store: Path, count: int) -> int:
    """Take the first sections out of the manifest, as the uploader does; the first message that is left."""
    ((number, found),) = manifests(store).items()
    manifest = found.manifest
    gone = manifest.sections[:count]
    opened = LocalStore(store, SystemClock())
    log = ManifestLog(opened, found._identity, number, manifest.uploader_epoch)
    log.load()
    first = gone[-1].end_offset
    log.commit(
        manifest.topic, manifest.incarnation, 0, first_offset=first, end_offset=manifest.end_offset,
        removed=[section.key for section in gone],
    )  # fmt: skip
    for section in gone:
        (store / section.key).unlink()  # as the sweep does
    return first


def is_known(client: Any, first: int) -> bool:
    """Whether the owner knows the first message that can be read; a reader that begins elsewhere is told of a gap."""
    with client.reader(TOPIC, start="earliest") as reader:
        batch = reader.receive_batch(1, timeout=WAIT_SECONDS)
        assert int(batch.offsets[0]) == first
        return not reader.gaps


def receive(consumer: Any, start: int, end: int) -> None:
    """Expect each number once, in order."""
    expected = start
    while expected < end:
        batch = consumer.receive_batch(1000, timeout=WAIT_SECONDS)
        assert len(batch), f"nothing came behind message {expected} of {end}"
        for payload in batch.payloads():
            assert NUMBER.unpack_from(payload)[0] == expected
            expected += 1


def is_told(consumer: Any, start: int, end: int) -> bool:
    """Whether all of these, and no others, are told as lost."""
    told = [(gap.first, gap.last + 1) for gap in consumer.gaps if gap.lost]
    assert len(told) == len(consumer.gaps), consumer.gaps
    return told == [(start, end)]


def make_history(folder: Path, *, expires: bool) -> None:
    """Objects of a topic whose log has none of their messages any more, and a subscription that has read nothing."""
    store = folder / "store"
    with running(folder) as (broker, client):
        keep_for_ever(client)
        if expires:
            policy = {"retention_policy": "until_expired", "retention_seconds": LONG_SECONDS}
            client.admin.set_topic_policy(TOPIC, policy)
        client.consumer(TOPIC, subscription="s", initial_position="earliest").close()
        for number in range(OBJECTS):
            publish(client, number * OBJECT_MESSAGES, OBJECT_MESSAGES)
            wait_until("the upload", uploaded(store, (number + 1) * OBJECT_MESSAGES))
            wait_until("the frontier", lambda: nothing_waits(client))
        wait_for_trim(broker, client, 2 * UPLOADED * 1000)


@pytest.mark.parametrize("expires", [False, True], ids=["found by a reader", "told at the start"])
@pytest.mark.parametrize("count", [2, OBJECTS])
def test_what_history_has_given_up_is_told(tmp_path: Path, count: int, expires: bool) -> None:
    """Some of history is left, or none; of a topic that expires the uploader looks at the manifest when it begins.
    Nothing is uploaded meanwhile: with that its owner would be told, too."""
    make_history(tmp_path, expires=expires)
    first = give_up(tmp_path / "store", count)
    with running(tmp_path, history_flush_seconds=3600) as (_, client):
        publish(client, UPLOADED, MORE)
        if expires:
            wait_until("the first offset", lambda: is_known(client, first))
        with client.consumer(TOPIC, subscription="s") as consumer:
            receive(consumer, first, UPLOADED + MORE)
            wait_until("the gap", lambda: is_told(consumer, 0, first))
        wait_until("the first offset", lambda: is_known(client, first))


def drop_last(store: Path) -> int:
    """Take the last section out of the manifest, which goes on saying that all is uploaded; the first message in it."""
    ((number, found),) = manifests(store).items()
    manifest = found.manifest
    last = manifest.sections[-1]
    log = ManifestLog(
        LocalStore(store, SystemClock()), found._identity, number, manifest.uploader_epoch
    )
    log.load()
    log.commit(
        manifest.topic, manifest.incarnation, 0, first_offset=manifest.first_offset,
        end_offset=manifest.end_offset, removed=[last.key],
    )  # fmt: skip
    return last.base_offset


def test_a_reader_behind_the_last_section_does_not_wait_for_an_upload(tmp_path: Path) -> None:
    """As after a crash, when the end of what was uploaded was skipped, and no message has these offsets."""
    make_history(tmp_path, expires=False)
    start = drop_last(tmp_path / "store")
    with (
        running(tmp_path, history_flush_seconds=3600) as (_, client),
        client.consumer(TOPIC, subscription="s") as consumer,
    ):
        receive(consumer, 0, start)
        wait_until("the gap", lambda: bool(consumer.gaps))
        (gap,) = consumer.gaps
        assert (gap.first, gap.last + 1, gap.lost) == (start, UPLOADED, False)
        publish(client, UPLOADED, MORE)
        receive(consumer, UPLOADED, UPLOADED + MORE)
