"""The check of a whole store: every byte that manifests name, and what they say of it.

    listing of objects --> manifests --> each object once --> if sound: the sections that name it
                                                          --> if not: its blocks, for the offsets lost

A living uploader may write meanwhile. So objects are listed before manifests are read, and what seems damaged
counts only if the manifest still names it at the end. Nothing in the store is changed.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from danube_fast.errors import DanubeError, DataLoss, FailedPrecondition, NotFound
from danube_fast.history.catalog import (
    FAULTS,
    Catalog,
    Damage,
    OnProgress,
    PartitionHistory,
    cause_of,
    load_partition,
    read_catalog,
    remedy_of,
)
from danube_fast.history.layout import OBJECTS_PREFIX, Blocks
from danube_fast.history.manifest import LOST_PREFIX, Manifest, Section, manifest_prefix
from danube_fast.history.objects import read_blocks, section_of, table_position, verify_object
from danube_fast.history.reader import HistoryReader
from danube_fast.history.stores.store import ObjectInfo, ObjectStore

__all__ = ["Orphan", "Verification", "check_sections", "verify_history"]


LOST = "these messages are lost, and readers are told: a repair has found them in no object"
FIND = "if a copy of the store has objects with them, put these back and repair again"


class Orphan(msgspec.Struct, frozen=True):
    """An object that no manifest names: left by an uploader that ended, or just being made."""

    key: str
    bytes: int
    made_ns: int


class Verification(msgspec.Struct, frozen=True):
    """How much was checked, and what is wrong with it. `messages` and `bytes` are of the sections that were checked."""

    store: str
    identity: str
    """Of the broker, in hex; empty without history."""
    partitions: int
    objects: int
    messages: int
    bytes: int
    damages: list[Damage]
    orphans: list[Orphan] | None
    """None: not looked for, since a topic was chosen or a manifest cannot be read."""


class _Named(NamedTuple):
    """A section, and the partition whose manifest names it."""

    partition: PartitionHistory
    section: Section


class _Found(NamedTuple):
    """Damage, and the sections that it concerns."""

    damage: Damage
    named: Sequence[_Named]


def verify_history(
    store: ObjectStore, topic: str | None = None, on_progress: OnProgress | None = None
) -> Verification:
    """Check every byte of the objects that manifests name, of one topic or of all.

    Raises what the store raises, NotFound if there is no history, or none of the topic.
    """
    listed = list(store.list(OBJECTS_PREFIX)) if topic is None else []
    catalog = read_catalog(store, on_progress)
    chosen = catalog.of_topic(topic)
    if not chosen and not catalog.damages:
        raise _nothing(store, topic, len(listed))
    found = [fault for each in chosen for fault in _disorder(each)]
    found += _check_sections(store, chosen, on_progress)
    named = [section for each in chosen for section in each.manifest.sections]
    return Verification(
        store=store.url, identity=catalog.identity.hex(), partitions=len(chosen),
        objects=len({section.key for section in named}),
        bytes=sum(section.byte_count for section in named),
        messages=sum(section.message_count for section in named),
        damages=[
            *(each for each in catalog.damages if topic is None or each.topic in (None, topic)),
            *_still_named(store, found),
        ],
        orphans=None if topic is not None else _orphans(store, listed, catalog),
    )  # fmt: skip


def check_sections(
    store: ObjectStore, partitions: Sequence[PartitionHistory], on_progress: OnProgress | None
) -> list[Damage]:
    """Check every byte of the objects that sections of some partitions name. Raises what the store raises."""
    return [each.damage for each in _check_sections(store, partitions, on_progress)]


def _check_sections(
    store: ObjectStore, partitions: Sequence[PartitionHistory], on_progress: OnProgress | None
) -> list[_Found]:
    objects: dict[tuple[str, bytes], list[_Named]] = collections.defaultdict(list)
    for each in partitions:
        for section in each.manifest.sections:
            objects[section.key, each.identity].append(_Named(each, section))
    total = sum(one.section.byte_count for named in objects.values() for one in named)
    found: list[_Found] = []
    done = 0
    for (key, identity), named in objects.items():
        if on_progress is not None:
            on_progress("bytes", done, total)
        found += _check_object(store, key, identity, named)
        done += sum(one.section.byte_count for one in named)
    return found


def _nothing(store: ObjectStore, topic: str | None, object_count: int) -> NotFound:
    if topic is not None:
        return NotFound(f"{store.url} has no history of {topic}; `danube-fast history ls` lists it")
    if object_count:
        return NotFound(
            f"{store.url} has {object_count} objects and no manifest that names them; restore "
            "manifests/ from a copy of the store"
        )
    return NotFound(f"there is no history in {store.url}; check the URL and its prefix")


# ---------------------------------------------------------------- manifests


def _damage(one: _Named, reason: str, remedy: str) -> Damage:
    section, partition = one.section, one.partition
    return Damage(
        section.key, reason, remedy, partition.manifest.topic, partition.partition_id,
        section.base_offset, section.end_offset,
    )  # fmt: skip


def _restore_manifest(one: _Named) -> str:
    return f"restore {manifest_prefix(one.partition.partition_id)} from a copy of the store"


def _disorder(partition: PartitionHistory) -> Iterator[_Found]:
    """Find sections that overlap, or that lie behind the end of their manifest."""
    last: Section | None = None
    end = partition.manifest.end_offset
    for section in partition.manifest.sections:
        one = _Named(partition, section)
        if last is not None and section.base_offset < last.end_offset:
            reason = (
                f"{last.key} holds offsets {last.base_offset} to {last.end_offset}, so they overlap"
            )
            yield _Found(_damage(one, reason, _restore_manifest(one)), [one])
        if section.end_offset > end:
            reason = f"the manifest ends at offset {end}, before this"
            yield _Found(_damage(one, reason, _restore_manifest(one)), [one])
        if last is None or section.end_offset > last.end_offset:
            last = section


def _still_named(store: ObjectStore, found: list[_Found]) -> list[Damage]:
    """Keep the damages whose sections are still history: retention may have removed some meanwhile."""
    now: dict[int, set[Section] | None] = {}
    for partition in {one.partition.partition_id for each in found for one in each.named}:
        try:
            now[partition] = set(load_partition(store, partition).manifest.sections)
        except FAULTS:
            now[partition] = None

    def is_named(one: _Named) -> bool:
        sections = now[one.partition.partition_id]
        return sections is None or one.section in sections

    return [each.damage for each in found if any(is_named(one) for one in each.named)]


def _orphans(store: ObjectStore, listed: list[ObjectInfo], catalog: Catalog) -> list[Orphan] | None:
    """Find listed objects that no manifest names, and that are still there."""
    readable = {each.partition_id for each in catalog.partitions}
    if any(damage.partition_id not in readable for damage in catalog.damages):
        return None  # what a manifest names that cannot be read is no orphan
    named = {section.key for each in catalog.partitions for section in each.manifest.sections}
    return [
        Orphan(info.key, info.size, info.modified_ns)
        for info in listed
        if info.key not in named and store.head(info.key) is not None
    ]


# ---------------------------------------------------------------- objects


def _check_object(
    store: ObjectStore, key: str, identity: bytes, named: list[_Named]
) -> list[_Found]:
    """Check an object, and what manifests say of it."""
    if key.startswith(LOST_PREFIX):
        return [_Found(_damage(one, LOST, FIND), [one]) for one in named]
    try:
        rows = verify_object(store, key, identity)
    except (DataLoss, FailedPrecondition) as error:
        found = [fault for one in named for fault in _unreadable(store, one)]
        return found or [_outside(store, key, named, error)]
    except FAULTS as error:
        reason, remedy = cause_of(store, key, error), remedy_of(error)
        return [_Found(_damage(one, reason, remedy), [one]) for one in named]
    return [fault for one in named for fault in _compare(one, rows)]


def _outside(store: ObjectStore, key: str, named: list[_Named], error: DanubeError) -> _Found:
    """Make the damage of an object whose sections can all be read."""
    reason = f"{cause_of(store, key, error)}, but all messages that manifests name can be read"
    return _Found(Damage(key, reason, remedy_of(error)), named)


def _compare(one: _Named, rows: Blocks) -> Iterator[_Found]:
    """Compare what a manifest says of an object with the object's table of blocks, which is sound."""
    section, partition_id = one.section, one.partition.partition_id
    own = np.flatnonzero(rows["partition_id"] == partition_id)
    if not len(own):
        reason = f"the object holds nothing of partition {partition_id}"
        yield _Found(_damage(one, reason, _restore_manifest(one)), [one])
        return
    actual = section_of(section.key, rows, int(own[0]), int(own[-1]) + 1, table_position(rows))
    differing = [
        f"{name} {getattr(section, name)} and the object {getattr(actual, name)}"
        for name in Section.__struct_fields__
        if getattr(section, name) != getattr(actual, name)
    ]
    if differing:
        reason = f"the manifest says {', '.join(differing)}"
        yield _Found(_damage(one, reason, _restore_manifest(one)), [one])


def _unreadable(store: ObjectStore, one: _Named) -> Iterator[_Found]:
    """Find the ranges of offsets of a section which no reader gets any more, as narrow as its blocks."""
    section, partition_id = one.section, one.partition.partition_id
    alone = Manifest()
    alone.topic, alone.sections = one.partition.manifest.topic, [section]
    reader = HistoryReader(store, partition_id, alone)
    try:
        rows = read_blocks(store, section)
    except FAULTS as error:
        yield _Found(_damage(one, cause_of(store, one.section.key, error), remedy_of(error)), [one])
        return
    open_range: Damage | None = None
    for base, end in zip(rows["base_offset"].tolist(), rows["end_offset"].tolist(), strict=True):
        try:
            reader.fetch(base, 1)
        except FAULTS as error:
            if open_range is None:
                open_range = msgspec.structs.replace(
                    _damage(one, cause_of(store, one.section.key, error), remedy_of(error)),
                    base_offset=base,
                )
            open_range = msgspec.structs.replace(open_range, end_offset=end)
            continue
        if open_range is not None:
            yield _Found(open_range, [one])
            open_range = None
    if open_range is not None:
        yield _Found(open_range, [one])
