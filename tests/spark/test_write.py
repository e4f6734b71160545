"""Spark writes to topics: columns, partitions, retried tasks, streams over kills; wrong input in our words."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

from danube_fast.children import child_environment
from danube_fast.client.values.access import Access
from danube_fast.errors import FailedPrecondition, InvalidArgument
from danube_fast.history.stores.local import LocalStore
from danube_fast.history.stores.store import ObjectStore
from danube_fast.spark.failures import translated
from danube_fast.spark.source import DanubeSource
from danube_fast.spark.write.options import WriteOptions
from danube_fast.spark.write.publishing import STEPS, BrokerLink
from danube_fast.spark.write.record import list_batches
from danube_fast.spark.write.staging import open_staging
from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import keep_for_ever
from tests.spark.write_rig import killed_driver, payloads_of

WAIT_SECONDS = 120


@pytest.fixture
def store(store_folder: Path) -> ObjectStore:
    return open_staging(f"file://{store_folder}")


def _write(frame: Any, broker: Broker, topic: str, **options: str) -> None:
    with translated():
        frame.write.format("danube").options(url=broker.url, topic=topic, **options).mode(
            "append"
        ).save()


def _read(spark: Any, broker: Broker, topic: str) -> list[dict[str, Any]]:
    frame = spark.read.format("danube").options(url=broker.url, topic=topic).load()
    return [row.asDict() for row in frame.orderBy("partition", "offset").collect()]


def test_every_column_comes_back(spark: Any, broker: Broker, store: ObjectStore) -> None:
    topic = "/default/written"
    with broker.client() as client:
        keep_for_ever(client, topic)
    frame = spark.sql(
        """select if(id = 3, null, cast(id as string)) payload,
                  if(id % 2 = 0, cast(concat('k', id) as binary), null) key,
                  if(id % 3 = 0, map('n', cast(id as string), 'u', 'ü'), null) attributes,
                  if(id % 5 = 0, null, timestamp_seconds(1357018200 + id) + interval 7 microseconds) event_time
           from range(0, 40, 1, 2)"""
    )
    _write(frame, broker, topic, write_id="columns")
    rows = _read(spark, broker, topic)
    assert [row["payload"] for row in rows] == [
        None if i == 3 else bytearray(b"%d" % i) for i in range(40)
    ]
    assert [row["key"] for row in rows] == [
        bytearray(b"k%d" % i) if i % 2 == 0 else None for i in range(40)
    ]
    assert [row["attributes"] for row in rows] == [
        {"n": str(i), "u": "ü"} if i % 3 == 0 else {} for i in range(40)
    ]
    begin = dt.datetime.fromtimestamp(1357018200, dt.UTC) + dt.timedelta(microseconds=7)
    assert [row["event_time"] and row["event_time"].astimezone(dt.UTC) for row in rows] == [
        None if i % 5 == 0 else begin + dt.timedelta(seconds=i) for i in range(40)
    ]
    assert [row["sequence"] for row in rows] == [*range(40)]
    assert [(each.state, each.staged) for each in list_batches(store, "columns")] == [("done", [])]
    _write(frame, broker, topic, writeId="columns")
    assert len(_read(spark, broker, topic)) == 40
    _write(frame.limit(5), broker, topic)
    assert len(_read(spark, broker, topic)) == 45
    assert not [each for each in list_batches(store) if each.write_id.startswith("once-")]


WARNED = """
import sys
from danube_fast.spark.session import spark_session
url, topic = sys.argv[1:]
with spark_session("local[1]") as spark:
    rows = spark.sql("select 'x' payload").write.format("danube").options(url=url, topic=topic)
    for options in ({}, {"write_id": "left"}, {"write_id": "warned"}, {"write_id": "warned"}):
        rows.options(**options).mode("append").save()
