"""The audit log where its topic cannot be written, where its files are moved away, and where a change is denied."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.delivery.audit_rig import AuditedServer
from tests.delivery.test_audit import SECRET, numbers_in
from tests.delivery.test_security import refused
from tests.workers.broker import wait_until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[AuditedServer]:
    with AuditedServer(tmp_path / "data", tmp_path) as audited:
        audited.make_ann()
        yield audited


def test_status_says_why_records_are_not_published(server: AuditedServer) -> None:
    assert server.broker is not None

    def fault() -> str:
        return str(ann.admin.cluster_status()["audit_topic_fault"])

    with server.come_in("ann") as ann:
        wait_until("the topic", lambda: bool(ann.admin.list_topics(namespace="system")), 20)
        wait_until("what comes at the start", lambda: not fault(), 20)
        workers = server.broker.ready["worker_pids"]
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        try:
            ann.admin.set_principal("pia")
            wait_until("a fault", fault, 20)
        finally:
            for pid in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        wait_until("its end", lambda: not fault(), 40)


def test_a_log_that_is_moved_away_begins_anew(server: AuditedServer) -> None:
    """What was recorded before is in what was moved; the topic has all."""
    assert server.broker is not None
    with server.come_in("ann") as ann:
        ann.admin.set_principal("pia")
        before = server.records()
        numbers_in(ann, len(before))
        moved = server.data_dir.parent / "moved"
        server.log.parent.rename(moved)
        wait_until("another file", server.log.exists, 20)
        ann.admin.set_principal("carl")
        assert server.records()[0]["seq"] > before[-1]["seq"]
        assert server.wait_for(action="audit_log_moved")["event"] == "note"
        server.wait_for(action="set_principal", event="end")
        assert "was moved out of" in server.broker.error_text()
        found = [each["seq"] for each in (*before, *server.records())]
        assert sorted(set(numbers_in(ann, len(found), "again"))) == found


def test_a_denied_change_is_recorded_with_its_arguments(server: AuditedServer) -> None:
    with server.come_in("ann") as ann:
        server.add(ann.admin, "pia")
    with server.come_in("pia") as pia:
        refused(lambda: pia.admin.set_binding("me", "user:pia", "admin", "cluster"))
        refused(lambda: pia.admin.set_credential("uid:7", "ann", 60, SECRET))
        refused(lambda: pia.admin.set_namespace_quota("n" * 900, {"namespace_topics_max": 1}))
        refused(lambda: pia.admin.set_principal("x" * 190, groups=["g" * 190] * 5))
    record = server.wait_for(event="denied", action="set_binding")
    assert record["arguments"] == {
        "binding": "me", "subject": "user:pia", "role": "admin", "scope": "cluster"
    }  # fmt: skip
    arguments = server.wait_for(event="denied", action="set_credential")["arguments"]
    assert arguments["principal"] == "ann" and arguments["not_shown"] == ["label"]
    assert SECRET not in server.log.read_text()
    long = server.wait_for(event="denied", action="set_principal")
    cut = f"{'g' * 57}..."
    assert long["arguments"] == {"name": f"{'x' * 57}...", "groups": [cut] * 5}, (
        "denials are bounded"
    )
