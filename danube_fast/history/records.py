"""The records of a partition's manifest that can still be read, and what they say together.

    records found --believed--> a chain from the newest one back
                  --a link is missing--> the records below it: another chain, and so on, down to a snapshot

A manifest that is whole is one chain, which begins with its snapshot. If it is not, gaps between what the chains say
are in doubt, and only objects can tell. `repair.py` makes a manifest of both.
"""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from danube_fast.errors import DataLoss, FailedPrecondition, NotFound
from danube_fast.history.catalog import cause_of
from danube_fast.history.manifest import (
    PRUNED_NAME,
    Manifest,
    ManifestReader,
    Record,
    Section,
    believed,
    manifest_key,
    manifest_prefix,
    newest_producers,
)
from danube_fast.history.ranges import Range, subtract
from danube_fast.history.stores.store import ObjectStore

__all__ = ["Knowledge", "Remains", "know", "read_remains"]

JUMP = 10**9
"""So many of the newest records may be missing, at least: an uploader that knows one of them must not take the number
of a snapshot that a repair makes for its own."""
THREADS = 16
"""Records that are read at the same time."""


class Remains(NamedTuple):
    """The records of one partition that a store still has."""

    partition_id: int
    keys: list[str]
    """Of all of them, in the order of their numbers."""
    records: dict[int, Record]
    """Those that can be read."""
    faults: dict[int, str]
    """By number: why a record cannot be read. Of records that are missing one after the other it has the first."""
    is_pruned: bool

    @property
    def next_number(self) -> int:
        """Above all numbers that are there, or that uploaders may know though they are missing."""
        return JUMP * (2 + max([-1, *self.records, *self.faults]) // JUMP)

    @property
    def producers(self) -> dict[int, str]:
        """Names of producers that any record has: a name is never another one's, so none of them is wrong."""
        found: dict[int, str] = {}
        for _, record in sorted(self.records.items()):
            found.update(record.producers)
        return newest_producers(found)

    @property
    def is_end_lost(self) -> bool:
        """Whether records behind the newest one that counts are damaged or missing, or none of them can be read."""
        counted, _ = believed(self.records)
        if not counted:
            # the mark of pruning alone does not tell: the deletion of a topic, cut short, leaves it last
            return bool(self.keys)
        return max(self.faults, default=-1) > counted[-1].number

    @property
    def is_bare(self) -> bool:
        """Whether there is only the mark of pruning: a topic that was just being deleted, or all records are lost."""
        return self.is_pruned and not self.keys


class Knowledge(NamedTuple):
    """All that the readable records of a partition say."""

    newest: Record | None
    manifest: Manifest
    """As a reader sees it; of a manifest that is broken, as far as records tell."""
    is_whole: bool
    """Whether the records reach back to a snapshot without a gap."""
    sections: list[Section]
    """In the order of offsets; of those that overlap, the newest."""
    unused: list[Range]
    """Offsets that no message ever had: the records say all that there is, and name no section there."""
    first_offset: int
    end_offset: int


def read_remains(store: ObjectStore, partition_id: int) -> Remains:
    """Read every record of a partition. Raises what the store raises, FailedPrecondition for one of a newer format."""
    prefix = manifest_prefix(partition_id)
    names = sorted(info.key.removeprefix(prefix) for info in store.list(prefix))
    numbers = [int(name) for name in names if name.isdecimal()]
    records: dict[int, Record] = {}
    faults: dict[int, str] = {}
    newer: dict[int, FailedPrecondition] = {}

    def read(number: int) -> Record | DataLoss | FailedPrecondition | NotFound:
        try:
            return ManifestReader(store, None, partition_id).read(number)
        except (DataLoss, FailedPrecondition, NotFound) as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for number, found in zip(numbers, pool.map(read, numbers), strict=True):
            if isinstance(found, Record):
                records[number] = found
                continue
            key = manifest_key(partition_id, number)
            faults[number] = cause_of(store, key, found).replace(key, f"record {number}")
            if isinstance(found, FailedPrecondition):
                newer[number] = found
    if newer and max(newer) > max(records, default=-1):
        raise newer[max(newer)]  # else one of this format was made later: it is damaged
    is_pruned = PRUNED_NAME in names
    faults.update(_missing(numbers, is_pruned=is_pruned))
    keys = [manifest_key(partition_id, number) for number in numbers]
    return Remains(partition_id, keys, records, faults, is_pruned)


def _missing(numbers: list[int], *, is_pruned: bool) -> Iterator[tuple[int, str]]:
    """Find the gaps between numbers, and whether they begin too late."""
    if numbers and numbers[0] and not is_pruned:
        yield 0, f"records 0 to {numbers[0] - 1} are missing, and were not pruned"
    for before, after in itertools.pairwise(numbers):
        if after - before == 2:
            yield before + 1, f"record {before + 1} is missing"
        elif after - before > 2:
            yield before + 1, f"records {before + 1} to {after - 1} are missing"


def know(records: Mapping[int, Record]) -> Knowledge:
    """Put together what records say."""
    manifest = Manifest()
    sections: list[Section] = []
    told: list[Range] = []
    named: list[Range] = []
    last: Record | None = None
    counted = _in_order(records)
    for record in counted:
        if record.is_snapshot:
            sections, told = [], [(0, record.end_offset)]
        elif last is not None and record.previous == last.number:
            told.append((last.end_offset, record.end_offset))
        elif (
            record.added and not record.removed
        ):  # else it may be of an object that was written again
            told.append((min(each.base_offset for each in record.added), record.end_offset))
        gone = set(record.removed)
        sections = [each for each in sections if each.key not in gone]
        for added in sorted(record.added, key=lambda section: section.base_offset):
            named.append((added.base_offset, added.end_offset))
            start, end = added.base_offset, added.end_offset
            kept = [x for x in sections if x.base_offset >= end or x.end_offset <= start]
            sections = [*kept, added]
        manifest.apply(record)
        last = record
    is_whole = not counted or counted[0].is_snapshot
    # a record that is missing may have moved the first offset; one that is void knew it, too
    firsts = [manifest.first_offset] if is_whole else [r.first_offset for r in records.values()]
    first = max(firsts)
    return Knowledge(
        newest=last, manifest=manifest, is_whole=is_whole,
        sections=sorted(sections, key=lambda section: section.base_offset),
        unused=subtract(told, named), first_offset=first,
        end_offset=max([manifest.end_offset, *(each.end_offset for each in sections)]),
    )  # fmt: skip


def _in_order(records: Mapping[int, Record]) -> list[Record]:
    """Those that count, the oldest first, from a snapshot on if there is one."""
    left = dict(records)
    found: list[Record] = []
    while left:
        chain, _ = believed(left)
        found = chain + found
        if chain[0].is_snapshot:
            break
        left = {number: left[number] for number in left if number < chain[0].previous}
    return found
