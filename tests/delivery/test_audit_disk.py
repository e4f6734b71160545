"""The audit log and its disk: full, cut by a kill, in files that are closed; no change without its record."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from danube_fast.errors import DanubeError, ResourceExhausted, Unavailable
from danube_fast.security.audit import decode_record
from tests.delivery.audit_rig import AuditedServer
from tests.delivery.test_security import TOPIC, refused
from tests.faults.rig import fill_up, mount_small
from tests.workers.broker import wait_until

AUDIT_DISK_BYTES = 1 << 20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[AuditedServer]:
    with AuditedServer(tmp_path / "data", tmp_path) as audited:
        audited.make_ann()
        yield audited


def test_a_full_disk_refuses_changes_and_nothing_else(server: AuditedServer) -> None:
    with server.come_in("ann") as ann:
        ann.admin.create_namespace("shop")
        ann.admin.create_topic(TOPIC)
        server.add(ann.admin, "pia", ("producer", "namespace:shop"))
        processes = ann.admin.cluster_status()["processes"]
        coordinator = next(each["pid"] for each in processes if each["process"] == "coordinator")
        before = [ann.admin.list_topics(), ann.admin.list_security("binding")]
        unlimited = resource.prlimit(coordinator, resource.RLIMIT_FSIZE)
        room = server.log.stat().st_size + 20  # so that half a line is written
        resource.prlimit(coordinator, resource.RLIMIT_FSIZE, (room, unlimited[1]))
        with server.come_in("pia") as pia:
            for change in (
                lambda: ann.admin.create_topic("/shop/more"),
                lambda: ann.admin.delete_topic(TOPIC),
                lambda: ann.admin.set_topic_policy(TOPIC, {"message_ttl_ms": 1}),
                lambda: ann.admin.set_binding("b", "user:pia", "admin", "cluster"),
                lambda: ann.admin.delete_security("principal", "pia"),
                lambda: pia.producer("/shop/made", timeout=5.0).publish(b"no"),
            ):
                with pytest.raises(DanubeError, match="audit log"):
                    change()
            assert pia.producer(TOPIC).publish(b"one").offset == 0
            refused(lambda: pia.admin.delete_topic(TOPIC))
            assert [ann.admin.list_topics(), ann.admin.list_security("binding")] == before
            assert ann.admin.list_audit(), "what is there can be read"
            assert ann.admin.cluster_status()["audit"] == "File too large"
        resource.prlimit(coordinator, resource.RLIMIT_FSIZE, unlimited)
        ann.admin.create_topic("/shop/more")
        assert ann.admin.cluster_status()["audit"] == "on"
        record = server.wait_for(event="denied", principal="pia", action="delete_topic")
        assert record["resource"] == TOPIC, "it has waited for the disk"
        ends = [each["outcome"] for each in server.records(event="end", resource="/shop/more")]
        assert ends == ["ResourceExhausted", "ok"]


def test_a_file_system_of_the_log_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real thing: blocks run out below the audit log, while the disk of the messages has room."""
    folder = tmp_path / "data" / "audit"
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        if not mount_small(folder, AUDIT_DISK_BYTES, stack):
            pytest.skip("no file system may be mounted here")
        server = stack.enter_context(AuditedServer(tmp_path / "data", tmp_path))
        server.make_ann()
        monkeypatch.setenv("DANUBE_SERVER_KEY", server.server_key)
        monkeypatch.setenv("DANUBE_KEY_FILE", str(server.folder / "ann.key"))
        ann = stack.enter_context(server.come_in("ann"))
        ann.admin.create_topic("/default/t")
        producer = ann.producer("/default/t")
        consumer = ann.consumer("/default/t", subscription="s", initial_position="earliest")
        assert _said(server, "doctor").count("audit log") == 0
        ballast = folder / "ballast"
        fill_up(ballast)
        refusals: list[str] = []
        for number in range(100):  # a page that has room takes a few
            try:
                ann.admin.set_role(f"r{number}", ["lookup"])
            except ResourceExhausted as error:
                refusals.append(str(error))
        assert "No space left on device" in refusals[0] and str(folder) in refusals[0]
        assert len(refusals) > 50, "few changes were refused"
        roles = {row["name"] for row in ann.admin.list_security("role")}
        assert len(roles) == 100 - len(refusals), "a refused change was made"
        for number in range(10):
            producer.publish(b"%d" % number)
            assert consumer.receive(timeout=20).payload == b"%d" % number
        assert ann.admin.list_audit(), "what is there can be read"
        assert "No space left on device" in _said(server, "status")
        assert "not written: No space left on device" in _said(server, "doctor", code=1)
        ballast.unlink()
        ann.admin.set_role("more", ["lookup"])
        assert ann.admin.cluster_status()["audit"] == "on"
        assert _said(server, "doctor").count("audit log") == 0
        lines = server.log.read_bytes().splitlines()
        records = [decode_record(line) for line in lines]
        assert None not in records, "half a line stayed"
        numbers = [each.seq for each in records if each is not None]
        assert numbers == sorted(set(numbers)), "a line is there twice"
        outcomes = [each["outcome"] for each in server.records(event="end", action="set_role")]
        assert outcomes.count("ok") == len(roles) + 1, "the end of a change is missing"
        server.kill_all()
        server.start()
        with server.come_in("ann") as again:
            assert {row["name"] for row in again.admin.list_security("role")} == {*roles, "more"}
            again.admin.set_role("last", ["lookup"])


