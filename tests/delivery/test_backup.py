"""Backup and restore of real brokers: messages, positions, users and sign-ons are those of the time of the backup."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.errors import PermissionDenied
from tests.crash.rig import Server
from tests.delivery.test_security import SecuredServer
from tests.faults.rig import read_all
from tests.workers.broker import ROOT, is_running, wait_until

PROGRAM = [sys.executable, "-m", "danube_fast.cli.main"]
TOPIC = "/shop/orders"
COUNT = 2000
SECONDS = 60.0


def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command as a person would."""
    return subprocess.run(
        [*PROGRAM, *map(str, words)], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )  # fmt: skip


def done(*words: str | Path) -> Any:
    """Run a command that must end well; its JSON."""
    found = command(*words, "-o", "json")
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


class Place(SecuredServer):
    """A secured broker whose clients keep their keys when its data move."""

    def kill_everything(self) -> None:
        """SIGKILL of all its processes."""
        broker = self.broker
        assert broker is not None
        broker.process.kill()
        broker.process.wait(SECONDS)
        wait_until("end of all", lambda: not any(map(is_running, broker.pids)))
        self._release()

    def moved(self, data_dir: Path) -> Place:
        """The same, with the data directory that was restored; neither runs."""
        other = Place(data_dir, self.folder)
        other.keys = dict(self.keys)
        return other


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Place]:
    secured = Place(tmp_path / "data", tmp_path)
    with secured:
        secured.make_ann()
        with secured.come_in("ann") as ann:
            ann.admin.create_namespace("shop")
            secured.add(ann.admin, "pia", ("producer", TOPIC), ("consumer", TOPIC))
            ann.admin.create_topic(TOPIC, partitions=2)
        yield secured


def publish(server: Place, first: int, count: int) -> None:
    with (
        server.come_in("pia") as pia,
        pia.producer(TOPIC, name="p", durability="fsync") as producer,
    ):
        for number in range(first, first + count):
            producer.send(b"%d" % number, key=f"k{number % 9}")
        producer.flush(timeout=SECONDS)


def receive(consumer: Any, count: int) -> list[int]:
    """Numbers of the next messages, acked."""
    found: list[int] = []
    while len(found) < count:
        message = consumer.receive(timeout=SECONDS)
        assert message is not None, f"{len(found)} of {count} came"
        consumer.ack(message)
        found.append(int(message.payload))
    consumer.flush_acks()
    return found


def test_the_same_broker_at_an_earlier_time(server: Place, tmp_path: Path) -> None:
    publish(server, 0, COUNT)
    with (
        server.come_in("pia") as pia,
        pia.consumer(TOPIC, subscription="s", initial_position="earliest") as consumer,
    ):
        first = receive(consumer, COUNT // 2)
    running = command("backup", "--data-dir", server.data_dir, tmp_path / "saved")
    assert running.returncode == 4 and "stop that one" in running.stderr
    assert str(server.broker.process.pid if server.broker else "") in running.stderr
    server.stop()
    made = done("backup", "--data-dir", server.data_dir, tmp_path / "saved")
    assert made["secrets"] == ["server.key"] and made["secrets_left_out"] == []
    assert made["left_out"] == [], "the broker made a file that backups do not know"
    server.start()
    with server.come_in("ann") as ann:  # what comes behind the backup is not in it
        ann.admin.delete_security("credential", f"curve:{server.keys['pia']}")
        server.add(ann.admin, "late", ("consumer", TOPIC))
    server.stop()

    restored = done("restore", tmp_path / "saved", "--data-dir", tmp_path / "new")
    assert restored["broker"] == made["broker"] and restored["secrets"] == ["server.key"]
    other = server.moved(tmp_path / "new")
    with other:
        with pytest.raises(PermissionDenied):
            other.come_in("late", timeout=5.0)
        publish(other, COUNT, 100)  # with the key that was revoked meanwhile
        with other.come_in("pia") as pia:
            with pia.consumer(TOPIC, subscription="s") as consumer:
                rest = receive(consumer, COUNT // 2 + 100)
            with pia.consumer(TOPIC, subscription="t", initial_position="earliest") as consumer:
                everything = receive(consumer, COUNT + 100)
        assert sorted(first + rest) == sorted(everything) == list(range(COUNT + 100))
        with other.come_in("ann") as ann:
            names = {row["name"] for row in ann.admin.list_security("principal")}
        assert names == {"ann", "bootstrap-admin", "pia"}
        other.stop()


def test_a_broker_that_was_killed(server: Place, tmp_path: Path) -> None:
    """What was acked before SIGKILL is in the backup of what the kill left behind."""
    publish(server, 0, COUNT)
    server.kill_everything()
    done("backup", "--data-dir", server.data_dir, tmp_path / "saved")
    shutil.rmtree(server.data_dir)
    done("restore", tmp_path / "saved", "--data-dir", server.data_dir)
    server.start()
    with (
        server.come_in("pia") as pia,
        pia.consumer(TOPIC, subscription="s", initial_position="earliest") as consumer,
    ):
        assert sorted(receive(consumer, COUNT)) == list(range(COUNT))
    server.stop()


def test_a_copy_without_secrets_does_not_start(server: Place, tmp_path: Path) -> None:
    server.stop()
    text = command("backup", "--without-secrets", "--data-dir", server.data_dir, tmp_path / "saved")
    assert text.returncode == 0 and "left out: server.key" in text.stdout
    assert "security recover" in text.stdout and "issuers.toml" in text.stdout
    restored = command("restore", tmp_path / "saved", "--data-dir", tmp_path / "new")
    assert restored.returncode == 0 and f"recover --data-dir {tmp_path / 'new'}" in restored.stdout
    serve = command("serve", "--auth", "required", "--data-dir", tmp_path / "new", "--listen", "127.0.0.1:0")  # fmt: skip
    assert serve.returncode and "server.key is gone" in serve.stderr, serve.stderr
    shutil.copy2(server.data_dir / "server.key", tmp_path / "new/server.key")
    other = server.moved(tmp_path / "new")
    with other, other.come_in("ann") as ann:
        assert ann.admin.cluster_status()["auth"] == "required"


def test_a_broker_without_auth(tmp_path: Path) -> None:
    """Logs whose indexes and spare segments are made again, under another number of workers."""
    server = Server(tmp_path / "data", workers=2)
    with server:
        with server.client() as client, client.producer("/default/t", partitions=4) as producer:
            for number in range(COUNT):
                producer.send(b"%d" % number, key=f"k{number}")
            producer.flush(timeout=SECONDS)
        server.stop()
    done("backup", "--data-dir", tmp_path / "data", tmp_path / "saved")
    done("restore", tmp_path / "saved", "--data-dir", tmp_path / "new")
    assert not list((tmp_path / "new").glob("logs/*/spare-*"))
    other = Server(tmp_path / "new", workers=3)
    with other:
        with other.client() as client:
            found = [int(message.payload) for message in read_all(client, "/default/t")]
        assert sorted(found) == list(range(COUNT))
        other.stop()
