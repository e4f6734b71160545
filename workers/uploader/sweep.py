"""Deletion: objects that no manifest names, and history of topics that were deleted or want none any more.

    manifests/ --listed--> partitions --history wanted?--> what they name stays
                                               '-- no: topic deleted, policy changed --> objects, then records go
    objects/ --listed--> named by none, now and half of `history_delete_seconds` ago --> deleted

What is about to be deleted is looked at twice, with time between: an object whose manifest is being written is named
the second time. Objects under a hold (holds.py) stay. Objects of a deleted topic that others share are written again
without it.
"""

from __future__ import annotations

import logging
from functools import partial

from danube_fast.broker import messages as m
from danube_fast.clock import SECOND_NS
from danube_fast.errors import DanubeError, DataLoss, FailedPrecondition, Unavailable
from danube_fast.history.holds import held_keys
from danube_fast.history.layout import OBJECTS_PREFIX
from danube_fast.history.manifest import MANIFESTS_PREFIX, ManifestReader, manifest_prefix
from danube_fast.history.stores.store import ObjectStore
from danube_fast.ring.counters import Counter
from danube_fast.roles import COORDINATOR
from danube_fast.workers.process.tasks import Ask, Do, Pause, Task
from danube_fast.workers.uploader.rewrite import rewrite_object
from danube_fast.workers.uploader.state import History, UploaderState

__all__ = ["Sweep"]

_log = logging.getLogger(__name__)

SWEEPS = 4
"""In one `history_delete_seconds`."""
ASKED_AT_ONCE = 1000
DELETED_AT_ONCE = 1000


