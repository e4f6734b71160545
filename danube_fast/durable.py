"""Files that survive a power cut: first their bytes, then their names."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from danube_fast.descriptors import open_file

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["replace_file", "sync_directory", "write_file"]

_CANNOT_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP})
"""Errors of file systems that have no sync of directories. Not EROFS: a disk that failed is mounted read-only."""


def sync_directory(directory: Path) -> None:
    """Make the names in a folder durable, where its file system can. Raises OSError."""
    fd = open_file(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(fd)


def write_file(path: Path, *parts: Buffer) -> None:
    """Write a file and sync its bytes; its name is not durable yet. Raises OSError."""
    with open(path, "wb", buffering=0, opener=open_file) as file:
        for part in parts:
            view = memoryview(part).cast("B")
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def replace_file(path: Path, *parts: Buffer, temporary: Path | None = None) -> None:
    """Make `path` hold these bytes, durably; a crash leaves the old file or the new one.

    `temporary` is where they are written first: beside `path`, with the suffix `.partial`, unless
    told. Raises OSError.
    """
    temporary = temporary or path.with_name(f"{path.name}.partial")
    write_file(temporary, *parts)
    temporary.replace(path)
    sync_directory(path.parent)
