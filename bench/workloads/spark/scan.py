"""The workload `spark-scan`: Spark reads the history of a topic, beside the same rows in Parquet.

    published, uploaded, in the page cache | written as Parquet by Spark, with its defaults
    rounds of:  topic -> noop | Parquet -> noop          offset and payload; then all ten columns
                                              | the same rows in Kafka -> noop, where it is present (kafka.py)
    a count of offsets | a stream of all there is -> noop | 1 % of the time: bytes read

Ratios are of medians. Every payload is compared: the sum of their crcs, of the topic and of the Parquet files.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import statistics
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from danube_fast.bench.load.payloads import Payloads
from danube_fast.bench.load.processes import Broker
from danube_fast.bench.load.rig import Rig, blank
from danube_fast.bench.plan import Figures, Plan
from danube_fast.bench.workloads.history import topics
from danube_fast.bench.workloads.history.stores import Store, local
from danube_fast.bench.workloads.spark.kafka import (
    has_kafka,
    kafka_settings,
    kafka_topic,
    read_kafka,
)
from danube_fast.errors import DataLoss, DeadlineExceeded
from danube_fast.spark.options import ReadOptions
from danube_fast.spark.plan import Bounds, make_plan
from danube_fast.spark.scan import read_task
from danube_fast.spark.session import FORMAT, spark_session

__all__ = ["MASTER", "SETTINGS", "run_scan", "uploaded", "why_no_spark"]

ROUNDS = 5
MASTER = "local[2]"
SETTINGS = {"spark.driver.memory": "2g"}
TWO = "offset,payload"
STREAM_SECONDS = 600.0
SLICE = 100
"""The slice in time is one of so many."""

Rows = Callable[[], Any]
"""Makes a data frame anew."""


def why_no_spark() -> str:
    """Say why this cannot run; empty if it can."""
    if importlib.util.find_spec("pyspark") is None:
        return "PySpark is not installed: pip install 'danube-fast[spark]'"
    return ""


def run_scan(rig: Rig, plan: Plan) -> Figures:
    """Read a topic by Spark."""
    figures = blank(plan)
    with uploaded(rig, plan) as (broker, store, topic, payloads):
        settings = SETTINGS | (kafka_settings() if has_kafka() else {})
        with spark_session(MASTER, settings=settings) as spark:
            _scan(figures, spark, broker, store, topic, payloads)
            if has_kafka():
                two = functools.partial(_topic, spark.read, broker, topic, columns=TWO)
                _beside_kafka(figures, spark, two, payloads)
        _slice(figures, broker, store, topic)
    return figures


@contextlib.contextmanager
def uploaded(rig: Rig, plan: Plan) -> Iterator[tuple[Broker, Store, str, Payloads]]:
    """Run a broker with a topic whose messages are all in a store; both, the topic, and what was published."""
    (topic,) = rig.topics(1)
    with local(rig) as store:
        settings = topics.HISTORY | {"store": store.url}
        with rig.own_broker(plan.workload, settings=settings) as broker, rig.crew() as crew:
            topics.create(broker, plan, topic, topics.FOREVER)
            options = topics.options_of(rig, plan, broker, topic)
            topics.publish(crew, options)
            topics.wait_until(
                "the upload", lambda: topics.uploaded_messages(store, topic) >= plan.messages
            )
            yield broker, store, topic, Payloads(options["fd"], plan.message_bytes)


def _scan(
    figures: Figures, spark: Any, broker: Broker, store: Store, topic: str, payloads: Payloads
) -> None:
    def rows(reader: Any, **more: str) -> Any:
        return _topic(reader, broker, topic, **more)

    two, ten = (str(store.folder / name) for name in ("two", "ten"))
    rows(spark.read, columns=TWO).write.parquet(two)
    rows(spark.read).write.parquet(ten)
    _compare(figures, rows(spark.read, columns=TWO), spark.read.parquet(two), payloads)
    count = payloads.count
    before = broker.quiet_usage()
    seconds = _in_turn(lambda: rows(spark.read, columns=TWO), lambda: spark.read.parquet(two))
    used = broker.usage()
    figures.messages_per_s = count / seconds[0]
    figures.extra["vs_parquet"] = seconds[1] / seconds[0]
    figures.broker_cpu_s = used.cpu_seconds - before.cpu_seconds
    figures.extra["broker_cpu_share"] = figures.broker_cpu_s / (ROUNDS * sum(seconds))
    all_ten = _in_turn(lambda: rows(spark.read), lambda: spark.read.parquet(ten))
    figures.extra["ten_columns_per_s"] = count / all_ten[0]
    figures.extra["ten_columns_vs_parquet"] = all_ten[1] / all_ten[0]
    counted = [
        _seconds(lambda: _count(rows(spark.read, columns="offset"), count)) for _ in range(ROUNDS)
    ]
    figures.extra["counted_per_s"] = count / statistics.median(counted)
    streamed = [
        _seconds(functools.partial(_stream, rows, spark, store.folder / f"stream{number}"))
        for number in range(ROUNDS)
    ]
    figures.extra["streamed_per_s"] = count / statistics.median(streamed)


def _topic(reader: Any, broker: Broker, topic: str, **more: str) -> Any:
    return reader.format(FORMAT).options(url=broker.url, topic=topic, **more).load()


def _beside_kafka(figures: Figures, spark: Any, two: Rows, payloads: Payloads) -> None:
    """Read offset and payload in turn with Spark's Kafka source."""
    with kafka_topic(payloads) as address:
        rows = functools.partial(read_kafka, spark, address)
        _compare(figures, two(), rows(), payloads)
        seconds = _in_turn(two, rows)
    figures.extra["kafka_per_s"] = payloads.count / seconds[1]
    figures.extra["vs_kafka"] = seconds[1] / seconds[0]


