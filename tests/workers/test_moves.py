"""A move is cut short at every message, by the death of each of those who take part: afterwards one worker
has the partition, the one that the metadata names, with every message, window, cursor and policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.broker import messages as m
from danube_fast.broker.admission.tables import AdmissionTables
from danube_fast.broker.records import Moving, decode_snapshot
from danube_fast.errors import FailedPrecondition, NotOwner, ResourceExhausted, Unavailable
from danube_fast.workers.shard.catalog import Catalog
from danube_fast.workers.shard.move import arrival, departure
from tests.workers.move_rig import COORDINATOR, MoveRig
from tests.workers.shard_rig import FakeRequest, RawClient, Shifted

FRAMES = 12
PER_FRAME = 10
ACKED = 57
NAME = "p"
EVERYBODY = (COORDINATOR, 1, 2)
OK, DUPLICATE = 0, 1
SHORT_NS, LONG_NS = 1_000_000, 3600 * 1_000_000_000
"""How long last acks are waited for."""


def payloads(frame: int) -> list[bytes]:
    return [b"%d" % number for number in range(frame * PER_FRAME, (frame + 1) * PER_FRAME)]


class Story:
    """One partition's life: published to, consumed a part of, moved."""

    def __init__(self, rig: MoveRig, **options: Any) -> None:
        self.rig = rig
        self.pid = rig.create(**options).partition_id
        self.memory = options.get("durability") == "memory"
        self.frames: list[bytes] = []
        client = rig.workers[1].client()
        opened = client.open_producer(self.pid, NAME)
        for frame in range(FRAMES):
            self._publish(client, opened, frame)
        reply = client.subscribe(self.pid, "s", kind="shared")
        assert reply[0] == 67, reply
        client.receive(FRAMES * PER_FRAME)
        client.ack(0, ACKED - 10, ACKED - 5, ACKED)  # with a hole
        self.count = FRAMES * PER_FRAME

    def _publish(self, client: RawClient, opened: dict[str, int], frame: int) -> None:
        sealed = client.frame(opened, opened["next_sequence"] + (frame - opened["next_sequence"] // PER_FRAME) * PER_FRAME, payloads(frame))  # fmt: skip
        statuses = client.publish((self.pid, sealed))
        assert statuses == [OK, frame * PER_FRAME]

    def check(self, *, lost_memory: bool = False) -> None:
        """Everything is where the metadata says, once."""
        owner = self.rig.owner()
        for session in list(owner.worker.state.sessions):
            owner.worker.consumers.close_session(session)
        client = owner.client()
        opened = client.open_producer(self.pid, NAME)
        assert opened["next_sequence"] == self.count, "the window was lost"
        again = client.frame(opened, self.count - PER_FRAME, payloads(self.count // PER_FRAME - 1))
        assert client.publish((self.pid, again)) == [DUPLICATE, self.count - PER_FRAME]
        partition = owner.worker.state.catalog.by_id[self.pid]
        sub = partition.subscriptions["s"]
        assert sub.cursor == ACKED - 10
        if not lost_memory:
            reply = client.subscribe(self.pid, "r", consumer_id=7, kind="reader")
            assert reply[0] == 67, reply
            first = partition.first_offset
            got = client.receive(self.count - first)
            assert got == [(n, b"%d" % n) for n in range(first, self.count)]
            assert first <= ACKED - 10
            reply = client.subscribe(self.pid, "s", consumer_id=8, kind="shared")
            assert reply[0] == 67, reply
            wanted = [n for n in range(ACKED - 10, self.count) if not ACKED - 5 <= n < ACKED]
            assert sorted(offset for offset, _ in client.receive(len(wanted))) == wanted
        base = partition.visible
        frame = self.count // PER_FRAME
        sealed = client.frame(opened, self.count, payloads(frame))
        statuses = client.publish((self.pid, sealed))
        assert statuses[0] == OK
        assert statuses[1] >= base
        if not lost_memory:
            assert statuses[1] == self.count, "an offset was skipped"
        self.count += PER_FRAME
        client.socket.close(linger=0)
        owner.clients.remove(client)


@pytest.fixture
def moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(departure, "DRAIN_NS", SHORT_NS)
    started: list[MoveRig] = []

    def start(**settings: Any) -> MoveRig:
        rig = MoveRig(tmp_path / f"data{len(started)}", **settings)
        started.append(rig)
        return rig

    yield start
    for rig in started:
        rig.stop()


@pytest.mark.parametrize("durability", ["fsync", "os", "memory"])
def test_there_and_back_again_with_everything(moves: Any, durability: str) -> None:
    rig = moves()
    story = Story(rig, durability=durability)
    for number in range(4):
        outcome = rig.start_move(1 - rig.partition().log_id)
        rig.settle()
        ((value, error),) = outcome
        assert error is None, error
        assert value["to_worker"] == (number + 1) % 2
        story.check()


def test_the_steps_are_few_enough_to_try_every_one(moves: Any) -> None:
    rig = moves()
    Story(rig)
    rig.net.delivered.clear()
    rig.start_move(1)
    rig.settle()
    asked = [name for name in rig.net.delivered if name != "reply"]
    assert asked == ["CopyPartition", "ReadPartition", "FreezePartition", "FinishMove", "ReadState",
                     "PartitionMoved", "Assign"]  # fmt: skip


@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize("victim", EVERYBODY)
def test_a_death_at_every_message_of_a_move(moves: Any, victim: int, heard: bool) -> None:
    """`heard`: it dies at once, with nothing written since the message, but what it said arrives."""
    rig = moves()
    story = Story(rig, durability="os" if heard else "fsync")
    moved = stayed = steps = 0
    while True:
        before = rig.partition().log_id
        outcome = rig.start_move(1 - before)
        for _ in range(steps):
            if not rig.step():
                break
        is_over = not rig.net.queue and bool(outcome)
        if heard:
            rig.net.step()
        rig.crash(victim, heard=heard)
        rig.settle()
        if rig.partition().log_id == before:
            stayed += 1
        else:
            moved += 1
        story.check()
        if is_over:
            break
        steps += 1
    assert min(moved, stayed) > 0
    assert steps > 10


@pytest.mark.parametrize("workers", [(2, 1), (2, 1, 2)])
def test_all_die_in_the_middle_and_fewer_workers_take_the_logs(moves: Any, workers: Any) -> None:
    steps = 0
    is_over = False
    rig = moves()
    story = Story(rig)
    while not is_over:
        outcome = rig.start_move(1 - rig.partition().log_id)
        for _ in range(steps):
            if not rig.step():
                break
        is_over = not rig.net.queue and bool(outcome)
        for count in workers[1:]:
            rig.restart_all(count)
            story.check()
        if rig.worker_count == 1:
            rig.restart_all(2)
        steps += 1
    assert steps > 10


@pytest.mark.parametrize("victim", EVERYBODY)
def test_a_memory_topic_is_lost_with_its_worker_only(moves: Any, victim: int) -> None:
    steps = 0
    is_over = False
    while not is_over:
        rig = moves()
        story = Story(rig, durability="memory")
        outcome = rig.start_move(1)
        for _ in range(steps):
            if not rig.step():
                break
        is_over = not rig.net.queue and bool(outcome)
        began = "FreezePartition" in rig.net.delivered
        rig.crash(victim)
        rig.settle()
        # a move that begins after the death of the old worker moves what that left
        lost = victim == 1 if not began else rig.owner() is rig.workers.get(victim)
        if not lost:
            story.check()
        else:
            rig.owner()
        steps += 1
    assert steps > 10


def test_a_topic_that_is_deleted_meanwhile_is_gone_everywhere(moves: Any) -> None:
    rig = moves()
    story = Story(rig)
    rig.start_move(1)
    for _ in range(5):
        rig.step()
    directory = rig.coordinator.topics
    _, partitions = directory.delete("/default/t")
    rig.coordinator.mover.give_up([story.pid], "it was deleted")
    rig.coordinator.placement.forget(partitions)
    rig.coordinator.box.call(1, m.Unassign([story.pid]), on_reply=lambda reply: None)
    rig.settle()
    for worker in rig.workers.values():
        assert story.pid not in worker.worker.state.catalog.by_id


def test_moves_that_cannot_be_say_why(moves: Any) -> None:
    rig = moves()
    Story(rig)
    outcome = rig.start_move(1)
    with pytest.raises(FailedPrecondition, match="being moved already"):
        rig.start_move(1)
    rig.settle()
    assert outcome[0][1] is None
    worker = rig.workers.pop(2)
    with pytest.raises(Unavailable, match="worker 1 is down"):
        rig.start_move(0)
    rig.workers[2] = worker
    rig.start_move(0)
    rig.settle()
    rig.owner()


def test_publishers_and_consumers_are_told_where_to_go(moves: Any) -> None:
    rig = moves()
    story = Story(rig)
    client = rig.workers[1].client()
    opened = client.open_producer(story.pid, NAME)
    assert client.subscribe(story.pid, "s", kind="shared")[0] == 67
    rig.start_move(1)
    while "FreezePartition" not in rig.net.delivered:
        rig.step()
    known = rig.workers[1].worker.state.catalog.by_id[story.pid]
    rig.workers[1].turn(lambda: known.moving, "the end of waiting for last acks")
    statuses = client.publish((story.pid, client.frame(opened, story.count, payloads(FRAMES))))
    assert statuses[0] == 8, "not now"
    client.pump()
    (event,) = client.events
    assert event[3]["code"] == 36
    assert client.subscribe(story.pid, "s", kind="shared")[2] == 36
    rig.settle()
    statuses = client.publish((story.pid, client.frame(opened, story.count, payloads(FRAMES))))
    assert statuses[0] == 36, "not here"
    rig.start_move(0)
    rig.settle()
    statuses = client.publish((story.pid, client.frame(opened, story.count, payloads(FRAMES))))
    assert statuses[0] == 36, "here again, but it has to be opened: it is no ghost"
    again = client.open_producer(story.pid, NAME)
    assert again["next_sequence"] == story.count
    statuses = client.publish((story.pid, client.frame(opened, story.count, payloads(FRAMES))))
    assert statuses[0] == 34, "an older life of it is"
    story.check()


def ask(rig: MoveRig, worker: int, message: m.Message) -> FakeRequest:
    """Call a handler at once."""
    request = FakeRequest(message)
    rig.workers[worker].mailbox.handlers[type(message)](request)
    return request


def test_an_answer_that_comes_late_decides_nothing_new(moves: Any) -> None:
    """It was given before the move began, and opens nothing that the move has closed."""
    rig = moves()
    story = Story(rig)
    worker = rig.workers[1].worker
    worker.assignments.ask()
    assert rig.net.step(), "the coordinator is asked, its answer is on its way"
    frozen = ask(rig, 1, m.FreezePartition(story.pid, 2))
    rig.settle()
    assert frozen.done
    assert frozen.error is None
    assert worker.state.catalog.by_id[story.pid].moving is Moving.LEAVING
    worker.assignments.ask()
    rig.settle()
    assert not worker.state.catalog.by_id[story.pid].moving, "this one was asked with it"
    story.check()


def test_a_snapshot_knows_what_is_undecided(moves: Any) -> None:
    rig = moves()
    story = Story(rig)
    ask(rig, 1, m.FreezePartition(story.pid, 2))
    rig.settle()
    worker = rig.workers[1].worker
    restored = Catalog(AdmissionTables())
    for record in decode_snapshot(worker.checkpoints.encode(0, clean=False)):
        restored.apply(record, 0)
    partition = restored.by_id[story.pid]
    assert (partition.moving, partition.moving_epoch) == (Moving.LEAVING, 2)
    assert partition.refusal
    ask(rig, 1, m.CancelMove(story.pid))
    story.check()


def test_messages_of_memory_topics_that_were_acked_meanwhile_do_not_come_along(moves: Any) -> None:
    rig = moves()
    story = Story(rig, durability="memory")
    partition = rig.workers[1].worker.state.catalog.by_id[story.pid]
    rig.workers[1].turn(lambda: partition.first_offset, "giving back what everybody acked")
    first = partition.first_offset
    rig.start_move(1)
    rig.settle()
    arrived = rig.workers[2].worker.state.catalog.by_id[story.pid]
    assert arrived.first_offset == first
    assert [stored.base_offset for stored in arrived.tail_frames()] == list(
        range(arrived.first_offset, story.count, PER_FRAME)
    )
    story.check()


def test_a_partition_that_is_published_to_faster_than_it_is_copied_stays(
    moves: Any, monkeypatch: Any
) -> None:
    """Two frames come for each one that is copied, for as long as that is watched."""
    monkeypatch.setattr(departure, "PIECE_BYTES", 1)
    rig = moves()
    story = Story(rig)
    copier = rig.workers[2].worker
    clock = copier.state.clock = Shifted(copier.state.clock)
    client = rig.workers[1].client()
    opened = client.open_producer(story.pid, NAME)
    outcome = rig.start_move(1)
    started_ns = clock.ahead_ns
    while not outcome and clock.ahead_ns - started_ns < 3 * arrival.PACE_NS:
        rig.step()
        sealed = client.frame(opened, story.count, payloads(story.count // PER_FRAME))
        assert client.publish((story.pid, sealed)) == [OK, story.count], "publishing goes on"
        story.count += PER_FRAME
        clock.ahead_ns += 1_000_000_000
    assert outcome, "it copies for ever"
    ((value, error),) = outcome
    assert value is None
    assert isinstance(error, ResourceExhausted)
    assert "faster than it can be copied" in str(error)
    rig.settle()
    assert rig.owner() is rig.workers[1]
    assert not copier.arrivals.is_busy
    story.check()
    rig.start_move(1)
    rig.settle()
    assert rig.owner() is rig.workers[2], "at a quieter time"
    story.check()


def test_a_disk_that_failed_while_an_arrival_waited_for_it_ends_the_move_alone(
    moves: Any, monkeypatch: Any
) -> None:
    rig = moves()
    story = Story(rig)
    outcome = rig.start_move(1)
    while "ReadState" not in rig.net.delivered:
        assert rig.step()
    with monkeypatch.context() as patched:
        patched.setattr(arrival, "UNSYNCED_BYTES_MAX", -1)  # the disk is far behind
        rig.step()
        (waiting,) = rig.workers[2].worker.arrivals._arriving.values()
        assert waiting.waits
        waiting.log_epoch -= 1  # and then a sync failed
    rig.settle()
    ((_, error),) = outcome
    assert isinstance(error, Unavailable)
    assert "disk" in str(error)
    assert rig.owner() is rig.workers[1]
    story.check()
    rig.start_move(1)
    rig.settle()
    story.check()


@pytest.mark.parametrize(
    "asked",
    [
        lambda pid: m.DeleteSubscription([pid], "s"),
        lambda pid: m.SetFailurePolicy([pid], "s", {"ack_timeout_ms": 7}),
    ],
)
def test_what_a_move_would_undo_is_refused_while_it_is_decided(
    moves: Any, asked: Callable[[int], m.Message]
) -> None:
    """The new log has the state as it was when the old one was closed."""
    rig = moves()
    story = Story(rig)
    outcome = rig.start_move(1)
    while "ReadState" not in rig.net.delivered:
        assert rig.step()
    with pytest.raises(Unavailable, match="being moved"):
        rig.workers[1].operation(asked(story.pid))
    rig.settle()
    assert outcome[0][1] is None
    story.check()
    assert rig.workers[2].operation(asked(story.pid))


class Held:
    """A consumer that holds ten messages of a partition that is about to move."""

    def __init__(self, rig: MoveRig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(departure, "DRAIN_NS", LONG_NS)
        self.rig = rig
        self.pid = rig.create().partition_id
        self.client = client = rig.workers[1].client()
        opened = client.open_producer(self.pid, NAME)
        client.publish((self.pid, client.frame(opened, 0, payloads(0))))
        client.subscribe(self.pid, "s", kind="shared")
        client.receive(PER_FRAME)
        self.outcome = rig.start_move(1)

        def is_told() -> bool:
            rig.step()
            client.pump()
            return bool(client.events)

        rig.workers[1].turn(is_told, "CLOSED")
        assert client.events[0][3]["code"] == 36
        assert not self.outcome

    def left(self) -> list[int]:
        """What is delivered where the partition is then."""
        self.rig.settle()
        ((_, error),) = self.outcome
        assert error is None, error
        client = self.rig.workers[2].client()
        client.subscribe(self.pid, "s", kind="shared")
        sub = self.rig.workers[2].worker.state.catalog.by_id[self.pid].subscriptions["s"]
        wanted = [at for at in range(sub.cursor, PER_FRAME) if at not in {5, 7}]
        return [offset for offset, _ in client.receive(len(wanted))] if wanted else []


def test_what_is_acked_when_the_move_is_told_counts(
    moves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(moves(), monkeypatch)
    held.client.ask(22, [[1, [0, 3, 5, 6, 7, 8]]])
    assert held.client.ask(25, 1)[0] == 67
    assert held.left() == [3, 4, 6, 8, 9]


def test_who_never_says_that_it_has_left_is_not_waited_for_long(
    moves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows nothing of last acks: what is on the way counts all the same."""
    held = Held(moves(), monkeypatch)
    held.client.ack(0, PER_FRAME)
    monkeypatch.setattr(departure, "DRAIN_NS", SHORT_NS)
    assert held.left() == []
    ((value, _),) = held.outcome
    assert value["paused_ms"] <= value["milliseconds"]


def test_nothing_but_acks_is_taken_of_who_was_sent_away(
    moves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(moves(), monkeypatch)
    client = held.client
    client.send(23, [[1, [0, 3]]], 0)
    assert client.ask(24, 1, "earliest")[2] == NotOwner.code
    assert client.subscribe(held.pid, "s", kind="shared", consumer_id=2)[2] == NotOwner.code
    sub = held.rig.workers[1].worker.state.catalog.by_id[held.pid].subscriptions["s"]
    assert (sub.ledger.unacked, sub.ledger.waiting) == (PER_FRAME, 0)
    assert client.ask(25, 1)[0] == 67
    held.rig.settle()
    assert held.outcome[0][1] is None


def test_a_move_that_is_given_up_meanwhile_leaves_its_consumers_free(
    moves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(moves(), monkeypatch)
    held.rig.coordinator.mover.give_up([held.pid], "the test says so")
    held.client.ask(22, [[1, [0, 3]]])
    held.client.ask(25, 1)
    held.rig.settle()
    assert isinstance(held.outcome[0][1], FailedPrecondition)
    assert held.client.subscribe(held.pid, "s", kind="shared")[0] == 67
    assert [offset for offset, _ in held.client.receive(7)] == list(range(3, PER_FRAME))
