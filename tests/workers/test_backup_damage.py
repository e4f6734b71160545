"""Backups that are damaged, cut or made with bad intentions: refused in a sentence, and nothing is left behind.

DANUBE_BACKUP_CASES=N tries N damaged files of each kind; DANUBE_BACKUP_SEED draws others.
"""

from __future__ import annotations

import hashlib
import os
import random
import resource
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from danube_fast.clock import SystemClock
from danube_fast.errors import (
    DanubeError,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
)
from danube_fast.workers.supervisor import archive
from danube_fast.workers.supervisor.backup import back_up
from danube_fast.workers.supervisor.restore import check_backup, restore
from tests.workers.backup_rig import built, make_directory, packed, tree, unpacked

CASES = int(os.environ.get("DANUBE_BACKUP_CASES", "40"))
SEED = int(os.environ.get("DANUBE_BACKUP_SEED", "1"))
EDGE_BYTES = 24
"""So many bytes at the beginning and at the end are flipped one by one."""
ROOT = Path(__file__).resolve().parents[2]


class Case:
    """A sound backup, and a place for harmed ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_directory(folder / "data")
        self.tree = tree(folder / "data")
        self.sound = (
            back_up(folder / "data", folder / "sound", SystemClock()).path.read_bytes()
        )  # fmt: skip
        self.place = folder / "place"
        self.place.mkdir()

    def try_restore(self, content: bytes, about: str) -> bool:
        """Whether this is restored; else it must be refused in a sentence and leave nothing."""
        file, target = self.folder / "harmed", self.place / "new"
        file.write_bytes(content)
        try:
            restore(file, target)
        except DanubeError as error:
            assert os.listdir(self.place) == [], f"{about}: it left something"
            text = str(error)
            assert str(file) in text and "\n" not in text and ";" in text, about
            return False
        found = tree(target)
        assert os.listdir(self.place) == ["new"], about
        subprocess.run(["rm", "-rf", str(target)], check=True, timeout=60)
        assert {k: v[1] for k, v in found.items()} == {k: v[1] for k, v in self.tree.items()}, about
        return True


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("damage"))


def flips(content: bytes) -> Iterator[tuple[str, bytes]]:
    """The content with one bit or byte changed: at each place of the edges, and by chance."""
    draw = random.Random(SEED)
    size = len(content)
    places = [*range(EDGE_BYTES), *range(size - EDGE_BYTES, size)]
    places += [draw.randrange(size) for _ in range(CASES)]
    for place in places:
        harmed = bytearray(content)
        harmed[place] ^= draw.choice([1 << draw.randrange(8), draw.randrange(1, 256)])
        yield f"seed {SEED}: byte {place} of {size}", bytes(harmed)


def test_every_flipped_byte_is_found_or_does_not_matter(case: Case) -> None:
    taken = [about for about, content in flips(case.sound) if case.try_restore(content, about)]
    # bits of the frame's own header may say the same in another way
    assert len(taken) <= EDGE_BYTES // 4, taken
    assert zstandard.get_frame_parameters(case.sound).has_checksum


def test_every_flipped_byte_under_a_right_checksum_too(case: Case) -> None:
    """As if the file was written anew: the manifest and each sha256 decide."""
    for about, content in flips(unpacked(case.sound)):
        case.try_restore(packed(content), f"{about}, packed anew")


def test_every_flipped_byte_of_the_manifest(case: Case) -> None:
    """No traceback, no file outside, no other content."""
    plain = unpacked(case.sound)
    draw = random.Random(SEED)
    end = plain.index(b"\n}\n")
    for place in [draw.randrange(end) for _ in range(2 * CASES)]:
        harmed = bytearray(plain)
        harmed[place] ^= 1 << draw.randrange(8)
        case.try_restore(packed(bytes(harmed)), f"seed {SEED}: byte {place} of the manifest")


def test_a_file_that_is_cut_is_refused(case: Case) -> None:
    draw = random.Random(SEED)
    size = len(case.sound)
    ends = [*range(4, EDGE_BYTES), *range(size - EDGE_BYTES, size)]
    for end in ends + [draw.randrange(4, size) for _ in range(CASES)]:
        assert not case.try_restore(case.sound[:end], f"cut to {end} of {size}"), end
    plain = unpacked(case.sound)
    for end in [draw.randrange(len(plain)) for _ in range(CASES)]:
        assert not case.try_restore(packed(plain[:end]), f"cut to {end} of {len(plain)}, packed")


def test_a_file_that_goes_on_is_refused(case: Case) -> None:
    plain = unpacked(case.sound)
    for about, content in {
        "garbage": case.sound + b"garbage",
        "twice": case.sound + case.sound,
        "zeros inside": packed(plain + bytes(512)),
    }.items():
        assert not case.try_restore(content, about)


# ---------------------------------------------------------------- bad intentions

CONTENT = b"content"
SHA = hashlib.sha256(CONTENT).hexdigest()


def manifest(*files: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "format": "danube-fast backup", "version": 1, "broker": "", "time": "", "danube_fast": "0", "secrets": [],
        "secrets_left_out": [], "folders": [{"path": "", "mode": "0750"}, {"path": "audit", "mode": "0700"}],
        "files": list(files), **changes,
    }  # fmt: skip


def named(path: str, **changes: Any) -> dict[str, Any]:
    return {"path": path, "bytes": len(CONTENT), "mode": "0600", "sha256": SHA, **changes}


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tuple[Any, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(CONTENT)
    return info, CONTENT


NAMES = ["/etc/x", "../x", "audit/../../x", "./x", "a//b", "audit/", "", ".", "..", "a\0b", "missing/x", "audit", "x" * 2000, "\x1b[2Jx"]  # fmt: skip
KINDS = [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE,
         tarfile.GNUTYPE_SPARSE, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK]  # fmt: skip


def test_the_hostile_ones_differ_from_a_sound_one_in_one_thing(case: Case) -> None:
    sound = built(manifest(named("audit/x"), named("y")), [member("audit/x"), member("y")])
    (case.folder / "harmed").write_bytes(sound)
    restore(case.folder / "harmed", case.place / "small")
    assert (case.place / "small/audit/x").read_bytes() == CONTENT
    subprocess.run(["rm", "-rf", str(case.place / "small")], check=True, timeout=60)


@pytest.mark.parametrize("name", NAMES)
def test_names_that_lead_elsewhere(case: Case, name: str) -> None:
    assert not case.try_restore(built(manifest(named(name)), [member(name)]), name)
    folders = [{"path": "", "mode": "0750"}, {"path": name, "mode": "0750"}]
    if name != "audit":
        assert not case.try_restore(built(manifest(folders=folders), []), name)


@pytest.mark.parametrize("kind", KINDS)
def test_members_that_are_no_files(case: Case, kind: bytes) -> None:
    for link in ("/etc/passwd", "../../x", "y"):
        content = built(manifest(named("x")), [member("x", kind, link)])
        assert not case.try_restore(content, f"{kind!r} to {link}")


def test_members_that_the_manifest_does_not_have(case: Case) -> None:
    one = manifest(named("x"))
    for about, members in {
        "another name": [member("y")],
        "one more": [member("x"), member("y")],
        "none": [],
        "twice": [member("x"), member("x")],
        "another order": [member("y"), member("x")],
        "absolute": [member("/x")],
        "elsewhere": [member("../x")],
        "a long name": [member("long/" * 300 + "x")],
    }.items():
        assert not case.try_restore(built(one, members), about), about


def test_a_name_of_a_terabyte(case: Case) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1 << 40
    plain = unpacked(built(manifest(named("x")), []))[:-1024] + info.tobuf(tarfile.GNU_FORMAT)
    assert not case.try_restore(packed(plain), "a long name")


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b"\xff\xfe", b'"x"', b'{"format":"danube-fast backup"}', b"[" * 100_000,
        b'{"x":' + b"[" * 100_000, manifest(named("x"), time="\x1b[2J"), manifest(named("x"), broker="x" * 1000),
        manifest(named("x"), format="other"), manifest(named("x"), version=0), manifest(named("x"), folders=[]),
        manifest(named("x", bytes=-1)), manifest(named("x", bytes=1 << 70)), manifest(named("x", bytes="7")),
        manifest(named("x", mode="4755")), manifest(named("x", mode="-1")), manifest(named("x", mode="rw")),
        manifest(named("x", sha256="")), manifest(named("x"), named("x")), manifest(named("x"), secrets=["server.key"]),
        manifest(named("x"), folders=[{"path": "", "mode": "0750"}] * 2),
        manifest(named("x"), folders=[{"path": "", "mode": "7777"}]),
        manifest(named("x"), folders=[{"path": "", "mode": "0750"}, {"path": "x", "mode": "0750"}]),
    ],
    ids=lambda content: str(content)[:60],
)  # fmt: skip
def test_manifests_that_make_no_sense(case: Case, content: Any) -> None:
    assert not case.try_restore(built(content, [member("x"), member("x")]), "a manifest")


def test_a_newer_format_is_named(case: Case) -> None:
    (case.folder / "harmed").write_bytes(built(manifest(version=2, files="other"), []))
    with pytest.raises(FailedPrecondition, match=r"format 2 .* newer danube-fast"):
        check_backup(case.folder / "harmed")


def test_an_archive_of_another_program_is_named(case: Case) -> None:
    plain = unpacked(built(manifest(named("x")), [member("x")]))
    (case.folder / "harmed").write_bytes(packed(plain[1024 * 2 :] or plain))
    with pytest.raises((InvalidArgument, DataLoss)):
        check_backup(case.folder / "harmed")


def test_amounts_that_no_disk_has(case: Case) -> None:
    huge = manifest(named("x", bytes=1 << 60))
    (case.folder / "harmed").write_bytes(built(huge, [member("x")]))
    with pytest.raises(ResourceExhausted, match="no room"):
        restore(case.folder / "harmed", case.place / "new")
    assert os.listdir(case.place) == []


def test_counts_beyond_the_bounds(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "FILES_MAX", 3)
    many = [f"f{number}" for number in range(4)]
    content = built(manifest(*map(named, many)), map(member, many))
    assert not case.try_restore(content, "too many files")
    with pytest.raises(FailedPrecondition, match="more than one backup holds"):
        back_up(case.folder / "data", case.folder / "other", SystemClock())
    monkeypatch.setattr(archive, "MANIFEST_BYTES_MAX", 1000)
    assert not case.try_restore(case.sound, "a large manifest")
    assert not (case.folder / "other").exists()


_WITH_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from danube_fast.errors import DanubeError
from danube_fast.workers.supervisor.restore import check_backup
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)
try:
    check_backup(Path(sys.argv[1]))
except DanubeError as error:
    print(error)
"""


