"""Exports without Spark: tasks run in this process, or in a process that is killed at a fail point."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq

from danube_fast.spark.export import job as exporting
from danube_fast.spark.export.job import ExportJob, Hooks, run_export
from danube_fast.spark.export.report import Report
from danube_fast.spark.export.runners import LocalRunner
from danube_fast.spark.export.target import ExportSpec, parse_target
from danube_fast.spark.options import ReadOptions
from danube_fast.testing.broker import Broker
from danube_fast.types import parse_topic
from tests.delivery.history_rig import keep_for_ever, publish

RUN_SECONDS = 120
FILE_SIZES = 1 << 20, 2 << 20
"""At least and at most, so that there are several files."""
_DRIVER = """
import json, sys
from tests.spark.export_rig import run_killed
run_killed(json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
"""


def fill(broker: Broker, topic: str, count: int) -> None:
    """Make a topic with numbered messages, all of them in history."""
    with broker.client() as client:
        keep_for_ever(client, topic)
        publish(client, 0, count, topic)
        client.admin.flush_history(topic)


@contextlib.contextmanager
def local_runner() -> Iterator[LocalRunner]:
    yield LocalRunner()


def job_of(topic: str, to: str, options: dict[str, str], **more: Any) -> ExportJob:
    """An export as the command makes it."""
    target = parse_target(to)
    names = ("columns", "fields", "where", "partition_by")
    spec = ExportSpec.make(
        str(parse_topic(topic)), target.form, **{name: more.pop(name) for name in names if name in more}
    )  # fmt: skip
    return ExportJob(target, spec, ReadOptions.parse({"topic": topic, **options}), **more)


def run(
    topic: str, to: str, options: dict[str, str], on_point: Callable[[str], None] = lambda name: None, **more: Any
) -> Report:  # fmt: skip
    """Export with tasks in this process."""
    report = Report(topic, to)
    runner = more.pop("runner", local_runner)
    hooks = Hooks(on_point=on_point, on_trouble=more.pop("on_trouble", lambda error: None))
    run_export(job_of(topic, to, options, **more), runner, hooks, report)
    return report


def run_killed(arguments: dict[str, Any], point: str, count: int) -> None:
    """Export, and kill this process at the fail point `point` as it comes for the `count`-th time."""
    left = [count]
    exporting.FILE_BYTES_MIN, exporting.FILE_BYTES = FILE_SIZES

    def on_point(name: str) -> None:
        if name == point:
            left[0] -= 1
            if not left[0]:
                signal.raise_signal(signal.SIGKILL)

    run(on_point=on_point, **arguments)


def kill_at(point: str, count: int = 1, **arguments: Any) -> None:
    """Export in a process that is killed at a fail point."""
    command = [sys.executable, "-c", _DRIVER, json.dumps(arguments), point, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
    assert done.returncode == -signal.SIGKILL, (point, done.stderr[-2000:])


def seen_by_duckdb(folder: Path, what: str = "offset") -> list[Any]:
    """A column of all rows that DuckDB finds in a bare folder, sorted."""
    found = duckdb.sql(f"select \"{what}\" from read_parquet('{folder}/**/*.parquet') order by 1")
    return [row[0] for row in found.fetchall()]


def seen_by_pyarrow(folder: Path) -> list[int]:
    """Offsets of all rows that pyarrow finds in a bare folder, sorted."""
    return sorted(pq.read_table(folder, columns=["offset"])["offset"].to_pylist())


def hidden(folder: Path) -> list[str]:
    """What an export has left in its own folder of a target."""
    return sorted(path.name for path in (folder / "_danube").rglob("*") if path.is_file())
