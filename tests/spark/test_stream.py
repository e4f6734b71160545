"""Streams: every message once over restarts, limits and growth; what is gone is told."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from danube_fast.errors import DataLoss, FailedPrecondition
from danube_fast.spark.failures import translated
from danube_fast.spark.options import ReadOptions
from danube_fast.spark.source import row_schema
from danube_fast.spark.stream import DanubeStreamReader
from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import keep_for_ever
from tests.workers.broker import wait_until


def _publish(client: Any, topic: str, start: int, count: int) -> None:
    with client.producer(topic) as producer:
        numbers = range(start, start + count)
        producer.send_many([b"%d" % i for i in numbers], keys=[b"%d" % i for i in numbers])


class Stream:
    """A query that is started again and again with one checkpoint; it reads what is there, and ends."""

    def __init__(
        self, spark: Any, broker: Broker, topic: str, folder: Path, **options: str
    ) -> None:
        self.spark, self.broker, self.topic, self.options = spark, broker, topic, options
        self.checkpoint = folder / "checkpoint"
        self.batches: list[list[int]] = []

    def run(self) -> list[int]:
        """All messages so far."""
        frame = (
            self.spark.readStream.format("danube")
            .options(url=self.broker.url, topic=self.topic, columns="payload", **self.options)
            .load()
        )
        writer = frame.writeStream.foreachBatch(self._take).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(self.checkpoint)).start()
        with translated():
            assert query.awaitTermination(120), "the stream did not end within 120 s"
        return [number for batch in self.batches for number in batch]

    def _take(self, frame: Any, _: int) -> None:
        self.batches.append([int(bytes(row["payload"])) for row in frame.collect()])


def test_a_topic_without_history_is_no_stream(spark: Any, broker: Broker, tmp_path: Path) -> None:
    with broker.client() as client:
        client.admin.create_topic("/default/passing")
    with pytest.raises(FailedPrecondition, match="set retention_policy"):
        Stream(spark, broker, "/default/passing", tmp_path).run()


def test_every_message_once_over_restarts(spark: Any, broker: Broker, tmp_path: Path) -> None:
    topic = "/default/streamed"
    with broker.client() as client:
        keep_for_ever(client, topic)
        _publish(client, topic, 0, 500)
        stream = Stream(spark, broker, topic, tmp_path)
        assert stream.run() == list(range(500))
        assert stream.run() == list(range(500))
        _publish(client, topic, 500, 300)
        assert stream.run() == list(range(800))


def test_batches_are_bounded(spark: Any, broker: Broker, tmp_path: Path) -> None:
    topic = "/default/bounded"
    with broker.client() as client:
        keep_for_ever(client, topic)
        _publish(client, topic, 0, 250)
    stream = Stream(spark, broker, topic, tmp_path, maxMessagesPerTrigger="100")
    assert stream.run() == list(range(250))
    assert [len(batch) for batch in stream.batches] == [100, 100, 50]


def test_partitions_and_growth(spark: Any, broker: Broker, tmp_path: Path) -> None:
    topic = "/default/growing"
    with broker.client() as client:
        client.admin.create_topic(topic, partitions=2)
        client.admin.set_topic_policy(topic, {"retention_policy": "forever"})
        _publish(client, topic, 0, 200)
        stream = Stream(spark, broker, topic, tmp_path, maxMessagesPerTrigger="60")
        assert sorted(stream.run()) == list(range(200))
        client.admin.set_topic(topic, partitions=4)
        _publish(client, topic, 200, 200)
        assert sorted(stream.run()) == list(range(400))
        assert max(map(len, stream.batches)) <= 60


def test_partitions_that_were_empty_before(spark: Any, broker: Broker, tmp_path: Path) -> None:
    topic = "/default/sparse"
    with broker.client() as client:
        client.admin.create_topic(topic, partitions=3)
        client.admin.set_topic_policy(topic, {"retention_policy": "forever"})
        stream = Stream(spark, broker, topic, tmp_path)
        assert stream.run() == []
        with client.producer(topic) as producer:
            producer.send(b"0", key=b"one key")
        assert stream.run() == [0]
        _publish(client, topic, 1, 100)
        assert sorted(stream.run()) == list(range(101))


def test_a_checkpoint_beyond_the_end_is_told(broker: Broker) -> None:
    topic = "/default/beyond"
    with broker.client() as client:
        keep_for_ever(client, topic)
        _publish(client, topic, 0, 100)
    options = ReadOptions.parse({"url": broker.url, "topic": topic})
    reader = DanubeStreamReader(options, row_schema(["offset"]))
    try:
        place = reader.initialOffset()[topic]["0"]
        start, end = {topic: {"0": [100, place[1]]}}, {topic: {"0": [150, place[1]]}}
        with pytest.raises(DataLoss, match="offsets 100 to 150 of /default/beyond"):
            reader.partitions(start, end)
        assert reader.partitions(start, start) == []
    finally:
        reader.stop()


def test_holds_end_with_the_stream(
    spark: Any, broker: Broker, store_folder: Path, tmp_path: Path
) -> None:
    topic = "/default/held"
    with broker.client() as client:
        keep_for_ever(client, topic)
        _publish(client, topic, 0, 100)
    before = set((store_folder / "holds").glob("*"))
    assert Stream(spark, broker, topic, tmp_path).run() == list(range(100))
    wait_until("its holds end", lambda: set((store_folder / "holds").glob("*")) <= before)


def test_a_signal_while_holds_are_released_ends_the_process_behind_that(broker: Broker) -> None:
    """Spark sends it as soon as it has closed the connection, by whose end the process stops the stream."""
    topic = "/default/signalled"
    with broker.client() as client:
        keep_for_ever(client, topic)
        _publish(client, topic, 0, 100)
    reader = DanubeStreamReader(
        ReadOptions.parse({"url": broker.url, "topic": topic}), row_schema(["offset"])
    )
    before = signal.getsignal(signal.SIGTERM)
    try:
        end = reader.initialOffset()
        released: list[str] = []
        for _ in range(3):
            reader.partitions(end, end)
        assert reader._client is not None
        admin = reader._client.admin
        release = admin.release_history_hold

        def released_beside_a_signal(hold: str, **options: Any) -> None:
            signal.raise_signal(signal.SIGTERM)
            release(hold, **options)
            released.append(hold)

        admin.release_history_hold = released_beside_a_signal
        with pytest.raises(SystemExit):
            reader.stop()
        assert len(released) == 3
    finally:
        signal.signal(signal.SIGTERM, before)
        reader.stop()


def test_a_stream_begins_where_it_is_told(spark: Any, broker: Broker, tmp_path: Path) -> None:
    topic = "/default/begun"
    with broker.client() as client:
        keep_for_ever(client, topic)
        _publish(client, topic, 0, 100)
        assert Stream(spark, broker, topic, tmp_path / "a", start="40").run() == list(
            range(40, 100)
        )
        latest = Stream(spark, broker, topic, tmp_path / "b", start="latest")
        assert latest.run() == []
        _publish(client, topic, 100, 5)
        assert latest.run() == list(range(100, 105))


def test_what_is_gone_is_told(spark: Any, broker: Broker, tmp_path: Path) -> None:
    topic = "/default/purged"
    with broker.client() as client:
        keep_for_ever(client, topic)
        _publish(client, topic, 0, 100)
        strict = Stream(spark, broker, topic, tmp_path / "a")
        lenient = Stream(spark, broker, topic, tmp_path / "b", failOnDataLoss="false")
        assert strict.run() == lenient.run() == list(range(100))
        _publish(client, topic, 100, 100)
        client.admin.purge_topic(topic)
        _publish(client, topic, 200, 10)
        with pytest.raises(DataLoss, match=f"offsets 100 to 200 of {topic}, partition 0, are gone"):
            strict.run()
        assert lenient.run() == [*range(100), *range(200, 210)]


def test_a_topic_that_was_made_again_is_told(spark: Any, broker: Broker, tmp_path: Path) -> None:
    topic = "/default/again"
    with broker.client() as client:
        keep_for_ever(client, topic)
        _publish(client, topic, 0, 10)
        stream = Stream(spark, broker, topic, tmp_path)
        assert stream.run() == list(range(10))
        client.admin.delete_topic(topic)
        keep_for_ever(client, topic)
        _publish(client, topic, 10, 20)
        with pytest.raises(DataLoss, match="was deleted and made again"):
            stream.run()
