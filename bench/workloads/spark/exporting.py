"""The workload `spark-export`: a topic becomes Parquet, as `danube-fast export` writes it.

    published, uploaded, in the page cache --> rounds of: a new folder, zstd, all ten columns

The time is that of the export alone, without the start of Spark. The files are read by pyarrow, which knows nothing of
exports: every offset once, every payload by the sum of their crcs.
"""

from __future__ import annotations

import contextlib
import statistics
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from danube_fast.bench.load.payloads import Payloads
from danube_fast.bench.load.processes import Broker
from danube_fast.bench.load.rig import Rig, blank
from danube_fast.bench.plan import Figures, Plan
from danube_fast.bench.workloads.history import topics
from danube_fast.bench.workloads.spark.scan import MASTER, SETTINGS, uploaded
from danube_fast.spark.export.job import ExportJob, Hooks, run_export
from danube_fast.spark.export.report import Report
from danube_fast.spark.export.runners import Runner, SparkRunner
from danube_fast.spark.export.target import ExportSpec, parse_target
from danube_fast.spark.options import ReadOptions
from danube_fast.spark.session import spark_session

__all__ = ["run_export_row"]

ROUNDS = 3


def run_export_row(rig: Rig, plan: Plan) -> Figures:
    """Export a topic to Parquet."""
    figures = blank(plan)
    with (
        uploaded(rig, plan) as (broker, store, topic, payloads),
        spark_session(MASTER, settings=SETTINGS) as spark,
    ):
        _export(figures, spark, broker, store.folder, topic, payloads)
    return figures


def _export(
    figures: Figures, spark: Any, broker: Broker, folder: Path, topic: str, payloads: Payloads
) -> None:
    @contextlib.contextmanager
    def open_runner() -> Iterator[Runner]:
        yield SparkRunner(spark)

    spark.range(1).mapInArrow(lambda batches: batches, "id long").collect()  # starts Python
    seconds = []
    size = payloads.count * len(payloads[0])
    for number in range(ROUNDS):
        target = parse_target(f"parquet:{folder / f'exported{number}'}")
        report = Report(topic, target.text)
        read = ReadOptions.parse({"url": broker.url, "topic": topic})
        run_export(
            ExportJob(target, ExportSpec.make(topic, target.form), read), open_runner, Hooks(), report
        )  # fmt: skip
        seconds.append(report.seconds)
        if not number:
            _compare(figures, Path(target.place), payloads)
    median = statistics.median(seconds)
    figures.messages_per_s = payloads.count / median
    figures.extra["export_mb_per_s"] = size / median / 1e6


def _compare(figures: Figures, folder: Path, payloads: Payloads) -> None:
    """Count in `figures` what is lost, doubled or changed."""
    import pyarrow.parquet as pq

    offsets: set[int] = set()
    total = crcs = 0
    for path in sorted(folder.glob("*.parquet")):
        file = pq.ParquetFile(path)
        for batch in file.iter_batches(columns=["offset", "payload"]):
            total += batch.num_rows
            offsets.update(batch.column("offset").to_pylist())
            crcs += sum(map(zlib.crc32, batch.column("payload").to_pylist()))
    expected = sum(zlib.crc32(payloads[number]) for number in range(payloads.count))
    found = {
        "lost": payloads.count - len(offsets),
        "duplicated": total - len(offsets),
        "corrupted": int(total == payloads.count and crcs != expected),
    }
    topics.add_faults(figures, found)
