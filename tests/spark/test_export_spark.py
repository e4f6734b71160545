"""Exports by Spark: tasks, conditions, typed rows; `danube-fast export` itself, its errors and its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from danube_fast.errors import InvalidArgument
from danube_fast.spark.export.runners import SparkRunner
from danube_fast.spark.export.typed import TypedField
from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import keep_for_ever, payloads, publish
from tests.spark.export_rig import FILE_SIZES, run, seen_by_duckdb, seen_by_pyarrow
from tests.workers.broker import wait_until

TOPIC = "/default/sparked"
COUNT = 6000
COMMAND_SECONDS = 200


@pytest.fixture(scope="module")
def filled(broker: Broker) -> Broker:
    """The broker with numbered messages in two partitions, and some of JSON."""
    with broker.client() as client:
        client.admin.create_topic(TOPIC, partitions=2)
        client.admin.set_topic_policy(TOPIC, {"retention_policy": "forever"})
        with client.producer(TOPIC) as producer:
            keys = [b"k%d" % (i % 100) for i in range(COUNT)]
            producer.send_many(payloads(0, COUNT), keys=keys)
        keep_for_ever(client, "/default/objects")
        with client.producer("/default/objects") as producer:
            producer.send_many([b'{"n": %d}' % i if i % 10 else b"?" for i in range(1000)])
    return broker


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in zip(("FILE_BYTES_MIN", "FILE_BYTES"), FILE_SIZES, strict=True):
        monkeypatch.setattr(f"danube_fast.spark.export.job.{name}", size)


def _runner(spark: Any) -> Any:
    @contextlib.contextmanager
    def open_runner() -> Iterator[SparkRunner]:
        yield SparkRunner(spark)

    return open_runner


def test_tasks_of_spark(spark: Any, filled: Broker, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    report = run(TOPIC, f"parquet:{folder}", {"url": filled.url}, runner=_runner(spark))
    assert (report.messages, report.files) == (COUNT, len(list(folder.glob("*.parquet"))))
    assert seen_by_duckdb(folder, "payload") == sorted(payloads(0, COUNT))
    assert seen_by_duckdb(folder) == seen_by_pyarrow(folder)
    rows = spark.read.parquet(str(folder)).selectExpr("count(*)", "sum(crc32(payload))").collect()
    assert tuple(rows[0]) == (COUNT, report.checksum)
    assert report.checksum == sum(map(zlib.crc32, payloads(0, COUNT)))


def test_a_condition(spark: Any, filled: Broker, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    more = {
        "where": "cast(key as string) = 'k7' and partition >= 0", "columns": "offset,payload",
        "runner": _runner(spark),
    }  # fmt: skip
    report = run(TOPIC, f"parquet:{folder}", {"url": filled.url}, **more)
    assert report.messages == COUNT / 100
    expected = [each for i, each in enumerate(payloads(0, COUNT)) if i % 100 == 7]
    assert seen_by_duckdb(folder, "payload") == sorted(expected)
    assert pq.read_schema(next(folder.glob("*.parquet"))).names == ["offset", "payload"]
    assert run(TOPIC, f"parquet:{folder}", {"url": filled.url}, **more).plans == 0
    for wrong in ("nothing = 1", "offset +", "offset"):
        with pytest.raises(InvalidArgument, match="--where"):
            run(
                TOPIC, f"parquet:{tmp_path / 'no'}", {"url": filled.url}, where=wrong, runner=_runner(spark)
            )  # fmt: skip
    assert not (tmp_path / "no").exists()


def test_a_condition_on_typed_columns(spark: Any, filled: Broker, tmp_path: Path) -> None:
    report = run(
        "/default/objects", f"delta:{tmp_path / 'out'}", {"url": filled.url}, where="n >= 500",
        fields=(TypedField("n", "int64", False),), runner=_runner(spark),
    )  # fmt: skip
    assert (report.messages, report.rejected) == (450, 100)
    assert seen_by_duckdb(tmp_path / "out", "n") == [i for i in range(500, 1000) if i % 10]
    assert len(seen_by_duckdb(tmp_path / "out_rejected")) == 100


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "danube_fast.cli.main", "export", *words]


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(*words), capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
    )


def test_the_command(filled: Broker, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    words = (TOPIC, "--to", f"parquet:{folder}", "--url", filled.url)
    planned = _run(*words, "--dry-run", "-o", "json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["messages"] == COUNT and not folder.exists()
    done = _run(*words, "--master", "local[2]", "-o", "json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["messages"] == COUNT and report["partitions"][1]["partition"] == 1
    assert len(seen_by_duckdb(folder)) == COUNT
    again = _run(*words)
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout == f"nothing new in {TOPIC} for parquet:{folder}\n"


def test_an_interrupt_ends_a_followed_topic_quietly(filled: Broker, tmp_path: Path) -> None:
    topic, folder = "/default/watched", tmp_path / "out"
    with filled.client() as client:
        keep_for_ever(client, topic)
        publish(client, 0, 100, topic)
    words = (
        topic,
        "--to",
        f"parquet:{folder}",
        "--url",
        filled.url,
        "--follow",
        "--master",
        "local[1]",
    )
    following = subprocess.Popen(
        _command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )  # fmt: skip
    try:
        wait_until(
            "the first export", lambda: list(folder.glob("*.parquet")) and not (folder / "_danube/plan").exists(),
            COMMAND_SECONDS,
        )  # fmt: skip
        os.kill(following.pid, signal.SIGTERM)
        output, errors = following.communicate(timeout=COMMAND_SECONDS)
    finally:
        following.kill()
        following.wait()
    assert following.returncode == 143, errors
    assert output == ""
    assert errors == (
        f"interrupted: 100 messages in 1 file exported to parquet:{folder}; run it again to go on\n"
    )
    assert seen_by_duckdb(folder) == list(range(100))


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("/default/nothing", "--to", "parquet:{}/out"), 3, "/default/nothing does not exist"),
        ((TOPIC, "--to", "xml:{}/out"), 2, "--to"),
        ((TOPIC, "--to", "parquet:s3://bucket/x"), 2, "is no folder"),
        ((TOPIC, "--to", "parquet:{}/out", "--columns", "value"), 2, "value"),
        ((TOPIC, "--to", "parquet:{}/out", "--start", "9", "--end", "9"), 2, "is not below"),
        ((TOPIC, "--to", "parquet:{}/out", "--follow", "--end", "9"), 2, "no end"),
        ((TOPIC, "--to", "parquet:{}/out", "--schema", "{}/none"), 2, "No such file"),
        ((TOPIC, "--to", "parquet:/proc/nothing"), 4, "/proc/nothing"),
        ((TOPIC, "--to", "iceberg:http://127.0.0.1:9#a.b"), 5, "does not answer"),
    ],
)
def test_errors_are_one_sentence(
    filled: Broker, tmp_path: Path, words: tuple[str, ...], code: int, text: str
) -> None:
    done = _run(*(word.format(tmp_path) for word in words), "--url", filled.url)
    assert text in done.stderr and done.stdout == ""
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.returncode == code, done.stderr
    assert list(tmp_path.iterdir()) == []
