"""The audit log of a coordinator without its process: what denials may cost, and what happens when it cannot be written."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.broker import messages as m
from danube_fast.clock import SECOND_NS
from danube_fast.config import Settings
from danube_fast.errors import DanubeError, ResourceExhausted, Unavailable
from danube_fast.security import audit_files
from danube_fast.security.audit import AuditRecord, encode_record
from danube_fast.testing.virtual_clock import VirtualClock
from danube_fast.workers.coordinator.audit import (
    DENIED_BYTES_MAX,
    DENIED_BYTES_PER_SECOND,
    AuditLog,
)
from danube_fast.workers.process.denials import (
    KINDS_MAX,
    WAITING_MAX,
    Closings,
    Denial,
    Denials,
)
from danube_fast.workers.reports.denials import DenialReports
from tests.workers.broker import wait_until

TURN_NS = SECOND_NS // 4
WINDOW_TURNS = 48


class Rig:
    """An audit log whose time goes on when it is told to."""

    def __init__(self, data_dir: Path, **settings: Any) -> None:
        self.clock, self.served = VirtualClock(), {}
        self.data_dir = data_dir
        booted: Any = SimpleNamespace(
            settings=Settings(auth="required", **settings),
            config=SimpleNamespace(
                data_dir=str(data_dir),
                processes=SimpleNamespace(name=lambda index: f"process-{index}"),
            ),
            process_index=0, clock=self.clock,
            mailbox=SimpleNamespace(serve=self.served.__setitem__),
        )  # fmt: skip
        self.denials = Denials(self.clock)
        self.log = AuditLog(booted, self.denials)

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.clock.now_ns += TURN_NS
            self.log.do_work(self.clock.now_ns)

    def until(self, is_over: Callable[[], bool]) -> None:
        """Turn until then; no time goes by."""
        wait_until(
            "the end of a sync", lambda: self.log.do_work(self.clock.now_ns) < 0 or is_over()
        )

    def change(self, action: str = "create_topic") -> DanubeError | None:
        """Begin a change, and end it if it may be made."""
        ends: list[DanubeError | None] = []
        record = AuditRecord(event="", principal="ann", action=action, request="1.1")
        self.log.begin(record, ends.append)
        self.until(lambda: bool(ends))
        (error,) = ends
        if error is None:
            self.log.end(record, None)
        return error

    def records(self, **wanted: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for path in sorted((self.data_dir / "audit").glob("audit*.jsonl"), reverse=True):
            found += [json.loads(line) for line in path.read_bytes().splitlines() if line]
        return [each for each in found if wanted.items() <= each.items()]

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in (self.data_dir / "audit").iterdir())


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_repetitions_are_a_count(rig: Rig) -> None:
    for number in range(1000):
        rig.denials.note(
            Denial("subscribe", "pia", "uid:7", "10.0.0.7", f"/a/t{number}", request=f"1.{number}")
        )
    rig.denials.note(Denial("lookup", "pia", "uid:7", "10.0.0.7", "/a/other"))
    rig.turn()
    first, other = rig.records(event="denied")
    assert "count" not in first and (first["resource"], first["request"]) == ("/a/t0", "1.0")
    assert other["action"] == "lookup"
    rig.turn(WINDOW_TURNS)
    (_, _, more) = rig.records(event="denied")
    assert (more["count"], more["resource"], more["request"]) == (999, "/a/t999", "1.999")
    rig.turn(2 * WINDOW_TURNS)
    assert len(rig.denials) == 0, "a kind that is quiet is forgotten"
    rig.denials.note(Denial("subscribe", "pia", "uid:7", "10.0.0.7", "/a/again"))
    rig.turn()
    assert rig.records(event="denied")[-1]["resource"] == "/a/again"


def test_a_flood_from_everywhere_costs_little(rig: Rig) -> None:
    """10,000 denials a second from as many addresses, for a minute and more of quiet behind it."""
    began, seconds, per_turn = rig.size, 60, 2500
    number = 0
    for _ in range(seconds * 4):
        for _ in range(per_turn):
            number += 1
            rig.denials.note(Denial("connect", "", f"curve:{number}", f"10.{number}", "x" * 1000))
        rig.turn()
        assert len(rig.denials) <= KINDS_MAX
    rig.turn(WINDOW_TURNS)
    written = rig.size - began
    assert written <= DENIED_BYTES_MAX + (seconds + 12) * (DENIED_BYTES_PER_SECOND + 20), written
    counted = sum(each.get("count", 1) for each in rig.records() if each["event"] != "note")
    rest = rig.log._lost_count
    assert counted + rest == number, "each denial is recorded or counted as lost"
    assert rig.records(event="lost")
    assert rig.change() is None, "a flood does not stop changes"


def test_denials_of_all_threads_are_counted(rig: Rig) -> None:
    def note() -> None:
        for _ in range(5000):
            rig.denials.note(Denial("connect", "", "", "10.0.0.7"))

    threads = [threading.Thread(target=note) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    rig.turn(2 * WINDOW_TURNS)
    assert sum(each.get("count", 1) for each in rig.records(event="denied")) == 20_000


class FullDisk:
    """Lets writes fail while it is on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error = 0
        real = os.write

        def write(fd: int, data: Any) -> int:
            if self.error:
                raise OSError(self.error, os.strerror(self.error))
            return real(fd, data)

        monkeypatch.setattr(audit_files.os, "write", write)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, ResourceExhausted),
        (errno.EDQUOT, ResourceExhausted),
        (errno.EROFS, Unavailable),
        (errno.EIO, Unavailable),
    ],
)
def test_what_cannot_be_recorded_is_refused(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[DanubeError]
) -> None:
    assert rig.change("before") is None
    disk = FullDisk(monkeypatch)
    disk.error = number
    error = rig.change("refused")
    assert type(error) is kind
    assert "audit" in str(error) and str(rig.data_dir) in str(error) and "audit = off" in str(error)
    rig.denials.note(Denial("lookup", "pia", "", "10.0.0.7"))
    rig.turn(WINDOW_TURNS)
    disk.error = 0
    rig.turn(8)
    assert rig.records(event="denied"), "what has waited is written as soon as it can be"
    ended = rig.records(action="refused")
    assert [(each["event"], each["outcome"]) for each in ended] == [("end", kind.__name__)]
    assert rig.change("after") is None
    numbers = [each["seq"] for each in rig.records()]
    assert numbers == sorted(set(numbers))


