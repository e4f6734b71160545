"""What a read consists of: which offsets of which partitions, and which sections of which objects hold them.

    flush and hold --> snapshot: partitions with their manifests --> sections --> splits --> tasks

A **split** is a section or a range of its blocks; a **task** is what one Spark partition reads: one split, or several
small ones of about `splitBytes` together. Nothing but manifests is read here, and executors need the store alone. A
bound in time costs the tables of blocks of the two sections where it lies.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from danube_fast.client.client import Client
from danube_fast.clock import SystemClock
from danube_fast.errors import (
    DanubeError,
    DataLoss,
    InvalidArgument,
    NotFound,
    PermissionDenied,
)
from danube_fast.history.catalog import PRUNED_ALONE, Catalog, load_partition, read_catalog
from danube_fast.history.holds import make_hold, release_hold
from danube_fast.history.manifest import Manifest, Section
from danube_fast.history.reader import HistoryReader
from danube_fast.history.stores.opening import open_store
from danube_fast.history.stores.store import ObjectStore
from danube_fast.spark.options import HeldPartition, ReadOptions, Where
from danube_fast.types import TopicPattern

__all__ = [
    "Bounds",
    "PartitionRange",
    "Plan",
    "Snapshot",
    "Split",
    "Task",
    "divide",
    "held_snapshot",
    "limited_range",
    "make_plan",
    "open_reading",
    "release_holds",
    "release_quietly",
    "snapshot_of_broker",
    "snapshot_of_store",
]

LOADING_MAX = 16
"""Manifests that are loaded at the same time."""
OFFSET_MAX = (1 << 62) - 1
TIME_MAX_NS = (1 << 63) - 1


class Bounds(NamedTuple):
    """What rows have to be like, as filters say; sections and blocks without such rows are not read."""

    offset_low: int = 0
    offset_high: int = OFFSET_MAX
    """Offsets are below."""
    publish_low_ns: int = -TIME_MAX_NS
    publish_high_ns: int = TIME_MAX_NS
    """Publish times are not above."""
    partitions: frozenset[int] | None = None
    """By index; None: all."""
    keys: frozenset[bytes] | None = None
    """None: all."""


class PartitionRange(NamedTuple):
    """Offsets of one partition that are to be read."""

    topic: str
    """Of the partitioned topic."""
    partition: int
    """By its index in the topic."""
    partition_id: int
    low: int
    high: int
    """Offsets are below."""
    manifest: Manifest


class Split(NamedTuple):
    """A section of one object, or a range of its blocks: part `part` of `parts`."""

    topic: str
    partition: int
    """By its index in the topic."""
    partition_id: int
    section: Section
    low: int
    high: int
    part: int
    parts: int
    producers: Mapping[int, str]
    """Names by id, if they are read."""


class Task(NamedTuple):
    """What one Spark partition reads."""

    store: str
    splits: tuple[Split, ...]
    bounds: Bounds


class Snapshot(NamedTuple):
    """What some topics have in history at one time: all that can be read of each partition."""

    store: str
    holds: list[str]
    """Keys of the holds on the objects."""
    ranges: list[PartitionRange]
    topics: Mapping[str, str]
    """Topics of the holds that a broker has made."""


class Plan(NamedTuple):
    """A read: its offsets, and its tasks."""

    snapshot: Snapshot
    ranges: list[PartitionRange]
    tasks: list[Task]


def open_reading(url: str) -> ObjectStore:
    """Open a store that is only read. Raises as `open_store`."""
    return open_store(url, SystemClock(), Path(tempfile.gettempdir()), must_exist=True)


def make_plan(options: ReadOptions, bounds: Bounds | None = None) -> Plan:
    """Flush the topics, hold their objects, and divide what is to be read.

    Raises NotFound for a topic that is unknown or has no history, FailedPrecondition for one that keeps none, and what
    the broker and the store raise.
    """
    if options.held:
        snapshot = _held_snapshot(options)
        return divide(snapshot, snapshot.ranges, options, bounds or Bounds())
    if options.url is None and options.store is not None:
        snapshot = snapshot_of_store(options)
    else:
        with options.connect() as client:
            snapshot = snapshot_of_broker(client, options, options.hold_seconds)
    store = open_reading(snapshot.store)
    limited = [limited_range(store, each, options) for each in snapshot.ranges]
    return divide(snapshot, limited, options, bounds or Bounds())


def snapshot_of_broker(client: Client, options: ReadOptions, hold_seconds: int) -> Snapshot:
    """Flush the topics, and hold their objects for so many seconds; 0: do not. Raises as `make_plan`."""
    topics = list(options.topics)
    if options.pattern:
        listed = client.admin.list_topics(pattern=options.pattern)
        topics = [each["topic"] for each in listed if _is_logged(each)]
        if not topics:
            raise NotFound(f"no topic matches {options.pattern} that is reliable, and os or fsync")
    answers: list[dict[str, Any]] = []
    try:
        for topic in topics:
            answers.append(client.admin.flush_history(topic, hold_seconds=hold_seconds))
        url = options.store or answers[0]["store"]
        known = [
            HeldPartition(
                topic, partition, each["partition_id"], each["manifest"], 0, each["end_offset"]
            )
            for topic, answer in zip(topics, answers, strict=True)
            for partition, each in enumerate(answer["partitions"])
        ]
        ranges = [
            each._replace(low=each.manifest.first_offset)
            for each in _load(open_reading(url), known)
        ]
    except DanubeError:
        for answer in answers:
            release = partial(client.admin.release_history_hold, topic=answer["topic"])
            release_quietly(release, answer["hold"])
        raise
    held = {answer["hold"]: answer["topic"] for answer in answers if answer["hold"]}
    return Snapshot(url, list(held), ranges, held)


def _is_logged(topic: Mapping[str, Any]) -> bool:
    """Whether messages of a listed topic are in a log, so that they can be uploaded."""
    return bool(topic["dispatch"] == "reliable" and topic["durability"] != "memory")


def release_quietly(release: Callable[[str], Any], hold: str) -> bool:
    """Give a hold back if that works, else it ends by itself; whether it did."""
    if hold:
        try:
            release(hold)
        except DanubeError:
            return False
    return True


@contextlib.contextmanager
def held_snapshot(options: ReadOptions, client: Client | None) -> Iterator[Snapshot]:
    """Take a snapshot of the broker, or of a store alone if there is no `client`, and hold its objects until the end of
    the block. Raises as `make_plan`."""
    if client is None:
        snapshot = snapshot_of_store(options)
    else:
        snapshot = snapshot_of_broker(client, options, options.hold_seconds)
    try:
        yield snapshot
    finally:
        release_holds(snapshot.holds, snapshot.store, client, snapshot.topics)


def release_holds(
    holds: Sequence[str], store: str, client: Client | None, topics: Mapping[str, str]
) -> None:
    """Give holds on objects of a store back, by the broker if there is a `client`; those where that fails end by
    themselves. `topics`: those of holds that the broker has made."""
    for hold in holds:
        if client is not None:
            topic = topics.get(hold)
            release_quietly(partial(client.admin.release_history_hold, topic=topic), hold)
        else:
            release_quietly(partial(release_hold, open_reading(store)), hold)


def _held_snapshot(options: ReadOptions) -> Snapshot:
    """What the caller has flushed, and holds."""
    url = options.store or ""
    return Snapshot(url, [], _load(open_reading(url), options.held), {})


def _load(store: ObjectStore, known: Sequence[HeldPartition]) -> list[PartitionRange]:
    """Read the manifests of partitions."""

    def load(of: HeldPartition) -> PartitionRange:
        manifest = load_partition(store, of.partition_id, of.manifest).manifest
        return PartitionRange(of.topic, of.partition, of.partition_id, of.low, of.high, manifest)

    with concurrent.futures.ThreadPoolExecutor(LOADING_MAX) as pool:
        return list(pool.map(load, known))


def snapshot_of_store(options: ReadOptions) -> Snapshot:
    """Take what the store has, and hold its objects; no broker is asked. Who may only read the store holds nothing.
    Raises as `make_plan`, and DataLoss for a manifest that cannot be read, which may be of these topics."""
    url = options.store or ""
    store = open_reading(url)
    catalog = read_catalog(store)
    for damage in catalog.damages if options.fails_on_loss else ():
        if damage.reason != PRUNED_ALONE:
            raise DataLoss(
                f"{url}: {damage.key}: {damage.reason}; {damage.remedy}; .option('failOnDataLoss', 'false') reads "
                "what else there is"
            )
    ranges = _chosen(catalog, options)
    known = {each.topic for each in ranges}
    for topic in options.topics or (options.pattern,):
        if not ranges or (options.topics and topic not in known):
            raise NotFound(
                f"{url} has no history of {topic}; `danube-fast history ls --store {url}` lists what there is"
            )
    holds: list[str] = []
    keys = sorted({section.key for each in ranges for section in each.manifest.sections})
    with contextlib.suppress(PermissionDenied):
        hold = make_hold(store, keys, options.hold_seconds, SystemClock().wall_ns())
        holds.append(hold.key)
    return Snapshot(url, holds, ranges, {})


def _chosen(catalog: Catalog, options: ReadOptions) -> list[PartitionRange]:
    """The partitions of the topics; of several lives of one the newest. Ids rise with the index in a topic."""
    pattern = TopicPattern(options.pattern) if options.pattern else None
    newest: dict[str, int] = {}
    for each in catalog.partitions:
        topic, incarnation = each.manifest.topic, each.manifest.incarnation
        if pattern.matches(topic) if pattern is not None else topic in options.topics:
            newest[topic] = max(incarnation, newest.get(topic, 0))
    ranges: list[PartitionRange] = []
    for each in sorted(catalog.partitions, key=lambda of: (of.manifest.topic, of.partition_id)):
        manifest = each.manifest
        # a repair that found no record does not know the incarnation
        if manifest.topic in newest and manifest.incarnation in (0, newest[manifest.topic]):
            before = ranges[-1] if ranges and ranges[-1].topic == manifest.topic else None
            ranges.append(
                PartitionRange(
                    manifest.topic, before.partition + 1 if before else 0, each.partition_id,
                    manifest.first_offset, manifest.end_offset, manifest,
                )
            )  # fmt: skip
    return ranges


def divide(
    snapshot: Snapshot, ranges: Sequence[PartitionRange], options: ReadOptions, bounds: Bounds
) -> Plan:
    """Divide ranges of a snapshot in tasks."""
    chosen = [
        (each, section, low)
        for each in ranges
        if bounds.partitions is None or each.partition in bounds.partitions
        for section, low in _sections(each, bounds)
    ]
    total = sum(section.byte_count for _, section, _ in chosen)
    wanted = max(1, min(options.split_bytes, total // options.partitions_min))
    are_named = "producer_name" in options.columns
    splits = [
        split
        for each, section, low in chosen
        for split in _splits(each, section, low, bounds, wanted, are_named=are_named)
    ]
    tasks = [Task(snapshot.store, some, bounds) for some in _grouped(splits, wanted)]
    return Plan(snapshot, list(ranges), tasks)


def limited_range(store: ObjectStore, of: PartitionRange, options: ReadOptions) -> PartitionRange:
    """Apply the options `start` and `end` to a partition."""
    reader = HistoryReader(store, of.partition_id, of.manifest)
    low = _offset(reader, of, options.start, of.low)
    high = _offset(reader, of, options.end, of.high)
    return of._replace(low=max(low, of.low), high=min(high, of.high))


def _offset(reader: HistoryReader, of: PartitionRange, where: Where, default: int) -> int:
    """Offset of a position in a partition. `default`: for a partition that is not named."""
    if where == "earliest":
        return of.low
    if where == "latest":
        return of.high
    if isinstance(where, int):
        return where
    if isinstance(where, str):
        raise InvalidArgument(f"{where!r} is no position")
    named: dict[Any, int] = dict(where)
    if "last" in named:
        return max(of.low, of.high - named["last"])
    if "ago_ns" in named:
        time_ns = SystemClock().wall_ns() - named["ago_ns"]
    elif "time_ns" in named:
        time_ns = named["time_ns"]
    else:
        return named.get(of.partition, default)
    found = reader.find_time(time_ns)
    return of.high if found is None else found


def _sections(of: PartitionRange, bounds: Bounds) -> Iterator[tuple[Section, int]]:
    """List the sections of a partition that may hold wanted messages, each with the first offset that is read of it:
    what two of them have is read once."""
    low, high = max(of.low, bounds.offset_low), min(of.high, bounds.offset_high)
    for section in of.manifest.sections:
        is_missed = section.end_offset <= low or section.base_offset >= high
        if section.byte_count:  # else it is lost, which the reader is told
            is_missed |= section.publish_min_ns > bounds.publish_high_ns
            is_missed |= section.publish_max_ns < bounds.publish_low_ns
        if not is_missed:
            yield section, low
        low = max(low, section.end_offset)


def _splits(
    of: PartitionRange,
    section: Section,
    low: int,
    bounds: Bounds,
    wanted: int,
    *,
    are_named: bool,
) -> Iterator[Split]:
    """Divide a section in parts of about `wanted` bytes; `are_named`: whether the names of producers are read."""
    producers = of.manifest.producers if are_named else {}
    high = min(of.high, bounds.offset_high)
    parts = max(1, min(section.block_count, -(-section.byte_count // wanted)))
    for part in range(parts):
        yield Split(
            of.topic, of.partition, of.partition_id, section, low, high, part, parts, producers
        )


def _grouped(splits: Iterable[Split], wanted: int) -> Iterator[tuple[Split, ...]]:
    """Gather small splits for one task each, in their order."""
    some: list[Split] = []
    size = 0
    for split in splits:
        byte_count = split.section.byte_count // split.parts
        if some and size + byte_count > wanted:
            yield tuple(some)
            some, size = [], 0
        some.append(split)
        size += byte_count
    if some:
        yield tuple(some)
