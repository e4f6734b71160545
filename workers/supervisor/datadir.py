"""The data directory: its lock, its format, its logs. Supervisor only.

    data_dir/
      LOCK          locked as long as the server runs; has its pid
      FORMAT        one line with the format version, written once
      LOGS          how many logs were ready at least once: none of them may come up without segments
      metadata/     the coordinator's
      metadata.seal which metadata belongs here; made empty, while there are no logs, then the
                    coordinator's (metadata/seal.py)
      logs/0000/    log 0; log i belongs to worker i % N while N workers run
      logs/0001/    ...
      audit/        the audit log (security/audit_files.py); the coordinator's
      history/      objects, when no other store is named
      history-upload    which parts of an object are sent; the uploader's, and gone most of the time
      server.key        the key pair of a secured broker; beside it others while it is rotated
                        (security/server_keys.py), and server.pub with the public keys
      bootstrap-admin.key, recover-admin   the way in for a first administrator, or one who has
                        lost the key (recovery.py)
      history-cache/    pieces of history that consumers read just now; may be removed

A start makes logs until there are as many as workers and never removes one, so the number of
workers may change from start to start.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from pathlib import Path

from danube_fast.durable import replace_file, sync_directory
from danube_fast.errors import DataLoss, FailedPrecondition, NotFound, Unavailable
from danube_fast.workers.process.layout import METADATA_SEAL

__all__ = ["FORMAT", "FORMAT_VERSION", "LOGS", "DataDirectory"]

FORMAT = "FORMAT"
"""File with the version of the format."""
FORMAT_VERSION = 1
"""Format that this version writes; it reads this one and the one before."""

LOGS = "LOGS"
"""File with the number of logs in use."""

TOKEN_CHARACTERS = 32

_FORMAT_PREFIX = "danube-fast data format "
_LOGS_PREFIX = "danube-fast logs in use: "
_PID_BYTES_MAX = 32
_LOG_DIGITS = 4


class DataDirectory:
    """An open and locked data directory. Made by `open`, released by `close`."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path, self._lock_fd = path, lock_fd

    @classmethod
    def open(cls, path: str) -> DataDirectory:
        """Lock `path`, making it if it is missing.

        Raises FailedPrecondition if another server uses it or a newer version wrote it,
        Unavailable if it cannot be made or written.
        """
        root = Path(path).absolute()
        try:
            root.mkdir(mode=0o750, parents=True, exist_ok=True)
            lock_fd = os.open(root / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise Unavailable(
                f"cannot use the data directory {root}: {error.strerror}; choose another one with "
                "--data-dir"
            ) from error
        try:
            _lock(root, lock_fd)
            _check_format(root)
            _make_seal(root)
        except BaseException:
            os.close(lock_fd)
            raise
        return cls(root, lock_fd)

    @classmethod
    def open_existing(cls, path: Path) -> DataDirectory:
        """Lock the directory of a broker that is stopped, for a command of its user.

        Raises NotFound if there is none, FailedPrecondition if a broker runs there (with its pid) or it belongs to
        another user, Unavailable if it cannot be written.
        """
        root = path.absolute()
        if not (root / FORMAT).is_file():
            raise NotFound(
                f"{root} is no data directory of a broker; name it with --data-dir, as for serve"
            )
        owner = root.stat().st_uid
        if owner != os.geteuid():
            raise FailedPrecondition(
                f"{root} belongs to user {owner}, and the broker must be able to read what is made here: run this as "
                "that user"
            )
        return cls.open(str(root))

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock_fd)

    @property
    def token(self) -> str:
        """Name of this directory on this host, the same after a restart: it is part of the endpoints, so that
        clients reconnect by themselves."""
        status = os.fstat(self._lock_fd)
        text = f"{self.path} {status.st_dev} {status.st_ino}"
        return hashlib.sha256(text.encode()).hexdigest()[:TOKEN_CHARACTERS]

    @property
    def metadata(self) -> Path:
        """Directory of the coordinator's metadata."""
        return self.path / "metadata"

    def logs(self, worker_count: int) -> list[tuple[int, str]]:
        """List (id, directory) of every log, in order; at least as many as workers, made if missing."""
        folder = self.path / "logs"
        names = sorted(os.listdir(folder)) if folder.exists() else []
        found = {int(name) for name in names if name.isdecimal() and (folder / name).is_dir()}
        count = max(worker_count, *(log_id + 1 for log_id in found), 1)
        missing = [log_id for log_id in range(max(found, default=-1)) if log_id not in found]
        if missing:
            raise DataLoss(
                f"log {missing[0]} is missing in {folder} although log {max(found)} is there; put "
                "it back from a backup"
            )
        used = self._logs_used()
        for log_id in range(used):
            if not _segments(self._folder(log_id)):
                raise DataLoss(
                    f"log {log_id} in {self._folder(log_id)} has no segments although it was in use: "
                    "what it held is missing; put it back from a backup"
                )
        logs = [(log_id, self._folder(log_id)) for log_id in range(max(count, used))]
        for _, directory in logs:
            directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        sync_directory(folder)
        sync_directory(self.path)
        return [(log_id, str(directory)) for log_id, directory in logs]

    def note_used(self) -> None:
        """Record that all logs are in use: from now on a log without segments is not taken for new."""
        log_id = 0
        while _segments(self._folder(log_id)):
            log_id += 1
        if log_id > self._logs_used():
            replace_file(self.path / LOGS, f"{_LOGS_PREFIX}{log_id}\n".encode())

    def _folder(self, log_id: int) -> Path:
        return self.path / "logs" / f"{log_id:0{_LOG_DIGITS}}"

    def _logs_used(self) -> int:
        """Read what `note_used` recorded."""
        try:
            text = (self.path / LOGS).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return 0
        count = text.removeprefix(_LOGS_PREFIX).strip()
        if not text.startswith(_LOGS_PREFIX) or not (count.isascii() and count.isdecimal()):
            raise DataLoss(
                f"{self.path / 'LOGS'} is damaged; it should read {_LOGS_PREFIX}N with the number of "
                f"folders in {self.path / 'logs'}: write that number, or remove the file if all of "
                "them are there"
            )
        return int(count)


