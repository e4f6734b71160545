"""history: ls, describe and verify over a folder; what they print, how they fail, and that they write nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest

from danube_fast.cli.output import time_text
from danube_fast.clock import SECOND_NS, SystemClock
from danube_fast.history.holds import HOLDS_PREFIX, list_holds
from danube_fast.history.layout import object_key
from danube_fast.history.manifest import ManifestLog, manifest_key
from danube_fast.history.stores import local
from danube_fast.history.stores.local import LocalStore
from danube_fast.history.stores.opening import open_store
from tests.cli.conftest import Run
from tests.history.faulty_proxy import FaultyProxy
from tests.history.rig import IDENTITY, START_NS, change_object, make_frame, put_history, put_object
from tests.history.s3_servers import ACCESS_KEY, BUCKET, SECRET_KEY, moto_server, plain_client

TOPICS = {6: "/default/a", 7: "/default/b", 11: "/default/a"}
VERBS = [["ls"], ["describe", "/default/a"], ["describe", "6"], ["repair"], ["verify"]]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store", SystemClock())


@pytest.fixture
def logs(store: LocalStore) -> dict[int, ManifestLog]:
    return put_history(store, 3, TOPICS)


def words(store: LocalStore, *more: str) -> list[str]:
    return ["history", more[0], "--store", store.url, *more[1:]]


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file and folder below, with its time and bytes."""
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [folder, *folder.rglob("*")]
    }


def test_ls(run: Run, store: LocalStore, logs: dict[int, ManifestLog]) -> None:
    rows = run(*words(store, "ls", "-o", "json")).json()
    assert [(row["topic"], row["partition_id"]) for row in rows] == [
        ("/default/a", 6), ("/default/a", 11), ("/default/b", 7),
    ]  # fmt: skip
    sections = logs[7].manifest.sections
    assert rows[2] == {
        "topic": "/default/b", "partition_id": 7,
        "messages": sum(section.message_count for section in sections),
        "bytes": sum(section.byte_count for section in sections),
        "first_offset": 0, "end_offset": logs[7].manifest.end_offset, "objects": 3,
        "from_ns": START_NS, "until_ns": sections[-1].append_max_ns, "record": 2,
    }  # fmt: skip
    assert run(*words(store, "ls", "/default/b", "-o", "json")).json() == rows[2:]
    outcome = run(*words(store, "ls"))
    head, *lines = outcome.out.splitlines()
    assert head.split()[:4] == ["TOPIC", "PARTITION", "ID", "MESSAGES"]
    assert len(lines) == 3 and "2023-11-14 22:13:20" in lines[0]
    assert (outcome.code, outcome.err) == (0, "")


def test_a_partition_whose_messages_all_went(run: Run, store: LocalStore) -> None:
    log = ManifestLog(store, IDENTITY, 6, 1)
    log.commit("/default/a", 1, 1, first_offset=9, end_offset=9)
    (row,) = run(*words(store, "ls", "-o", "json")).json()
    assert (row["messages"], row["first_offset"], row["from_ns"]) == (0, 9, None)
    assert run(*words(store, "verify")).code == 0


def test_describe(run: Run, store: LocalStore, logs: dict[int, ManifestLog]) -> None:
    described = run(*words(store, "describe", "/default/a", "-o", "json")).json()
    assert [each["partition_id"] for each in described] == [6, 11]
    assert "sections" not in described[0]
    (one,) = run(*words(store, "describe", "11", "--objects", "-o", "json")).json()
    sections = one.pop("sections")
    assert one == described[1]
    assert (one["record"], one["snapshot"], one["uploader_epoch"]) == (2, 0, 1)
    assert one["identity"] == IDENTITY.hex()
    assert [
        (each["object"], each["base_offset"], each["end_offset"], each["messages"])
        for each in sections
    ] == [
        (each.key, each.base_offset, each.end_offset, each.message_count)
        for each in logs[11].manifest.sections
    ]
    text = run(*words(store, "describe", "/default/a", "--objects")).out
    assert text.count("uploader epoch  1") == 2
    assert text.count(object_key(1, 2)) == 2


