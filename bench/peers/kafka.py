"""Servers of the Kafka protocol, Kafka itself and Redpanda, by confluent-kafka (librdkafka).

    sending     produce_batch() of slices of a list into a queue of 16 MiB, which librdkafka sends in
                batches; then flush(). acks=0, 1 or all is a variant
    receiving   poll() for the first message, consume() for those that are there besides; offsets are
                committed every 5 s (the client's default)

One topic with one partition for each run, made by asking for it. The consumer is given its partition:
groups are no part of what is compared, and the first of a group waits 3 s for others.
"""

from __future__ import annotations

import base64
import importlib.metadata
import json
import os
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from danube_fast.bench.peers.adapter import (
    WINDOW_BYTES,
    Adapter,
    Before,
    Receiver,
    Sender,
    Take,
    Variant,
    find_program,
    has_module,
    window_messages,
)
from danube_fast.bench.peers.server import HOST, Server, free_port, start_server
from danube_fast.bench.plan import LISTS
from danube_fast.errors import DeadlineExceeded, Unavailable

__all__ = ["Kafka", "Redpanda"]

JAVA = ("java",)
KAFKA_HOME = "KAFKA_HOME"
"""Environment variable: a folder with Kafka's jars in `libs`, as its archive unpacks, or as Maven puts them there."""
KAFKA_START = ("kafka-server-start.sh",)
SERVER_CLASS, STORAGE_CLASS = "kafka.Kafka", "kafka.tools.StorageTool"
JAVA_OPTIONS = (
    "-Xms1G",
    "-Xmx1G",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-Djava.awt.headless=true",
)
"""Those of Kafka's own scripts."""
REDPANDA = ("redpanda",)
TRANSPORT = "tcp"
RECEIVED_MAX = 10_000
GROUP = "bench"
PARTITION = 0
CALL_SECONDS = 60.0
QUEUE_STEP_SECONDS = 0.01
TOPIC_STEP_SECONDS = 0.05
BACKOFF_MS = 10
"""How long the client waits before it looks whether its full queue has room again; default: 1 s."""
START_SECONDS = 90.0
"""A Java server on two cores, and the same for formatting its folder."""
VERSION_SECONDS = 30


def _client(options: dict[str, Any]) -> dict[str, Any]:
    """Settings of either end. librdkafka's own words about a server that has gone go nowhere."""
    return {
        "bootstrap.servers": options["address"],
        "log_level": 0,
        "topic.metadata.refresh.interval.ms": -1,
    }


class _Sender(Sender):
    def __init__(self, options: dict[str, Any]) -> None:
        from confluent_kafka import Producer

        self._topic = options["topic"]
        self._window = window_messages(options["message_bytes"])
        self._failures: list[Any] = []
        self._client = Producer(
            _client(options)
            | {
                "acks": options["acks"],
                "queue.buffering.max.messages": self._window,
                # of two limits that which is ours: the messages
                "queue.buffering.max.kbytes": 4 * WINDOW_BYTES // 1024,
                "message.max.bytes": 2 * WINDOW_BYTES,
                "delivery.report.only.error": True,
            }
        )
        _wait_for_topic(self._client, self._topic)

    def _note(self, error: Any, message: Any) -> None:
        self._failures.append(error)

    def _check(self) -> None:
        if self._failures:
            raise Unavailable(f"the server did not take a message: {self._failures[0]}")

    def _flush(self) -> None:
        if self._client.flush(CALL_SECONDS):
            raise DeadlineExceeded(f"the server acked too little for {CALL_SECONDS:.0f} s")
        self._check()

    def send_lists(self, lists: Sequence[list[bytes]]) -> None:
        for one in lists:
            self._send(one)
        self._flush()

    def _send(self, one: list[bytes]) -> None:
        """Slices for which there is room: what does not fit would be overtaken by what follows."""
        client, start = self._client, 0
        deadline = time.monotonic() + CALL_SECONDS
        while start < len(one):
            room = self._window - len(client)
            if room <= 0:
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(f"no room in the queue for {CALL_SECONDS:.0f} s")
                client.poll(QUEUE_STEP_SECONDS)
                self._check()
                continue
            some: list[dict[str, Any]] = [
                {"value": payload} for payload in one[start : start + room]
            ]
            taken = client.produce_batch(
                self._topic, some, partition=PARTITION, on_delivery=self._note
            )
            if taken != len(some):
                reason = next((x["_error"] for x in some if "_error" in x), "no reason given")
                raise Unavailable(f"the client took {taken} of {len(some)} messages: {reason}")
            start += taken
        client.poll(0)
        self._check()

    def send_each(self, payloads: Sequence[bytes], before: Before) -> None:
        produce, topic, note = self._client.produce, self._topic, self._note
        for number, payload in enumerate(payloads):
            before(number)
            produce(topic, payload, partition=PARTITION, on_delivery=note)
            self._flush()  # and it does not linger

    def close(self) -> None:
        self._client.purge()


