"""Where files become visible: a folder of them here, tables in `tables.py`.

A folder has no commit: each file comes by a rename of its own, so a reader may see some files of a plan and not yet
others, but never half of one, and none twice.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

from danube_fast.durable import sync_directory
from danube_fast.errors import FailedPrecondition
from danube_fast.spark.export.files import disk_errors
from danube_fast.spark.export.plan import STATE_FOLDER, ExportPlan, Next, StagedFile
from danube_fast.spark.export.target import ExportSpec, Target

__all__ = ["Committed", "Destination", "Folder", "missing_files", "place_files"]

REJECTED_SUFFIX = "_rejected"
"""Of the folder beside a target that has the rows which do not match its schema."""
_PUBLISHED = "part-*-offsets-*"


class Committed(NamedTuple):
    """What the commits of a table say."""

    number: int
    """Of the last plan."""
    next: dict[str, Next]
    token: str = ""
    """Of that plan; empty: not told."""

    def has(self, plan: ExportPlan) -> bool:
        """Whether a plan is there. What an overwrite has given up may come late, under its number."""
        is_other = plan.mode == "overwrite" and self.token not in ("", plan.token)
        return self.number > plan.number or (self.number == plan.number and not is_other)


class Destination(Protocol):
    """A target."""

    folder: Path
    """Of the target, with the state of its export."""
    data: Path
    """What names of files are relative to."""
    names_are_hidden: bool
    """Whether files are seen only by commits, so that their names need a token."""

    @property
    def rejected(self) -> Path:
        """Folder of rejected rows."""
        ...

    def check_new(self, *, is_dry: bool) -> None:
        """Look at a target without a record, and make it. Raises FailedPrecondition for one of others."""
        ...

    def drop_new(self) -> None:
        """Remove what `check_new` has made, as the first run fails, if nothing came to it."""
        ...

    def committed(self) -> Committed | None:
        """What the target itself says; None: it has no commits, or none of ours."""
        ...

    def removed_by(self, plan: ExportPlan) -> list[str]:
        """Files that go as a plan overwrites the target."""
        ...

    def commit(self, plan: ExportPlan) -> None:
        """Make the files of a plan visible that are in their places."""
        ...


class Folder:
    """A folder of files."""

    names_are_hidden = False

    def __init__(self, target: Target, spec: ExportSpec) -> None:
        self.folder = self.data = Path(target.place)
        self._form = spec.form

    @property
    def rejected(self) -> Path:
        """Folder of rejected rows."""
        return self.folder.with_name(self.folder.name + REJECTED_SUFFIX)

    def check_new(self, *, is_dry: bool) -> None:
        """Refuse a folder with files of others. Raises FailedPrecondition."""
        for folder in (self.folder, self.rejected):
            refuse_others(folder)

    def drop_new(self) -> None:
        """Do nothing: a folder has no table."""

    def committed(self) -> Committed | None:
        """None: there are no commits."""
        return None

    def removed_by(self, plan: ExportPlan) -> list[str]:
        """All files of the generations before."""
        new = {(file.is_rejected, file.name) for file in plan.files}
        return [
            str(path)
            for is_rejected, root in ((False, self.data), (True, self.rejected))
            for path in sorted(root.rglob(_PUBLISHED))
            if (is_rejected, str(path.relative_to(root))) not in new
        ]

    def commit(self, plan: ExportPlan) -> None:
        """Remove what the plan overwrites."""
        remove_files(plan.removed)


def refuse_others(folder: Path) -> None:
    """Raise FailedPrecondition for a folder with anything but our own state."""
    try:
        found = [name for name in os.listdir(folder) if name != STATE_FOLDER]
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise FailedPrecondition(f"{folder} is a file; export to a folder") from None
    if found:
        raise FailedPrecondition(
            f"{folder} has files that are not of an export ({min(found)}); export to a new folder, or empty this "
            "one"
        )


def remove_files(names: Iterable[str]) -> None:
    """Remove files, those that are there still."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def missing_files(plan: ExportPlan, destination: Destination, staging: Path) -> list[StagedFile]:
    """Files of a sealed plan that are neither in their place nor staged."""
    return [
        file
        for file in plan.files
        if not _place_of(file, destination).exists() and not (staging / file.staged).exists()
    ]


def place_files(
    plan: ExportPlan, destination: Destination, staging: Path, on_renamed: Callable[[], None]
) -> None:
    """Rename the files of a sealed plan into their places, durably; those that are there stay as they are. Raises
    ResourceExhausted, OSError."""
    folders: set[Path] = set()
    with disk_errors(str(destination.folder)):
        for file in plan.files:
            place, staged = _place_of(file, destination), staging / file.staged
            if not place.parent.exists():
                _make_folder(place.parent)
            folders.add(place.parent)
            if not place.exists():
                _rename(staged, place)
                on_renamed()
        for folder in sorted(folders):
            sync_directory(folder)


def _place_of(file: StagedFile, destination: Destination) -> Path:
    return (destination.rejected if file.is_rejected else destination.data) / file.name


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it, durably."""
    if not folder.exists():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_directory(folder.parent)


def _rename(staged: Path, place: Path) -> None:
    try:
        staged.rename(place)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        # rejected rows beside a target that is a mount
        copy = place.with_name(f".{place.name}.tmp")
        shutil.copyfile(staged, copy)
        with open(copy, "rb") as file:
            os.fsync(file.fileno())
        copy.rename(place)
