"""What an export has planned and done, in files that survive a crash at any instant.

    TARGET/_danube/lock            held by the one export of this target
                   target          what is exported, and where its checkpoint is: made first, never changed
                   staging/N-T/    files that are being written, as *.tmp: nothing that reads Parquet, JSON or CSV sees them
    CHECKPOINT/    plan            the plan under way
                   checkpoint      the next offset of each partition

    plan "staging" --> files staged --> plan "sealed", with their names --> renames, commit --> checkpoint --> no plan

CHECKPOINT is TARGET/_danube unless told. A plan that is found at a start is finished first. Its ranges are fixed, so what
is staged again has the same rows; from "sealed" on the names are, too, and a name that is there is never written again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from danube_fast.descriptors import open_file
from danube_fast.durable import replace_file, sync_directory
from danube_fast.errors import DataLoss, FailedPrecondition, PermissionDenied
from danube_fast.spark.export.target import ExportSpec

__all__ = [
    "STATE_FOLDER",
    "Checkpoint",
    "Done",
    "ExportPlan",
    "Next",
    "PlannedRange",
    "StagedFile",
    "StateFolder",
    "TargetRecord",
    "Totals",
    "locked",
]

VERSION = 1
STATE_FOLDER = "_danube"
"""In the target. Readers of tables and of Parquet pass over names with `_` before them."""
T = TypeVar("T")


class StagedFile(msgspec.Struct, frozen=True):
    """One file that a task has written."""

    staged: str
    """Its name in the staging folder."""
    name: str
    """Where it belongs, relative to its root."""
    is_rejected: bool
    """Whether its root is that of rejected rows."""
    range_index: int
    rows: int
    byte_count: int
    values: dict[str, str | None] = {}
    """Of the columns that choose its folder."""


class PlannedRange(msgspec.Struct, frozen=True):
    """Offsets of one partition that one task reads."""

    partition: int
    partition_id: int
    low: int
    high: int
    byte_count: int
    """About, uncompressed."""


class Next(msgspec.Struct, frozen=True, array_like=True):
    """How far a partition is exported."""

    partition_id: int
    offset: int
    """Offsets below are exported."""


class Totals(msgspec.Struct):
    """What was exported."""

    messages: int = 0
    payload_bytes: int = 0
    checksum: int = 0
    """The sum of the crc32 of all payloads."""
    rejected: int = 0
    files: int = 0
    file_bytes: int = 0

    def add(self, other: Totals) -> None:
        """Add what another has."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Done(msgspec.Struct, frozen=True):
    """What a task says of its range."""

    index: int
    messages: int
    payload_bytes: int
    checksum: int
    files: list[StagedFile]
    rejected: int = 0


class ExportPlan(msgspec.Struct):
    """Some ranges that are published together."""

    number: int
    """Plans of a target have numbers from 1."""
    generation: int
    """How many times the target was overwritten."""
    token: str
    """Distinguishes files of a table: those of a plan that was given up may lie there still."""
    mode: Literal["append", "overwrite"]
    ranges: list[PlannedRange]
    next: dict[str, Next]
    """Of all partitions, once this is done."""
    state: Literal["staging", "sealed"] = "staging"
    files: list[StagedFile] = []
    totals: Totals = msgspec.field(default_factory=Totals)
    removed: list[str] = []
    """Files of the target that go, as it is overwritten."""
    first: dict[str, Next] = {}
    """Where its generation begins, of partitions that were not in the target before."""
    version: int = VERSION

    @property
    def staging_name(self) -> str:
        """Name of the folder for its files."""
        return f"{self.number}-{self.token}"


class Checkpoint(msgspec.Struct):
    """How far a target is; of a table only a copy of what its own commits say."""

    number: int = 0
    """Of the last plan."""
    generation: int = 0
    next: dict[str, Next] = {}
    totals: Totals = msgspec.field(default_factory=Totals)
    first: dict[str, Next] = {}
    """Where the generation begins; of older versions, and of a table that has lost this, without some partitions."""
    version: int = VERSION


