"""Files of the audit log: rotation, lines that a kill has cut, disks that fail, pages."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from danube_fast.errors import InvalidArgument
from danube_fast.security import audit_files
from danube_fast.security.audit import (
    LINE_BYTES_MAX,
    AuditRecord,
    decode_record,
    encode_record,
    fingerprint,
    shown_address,
    shown_arguments,
    shown_text,
    shown_time,
)
from danube_fast.security.audit_files import AuditFile, begun_anew, last_seq, read_page, start_at
from danube_fast.security.curve import new_key_pair
from danube_fast.security.records import SUBJECT_BYTES_MAX

DAY = "2026-11-27T"


def line(seq: int, time: str = "") -> bytes:
    return encode_record(AuditRecord(seq=seq, event="note", action="test", time=time))


def read_all(folder: Path, bytes_max: int = 1 << 20) -> tuple[list[int], int]:
    """Numbers of all records, and how many lines were damaged."""
    numbers: list[int] = []
    cursor, damaged = "", 0
    for _ in range(10_000):
        page = read_page(folder, cursor, bytes_max)
        numbers += [record.seq for record in page.records]
        cursor, damaged = page.cursor, damaged + page.damaged
        if page.is_last:
            return numbers, damaged
    raise AssertionError("the pages have no end")


def test_lines_come_back_in_order_over_all_files(tmp_path: Path) -> None:
    folder = tmp_path / "audit"
    file = AuditFile(folder, file_bytes=1000, files=100)
    for seq in range(1, 201):
        file.append(line(seq), sync=seq % 7 == 0)
    file.close()
    names = sorted(os.listdir(folder))
    assert len(names) > 5 and names[-1] == "audit.jsonl"
    assert all((folder / name).stat().st_size < 1100 for name in names)
    assert {stat.S_IMODE((folder / name).stat().st_mode) for name in names} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert read_all(folder) == (list(range(1, 201)), 0)
    assert last_seq(folder) == 200


def test_the_oldest_files_go(tmp_path: Path) -> None:
    folder = tmp_path / "audit"
    file = AuditFile(folder, file_bytes=1000, files=3)
    for seq in range(1, 201):
        file.append(line(seq), sync=False)
    names = sorted(os.listdir(folder))
    assert len(names) == 3
    numbers, damaged = read_all(folder)
    assert damaged == 0 and numbers == list(range(numbers[0], 201)) and numbers[0] > 100
    assert read_page(folder, "1:0").records[0].seq == numbers[0], (
        "a cursor into a file that is gone"
    )


def test_a_place_stays_right_while_files_are_closed(tmp_path: Path) -> None:
    folder = tmp_path / "audit"
    file = AuditFile(folder, file_bytes=2000, files=50)
    seen: list[int] = []
    cursor = ""
    for seq in range(1, 301):
        file.append(line(seq), sync=False)
        if seq % 3 == 0:
            page = read_page(folder, cursor, LINE_BYTES_MAX)
            seen += [record.seq for record in page.records]
            cursor = page.cursor
    for _ in range(100):
        page = read_page(folder, cursor)
        seen += [record.seq for record in page.records]
        cursor = page.cursor
    assert seen == list(range(1, 301))


@pytest.mark.parametrize("cut", [1, 5, 20, 35])
def test_half_a_line_is_passed_over(tmp_path: Path, cut: int) -> None:
    folder = tmp_path / "audit"
    file = AuditFile(folder, file_bytes=1 << 20, files=3)
    file.append(line(1), sync=True)
    file.close()
    with (folder / "audit.jsonl").open("ab") as torn:
        torn.write(line(2)[:cut])
    assert last_seq(folder) == 1
    assert read_page(folder, read_page(folder).cursor).is_last, "half a line may be whole later"
    file = AuditFile(folder, file_bytes=1 << 20, files=3)
    file.append(line(3), sync=True)
    assert read_all(folder) == ([1, 3], 1)
    assert (folder / "audit.jsonl").read_bytes().count(b"\n") == 3


def test_damage_does_not_stop_a_reader(tmp_path: Path) -> None:
    folder = tmp_path / "audit"
    folder.mkdir()
    garbage = b"\xff" * (3 * LINE_BYTES_MAX)
    (folder / "audit-00000001.jsonl").write_bytes(line(1) + garbage)
    (folder / "audit-00000002.jsonl").write_bytes(b"")
    (folder / "audit.jsonl").write_bytes(garbage + b"\n" + line(2) + b'{"seq": "x"}\n' + line(3))
    numbers, damaged = read_all(folder, LINE_BYTES_MAX)
    assert numbers == [1, 2, 3] and damaged > 0
    for text in ("x", "1:", "-1:0", "1:0:0"):
        with pytest.raises(InvalidArgument):
            read_page(folder, text)


Fail = Callable[[str, int], None]


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets a call of the system fail, once; a write after some bytes."""
    real = {"write": os.write, "fdatasync": os.fdatasync}
    plan: dict[str, int] = {}

    def write(fd: int, data: Any) -> int:
        if "write" in plan:
            left = plan.pop("write")
            if left:
                plan["write"] = 0
                return real["write"](fd, bytes(data)[:left])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real["write"](fd, data)

    def fdatasync(fd: int) -> None:
        if plan.pop("fdatasync", None) is not None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real["fdatasync"](fd)

    monkeypatch.setattr(audit_files.os, "write", write)
    monkeypatch.setattr(audit_files.os, "fdatasync", fdatasync)
    return plan.__setitem__


