"""The file of a backup: a tar archive in one zstd frame with a checksum, which `tar --zstd` reads, too.

    manifest.json           first: what is behind it, in order, with sizes, modes and sha256
    logs/0000/...seg        regular files only, each exactly as the manifest says
    ...

The manifest decides. A reader takes no name, type or size from the archive that the manifest does not have at that
place; what is damaged, cut or made by someone with bad intentions is DataLoss, whichever it is.
"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, NoReturn, cast

import msgspec
import zstandard

from danube_fast.errors import DanubeError, DataLoss, FailedPrecondition, InvalidArgument

__all__ = ["CHUNK_BYTES", "ArchiveReader", "ArchiveWriter", "File", "Folder", "Manifest"]

FORMAT = "danube-fast backup"
VERSION = 1
MANIFEST = "manifest.json"
MANIFEST_BYTES_MAX = 128 << 20
FILES_MAX = 1 << 20
PATH_BYTES_MAX = 1024
CHUNK_BYTES = 1 << 20
WINDOW_BYTES_MAX = 8 << 20
"""Of a decompressor: level 1 needs less."""
WORD_CHARACTERS_MAX = 100
LEVEL = 1
_MODE = re.compile(r"0[0-7]{3}")
_MAGIC = b"\x28\xb5\x2f\xfd"
_ENCODING = "utf-8", "surrogateescape"
_END = bytes(2 * tarfile.BLOCKSIZE)
_MARK = b"\1"


class Folder(msgspec.Struct, frozen=True):
    """A folder below the data directory; empty: the directory itself."""

    path: str
    mode: str
    """Octal digits."""


class File(msgspec.Struct, frozen=True):
    """A file below the data directory."""

    path: str
    bytes: int
    mode: str
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a backup, and of whom and when it is."""

    format: str = FORMAT
    version: int = VERSION
    broker: str
    """Identity of its metadata, hexadecimal, the same in all its backups; empty: it never had any."""
    time: str
    danube_fast: str
    """Version that made the backup."""
    secrets: list[str]
    """Files that hold secrets."""
    secrets_left_out: list[str]
    folders: list[Folder]
    """Each behind the one that it is in."""
    files: list[File]

    @property
    def data_bytes(self) -> int:
        """Sum of the sizes of all files."""
        return sum(each.bytes for each in self.files)


def _header(path: str, byte_count: int, mode: str) -> bytes:
    info = tarfile.TarInfo(path)
    info.size, info.mode = byte_count, int(mode, 8)
    return info.tobuf(tarfile.GNU_FORMAT, *_ENCODING)


def _padding(byte_count: int) -> int:
    return -byte_count % tarfile.BLOCKSIZE


class ArchiveWriter:
    """Write a backup to an open file. All errors of the disk are OSError."""

    def __init__(self, file: IO[bytes], manifest: Manifest) -> None:
        """Raises FailedPrecondition if there are too many files for one backup."""
        compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
        self._stream = compressor.stream_writer(file, closefd=False)
        content = msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"
        if len(content) > MANIFEST_BYTES_MAX or len(manifest.files) > FILES_MAX:
            raise FailedPrecondition(
                f"{len(manifest.files):,} files are more than one backup holds ({FILES_MAX:,}): stop the broker and copy "
                "its directory by other means"
            )
        self.add(File(MANIFEST, len(content), "0600", ""), io.BytesIO(content).read)

    def add(self, entry: File, read: Callable[[int], bytes]) -> str:
        """Write as many bytes of a file as its entry says, and return their sha256. One that has fewer is filled up:
        then the sha256 is another one."""
        self._stream.write(_header(entry.path, entry.bytes, entry.mode))
        left, digest = entry.bytes, hashlib.sha256()
        while left and (piece := read(min(left, CHUNK_BYTES))):
            digest.update(piece)
            self._stream.write(piece)
            left -= len(piece)
        while left:
            piece = bytes(min(left, CHUNK_BYTES))
            # a file that has become shorter is never taken for one that ends in zeros
            digest.update(b"\1")
            self._stream.write(piece)
            left -= len(piece)
        self._stream.write(bytes(_padding(entry.bytes)))
        return digest.hexdigest()

    def finish(self) -> None:
        """Write the end."""
        self._stream.write(_END)
        self._stream.flush(zstandard.FLUSH_FRAME)