class _Receiver(Receiver):
    def __init__(self, options: dict[str, Any]) -> None:
        from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

        window = window_messages(options["message_bytes"])
        self._client = Consumer(
            _client(options)
            | {
                "group.id": GROUP,
                "allow.auto.create.topics": True,
                "queued.min.messages": min(window, 1_000_000),
                "queued.max.messages.kbytes": WINDOW_BYTES // 1024,
                "fetch.queue.backoff.ms": BACKOFF_MS,
                "fetch.message.max.bytes": WINDOW_BYTES,
            }
        )
        _wait_for_topic(self._client, options["topic"])
        self._client.assign([TopicPartition(options["topic"], PARTITION, OFFSET_BEGINNING)])

    def receive(self, take: Take, silence_seconds: float) -> None:
        poll, consume = self._client.poll, self._client.consume
        while True:
            first = poll(silence_seconds)
            if first is None:
                return
            messages = [first, *consume(RECEIVED_MAX, 0)]
            for message in messages:
                if message.error() is not None:
                    raise Unavailable(f"the server could not be read: {message.error()}")
            if not take([message.value() for message in messages]):
                return

    def close(self) -> None:
        self._client.close()


def _wait_for_topic(client: Any, topic: str) -> None:
    """Ask for a topic, which makes it, until its partition has a leader."""
    deadline = time.monotonic() + CALL_SECONDS
    while True:
        found = client.list_topics(topic, timeout=CALL_SECONDS).topics[topic]
        partition = found.partitions.get(PARTITION)
        if found.error is None and partition is not None and partition.error is None:
            return
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"the server made no topic {topic!r}: {found.error}")
        time.sleep(TOPIC_STEP_SECONDS)


class _Protocol(Adapter):
    """What the servers have in common: the client."""

    sender_kind, receiver_kind = _Sender, _Receiver

    @staticmethod
    def _client_absence() -> str | None:
        if has_module("confluent_kafka"):
            return None
        return "no Python client; pip install confluent-kafka"

    @staticmethod
    def _versions(command: Sequence[str], position: int) -> str:
        """The word of a server's answer that is its version, and that of the client."""
        words = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=VERSION_SECONDS
        ).stdout.split()
        server = words[position].lstrip("v") if words else "unknown"
        return f"{server}, {_Protocol._client_version()}"

    @staticmethod
    def _client_version() -> str:
        return f"confluent-kafka {importlib.metadata.version('confluent-kafka')}"


def _variant(system: str, acks: str, durability: str, **settings: str) -> Variant:
    options = {"acks": acks, "settings": settings}
    return Variant(
        f"{system} acks={acks}", durability, TRANSPORT, acks == "0", options, client=LISTS
    )