@pytest.mark.parametrize("what", ["/default/c", "12"])
def test_describe_what_is_not_there(
    run: Run, store: LocalStore, logs: dict[int, ManifestLog], what: str
) -> None:
    outcome = run(*words(store, "describe", what))
    assert outcome.code == 3
    assert what in outcome.sentence() and "history ls" in outcome.sentence()
    for verb in ("ls", "verify"):
        assert run(*words(store, verb, "/default/c")).code == 3


def test_verify_of_sound_history(run: Run, store: LocalStore, logs: dict[int, ManifestLog]) -> None:
    put_object(store, {6: [make_frame(6, 900, [b"x"])]}, number=8)
    outcome = run(*words(store, "verify"))
    assert (outcome.code, outcome.err) == (0, "")
    orphan, totals = outcome.out.splitlines()
    assert orphan.startswith(f"orphan {object_key(1, 8)}: ") and "nothing was deleted" in orphan
    assert "3 partitions, 3 objects, " in totals and totals.endswith(": sound, 1 orphan")
    report = run(*words(store, "verify", "/default/b", "-o", "json")).json()
    assert (report["partitions"], report["damages"], report["orphans"]) == (1, [], None)


def test_verify_names_each_damage_in_one_line(
    run: Run, store: LocalStore, logs: dict[int, ManifestLog]
) -> None:
    section = logs[7].manifest.sections[1]
    change_object(store, section.key, lambda data: data.__setitem__(section.position + 130, 0xEE))
    store.delete([object_key(1, 2)])
    outcome = run(*words(store, "verify"))
    assert outcome.code == 1
    assert "4 damages" in outcome.sentence()
    *lines, totals = outcome.out.splitlines()
    assert lines[0].startswith(
        f"DAMAGE {section.key}: /default/b partition 7 offsets {section.base_offset} to "
        f"{section.end_offset}: "
    )
    assert all(line.startswith("DAMAGE ") and "; restore it" in line for line in lines)
    assert len(lines) == 4 and totals.endswith(": 4 damages, 0 orphans")
    outcome = run(*words(store, "verify", "-o", "json"))
    assert (outcome.code, len(outcome.json()["damages"])) == (1, 4)
    assert outcome.json()["damages"][0]["base_offset"] == section.base_offset
    assert "4 damages" in outcome.sentence()


def test_a_manifest_that_cannot_be_read_fails_and_hides_nothing(
    run: Run, store: LocalStore, logs: dict[int, ManifestLog]
) -> None:
    change_object(store, manifest_key(6, 1), lambda data: data.__setitem__(50, data[50] ^ 1))
    for verb, shown in ((["ls"], 2), (["describe", "/default/a"], 1)):
        outcome = run(*words(store, *verb, "-o", "json"))
        assert (outcome.code, len(outcome.json())) == (1, shown)
        assert manifest_key(6, 1) in outcome.sentence() and "restore it" in outcome.sentence()
    assert run(*words(store, "describe", "6")).code == 1
    assert run(*words(store, "describe", "7")).code == 0
    assert run(*words(store, "verify")).code == 1


def test_a_foreign_manifest_fails_and_hides_nothing(
    run: Run, store: LocalStore, logs: dict[int, ManifestLog]
) -> None:
    foreign = ManifestLog(store, b"another identity", 12, 1)
    foreign.commit("/default/c", 1, 1, first_offset=0, end_offset=0)
    outcome = run(*words(store, "ls", "-o", "json"))
    assert (outcome.code, len(outcome.json())) == (1, 4)
    assert "another broker" in outcome.sentence() and "of its own" in outcome.sentence()
    outcome = run(*words(store, "verify"))
    assert outcome.code == 1
    assert outcome.out.startswith("DAMAGE manifests/0000000012/: /default/c partition 12 ")


def damage_record(store: LocalStore, number: int) -> None:
    change_object(store, manifest_key(6, number), lambda data: data.__setitem__(50, data[50] ^ 1))