class Sweep:
    """Delete what history needs no more, from time to time."""

    def __init__(self, state: UploaderState) -> None:
        self._state = state
        self._unnamed: dict[str, int] = {}
        """Objects that no manifest named, and when that was seen first (monotonic ns)."""
        self._gone: set[int] = set()
        """Deleted partitions of which the store had nothing at the last sweep."""

    def run(self) -> Task:
        """Sweep for as long as the process lives."""
        interval_ns = self._state.settings.history_delete_seconds * SECOND_NS // SWEEPS
        while True:
            yield Pause(max(interval_ns, SECOND_NS // 2))
            if not self._state.epoch:
                continue
            try:
                yield from self._sweep()
            except DanubeError as error:
                _log.warning("history: nothing is deleted just now: %s", error)

    def _sweep(self) -> Task:
        store = self._state.store
        if self._state.is_older_copy:
            raise FailedPrecondition(
                f"{store.url} was used by newer data of this broker: topics that these do not know may be in it; put "
                "back the newest copy of the data directory, or give the broker another store"
            )
        deleted: set[int] = set((yield Ask(COORDINATOR, m.ListDeleted())))
        numbers = yield from self._known_records()
        listed: list[int] = yield Do(partial(_listed_partitions, store))
        # a manifest that is gone altogether must not make its objects nameless: loading it tells
        partition_ids = sorted({*listed, *(each for each in numbers if numbers[each] >= 0)})
        unwanted = yield from self._unwanted(partition_ids, deleted)
        unwanted -= yield from self._copies_in_use(unwanted - deleted)
        named: dict[str, list[int]] = {}
        for partition_id in partition_ids:
            if partition_id not in unwanted:
                yield from self._name(partition_id, numbers.get(partition_id, -1), named)
        for partition_id in sorted(unwanted):
            if partition_id in self._state.copying:  # since just now
                yield from self._name(partition_id, -1, named)
                continue
            self._state.deleting.add(partition_id)
            try:
                yield from self._delete_partition(partition_id, named, unwanted)
            finally:
                self._state.deleting.discard(partition_id)
        yield from self._delete_unnamed(named)
        gone = deleted.difference(listed)
        if gone & self._gone:  # twice: what was on its way the first time is listed now
            yield Ask(COORDINATOR, m.ForgetDeleted(sorted(gone & self._gone)))
        self._gone = gone

    def _name(self, partition_id: int, number: int, named: dict[str, list[int]]) -> Task:
        """Note the objects that a manifest names, the one of which its owner knows a record, -1: of none."""
        history: History = yield from self._state.history(partition_id, number)
        for section in history.manifest.sections:
            named.setdefault(section.key, []).append(partition_id)

    def _known_records(self) -> Task:
        """The record of each manifest that its owner knows: if it is missing, what it names must not go."""
        state = self._state
        found: dict[int, int] = {}
        for worker in state.boot.config.processes.workers:
            listed: m.Listed = yield Ask(worker, m.ListBacklogs(state.epoch, state.fault))
            found.update((backlog.partition_id, backlog.manifest) for backlog in listed.backlogs)
        return found

    def _unwanted(self, partition_ids: list[int], deleted: set[int]) -> Task:
        """Those of some partitions that are to have no history any more: their topics were deleted, and that is on
        record, or want none."""
        unwanted = deleted.intersection(partition_ids)
        for at in range(0, len(partition_ids), ASKED_AT_ONCE):
            some = partition_ids[at : at + ASKED_AT_ONCE]
            asked = m.FindWithoutHistory(some, are_unknown_told=False)
            unwanted |= set((yield Ask(COORDINATOR, asked)))
        return unwanted

    def _copies_in_use(self, partition_ids: set[int]) -> Task:
        """Those of some partitions, which are to have no history, whose readers hold something of them, or wait for
        it."""
        if not partition_ids:
            return set()
        state = self._state
        held = yield Do(partial(held_keys, state.store, state.clock.wall_ns()))
        found = partition_ids & state.copying
        for partition_id in sorted(partition_ids - found):
            try:
                history: History = yield from state.history(partition_id, -1)
            except (DataLoss, FailedPrecondition):
                continue  # the deletion tells
            if any(section.key in held for section in history.manifest.sections):
                found.add(partition_id)
        return found

    # ------------------------------------------------------------ history that is not wanted any more

    def _delete_partition(
        self, partition_id: int, named: dict[str, list[int]], unwanted: set[int]
    ) -> Task:
        """Delete the history of a partition: its objects, then its records, so that a stop between them is no harm. One
        whose object others are still to be named for waits for the next sweep."""
        state, store = self._state, self._state.store
        state.forget(partition_id)
        reader = ManifestReader(store, state.identity, partition_id)
        try:
            manifest = yield Do(reader.load)
        except (DataLoss, FailedPrecondition) as error:
            _log.warning("history: %s", error)  # its objects are named by none then
        except Unavailable:
            if (yield Do(partial(_has_records, store, partition_id))):
                raise  # the store is away, or does not list them yet
        else:
            if manifest.uploader_epoch > state.epoch:
                raise FailedPrecondition(
                    f"{store.url} has newer history of {manifest.topic} than this broker can have made, and the broker "
                    "does not know the topic: its data are an older copy; put back the newest one"
                )
            keys = {section.key for section in manifest.sections}
            if keys & state.writing:
                _log.info(
                    "history of partition %d is deleted when its last object is named", partition_id
                )
                return
            # `named` is older: objects have been made and named since
            for key, others in state.naming(keys).items():
                if wanted := {*others} - unwanted:
                    named[key] = sorted({*named.get(key, ()), *wanted})
            for key in sorted(keys & named.keys()):
                yield from rewrite_object(state, key, named.pop(key), named)
            yield from self._delete(sorted(keys - named.keys()))
        yield Do(partial(_delete_records, store, partition_id))
        _log.info("history of partition %d is deleted: its topic wants none any more", partition_id)

    # ------------------------------------------------------------ objects without a name

    def _delete_unnamed(self, named: dict[str, list[int]]) -> Task:
        now_ns = self._state.clock.monotonic_ns()
        wait_ns = self._state.settings.history_delete_seconds * SECOND_NS // 2
        listed = yield Do(lambda: [info.key for info in self._state.store.list(OBJECTS_PREFIX)])
        unnamed = {
            key: self._unnamed.get(key, now_ns)
            for key in listed
            if key not in named and key not in self._state.writing
        }
        self._unnamed = unnamed
        yield from self._delete(
            [key for key, since in unnamed.items() if now_ns - since >= wait_ns]
        )

    def _delete(self, keys: list[str]) -> Task:
        """Delete objects that no hold names."""
        store, wall_ns = self._state.store, self._state.clock.wall_ns
        for at in range(0, len(keys), DELETED_AT_ONCE):
            some = keys[at : at + DELETED_AT_ONCE]
            held = yield Do(partial(held_keys, store, wall_ns()))
            gone = [key for key in some if key not in held]
            yield Do(partial(store.delete, gone))
            for key in gone:
                self._unnamed.pop(key, None)
            self._state.boot.counters.add(Counter.HISTORY_DELETED, len(gone))


def _listed_partitions(store: ObjectStore) -> list[int]:
    found = set()
    for info in store.list(MANIFESTS_PREFIX):
        folder = info.key.removeprefix(MANIFESTS_PREFIX).partition("/")[0]
        if folder.isdigit():
            found.add(int(folder))
    return sorted(found)


def _has_records(store: ObjectStore, partition_id: int) -> bool:
    """Whether a partition has any record; a deletion that was cut short may have left the mark of pruning alone."""
    prefix = manifest_prefix(partition_id)
    return any(info.key.removeprefix(prefix).isdigit() for info in store.list(prefix))


def _delete_records(store: ObjectStore, partition_id: int) -> None:
    """Delete the records of a partition, the oldest first."""
    keys = sorted(info.key for info in store.list(manifest_prefix(partition_id)))
    for key in keys:
        store.delete([key])
