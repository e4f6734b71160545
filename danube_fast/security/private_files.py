"""Small files whose content only some users may read or change: key files, and what else proves an identity.

    others = what no user but the owner may do with the file: a file that grants it is not read

A file of `make_file` is written whole and synced before it has its name.
"""

from __future__ import annotations

import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from danube_fast.descriptors import open_file
from danube_fast.durable import sync_directory
from danube_fast.errors import AlreadyExists, FailedPrecondition, InvalidArgument

__all__ = ["OWNER_ALONE", "PrivateFile", "make_file", "read_private", "write_new"]

OWNER_ALONE = stat.S_IRWXG | stat.S_IRWXO
"""Bits of a mode that a file of its owner alone has not."""
OWNER_MODE = 0o600


@dataclass(frozen=True)
class PrivateFile:
    """A kind of file: its name, how large it may be, and what others may do with it."""

    noun: str = "key file"
    remedy: str = "restore the file"
    others: int = OWNER_ALONE
    """Bits of the mode that it must not have."""
    mode_remedy: str = "chmod 600"
    bytes_max: int = 4096
    lost_remedy: str = ""
    """What to do if others may have read it."""


def write_new(path: Path, content: bytes, mode: int = OWNER_MODE) -> None:
    """Write a file that does not exist yet, and sync it. Raises OSError; then it is gone again."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(path, "wb", buffering=0, opener=lambda name, _: open_file(name, flags, mode)) as file:
        try:
            os.fchmod(file.fileno(), mode)  # whatever a default ACL or the umask say
            view = memoryview(content)
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
        except BaseException:
            path.unlink()
            raise


def make_file(path: Path, content: bytes, noun: str) -> None:
    """Make a file of its owner alone, durably: first beside its place, then under its name, which no other file may have.

    Raises InvalidArgument for a path without a name, AlreadyExists, FailedPrecondition.
    """
    if not path.name:
        raise InvalidArgument(f"the {noun} has no name; give the path of a file to make")
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        write_new(beside, content)
        try:
            os.link(beside, path)
        finally:
            beside.unlink()
        sync_directory(path.parent)
    except FileExistsError:
        raise AlreadyExists(
            f"{path} exists, and a {noun} is never overwritten: choose another name, or move it away"
        ) from None
    except OSError as error:
        raise FailedPrecondition(
            f"cannot write the {noun} {path}: {error.strerror or error}; make its folder writable for this user"
        ) from error


def read_private(path: Path, kind: PrivateFile) -> bytes:
    """Read a small file that other users cannot have read or written, as far as `kind` says.

    Raises FailedPrecondition, InvalidArgument, which never quote the file.
    """
    try:
        content = _read(path, kind)
    except FileNotFoundError:
        raise FailedPrecondition(f"there is no {kind.noun} {path}; {kind.remedy}") from None
    except OSError as error:
        raise FailedPrecondition(
            f"cannot read the {kind.noun} {path}: {error}; its owner must run this"
        ) from error
    if not content:
        raise InvalidArgument(f"{path} is empty, and should be a {kind.noun}; {kind.remedy}")
    if len(content) > kind.bytes_max:
        raise InvalidArgument(
            f"{path} has more than {kind.bytes_max:,} bytes, so it is no {kind.noun}; {kind.remedy}"
        )
    return content


def _read(path: Path, kind: PrivateFile) -> bytes:
    """Read it, and one byte more than it may have. Raises OSError, FailedPrecondition, InvalidArgument."""
    # without O_NONBLOCK the open of a FIFO waits for its writer
    fd = open_file(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check_owner(path, kind, os.fstat(fd))
        with open(fd, "rb", closefd=False) as file:  # a file system may give less than is asked for
            return file.read(kind.bytes_max + 1)
    finally:
        os.close(fd)


def _check_owner(path: Path, kind: PrivateFile, found: os.stat_result) -> None:
    """Raise FailedPrecondition, InvalidArgument for what is no file, or not its owner's."""
    if not stat.S_ISREG(found.st_mode):
        raise InvalidArgument(f"{path} is not a file, and should be a {kind.noun}; {kind.remedy}")
    if found.st_uid not in (os.geteuid(), 0):
        raise FailedPrecondition(
            f"the {kind.noun} {path} belongs to user {found.st_uid}, who can change it: chown it to the user of this "
            "process"
        )
    if found.st_mode & kind.others:
        done = "read or write" if kind.others & stat.S_IROTH else "write"
        lost = f", and {kind.lost_remedy} if they may have read it" if kind.lost_remedy else ""
        raise FailedPrecondition(
            f"other users may {done} the {kind.noun} {path} (mode {stat.S_IMODE(found.st_mode):04o}): run "
            f"`{kind.mode_remedy} {path}`{lost}"
        )
