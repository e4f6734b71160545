"""Files that are in use and may change: read again when they have, the old content kept while the new one cannot be used.

stat, once a second --changed, and the same twice--> load --> in use
                                                       '----> `fault`: the old stays

What cannot be used at the start is an error, or waited for like a change.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from danube_fast.clock import SECOND_NS
from danube_fast.errors import DanubeError

__all__ = ["LiveFiles"]

_log = logging.getLogger(__name__)

LOOK_NS = SECOND_NS
"""How often files are looked at; a change counts when it is seen twice, so files that are being written are whole."""
T = TypeVar("T")


class LiveFiles(Generic[T]):
    """Keep what was made of some files, and of newer ones as soon as they can be used. Used by one thread."""

    def __init__(
        self, what: str, paths: Sequence[Path], load: Callable[[], T],
        otherwise: Callable[[], T] | None = None,
    ) -> None:  # fmt: skip
        """`what` names the files in the log; `load` makes something of them; `otherwise` makes what counts until they can be
        used for the first time. Without it raises what `load` raises."""
        self._what, self._paths, self._load = what, paths, load
        self._seen = self._taken = self._signature()
        self._looked_ns: int | None = None
        self.fault = ""
        """Why the newest files are not in use; empty: they are."""
        self._until_then = "in use stays"
        """What is in use while newer files cannot be: words behind `what`."""
        try:
            self.loaded = load()
        except DanubeError as error:
            if otherwise is None:
                raise
            self.loaded, self._until_then = otherwise(), "is waited for"
            self.doubt()
            self._note(str(error))

    def refresh(self, now_ns: int) -> bool:
        """Load the files again if they have changed, and say whether `loaded` is another one.

        `now_ns`: monotonic. What cannot be used is logged once for each change, tried again, and the old stays.
        """
        if self._looked_ns is not None and now_ns - self._looked_ns < LOOK_NS:
            return False
        self._looked_ns = now_ns
        seen, self._seen = self._seen, self._signature()
        if self._seen == self._taken:
            self.fault = ""  # put back as they were
        if self._seen == self._taken or self._seen != seen:
            return False
        try:
            self.loaded = self._load()
        except DanubeError as error:
            self._note(str(error))
            return False
        self._taken, self.fault, self._until_then = self._seen, "", "in use stays"
        return True

    def _note(self, fault: str) -> None:
        """Keep a fault, and log one that is not the last one."""
        if fault != self.fault:
            self.fault = fault
            _log.error("%s %s: %s", self._what, self._until_then, fault)

    def doubt(self) -> None:
        """Load the files at the next look, changed or not: what `load` compares them with has changed."""
        self._taken = []

    def _signature(self) -> list[tuple[int, ...]]:
        """Describe the files so that a change shows."""
        found: list[tuple[int, ...]] = []
        for path in self._paths:
            try:
                entry = os.stat(path)
            except OSError:
                found.append(())
            else:
                found.append(
                    (
                        entry.st_dev,
                        entry.st_ino,
                        entry.st_size,
                        entry.st_mtime_ns,
                        entry.st_ctime_ns,
                    )
                )
        return found