def _in_turn(*of: Rows) -> list[float]:
    """Median seconds of reading each of these to the end, in turn."""
    times: list[list[float]] = [[] for _ in of]
    for _ in range(ROUNDS):
        for some, rows in zip(times, of, strict=True):
            some.append(_seconds(functools.partial(_drain, rows)))
    return [statistics.median(some) for some in times]


def _seconds(run: Callable[[], Any]) -> float:
    began = time.monotonic()
    run()
    return time.monotonic() - began


def _drain(rows: Rows) -> None:
    rows().write.format("noop").mode("overwrite").save()


def _count(frame: Any, expected: int) -> None:
    found = frame.count()
    if found != expected:
        raise DataLoss(f"Spark counts {found} of {expected} messages")


def _stream(rows: Callable[..., Any], spark: Any, checkpoint: Path) -> None:
    query = (
        rows(spark.readStream, columns=TWO).writeStream.format("noop").option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True).start()
    )  # fmt: skip
    if not query.awaitTermination(STREAM_SECONDS):
        raise DeadlineExceeded(f"the stream did not end within {STREAM_SECONDS:g} s")


def _compare(figures: Figures, frame: Any, parquet: Any, payloads: Payloads) -> None:
    """Count in `figures` what is lost, doubled or changed."""
    expected = sum(zlib.crc32(payloads[number]) for number in range(payloads.count))
    for each in (frame, parquet):
        total, distinct, crcs = each.selectExpr(
            "count(*)", "count(distinct offset)", "sum(crc32(payload))"
        ).collect()[0]
        found = {
            "lost": payloads.count - distinct,
            "duplicated": total - distinct,
            "corrupted": int(total == payloads.count and crcs != expected),
        }
        topics.add_faults(figures, found)


def _slice(figures: Figures, broker: Broker, store: Store, topic: str) -> None:
    """Read one hundredth of the time; which share of the bytes that takes."""
    options = ReadOptions.parse({"url": broker.url, "topic": topic, "columns": TWO})
    whole = make_plan(options)
    (of,) = whole.ranges
    low = min(section.publish_min_ns for section in of.manifest.sections)
    high = max(section.publish_max_ns for section in of.manifest.sections)
    middle, span = (low + high) // 2, (high - low) // SLICE
    bounds = Bounds(publish_low_ns=middle, publish_high_ns=middle + span)
    parts = _read_bytes(lambda: _read(make_plan(options, bounds)))
    figures.extra["slice_bytes_share"] = parts / _read_bytes(lambda: _read(whole))


def _read(plan: Any) -> None:
    import pyarrow as pa

    schema = pa.schema([("offset", pa.int64()), ("payload", pa.binary())])
    for task in plan.tasks:
        for _ in read_task(task, schema.names, schema):
            pass


def _read_bytes(run: Callable[[], Any]) -> int:
    """Bytes that this process asks the kernel for meanwhile."""

    def so_far() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(lines[0].removeprefix("rchar: "))

    before = so_far()
    run()
    return so_far() - before
