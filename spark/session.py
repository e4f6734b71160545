"""A Spark session that finds the data source `danube`, on this host or on a cluster.

    with spark_session() as spark:                                  local, with whatever Java there is
        spark.read.format("danube").option("topic", "/default/flights").load()

    spark_session(master="spark://host:7077")                       a cluster
    spark_session(master="sc://host:15002")                         Spark Connect

What Spark's Java process writes goes to a file of its own: its warnings are not a user's concern, and its last lines
are part of the error if it does not start. Only warnings of a write, which its Python processes print there, are passed
on to standard error. A session that is active already is taken as it is.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danube_fast.errors import FailedPrecondition, InvalidArgument, Unavailable
from danube_fast.spark.failures import WriteWarning, translated
from danube_fast.spark.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["FORMAT", "check_spark_home", "spark_session", "stop_session"]

FORMAT = "danube"
"""Name of the data source."""
LOCAL_MASTER = "local[*]"
CONNECT_SCHEME = "sc://"
LOOPBACK = "127.0.0.1"
END_SECONDS = 10
"""For Spark's Java process to end by itself."""
LOG_LINES = 8
"""Of Spark's own output in an error."""

_LOUD = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
"""Loggers of PySpark."""
_WRONG_MASTER = ("Could not parse Master URL", "Master must either be")

_WARNING = re.compile(rf"\b{WriteWarning.__name__}: (.*)")
_forwarders: list[threading.Thread] = []
"""Of the Java process that was begun here."""

_SETTINGS = {
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
}
"""What every session of ours has: a source in Python gets filters only if it is told to."""
_START_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    # rows come from Python by a socket of the file system: a seventh faster than by loopback
    "spark.python.unix.domain.socket.enabled": "true",
}
"""Of a session that begins here."""