def _segments(directory: Path) -> bool:
    """Whether a log's folder has any segment that is part of the log."""
    names = os.listdir(directory) if directory.is_dir() else []
    return any(name.endswith(".seg") and name[:1].isdecimal() for name in names)


def _make_seal(root: Path) -> None:
    """Allow the coordinator to make metadata, but only where there are no logs yet."""
    seal, logs = root / METADATA_SEAL, root / "logs"
    folders = list(logs.iterdir()) if logs.is_dir() else []
    if not seal.exists() and not any(map(_segments, folders)):
        seal.touch(mode=0o640)


def _lock(root: Path, lock_fd: int) -> None:
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pid = os.pread(lock_fd, _PID_BYTES_MAX, 0).decode("ascii", "replace").strip()
        raise FailedPrecondition(
            f"the data directory {root} is in use by the server with pid {pid or 'unknown'}; stop "
            "that one, or choose another directory with --data-dir"
        ) from error
    with contextlib.suppress(OSError):  # a full disk: the pid is only there to be named
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)


def _check_format(root: Path) -> None:
    path = root / FORMAT
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        replace_file(path, f"{_FORMAT_PREFIX}{FORMAT_VERSION}\n".encode())
        return
    version = text.removeprefix(_FORMAT_PREFIX).strip()
    if not text.startswith(_FORMAT_PREFIX) or not version.isdecimal():
        raise DataLoss(f"{path} is damaged; it should read {_FORMAT_PREFIX + str(FORMAT_VERSION)}")
    if int(version) > FORMAT_VERSION:
        raise FailedPrecondition(
            f"the data in {root} has format {version} and this version reads up to "
            f"{FORMAT_VERSION}; start the newer danube-fast that wrote it"
        )
