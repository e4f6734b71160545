"""doctor, config and wal: commands that need no broker, and doctor's look at one."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import pytest

from danube_fast.cli import host
from danube_fast.cli.host import Finding, Verdict, examine
from danube_fast.config import Settings
from danube_fast.errors import Unavailable
from tests.cli.conftest import Run
from tests.cli.fakes import FakeBroker
from tests.wal.rig import abandon, put, start_log, wait_synced

ROOT = Path(__file__).resolve().parents[2]
KIB_LINE = "MemTotal: 99999999 kB\nMemAvailable: {} kB\n"


def machine(tmp_path: Path, **files: str) -> Path:
    """A root folder with these files of /proc and /sys; names with '__' for '/'."""
    root = tmp_path / "root"
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def found(data_dir: Path, root: Path = Path("/")) -> dict[str, Finding]:
    return {finding.check: finding for finding in examine(str(data_dir), root)}


def mounts(kind: str, at: Path) -> str:
    return (
        "21 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
        f"40 21 0:33 / {at} rw shared:9 - {kind} server:/x rw\n"
        "41 21 0:34 / /elsewhere rw - tmpfs tmpfs rw\n"
    )


@pytest.mark.parametrize(
    ("kind", "verdict", "word"),
    [
        ("ext4", Verdict.OK, ""),
        ("xfs", Verdict.OK, ""),
        ("nfs4", Verdict.FAILURE, "local disk"),
        ("cifs", Verdict.FAILURE, "local disk"),
        ("tmpfs", Verdict.WARNING, "restart"),
        ("overlay", Verdict.WARNING, "volume"),
    ],
)
def test_file_systems_are_named(tmp_path: Path, kind: str, verdict: Verdict, word: str) -> None:
    root = machine(tmp_path, proc__self__mountinfo=mounts(kind, tmp_path))
    finding = found(tmp_path / "not" / "yet" / "there", root)["file system"]
    assert finding.verdict is verdict
    assert kind in finding.seen
    assert str(tmp_path) in finding.seen
    assert word in finding.advice


def test_a_mount_with_a_similar_name_is_another(tmp_path: Path) -> None:
    root = machine(tmp_path, proc__self__mountinfo=mounts("nfs", Path(f"{tmp_path}-other")))
    assert found(tmp_path, root)["file system"].verdict is Verdict.OK


def test_memory_counts_the_limit_of_a_container(tmp_path: Path) -> None:
    root = machine(tmp_path, proc__meminfo=KIB_LINE.format(64 * 1024 * 1024))
    assert found(tmp_path, root)["memory"].verdict is Verdict.OK
    machine(tmp_path, sys__fs__cgroup__memory__max="max\n")
    (root / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert found(tmp_path, root)["memory"].verdict is Verdict.OK
    (root / "sys/fs/cgroup/memory.max").write_text("1000000\n")
    assert found(tmp_path, root)["memory"].verdict is Verdict.WARNING


def test_a_slow_clock_is_named(tmp_path: Path) -> None:
    root = tmp_path / "root"
    place = root / "sys/devices/system/clocksource/clocksource0/current_clocksource"
    place.parent.mkdir(parents=True)
    place.write_text("hpet\n")
    assert found(tmp_path, root)["clock source"].verdict is Verdict.WARNING
    place.write_text("tsc\n")
    assert found(tmp_path, root)["clock source"].verdict is Verdict.OK


@pytest.mark.parametrize(
    ("free_gib", "verdict"),
    [(0.5, Verdict.FAILURE), (5, Verdict.WARNING), (50, Verdict.OK)],
)
def test_free_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_gib: float, verdict: Verdict
) -> None:
    class Usage:
        f_frsize = 4096
        f_bavail = int(free_gib * 1024**3) // 4096

    monkeypatch.setattr(host.os, "statvfs", lambda place: Usage)
    assert found(tmp_path)["disk"].verdict is verdict


@pytest.mark.parametrize(
    ("hard", "verdict"),
    [
        (512, Verdict.FAILURE),
        (4096, Verdict.WARNING),
        (1 << 20, Verdict.OK),
        (resource.RLIM_INFINITY, Verdict.OK),
    ],
)
def test_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hard: int, verdict: Verdict
) -> None:
    monkeypatch.setattr(host.resource, "getrlimit", lambda which: (256, hard))
    descriptors = found(tmp_path)["descriptors"]
    assert descriptors.verdict is verdict
    assert "256 (ulimit -n)" in descriptors.seen


def test_doctor_leaves_nothing_behind(run: Run, tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    outcome = run("doctor", "--data-dir", str(tmp_path / "data"), "--output", "json")
    assert outcome.code in (0, 1)
    checks = [finding["check"] for finding in outcome.json()]
    assert {"python", "cores", "memory", "disk", "file system", "sync", "kernels"} <= set(checks)
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_doctor_fails_when_something_must_change(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bad = Finding("disk", Verdict.FAILURE, "no room", "make some", "Disk")
    monkeypatch.setattr("danube_fast.cli.doctor.examine", lambda data_dir: iter([bad]))
    outcome = run("doctor", "--data-dir", str(tmp_path))
    assert outcome.code == 1
    assert "make some (tuning.md: Disk)" in outcome.out


def test_sections_that_doctor_names_exist() -> None:
    headings = set(re.findall(r"^## (.+)$", (ROOT / "tuning.md").read_text(), re.MULTILINE))
    source = (ROOT / "danube_fast/cli/host.py").read_text()
    named = set(re.findall(r'advice, "([A-Z][^"]+)"\)', source))
    assert named
    assert named <= headings


def test_doctor_looks_at_a_broker(run: Run, fake: FakeBroker) -> None:
    fake.answers["cluster_status"] = {
        "processes": [
            {"process": "coordinator", "state": "ready", "pid": 1, "restarts": 0},
            {"process": "worker-0", "state": "ready", "pid": 2, "restarts": 3},
            {"process": "worker-1", "state": "failed", "pid": 3, "restarts": 0},
        ]
    }
    fake.answers["list_topics"] = [{"topic": "/default/x"}]
    fake.answers["list_subscriptions"] = [
        {"subscription": "gone", "lag_messages": 9, "consumers": []},
        {"subscription": "fine", "lag_messages": 0, "consumers": []},
    ]
    outcome = run("doctor", "--url", "danube://b:1", "--output", "json")
    verdicts = {finding["check"]: finding["verdict"] for finding in outcome.json()}
    assert outcome.code == 1
    assert fake.urls == ["danube://b:1"]
    assert verdicts == {
        "round trip": "ok", "coordinator": "ok", "worker-0": "warning", "worker-1": "failure",
        "/default/x gone": "warning",
    }  # fmt: skip


def test_doctor_and_a_topic_whose_worker_is_down(run: Run, fake: FakeBroker) -> None:
    fake.answers["list_topics"] = [{"topic": "/default/x"}]
    fake.answers["list_subscriptions"] = Unavailable("worker 1 is down; wait")
    outcome = run("doctor", "--url", "danube://b:1", "--output", "json")
    assert outcome.json()[-1]["seen"] == "worker 1 is down; wait"


def test_config_show_names_the_source(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "broker.toml"
    file.write_text("spare_segments = 7\n")
    monkeypatch.setenv("DANUBE_WORKERS", "3")
    rows = run("config", "show", "--config", str(file), "--output", "json").json()
    by_name = {row["setting"]: (row["value"], row["source"]) for row in rows}
    assert set(by_name) == set(Settings.__struct_fields__)
    assert by_name["spare_segments"] == (7, str(file))
    assert by_name["workers"] == (3, "DANUBE_WORKERS")
    assert by_name["auto_create_topics"] == (True, "default")
    monkeypatch.setenv("DANUBE_AUTHORIZER", "opa:http://user:password@127.0.0.1:8181/")
    for form in ("json", "text"):
        printed = run("config", "show", "--output", form).out
        assert "opa:..." in printed and "password" not in printed
    monkeypatch.delenv("DANUBE_AUTHORIZER")
    text = run("config", "show", "--config", str(file), "--changed").out
    assert [line.split()[0] for line in text.splitlines()] == [
        "SETTING",
        "workers",
        "spare_segments",
    ]


def test_config_check(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "broker.toml"
    monkeypatch.setenv("DANUBE_CONFIG", str(file))
    outcome = run("config", "check")
    assert outcome.code == 3
    assert str(file) in outcome.sentence()
    file.write_text("workrs = 2\n")
    outcome = run("config", "check")
    assert outcome.code == 2
    assert "did you mean 'workers'" in outcome.sentence()
    file.write_text("workers = 2\n")
    assert run("config", "check", "-o", "json").json() == {
        "ok": True, "changed": 1, "ignored_variables": [],
    }  # fmt: skip


def make_logs(tmp_path: Path) -> Path:
    """A data directory with two logs that nobody has open."""
    for name in ("0000", "0001"):
        log = start_log(tmp_path / "logs" / name)
        offset = 0
        for _ in range(5):  # each frame tells that those before it are durable
            offset = put(log, [[b"x" * 100] * 10], base_offset=offset)
            wait_synced(log)
        abandon(log)
    return tmp_path


def flip_a_byte_of_a_message(data_dir: Path, log: str) -> None:
    (segment,) = sorted((data_dir / "logs" / log).glob("0*.seg"))[:1]
    content = bytearray(segment.read_bytes())
    place = content.index(b"x" * 50)
    content[place] ^= 1
    segment.write_bytes(content)


def test_wal_inspect(run: Run, tmp_path: Path) -> None:
    make_logs(tmp_path)
    reports = run("wal", "inspect", str(tmp_path), "--output", "json").json()
    assert [Path(report["directory"]).name for report in reports] == ["0000", "0001"]
    one = run("wal", "inspect", str(tmp_path / "logs" / "0001"))
    assert one.code == 0
    assert "sound header" in one.out


def test_wal_verify_of_a_sound_log(run: Run, tmp_path: Path) -> None:
    make_logs(tmp_path)
    outcome = run("wal", "verify", str(tmp_path), "--output", "json")
    assert outcome.code == 0, outcome.err
    assert [report["faults"] for report in outcome.json()] == [[], []]
    assert all(report["messages"] >= 50 for report in outcome.json())


def test_wal_verify_finds_damage_and_repairs_only_when_told(run: Run, tmp_path: Path) -> None:
    make_logs(tmp_path)
    flip_a_byte_of_a_message(tmp_path, "0001")
    outcome = run("wal", "verify", str(tmp_path))
    assert outcome.code == 1
    assert "0001 is damaged" in outcome.sentence()
    assert "DAMAGE" in outcome.out
    refused = run("wal", "verify", str(tmp_path), "--accept-loss")
    assert refused.code == 2
    assert "--yes" in refused.sentence()
    assert run("wal", "verify", str(tmp_path)).code == 1
    repaired = run("wal", "verify", str(tmp_path), "--accept-loss", "--yes")
    assert repaired.code == 0, repaired.err
    assert run("wal", "verify", str(tmp_path)).code == 0
    losses = [r["losses"] for r in run("wal", "inspect", str(tmp_path), "-o", "json").json()]
    assert [len(x) for x in losses] == [0, 1]


def test_wal_verify_of_a_log_in_use(run: Run, tmp_path: Path) -> None:
    log = start_log(tmp_path / "logs" / "0000")
    try:
        assert run("wal", "verify", str(tmp_path)).code == 4
        assert run("wal", "inspect", str(tmp_path)).code == 0
    finally:
        log.close()


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_wal_of_nothing(run: Run, tmp_path: Path, verb: str) -> None:
    outcome = run("wal", verb, str(tmp_path))
    assert outcome.code == 3
    outcome.sentence()
