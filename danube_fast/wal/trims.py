"""How far a log was trimmed: the name of an empty file, put there before the first segment goes.

    00000000000004190208.trim     segments below this position may be gone; all from there on are not

Without it a log whose oldest segments were lost would look like one that was trimmed.
"""

from __future__ import annotations

import os
from pathlib import Path

from danube_fast.durable import sync_directory
from danube_fast.wal.layout import TRIM_SUFFIX, position_from_name, position_name

__all__ = ["note_trim", "trimmed_position"]


def trimmed_position(directory: Path) -> int:
    """Where the log must begin at the latest; 0 if it was never trimmed."""
    return max(_marks(directory), default=0)


def note_trim(directory: Path, position: int) -> None:
    """Record durably that segments below `position` go. Raises OSError: then they must stay."""
    marks = _marks(directory)
    target = directory / position_name(position, TRIM_SUFFIX)
    if position <= max(marks, default=0):
        return
    if marks:  # a renaming needs no room on a full disk
        os.rename(directory / position_name(max(marks), TRIM_SUFFIX), target)
    else:
        target.touch(mode=0o640)
    sync_directory(directory)


def _marks(directory: Path) -> list[int]:
    found = (position_from_name(name, TRIM_SUFFIX) for name in os.listdir(directory))
    return [position for position in found if position is not None]
