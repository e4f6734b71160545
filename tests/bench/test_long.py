"""Runs that go on: messages sent in turn, the sustained log beside bare writes, a lapped consumer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.bench.load import verify
from danube_fast.bench.load.payloads import LIST_MESSAGES, Payloads, create_payloads
from danube_fast.bench.load.rig import Rig
from danube_fast.bench.load.verify import Verifier
from danube_fast.bench.workloads import bare, lapped, rates, sustained
from danube_fast.bench.workloads.catalog import WORKLOADS, planned
from danube_fast.errors import FailedPrecondition, InvalidArgument, ResourceExhausted

COUNT, SIZE, PASSES = 1000, 100, 3
GB = 1_000_000_000


# ------------------------------------------------------------------ messages sent in turn


@pytest.fixture
def payloads() -> Iterator[Payloads]:
    fd = create_payloads(COUNT, SIZE)
    yield Payloads(fd, SIZE)
    os.close(fd)


@pytest.fixture(params=["kernel", "plain"])
def verifier(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, payloads: Payloads
) -> Verifier:
    monkeypatch.setattr(verify, "OBJECTS_READABLE", request.param == "kernel")
    return Verifier(payloads, 2, PASSES * COUNT)


def counts(verifier: Verifier) -> tuple[int, int, int]:
    return verifier.lost, verifier.duplicated, verifier.corrupted


def test_every_pass_is_right_in_order(verifier: Verifier, payloads: Payloads) -> None:
    sent = payloads.cut() * PASSES
    for start in range(0, len(sent), 70):
        verifier.take(sent[start : start + 70])
    assert counts(verifier) == (0, 0, 0)
    verifier.take(sent[:1])
    assert counts(verifier) == (0, 1, 0), "the first once more, after the last"


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (lambda x: x.__delitem__(1500), (1, 0, 0)),
        (lambda x: x.__delitem__(slice(900, 1100)), (200, 0, 0)),
        (lambda x: x.__delitem__(slice(2990, 3000)), (10, 0, 0)),
        (lambda x: x.insert(1501, x[1500]), (0, 1, 0)),
        (lambda x: x.insert(1010, x[990]), (0, 1, 0)),
        (lambda x: x.__setitem__(1500, x[1501]), (1, 1, 0)),
        (lambda x: x.__setitem__(1500, bytes(SIZE)), (1, 0, 1)),
        (lambda x: x.__delitem__(slice(COUNT)), (COUNT, 0, 0)),
        (lambda x: x.extend(x[:COUNT]), (0, COUNT, 0)),
    ],
    ids=[
        "gone", "gone around the end", "gone at the end", "twice", "late from the pass before",
        "replaced by the next", "unknown", "a whole pass gone", "a whole pass more",
    ],
)  # fmt: skip
def test_every_fault_between_passes_is_seen(
    verifier: Verifier, payloads: Payloads, fault: Any, expected: tuple[int, int, int]
) -> None:
    received: list[Any] = payloads.cut() * PASSES
    fault(received)
    verifier.take(received)
    assert counts(verifier) == expected


def test_a_gap_of_more_than_half_a_pass_is_never_right(
    verifier: Verifier, payloads: Payloads
) -> None:
    received = payloads.cut() * PASSES
    del received[1200:1900]
    verifier.take(received)
    assert verifier.lost >= 700
    assert verifier.right + verifier.duplicated == len(received)


def test_an_end_that_is_known_late_counts_from_there(payloads: Payloads) -> None:
    verifier = Verifier(payloads, 1, lapped.WANTED_UNKNOWN)
    received = payloads.cut() * 2
    verifier.take(received[:1300])
    verifier.expect(1310)
    assert (verifier.wanted, verifier.lost) == (1310, 10)
    verifier.take(received[1300:1311])
    assert counts(verifier) == (0, 1, 0), "one more than were sent"


def test_streams_that_do_not_fit_a_pass_are_refused(payloads: Payloads) -> None:
    Verifier(payloads, 3)
    with pytest.raises(InvalidArgument, match="a multiple of 3"):
        Verifier(payloads, 3, COUNT + 1)


# ------------------------------------------------------------------ bare writes


class Orders:
    """A link to a harness that is always content."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def ready(self) -> None:
        self.said.append("ready")

    def say(self, what: Any) -> None:
        self.said.append(what)

    def hear(self) -> str:
        return "bye"


