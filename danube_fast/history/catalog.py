"""Every partition with history in a store, as the manifests tell it. No broker is needed, nothing is written.

The identity of the broker is taken from the records themselves: those of one partition have to agree, and all
partitions, too. A manifest that cannot be read is a `Damage` and does not hide the others.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from danube_fast.errors import DanubeError, DataLoss, FailedPrecondition, InvalidArgument, NotFound
from danube_fast.history.manifest import (
    MANIFESTS_PREFIX,
    NONE,
    PRUNED_NAME,
    Manifest,
    ManifestReader,
    manifest_prefix,
)
from danube_fast.history.stores.store import ObjectStore

__all__ = [
    "FAULTS",
    "PRUNED_ALONE",
    "Catalog",
    "Damage",
    "OnProgress",
    "PartitionHistory",
    "cause_of",
    "load_partition",
    "read_catalog",
    "remedy_of",
    "without_records",
]

FAULTS = (DataLoss, FailedPrecondition, InvalidArgument, NotFound)
"""Errors that tell of one object or record. All others are the store's, and end the reading."""

PRUNED_ALONE = f"records were pruned, and the later ones are missing: there is only {PRUNED_NAME}"
"""Reason of a damage that a deletion leaves which was cut short."""
RESTORE = "restore it from a copy of the store, or from an older version that the store keeps"

OnProgress = Callable[[str, int, int], None]
"""Gets a unit ("manifests" or "bytes"), how many are done, and how many there are."""


class PartitionHistory(NamedTuple):
    """The history of one partition."""

    partition_id: int
    identity: bytes
    """Of the broker, as the records have it."""
    manifest: Manifest


class Damage(msgspec.Struct, frozen=True):
    """One thing that is wrong with a store, and what to do."""

    key: str
    """Of the object, or what the keys of the records begin with."""
    reason: str
    remedy: str
    topic: str | None = None
    partition_id: int | None = None
    base_offset: int | None = None
    """First offset that cannot be read, or is in doubt; None: no offset in particular."""
    end_offset: int | None = None
    """Behind the last one."""


class Catalog(NamedTuple):
    """All partitions of a store, in the order of their ids, and the manifests that cannot be trusted."""

    identity: bytes
    """Of the broker; empty without partitions."""
    partitions: list[PartitionHistory]
    damages: list[Damage]

    def of_topic(self, topic: str | None) -> list[PartitionHistory]:
        """Choose the partitions of a topic; None: all."""
        return [each for each in self.partitions if topic in (None, each.manifest.topic)]


def read_catalog(store: ObjectStore, on_progress: OnProgress | None = None) -> Catalog:
    """Read the manifest of every partition. Raises what the store raises."""
    partitions: list[PartitionHistory] = []
    damages: list[Damage] = []
    listed = sorted(_list_partitions(store).items())
    for done, (partition_id, newest) in enumerate(listed):
        if on_progress is not None:
            on_progress("manifests", done, len(listed))
        if newest == NONE:
            damages.append(without_records(partition_id))
            continue
        try:
            partitions.append(load_partition(store, partition_id, newest))
        except FAULTS as error:
            prefix = manifest_prefix(partition_id)
            cause, remedy = cause_of(store, prefix, error), remedy_of(error)
            damages.append(Damage(prefix, cause, remedy, partition_id=partition_id))
    found = collections.Counter(each.identity for each in partitions)
    identity = found.most_common(1)[0][0] if found else b""
    damages += [_foreign(each, identity) for each in partitions if each.identity != identity]
    return Catalog(identity, partitions, damages)


def load_partition(store: ObjectStore, partition_id: int, newest: int = NONE) -> PartitionHistory:
    """Read one partition's manifest. `newest` is the number of a record that a listing showed.

    Raises what the store raises, and as `ManifestReader.load` for records that are damaged.
    """
    reader = ManifestReader(store, None, partition_id)
    try:
        manifest = reader.load(newest)
    except DataLoss:
        # a living uploader may have pruned records between two reads: a second look tells
        reader = ManifestReader(store, None, partition_id)
        manifest = reader.load()
    return PartitionHistory(partition_id, reader.identity or b"", manifest)


def cause_of(store: ObjectStore, key: str, error: DanubeError) -> str:
    """Return the cause of an error about an object, without the store's URL, the key and the remedy."""
    cause = str(error).partition("; ")[0].replace(f"{store.url}: ", "")
    return cause.removeprefix(f"{key}: ")


def remedy_of(error: DanubeError) -> str:
    """Return the remedy that an error names; without one, to restore what is damaged."""
    return str(error).partition("; ")[2] or RESTORE


def _list_partitions(store: ObjectStore) -> dict[int, int]:
    """Map each partition to the newest record that a listing shows; NONE: it shows only the mark."""
    newest: dict[int, int] = {}
    for info in store.list(MANIFESTS_PREFIX):
        folder, _, name = info.key.removeprefix(MANIFESTS_PREFIX).partition("/")
        if not folder.isdecimal():
            continue
        if name.isdecimal():
            newest[int(folder)] = max(newest.get(int(folder), NONE), int(name))
        elif name == PRUNED_NAME:
            newest.setdefault(int(folder), NONE)
    return newest


def without_records(partition_id: int) -> Damage:
    """Make the damage of a partition of which there is only the mark that records were pruned."""
    prefix = manifest_prefix(partition_id)
    return Damage(
        prefix, PRUNED_ALONE,
        "look again if listings of the store are late, or start the broker if its topic was deleted; else restore "
        f"{prefix} from a copy, or repair with --adopt {partition_id}=TOPIC",
        partition_id=partition_id,
    )  # fmt: skip


def _foreign(partition: PartitionHistory, identity: bytes) -> Damage:
    manifest = partition.manifest
    return Damage(
        manifest_prefix(partition.partition_id),
        f"it is the history of another broker ({partition.identity.hex()}) than that of the other "
        f"partitions ({identity.hex()})",
        "give each broker a store, or a prefix, of its own",
        manifest.topic, partition.partition_id, manifest.first_offset, manifest.end_offset,
    )  # fmt: skip
