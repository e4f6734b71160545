"""Exports to Delta and Iceberg: the commit says how far it is, so a kill on either side of it doubles nothing."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

import duckdb
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog

from danube_fast.errors import FailedPrecondition, Unavailable
from danube_fast.spark.export import tables
from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import keep_for_ever, payloads, publish
from tests.spark.export_rig import fill, kill_at, run

pytestmark = pytest.mark.usefixtures("small_files")
TOPIC = "/default/tabled"
COUNT = 5000
POINTS = ("placed", "committed", "checkpointed")


@pytest.fixture(scope="module")
def filled(broker: Broker) -> Broker:
    """The broker with numbered messages."""
    fill(broker, TOPIC, COUNT)
    return broker


@pytest.fixture
def options(filled: Broker, store_folder: Path) -> dict[str, str]:
    """How to read: from the store alone."""
    return {"store": f"file://{store_folder}"}


def _target(form: str, folder: Path) -> str:
    return f"{form}:{folder}" + ("#air.flights" if form == "iceberg" else "")


def _iceberg(folder: Path) -> Any:
    catalog = load_catalog("default", type="sql", uri=f"sqlite:///{folder}/catalog.db")
    return catalog.load_table("air.flights")


def _rows(form: str, folder: Path) -> Any:
    if form == "delta":
        return DeltaTable(str(folder)).to_pyarrow_table()
    return _iceberg(folder).scan().to_arrow()


def _offsets(form: str, folder: Path) -> list[int]:
    return sorted(_rows(form, folder)["offset"].to_pylist())


def _commits(form: str, folder: Path) -> int:
    if form == "delta":
        return len(DeltaTable(str(folder)).history())
    return len(_iceberg(folder).snapshots())


@pytest.mark.parametrize("form", ["delta", "iceberg"])
def test_rows_and_increments(options: dict[str, str], tmp_path: Path, form: str) -> None:
    to = _target(form, tmp_path / "lake")
    run(TOPIC, to, {**options, "end": "2000"})
    assert _offsets(form, tmp_path / "lake") == list(range(2000))
    run(TOPIC, to, options)
    again = run(TOPIC, to, options)
    assert again.messages == 0 and again.plans == 0
    table = _rows(form, tmp_path / "lake").sort_by("offset")
    assert table["offset"].to_pylist() == list(range(COUNT))
    assert table["payload"].to_pylist() == payloads(0, COUNT)
    assert {"key", "attributes", "publish_time", "sequence"} <= {*table.schema.names}


@pytest.mark.parametrize("form", ["delta", "iceberg"])
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_anywhere_leaves_each_message_once(
    options: dict[str, str], tmp_path: Path, form: str, point: str
) -> None:
    folder = tmp_path / "lake"
    to = _target(form, folder)
    run(TOPIC, to, {**options, "end": "1000"})
    kill_at(point, topic=TOPIC, to=to, options=options)
    if point in ("committed", "checkpointed"):
        assert _offsets(form, folder) == list(range(COUNT))
    else:
        assert _offsets(form, folder) == list(range(1000))
    commits = _commits(form, folder)
    run(TOPIC, to, options)
    assert _offsets(form, folder) == list(range(COUNT))
    if point in ("committed", "checkpointed"):
        assert _commits(form, folder) == commits


@pytest.mark.parametrize("form", ["delta", "iceberg"])
def test_the_checkpoint_is_only_a_copy(options: dict[str, str], tmp_path: Path, form: str) -> None:
    folder = tmp_path / "lake"
    to = _target(form, folder)
    run(TOPIC, to, {**options, "end": "3000"})
    for state in folder.rglob("_danube"):
        shutil.rmtree(state)
    assert run(TOPIC, to, options).messages == COUNT - 3000
    assert _offsets(form, folder) == list(range(COUNT))


@pytest.mark.parametrize("form", ["delta", "iceberg"])
def test_an_overwrite_is_one_commit(options: dict[str, str], tmp_path: Path, form: str) -> None:
    folder = tmp_path / "lake"
    to = _target(form, folder)
    run(TOPIC, to, {**options, "end": "3000"})
    kill_at("placed", topic=TOPIC, to=to, options={**options, "start": "100"}, mode="overwrite")
    assert _offsets(form, folder) == list(range(3000))
    run(TOPIC, to, options)
    assert _offsets(form, folder) == list(range(100, COUNT))


@pytest.mark.parametrize("form", ["delta", "iceberg"])
def test_a_topic_that_was_made_again_is_refused(broker: Broker, tmp_path: Path, form: str) -> None:
    topic, folder = f"/default/again-{form}", tmp_path / "lake"
    with broker.client() as client:
        keep_for_ever(client, topic)
        publish(client, 0, 10, topic)
        run(topic, _target(form, folder), {"url": broker.url})
        client.admin.delete_topic(topic)
        keep_for_ever(client, topic)
        publish(client, 0, 20, topic)
        for state in folder.rglob("_danube"):
            shutil.rmtree(state)
        with pytest.raises(FailedPrecondition, match="deleted and made again"):
            run(topic, _target(form, folder), {"url": broker.url})
    assert len(_offsets(form, folder)) == 10


@pytest.mark.parametrize("form", ["delta", "iceberg"])
def test_an_empty_topic_makes_an_empty_table(broker: Broker, tmp_path: Path, form: str) -> None:
    topic, folder = f"/default/empty-{form}", tmp_path / "lake"
    with broker.client() as client:
        keep_for_ever(client, topic)
        options = {"url": broker.url}
        assert run(topic, _target(form, folder), options, is_dry=True).messages == 0
        assert not folder.exists()
        assert run(topic, _target(form, folder), options).messages == 0
        assert _offsets(form, folder) == []
        publish(client, 0, 10, topic)
        assert run(topic, _target(form, folder), options).messages == 10


def test_delta_by_value(broker: Broker, tmp_path: Path) -> None:
    topic, folder = "/default/valued", tmp_path / "lake"
    with broker.client() as client:
        client.admin.create_topic(topic, partitions=2)
        client.admin.set_topic_policy(topic, {"retention_policy": "forever"})
        with client.producer(topic) as producer:
            producer.send_many(payloads(0, 100), keys=[b"%d" % i for i in range(100)])
    run(
        topic,
        f"delta:{folder}",
        {"url": broker.url},
        columns="topic,partition,offset",
        partition_by="topic,partition",
    )
    table = DeltaTable(str(folder))
    assert table.metadata().partition_columns == ["topic", "partition"]
    rows = _rows("delta", folder)
    assert {*rows["partition"].to_pylist()} == {0, 1} and rows.num_rows == 100
    found = duckdb.sql(
        f"select count(*), count(distinct \"partition\") from read_parquet('{folder}/**/*.parquet')"
    )
    assert found.fetchall() == [(100, 2)]


def test_others_tables_and_missing_packages(
    options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow as pa
    from deltalake import write_deltalake

    write_deltalake(str(tmp_path / "theirs"), pa.table({"x": [1]}))
    with pytest.raises(FailedPrecondition, match="other columns"):
        run(TOPIC, f"delta:{tmp_path / 'theirs'}", options)
    write_deltalake(str(tmp_path / "fits"), pa.table({"offset": pa.array([-1], pa.int64())}))
    run(TOPIC, f"delta:{tmp_path / 'fits'}", options, columns="offset")
    assert _offsets("delta", tmp_path / "fits") == list(range(-1, COUNT))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        place = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Unavailable, match=r"the catalogue at http.* does not answer"):
            run(TOPIC, f"iceberg:{place}#air.flights", options)
    monkeypatch.setattr(tables.importlib.util, "find_spec", lambda name: None)
    for form in ("delta", "iceberg"):
        with pytest.raises(FailedPrecondition, match=r"pip install 'danube-fast\[lakehouse\]'"):
            run(TOPIC, _target(form, tmp_path / form), options)