def test_a_bomb_takes_little_memory(case: Case) -> None:
    """A few KiB that become gigabytes, and a frame that asks for a window of a gigabyte."""
    zeros = zstandard.ZstdCompressor(level=1, write_checksum=True).compressobj()
    info = tarfile.TarInfo("x")
    info.size = 4 << 30
    head = unpacked(built(manifest(named("x", bytes=info.size)), []))[:-1024]
    head += info.tobuf(tarfile.GNU_FORMAT)
    parts = [zeros.compress(head)] + [zeros.compress(bytes(64 << 20)) for _ in range(8)]
    bomb = b"".join([*parts, zeros.flush()])
    assert len(bomb) < 1 << 20
    parameters = zstandard.ZstdCompressionParameters(window_log=30, write_content_size=False)
    wide = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    for name, content in {"bomb": bomb, "window": wide.compress(unpacked(case.sound)) + wide.flush()}.items():  # fmt: skip
        file = case.folder / name
        file.write_bytes(content)
        found = subprocess.run(
            [sys.executable, "-c", _WITH_LITTLE_MEMORY, str(file)],
            capture_output=True, text=True, timeout=120, cwd=ROOT, check=False,
        )  # fmt: skip
        assert found.returncode == 0 and "is damaged" in found.stdout, (name, found)


