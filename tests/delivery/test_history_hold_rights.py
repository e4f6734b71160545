"""Holds of history in a secured broker: the right to the topic that was flushed is enough, and is needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.clock import SystemClock
from danube_fast.errors import NotFound
from danube_fast.history.holds import list_holds
from danube_fast.history.stores.local import LocalStore
from danube_fast.spark.options import ReadOptions
from danube_fast.spark.plan import release_holds, snapshot_of_broker
from tests.delivery.history_rig import SMALL
from tests.delivery.test_security import SecuredServer, refused

TOPIC, OTHER = "/shop/orders", "/shop/other"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SecuredServer, Path]]:
    folder = tmp_path_factory.mktemp("holds")
    store = folder / "store"
    with SecuredServer(folder / "data", folder, store=f"file://{store}", **SMALL) as server:
        server.make_ann()
        with server.come_in("ann") as ann:
            ann.admin.create_namespace("shop")
            for topic in (TOPIC, OTHER):
                ann.admin.create_topic(topic)
                ann.admin.set_topic_policy(topic, {"retention_policy": "forever"})
                ann.producer(topic).publish(b"one")
            server.add(ann.admin, "carl", ("consumer", TOPIC))
            server.add(ann.admin, "olga", ("consumer", OTHER))
        yield server, store


def holds(store: Path) -> list[Any]:
    clock = SystemClock()
    return list_holds(LocalStore(store, clock), clock.wall_ns())


def test_a_hold_is_for_who_may_consume_its_topic(place: tuple[SecuredServer, Path]) -> None:
    server, store = place
    with server.come_in("carl") as carl, server.come_in("olga") as olga:
        hold = carl.admin.flush_history(TOPIC, hold_seconds=600)["hold"]
        for call in (
            lambda: olga.admin.flush_history(TOPIC, hold_seconds=600),
            lambda: carl.admin.renew_history_hold(hold, hold_seconds=60),
            lambda: carl.admin.release_history_hold(hold),
            lambda: olga.admin.renew_history_hold(hold, hold_seconds=60, topic=TOPIC),
            lambda: olga.admin.release_history_hold(hold, topic=TOPIC),
        ):
            refused(call)
        with pytest.raises(NotFound):
            olga.admin.renew_history_hold(hold, hold_seconds=60, topic=OTHER)
        olga.admin.release_history_hold(hold, topic=OTHER)
        assert [each.key for each in holds(store)] == [hold]
        renewed = carl.admin.renew_history_hold(hold, hold_seconds=900, topic=TOPIC)["hold"]
        carl.admin.release_history_hold(renewed, topic=TOPIC)
        assert holds(store) == []


def test_a_snapshot_gives_its_holds_back(place: tuple[SecuredServer, Path]) -> None:
    server, store = place
    options = ReadOptions.parse({"url": server.url, "topic": TOPIC})
    with server.come_in("carl") as carl:
        snapshot = snapshot_of_broker(carl, options, 600)
        assert len(holds(store)) == 1
        release_holds(snapshot.holds, snapshot.store, carl, snapshot.topics)
    assert holds(store) == []
