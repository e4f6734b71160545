"""The demo's act with Spark: flights are counted by SQL, exported to Parquet, and the table is read without Spark.

topic --sql--> flights by carrier, mean delay by hour
topic --export--> Parquet files in a folder --pyarrow--> every flight once
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from danube_fast.clock import SECOND_NS
from danube_fast.demo.check import Catalogue
from danube_fast.demo.records import fingerprint
from danube_fast.demo.stage import TOPIC, Stage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from danube_fast.spark.export.runners import Runner

__all__ = ["Analysis", "analyse", "analysis_problems", "has_spark"]

FLIGHTS_SQL = (
    "select cast(key as string) carrier, count(*) flights from '/default/flights' group by 1"
)
DELAYS_SQL = """
    select int(row[16]) hour, avg(try_cast(row[5] as double)) minutes
    from (select split(cast(payload as string), ',') row from '/default/flights')
    where try_cast(row[5] as double) is not null group by 1 order by 1
"""
"""Mean delay at departure by hour of the plan; a flight that was cancelled has none, and so has an hour of such."""


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of Spark, and the table that was exported."""

    carriers: dict[str, int]
    """Flights by carrier, counted by SQL."""
    delays: dict[int, float]
    """Mean delay at departure by hour of the day, minutes."""
    files: int
    file_bytes: int
    exported: int
    """Rows of the table."""
    distinct: int
    """Different flights among them."""
    seconds: float
    """All of it, with the start of Spark."""


def has_spark() -> bool:
    """Whether the extra `spark` is installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("pyspark", "pyarrow"))


def analyse(stage: Stage, url: str, catalogue: Catalogue) -> Analysis:
    """Count, export and read back. Raises DanubeError."""
    from danube_fast.spark.session import spark_session
    from danube_fast.spark.statement import statement

    began_ns = stage.clock.monotonic_ns()
    folder = stage.store.with_name("flights.parquet")
    stage.view.say("starting Spark (--no-spark leaves this act out)")
    with spark_session(name="danube-fast demo") as spark:
        stage.view.say("counting flights by carrier, and delays by hour, with SQL")
        with statement(spark, FLIGHTS_SQL, {"url": url}, once=True) as frame:
            carriers = {str(row["carrier"]): int(row["flights"]) for row in frame.collect()}
        with statement(spark, DELAYS_SQL, {"url": url}, once=True) as frame:
            delays = {int(row["hour"]): float(row["minutes"]) for row in frame.collect()}
        stage.view.say("exporting them to Parquet, and reading the table without Spark")
        _export(spark, url, folder)
    rows = catalogue.rows_of(_fingerprints(folder))
    sizes = [path.stat().st_size for path in _files(folder)]
    return Analysis(
        carriers=carriers,
        delays=delays,
        files=len(sizes),
        file_bytes=sum(sizes),
        exported=len(rows),
        distinct=len(np.unique(rows[rows >= 0])),
        seconds=(stage.clock.monotonic_ns() - began_ns) / SECOND_NS,
    )


def analysis_problems(catalogue: Catalogue, analysis: Analysis) -> list[str]:
    """Name each thing that is wrong with it, in a sentence."""
    problems = []
    if analysis.carriers != catalogue.carriers:
        problems.append("the carriers' flights that SQL has counted are not those of the data set")
    if not analysis.exported == analysis.distinct == catalogue.count:
        problems.append(
            f"the exported table has {analysis.exported} rows, {analysis.distinct} different flights of "
            f"{catalogue.count}"
        )
    return problems


def _export(spark: SparkSession, url: str, folder: Path) -> None:
    from danube_fast.spark.export.job import ExportJob, Hooks, run_export
    from danube_fast.spark.export.report import Report
    from danube_fast.spark.export.runners import SparkRunner
    from danube_fast.spark.export.target import ExportSpec, parse_target
    from danube_fast.spark.options import ReadOptions

    @contextlib.contextmanager
    def open_runner() -> Iterator[Runner]:
        yield SparkRunner(spark)

    target = parse_target(f"parquet:{folder}")
    spec = ExportSpec.make(TOPIC, target.form)
    read = ReadOptions.parse({"url": url, "topic": TOPIC})
    run_export(ExportJob(target, spec, read), open_runner, Hooks(), Report(TOPIC, target.text))


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.parquet"))


def _fingerprints(folder: Path) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    import pyarrow.parquet as pq

    found = [
        fingerprint(batch["payload"].to_pylist())
        for path in _files(folder)
        for batch in pq.ParquetFile(path).iter_batches(columns=["payload"])
    ]
    return np.concatenate(found) if found else np.zeros(0, np.uint64)
