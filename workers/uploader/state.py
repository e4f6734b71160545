"""The state that the parts of the uploader share: the store, manifests, and what went wrong last."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from danube_fast.broker.messages import HistoryReport
from danube_fast.errors import DanubeError, Unavailable
from danube_fast.history.manifest import Manifest, ManifestLog, Section
from danube_fast.history.reader import HistoryReader
from danube_fast.workers.process.boot import Boot
from danube_fast.workers.process.tasks import Do, Join, Running, Task, Tasks
from danube_fast.workers.uploader.counted_store import CountedStore

__all__ = ["History", "UploaderState", "naming"]

_log = logging.getLogger(__name__)

CACHE_NAME = "history-cache"
SCRATCH_NAME = "history-parts"


def naming(histories: Mapping[int, History], keys: Set[str]) -> dict[str, list[int]]:
    """List the partitions whose manifests name some objects, by key."""
    found: dict[str, list[int]] = {}
    for partition_id, history in histories.items():
        for key in keys & {section.key for section in history.manifest.sections}:
            found.setdefault(key, []).append(partition_id)
    return found


class History:
    """The history of one partition: its manifest, and a reader."""

    def __init__(self, log: ManifestLog, reader: HistoryReader) -> None:
        self._log, self.reader = log, reader
        self.agrees = False
        """Whether it is known that the partition's log has the same past."""
        self.unnamed: set[int] = set()
        """Ids of producers in history whose names the owner was asked for and did not tell: the partition moved."""
        self._lock = threading.Lock()

    @property
    def manifest(self) -> Manifest:
        """The objects as they are now."""
        return self._log.manifest

    def note_agreement(self) -> None:
        """Note that the partition's log has the same past."""
        self.agrees = True

    def commit(
        self, topic: str, incarnation: int, *, first_offset: int = 0, end_offset: int = 0,
        added: Sequence[Section] = (), removed: Sequence[str] = (),
        producers: Mapping[int, str] | None = None,
    ) -> Manifest:  # fmt: skip
        """Make the next record; what is in history or gone stays so. Runs in a thread; one commit waits for the other. Raises as
        `ManifestLog.commit`."""
        with self._lock:
            manifest = self._log.manifest
            return self._log.commit(
                topic, incarnation, 0, first_offset=max(first_offset, manifest.gone_until),
                end_offset=max(end_offset, manifest.end_offset), added=added, removed=removed,
                producers=producers,
            )  # fmt: skip


class UploaderState:
    """State of one uploader; the parts do the work with it."""

    def __init__(self, boot: Boot, tasks: Tasks) -> None:
        self.boot, self.settings, self.clock, self.tasks = boot, boot.settings, boot.clock, tasks
        self.identity = b""
        self.epoch = 0
        """0 until the coordinator has given it one."""
        self.is_older_copy = False
        """Whether the store knows of uploaders behind the broker's data."""
        self.fault = ""
        """Why nothing can be uploaded just now; empty while all is well."""
        self._store: CountedStore | None = None
        self._histories: dict[int, History] = {}
        self._loading: dict[int, Running] = {}
        self.writing: set[str] = set()
        """Keys of objects that are being made; no manifest names them yet."""
        self.deleting: set[int] = set()
        """Ids of partitions whose history is being deleted."""
        self.copying: set[int] = set()
        """Ids of partitions without history that are being copied for a reader."""
        self._number = 0

    @property
    def data_dir(self) -> Path:
        """Folder of the broker."""
        return Path(self.boot.config.data_dir)

    def begin(self, identity: bytes, epoch: int, store: CountedStore) -> None:
        """Take over an epoch, and a store that keeps its promises."""
        self.identity, self.epoch, self._store = identity, epoch, store

    @property
    def is_starting(self) -> bool:
        """Whether the store has neither answered nor failed yet."""
        return self._store is None and not self.fault

    @property
    def store(self) -> CountedStore:
        """The store. Raises Unavailable until it has answered."""
        if self._store is None:
            raise Unavailable(self.fault or f"{self.settings.store} has not answered yet")
        return self._store

    def next_number(self) -> int:
        """Number of the next object of this epoch."""
        self._number += 1
        return self._number

    def note_fault(self, error: DanubeError | None) -> None:
        """Keep the reason why nothing can be uploaded, and log it once; None: all is well."""
        text = "" if error is None else str(error)
        if text != self.fault:
            if text:
                _log.warning("history: %s", text)
            else:
                _log.info("history: uploading again")
        if text != self.fault:
            for process in self.boot.config.processes.serving:
                with contextlib.suppress(
                    DanubeError
                ):  # its ring is full: it hears of the next change
                    self.boot.mailbox.notify(process, HistoryReport(text))
        self.fault = text

    def history(self, partition_id: int, manifest: int) -> Task:
        """The history of a partition, whose manifest is read if it is not known. `manifest`: number of a record
        that there is, -1 if none is known."""
        known = self._histories.get(partition_id)
        if known is not None and known.manifest.number >= manifest:
            return known  # else it was found by a listing, and its newest records are missing
        if partition_id in self.deleting:
            raise Unavailable(f"history of partition {partition_id} is being deleted just now")
        loading = self._loading.get(partition_id)
        if loading is None:
            loading = self.tasks.start(self._load(partition_id, manifest))
            self._loading[partition_id] = loading
        found: History = yield Join(loading)
        return found

    def _load(self, partition_id: int, manifest: int) -> Task:
        try:
            store = self.store
            log = ManifestLog(store, self.identity, partition_id, self.epoch)
            yield Do(lambda: log.load(manifest))
            found = History(log, HistoryReader(store, partition_id, log.manifest))
            self._histories[partition_id] = found
        finally:
            del self._loading[partition_id]
        return found

    def known(self, partition_id: int) -> History | None:
        """The history of a partition, if its manifest was read or written already."""
        return self._histories.get(partition_id)

    def naming(self, keys: Set[str]) -> dict[str, list[int]]:
        """List the partitions whose manifests name some objects, by key, of those that were read or written already."""
        return naming(self._histories, keys)

    def forget(self, partition_id: int) -> None:
        """Read the manifest of a partition anew, the next time: it is not known what the store has of it."""
        self._histories.pop(partition_id, None)