"""


def test_warnings_of_writes_are_seen(broker: Broker, store: ObjectStore) -> None:
    """In a session of ours, whose Java is silent: a line each, and no more."""
    topic = "/default/warned"
    with broker.client() as client:
        client.admin.create_topic(topic)
        killed_driver(broker.url, store.url, topic, "left", 0, 3, "committed")
        done = subprocess.run(
            [sys.executable, "-c", WARNED, broker.url, topic], env=child_environment(),
            capture_output=True, text=True, timeout=WAIT_SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        first, second, third = done.stderr.splitlines()
        assert first.startswith("warning: a write without write_id is published at least once")
        assert second.startswith("warning: write_id left is committed already: the rows committed")
        assert third.startswith("warning: write_id warned is published already: nothing is")
        assert Counter(payloads_of(client, topic)) == Counter({b"x": 2, b"0": 1, b"1": 1, b"2": 1})


def test_a_task_is_tried_again_with_other_rows(spark: Any, broker: Broker, tmp_path: Path) -> None:
    """What the attempts before have staged does not count."""
    topic, mark = "/default/retried", tmp_path / "mark"

    def rows(batches: Any) -> Any:
        import os
        import uuid

        import pyarrow as pa

        for batch in batches:
            yield pa.record_batch({"payload": [f"{uuid.uuid4()}" for _ in range(batch.num_rows)]})
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        raise RuntimeError("this attempt fails behind its rows")

    with broker.client() as client:
        keep_for_ever(client, topic)  # no subscription keeps what fills a segment
    frame = spark.range(0, 30_000, 1, 1).mapInArrow(rows, "payload string")
    _write(frame, broker, topic, write_id="retried")
    assert mark.exists()
    with broker.client() as client:
        found = Counter(payloads_of(client, topic))
        assert len(found) == sum(found.values()) == 30_000


@pytest.mark.parametrize(
    ("select", "text"),
    [
        ("id", "not id"),
        ("'x' payload, 1 offset, 'a' topic", "not offset, topic"),
        ("'x' key", "needs the column payload"),
        ("1 payload", "payload is int, and a write takes binary or string; cast it"),
        ("'x' payload, 1L partition", "partition is bigint, and a write takes int"),
        ("'x' payload, map('a', 1) attributes", "map<string,string>"),
        ("'x' payload, timestamp_ntz'2020-01-01' event_time", "event_time is timestamp_ntz"),
        ("'x' payload, 'y' value", "not value"),
    ],
)
def test_wrong_columns(spark: Any, broker: Broker, select: str, text: str) -> None:
    frame = spark.range(3).selectExpr("id") if select == "id" else spark.sql(f"select {select}")
    with pytest.raises(InvalidArgument, match=text.replace("(", r"\(")):
        _write(frame, broker, "/default/wrong")


def test_wrong_rows_and_modes(spark: Any, broker: Broker, store: ObjectStore) -> None:
    topic = "/default/wrong-rows"
    one = "select 'x' payload, map('a', if(id = 39999, null, 'b')) attributes"
    frame = spark.sql(f"{one} from range(0, 40000, 1, 2)")
    with pytest.raises(InvalidArgument, match="must map str to str"):
        _write(frame, broker, topic, write_id="wrong-rows")
    assert list_batches(store, "wrong-rows") == []
    writer = frame.select("payload").write.format("danube").options(url=broker.url, topic=topic)
    with pytest.raises(InvalidArgument, match="a topic is not overwritten"), translated():
        writer.mode("overwrite").save()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "name the topic"),
        ({"topic": "/a/b,/a/c"}, "a write has one topic"),
        ({"topic": "no topic"}, "no topic"),
        ({"topic": "/a/b", "WRITE_ID": "a/b"}, "write_id is 'a/b'"),
        ({"topic": "/a/b", "writeid": "x" * 129}, "1 to 128 letters"),
        ({"topic": "/a/b", "write_id": "x", "writeId": "y"}, "write_id is 'x', and as writeId"),
        ({"topic": "/a/b", "staging": "memory://"}, "staging is memory://"),
        ({"topic": "/a/b", "staging": "s3://me:secret@bucket"}, "holds credentials"),
        ({"topic": "/a/b", "timeoutseconds": "x"}, "timeoutSeconds is 'x'"),
        ({"topic": "/a/b", "kafka.bootstrap.servers": "x"}, "an option of Kafka's source"),
        ({"topic": "/a/b", "retries": "3"}, "retries"),
    ],
)
def test_wrong_options(options: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text) as raised:
        WriteOptions.parse(options)
    assert "secret" not in str(raised.value)


def test_options_of_a_write() -> None:
    given = {"topic": "/a/b", "checkpointlocation": "/c", "queryName": "q", "writeId": "w"}
    assert WriteOptions.parse(given) == WriteOptions("/a/b", None, Access(), "w", None, 300)
    assert WriteOptions.parse({"path": "/a/b", "WRITE_ID": "w"}).write_id == "w"
    assert WriteOptions.parse({**given, "write_id": "w"}).write_id == "w"


def _killed_source(folder: Path) -> type[DanubeSource]:
    """The data source, whose driver kills itself at each step once."""

    class KilledSource(DanubeSource):
        @classmethod
        def name(cls) -> str:
            return "danube-killed"

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:
            import os
            import signal

            from danube_fast.spark.write import publishing

            def reached(step: str) -> None:
                try:
                    os.close(os.open(folder / step, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    return
                os.kill(os.getpid(), signal.SIGKILL)

            publishing.reached = reached
            return super().streamWriter(schema, overwrite)

    return KilledSource


def test_a_stream_whose_driver_is_killed_at_each_step(
    spark: Any, broker: Broker, store: ObjectStore, tmp_path: Path
) -> None:
    """Every row once, and no more is staged."""
    topic = "/default/streamed-in"
    for name in ("in", "marks"):
        (tmp_path / name).mkdir()
    for number in range(4):
        rows = range(number * 1000, number * 1000 + 1000)
        (tmp_path / "in" / f"{number}.txt").write_text("".join(f"{row}\n" for row in rows))
    spark.dataSource.register(_killed_source(tmp_path / "marks"))

    def run(form: str) -> Exception | None:
        lines = (
            spark.readStream.format("text")
            .option("maxFilesPerTrigger", "1")
            .load(str(tmp_path / "in"))
        )
        query = (
            lines.selectExpr("value payload").writeStream.format(form)
            .options(url=broker.url, topic=topic, checkpointLocation=str(tmp_path / "checkpoint"))
            .trigger(availableNow=True).start()
        )  # fmt: skip
        try:
            assert query.awaitTermination(WAIT_SECONDS), (
                f"the stream did not end within {WAIT_SECONDS} s"
            )
        except StreamingQueryException as error:
            return error
        return None

    kills = 0
    while run("danube-killed") is not None:
        kills += 1
        assert kills <= len(STEPS)
    assert {path.name for path in (tmp_path / "marks").iterdir()} == {*STEPS}
    with broker.client() as client:
        assert Counter(payloads_of(client, topic)) == Counter(b"%d" % row for row in range(4000))
        states = [each for each in list_batches(store) if each.write_id.startswith("stream-")]
        assert [(each.batch, each.state, each.staged) for each in states] == [(3, "done", [])]
        (tmp_path / "in" / "4.txt").write_text("more\n")
        assert run("danube") is None
        assert payloads_of(client, topic)[-1] == b"more"
        assert len(payloads_of(client, topic)) == 4001


def test_a_stream_keeps_its_write_id(
    spark: Any, broker: Broker, store: ObjectStore, tmp_path: Path
) -> None:
    """Batches without rows are no reason to refuse it; another id is, and leaves nothing staged."""
    topic = "/default/bound"
    (tmp_path / "in").mkdir()
    schema, options = "value string", {"url": broker.url, "topic": topic}
    options["checkpointLocation"] = str(tmp_path / "checkpoint")

    def run(number: int, line: str, **more: str) -> None:
        (tmp_path / "in" / f"{number}.txt").write_text(line)
        lines = spark.readStream.format("text").schema(schema).load(str(tmp_path / "in"))
        frame = lines.where("value <> 'none'").selectExpr("value payload")
        query = (
            frame.writeStream.format("danube").options(**options, **more)
            .trigger(availableNow=True).start()
        )  # fmt: skip
        with translated():
            assert query.awaitTermination(WAIT_SECONDS)

    for number, line in enumerate(("none", "none", "first", "none", "second")):
        run(number, line)
    with pytest.raises(FailedPrecondition, match="none of them under foo: they were published"):
        run(5, "third", write_id="foo")
    assert list_batches(store, "foo") == []
    run(6, "fourth")
    with broker.client() as client:
        found = payloads_of(client, topic)
    assert found[:2] == [b"first", b"second"] and {*found[2:]} == {b"third", b"fourth"}
    assert len(found) == 4


def test_a_broker_without_a_store(spark: Any, broker: Broker, tmp_path: Path) -> None:
    with BrokerLink(broker.url, 30) as link, pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "danube_fast.client.admin_client.AdminClient.cluster_status",
            lambda _: {"history": None},
        )
        with pytest.raises(FailedPrecondition, match=r"--store URL, or .*option\('staging'"):
            link.target("/default/plain", None)
    staging = f"file://{tmp_path}/staging"
    _write(spark.sql("select 'x' value"), broker, "/default/plain", staging=staging, write_id="w")
    assert [each.state for each in list_batches(LocalStore(tmp_path / "staging", None))] == ["done"]
    with broker.client() as client:
        assert payloads_of(client, "/default/plain") == [b"x"]
