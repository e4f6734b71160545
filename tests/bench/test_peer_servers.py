"""How the servers of RabbitMQ, Kafka, Redpanda and Danube are started, with programs of ours in their place.

Each reads the settings that it is given as the real one would and listens where they say. That a real one
takes the settings is not proved by that.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from danube_fast.bench.peers import danube, kafka, rabbitmq
from danube_fast.bench.peers.adapter import Adapter
from danube_fast.errors import Unavailable
from tests.workers.broker import is_running, wait_until

LISTEN = """#!{python}
import os, re, socket, sys
def listen(port):
    at = socket.create_server(("127.0.0.1", int(port)))
    while True: at.accept()[0].close()
"""
EPMD = "listen(sys.argv[sys.argv.index('-port') + 1])\n"
RABBIT = """
assert os.environ["RABBITMQ_ALLOW_INPUT"] and os.environ["HOME"] == os.getcwd()
socket.create_connection(("127.0.0.1", int(os.environ["ERL_EPMD_PORT"]))).close()
text = open(os.environ["RABBITMQ_CONFIG_FILE"]).read()
listen(re.fullmatch(r"listeners.tcp.1 = 127.0.0.1:([0-9]+)\\n", text)[1])
"""
JAVA = """
words = sys.argv[sys.argv.index("-cp") + 1 :]
assert words[0].endswith("/libs/*") and "-Xmx1G" in sys.argv, sys.argv
settings = dict(line.split("=", 1) for line in open(words[-1]).read().splitlines())
if words[1] == "kafka.tools.StorageTool":
    assert words[2] == "format" and words[4] == "--config", words
    name, _, cluster = words[3].partition("=")  # its first letter may be a dash
    assert name == "--cluster-id" and len(cluster) == 22
    sys.exit(os.mkdir(settings["log.dirs"]))
assert words[1] == "kafka.Kafka" and os.path.isdir(settings["log.dirs"]), "not formatted"
listen(re.match("PLAINTEXT://127.0.0.1:([0-9]+),", settings["listeners"])[1])
"""
DANUBE = """
text = open(sys.argv[sys.argv.index("--config-file") + 1]).read()
assert "mode: local" in text and f"local_wal_root: {os.getcwd()}/wal" in text
listen(re.search(r"client: ([0-9]+)", text)[1])
"""
REDPANDA = """
import json
node = json.load(open(sys.argv[sys.argv.index("--redpanda-cfg") + 1]))["redpanda"]
assert os.path.isdir(node["data_directory"]) and "--unsafe-bypass-fsync" not in sys.argv
listen(node["kafka_api"][0]["port"])
"""
PROGRAMS = {
    "epmd": EPMD,
    "rabbitmq-server": RABBIT,
    "java": JAVA,
    "danube-broker": DANUBE,
    "redpanda": REDPANDA,
}


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that the adapters find."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name, text in PROGRAMS.items():
        program = folder / name
        program.write_text(LISTEN.format(python=sys.executable) + text)
        program.chmod(0o755)

    def find(names: Sequence[str], variable: str = "") -> str | None:
        return next((str(folder / x) for x in names if (folder / x).exists()), None)

    for module in (danube, kafka, rabbitmq):
        monkeypatch.setattr(module, "find_program", find)
    jar = tmp_path / "kafka" / "libs" / "kafka_2.13-9.8.7.jar"
    jar.parent.mkdir(parents=True)
    jar.touch()
    monkeypatch.setenv("KAFKA_HOME", str(tmp_path / "kafka"))
    monkeypatch.setattr(rabbitmq, "PROGRAMS", ("rabbitmq-server",))
    monkeypatch.setattr(rabbitmq, "NAMES", ("epmd",))
    return folder


@pytest.mark.parametrize(
    "adapter",
    [rabbitmq.RabbitMQ(), kafka.Kafka(), kafka.Redpanda(), danube.Danube()],
    ids=lambda x: x.name,
)
def test_a_server_listens_where_it_is_told_and_leaves_nothing(
    adapter: Adapter, programs: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    running = adapter.start(folder, adapter.variants[0])
    assert running is not None
    servers = [running, *running._helpers]
    pids = [one._process.process.pid for one in servers]
    try:
        assert all(is_running(pid) for pid in pids)
        assert len(pids) == (2 if adapter.name == "rabbitmq" else 1)
    finally:
        running.stop()
    for pid in pids:
        wait_until("the end of each", lambda pid=pid: not is_running(pid))
    assert not [path for path in folder.iterdir() if path.is_dir()]


def test_a_node_that_does_not_start_takes_its_list_of_nodes_with_it(
    programs: Path, tmp_path: Path
) -> None:
    (programs / "rabbitmq-server").write_text("#!/bin/sh\necho no cookie >&2\nexit 1\n")
    with pytest.raises(Unavailable, match=r"rabbitmq-server did not start.*no cookie"):
        rabbitmq.RabbitMQ().start(tmp_path, rabbitmq.RabbitMQ.variants[0])
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"programs", "kafka"}


def test_a_folder_that_kafka_cannot_format_is_quoted(programs: Path, tmp_path: Path) -> None:
    (programs / "java").write_text("#!/bin/sh\necho no space here >&2\nexit 1\n")
    with pytest.raises(Unavailable, match="could not format a folder: no space here"):
        kafka.Kafka().start(tmp_path, kafka.Kafka.variants[0])


def test_kafka_is_found_by_a_variable_or_by_its_scripts(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kafka.Kafka().version().startswith("9.8.7, confluent-kafka ")
    assert kafka.Kafka().absence() is None
    monkeypatch.setenv("KAFKA_HOME", str(tmp_path / "nothing"))
    assert "KAFKA_HOME" in (kafka.Kafka().absence() or "")
    script = tmp_path / "kafka" / "bin" / "kafka-server-start.sh"
    script.parent.mkdir()
    monkeypatch.setattr(kafka, "find_program", lambda names, variable="": str(script))
    assert kafka.Kafka().absence() is None


def test_redpanda_makes_topics_of_one_partition_and_keeps_its_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words: list[str] = []
    monkeypatch.setattr(
        kafka, "start_server", lambda folder, name, command, *_: words.extend(command(7, folder))
    )
    kafka.Redpanda().start(tmp_path, kafka.Redpanda.variants[2])
    cluster: dict[str, Any] = json.loads((tmp_path / ".bootstrap.yaml").read_text())
    assert (cluster["auto_create_topics_enabled"], cluster["default_topic_partitions"]) == (True, 1)
    assert "write_caching_default" not in cluster
    assert not [word for word in words if "fsync" in word]


def test_the_version_of_rabbitmq_is_read_from_its_folder(programs: Path) -> None:
    made = rabbitmq.RabbitMQ()
    assert made.version().startswith("unknown, pika ")
    (programs.parent / "plugins").mkdir()
    (programs.parent / "plugins" / "rabbit-4.1.2").mkdir()
    assert made.version().startswith("4.1.2, pika ")