class TargetRecord(msgspec.Struct, frozen=True):
    """What a target is for."""

    spec: ExportSpec
    checkpoint: str
    version: int = VERSION


class StateFolder:
    """The files of one target's export."""

    def __init__(self, folder: Path, checkpoint: Path | None) -> None:
        """`folder`: of the target; `checkpoint`: None: in there."""
        self.own = folder / STATE_FOLDER
        self.checkpoint_folder = checkpoint or self.own

    @property
    def staging(self) -> Path:
        """Folder of staging folders."""
        return self.own / "staging"

    def make(self) -> None:
        """Make the folders. Raises PermissionDenied, OSError."""
        for folder in (self.own, self.checkpoint_folder):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                probe = folder / f".probe-{os.getpid()}"
                probe.touch()
                probe.unlink()
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise PermissionDenied(
                    f"{folder} cannot be written ({error.strerror}); correct its rights, or export to another folder"
                ) from None

    def record(self) -> TargetRecord | None:
        """What the target is for, if it was told. Raises DataLoss, FailedPrecondition."""
        return _load(self.own / "target", TargetRecord)

    def save_record(self, record: TargetRecord) -> None:
        """Note what the target is for."""
        _save(self.own / "target", record)

    def checkpoint(self) -> Checkpoint | None:
        """How far the export is. Raises as `record`."""
        return _load(self.checkpoint_folder / "checkpoint", Checkpoint)

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Note how far the export is."""
        _save(self.checkpoint_folder / "checkpoint", checkpoint)

    def plan(self) -> ExportPlan | None:
        """The plan under way. Raises as `record`."""
        return _load(self.checkpoint_folder / "plan", ExportPlan)

    def save_plan(self, plan: ExportPlan) -> None:
        """Make a plan durable."""
        _save(self.checkpoint_folder / "plan", plan)

    def drop_plan(self) -> None:
        """Forget the plan under way."""
        with contextlib.suppress(FileNotFoundError):
            (self.checkpoint_folder / "plan").unlink()
            sync_directory(self.checkpoint_folder)

    def forget_unused(self) -> None:
        """Remove the folders of a target for which nothing was ever planned, if nothing else is in them."""
        if self.record() is None:
            with contextlib.suppress(OSError):
                shutil.rmtree(self.staging, ignore_errors=True)
                (self.own / "lock").unlink()
                self.own.rmdir()
                self.own.parent.rmdir()

    def drop_record(self) -> None:
        """Forget what the target is for."""
        (self.own / "target").unlink(missing_ok=True)

    def sweep(self, keep: str = "") -> None:
        """Remove what was staged, but for one folder."""
        with contextlib.suppress(FileNotFoundError):
            for folder in self.staging.iterdir():
                if folder.name != keep:
                    shutil.rmtree(folder, ignore_errors=True)


def _save(path: Path, value: Any) -> None:
    replace_file(path, msgspec.json.format(msgspec.json.encode(value)) + b"\n")


def _load(path: Path, kind: type[T]) -> T | None:
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        version = msgspec.json.decode(data)["version"]
        if version > VERSION:
            raise FailedPrecondition(
                f"{path} has format {version} and this version reads up to {VERSION}; export with the newer danube-fast "
                "that wrote it"
            )
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise DataLoss(
            f"{path} is damaged: {error}; restore it, or export to another folder"
        ) from None


@contextlib.contextmanager
def locked(state: StateFolder) -> Iterator[None]:
    """Keep other exports out of a target. Raises FailedPrecondition while there is one."""
    path = state.own / "lock"
    descriptor = open_file(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_mine = False
        else:
            is_mine = path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino
        if not is_mine:
            raise FailedPrecondition(
                f"another export to {state.own.parent} is running; wait for its end, or export to another folder"
            )
        yield
    finally:
        os.close(descriptor)
