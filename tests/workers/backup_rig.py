"""A small data directory that no broker has served, and what lies in it, for the tests of backups."""

from __future__ import annotations

import io
import random
import stat
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from danube_fast.metadata.seal import Seal, SealFile
from danube_fast.security.server_keys import ServerKeys
from danube_fast.workers.supervisor.datadir import DataDirectory
from danube_fast.workers.supervisor.recovery import recover

__all__ = [
    "IDENTITY",
    "LEFT_OUT",
    "LONG_NAME",
    "built",
    "make_directory",
    "manifest_in",
    "packed",
    "tree",
    "unpacked",
]

IDENTITY = bytes(range(16))
LONG_NAME = "history/objects/" + "0123/" * 30 + "4" * 120
LEFT_OUT = {
    "LOCK", "metadata/lock", "logs/0000/lock", "logs/0000/spare-3.seg", "logs/0000/spare-4.tmp",
    "logs/0000/reserve.seg", "logs/0000/index", "logs/0000/index/data.mdb", "history-cache", "history-cache/piece",
    ".server.key.0123", "tls.key",
}  # fmt: skip
"""What a backup does not hold."""


def make_directory(folder: Path) -> None:
    """All kinds of files that a broker has, with content by chance."""
    draw = random.Random(1)
    DataDirectory.open(str(folder)).close()
    recover(folder, new_server_key=False)
    ServerKeys(folder).prepare()
    SealFile(folder / "metadata.seal").create(Seal(IDENTITY, 7))
    files = {
        "LOGS": b"danube-fast logs in use: 1\n", "metadata/data.mdb": draw.randbytes(9000), "metadata/lock": b"",
        "logs/0000/00000000000000000000.seg": draw.randbytes(5000) + bytes(1 << 20),
        "logs/0000/00000000000000004096.snap": draw.randbytes(700), "logs/0000/losses.jsonl": b"{}\n",
        "logs/0000/lock": b"", "logs/0000/spare-3.seg": draw.randbytes(9000), "logs/0000/spare-4.tmp": b"x",
        "logs/0000/reserve.seg": bytes(4096), "logs/0000/index/data.mdb": draw.randbytes(9000),
        "audit/audit.jsonl": b"{}\n" * 30, "audit/published": b"", LONG_NAME: draw.randbytes(512),
        "history-cache/piece": draw.randbytes(9000), ".server.key.0123": b"half a secret", "tls.key": b"not ours",
    }  # fmt: skip
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o600)
    (folder / "audit/audit.jsonl").chmod(0o640)
    (folder / "logs").chmod(0o755)


def tree(folder: Path) -> dict[str, tuple[int, bytes | None]]:
    """Mode and content of everything below a folder, but for what backups leave out."""
    found: dict[str, tuple[int, bytes | None]] = {}
    for path in (folder, *folder.rglob("*")):
        name = "" if path == folder else path.relative_to(folder).as_posix()
        if name not in LEFT_OUT:
            content = None if path.is_dir() else path.read_bytes()
            found[name] = stat.S_IMODE(path.stat().st_mode), content
    return found


def unpacked(content: bytes) -> bytes:
    """The tar archive in a backup."""
    with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(content)) as stream:
        return stream.read()


def packed(archive: bytes, level: int = 1) -> bytes:
    """A tar archive as a backup has it."""
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=True)
    return compressor.compress(archive)


def manifest_in(content: bytes) -> dict[str, Any]:
    """The manifest of a backup, as any program reads it."""
    with tarfile.open(fileobj=io.BytesIO(unpacked(content))) as archive:
        first = archive.next()
        assert first is not None and first.name == "manifest.json"
        file = archive.extractfile(first)
        assert file is not None
        return dict(msgspec.json.decode(file.read()))


def built(manifest: Any, members: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    """A backup with this manifest and these members, made by the standard library."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.GNU_FORMAT) as archive:
        content = manifest if isinstance(manifest, bytes) else msgspec.json.encode(manifest)
        first = tarfile.TarInfo("manifest.json")
        first.size = len(content)
        archive.addfile(first, io.BytesIO(content))
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
        end = archive.offset
    return packed(target.getvalue()[:end] + bytes(1024))