def test_repair(run: Run, store: LocalStore, logs: dict[int, ManifestLog], tmp_path: Path) -> None:
    section = logs[6].manifest.sections[1]
    damage_record(store, 1)
    before = tree(tmp_path)
    for more in ([], ["--dry-run"]):
        outcome = run(*words(store, "repair", *more))
        assert outcome.code == 1
        assert "stop the broker, then add --yes" in outcome.sentence()
    assert tree(tmp_path) == before
    head, name, record, hold, totals = outcome.out.splitlines()
    assert head == "repair /default/a partition 6: record 1 is damaged: its crc is wrong"
    offsets = f"offsets {section.base_offset} to {section.end_offset}"
    assert name == f"  name {section.key}: {offsets}"
    assert "3 records put aside" in record and totals == f"{store.url}: 1 partition to be repaired"
    assert hold.startswith("hold 1 object for 7 days: ")
    outcome = run(*words(store, "repair", "--yes", "-o", "json"))
    assert (outcome.code, outcome.err) == (0, "")
    (one,) = outcome.json()["partitions"]
    assert (one["partition_id"], one["lost"], outcome.json()["is_done"]) == (6, [], True)
    outcome = run(*words(store, "repair", "--yes"))
    assert (outcome.code, outcome.out) == (0, f"{store.url}: nothing to repair\n")
    assert run(*words(store, "verify")).code == 0


def test_repair_tells_what_is_lost(
    run: Run, store: LocalStore, logs: dict[int, ManifestLog]
) -> None:
    section = logs[6].manifest.sections[1]
    damage_record(store, 1)
    store.delete([section.key])
    outcome = run(*words(store, "repair", "--yes"))
    assert outcome.code == 1 and "readers are told" in outcome.sentence()
    assert f"  LOST offsets {section.base_offset} to {section.end_offset}" in outcome.out
    assert "DAMAGE lost/0000000006/" in outcome.out
    assert run(*words(store, "repair")).code == run(*words(store, "verify")).code == 1


def test_repair_of_a_partition_that_is_adopted(
    run: Run, store: LocalStore, logs: dict[int, ManifestLog]
) -> None:
    store.delete([manifest_key(7, number) for number in range(3)])
    outcome = run(*words(store, "repair"))
    assert outcome.code == 0 and outcome.out.count("add --adopt 7") == 3
    assert "\nhold 3 objects for 7 days: " in outcome.out
    assert not list(store.list(HOLDS_PREFIX))
    *unnamed, held, totals = run(*words(store, "repair", "--yes")).out.splitlines()
    (hold,) = list_holds(store, SystemClock().wall_ns())
    assert (len(unnamed), len(hold.keys)) == (3, 3) and totals.endswith(": nothing to repair")
    until = time_text(hold.expires_ms // 1000 * SECOND_NS)
    assert held.startswith(f"held 3 objects until {until}: ")
    assert held.endswith(f"`danube-fast history release {hold.key}`")
    outcome = run(*words(store, "repair", "--adopt", "7=/default/b", "--yes"))
    assert outcome.code == 0 and outcome.out.startswith("repair /default/b partition 7: ")
    (row,) = run(*words(store, "ls", "/default/b", "-o", "json")).json()
    assert row["end_offset"] == logs[7].manifest.end_offset


def test_repair_of_a_partition_whose_topic_is_not_known(
    run: Run, store: LocalStore, logs: dict[int, ManifestLog]
) -> None:
    for number in range(3):
        damage_record(store, number)
    outcome = run(*words(store, "repair", "--yes"))
    assert outcome.code == 0 and "repair topic unknown, partition 6: " in outcome.out
    assert "no broker takes it without: add --adopt 6=TOPIC" in outcome.out
    outcome = run(*words(store, "repair", "--adopt", "6=/default/a", "--yes"))
    assert outcome.code == 0
    assert "no record tells its topic: it was to be /default/a" in outcome.out
    assert run(*words(store, "describe", "6", "-o", "json")).json()[0]["topic"] == "/default/a"


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--adopt", "flights"], 2, "is not PARTITION_ID or PARTITION_ID=TOPIC"),
        (["--adopt", "99"], 3, "nothing of partition 99"),
        (["--adopt", "6=/default/x"], 2, "adopt it without a topic"),
        (["--dry-run", "--yes"], 2, "leave one of them out"),
    ],
)
def test_repair_asked_for_in_a_wrong_way(
    run: Run, store: LocalStore, logs: dict[int, ManifestLog], more: list[str], code: int, said: str
) -> None:
    outcome = run(*words(store, "repair", *more))
    assert (outcome.code, outcome.out) == (code, "")
    assert said in outcome.sentence()