@pytest.mark.parametrize("written", [0, 1, 30])
def test_a_full_disk(tmp_path: Path, fail: Fail, written: int) -> None:
    folder = tmp_path / "audit"
    file = AuditFile(folder, file_bytes=1 << 20, files=3)
    file.append(line(1), sync=True)
    fail("write", written)
    with pytest.raises(OSError, match="No space"):
        file.append(line(2), sync=True)
    file.append(line(3), sync=True)
    assert read_all(folder) == ([1, 3], 0), "half a line stays only where it cannot be cut off"


def test_a_reader_goes_on_where_the_newest_file_was_moved_away(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"audit-{number:08}.jsonl").write_bytes(line(number))
    (tmp_path / "audit.jsonl").write_bytes(line(3))
    assert begun_anew(tmp_path, "3:99") == "3:0", "those that are there still are not read again"
    assert begun_anew(tmp_path, "2:0") == "2:0" and begun_anew(tmp_path, "") == ""
    assert begun_anew(tmp_path, "9:7") == "", "all were moved"


def test_half_a_line_that_cannot_be_cut_off(
    tmp_path: Path, fail: Fail, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "audit"
    file = AuditFile(folder, file_bytes=1 << 20, files=3)
    file.append(line(1), sync=True)
    fail("write", 30)
    with monkeypatch.context() as patch:
        patch.setattr(audit_files.os, "ftruncate", _no_space)
        with pytest.raises(OSError, match="No space"):
            file.append(line(2), sync=True)
    file.append(line(3), sync=True)
    assert read_all(folder) == ([1, 3], 1)


def test_lines_that_a_full_disk_took_are_there_once(tmp_path: Path, fail: Fail) -> None:
    folder = tmp_path / "audit"
    file = AuditFile(folder, file_bytes=1 << 20, files=3)
    file.append(line(1), sync=True)
    fail("write", len(line(2)) + 5)
    with pytest.raises(OSError, match="No space"):
        file.append(line(2) + line(3), sync=True)
    file.append(line(2) + line(3), sync=True)
    assert read_all(folder) == ([1, 2, 3], 0)


def _no_space(fd: int, size: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_whose_sync_has_failed_is_written_no_more(tmp_path: Path, fail: Fail) -> None:
    folder = tmp_path / "audit"
    file = AuditFile(folder, file_bytes=1 << 20, files=3)
    file.append(line(1), sync=True)
    fail("fdatasync", 1)
    with pytest.raises(OSError, match="Input/output"):
        file.append(line(2), sync=True)
    file.append(line(3), sync=True)
    assert (folder / "audit.jsonl").read_bytes() == line(3)
    assert read_all(folder) == ([1, 2, 3], 0)


def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "audit"
    folder.mkdir()
    (folder / "audit.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        AuditFile(folder, file_bytes=1 << 20, files=3).append(line(1), sync=True)
    assert not (tmp_path / "elsewhere").exists()


def test_a_time_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "audit"
    file = AuditFile(folder, file_bytes=400, files=100)
    for hour in range(24):
        file.append(line(hour + 1, f"{DAY}{hour:02}:00:00.000Z"), sync=False)
    cursor = start_at(folder, f"{DAY}12:30:00.000Z")
    page = read_page(folder, cursor)
    assert page.records[0].seq <= 14 and int(cursor.split(":")[0]) > 1
    assert start_at(folder, "2000-01-01T00:00:00.000Z") == ""
    file.close()
    (folder / "audit.jsonl").unlink()
    (folder / "audit.jsonl").touch()
    assert int(start_at(folder, f"{DAY}12:30:00.000Z").split(":")[0]) <= 13


# ---------------------------------------------------------------- what a record shows


def test_secrets_are_taken_out() -> None:
    pair = new_key_pair()
    api_key = f"dfk_abcdefgh12345678_{'s' * 43}"
    token = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhbm4ifQ.c2lnbmF0dXJl"
    reply = "/system/reply-0123456789abcdef"
    for secret in (pair.secret, pair.public, f"curve:{pair.secret}", api_key, token, reply):
        shown = shown_text(f"before {secret} behind")
        assert secret.split(":", 1)[-1][-12:] not in shown, shown
        assert shown.startswith("before ") and shown.endswith(" behind"), shown
    for name in (
        "/shop/orders#billing",
        "a" * 40,
        "/shop/" + "x" * 34,
        "user:ann",
        "/shop/*-?-" + "y" * 30,
    ):
        assert shown_text(name) == name
    assert len(shown_text("x" * 10_000)) == 200


def test_the_subject_of_a_certificate_is_shown_whole() -> None:
    longest = f"mtls:CN={'x' * (SUBJECT_BYTES_MAX - 3)}"
    like_a_key = "mtls:CN=orders,OU=a+ST=b,O=The-Shop,C=DE"
    assert len(like_a_key) == 40
    for text in (longest, like_a_key, "mtls:CN=Jörg von der Straße\\, Köln,O=Shop"):
        assert shown_text(text) == text == fingerprint(text)


def test_arguments_are_shown_by_name_only() -> None:
    allowed = frozenset({"topic", "values", "ttl", "groups", "credential"})
    public = new_key_pair().public
    shown = shown_arguments(
        {
            "topic": "/shop/orders", "label": "free text", "values": {"ttl": 5, "pass": "word"},
            "groups": ["g"] * 100, "credential": f"curve:{public}", "unknown": {"deep": "free text"},
        },
        allowed,
    )  # fmt: skip
    assert shown["values"] == {"ttl": 5, "not_shown": ["pass"]}
    assert shown["not_shown"] == ["label", "unknown"]
    assert len(shown["groups"]) == 17
    assert shown["credential"] == fingerprint(f"curve:{public}")
    deep: Any = "x"
    for _ in range(5000):
        deep = {"values": [deep]}
    assert len(str(shown_arguments({"values": deep}, allowed))) < 100
    text = str(shown)
    assert "free text" not in text and "word" not in text and public not in text


def test_lines_are_bounded() -> None:
    record = AuditRecord(event="begin", arguments={f"n{i}": "x" * 200 for i in range(500)})
    assert len(encode_record(record)) <= LINE_BYTES_MAX
    odd = AuditRecord(event="denied", resource='a\nb"\u2028\x00c', principal="\x1b[31m")
    assert encode_record(odd).count(b"\n") == 1
    assert decode_record(encode_record(odd)) == odd
    assert decode_record(b"[]") is None


def test_proofs_addresses_and_times() -> None:
    assert fingerprint("uid:1000") == "uid:1000"
    assert fingerprint("curve:abc") == fingerprint("curve:abc") != fingerprint("curve:abd")
    assert len(fingerprint("curve:abc")) == len("curve:") + 16
    assert shown_address("localhost:1000:100:4242") == "uid:1000 pid:4242"
    assert shown_address("10.0.0.7") == "10.0.0.7"
    assert shown_time(1_700_000_000_987_654_321) == "2023-11-14T22:13:20.987Z"