def test_bare_writes_sync_every_group_into_what_was_written_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link: Any = Orders()
    calls: list[tuple[str, int]] = []
    pwrite, fdatasync = os.pwrite, os.fdatasync

    def short_pwrite(fd: int, content: Any, offset: int) -> int:
        written = pwrite(fd, content[:5000], offset)  # what a disk may do
        calls.append(("write", offset))
        return written

    def noted_fdatasync(fd: int) -> None:
        calls.append(("sync", os.fstat(fd).st_size))
        fdatasync(fd)

    monkeypatch.setattr(bare.os, "pwrite", short_pwrite)
    monkeypatch.setattr(bare.os, "fdatasync", noted_fdatasync)
    monkeypatch.setattr(bare, "FILE_BYTES", 3 * 8192 + 1)
    path = tmp_path / "bare"
    options = {"path": str(path), "group_bytes": 8192, "total_bytes": 5 * 8192 - 1}
    bare.write_groups(link, options)
    before = [
        (kind, x) for at in (0, 8192, 16384) for kind, x in (("write", at), ("write", at + 5000))
    ]
    before.append(("sync", 3 * 8192))
    timed = [
        call
        for at in (0, 8192, 16384, 0, 8192)
        for call in (("write", at), ("write", at + 5000), ("sync", 3 * 8192))
    ]
    assert calls == before + timed
    assert link.said[0] == "ready"
    assert link.said[1]["groups"] == 5
    assert link.said[1]["bytes_per_s"] > 0
    assert not path.exists()


def test_bare_writes_that_fail_say_why(tmp_path: Path) -> None:
    link: Any = Orders()
    options = {"path": str(tmp_path / "no" / "bare"), "group_bytes": 4096, "total_bytes": 4096}
    with pytest.raises(ResourceExhausted, match="the bare writes beside the broker failed"):
        bare.write_groups(link, options)


# ------------------------------------------------------------------ sustained


def test_a_long_plan_needs_neither_the_memory_nor_the_disk_of_its_log() -> None:
    plan = sustained.long_plan(planned("sustained", log_bytes=20 * GB))
    assert 20 * GB <= plan.messages * plan.message_bytes < 20.01 * GB
    assert plan.messages % plan.prepared == 0
    assert plan.prepared * plan.message_bytes <= sustained.PREPARED_BYTES
    assert plan.settings["retention_seconds_min"] == 1
    assert sustained.room_bytes(plan) < 13 * GB
    short = sustained.long_plan(planned("sustained", log_bytes=1_000_000, message_bytes=900))
    assert short.messages == short.prepared == 1112
    assert sustained.room_bytes(short) < 2 * GB


def test_sustained_refuses_a_full_disk_and_a_broker_that_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(sustained.shutil, "disk_usage", lambda _: usage._replace(free=GB))
    with Rig() as rig, pytest.raises(ResourceExhausted, match=r"1\.0 GB are free there; make room"):
        sustained.run_sustained(rig, planned("sustained"))
    with (
        Rig("danube://127.0.0.1:1") as rig,
        pytest.raises(FailedPrecondition, match="run it without --url"),
    ):
        sustained.run_sustained(rig, planned("sustained"))


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig() as made:
        yield made


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sustained, "PREPARED_BYTES", 4_000_000)


@pytest.mark.usefixtures("in_turn")
def test_sustained_divides_the_log_by_bare_writes_of_its_groups(rig: Rig) -> None:
    asked: list[dict[str, Any]] = []
    crew = rig.crew

    def noting_crew() -> Any:
        made = crew()
        start = made.start

        def noted(name: str, role: str, options: Any, fds: Any = ()) -> Any:
            asked.append({"role": role, **options})
            return start(name, role, options, fds)

        made.start = noted  # type: ignore[method-assign]
        return made

    rig.crew = noting_crew  # type: ignore[method-assign]
    try:
        figures = WORKLOADS["sustained"].run(
            rig, planned("sustained", log_bytes=12_000_000, transport="shm")
        )
    finally:
        rig.crew = crew  # type: ignore[method-assign]
    assert figures.messages == 120_000
    assert (figures.lost, figures.duplicated, figures.corrupted) == (0, 0, 0)
    extra = figures.extra
    written = (figures.syncs or 0) * (figures.bytes_per_sync or 0.0)
    assert extra["log_bytes"] == pytest.approx(written)
    assert 12_000_000 < written < 24_000_000, "payloads, and not as much again beside them"
    rate = written / 120_000 * (figures.messages_per_s or 0.0) / 1e6
    assert extra["log_mb_per_s"] == pytest.approx(rate)
    assert extra["vs_bare_writes"] == pytest.approx(extra["log_mb_per_s"] / extra["bare_mb_per_s"])
    writer = asked[-1]
    assert writer["role"] == "danube_fast.bench.workloads.bare:write_groups"
    assert 0 <= writer["group_bytes"] - (figures.bytes_per_sync or 0) <= 4096
    assert writer["total_bytes"] == int(written)
    assert Path(writer["path"]).parent == rig.folder, "not on the disk of the log"
    assert {one["messages"] for one in asked[:-1]} == {120_000}
    assert not (rig.folder / "bare").exists()