@contextlib.contextmanager
def spark_session(
    master: str | None = None,
    *,
    name: str = "danube-fast",
    settings: Mapping[str, str] | None = None,
) -> Iterator[SparkSession]:
    """Open a Spark session, and close it at the end if it began here.

    `master`: as for Spark (`local[2]`, `spark://...`, `yarn`), or `sc://...` for Spark Connect; None: all processors of
    this host. `settings`: Spark's, which come before those made here.

    Raises FailedPrecondition if PySpark or Java is missing, or SPARK_HOME is of another version; InvalidArgument for a
    master that Spark does not know; Unavailable, with Spark's last lines, if it does not start.
    """
    _require_pyspark()
    from pyspark.sql import SparkSession

    chosen = {**_SETTINGS, **(settings or {})}
    active = SparkSession.getActiveSession()
    if active is not None:
        before = {key: active.conf.get(key, None) for key in chosen}
        try:
            with _silence(), translated():
                for key, value in chosen.items():
                    active.conf.set(key, value)
                yield active
        finally:
            for key, old in before.items():
                if old is None:
                    active.conf.unset(key)
                else:
                    active.conf.set(key, old)
        return
    with tempfile.TemporaryDirectory(prefix="danube-fast-spark-") as folder:
        session = _open(master or LOCAL_MASTER, name, chosen, folder)
        try:
            with _silence(), translated():
                yield session
        finally:
            stop_session(session)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep PySpark from printing each error of a statement, with its tracebacks, before it raises the error."""
    loggers = [logging.getLogger(name) for name in _LOUD]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, was_disabled in zip(loggers, before, strict=True):
            logger.disabled = was_disabled


def _open(master: str, name: str, settings: Mapping[str, str], folder: str) -> SparkSession:
    if master.startswith(CONNECT_SCHEME):
        return _connect(master, name, settings)
    own = dict(_START_SETTINGS)
    if master.startswith("local"):
        # Spark would make `spark-warehouse` where the user stands
        own["spark.sql.warehouse.dir"] = folder
    return _start(master, name, {**own, **settings})


def stop_session(session: SparkSession) -> None:
    """Stop a session and the Java process that it began."""
    with contextlib.suppress(Exception):  # of a session that has failed
        session.stop()
    _end_java()


def _end_java() -> None:
    try:
        from pyspark import SparkContext
    except ImportError:  # of a client of Spark Connect alone
        return
    gateway = SparkContext._gateway
    process = getattr(gateway, "proc", None)
    if gateway is None or process is None:
        return
    with contextlib.suppress(Exception):
        gateway.shutdown()
    SparkContext._gateway = SparkContext._jvm = None
    process.stdin.close()  # it ends with its standard input
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _end_forwarding()


def _forward(source: int, log: int) -> None:
    """Copy what Java writes to its log, and print the warnings of writes, a line each."""
    with open(source, "rb") as lines, open(log, "wb", buffering=0) as copy:
        for line in lines:
            copy.write(line)
            if found := _WARNING.search(line.decode(errors="replace")):
                print(f"warning: {found[1].rstrip()}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _forwarded(log: int) -> Iterator[int]:
    """A descriptor for the errors of a Java process that begins meanwhile; `log`: of its log. The thread begins behind
    that: Python warns of a fork beside threads."""
    source, end = os.pipe()
    forwarder = threading.Thread(
        target=_forward, args=(source, os.dup(log)), name="danube-spark-errors", daemon=True
    )
    try:
        yield end
    finally:
        os.close(end)
        forwarder.start()
        _forwarders.append(forwarder)


def _end_forwarding() -> None:
    """Wait until all is copied that a Java process has written which has ended."""
    while _forwarders:
        _forwarders.pop().join(END_SECONDS)


def _require_pyspark() -> None:
    for package in ("pyspark", "pyarrow", "pandas"):
        if importlib.util.find_spec(package) is None:
            raise FailedPrecondition(
                f"{package} is not installed; run pip install 'danube-fast[spark]'"
            )


def _connect(url: str, name: str, settings: Mapping[str, str]) -> SparkSession:
    try:
        from pyspark.sql.connect.session import SparkSession as ConnectSession
    except ImportError as error:
        raise FailedPrecondition(
            f"Spark Connect needs packages that are not installed ({error.name}); run pip install 'pyspark[connect]'"
        ) from None
    builder = ConnectSession.builder.remote(url).appName(name)
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        return builder.getOrCreate()
    except Exception as error:
        raise Unavailable(f"{url} does not answer: {_first_line(error)}") from None


def _start(master: str, name: str, settings: Mapping[str, str]) -> SparkSession:
    """Start Spark's Java process and a session in it."""
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    check_spark_home()
    conf = SparkConf(loadDefaults=False).setMaster(master).setAppName(name)
    is_local = master.startswith("local")
    if is_local:
        conf.set("spark.driver.host", LOOPBACK).set("spark.driver.bindAddress", LOOPBACK)
    for key, value in settings.items():
        conf.set(key, value)
    environment = {"JAVA_HOME": str(find_java().home), "PYSPARK_PYTHON": sys.executable}
    if is_local:
        environment["SPARK_LOCAL_IP"] = LOOPBACK
    descriptor, log = tempfile.mkstemp(prefix="danube-fast-spark-", suffix=".log")
    started: list[Any] = []
    try:
        with _environment(environment), open(descriptor, "wb") as output:
            gateway = SparkContext._gateway
            if gateway is None:
                with _forwarded(descriptor) as errors:
                    gateway = launch_gateway(conf, {"stdout": output, "stderr": errors})
            started.append(gateway)
            on_interrupt = signal.getsignal(signal.SIGINT)
            context = SparkContext(gateway=gateway, conf=conf)
            with contextlib.suppress(ValueError):  # it is not the main thread
                # Spark puts a handler of its own there for good
                signal.signal(signal.SIGINT, on_interrupt)
        return SparkSession(context)
    except Exception as error:
        said = str(error) or type(error).__name__  # asks Java
        if SparkContext._gateway is None and started:
            SparkContext._gateway = started[0]
        _end_java()
        _end_forwarding()
        raise _failed(master, said, Path(log)) from None
    finally:
        os.unlink(log)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for a while; those that are there already stay, but JAVA_HOME."""
    before = {key: os.environ.get(key) for key in values}
    for key, value in values.items():
        if key == "JAVA_HOME":
            os.environ[key] = value
        else:
            os.environ.setdefault(key, value)
    try:
        yield
    finally:
        for key, old in before.items():
            if old is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = old


def check_spark_home() -> None:
    """Look at the Spark of this host. Raises FailedPrecondition if SPARK_HOME has no Spark, or one that this PySpark does not fit."""
    import pyspark

    home = os.environ.get("SPARK_HOME")
    if not home:
        return
    found = [
        match[1]
        for path in Path(home, "jars").glob("spark-core_*.jar")
        if (match := re.search(r"-(\d+\.\d+)[^-]*\.jar$", path.name))
    ]
    wanted = ".".join(pyspark.__version__.split(".")[:2])
    if not found:
        raise FailedPrecondition(f"SPARK_HOME is {home}, where no Spark is; correct or unset it")
    if wanted not in found:
        raise FailedPrecondition(
            f"SPARK_HOME ({home}) has Spark {found[0]}, and PySpark here is {pyspark.__version__}; run pip install "
            f"'pyspark=={found[0]}.*', or unset SPARK_HOME"
        )


def _failed(master: str, error: str, log: Path) -> Exception:
    text = log.read_text(errors="replace")
    if any(words in f"{error}{text}" for words in _WRONG_MASTER):
        return InvalidArgument(
            f"{master!r} is no master of Spark; give local[N], spark://HOST:PORT, yarn, k8s://... or sc://HOST:PORT"
        )
    told = [line for line in text.splitlines() if line.strip() and not line.startswith("\tat ")]
    lines = told[-LOG_LINES:]
    shown = "".join(f"\n  {line}" for line in lines)
    return Unavailable(f"Spark did not start: {_first_line(error)}; its last lines:{shown}")


def _first_line(error: Any) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
