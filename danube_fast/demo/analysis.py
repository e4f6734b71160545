"""The demo's act with Spark: count the flights by SQL, export them to Parquet, and read the table without Spark.

topic --sql--> flights by carrier, mean delay by hour; topic --export--> Parquet files --pyarrow--> every flight once
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import msgspec
import numpy as np

from danube_fast.clock import SECOND_NS
from danube_fast.demo.check import Catalogue
from danube_fast.demo.records import fingerprint
from danube_fast.demo.stage import TOPIC, Stage

__all__ = ["Analysis", "analyse", "analysis_problems", "has_spark"]

FLIGHTS_SQL = f"select cast(key as string) carrier, count(*) flights from '{TOPIC}' group by 1"
DELAYS_SQL = f"""
    select int(row[16]) hour, avg(double(row[5])) minutes
    from (select split(cast(payload as string), ',') row from '{TOPIC}')
    where row[5] != '' group by 1 order by 1
"""
"""Mean delay at departure by hour of the plan; a flight that was cancelled has none."""


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of Spark, and the table that it wrote."""

    carriers: dict[str, int]
    """Flights by carrier, counted by SQL."""
    delays: dict[int, float]
    """Mean delay by hour of the day, minutes."""
    files: int
    file_bytes: int
    exported: int
    """Rows of the table."""
    distinct: int
    """Different flights among them."""
    seconds: float
    """With the start of Spark."""


def has_spark() -> bool:
    """Whether the extra `spark` is installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("pyspark", "pyarrow"))


def analyse(stage: Stage, url: str, catalogue: Catalogue) -> Analysis:
    """Run Spark over the topic. Raises DanubeError."""
    from danube_fast.spark.session import spark_session
    from danube_fast.spark.statement import statement

    began_ns = stage.clock.monotonic_ns()
    stage.view.say("starting Spark")
    with spark_session(name="danube-fast demo") as spark:
        stage.view.say("counting flights by carrier, and delays by hour, with SQL")
        with statement(spark, FLIGHTS_SQL, {"url": url}, once=True) as frame:
            carriers = {row["carrier"]: row["flights"] for row in frame.collect()}
        with statement(spark, DELAYS_SQL, {"url": url}, once=True) as frame:
            delays = {row["hour"]: row["minutes"] for row in frame.collect()}
    return Analysis(carriers=carriers, delays=delays, files=0, file_bytes=0, exported=0, distinct=0, seconds=0)