@pytest.mark.usefixtures("in_turn")
def test_sustained_sees_what_was_lost(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_HERE", "tests.bench.lossy")
    figures = WORKLOADS["sustained"].run(rig, planned("sustained", log_bytes=12_000_000))
    assert figures.lost == LIST_MESSAGES
    assert not figures.is_faultless


# ------------------------------------------------------------------ lapped


def test_a_backlog_is_larger_than_what_needs_no_log() -> None:
    plan = planned("lapped", messages=10)
    assert lapped.backlog_messages(plan) * plan.message_bytes > (64 + 16) * 1024 * 1024
    assert lapped.backlog_messages(planned("lapped", messages=5_000_000)) == 5_000_000
    assert lapped.credit_messages(100) == 16 * 1024 * 1024 // 100
    assert lapped.credit_messages(10) == 262_144


def test_a_lapped_consumer_reads_the_log_to_its_tail(rig: Rig) -> None:
    backlog = 160_000
    changes = {"messages": backlog, "message_bytes": 1000, "rate": 3000.0}
    figures = WORKLOADS["lapped"].run(rig, planned("lapped", transport="shm", **changes))
    assert (figures.lost, figures.duplicated, figures.corrupted) == (0, 0, 0)
    assert (figures.messages or 0) > backlog, "the producer did not go on beside the consumer"
    seconds = figures.extra["at_tail_seconds"]
    caught = (figures.messages_per_s or 0.0) * seconds
    at_least = backlog - lapped.credit_messages(1000) - LIST_MESSAGES
    assert at_least <= round(caught) <= (figures.messages or 0)
    assert figures.extra["read_ratio"] > 0.25, "most of it stood in the log alone"


def test_a_lapped_consumer_that_misses_something_is_seen(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lapped, "_HERE", "tests.bench.lossy")
    changes = {"messages": 90_000, "message_bytes": 1000, "rate": 3000.0}
    figures = WORKLOADS["lapped"].run(rig, planned("lapped", **changes))
    assert figures.lost == LIST_MESSAGES
    assert not figures.is_faultless


class Pages:
    """A consumer whose batches are given, each with the age of its last message."""

    def __init__(self, batches: list[tuple[list[bytes], float]]) -> None:
        self.batches = batches

    def receive_batch(self, *_: Any, **__: Any) -> Any:
        return Page(*self.batches.pop(0)) if self.batches else []

    def ack(self, batch: Any) -> None:
        pass


class Page:
    def __init__(self, payloads: list[bytes], age_seconds: float) -> None:
        self._payloads = payloads
        self.publish_time = lapped.time.time_ns() - int(age_seconds * 1e9)

    def __len__(self) -> int:
        return len(self._payloads)

    def __getitem__(self, _: int) -> Page:
        return self

    def payloads(self) -> list[bytes]:
        return self._payloads


@pytest.mark.parametrize(
    ("ages", "marks"),
    [
        ([9.0, 8.0, 5.0, 3.0, 0.0], (400, 1000)),
        ([0.0, 0.0, 0.0, 0.0, 0.0], (400, 800)),
        ([9.0, 8.0, 5.0, 3.0, 2.0], (400, None)),
    ],
    ids=["at the end", "not before the backlog is through", "never"],
)
def test_the_tail_is_where_frames_are_young(
    payloads: Payloads, ages: list[float], marks: tuple[int, int | None]
) -> None:
    cut = payloads.cut()
    batches = [(cut[200 * i : 200 * (i + 1)], age) for i, age in enumerate(ages)]
    fd = create_payloads(COUNT, SIZE)
    try:
        options = {"fd": fd, "message_bytes": SIZE, "credit_messages": 300, "backlog": 800}
        start, tail = lapped._catch_up(lapped._Follower(Pages(batches), options), options)
    finally:
        os.close(fd)
    assert start is not None and start[0] == marks[0]
    assert (tail and tail[0]) == marks[1]
