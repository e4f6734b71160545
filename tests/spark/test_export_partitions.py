"""Tables of Iceberg in partitions: each row is where its values say, and no filter loses one."""

from __future__ import annotations

import datetime as dt
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.expressions import And, EqualTo, GreaterThanOrEqual, IsNull, LessThan

from danube_fast.clock import SECOND_NS, SystemClock
from danube_fast.errors import FailedPrecondition, InvalidArgument
from danube_fast.spark.export.target import ExportSpec
from danube_fast.spark.export.typed import TypedField
from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import keep_for_ever
from tests.spark.export_rig import fill, kill_at, run
from tests.spark.rest_catalog import rest_catalog

TOPIC = "/default/parted"
FIRST_DAY = dt.datetime(2026, 1, 1, 22, 30, tzinfo=dt.UTC)
HOURS = (0, 1, 2, 3, 24)
"""When messages are sent: two times on one day, three on the next, and the last at the first hour of day again."""
KEYS = [None, b"", b"a", b"a/b c%20#?", "ä".encode(), b"null", b"__HIVE_DEFAULT_PARTITION__"]


@pytest.fixture(scope="module")
def options(broker: Broker) -> dict[str, str]:
    """How to read a topic whose keys are hard to write as names of folders, and whose times are of several hours."""
    with broker.client() as client, pytest.MonkeyPatch.context() as patch:
        client.admin.create_topic(TOPIC, partitions=2)
        client.admin.set_topic_policy(TOPIC, {"retention_policy": "forever"})
        for hour in HOURS:
            at_ns = int((FIRST_DAY + dt.timedelta(hours=hour)).timestamp()) * SECOND_NS
            patch.setattr(SystemClock, "wall_ns", lambda self, at_ns=at_ns: at_ns)
            with client.producer(TOPIC) as producer:
                producer.send_many([b"x"] * len(KEYS), keys=KEYS)
    return {"url": broker.url}


def _table(folder: Path) -> Any:
    catalog = load_catalog("default", type="sql", uri=f"sqlite:///{folder}/catalog.db")
    return catalog.load_table("air.flights")


def _keys(table: Any, condition: Any) -> Counter[bytes | None]:
    return Counter(table.scan(row_filter=condition).to_arrow()["key"].to_pylist())


def _partitions(table: Any) -> list[dict[str, Any]]:
    return [each.as_py() for each in table.inspect.partitions()["partition"]]


def test_by_columns(options: dict[str, str], tmp_path: Path) -> None:
    run(TOPIC, f"iceberg:{tmp_path / 'lake'}#air.flights", options, partition_by="key,partition")
    table = _table(tmp_path / "lake")
    assert [str(field.transform) for field in table.spec().fields] == ["identity", "identity"]
    found = Counter((each["key"], each["partition"]) for each in _partitions(table))
    rows = table.scan().to_arrow()
    pairs = zip(rows["key"].to_pylist(), rows["partition"].to_pylist(), strict=True)
    assert found == Counter({*pairs})
    assert Counter(rows["key"].to_pylist()) == Counter(KEYS * len(HOURS))
    for key in KEYS:
        condition = IsNull("key") if key is None else EqualTo("key", key)
        assert _keys(table, condition) == {key: len(HOURS)}
        tasks = list(table.scan(row_filter=condition).plan_files())
        assert {task.file.partition[0] for task in tasks} == {key}


@pytest.mark.parametrize(
    ("partition_by", "transform", "count"),
    [("date", "day", 2), ("hour", "hour", len(HOURS)), ("date,hour", "hour", len(HOURS))],
)
def test_by_time(
    options: dict[str, str], tmp_path: Path, partition_by: str, transform: str, count: int
) -> None:
    to = f"iceberg:{tmp_path / 'lake'}#air.flights"
    run(TOPIC, to, options, partition_by=partition_by)
    table = _table(tmp_path / "lake")
    assert [str(field.transform) for field in table.spec().fields] == [transform]
    assert len(_partitions(table)) == count
    for hour in HOURS:
        at = FIRST_DAY + dt.timedelta(hours=hour)
        later = at + dt.timedelta(minutes=1)
        within = And(
            GreaterThanOrEqual("publish_time", at.isoformat()),
            LessThan("publish_time", later.isoformat()),
        )
        assert _keys(table, within) == Counter(KEYS)