def _said(server: AuditedServer, word: str, *, code: int = 0) -> str:
    """The output of a command about the broker, which ends with that exit code."""
    command = [sys.executable, "-m", "danube_fast.cli.main", word, "--url", server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_a_kill_leaves_a_log_that_goes_on(server: AuditedServer) -> None:
    with server.come_in("ann") as ann:
        ann.admin.create_namespace("shop")
    server.kill_all()
    with server.log.open("ab") as log:
        log.write(b'{"seq":99999,"time":"2026')
    server.start()
    with server.come_in("ann") as ann:
        ann.admin.create_topic(TOPIC)
        found = ann.admin.list_audit()
    numbers = [each["seq"] for each in found]
    assert numbers == sorted(set(numbers)) and numbers[-1] < 1000
    ends = [each for each in found if each["event"] == "end" and each["resource"] == TOPIC]
    assert [each["outcome"] for each in ends] == ["ok"]


def test_a_broker_starts_without_its_log(tmp_path: Path) -> None:
    """A folder that cannot be made: what is there is served, and changes are refused."""
    data_dir = tmp_path / "data"
    with AuditedServer(data_dir, tmp_path) as server:
        server.make_ann()
        with server.come_in("ann") as ann:
            ann.admin.create_topic("/default/t")
        server.stop()
        shutil.move(data_dir / "audit", tmp_path / "moved")
        (data_dir / "audit").write_text("no folder")
        server.start()
        with server.come_in("ann") as ann:
            ann.producer("/default/t").publish(b"one")
            with pytest.raises(Unavailable, match="audit log"):
                ann.admin.create_topic("/default/u")
            (data_dir / "audit").unlink()
            ann.admin.create_topic("/default/u")


def test_no_change_is_in_force_that_was_not_recorded(tmp_path: Path) -> None:
    """Whenever the coordinator is killed; over files that are closed meanwhile."""
    with AuditedServer(tmp_path / "data", tmp_path, audit_file_bytes=64 * 1024) as server:
        server.make_ann()
        for turn in range(4):
            with server.come_in("ann") as ann:
                processes = ann.admin.cluster_status()["processes"]
                pid = next(each["pid"] for each in processes if each["process"] == "coordinator")
                killer = threading.Timer(0.05 + 0.1 * turn, os.kill, (pid, signal.SIGKILL))
                ann.admin.call("create_topic", topic=f"/default/t{turn}-first")
                killer.start()
                try:
                    for number in range(2000):
                        ann.admin.call("create_topic", topic=f"/default/t{turn}-{number}")
                except DanubeError:
                    pass
                killer.join(60)
                made = wait_until("the coordinator is back", lambda: names_in(server), 60)
            assert len(made) > turn
        with server.come_in("ann") as ann:
            found = ann.admin.list_audit(limit=100_000)
            made = [row["topic"] for row in ann.admin.list_topics("default")]
        begun = {each["resource"] for each in found if each["event"] == "begin"}
        assert set(made) <= begun, "a topic of which the log knows nothing"
        numbers = [each["seq"] for each in found]
        assert numbers == sorted(set(numbers))


def names_in(server: AuditedServer) -> list[str]:
    """Topics of the namespace `default`; none while the broker does not answer."""
    try:
        with server.come_in("ann", timeout=5.0) as ann:
            return [row["topic"] for row in ann.admin.list_topics("default")]
    except DanubeError:
        return []


def test_files_are_closed_and_the_oldest_go(tmp_path: Path) -> None:
    changes = {"audit_file_bytes": 64 * 1024, "audit_files": 2}
    with AuditedServer(tmp_path / "data", tmp_path, **changes) as server:
        server.make_ann()
        with server.come_in("ann") as ann:
            for number in range(300):
                ann.admin.set_role(f"role-{number}-{'x' * 100}", ["lookup"])
            found = ann.admin.list_audit(limit=100_000)
        names = sorted(path.name for path in server.log.parent.glob("*.jsonl"))
        assert len(names) == 2 and names[0] > "audit-00000001.jsonl"
        sizes = [path.stat().st_size for path in server.log.parent.glob("*.jsonl")]
        assert max(sizes) < 64 * 1024 + 4096
        numbers = [each["seq"] for each in found]
        assert numbers == list(range(numbers[0], numbers[-1] + 1)) and numbers[0] > 1
