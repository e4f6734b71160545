"""Logs that are opened and closed while their worker runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from danube_fast.broker import messages as m
from danube_fast.errors import DanubeError, DataLoss, FailedPrecondition, NotOwner
from danube_fast.frame.bundle import sealed_bundle
from tests.workers.shard_rig import RawClient, Rig

PATTERN = b"\x07" * 5000
PAYLOADS = [f"message {i}".encode() for i in range(50)]


@pytest.fixture
def rig(rigs: Callable[..., Rig]) -> Rig:
    """A worker with log 0, and partition 1 in it."""
    rig = rigs()
    rig.assign(1)
    return rig


def close(rig: Rig, log_id: int) -> None:
    ended: list[DanubeError | None] = []
    rig.worker.log_changes.close(log_id, ended.append)
    rig.turn(lambda: ended, f"the end of log {log_id}")
    assert ended == [None]


def open_log(rig: Rig, log_id: int) -> None:
    rig.worker.log_changes.open(log_id, str(rig.directory / f"log-{log_id}"))


def publish(client: RawClient, partition_id: int, payloads: list[bytes]) -> dict[str, int]:
    opened = client.open_producer(partition_id)
    first = opened["next_sequence"]
    statuses = client.publish((partition_id, client.frame(opened, first, payloads)))
    assert statuses == [0, first]
    return opened


def test_a_log_comes_and_goes_with_its_messages(rig: Rig) -> None:
    client = rig.client()
    open_log(rig, 7)
    rig.assign(2, log_id=7)
    stays = publish(client, 1, PAYLOADS)
    publish(client, 2, PAYLOADS)
    client.subscribe(2)
    assert [payload for _, payload in client.receive(50)] == PAYLOADS
    client.ack(0, 20)

    close(rig, 7)
    assert 2 not in rig.worker.state.catalog.by_id and list(rig.worker.state.logs) == [0]
    client.pump()
    assert [event[2] for event in client.events] == ["closed"]
    client.post(10, 2, "p")
    rig.turn(lambda: rig.mailbox.asked(m.FindOwner), "the question whose partition 2 is now")
    assert client.publish((1, client.frame(stays, 50, [b"on"]))) == [0, 50], "the other log goes on"

    open_log(rig, 7)
    rig.assign(2, log_id=7)
    again = client.open_producer(2)
    assert again["next_sequence"] == 50, "the producers of a log are known again"
    assert not rig.worker.state.leaving
    client.subscribe(2, consumer_id=2)
    client.send(21, 2, 1 << 30, 1 << 30)
    expected = list(zip(range(20, 50), PAYLOADS[20:], strict=True))
    assert client.receive(30) == expected, (
        "what was acked does not come again, and nothing is missing"
    )


def test_what_is_not_durable_yet_is_answered_before_the_end(rig: Rig) -> None:
    client = rig.client()
    open_log(rig, 7)
    rig.assign(2, log_id=7)
    opened = client.open_producer(2)
    request = client.post(11, parts=(_bundle(client, opened),))
    rig.turn(lambda: rig.worker.intake.messages_in, "the message")
    ended: list[DanubeError | None] = []
    rig.worker.log_changes.close(7, ended.append)
    with pytest.raises(FailedPrecondition, match="being closed already"):
        rig.worker.log_changes.close(7, ended.append)
    assert client.answer(request)[1] == [0, 0]
    rig.turn(lambda: ended, "the end of log 7")


def _bundle(client: RawClient, opened: dict[str, int]) -> bytes:
    return bytes(sealed_bundle([(2, client.frame(opened, 0, [b"acked"]))]))


def test_slots_are_used_again(rig: Rig) -> None:
    for log_id in (5, 6, 7):
        open_log(rig, log_id)
    close(rig, 6)
    open_log(rig, 8)
    assert {slot: log.log_id for slot, log in rig.worker.state.logs.items()} == {
        0: 0,
        1: 5,
        2: 8,
        3: 7,
    }
    for partition_id, log_id in ((2, 5), (3, 8), (4, 7)):
        rig.assign(partition_id, log_id=log_id)
        publish(rig.client(), partition_id, [b"x"])


def test_a_log_is_closed_clean(rig: Rig, rigs: Callable[..., Rig]) -> None:
    open_log(rig, 7)
    rig.assign(2, log_id=7, durability="memory")
    publish(rig.client(), 2, PAYLOADS)
    close(rig, 7)
    open_log(rig, 7)
    assert rig.worker.state.catalog.by_id[2].unsure_until == 0, "no offset is skipped"


def test_logs_that_cannot_be_opened_or_closed(rig: Rig) -> None:
    with pytest.raises(NotOwner, match="log 9 is not one of this worker"):
        rig.worker.log_changes.close(9, lambda error: None)
    with pytest.raises(FailedPrecondition):
        open_log(rig, 0)
    assert list(rig.worker.state.logs) == [0]
    publish(rig.client(), 1, [b"x"])


def test_an_older_copy_is_refused_and_let_go(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    open_log(rig, 7)
    close(rig, 7)
    restored: Any = rig.worker.restored

    def refuse(*slots: int) -> None:
        restored._begun.update(dict.fromkeys(slots, (7, 1, 0)))
        raise FailedPrecondition("an older copy")

    with monkeypatch.context() as patched:
        patched.setattr(restored, "look_at", refuse)
        with pytest.raises(FailedPrecondition, match="an older copy"):
            open_log(rig, 7)
    assert list(rig.worker.state.logs) == [0] and list(restored._begun) == [0]
    open_log(rig, 7)


def test_a_damaged_log_is_refused_and_leaves_nothing_behind(rig: Rig) -> None:
    """The damage is found behind messages that were taken up already."""
    open_log(rig, 7)
    rig.assign(2, log_id=7)
    client = rig.client()
    for _ in range(3):
        publish(client, 2, [PATTERN] * 10)
    close(rig, 7)
    segments = sorted((rig.directory / "log-7").glob("*.seg"))
    segment = [each for each in segments if PATTERN in each.read_bytes()][-1]
    for snapshot in (rig.directory / "log-7").glob("*.snap"):
        snapshot.unlink()
    whole = segment.read_bytes()
    damaged = bytearray(whole)
    damaged[damaged.rindex(PATTERN)] ^= 0xFF
    segment.write_bytes(damaged)
    with pytest.raises(DataLoss):
        open_log(rig, 7)
    assert list(rig.worker.state.logs) == [0] and list(rig.worker.state.catalog.by_id) == [1]
    publish(client, 1, PAYLOADS)
    segment.write_bytes(whole)
    open_log(rig, 7)
    rig.assign(2, log_id=7)
    client.subscribe(2)
    assert len(client.receive(30)) == 30
