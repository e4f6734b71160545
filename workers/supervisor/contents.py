"""Names below a data directory: which files and folders are a broker's own, and which of them it makes again.

All others are of someone else, whatever they hold, and no copy of a broker's data takes them along.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from enum import Enum, auto
from pathlib import Path

from danube_fast.history.epochs import EPOCHS_PREFIX
from danube_fast.history.holds import HOLDS_PREFIX
from danube_fast.history.layout import OBJECTS_PREFIX
from danube_fast.history.manifest import MANIFESTS_PREFIX, PRUNED_NAME
from danube_fast.history.stores.local import UPLOADS_NAME
from danube_fast.history.stores.probe import PROBE_PREFIX
from danube_fast.history.superseding import SUPERSEDED_PREFIX
from danube_fast.metadata.layout import DATA_FILE, LOCK_FILE
from danube_fast.security.audit_files import CURRENT, PUBLISHED
from danube_fast.security.server_keys import NEXT_KEY, PREVIOUS_KEY, PUBLIC_KEYS, SERVER_KEY
from danube_fast.wal.layout import (
    INDEX_NAME,
    LOCK_NAME,
    LOSSES_NAME,
    NAME_DIGITS,
    RESERVE_NAME,
    SEGMENT_SUFFIX,
    SNAPSHOT_SUFFIX,
    SPARE_PREFIX,
    TEMPORARY_SUFFIX,
    TRIM_SUFFIX,
)
from danube_fast.workers.process.layout import (
    AUDIT,
    BOOTSTRAP_KEY,
    METADATA,
    METADATA_SEAL,
    RECOVER_ADMIN,
)
from danube_fast.workers.process.log_marks import MARKS_NAME
from danube_fast.workers.supervisor.datadir import FORMAT, LOGS
from danube_fast.workers.uploader.checkpoint import CHECKPOINT_NAME
from danube_fast.workers.uploader.state import CACHE_NAME, SCRATCH_NAME

__all__ = [
    "LOG_FOLDERS",
    "SECRET_FILES",
    "Kind",
    "kind_of",
    "makes_administrator",
    "open_names",
]

LOG_FOLDERS = "logs"
HISTORY = "history"
SECRET_FILES = {
    SERVER_KEY: "the broker's own key",
    NEXT_KEY: "its key to come",
    PREVIOUS_KEY: "its key before",
    BOOTSTRAP_KEY: "an administrator's key",
}
"""Files of a data directory that hold secrets, and what each is."""


class Kind(Enum):
    """Kinds of names below a data directory."""

    FILE = auto()
    FOLDER = auto()
    MADE_AGAIN = auto()
    """Of the broker, and not needed: locks, caches, temporary files."""
    UNKNOWN = auto()
    """Not of the broker."""


def _any(*names: str) -> str:
    return f"(?:{'|'.join(map(re.escape, names))})"


_LOG = rf"{LOG_FOLDERS}/\d{{4,9}}"
_POSITION = rf"\d{{{NAME_DIGITS}}}"
_STORES = _any(
    *(
        prefix.rstrip("/")
        for prefix in (
            OBJECTS_PREFIX, MANIFESTS_PREFIX, HOLDS_PREFIX, EPOCHS_PREFIX, SUPERSEDED_PREFIX, PROBE_PREFIX,
        )
    )
)  # fmt: skip
_KEY = rf"{HISTORY}/{_STORES}(?:/[0-9a-f-]+)*"
_UPLOAD = rf"{HISTORY}/{re.escape(UPLOADS_NAME)}/[0-9a-f-]+"
_TOP_FILES = _any(FORMAT, LOGS, METADATA_SEAL, PUBLIC_KEYS, RECOVER_ADMIN, *SECRET_FILES)
_FILE = re.compile(
    "|".join([
        _TOP_FILES, f"{METADATA}/{_any(DATA_FILE, MARKS_NAME)}", f"{_LOG}/{_any(LOSSES_NAME)}",
        f"{_LOG}/{_POSITION}{_any(SEGMENT_SUFFIX, SNAPSHOT_SUFFIX, TRIM_SUFFIX)}",
        f"{AUDIT}/{_any(CURRENT, PUBLISHED)}", rf"{AUDIT}/audit-\d{{8,}}\.jsonl",
        rf"{_KEY}/(?:[0-9a-f-]+|{PRUNED_NAME})", rf"{_UPLOAD}(?:\.new|/data|/key)",
    ]),
    re.ASCII,
)  # fmt: skip
_FOLDER = re.compile(
    "|".join([_any(METADATA, LOG_FOLDERS, AUDIT, HISTORY), _LOG, _KEY, f"{HISTORY}/{_any(UPLOADS_NAME)}", _UPLOAD]),
    re.ASCII,
)  # fmt: skip
_MADE_AGAIN = re.compile(
    "|".join([
        _any("LOCK", CHECKPOINT_NAME, SCRATCH_NAME, CACHE_NAME), f"{METADATA}/{_any(LOCK_FILE)}",
        f"{_LOG}/{_any(LOCK_NAME, INDEX_NAME, RESERVE_NAME)}", rf"{_LOG}/{SPARE_PREFIX}\d+{_any(SEGMENT_SUFFIX)}",
        rf"{_LOG}/(?:{SPARE_PREFIX}\d+|reserve|{_POSITION}){_any(TEMPORARY_SUFFIX)}",
        rf"\.{_TOP_FILES}\.[0-9a-f]+", rf"(?:{_TOP_FILES}|{AUDIT}/{PUBLISHED}|{METADATA}/{MARKS_NAME})\.partial",
    ]),
    re.ASCII,
)  # fmt: skip


def kind_of(path: str, *, is_folder: bool) -> Kind:
    """Say what a name below a data directory says; `is_folder`: what has it is a folder, or leads to one."""
    if _MADE_AGAIN.fullmatch(path):
        return Kind.MADE_AGAIN
    if is_folder and _FOLDER.fullmatch(path):
        return Kind.FOLDER
    if not is_folder and _FILE.fullmatch(path):
        return Kind.FILE
    return Kind.UNKNOWN


def open_names(folder: Path, others: int) -> list[str]:
    """List what others may write below a data directory and in the broker's folders there, with modes: who writes records
    or messages needs no key. `others`: the bits of modes that let a group, or all, write."""
    return _open_below(folder, folder, others)


def makes_administrator(name: str) -> bool:
    """Whether one who may write to that, as `open_names` tells it, can change who may do what."""
    return name.rpartition(" (")[0] in (METADATA, f"{METADATA}/{DATA_FILE}")


def _open_below(root: Path, folder: Path, others: int) -> list[str]:
    """Do so below a folder, for those who may search it."""
    others &= folder.stat().st_mode << 1
    found: list[str] = []
    for path in sorted(folder.iterdir()) if others and os.access(folder, os.R_OK | os.X_OK) else ():
        name, is_folder = str(path.relative_to(root)), path.is_dir()
        if kind_of(name, is_folder=is_folder) not in (Kind.FILE, Kind.FOLDER):
            continue
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile, or a link to nowhere
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & others:
                found.append(f"{name} ({mode:04o})")
            if is_folder and folder == root:
                found += _open_below(root, path, others)
    return found
