"""The same rows in Kafka, for Spark's own Kafka source: where a server, and the jars of the source, are present."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from danube_fast.bench.load.payloads import Payloads
from danube_fast.bench.peers.kafka import Kafka
from danube_fast.errors import Internal

__all__ = ["has_kafka", "kafka_settings", "kafka_topic", "read_kafka"]

JARS = "SPARK_KAFKA_JARS"
"""Environment variable: a folder with the jars of spark-sql-kafka-0-10, as Maven's dependency:copy-dependencies leaves
them: itself, spark-token-provider-kafka-0-10, kafka-clients, commons-pool2."""
TOPIC = "rows"
LIST = 100_000
"""Messages that are sent together."""


def has_kafka() -> bool:
    """Whether a server and the source are here (docs/peers.md)."""
    return bool(_jars()) and Kafka().absence() is None


def kafka_settings() -> dict[str, str]:
    """Settings of a session that has Spark's Kafka source."""
    return {"spark.jars": ",".join(_jars())}


@contextlib.contextmanager
def kafka_topic(payloads: Payloads) -> Iterator[str]:
    """Run a server whose topic has these payloads; its address."""
    system = Kafka()
    (variant,) = [each for each in system.variants if each.options["acks"] == "1"]
    with tempfile.TemporaryDirectory(prefix="df-kafka-") as folder:
        server = system.start(Path(folder), variant)
        if server is None:
            raise Internal("Kafka was started without a server")
        try:
            options = {
                "address": server.address, "topic": TOPIC, "message_bytes": len(payloads[0]),
                "acks": variant.options["acks"],
            }  # fmt: skip
            sender = system.open_sender(options)
            try:
                for at in range(0, payloads.count, LIST):
                    some = range(at, min(at + LIST, payloads.count))
                    sender.send_lists([[payloads[number] for number in some]])
            finally:
                sender.close()
            yield server.address
        finally:
            server.stop()


def read_kafka(spark: Any, address: str) -> Any:
    """Make a data frame of the topic's offsets and payloads."""
    rows = spark.read.format("kafka").options(
        **{"kafka.bootstrap.servers": address, "subscribe": TOPIC, "startingOffsets": "earliest"}
    )
    return rows.load().selectExpr("offset", "value as payload")


def _jars() -> list[str]:
    folder = os.environ.get(JARS)
    found = sorted(Path(folder).glob("*.jar")) if folder else []
    has_source = any(path.name.startswith("spark-sql-kafka-0-10") for path in found)
    return [str(path) for path in found] if has_source else []
