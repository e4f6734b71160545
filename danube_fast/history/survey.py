"""All that a store has, for a repair: records, what they say, the table of every object, and what an audit finds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from danube_fast.errors import FailedPrecondition, NotFound
from danube_fast.history.audit import check_sections
from danube_fast.history.catalog import FAULTS, Damage, OnProgress, PartitionHistory
from danube_fast.history.layout import OBJECT_HEADER_BYTES, OBJECTS_PREFIX, Blocks, ObjectHeader
from danube_fast.history.manifest import MANIFESTS_PREFIX, NONE, Manifest, Section
from danube_fast.history.objects import read_table
from danube_fast.history.records import Knowledge, Remains, know, read_remains
from danube_fast.history.salvage import section_in
from danube_fast.history.stores.store import ObjectStore

__all__ = ["Survey", "all_keys", "alone", "look", "place"]


class Survey(NamedTuple):
    """All that a store has."""

    identity: bytes
    epoch: int
    """The highest one of an uploader."""
    remains: dict[int, Remains]
    known: dict[int, Knowledge]
    tables: dict[str, Blocks]
    """Of every object whose table can be read."""
    damages: dict[int, list[Damage]]
    """What is wrong with the sections that manifests name, by partition."""
    keys: list[str]

    def sections(self, partition_id: int) -> list[Section]:
        """List the sections of a partition in all objects, those that were made last first."""
        found = (
            section_in(key, self.tables[key], partition_id)
            for key in sorted(self.tables, reverse=True)
        )
        return [section for section in found if section is not None]

    def damages_of(self, partition_id: int, section: Section) -> list[Damage]:
        """Find the damage of a section that a manifest names."""
        return [each for each in self.damages.get(partition_id, []) if each.key == section.key]


def look(store: ObjectStore, on_progress: OnProgress | None) -> Survey:
    """Read all manifests, and check every byte that they name. Raises what the store raises, FailedPrecondition for
    a store of two brokers, NotFound if there is nothing."""
    keys = all_keys(store)
    partition_ids = sorted(
        {
            int(folder)
            for key in keys
            if key.startswith(MANIFESTS_PREFIX)
            and (folder := key.removeprefix(MANIFESTS_PREFIX).partition("/")[0]).isdecimal()
        }
    )
    remains: dict[int, Remains] = {}
    for done, partition_id in enumerate(partition_ids):
        if on_progress is not None:
            on_progress("manifests", done, len(partition_ids))
        remains[partition_id] = read_remains(store, partition_id)
    objects = [key for key in keys if key.startswith(OBJECTS_PREFIX)]
    if not (remains or objects):
        raise NotFound(f"there is no history in {store.url}; check the URL and its prefix")
    identity = _identity(store, remains, objects)
    known = {number: know(each.records) for number, each in remains.items()}
    tables: dict[str, Blocks] = {}
    for key in objects:
        try:
            tables[key] = read_table(store, key, identity)
        except FAULTS:
            continue  # no manifest can be made of it
    histories = [
        PartitionHistory(number, identity, alone(each.manifest.topic, each.sections))
        for number, each in known.items()
    ]
    damages: dict[int, list[Damage]] = {}
    for damage in check_sections(store, histories, on_progress):
        damages.setdefault(NONE if damage.partition_id is None else damage.partition_id, []).append(
            damage
        )
    epochs = [
        record.uploader_epoch for each in remains.values() for record in each.records.values()
    ]
    epochs += [place(key)[0] for key in tables]
    return Survey(identity, max(epochs, default=1), remains, known, tables, damages, keys)


def all_keys(store: ObjectStore) -> list[str]:
    """List records and objects."""
    return [
        info.key for prefix in (MANIFESTS_PREFIX, OBJECTS_PREFIX) for info in store.list(prefix)
    ]


def _identity(store: ObjectStore, remains: Mapping[int, Remains], objects: Iterable[str]) -> bytes:
    """Find out whose history it is. Raises FailedPrecondition if it is that of two brokers."""
    found = {record.identity for each in remains.values() for record in each.records.values()}
    for key in objects if not found else ():
        try:
            head = store.read(key, 0, OBJECT_HEADER_BYTES)
            found.add(ObjectHeader.decode(head, key).identity)
        except FAULTS:
            continue
    if len(found) > 1:
        names = " and ".join(sorted(each.hex() for each in found))
        raise FailedPrecondition(
            f"{store.url} is the history of two brokers: {names}; give each broker a store, or a prefix, "
            "of its own, and move what is not of this one there"
        )
    if not found:
        raise NotFound(f"nothing in {store.url} can be read; restore it from a copy of the store")
    return found.pop()


def alone(topic: str, sections: list[Section]) -> Manifest:
    """Make a manifest of some sections, for the audit."""
    manifest = Manifest()
    manifest.topic, manifest.sections = topic, sections
    return manifest


def place(key: str) -> tuple[int, int]:
    """Tell the epoch and the number in the key of an object that is sound."""
    epoch, _, number = key.removeprefix(OBJECTS_PREFIX).partition("/")
    return int(epoch), int(number)