def test_an_empty_store(run: Run, store: LocalStore) -> None:
    outcome = run(*words(store, "ls"))
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err == f"no history in {store.url}\n"
    assert run(*words(store, "ls", "-o", "json")).json() == []
    outcome = run(*words(store, "verify"))
    assert outcome.code == 3, "a wrong prefix must not be called sound"
    assert "check the URL" in outcome.sentence()


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_nothing_is_written(
    run: Run, store: LocalStore, logs: dict[int, ManifestLog], tmp_path: Path, verb: list[str]
) -> None:
    before = tree(tmp_path)
    assert run(*words(store, *verb)).code == 0
    assert tree(tmp_path) == before


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
@pytest.mark.parametrize(
    ("url", "code", "said"),
    [
        ("file://{}/absent", 4, "correct the store's URL"),
        ("file://{}/file", 4, "correct the store's URL"),
        ("file://relative", 2, "file:///absolute/folder"),
        ("nonsense", 2, "s3://bucket/prefix"),
        ("gopher://x/y", 2, "there are file://"),
        ("s3://key:secret@bucket/x", 2, "holds credentials"),
    ],
)
def test_a_wrong_url(
    run: Run, tmp_path: Path, verb: list[str], url: str, code: int, said: str
) -> None:
    (tmp_path / "file").touch()
    outcome = run("history", verb[0], "--store", url.format(tmp_path), *verb[1:])
    assert (outcome.code, outcome.out) == (code, "")
    assert said in outcome.sentence()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_without_permission(
    run: Run, store: LocalStore, logs: dict[int, ManifestLog], monkeypatch: pytest.MonkeyPatch,
    verb: list[str],
) -> None:  # fmt: skip
    def refuse(*_: object) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:  # root may read everything: modes would refuse nothing
        patch.setattr(local, "open_file", refuse)
        outcome = run(*words(store, *verb))
    assert (outcome.code, outcome.out) == (4, "")
    assert "let this user read there" in outcome.sentence()


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_a_store_must_be_named(run: Run, verb: list[str]) -> None:
    outcome = run("history", *verb)
    assert outcome.code == 2
    assert "--store" in outcome.sentence()


def test_a_store_in_s3(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("AWS_ACCESS_KEY_ID", ACCESS_KEY),
        ("AWS_SECRET_ACCESS_KEY", SECRET_KEY),
        ("AWS_EC2_METADATA_DISABLED", "true"),
        ("AWS_CONFIG_FILE", str(tmp_path / "config")),
        ("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials")),
    ):
        monkeypatch.setenv(name, value)
    with moto_server() as endpoint:
        plain_client(endpoint).create_bucket(Bucket=BUCKET)
        proxy = FaultyProxy(endpoint)
        try:
            url = f"s3://{BUCKET}/p?endpoint_url={proxy.url}&region=us-east-1&path_style=true"
            made = open_store(url, SystemClock(), tmp_path)
            put_history(made, 2, TOPICS, part_bytes=made.part_bytes_min)
            made.close()
            proxy.seen.clear()
            for verb in VERBS:
                outcome = run("history", verb[0], "--store", url, *verb[1:])
                assert (outcome.code, outcome.err) == (0, "")
            assert "2 objects" in outcome.out and ": sound, 0 orphans" in outcome.out
            assert {method for method, _ in proxy.seen} == {"GET", "HEAD"}, "it only reads"
            proxy.fail("GET", "objects/00000001", 9, status=403, code="AccessDenied")
            outcome = run("history", "verify", "--store", url)
            assert outcome.code == 4
            assert "check what the credentials allow" in outcome.sentence()
            outcome = run("history", "ls", "--store", url.replace(BUCKET, "another-bucket"))
            assert outcome.code == 4
            assert "make the bucket" in outcome.sentence()
        finally:
            proxy.close()