# ---------------------------------------------------------------- kills

_KILLED = """
import os, signal, sys
from pathlib import Path
from danube_fast.clock import SystemClock
from danube_fast.workers.supervisor import archive, backup, restore

command, step, source, target = sys.argv[1:]

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def progress(done, total):
    if step == "half" and 4 * done >= 3 * total or step == "late" and done == total:
        kill()

if step in ("link", "replace", "rename", "fsync"):
    setattr(os, step, kill)
if step == "begin":
    archive.ArchiveWriter.add = archive.ArchiveReader.read = kill
if command == "backup":
    backup.back_up(Path(source), Path(target), SystemClock(), replace=step == "replace", on_progress=progress)
else:
    restore.restore(Path(source), Path(target), progress)
print("not killed")
"""


def killed(command: str, step: str, source: Path, target: Path) -> None:
    """Run a command that SIGKILL ends at some step."""
    found = subprocess.run(
        [sys.executable, "-c", _KILLED, command, step, str(source), str(target)],
        capture_output=True, text=True, timeout=120, cwd=ROOT, check=False,
    )  # fmt: skip
    assert found.returncode == -signal.SIGKILL, found


@pytest.mark.parametrize("step", ["begin", "half", "late", "fsync", "link", "replace"])
def test_a_backup_that_is_killed_is_not_believed(case: Case, tmp_path: Path, step: str) -> None:
    target = tmp_path / "saved"
    if step == "replace":
        target.write_bytes(case.sound)
    killed("backup", step, case.folder / "data", target)
    left = [name for name in os.listdir(tmp_path) if name != "saved"]
    assert all(name.startswith(".saved.") for name in left) and len(left) == 1
    assert target.exists() == (step == "replace")
    if step in ("begin", "half", "late"):
        with pytest.raises(DanubeError):
            check_backup(tmp_path / left[0])
    made = back_up(case.folder / "data", target, SystemClock(), replace=step == "replace")
    restore(made.path, tmp_path / "new")
    assert tree(tmp_path / "new") == case.tree


@pytest.mark.parametrize("step", ["begin", "half", "late", "fsync", "rename"])
def test_a_restore_that_is_killed_is_not_believed(case: Case, tmp_path: Path, step: str) -> None:
    killed("restore", step, case.folder / "sound", tmp_path / "new")
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".new.restore-")
    restore(case.folder / "sound", tmp_path / "new")
    assert tree(tmp_path / "new") == case.tree


def limited(command: Callable[[], object], byte_count: int) -> None:
    """Run a command whose files may not grow beyond a size, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (byte_count, before[1]))
    try:
        command()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("byte_count", [0, 1000, 16_000])
def test_no_room_leaves_nothing(case: Case, tmp_path: Path, byte_count: int) -> None:
    with pytest.raises(ResourceExhausted, match=r"no room for .*saved"):
        limited(lambda: back_up(case.folder / "data", tmp_path / "saved", SystemClock()), byte_count)  # fmt: skip
    with pytest.raises(ResourceExhausted, match=r"no room for .*new"):
        limited(lambda: restore(case.folder / "sound", tmp_path / "new"), byte_count)
    assert os.listdir(tmp_path) == []