def test_what_waits_for_a_disk_is_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch)
    disk.error = errno.ENOSPC
    for _ in range(5000):
        assert rig.change("x" * 100) is not None
    assert rig.log._waiting_bytes <= 256 * 1024
    disk.error = 0
    rig.turn(WINDOW_TURNS)
    assert rig.records(event="lost")[-1]["count"] > 1000


def test_all_changes_of_a_turn_wait_for_one_sync(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rig.change("first") is None
    rig.turn(8)
    wait_until("the sync of the end", lambda: rig.log._sync is None or rig.turn() or None)
    syncs: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr(audit_files.os, "fdatasync", lambda fd: (syncs.append(fd), real(fd)))
    ends: list[tuple[int, DanubeError | None]] = []

    def go_on(number: int, error: DanubeError | None) -> None:
        assert len(rig.records(event="begin")) == 101, "made before it was recorded"
        ends.append((number, error))

    for number in range(100):
        record = AuditRecord(event="", action="create_topic", request=f"1.{number}")
        rig.log.begin(record, lambda error, number=number: go_on(number, error))  # type: ignore[misc]
    assert rig.log.is_waiting
    rig.until(lambda: len(ends) == 100)
    assert not rig.log.is_waiting
    assert ends == [(number, None) for number in range(100)]
    assert len(syncs) == 1


def test_numbers_go_on_behind_a_restart(tmp_path: Path) -> None:
    first = Rig(tmp_path, audit_file_bytes=64 * 1024)
    for _ in range(300):
        assert first.change("c" * 100) is None
    last, newest = first.log.seq, tmp_path / "audit" / "audit.jsonl"
    with newest.open("ab") as torn:
        torn.write(b'{"seq":')
    second = Rig(tmp_path, audit_file_bytes=64 * 1024)
    assert second.change("after") is None
    assert newest.read_bytes().count(b'{"seq":\n') == 1, "half a line stays, on a line of its own"
    newest.unlink()
    third = Rig(tmp_path, audit_file_bytes=64 * 1024)
    assert third.log.seq > 100 and last > 500


def test_denials_of_workers_are_told_at_least_once(rig: Rig) -> None:
    calls: list[tuple[m.Denied, Any]] = []
    mailbox: Any = SimpleNamespace(
        call=lambda peer, message, on_reply: calls.append((message, on_reply))
    )
    denials = Denials(rig.clock)
    job = DenialReports(mailbox, denials)
    denials.note(Denial("subscribe", "pia", "uid:7", "uid:7 pid:1", "/a/t#s", request="3.9"))
    job.run(rig.clock.now_ns)
    (message, on_reply) = calls.pop()
    job.run(rig.clock.now_ns)
    assert not calls, "one at a time"
    on_reply(SimpleNamespace(error=Unavailable("down")))
    for number in range(1000):
        denials.note(Denial("connect", "", "", f"10.0.0.{number}"))
    for _ in range(10):
        job.run(rig.clock.now_ns)
    (message, on_reply) = calls.pop()
    assert 1 < len(message.records) <= 1 + WAITING_MAX
    assert message.lost == 1000 - WAITING_MAX
    answered: list[bool] = []
    request: Any = SimpleNamespace(message=message, peer=3, reply=lambda: answered.append(True))
    rig.served[m.Denied](request)
    on_reply(SimpleNamespace(error=None))
    job.run(rig.clock.now_ns)
    assert answered and not calls, "told twice"
    record = rig.records(action="subscribe")[0]
    assert (record["process"], record["request"]) == ("process-3", "3.9")
    assert (record["principal"], record["resource"]) == ("pia", "/a/t#s")


def test_damaged_lines_of_a_worker_are_no_matter(rig: Rig) -> None:
    lines = [b"\xff", b"{}", encode_record(AuditRecord(event="denied", action="lookup"))]
    request: Any = SimpleNamespace(message=m.Denied(lines, 7), peer=1, reply=lambda: None)
    rig.served[m.Denied](request)
    rig.turn(WINDOW_TURNS)
    assert rig.records(event="lost")[0]["count"] == 7
    assert len(rig.records(event="denied")) == 1


def test_a_sync_that_fails_refuses_what_waits_for_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rig.change("before") is None
    real, faults = os.fdatasync, [errno.EIO]

    def fdatasync(fd: int) -> None:
        if faults:
            raise OSError(faults.pop(), "Input/output error")
        real(fd)

    monkeypatch.setattr(audit_files.os, "fdatasync", fdatasync)
    assert type(rig.change("refused")) is Unavailable
    assert rig.change("after") is None
    names = sorted(path.name for path in (rig.data_dir / "audit").glob("*.jsonl"))
    assert names == ["audit-00000001.jsonl", "audit.jsonl"], "a file that lies is written no more"
    rig.turn(WINDOW_TURNS)
    assert rig.records(event="lost"), "the line before may be lost"


def test_a_disk_that_hangs_stops_no_loop(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rig.change("before") is None
    let_go, real = threading.Event(), os.fdatasync

    def fdatasync(fd: int) -> None:
        assert let_go.wait(60)
        real(fd)

    monkeypatch.setattr(audit_files.os, "fdatasync", fdatasync)
    ends: list[DanubeError | None] = []
    for number in range(3):
        rig.log.begin(AuditRecord(event="", action=f"a{number}"), ends.append)
        rig.turn()
    assert not ends and rig.log.is_waiting
    rig.denials.note(Denial("lookup", "pia", "", "10.0.0.7"))
    rig.turn()
    assert rig.records(event="denied"), "denials are written meanwhile"
    for _ in range(20_000):
        rig.log.begin(AuditRecord(event="", action="more"), ends.append)
    assert ends and {type(error) for error in ends} == {ResourceExhausted}, "what waits is bounded"
    ends.clear()
    let_go.set()
    rig.until(lambda: len(ends) == 10_000 + 1)
    assert set(ends) == {None}


@pytest.mark.parametrize("what", ["descriptor", "thread"])
def test_without_a_descriptor_or_a_thread_for_a_sync_the_loop_goes_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A flood of connections takes all descriptors of a process."""

    def no_descriptor(fd: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        if what == "descriptor":
            patch.setattr(os, "dup", no_descriptor)
        else:
            patch.setattr(threading.Thread, "start", no_thread)
        rig.denials.note(Denial("subscribe", "pia"))
        rig.turn(8)
        assert isinstance(rig.change(), Unavailable)
    rig.turn(8)
    assert rig.change() is None and not rig.log.fault
    assert [each["action"] for each in rig.records(event="denied")] == ["subscribe"]


def test_a_denial_is_kept_with_a_bounded_text(rig: Rig) -> None:
    rig.denials.note(Denial("lookup", "pia", "uid:7", "10.0.0.7", "y" * 1_000_000))
    assert len(rig.denials) == 1
    (kind,) = rig.denials._kinds.values()
    assert sum(map(len, kind.last)) < 1000


def test_denials_of_different_reasons_are_told_apart(rig: Rig) -> None:
    for why in ("expired", "no such key", "expired", "no such key"):
        rig.denials.note(Denial("sign_on", address="10.0.0.7", resource=why, reason=why))
    rig.turn(2 * WINDOW_TURNS)
    counts: dict[str, int] = {}
    for each in rig.records(event="denied"):
        counts[each["resource"]] = counts.get(each["resource"], 0) + each.get("count", 1)
    assert counts == {"expired": 2, "no such key": 2}


def test_what_was_closed_is_a_line_for_each_user_and_topic(rig: Rig) -> None:
    """However many handles there were; a crowd has the same budget as denials."""
    closings = Closings(rig.denials)
    pia: Any = SimpleNamespace(principal="pia", proof="curve:secret", address="10.0.0.7")
    for topic in ("/a/t", "/a/u"):
        for _ in range(1000):
            closings.note(pia, "producer", topic)
    for number in range(10):
        closings.note(pia, "consumer", f"/system/reply-{number:032}")
    closings.tell()
    rig.denials.note(Denial("producer", "pia", "curve:secret", "10.0.0.7", "/a/t"))
    rig.turn()
    lines = {each.get("resource", ""): each for each in rig.records(event="closed")}
    assert {name: each["count"] for name, each in lines.items()} == {
        "/a/t": 1000, "/a/u": 1000, "/system/reply-(hidden)": 10,
    }  # fmt: skip
    line = lines["/a/t"]
    assert (line["principal"], line["address"], line["process"]) == ("pia", "10.0.0.7", "process-0")
    assert "secret" not in json.dumps(rig.records())
    assert rig.records(event="denied")[0]["action"] == "producer", "a denial is none of them"
    began = rig.size
    for number in range(20_000):
        other: Any = SimpleNamespace(principal=f"u{number}", proof="uid:7", address="10.0.0.7")
        closings.note(other, "session")
        if number % 100 == 0:
            rig.turn()
    closings.tell()
    rig.turn(WINDOW_TURNS)
    seconds = (200 + WINDOW_TURNS) * TURN_NS / SECOND_NS
    assert rig.size - began <= DENIED_BYTES_MAX + (seconds + 12) * (DENIED_BYTES_PER_SECOND + 20)
    told = sum(each.get("count", 1) for each in rig.records(action="session"))
    lost = sum(each["count"] for each in rig.records(event="lost"))
    assert told + lost + rig.log._lost_count == 20_000, "each one is recorded or counted as lost"