class Kafka(_Protocol):
    """Apache Kafka, one node in KRaft mode."""

    name = "kafka"
    variants = (
        _variant(
            "kafka", "0",
            "none: no ack; page cache, flush left to the kernel (log.flush.* default)",
        ),
        _variant(
            "kafka", "1",
            "acked from the page cache, flush left to the kernel (log.flush.* default)",
        ),
        _variant(
            "kafka", "all",
            "acked from the page cache of every replica (one), flush left to the kernel"
            " (log.flush.* default)",
        ),
        _variant(
            "kafka", "all",
            "fsync of each batch before its ack (log.flush.interval.messages=1), one replica",
            **{"log.flush.interval.messages": "1"},
        ),
    )  # fmt: skip

    def absence(self) -> str | None:
        """Java, the server or the client."""
        if find_program(JAVA) is None:
            return "no java on PATH; install a Java runtime (17 or newer)"
        if _kafka_jars() is None:
            return (
                f"no kafka-server-start.sh on PATH and no {KAFKA_HOME}; install Apache Kafka, or set"
                f" {KAFKA_HOME} to a folder whose libs has its jars (docs/peers.md)"
            )
        return self._client_absence()

    def version(self) -> str:
        """Of Kafka, by the name of its jar, and confluent-kafka."""
        names = [path.stem for path in (_kafka_jars() or Path()).glob("kafka_*.jar")]
        server = names[0].rpartition("-")[2] if names else "unknown"
        return f"{server}, {self._client_version()}"

    def start(self, folder: Path, variant: Variant) -> Server | None:
        """One node that is broker and controller; its folder is formatted first."""

        def command(port: int, data: Path) -> list[str]:
            controller = free_port()
            settings = {
                "process.roles": "broker,controller",
                "node.id": "1",
                "controller.quorum.voters": f"1@{HOST}:{controller}",
                "controller.listener.names": "CONTROLLER",
                "listeners": f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller}",
                "advertised.listeners": f"PLAINTEXT://{HOST}:{port}",
                "log.dirs": str(data / "log"),
                "num.partitions": "1",
                "auto.create.topics.enable": "true",
                "offsets.topic.replication.factor": "1",
                "message.max.bytes": str(2 * WINDOW_BYTES),
            } | variant.options["settings"]
            file = data / "server.properties"
            file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
            java = [find_program(JAVA) or JAVA[0], *JAVA_OPTIONS, "-cp", f"{_kafka_jars()}/*"]
            words = ["format", f"--cluster-id={_cluster_id()}", "--config", str(file)]
            _format([*java, STORAGE_CLASS, *words])
            return [*java, SERVER_CLASS, str(file)]

        return start_server(folder, self.name, command, START_SECONDS)


def _kafka_jars() -> Path | None:
    """The folder of Kafka's jars; None: there is none."""
    homes = [Path(os.environ[KAFKA_HOME])] if os.environ.get(KAFKA_HOME) else []
    script = find_program(KAFKA_START)
    if script is not None:
        homes.append(Path(script).resolve().parents[1])
    for home in homes:
        if any((home / "libs").glob("kafka_*.jar")):
            return home / "libs"
    return None


def _cluster_id() -> str:
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")


def _format(command: Sequence[str]) -> None:
    """Prepare Kafka's folder. Raises Unavailable."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=START_SECONDS
    )
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split())
        raise Unavailable(f"Kafka could not format a folder: {words[-400:]}")


class Redpanda(_Protocol):
    """Redpanda, one node on one core."""

    name = "redpanda"
    variants = (
        _variant(
            "redpanda", "0", "none: no ack; fsync follows raft_replica_max_flush_delay_ms (default)"
        ),
        _variant(
            "redpanda",
            "1",
            "acked before fsync, which follows raft_replica_max_flush_delay_ms (default)",
        ),
        _variant(
            "redpanda", "all", "fsync before each ack (write_caching_default false), one replica"
        ),
    )

    def absence(self) -> str | None:
        """The server or the client."""
        if find_program(REDPANDA) is None:
            return "no redpanda on PATH; install Redpanda"
        return self._client_absence()

    def version(self) -> str:
        """Of Redpanda and confluent-kafka."""
        return self._versions([find_program(REDPANDA) or REDPANDA[0], "--version"], 0)

    def start(self, folder: Path, variant: Variant) -> Server | None:
        """One node; it shares its core with others."""
        program = find_program(REDPANDA) or REDPANDA[0]

        def command(port: int, data: Path) -> list[str]:
            def at(number: int) -> dict[str, Any]:
                return {"address": HOST, "port": number}

            node = {
                "data_directory": str(data / "log"),
                "empty_seed_starts_cluster": True,
                "seed_servers": [],
                "rpc_server": at(free_port()),
                "kafka_api": [at(port)],
                "advertised_kafka_api": [at(port)],
                "admin": [at(free_port())],
                "developer_mode": True,  # no checks of the machine; fsync stays
            }
            (data / "log").mkdir()
            file = data / "redpanda.yaml"
            file.write_text(json.dumps({"redpanda": node}))  # JSON is YAML
            cluster = {"auto_create_topics_enabled": True, "default_topic_partitions": 1}
            cluster["kafka_batch_max_bytes"] = 2 * WINDOW_BYTES
            (data / ".bootstrap.yaml").write_text(json.dumps(cluster))
            options = ["--smp", "1", "--memory", "1G", "--overprovisioned", "--reserve-memory"]
            options += ["0M", "--default-log-level", "error"]
            return [program, "--redpanda-cfg", str(file), *options]

        return start_server(folder, self.name, command, START_SECONDS)
