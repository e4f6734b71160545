"""Logs or metadata put back from an older copy without the other: refused, or accepted and honest."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from danube_fast.workers.process.layout import METADATA_SEAL
from danube_fast.workers.process.log_marks import MARKS_NAME, LogMark, read_marks, write_marks
from tests.crash.rig import Server
from tests.damage.store import copy_of
from tests.damage.test_data_directory import refusal
from tests.workers.broker import wait_until

KEPT, LATER = "/default/kept", "/default/later"
REMEDY = "--accept-rollback"


def publish(server: Server, topic: str, *texts: str) -> list[int]:
    """The offsets that these got."""
    with server.client() as client:
        return [client.publish(topic, text.encode()).offset for text in texts]


def read(server: Server, topic: str) -> list[bytes]:
    with server.client() as client, client.reader(topic) as reader:
        return [message.payload for message in reader]


def receive(server: Server, count: int) -> list[bytes]:
    """The next messages of a subscription, acked durably."""
    with (
        server.client() as client,
        client.consumer(KEPT, subscription="s", initial_position="earliest") as consumer,
    ):
        messages = [consumer.receive(timeout=60) for _ in range(count)]
        found = [message for message in messages if message is not None]
        consumer.ack(found)
        consumer.flush_acks()
        return [message.payload for message in found]


def put_back(data: Path, older: Path, *names: str) -> None:
    """Replace some of a data directory by what an older copy has."""
    for name in names:
        target = data / name
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        source = older / name
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)


def end(server: Server, how: str, data: Path, starts: int) -> None:
    """End the broker behind its start number `starts`; before a kill the metadata has heard of that, which it
    may do a moment after the workers are ready."""

    def is_noted() -> bool:
        marks = read_marks(data / "metadata").values()
        return len(marks) == 2 and all(mark.epoch >= starts for mark in marks)

    if how == "kill":
        wait_until("the metadata to know the epochs of both logs", is_noted)
        server.kill("all")
    else:
        server.stop()


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_old_logs_under_new_metadata(tmp_path: Path, how: str) -> None:
    data = tmp_path / "data"
    with Server(data) as server:
        publish(server, KEPT, "a", "b")
        assert receive(server, 2) == [b"a", b"b"]
        end(server, how, data, 1)
        older = copy_of(data, tmp_path / "older")
        server.start()
        given = publish(server, KEPT, "c", "d")
        given_later = publish(server, LATER, "x", "y", "z")
        receive(server, 2)
        end(server, how, data, 2)
    put_back(data, older, "logs")
    for _ in range(2):
        _, said = refusal(data)
        assert said is not None, "it started without a word"
        assert "older copy" in said and REMEDY in said, said
        assert str(data / "logs") in said, said
    with Server(data, accept_rollback=True) as server:
        assert read(server, KEPT) == [b"a", b"b"]
        assert publish(server, KEPT, "e")[0] > max(given), "an offset is given out again"
        assert publish(server, LATER, "w")[0] > max(given_later), "an offset is given out again"
        assert read(server, KEPT) == [b"a", b"b", b"e"]
        assert read(server, LATER) == [b"w"]
        assert receive(server, 1) == [b"e"]
        server.stop()
    with Server(data) as server:
        assert read(server, KEPT) == [b"a", b"b", b"e"]
        assert read(server, LATER) == [b"w"]
        publish(server, KEPT, "f")


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_old_metadata_with_its_seal_under_new_logs(tmp_path: Path, how: str) -> None:
    data = tmp_path / "data"
    with Server(data) as server:
        publish(server, KEPT, "a", "b")
        end(server, how, data, 1)
        older = copy_of(data, tmp_path / "older")
        server.start()
        publish(server, LATER, "secret", "secret")
        given = publish(server, KEPT, "c")
        end(server, how, data, 2)
    put_back(data, older, "metadata", METADATA_SEAL)
    for _ in range(2):
        _, said = refusal(data)
        assert said is not None, "it started without a word"
        assert "older copy" in said and "metadata" in said and REMEDY in said, said
    with Server(data, accept_rollback=True) as server:
        names = ["/default/new", LATER]
        for name in names:
            publish(server, name, "mine")
            assert read(server, name) == [b"mine"], "messages of another topic are shown"
        assert publish(server, KEPT, "d")[0] > max(given)
        assert read(server, KEPT) == [b"a", b"b", b"c", b"d"]
        server.stop()
    with Server(data) as server:
        assert read(server, KEPT) == [b"a", b"b", b"c", b"d"]
        assert read(server, LATER) == [b"mine"]


def test_old_metadata_under_a_newer_seal_can_be_accepted_too(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with Server(data) as server:
        publish(server, KEPT, "a")
        server.stop()
        older = copy_of(data, tmp_path / "older")
        server.start()
        publish(server, LATER, "secret")
        server.stop()
    put_back(data, older, "metadata")
    _, said = refusal(data)
    assert said is not None and REMEDY in said, said
    with Server(data, accept_rollback=True) as server:
        publish(server, "/default/new", "mine")
        assert read(server, "/default/new") == [b"mine"]
        server.kill("all")
    with Server(data) as server:
        assert read(server, "/default/new") == [b"mine"]
        assert read(server, KEPT) == [b"a"]


def test_both_put_back_together_are_as_they_were(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with Server(data) as server:
        publish(server, KEPT, "a")
        server.stop()
        older = copy_of(data, tmp_path / "older")
        server.start()
        publish(server, KEPT, "b")
        server.stop()
    with Server(copy_of(older, data)) as server:
        assert read(server, KEPT) == [b"a"]


def test_marks_that_are_damaged_are_no_reason_to_refuse(tmp_path: Path) -> None:
    marks = {0: LogMark(0, 7, 1 << 40, 0)}
    write_marks(tmp_path, marks)
    assert read_marks(tmp_path) == marks
    path = tmp_path / MARKS_NAME
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        assert read_marks(tmp_path) in ({}, marks)
        path.write_bytes(whole[:at])
        assert read_marks(tmp_path) == {}
