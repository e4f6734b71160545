"""Forms of an export and their options: what is written, and what is refused."""

from __future__ import annotations

import base64
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest

from danube_fast.errors import InvalidArgument
from danube_fast.spark.export.target import ExportSpec, parse_target
from danube_fast.spark.export.typed import TypedField, read_schema
from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import keep_for_ever
from tests.spark.export_rig import run


@pytest.mark.parametrize(
    "to",
    [
        "iceberg:http://user:sekret@host:1#a.b",
        "iceberg:HTTPS://user:se/kret@host",
        "iceberg:http://sekret@host#a.b",
        "parquet:http://user:sekret@host/d",
        "s3://user:sekret@host/d",
    ],
)
def test_credentials_in_a_url_are_not_repeated(to: str) -> None:
    with pytest.raises(InvalidArgument, match=r"\.pyiceberg\.yaml") as found:
        parse_target(to)
    assert "kret" not in str(found.value) and "user" not in str(found.value)
    assert parse_target("parquet:file:///data/a@b").place == "/data/a@b"


@pytest.mark.parametrize("with_bytes", [False, True])
def test_csv_tells_text_from_bytes(broker: Broker, tmp_path: Path, with_bytes: bool) -> None:
    topic, folder = f"/default/csv-{with_bytes}", tmp_path / "out"
    sent = [b"base64:/w==", b"plain base64:", b"base64:", "ä".encode(), *([b"\xff"] * with_bytes)]
    with broker.client() as client:
        keep_for_ever(client, topic)
        with client.producer(topic) as producer:
            producer.send_many(sent, keys=sent)
    run(topic, f"csv:{folder}", {"url": broker.url})
    rows = duckdb.sql(
        f"select payload, key from read_csv('{folder}/*.csv') order by \"offset\""
    ).fetchall()
    assert [row[0] for row in rows] == [row[1] for row in rows]
    assert [row[0] for row in rows][1:4:2] == ["plain base64:", "ä"]
    assert [_bytes(row[0]) for row in rows] == sent


def _bytes(text: str) -> bytes:
    """Read a value of a CSV as the documentation says."""
    encoded = text.removeprefix("base64:")
    return base64.b64decode(encoded) if encoded != text else text.encode()


def test_fields_called_date_and_hour(broker: Broker, tmp_path: Path) -> None:
    """Refused only where folders have these names, too."""
    topic, folder = "/default/dated", tmp_path / "out"
    fields = (TypedField("date", "date"), TypedField("hour", "int32"))
    with broker.client() as client:
        keep_for_ever(client, topic)
        with client.producer(topic) as producer:
            producer.send(b'{"date": "2013-01-01", "hour": 5}')
    for by in ("date", "partition,hour"):
        with pytest.raises(InvalidArgument, match=r"is that of publish_time, and --schema has"):
            ExportSpec.make(topic, "parquet", fields=fields, partition_by=by)
    with pytest.raises(
        InvalidArgument, match="field key, which is the name of a column of messages"
    ):
        ExportSpec.make(topic, "parquet", fields=(TypedField("key", "string"),))
    options = {"url": broker.url}
    run(topic, f"parquet:{folder}", options, fields=fields, partition_by="partition")
    (row,) = pq.read_table(folder, columns=["date", "hour"]).to_pylist()
    assert (str(row["date"]), row["hour"]) == ("2013-01-01", 5)
    run(topic, f"parquet:{folder}-hours", options, fields=fields[:1], partition_by="hour")
    assert len(list(Path(f"{folder}-hours").glob("hour=*/*.parquet"))) == 1


@pytest.mark.parametrize("form", ["parquet", "delta"])
def test_empty_text_and_null_have_one_folder(broker: Broker, tmp_path: Path, form: str) -> None:
    topic, folder = f"/default/empty-{form}", tmp_path / "out"
    with broker.client() as client:
        keep_for_ever(client, topic)
        with client.producer(topic) as producer:
            producer.send_many([b"x"] * 4, keys=[None, b"", b"__HIVE_DEFAULT_PARTITION__", b"a"])
    run(topic, f"{form}:{folder}", {"url": broker.url}, partition_by="key")
    names = {path.name for path in folder.glob("key=*")}
    assert names == {"key=__HIVE_DEFAULT_PARTITION__", "key=a"}


def test_a_first_export_that_fails_leaves_no_table(broker: Broker, tmp_path: Path) -> None:
    topic, folder = "/default/no-text", tmp_path / "out"
    with broker.client() as client:
        keep_for_ever(client, topic)
        with client.producer(topic) as producer:
            producer.send(b"x", key=b"\xff")
    with pytest.raises(InvalidArgument, match="--partition-by key: a value is no text"):
        run(topic, f"delta:{folder}", {"url": broker.url}, partition_by="key")
    assert not folder.exists()
    run(topic, f"delta:{folder}", {"url": broker.url})


def test_a_schema_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(InvalidArgument, match=f"--schema {path} cannot be read"):
            read_schema(path)
