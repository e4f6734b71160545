"""Which topics exist, which partitions they have, and in which log each partition lives.

    /namespaces/{namespace}        NamespaceRecord
    /topics/{namespace}/{topic}    TopicRecord      writing it is what makes a topic exist
    /partitions/{partition id}     PartitionRecord  written before its topic, removed after it
    /ids/next                      first id that was never given out

The metadata store holds the truth and this its copy in memory; the coordinator is the only writer.
Ids are taken in blocks, are never used twice, and number incarnations as well as partitions. A kill
between two writes leaves partitions without a topic: `load` removes them, for nobody ever saw them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from danube_fast.errors import (
    AlreadyExists,
    DanubeError,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
)
from danube_fast.types import Dispatch, Durability, TopicName, parse_topic, partition_topic

__all__ = [
    "Extent",
    "NamespaceRecord",
    "PartitionRecord",
    "Store",
    "TopicDirectory",
    "TopicOptions",
    "TopicRecord",
]

NAMESPACES_ALWAYS = ("default", "system")
ID_BLOCK = 256
"""Ids reserved by one write; what a stop leaves of a block is skipped."""
PARTITION_ID_MAX = (1 << 32) - 1
OPEN_END = -1
PART_MARK = "-part-"


class StoredEntry(Protocol):
    """What a store gives back for a key."""

    @property
    def value(self) -> bytes:
        """The bytes that were written."""
        ...

    @property
    def revision(self) -> int:
        """Number of the change that wrote them."""
        ...


class Store(Protocol):
    """What is needed of a metadata store (`danube_fast.metadata.store.MetadataStore`)."""

    def get(self, key: str) -> StoredEntry | None:
        """The entry of a key."""
        ...

    def cas(self, key: str, value: bytes, expected_revision: int) -> int | None:
        """Write if the revision is the expected one (0: the key is missing); None if it is not."""
        ...

    def put(self, key: str, value: bytes) -> int:
        """Write whatever is there."""
        ...

    def delete(self, key: str) -> bool:
        """Remove a key."""
        ...

    def list(self, prefix: str) -> Sequence[tuple[str, StoredEntry]]:
        """All entries under a prefix."""
        ...


class Extent(msgspec.Struct, array_like=True, frozen=True):
    """Offsets `first_offset` to `last_offset` lie in a log; `last_offset` -1: and all that follow."""

    log_id: int
    epoch: int
    first_offset: int
    last_offset: int = OPEN_END


class PartitionRecord(msgspec.Struct, frozen=True):
    """One partition: whose it is and where its messages are, oldest extent first."""

    partition_id: int
    topic: str
    index: int
    extents: list[Extent]
    owner_epoch: int = 1

    @property
    def log_id(self) -> int:
        """The log that it is written to."""
        return self.extents[-1].log_id


class TopicRecord(msgspec.Struct, frozen=True):
    """One topic. A topic of the same name made later has another incarnation."""

    topic: str
    incarnation: int
    dispatch: str
    durability: str
    partitioned: bool
    partition_ids: list[int]
    created_ns: int
    epoch: int = 1
    """One more with every change of its settings."""

    def partition_topic(self, index: int) -> str:
        """Name of one of its partitions."""
        return partition_topic(self.topic, index, len(self.partition_ids) * self.partitioned)


class NamespaceRecord(msgspec.Struct, frozen=True):
    """One namespace."""

    namespace: str
    created_ns: int


class TopicOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What whoever creates a topic may choose. None: the default, or whatever the topic has."""

    dispatch: str | None = None
    durability: str | None = None
    partitions: int | None = None
    """0: not partitioned."""

    @classmethod
    def parse(cls, options: dict[str, Any]) -> TopicOptions:
        """Options from the wire. Raises InvalidArgument for unknown ones and wrong values."""
        try:
            parsed = msgspec.convert(options, cls)
        except msgspec.ValidationError as error:
            raise InvalidArgument(
                f"topic options are not right: {error}; known are dispatch, durability, partitions"
            ) from error
        parse_dispatch(parsed.dispatch)
        parse_durability(parsed.durability)
        return parsed


