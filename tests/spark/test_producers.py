"""Names of producers in a read: of several, after a restart, after a move, and of a store without its broker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import SMALL, keep_for_ever
from tests.delivery.test_moves import move_on

TOPIC = "/default/named"
EACH = 10


def _publish(broker: Broker, name: str | None) -> None:
    with broker.client() as client:
        with client.producer(TOPIC, name=name) as producer:
            producer.send_many([(name or "").encode()] * EACH)
            producer.flush(timeout=60)
        client.admin.flush_history(TOPIC)


def _names(spark: Any, **options: str) -> list[tuple[str, str]]:
    """Payload and producer of each message."""
    columns = "offset,payload,producer_name"
    frame = spark.read.format("danube").options(topic=TOPIC, columns=columns, **options).load()
    rows = frame.orderBy("offset").collect()
    assert [row.offset for row in rows] == list(range(len(rows)))
    return [(bytes(row.payload).decode(), row.producer_name) for row in rows]


def test_names_of_producers(spark: Any, tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    with Broker(workers=2, store=store, **SMALL) as broker:
        with broker.client() as client:
            keep_for_ever(client, TOPIC)
        _publish(broker, "loader")
        _publish(broker, "späher")
        broker.restart()
        _publish(broker, "loader")
        with broker.client() as client:
            move_on(client, TOPIC, 2)
        _publish(broker, "late")
        expected = [
            (name, name) for name in ("loader", "späher", "loader", "late") for _ in range(EACH)
        ]
        assert _names(spark, url=broker.url) == expected
        _publish(broker, None)
        assert _names(spark, url=broker.url, splitBytes="65536")[:-EACH] == expected
        with broker.client() as client, client.reader(TOPIC) as reader:
            own = reader.receive_batch(5 * EACH, timeout=60)[-1].producer_name
    found = _names(spark, store=store)
    assert found[:-EACH] == expected
    assert found[-EACH:] == [("", own)] * EACH