def test_by_typed_columns(broker: Broker, tmp_path: Path) -> None:
    topic, name = (
        "/default/parted-typed",
        "n" * 100,
    )  # longer than what tables keep of a text in their statistics
    types = {"name": "string", "day": "date", "is_late": "bool", "delay": "int8", "at": "timestamp"}
    rows = [
        {"name": name + "1", "day": "2026-01-01", "is_late": True, "delay": -1, "at": "2026-01-01T00:00:00.000001Z"},
        {"name": name + "2", "day": "1969-12-31", "is_late": False, "delay": 0, "at": "1969-12-31T23:59:59.999999Z"},
        {},
    ]  # fmt: skip
    with broker.client() as client:
        keep_for_ever(client, topic)
        with client.producer(topic) as producer:
            producer.send_many([json.dumps(row).encode() for row in rows])
    run(
        topic,
        f"iceberg:{tmp_path / 'lake'}#air.flights",
        {"url": broker.url},
        fields=tuple(TypedField(name, kind) for name, kind in types.items()),
        partition_by=",".join(types),
    )
    table = _table(tmp_path / "lake")
    found = table.scan(selected_fields=tuple(types)).to_arrow().to_pylist()
    assert len(found) == len(rows) and dict.fromkeys(types) in found
    by_name = [
        sorted(each, key=lambda row: str(row["name"])) for each in (found, _partitions(table))
    ]
    assert by_name[0] == by_name[1]


@pytest.mark.parametrize("point", ["sealed", "renamed", "placed", "committed"])
def test_a_kill_anywhere_leaves_each_message_once(
    options: dict[str, str], tmp_path: Path, point: str
) -> None:
    to = f"iceberg:{tmp_path / 'lake'}#air.flights"
    more: dict[str, Any] = {"partition_by": "key,hour"}
    kill_at(point, 1, topic=TOPIC, to=to, options=options, **more)
    run(TOPIC, to, options, **more)
    assert _keys(_table(tmp_path / "lake"), "true") == Counter(KEYS * len(HOURS))
    assert run(TOPIC, to, options, **more).plans == 0


def test_in_a_rest_catalogue_and_in_a_table_without_statistics(
    options: dict[str, str], tmp_path: Path
) -> None:
    """The table's own choice is none, which would make each partition null."""
    with rest_catalog(tmp_path / "warehouse") as served:
        to = f"iceberg:{served.url}#air.flights"
        run(TOPIC, to, {**options, "end": "0"}, partition_by="key,date")
        table = served.catalog.load_table("air.flights")
        with table.transaction() as transaction:
            transaction.set_properties({"write.metadata.metrics.default": "none"})
        run(TOPIC, to, options, partition_by="key,date")
        table = load_catalog("default", type="rest", uri=served.url).load_table("air.flights")
        days = {(each["key"], each["publish_time_day"]) for each in _partitions(table)}
        assert len(days) == len(KEYS) * 2
        assert _keys(table, EqualTo("key", b"a")) == {b"a": len(HOURS)}


def test_what_is_refused(broker: Broker, options: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="made of the column publish_time"):
        ExportSpec.make(TOPIC, "iceberg", columns="offset,key", partition_by="hour")
    with pytest.raises(InvalidArgument, match="x of Iceberg is no float64"):
        ExportSpec.make(TOPIC, "iceberg", fields=(TypedField("x", "float64"),), partition_by="x")
    folder = tmp_path / "lake"
    run(TOPIC, f"iceberg:{folder}#air.flights", options, partition_by="key")
    other = "/default/parted-other"
    fill(broker, other, 10)
    for state in folder.rglob("_danube"):
        state.rename(tmp_path / "gone")
    with pytest.raises(FailedPrecondition, match="is partitioned by identity of key; say so"):
        run(other, f"iceberg:{folder}#air.flights", options)
    run(other, f"iceberg:{folder}#air.flights", options, partition_by="key")
    assert _table(folder).scan().to_arrow().num_rows == len(KEYS) * len(HOURS) + 10
