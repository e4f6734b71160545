"""Which topics exist, which partitions they have, and in which log each partition lives.

    /topics/{namespace}/{topic}    TopicRecord      writing it is what makes a topic exist
    /partitions/{partition id}     PartitionRecord  written before its topic; once that is gone it
                                                    stays until its worker has dropped the messages
    /ids/next                      first id that was never given out

The metadata store holds the truth and this its copy in memory; the coordinator is the only writer.
A commit may take milliseconds, so new topics are collected: `create` checks and enters them here,
`commit` makes all of them durable with as few transactions as may be, and only then may a client be
told. Ids are taken in blocks, are never used twice, and number incarnations as well as partitions.
A partition without a topic is a deleted one, whether its topic was deleted or a kill came between
two writes: only what is recorded as deleted may a worker ever drop.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from danube_fast.broker.messages import Inherited
from danube_fast.broker.topics.changes import Change, TopicChanges
from danube_fast.broker.topics.ids import Ids
from danube_fast.broker.topics.moves import move_partition
from danube_fast.broker.topics.namespaces import Namespaces
from danube_fast.broker.topics.policy import TopicPolicy, effective, merge_values
from danube_fast.broker.topics.quota import NamespaceQuota
from danube_fast.broker.topics.records import (
    Extent,
    PartitionRecord,
    TopicOptions,
    TopicRecord,
    parse_dispatch,
    parse_durability,
)
from danube_fast.broker.topics.store import Store, replace
from danube_fast.broker.topics.table import TopicTable
from danube_fast.errors import (
    AlreadyExists,
    DanubeError,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
)
from danube_fast.types import (
    PART_MARK,
    Dispatch,
    TopicName,
    namespace_front,
    parse_topic,
    partition_topic,
)

__all__ = ["NotMade", "Store", "TopicDirectory"]

CHANGES_MAX = 100
"""Changes in one transaction of the store."""


class NotMade(NamedTuple):
    """A new topic that could not be recorded, and why."""

    record: TopicRecord
    partitions: list[PartitionRecord]
    error: DanubeError


def _topic_key(name: str) -> str:
    return f"/topics{name}"


def _partition_key(partition_id: int) -> str:
    return f"/partitions/{partition_id:010}"


def _change(partition: PartitionRecord) -> tuple[str, bytes | None]:
    """Make the change that writes a partition."""
    return _partition_key(partition.partition_id), msgspec.json.encode(partition)


class TopicDirectory:
    """All topics and partitions of a broker, over a metadata store."""

    def __init__(self, store: Store, *, log_count: int, partitions_per_topic_max: int) -> None:
        """Read everything. `log_count` logs can be placed on."""
        self._store = store
        self._partitions_max = partitions_per_topic_max
        self._topics = self.by_name = TopicTable()
        self._partitions: dict[int, PartitionRecord] = {}
        self._deleted: dict[int, PartitionRecord] = {}
        self.namespaces = Namespaces(store)
        self._load_of_log = [0] * log_count
        self._ids = Ids(store)
        self._new: dict[str, TopicRecord] = {}
        self.drop_changes: Callable[[int], list[tuple[str, bytes | None]]] = lambda number: []
        """What else is recorded when a deleted partition is forgotten."""
        self.changes = TopicChanges()
        """What became durable of late, for watchers."""
        self.growing: dict[str, list[PartitionRecord]] = {}
        """Topics that are about to get more partitions; nothing else about them changes meanwhile."""
        self.inherited: dict[int, list[Inherited]] = {}
        """Subscriptions that a new partition begins with, until it is part of its topic."""
        self.owned: Counter[str] = Counter()
        """Reply topics by the principal that made them."""
        self._load()
        self.loaded = frozenset(self._partitions)
        """Partitions that were there when this process began."""

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

    def check_takes_dead_letters(self, name: str) -> None:
        """Raises FailedPrecondition for a topic that may lose dead letters, InvalidArgument for the name of
        a partition. A topic that is not there is made when there are letters."""
        record = self.topic(name)
        if record is not None and record.dispatch != Dispatch.RELIABLE.value:
            raise FailedPrecondition(
                f"topic {name} is non_reliable and would lose dead letters; name a reliable one"
            )
        if record is None and self.partition_of(name) is not None:
            raise InvalidArgument(f"{name} is a partition of a topic; dead letters go to a topic")

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
        return list(self._topics.behind("", (namespace_front(namespace),)))

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

    def deleted_in_logs(self, log_ids: Iterable[int]) -> list[int]:
        """Partitions in these logs whose messages are to be dropped."""
        wanted = set(log_ids)
        return [record.partition_id for record in self._deleted.values() if record.log_id in wanted]

    def is_elsewhere(self, partition_id: int, log_ids: Iterable[int]) -> bool:
        """Whether a partition is known, and known not to be in these logs."""
        record = self._partitions.get(partition_id)
        if record is None:
            return partition_id in self._deleted
        return record.log_id not in set(log_ids)

    def move(self, record: PartitionRecord, log_id: int, first_offset: int) -> PartitionRecord:
        """Record that a partition is in another log, all of it. Raises what prevents it: then nothing
        has changed."""
        moved = move_partition(self._store, _partition_key(record.partition_id), record, log_id,
                               first_offset)  # fmt: skip
        self._count(record, -1)
        self._partitions[record.partition_id] = moved
        self._count(moved, 1)
        return moved

    def log_loads(self) -> list[int]:
        """How many partitions each log has."""
        return list(self._load_of_log)

    def dropped(self, partition_ids: Iterable[int]) -> None:
        """Their worker has dropped these; what the store could not forget is asked for again."""
        gone = [number for number in partition_ids if number in self._deleted]
        for at in range(0, len(gone), CHANGES_MAX // 2):
            some = gone[at : at + CHANGES_MAX // 2]
            changes = [(_partition_key(number), None) for number in some]
            with contextlib.suppress(DanubeError):
                self._store.transact([*changes, *(x for n in some for x in self.drop_changes(n))])
                for number in some:
                    del self._deleted[number]

    @property
    def partitions_max(self) -> int:
        """As many may a topic have."""
        return self._partitions_max

    @property
    def partition_count(self) -> int:
        """Partitions of all topics."""
        return len(self._partitions)

    def keep_ids_above(self, used: int) -> None:
        """Give out no id up to `used`, which a log knows. Raises what the store raises."""
        self._ids.keep_above(used)

    def skip_ids(self, count: int) -> None:
        """Leave out ids of which an older copy of the metadata does not know."""
        self._ids.skip(count)

    # ---------------------------------------------------------------- topics

    def create(self, name: str, options: TopicOptions, now_ns: int, owner: str = "") -> TopicRecord:
        """Enter a new topic; `commit` makes it durable, and no client may be told before. `owner`: see `reply_topics.py`.

        Raises InvalidArgument, AlreadyExists, or NotFound (the namespace).
        """
        topic = parse_topic(name)
        dispatch = parse_dispatch(options.dispatch)
        durability = parse_durability(options.durability)
        partition_count = options.partitions or 0
        self.check_new(topic, options)
        incarnation, *ids = self._ids.take(1 + max(partition_count, 1))
        record = TopicRecord(
            str(topic),
            incarnation,
            dispatch.value,
            durability.value,
            partition_count > 0,
            ids,
            now_ns,
            owner=owner,
        )
        self._enter(record.topic, ids, 0)
        self._topics[record.topic] = self._new[record.topic] = record
        self.namespaces.count_topic(record.topic, 1)
        self.owned[owner] += 1
        return record

    def commit(self) -> list[NotMade]:
        """Make all new topics durable. Returns those that could not be; they do not exist."""
        new, self._new = list(self._new.values()), {}
        failed: list[NotMade] = []
        while new:
            batch = self._batch(new)
            new = new[len(batch) :]
            failed += self._commit_batch(batch)
        return failed

    def delete(self, name: str) -> tuple[TopicRecord, list[PartitionRecord]]:
        """Remove a topic; returns what it was. Raises NotFound, or what the store raises."""
        record = self.require_stable(name)
        self._store.delete(_topic_key(name))
        partitions = self._forget(record)
        self._deleted.update((partition.partition_id, partition) for partition in partitions)
        self.changes.note(Change.DELETED, record.topic)
        return record, partitions

    def set_durability(self, name: str, durability: str) -> TopicRecord:
        """Change when publishes to a topic are acked, from now on.

        Raises NotFound, InvalidArgument, FailedPrecondition for a non_reliable topic.
        """
        wanted = parse_durability(durability)
        record = self.require_stable(name)
        if record.dispatch != Dispatch.RELIABLE:
            raise FailedPrecondition(
                f"{name} is {record.dispatch}; only a reliable topic has a durability"
            )
        return self._replace(record, durability=wanted.value)

    def _replace(self, record: TopicRecord, **fields: Any) -> TopicRecord:
        """Record changed settings. Raises FailedPrecondition, or what the store raises."""
        key = _topic_key(record.topic)
        changed = msgspec.structs.replace(record, **fields, epoch=record.epoch + 1)
        entry = self._store.get(key)
        if (
            entry is None
            or msgspec.json.decode(entry.value, type=TopicRecord) != record
            or not replace(self._store, key, msgspec.json.encode(changed), entry.revision)
        ):
            raise FailedPrecondition(
                f"{record.topic} was changed by another request just now; try again"
            )
        self._topics[record.topic] = changed
        return changed

    # ---------------------------------------------------------------- policies

    def policy_of(self, record: TopicRecord) -> TopicPolicy:
        """The values in force for a topic: its own over those of its namespace."""
        return effective(self.namespaces.values(parse_topic(record.topic).namespace), record.policy)

    def quota_of(self, record: TopicRecord) -> NamespaceQuota:
        """The quota of the namespace that a topic is in."""
        return self.namespaces.quota(parse_topic(record.topic).namespace)

    def set_policy(self, name: str, values: Mapping[str, Any]) -> TopicRecord:
        """Change some values of a topic's policy. Raises NotFound, InvalidArgument, FailedPrecondition."""
        record = self.require_stable(name)
        merged = merge_values(record.policy, values)
        if merged.get("compaction") and record.dispatch != Dispatch.RELIABLE.value:
            raise FailedPrecondition(
                f"{name} is {record.dispatch}: it keeps no messages that could be compacted; create it "
                "with dispatch='reliable'"
            )
        effective(self.namespaces.values(parse_topic(name).namespace), merged)
        return self._replace(record, policy=merged)

    # ---------------------------------------------------------------- growth

    def begin_growth(self, record: TopicRecord, count: int) -> list[PartitionRecord]:
        """New partitions of a topic, up to `count`: recorded, and not part of it before
        `finish_growth`; what a stop leaves of them counts as deleted. Raises what the store raises."""
        known = len(record.partition_ids)
        ids = self._ids.take(count - known)
        partitions = self._enter(record.topic, ids, known)
        self.growing[record.topic] = partitions
        try:
            for at in range(0, len(partitions), CHANGES_MAX):
                self._store.transact(list(map(_change, partitions[at : at + CHANGES_MAX])))
        except DanubeError:
            self.end_growth(record)
            raise
        return partitions

    def finish_growth(self, record: TopicRecord) -> TopicRecord:
        """Make the new partitions part of the topic; the changed topic."""
        partitions = self.growing[record.topic]
        ids = [partition.partition_id for partition in partitions]
        changed = self._replace(record, partition_ids=[*record.partition_ids, *ids])
        self.growing[record.topic] = []
        self.changes.note(Change.GROWN, record.topic)
        return changed

    def end_growth(self, record: TopicRecord) -> list[PartitionRecord]:
        """Let the topic change again; new partitions that are not part of it are to be dropped."""
        dropped = self.growing.pop(record.topic, [])
        for partition in dropped:
            del self._partitions[partition.partition_id]
            self._count(partition, -1)
            self._deleted[partition.partition_id] = partition
        return dropped

    def check_options(self, record: TopicRecord, options: TopicOptions) -> None:
        """Whether an existing topic is what a request would have created.

        Raises FailedPrecondition for another dispatch or number of partitions; the topic's own
        durability holds whatever was asked.
        """
        if options.dispatch is not None and options.dispatch != record.dispatch:
            raise FailedPrecondition(
                f"{record.topic} is {record.dispatch}, which never changes, and you asked for "
                f"{options.dispatch}; leave dispatch out, or use another topic"
            )
        count = len(record.partition_ids) if record.partitioned else 0
        asked = options.partitions
        # fewer are what it had before it was given more
        if asked is not None and (asked > count or (asked == 0) != (count == 0)):
            raise FailedPrecondition(
                f"{record.topic} has {count} partitions and you asked for {asked}; "
                "leave partitions out to use what is there"
            )

    # ---------------------------------------------------------------- inside

    def _load(self) -> None:
        for _, entry in self._store.list("/topics/"):
            record = msgspec.json.decode(entry.value, type=TopicRecord)
            self._topics[record.topic] = record
            self.namespaces.count_topic(record.topic, 1)
            self.owned[record.owner] += 1
        alive = {key for record in self._topics.values() for key in record.partition_ids}
        for _, entry in self._store.list("/partitions/"):
            partition = msgspec.json.decode(entry.value, type=PartitionRecord)
            if partition.partition_id not in alive:
                self._deleted[partition.partition_id] = partition
                continue
            self._partitions[partition.partition_id] = partition
            self._count(partition, 1)

    def check_new(self, topic: TopicName, options: TopicOptions) -> None:
        """Raise what prevents that a topic is made: InvalidArgument, AlreadyExists, NotFound (the namespace),
        ResourceExhausted."""
        partition_count = options.partitions or 0
        if topic in self._topics:
            raise AlreadyExists(f"topic {topic} exists already; use it, or delete it first")
        self.namespaces.require(topic.namespace)
        if not 0 <= partition_count <= self._partitions_max:
            raise InvalidArgument(
                f"{partition_count} partitions are not between 0 (not partitioned) and "
                f"{self._partitions_max} (partitions_per_topic_max)"
            )
        if self.partition_of(topic) is not None:
            raise AlreadyExists(
                f"{topic} is a partition of a partitioned topic; choose another name"
            )
        self.check_partition_names(topic, range(partition_count))
        self.namespaces.check_room(topic)

    def check_partition_names(self, topic: str, indices: range) -> None:
        """Raise AlreadyExists, InvalidArgument if partitions of these indices could not have names."""
        for index in indices:
            name = parse_topic(partition_topic(topic, index, indices.stop))
            if name in self._topics:
                raise AlreadyExists(
                    f"topic {name} has the name that partition {index} of {topic} would have; "
                    "choose another name, or delete that topic"
                )

    def require_stable(self, name: str) -> TopicRecord:
        """Find a topic that is not being created or given partitions. Raises FailedPrecondition."""
        record = self.require(name)
        if name in self._new or name in self.growing:
            what = "created" if name in self._new else "given more partitions"
            raise FailedPrecondition(f"topic {name} is just being {what}; try again")
        return record

    def _enter(self, topic: str, ids: list[int], first_index: int) -> list[PartitionRecord]:
        """Place new partitions."""
        partitions = [
            PartitionRecord(partition_id, topic, index, [Extent(self._place(), 1, 0)])
            for index, partition_id in enumerate(ids, first_index)
        ]
        self._partitions.update((entry.partition_id, entry) for entry in partitions)
        return partitions

    def _changes(self, record: TopicRecord) -> list[tuple[str, bytes | None]]:
        """Make the changes that write a new topic, itself last."""
        changes = list(map(_change, self.partitions(record)))
        return [*changes, (_topic_key(record.topic), msgspec.json.encode(record))]

    def _commit_batch(self, batch: list[TopicRecord]) -> list[NotMade]:
        try:
            if self._write(batch):
                for record in batch:
                    self.changes.note(Change.CREATED, record.topic)
                return []
        except DanubeError as error:
            return [self._undo(record, error) for record in batch]
        if len(batch) > 1:  # one of them exists; the others need not suffer
            return [failure for record in batch for failure in self._commit_batch([record])]
        text = f"topic {batch[0].topic} was created by another request just now; use it"
        return [self._undo(batch[0], AlreadyExists(text))]

    @staticmethod
    def _batch(new: list[TopicRecord]) -> list[TopicRecord]:
        """As many topics from the front as fit into one transaction; at least one."""
        room = CHANGES_MAX
        for count, record in enumerate(new):
            room -= len(record.partition_ids) + 1
            if room < 0:
                return new[: max(count, 1)]
        return new

    def _write(self, batch: list[TopicRecord]) -> bool:
        """Record new topics; False if another client made one of them. Raises what the store does.

        The last transaction holds the topics themselves, so they exist all at once.
        """
        changes = [change for record in batch for change in self._changes(record)]
        expected = {_topic_key(record.topic): 0 for record in batch}
        while len(changes) > CHANGES_MAX:
            self._store.transact(changes[:CHANGES_MAX])
            changes = changes[CHANGES_MAX:]
        return self._store.transact(changes, expected) is not None

    def _forget(self, record: TopicRecord) -> list[PartitionRecord]:
        partitions = self.partitions(record)
        del self._topics[record.topic]
        self.namespaces.count_topic(record.topic, -1)
        self.owned[record.owner] -= 1
        for partition in partitions:
            del self._partitions[partition.partition_id]
            self._count(partition, -1)
        return partitions

    def _undo(self, record: TopicRecord, error: DanubeError) -> NotMade:
        return NotMade(record, self._forget(record), error)

    def _place(self) -> int:
        """The log with the fewest partitions; counts the new one."""
        log_id = min(range(len(self._load_of_log)), key=self._load_of_log.__getitem__)
        self._load_of_log[log_id] += 1
        return log_id

    def _count(self, partition: PartitionRecord, by: int) -> None:
        if partition.log_id < len(self._load_of_log):
            self._load_of_log[partition.log_id] += by