class _Marked:
    """A file, and behind its end another frame: the mark in that is read only if the file's own frame is whole.

    A decompressor tells a frame without its end, the checksum, by nothing: it waits for more.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._mark = file, io.BytesIO(zstandard.ZstdCompressor().compress(_MARK))

    def read(self, count: int = -1) -> bytes:
        return self._file.read(count) or self._mark.read(count)


class ArchiveReader:
    """Read a backup: the manifest at once, then each of its files in order, then `finish`.

    Raises InvalidArgument if the file is no backup, FailedPrecondition if it cannot be read or a newer version made it,
    DataLoss if it is damaged.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path = path
        magic = self._guarded(lambda: file.read(len(_MAGIC)))
        if magic != _MAGIC:
            raise InvalidArgument(f"{path} is no backup of danube-fast; name another file")
        file.seek(0)
        decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
        self._stream = decompressor.stream_reader(
            cast("IO[bytes]", _Marked(file)), read_across_frames=True, closefd=False
        )
        self.manifest = self._read_manifest()

    def read(self, entry: File, write: Callable[[bytes], object]) -> None:
        """Hand the content of the next file to `write`, and check it. What was written before an error is worth
        nothing."""
        header = self._read_header()
        if (header.name, header.size) != (entry.path, entry.bytes):
            self._fail(f"{entry.path!r} is not where it should be")
        left, digest = entry.bytes, hashlib.sha256()
        while left:
            piece = self._read(min(left, CHUNK_BYTES))
            digest.update(piece)
            write(piece)
            left -= len(piece)
        if digest.hexdigest() != entry.sha256 or any(self._read(_padding(entry.bytes))):
            self._fail(f"{entry.path!r} has other bytes than were saved")

    def finish(self) -> None:
        """Check that the archive ends here, and with it the checksum of the whole."""
        if self._read(len(_END)) != _END:
            self._fail("there is more in it than its manifest says")
        behind = self._guarded(lambda: self._stream.read(len(_MARK) + 1))
        if behind != _MARK:
            self._fail("it does not end where its manifest says")

    def _fail(self, what: str) -> NoReturn:
        raise DataLoss(f"the backup {self._path} is damaged: {what}; take another backup")

    def _guarded(self, read: Callable[[], bytes]) -> bytes:
        try:
            return read()
        except zstandard.ZstdError as error:
            self._fail(str(error))
        except OSError as error:
            raise FailedPrecondition(
                f"cannot read {self._path}: {error.strerror}; check that path and its disk"
            ) from error

    def _read(self, count: int) -> bytes:
        data = self._guarded(lambda: self._stream.read(count)) if count else b""
        if len(data) != count:
            self._fail("it ends too early")
        return data

    def _read_header(self) -> tarfile.TarInfo:
        """Read the header of a regular file, with its long name before it if there is one."""
        name = ""
        while True:
            block = self._read(tarfile.BLOCKSIZE)
            try:
                header = tarfile.TarInfo.frombuf(block, *_ENCODING)
            except (tarfile.TarError, ValueError) as error:
                self._fail(f"it has no file where one should be ({error})")
            if header.type == tarfile.GNUTYPE_LONGNAME and not name:
                if not 0 < header.size <= PATH_BYTES_MAX + 1:
                    self._fail("it has a name that is too long")
                long = self._read(header.size + _padding(header.size))
                name = long.rstrip(b"\0").decode(*_ENCODING)
                continue
            if header.type != tarfile.REGTYPE:
                self._fail(f"{header.name!r} is no regular file")
            header.name = name or header.name
            return header

    def _read_manifest(self) -> Manifest:
        header = self._read_header()
        if header.name != MANIFEST:
            raise InvalidArgument(
                f"{self._path} is no backup of danube-fast: it does not begin with {MANIFEST}; name another file"
            )
        if not 0 <= header.size <= MANIFEST_BYTES_MAX:
            self._fail(f"its {MANIFEST} is too large")
        content = self._read(header.size + _padding(header.size))[: header.size]
        try:
            version = msgspec.json.decode(content, type=_Version)
            if version.format == FORMAT and version.version > VERSION:
                raise FailedPrecondition(
                    f"{self._path} has format {version.version} and this version reads up to {VERSION}; restore it with "
                    "the newer danube-fast that wrote it"
                )
            manifest = msgspec.json.decode(content, type=Manifest)
            _check(manifest)
        except DanubeError:
            raise
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._fail(f"its {MANIFEST} makes no sense: {error}")
        return manifest


class _Version(msgspec.Struct):
    format: str
    version: int


def _check(manifest: Manifest) -> None:
    """Raise ValueError for a manifest that no backup has."""
    if manifest.format != FORMAT or manifest.version != VERSION:
        raise ValueError("it is of another program")
    if len(manifest.files) > FILES_MAX or len(manifest.folders) > FILES_MAX:
        raise ValueError("too many files")
    if not manifest.folders or manifest.folders[0].path:
        raise ValueError("it does not begin with the directory itself")
    folders = {""}
    for folder in manifest.folders[1:]:
        _check_path(folder.path, folders)
        folders.add(folder.path)
    files: set[str] = set()
    for file in manifest.files:
        _check_path(file.path, folders)
        if file.path in files or file.bytes < 0:
            raise ValueError(f"{file.path!r} is there twice, or has a size below 0")
        files.add(file.path)
    modes = [each.mode for each in manifest.folders] + [each.mode for each in manifest.files]
    if not all(map(_MODE.fullmatch, modes)):
        raise ValueError("a mode is not four octal digits below 1000")
    words = (manifest.broker, manifest.time, manifest.danube_fast, *manifest.secrets_left_out)
    if not all(word.isprintable() and len(word) <= WORD_CHARACTERS_MAX for word in words):
        raise ValueError("it has a word that no backup has")
    if not set(manifest.secrets) <= files:
        raise ValueError("it has not the secrets that it names")


def _check_path(path: str, folders: set[str]) -> None:
    """Raise ValueError unless this is a new name in one of the folders."""
    parts: Sequence[str] = path.split("/")
    if not path.isprintable() or len(path.encode()) > PATH_BYTES_MAX:
        raise ValueError(f"{path[:PATH_BYTES_MAX]!r} is no name of a file")
    if any(part in ("", ".", "..") for part in parts) or path in folders:
        raise ValueError(f"{path!r} is no name below the directory, or is there twice")
    if "/".join(parts[:-1]) not in folders:
        raise ValueError(f"{path!r} is in no folder that it names")
