"""Exports to folders: each message once, whatever is killed; what is refused; no Spark is needed for that."""

from __future__ import annotations

import itertools
import json
import zlib
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from danube_fast.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
)
from danube_fast.spark.export import history
from danube_fast.spark.export.job import POINTS
from danube_fast.spark.export.typed import TypedField
from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import NUMBER, keep_for_ever, payloads, publish
from tests.spark.export_rig import fill, hidden, kill_at, run, seen_by_duckdb, seen_by_pyarrow

pytestmark = pytest.mark.usefixtures("small_files")
TOPIC = "/default/exported"
COUNT = 9000
KEPT = ["checkpoint", "lock", "target"]
"""What stays beside the files of an export."""


@pytest.fixture(scope="module")
def filled(broker: Broker) -> Broker:
    """The broker with numbered messages."""
    fill(broker, TOPIC, COUNT)
    return broker


@pytest.fixture
def options(filled: Broker, store_folder: Path) -> dict[str, str]:
    """How to read: from the store alone."""
    return {"store": f"file://{store_folder}"}


def test_rows_and_report(options: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    report = run(TOPIC, f"parquet:{folder}", options)
    assert seen_by_duckdb(folder) == seen_by_pyarrow(folder) == list(range(COUNT))
    expected = payloads(0, COUNT)
    table = pq.read_table(folder).sort_by("offset")
    assert table["payload"].to_pylist() == expected
    assert table.schema.field("publish_time").type.tz == "UTC"
    assert report.messages == COUNT and report.payload_bytes == sum(map(len, expected))
    assert report.checksum == sum(map(zlib.crc32, expected))
    names = sorted(path.name for path in folder.glob("*.parquet"))
    assert report.files == len(names) > 2
    assert names[0].startswith("part-00000-offsets-000000000000-")
    ends = [int(name.split("-")[4].removesuffix(".parquet")) for name in names]
    starts = [int(name.split("-")[3]) for name in names]
    assert starts == [0, *ends[:-1]] and ends[-1] == COUNT
    assert hidden(folder) == KEPT
    assert [(each.start, each.end) for each in report.partitions] == [(0, COUNT)]


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_anywhere_leaves_each_message_once(
    options: dict[str, str], tmp_path: Path, point: str
) -> None:
    folder = tmp_path / "out"
    run(TOPIC, f"parquet:{folder}", {**options, "end": "1000"})
    kill_at(point, topic=TOPIC, to=f"parquet:{folder}", options=options)
    names = {path: path.stat().st_mtime_ns for path in folder.glob("*.parquet")}
    report = run(TOPIC, f"parquet:{folder}", options)
    assert seen_by_duckdb(folder) == seen_by_pyarrow(folder) == list(range(COUNT))
    assert hidden(folder) == KEPT
    assert report.recovered == (point != "checkpointed")
    assert {path: path.stat().st_mtime_ns for path in names} == names, "a published file changed"
    state = json.loads((folder / "_danube/checkpoint").read_text())
    assert state["totals"]["messages"] == COUNT
    assert state["totals"]["checksum"] == sum(map(zlib.crc32, payloads(0, COUNT)))


def test_half_of_the_renames_and_no_staged_file(options: dict[str, str], tmp_path: Path) -> None:
    """What was staged is gone: it is written again, under the names of the plan, and what is published stays."""
    folder = tmp_path / "out"
    kill_at("renamed", topic=TOPIC, to=f"parquet:{folder}", options=options)
    (first,) = folder.glob("*.parquet")
    assert len(list((folder / "_danube").rglob("*-d0.*.tmp"))) >= 2
    inode = first.stat().st_ino
    for path in (folder / "_danube").rglob("*.tmp"):
        path.unlink()
    run(TOPIC, f"parquet:{folder}", options)
    assert first.stat().st_ino == inode
    assert seen_by_duckdb(folder) == list(range(COUNT))


def test_a_second_run_adds_what_is_new(broker: Broker, tmp_path: Path) -> None:
    topic, to, options = "/default/grows", f"parquet:{tmp_path / 'out'}", {"url": broker.url}
    with broker.client() as client:
        client.admin.create_topic(topic, partitions=2)
        client.admin.set_topic_policy(topic, {"retention_policy": "forever"})
        publish(client, 0, 1000, topic)
        assert run(topic, to, options).messages == 1000
        again = run(topic, to, options)
        assert (again.messages, again.files, again.plans) == (0, 0, 0)
        publish(client, 1000, 500, topic)
        client.admin.set_topic(topic, partitions=4)
        with client.producer(topic) as producer:
            producer.send_many(payloads(1500, 1000), keys=[b"%d" % i for i in range(1000)])
        assert run(topic, to, {**options, "start": "latest"}).messages == 1500
    numbers = [NUMBER.unpack_from(each)[0] for each in seen_by_duckdb(tmp_path / "out", "payload")]
    assert sorted(numbers) == list(range(2500))
    assert {*seen_by_duckdb(tmp_path / "out", "partition")} == {0, 1, 2, 3}


def test_a_topic_without_history_is_exported(broker: Broker, tmp_path: Path) -> None:
    """What its log has, and then what came since; what was given up meanwhile is told."""
    topic, to, options = "/default/passes", f"parquet:{tmp_path / 'out'}", {"url": broker.url}
    with broker.client() as client:
        client.admin.create_topic(topic)
        client.consumer(topic, subscription="slow").close()  # else a full log takes messages along
        publish(client, 0, 1000, topic)
        assert run(topic, to, options).messages == 1000
        publish(client, 1000, 500, topic)
        assert run(topic, to, options).messages == 500
        assert seen_by_duckdb(tmp_path / "out") == list(range(1500))
        publish(client, 1500, 100, topic)
        client.admin.purge_topic(topic)
        publish(client, 1600, 100, topic)
        with pytest.raises(DataLoss, match=r"offsets 1500 to 1600"):
            run(topic, to, options)
        assert seen_by_duckdb(tmp_path / "out") == list(range(1500))


def test_start_and_end_hold_for_the_first_run(
    broker: Broker, filled: Broker, tmp_path: Path
) -> None:
    topic, to, options = "/default/late", f"parquet:{tmp_path / 'out'}", {"url": broker.url}
    with broker.client() as client:
        keep_for_ever(client, topic)
        publish(client, 0, 100, topic)
        assert run(topic, to, {**options, "start": "latest"}).messages == 0
        publish(client, 100, 10, topic)
        assert run(topic, to, {**options, "start": "latest"}).messages == 10
    assert seen_by_duckdb(tmp_path / "out") == list(range(100, 110))


def test_a_topic_that_was_made_again_is_refused(broker: Broker, tmp_path: Path) -> None:
    topic, to, options = "/default/again", f"parquet:{tmp_path / 'out'}", {"url": broker.url}
    with broker.client() as client:
        keep_for_ever(client, topic)
        publish(client, 0, 100, topic)
        run(topic, to, options)
        client.admin.delete_topic(topic)
        keep_for_ever(client, topic)
        publish(client, 1000, 200, topic)
        with pytest.raises(FailedPrecondition, match=r"deleted and made again.*--mode overwrite"):
            run(topic, to, options)
        assert len(seen_by_duckdb(tmp_path / "out")) == 100
        run(topic, to, options, mode="overwrite")
    numbers = [NUMBER.unpack_from(each)[0] for each in seen_by_duckdb(tmp_path / "out", "payload")]
    assert sorted(numbers) == list(range(1000, 1200))


@pytest.mark.parametrize("point", [None, "planned", "sealed", "placed", "committed"])
def test_an_overwrite_puts_all_anew(
    options: dict[str, str], tmp_path: Path, point: str | None
) -> None:
    folder = tmp_path / "out"
    to = f"parquet:{folder}"
    run(TOPIC, to, {**options, "end": "3000"})
    before = {path.name for path in folder.glob("*.parquet")}
    if point is not None:
        kill_at(point, topic=TOPIC, to=to, options=options, mode="overwrite")
    # the next run is a plain one: it finishes what the other has begun
    run(TOPIC, to, options, mode="append" if point else "overwrite")
    assert seen_by_duckdb(folder) == list(range(COUNT))
    assert not before & {path.name for path in folder.glob("*.parquet")}
    assert hidden(folder) == KEPT


def test_messages_that_are_gone_are_told(broker: Broker, tmp_path: Path) -> None:
    topic, folder, options = "/default/purged", tmp_path / "out", {"url": broker.url}
    with broker.client() as client:
        keep_for_ever(client, topic)
        publish(client, 0, 100, topic)
        run(topic, f"parquet:{folder}", {**options, "end": "50"})
        client.admin.purge_topic(topic)
        publish(client, 100, 20, topic)
        with pytest.raises(DataLoss, match=r"offsets 50 to 100 .* are gone.*--skip-lost"):
            run(topic, f"parquet:{folder}", options)
        run(topic, f"parquet:{folder}", {**options, "failOnDataLoss": "false"})
    assert seen_by_duckdb(folder) == [*range(50), *range(100, 120)]


def test_what_is_refused(options: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    run(TOPIC, f"parquet:{folder}", {**options, "end": "10"})
    with pytest.raises(FailedPrecondition, match="something else for --columns;"):
        run(TOPIC, f"parquet:{folder}", options, columns="offset")
    with pytest.raises(FailedPrecondition, match=r"the checkpoint of .* is in"):
        run(TOPIC, f"parquet:{folder}", options, checkpoint=tmp_path / "elsewhere")
    (folder / "_danube/checkpoint").unlink()
    with pytest.raises(FailedPrecondition, match="no checkpoint any more"):
        run(TOPIC, f"parquet:{folder}", options)
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.parquet").touch()
    with pytest.raises(FailedPrecondition, match="not of an export"):
        run(TOPIC, f"parquet:{other}", options, mode="overwrite")
    assert [path.name for path in other.iterdir()] == ["mine.parquet"]
    with pytest.raises(NotFound):
        run("/default/nothing", f"parquet:{tmp_path / 'new'}", options)
    assert not (tmp_path / "new").exists()
    with pytest.raises(InvalidArgument, match="no option value"):
        run(TOPIC, f"parquet:{tmp_path / 'new'}", options, columns="value")
    (tmp_path / "file").touch()
    with pytest.raises((PermissionDenied, FailedPrecondition), match="file"):
        run(TOPIC, f"parquet:{tmp_path / 'file'}", options)
    for to in ("parquet", "xml:/d", "parquet:s3://b/p", "iceberg:/d", "delta:"):
        with pytest.raises(InvalidArgument, match="--to"):
            run(TOPIC, to, options)


def test_two_at_once(options: dict[str, str], tmp_path: Path) -> None:
    to = f"parquet:{tmp_path / 'out'}"
    refused: list[str] = []

    def on_point(name: str) -> None:
        if name == "planned":
            with pytest.raises(
                FailedPrecondition, match=r"another export to .* is running"
            ) as found:
                run(TOPIC, to, options)
            refused.append(str(found.value))

    run(TOPIC, to, options, on_point=on_point)
    assert refused
    assert seen_by_duckdb(tmp_path / "out") == list(range(COUNT))


def test_a_dry_run_changes_nothing(options: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    report = run(TOPIC, f"parquet:{folder}", {**options, "end": "5000"}, is_dry=True)
    assert not folder.exists()
    assert report.messages == 5000 and report.files >= 1 and report.file_bytes > 5_000_000 / 2
    run(TOPIC, f"parquet:{folder}", {**options, "end": "5000"})
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    report = run(TOPIC, f"parquet:{folder}", options, is_dry=True)
    assert [(each.start, each.end) for each in report.partitions] == [(5000, COUNT)]
    assert sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*")) == before


def test_folders_by_value(options: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    run(
        TOPIC,
        f"parquet:{folder}",
        options,
        columns="offset,partition,payload",
        partition_by="date,partition",
    )
    dates = [path.name for path in folder.glob("date=*")]
    assert dates and all(path.name == "partition=0" for path in folder.glob("date=*/*"))
    assert seen_by_duckdb(folder) == list(range(COUNT))


def _typed(broker: Broker) -> str:
    topic = "/default/typed"
    rows = [b'{"n": %d, "name": "x"}' % i for i in range(100)]
    rows[7], rows[8], rows[9] = (
        b"{",
        b'{"n": "8"}',
        b'{"n": 9, "at": "2013-01-01T05:30:00Z", "more": []}',
    )
    with broker.client() as client:
        keep_for_ever(client, topic)
        with client.producer(topic) as producer:
            producer.send_many(rows)
            producer.send(None, key=b"k")
    return topic


def test_typed_columns_and_rows_that_do_not_match(broker: Broker, tmp_path: Path) -> None:
    topic, folder = _typed(broker), tmp_path / "out"
    fields = (
        TypedField("n", "int32", False),
        TypedField("name", "string"),
        TypedField("at", "timestamp"),
    )
    report = run(
        topic, f"parquet:{folder}", {"url": broker.url}, columns="offset,n,name,at", fields=fields
    )
    assert (report.messages, report.rejected) == (98, 3)
    table = pq.read_table(folder).sort_by("offset")
    assert [str(field.type) for field in table.schema] == [
        "int64",
        "int32",
        "string",
        "timestamp[us, tz=UTC]",
    ]
    assert table["n"].to_pylist() == [i for i in range(100) if i not in (7, 8)]
    assert table["at"].null_count == 97 and table["name"].null_count == 1
    rejected = pq.read_table(tmp_path / "out_rejected").to_pylist()
    assert [row["offset"] for row in rejected] == [7, 8, 100]
    assert rejected[1]["payload"] == b'{"n": "8"}' and "$.n" in rejected[1]["reason"]


@pytest.mark.parametrize("form", ["json", "csv"])
def test_text_forms(broker: Broker, tmp_path: Path, form: str) -> None:
    import duckdb

    topic, folder = f"/default/text-{form}", tmp_path / "out"
    with broker.client() as client:
        keep_for_ever(client, topic)
        with client.producer(topic) as producer:
            producer.send(b'a,b\n"c"', key=b"k", attributes={"x": "1"})
            producer.send(b"\xff")
            producer.send(None, key=b"k")
    run(topic, f"{form}:{folder}", {"url": broker.url})
    read = "read_json" if form == "json" else "read_csv"
    rows = (
        duckdb.sql(f"select * from {read}('{folder}/*.{form}') order by \"offset\"")
        .to_arrow_table()
        .to_pylist()
    )
    assert [row["offset"] for row in rows] == [0, 1, 2]
    assert rows[0]["payload"] == 'a,b\n"c"' and rows[0]["key"] == "k"
    assert rows[2]["payload"] is None
    if form == "json":
        assert rows[1]["payload_base64"] == "/w=="
    else:
        assert rows[1]["payload"] == "base64:/w=="
    assert (
        json.loads(
            json.dumps(
                rows[0]["attributes"] if form == "json" else json.loads(rows[0]["attributes"])
            )
        )["x"]
        == "1"
    )


def test_a_full_disk_is_named_and_leaves_nothing(options: dict[str, str], tmp_path: Path) -> None:
    import resource
    import signal

    from danube_fast.errors import ResourceExhausted

    folder = tmp_path / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, hard))
    try:
        with pytest.raises(ResourceExhausted, match=f"{folder}.* has no room left"):
            run(TOPIC, f"parquet:{folder}", options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert not list(folder.rglob("*.tmp")) and not list(folder.glob("*.parquet"))
    run(TOPIC, f"parquet:{folder}", options)
    assert seen_by_duckdb(folder) == list(range(COUNT))


def test_a_followed_topic_waits_for_size_or_age(
    broker: Broker, tmp_path: Path, monkeypatch: Any
) -> None:
    topic, folder = "/default/followed", tmp_path / "out"
    monkeypatch.setattr("danube_fast.spark.export.job.POLL_SECONDS", 0.02)
    with broker.client() as client:
        keep_for_ever(client, topic)
        publish(client, 0, 100, topic)
        rounds: list[int] = []

        class Enough(Exception):
            pass

        def on_point(name: str) -> None:
            if name == "checkpointed":
                rounds.append(len(rounds))
                if len(rounds) == 3:
                    raise Enough
                publish(client, 100 * len(rounds), 100, topic)

        with pytest.raises(Enough):
            run(
                topic,
                f"parquet:{folder}",
                {"url": broker.url},
                on_point,
                follows=True,
                follow_bytes=50_000,
                follow_seconds=600.0,
            )
        assert seen_by_duckdb(folder) == list(range(300))
        publish(client, 300, 10, topic)
        rounds[:] = [0]
        with pytest.raises(Enough):
            run(
                topic,
                f"parquet:{folder}",
                {"url": broker.url},
                on_point,
                follows=True,
                follow_bytes=1 << 30,
                follow_seconds=0.2,
            )
    assert seen_by_duckdb(folder)[:310] == list(range(310))


def test_ranges_are_cut_by_size() -> None:
    from danube_fast.history.manifest import Manifest, Section
    from danube_fast.spark.plan import PartitionRange

    manifest = Manifest()
    sizes = [(0, 100, 1000), (100, 150, 50), (160, 1000, 10_000)]
    manifest.sections = [
        Section("k", 0, size, low, high, high - low, 0, 0, 0, 0, 0, 1, 0)
        for low, high, size in sizes
    ]
    of = PartitionRange("/default/t", 0, 1, 10, 990, manifest)
    parts = list(history.cut(of, 1000))
    assert [parts[0][0], parts[-1][1]] == [10, 990]
    assert all(left[1] == right[0] for left, right in itertools.pairwise(parts))
    assert all(low < high for low, high, _ in parts)
    assert max(size for _, _, size in parts) < 2000
    assert sum(size for _, _, size in parts) == pytest.approx(900 + 50 + 9881, rel=0.01)