def parse_dispatch(text: str | None) -> Dispatch:
    """The dispatch mode named by `text`; reliable for None. Raises InvalidArgument."""
    try:
        return Dispatch(text) if text is not None else Dispatch.RELIABLE
    except ValueError:
        raise InvalidArgument(f"dispatch {text!r} is neither reliable nor non_reliable") from None


def parse_durability(text: str | None) -> Durability:
    """The durability named by `text`; fsync for None. Raises InvalidArgument."""
    try:
        durability = Durability(text) if text is not None else Durability.FSYNC
    except ValueError:
        raise InvalidArgument(f"durability {text!r} is none of memory, os, fsync") from None
    if durability is Durability.OBJECT:
        raise InvalidArgument(
            "durability 'object' needs a history, which this broker does not have; use fsync"
        )
    return durability


def _topic_key(name: TopicName) -> str:
    return f"/topics{name}"


def _partition_key(partition_id: int) -> str:
    return f"/partitions/{partition_id:010}"


class TopicDirectory:
    """All topics and partitions of a broker, over a metadata store."""

    def __init__(self, store: Store, *, log_count: int, partitions_per_topic_max: int) -> None:
        """Read everything; remove what a kill left half made. `log_count` logs can be placed on."""
        self._store = store
        self._partitions_max = partitions_per_topic_max
        self._topics: dict[str, TopicRecord] = {}
        self._revisions: dict[str, int] = {}
        self._partitions: dict[int, PartitionRecord] = {}
        self._namespaces: dict[str, NamespaceRecord] = {}
        self._load_of_log = [0] * log_count
        self._next_id = self._reserved_id = 1
        self._load()

    # ---------------------------------------------------------------- reading

    def topic(self, name: str) -> TopicRecord | None:
        """The topic of that name."""
        return self._topics.get(name)

    def require(self, name: str) -> TopicRecord:
        """The topic of that name. Raises NotFound that names the command to make it."""
        record = self._topics.get(parse_topic(name))
        if record is None:
            raise NotFound(
                f"topic {name} does not exist; create it with: danube-fast topics create {name}"
            )
        return record

    def partition_of(self, name: str) -> tuple[TopicRecord, int] | None:
        """Topic and index, if `name` names one partition of a partitioned topic."""
        base, mark, digits = name.rpartition(PART_MARK)
        record = self._topics.get(base) if mark else None
        if record is None or not record.partitioned or not digits.isdecimal():
            return None
        index = int(digits)
        if index >= len(record.partition_ids) or record.partition_topic(index) != name:
            return None
        return record, index

    def topics(self, namespace: str = "") -> list[TopicRecord]:
        """All topics, or those of a namespace, by name."""
        prefix = f"/{namespace}/" if namespace else "/"
        return [self._topics[name] for name in sorted(self._topics) if name.startswith(prefix)]

    def partitions(self, record: TopicRecord) -> list[PartitionRecord]:
        """The partitions of a topic, by index."""
        return [self._partitions[partition_id] for partition_id in record.partition_ids]

    def partition(self, partition_id: int) -> PartitionRecord | None:
        """The partition of that id."""
        return self._partitions.get(partition_id)

    def partitions_in_logs(self, log_ids: Iterable[int]) -> list[PartitionRecord]:
        """Every partition that is written to one of these logs."""
        wanted = set(log_ids)
        return [record for record in self._partitions.values() if record.log_id in wanted]

    @property
    def partition_count(self) -> int:
        """Partitions of all topics."""
        return len(self._partitions)

    def namespaces(self) -> list[str]:
        """All namespaces, by name."""
        return sorted({*NAMESPACES_ALWAYS, *self._namespaces})

    # ---------------------------------------------------------------- topics

    def create(self, name: str, options: TopicOptions, now_ns: int) -> TopicRecord:
        """Make a topic; durable when this returns.

        Raises InvalidArgument, AlreadyExists, NotFound (the namespace), or what the store raises.
        """
        topic = parse_topic(name)
        dispatch = parse_dispatch(options.dispatch)
        durability = parse_durability(options.durability)
        partition_count = options.partitions or 0
        self._check_new(topic, partition_count)
        incarnation, *ids = self._take_ids(1 + max(partition_count, 1))
        partitions = [
            PartitionRecord(partition_id, str(topic), index, [Extent(self._place(), 1, 0)])
            for index, partition_id in enumerate(ids)
        ]
        try:
            for partition in partitions:
                self._store.put(
                    _partition_key(partition.partition_id), msgspec.json.encode(partition)
                )
            record = TopicRecord(
                str(topic),
                incarnation,
                dispatch.value,
                durability.value,
                partition_count > 0,
                ids,
                now_ns,
            )
            revision = self._store.cas(_topic_key(topic), msgspec.json.encode(record), 0)
            if revision is None:
                raise AlreadyExists(f"topic {topic} was created by somebody else just now; use it")
        except BaseException:
            for partition in partitions:
                self._load_of_log[partition.log_id] -= 1
            raise
        self._topics[topic] = record
        self._revisions[topic] = revision
        self._partitions.update((partition.partition_id, partition) for partition in partitions)
        return record

    def delete(self, name: str) -> tuple[TopicRecord, list[PartitionRecord]]:
        """Remove a topic; returns what it was. Raises NotFound, or what the store raises."""
        record = self.require(name)
        partitions = self.partitions(record)
        self._store.delete(_topic_key(parse_topic(name)))
        del self._topics[name], self._revisions[name]
        for partition in partitions:
            del self._partitions[partition.partition_id]
            self._count(partition, -1)
        with contextlib.suppress(DanubeError):  # the topic is gone; `load` removes what is left
            for partition in partitions:
                self._store.delete(_partition_key(partition.partition_id))
        return record, partitions

    def set_durability(self, name: str, durability: str) -> TopicRecord:
        """Change when publishes to a topic are acked, from now on.

        Raises NotFound, InvalidArgument, FailedPrecondition for a non_reliable topic.
        """
        record = self.require(name)
        wanted = parse_durability(durability)
        if record.dispatch != Dispatch.RELIABLE:
            raise FailedPrecondition(
                f"{name} is {record.dispatch}; only a reliable topic has a durability"
            )
        changed = msgspec.structs.replace(record, durability=wanted.value, epoch=record.epoch + 1)
        revision = self._store.cas(
            _topic_key(parse_topic(name)), msgspec.json.encode(changed), self._revisions[name]
        )
        if revision is None:
            raise FailedPrecondition(f"{name} was changed by somebody else just now; try again")
        self._topics[name] = changed
        self._revisions[name] = revision
        return changed

    def check_options(self, record: TopicRecord, options: TopicOptions) -> None:
        """Whether an existing topic is what somebody would have created.

        Raises FailedPrecondition for another dispatch or number of partitions; the topic's own
        durability holds whatever was asked.
        """
        if options.dispatch is not None and options.dispatch != record.dispatch:
            raise FailedPrecondition(
                f"{record.topic} is {record.dispatch}, which never changes, and you asked for "
                f"{options.dispatch}; leave dispatch out, or use another topic"
            )
        count = len(record.partition_ids) if record.partitioned else 0
        if options.partitions is not None and options.partitions != count:
            raise FailedPrecondition(
                f"{record.topic} has {count} partitions and you asked for {options.partitions}; "
                "leave partitions out to use what is there"
            )

    # ---------------------------------------------------------------- namespaces

    def create_namespace(self, namespace: str, now_ns: int) -> None:
        """Make a namespace. Raises InvalidArgument or AlreadyExists."""
        parse_topic(f"/{namespace}/x")
        if namespace in self.namespaces():
            raise AlreadyExists(f"namespace {namespace} exists already; use it")
        record = NamespaceRecord(namespace, now_ns)
        self._store.put(f"/namespaces/{namespace}", msgspec.json.encode(record))
        self._namespaces[namespace] = record

    def delete_namespace(self, namespace: str) -> None:
        """Remove an empty namespace. Raises NotFound or FailedPrecondition."""
        if namespace in NAMESPACES_ALWAYS:
            raise FailedPrecondition(f"namespace {namespace} always exists")
        if namespace not in self._namespaces:
            raise NotFound(f"namespace {namespace} does not exist")
        topics = self.topics(namespace)
        if topics:
            raise FailedPrecondition(
                f"namespace {namespace} has {len(topics)} topics, {topics[0].topic} among them; "
                "delete them first"
            )
        self._store.delete(f"/namespaces/{namespace}")
        del self._namespaces[namespace]

    # ---------------------------------------------------------------- inside

    def _load(self) -> None:
        entry = self._store.get("/ids/next")
        if entry is not None:
            self._next_id = self._reserved_id = int(entry.value)
        for _, entry in self._store.list("/namespaces/"):
            namespace = msgspec.json.decode(entry.value, type=NamespaceRecord)
            self._namespaces[namespace.namespace] = namespace
        for _, entry in self._store.list("/topics/"):
            record = msgspec.json.decode(entry.value, type=TopicRecord)
            self._topics[record.topic] = record
            self._revisions[record.topic] = entry.revision
        alive = {key for record in self._topics.values() for key in record.partition_ids}
        for key, entry in self._store.list("/partitions/"):
            partition = msgspec.json.decode(entry.value, type=PartitionRecord)
            if partition.partition_id not in alive:
                self._store.delete(key)
                continue
            self._partitions[partition.partition_id] = partition
            self._count(partition, 1)

    def _check_new(self, topic: TopicName, partition_count: int) -> None:
        if topic in self._topics:
            raise AlreadyExists(f"topic {topic} exists already; use it, or delete it first")
        if topic.namespace not in self._namespaces and topic.namespace not in NAMESPACES_ALWAYS:
            raise NotFound(
                f"namespace {topic.namespace} does not exist; create it with: danube-fast "
                f"namespaces create {topic.namespace}"
            )
        if not 0 <= partition_count <= self._partitions_max:
            raise InvalidArgument(
                f"{partition_count} partitions are not between 0 (not partitioned) and "
                f"{self._partitions_max} (partitions_per_topic_max)"
            )
        if self.partition_of(topic) is not None:
            raise AlreadyExists(
                f"{topic} is a partition of a partitioned topic; choose another name"
            )
        parse_topic(partition_topic(topic, max(partition_count - 1, 0), partition_count))
        for index in range(partition_count):
            name = partition_topic(topic, index, partition_count)
            if name in self._topics:
                raise AlreadyExists(
                    f"topic {name} has the name that partition {index} of {topic} would have; "
                    "choose another name"
                )

    def _take_ids(self, count: int) -> list[int]:
        """Ids that nobody had before, not even before a crash."""
        if self._next_id + count > self._reserved_id:
            reserved = self._next_id + max(count, ID_BLOCK)
            if reserved > PARTITION_ID_MAX:
                raise FailedPrecondition(
                    "all partition ids were used; start with a new data directory"
                )
            self._store.put("/ids/next", str(reserved).encode())
            self._reserved_id = reserved
        ids = list(range(self._next_id, self._next_id + count))
        self._next_id += count
        return ids

    def _place(self) -> int:
        """The log with the fewest partitions; counts the new one."""
        log_id = min(range(len(self._load_of_log)), key=self._load_of_log.__getitem__)
        self._load_of_log[log_id] += 1
        return log_id

    def _count(self, partition: PartitionRecord, by: int) -> None:
        if partition.log_id < len(self._load_of_log):
            self._load_of_log[partition.log_id] += by
