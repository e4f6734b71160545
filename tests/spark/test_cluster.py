"""Spark on a cluster of its own: a master and a worker of the same release, whose executors are other processes."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest

from danube_fast.spark.java import find_java
from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import SMALL, keep_for_ever, publish
from tests.workers.broker import wait_until

TOPIC = "/default/cluster"
COUNT = 3000
HOME = Path(pyspark.__file__).parent
LOOPBACK = "127.0.0.1"
_READ = """
import sys
from danube_fast.spark.session import spark_session

with spark_session(sys.argv[1], settings={"spark.executor.memory": "512m", "spark.driver.host": "127.0.0.1"}) as spark:
    frame = spark.read.format("danube").option("topic", sys.argv[2]).option("url", sys.argv[3]).load()
    rows = frame.selectExpr("count(distinct offset)", "count(*)", "max(length(payload))").first()
    print(*rows)

    def dying(batches):
        # once, the executor is killed: the parent of the process that this one was forked from
        import os
        for batch in batches:
            if not os.path.exists(mark):
                open(mark, "x").close()
                with open(f"/proc/{os.getppid()}/stat") as above:
                    os.kill(int(above.read().rpartition(")")[2].split()[1]), 9)
            yield batch

    mark = sys.argv[4]
    again = frame.mapInArrow(dying, frame.schema)
    print(*again.selectExpr("count(distinct offset)", "count(*)", "sum(length(payload))").first())
"""


@contextlib.contextmanager
def _service(folder: Path, name: str, *arguments: str) -> Iterator[Path]:
    """A process of Spark; the file of what it says."""
    environment = {
        **os.environ, "JAVA_HOME": str(find_java().home), "SPARK_HOME": str(HOME), "SPARK_LOCAL_IP": LOOPBACK,
        "SPARK_WORKER_DIR": str(folder / "work"), "PYSPARK_PYTHON": sys.executable, "SPARK_DAEMON_MEMORY": "256m",
    }  # fmt: skip
    log = folder / f"{name}.log"
    settings = folder / "log4j2.properties"
    settings.write_text(
        "rootLogger.level = info\nrootLogger.appenderRef.out.ref = out\nappender.out.type = Console\n"
        "appender.out.name = out\nappender.out.layout.type = PatternLayout\nappender.out.layout.pattern = %m%n\n"
    )
    environment["SPARK_DAEMON_JAVA_OPTS"] = f"-Dlog4j2.configurationFile={settings}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(HOME / "bin/spark-class"), f"org.apache.spark.deploy.{arguments[0]}", *arguments[1:]],
            env=environment, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        yield log
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a master that has a worker."""
    folder = tmp_path_factory.mktemp("cluster")
    with _service(
        folder, "master", "master.Master", "--host", LOOPBACK, "--port", "0", "--webui-port", "0"
    ) as log:
        wait_until("the master", lambda: "Starting Spark master at" in log.read_text(), 120)
        found = re.search(r"Starting Spark master at (spark://\S+)", log.read_text())
        assert found is not None
        with _service(
            folder, "worker", "worker.Worker", "--host", LOOPBACK, "--webui-port", "0", "--cores", "1", "--memory", "1g",
            found[1],
        ) as log:  # fmt: skip
            wait_until("the worker", lambda: "Successfully registered" in log.read_text(), 120)
            yield found[1]


def test_executors_of_a_cluster_read_the_store_although_one_is_killed(
    master: str, tmp_path: Path
) -> None:
    store = f"file://{tmp_path / 'store'}"
    with Broker(workers=1, store=store, **SMALL) as broker, broker.client() as client:
        keep_for_ever(client, TOPIC)
        publish(client, 0, COUNT, TOPIC)
        # in a process of its own: a session of these tests may be there already
        done: Any = subprocess.run(
            [sys.executable, "-c", _READ, master, TOPIC, broker.url, str(tmp_path / "killed")],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    whole, killed = done.stdout.splitlines()
    assert whole.split() == [str(COUNT), str(COUNT), "1000"]
    assert (tmp_path / "killed").exists()
    assert killed.split() == [str(COUNT), str(COUNT), str(1000 * COUNT)]
