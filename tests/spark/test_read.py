"""Spark reads topics: every column, chosen columns, filters, errors as ours; without `register()`."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from danube_fast.errors import DanubeError, InvalidArgument, NotFound
from danube_fast.spark.failures import translated
from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import keep_for_ever, publish

TOPIC = "/default/rows"
COUNT = 3000
EVENT = dt.datetime(2013, 1, 1, 5, 30, tzinfo=dt.UTC)


@pytest.fixture(scope="module")
def filled(broker: Broker) -> Broker:
    """The broker with messages that have every column, or few."""
    with broker.client() as client:
        keep_for_ever(client, TOPIC)
        with client.producer(TOPIC, name="loader") as producer:
            for i in range(COUNT):
                producer.send(
                    b"%d" % i,
                    key=b"k%d" % (i % 7) if i % 10 else None,
                    attributes={"n": str(i)} if i % 3 == 0 else None,
                    event_time=EVENT + dt.timedelta(seconds=i) if i % 2 else None,
                )
        keep_for_ever(client, "/default/numbers")
        publish(client, 0, COUNT, "/default/numbers")
    return broker


def _frame(spark: Any, broker: Broker, topic: str = TOPIC, **options: str) -> Any:
    return spark.read.format("danube").options(url=broker.url, topic=topic, **options).load()


def test_every_column(spark: Any, filled: Broker) -> None:
    rows = _frame(spark, filled).orderBy("offset").collect()
    assert len(rows) == COUNT
    for i, row in enumerate(rows):
        assert row.asDict() == {
            "topic": TOPIC,
            "offset": i,
            "partition": 0,
            "key": bytearray(b"k%d" % (i % 7)) if i % 10 else None,
            "payload": bytearray(b"%d" % i),
            "attributes": {"n": str(i)} if i % 3 == 0 else {},
            "publish_time": row["publish_time"],
            "event_time": _local(EVENT + dt.timedelta(seconds=i)) if i % 2 else None,
            "producer_name": row["producer_name"],
            "sequence": i,
        }
    published = [row["publish_time"].astimezone(dt.UTC) for row in rows]
    now = dt.datetime.now(dt.UTC)
    assert now - dt.timedelta(minutes=10) < min(published) <= max(published) <= now


def _local(moment: dt.datetime) -> dt.datetime:
    """As Spark gives times to Python: without a zone, by the clock of this host."""
    return moment.astimezone().replace(tzinfo=None)


def test_columns_that_are_asked_for(spark: Any, filled: Broker) -> None:
    some = _frame(spark, filled, columns="payload, offset")
    assert some.columns == ["payload", "offset"]
    assert some.filter("offset = 17").collect()[0].asDict() == {"payload": b"17", "offset": 17}
    reader = spark.read.format("danube").options(url=filled.url, topic=TOPIC)
    chosen = reader.schema("sequence LONG, key BINARY").load()
    assert chosen.columns == ["sequence", "key"] and chosen.count() == COUNT
    assert _frame(spark, filled, columns="offset").count() == COUNT


def test_a_frame_is_read_again_with_other_filters(spark: Any, filled: Broker) -> None:
    """Spark gives the filters of one query to the next one of the same frame: the source must not use them."""
    frame = _frame(spark, filled)
    assert frame.filter("offset < 10").count() == 10
    assert frame.count() == COUNT
    assert frame.filter("offset < 10").union(frame.filter("offset >= 2990")).count() == 20


def test_filters_that_choose_what_is_read(spark: Any, filled: Broker) -> None:
    def count(condition: str) -> int:
        return int(_frame(spark, filled, pushdown="true").filter(condition).count())

    assert count("offset >= 100 and offset < 200") == 100
    assert count("offset = 5 or offset = 7") == 2
    assert count("offset in (5, 7, 4000000)") == 2
    assert count("100 < offset and offset <= 101") == 1
    assert count("key = cast('k3' as binary)") == sum(
        i % 7 == 3 and i % 10 > 0 for i in range(COUNT)
    )
    assert count("key is null") == COUNT / 10
    assert count("partition = 0") == COUNT and count("partition = 1") == 0
    assert count("partition in (0, 1) and partition <> 0") == 0
    assert count("event_time is not null") == COUNT / 2
    moment = _frame(spark, filled).filter("offset = 1000").collect()[0]["publish_time"]
    at = f"timestamp '{moment.astimezone(dt.UTC).isoformat()}'"
    same = count(f"publish_time = {at}")
    assert same >= 1
    assert count(f"publish_time < {at}") + same + count(f"publish_time > {at}") == COUNT
    assert count(f"publish_time <= {at}") == COUNT - count(f"publish_time > {at}")
    assert count(f"publish_time >= {at}") == COUNT - count(f"publish_time < {at}")


def test_sql_over_a_view(spark: Any, filled: Broker) -> None:
    _frame(spark, filled).createOrReplaceTempView("rows")
    (row,) = spark.sql(
        "select count(*) n, sum(offset) s, count(distinct key) k from rows"
    ).collect()
    assert (row.n, row.s, row.k) == (COUNT, sum(range(COUNT)), 7)


def test_several_topics(spark: Any, filled: Broker) -> None:
    both = f"{TOPIC},/default/numbers"
    found = _frame(spark, filled, both, columns="topic,offset").groupBy("topic").count().collect()
    assert {row["topic"]: row["count"] for row in found} == dict.fromkeys(both.split(","), COUNT)
    reader = spark.read.format("danube").options(url=filled.url, topicPattern="/default/*s")
    assert reader.option("columns", "offset").load().count() == 2 * COUNT
    assert _frame(spark, filled, start="latest").count() == 0


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"topic": "/default/nothing"}, NotFound, "/default/nothing does not exist"),
        ({"topic": TOPIC, "columns": "value"}, InvalidArgument, "no option value"),
        ({"topic": TOPIC, "store": "file:///no/such/folder"}, DanubeError, "/no/such/folder"),
    ],
)
def test_errors_are_ours(
    spark: Any, filled: Broker, options: dict[str, str], kind: type[DanubeError], text: str
) -> None:
    with pytest.raises(kind, match=text), translated():
        spark.read.format("danube").options(url=filled.url, **options).load().count()


def test_a_schema_of_other_columns_is_refused(spark: Any, filled: Broker) -> None:
    reader = spark.read.format("danube").options(url=filled.url, topic=TOPIC)
    with (
        pytest.raises(InvalidArgument, match="the column offset is bigint, not string"),
        translated(),
    ):
        reader.schema("offset STRING").load().count()
    with pytest.raises(InvalidArgument, match="no column value"), translated():
        reader.schema("value BINARY").load().count()
