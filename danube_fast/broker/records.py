"""State of a log's partitions as records: what is written into the reserved partition.

Each record is one msgpack array `[tag, field, ...]` and one message of a CONTROL frame. A snapshot is
a list of the same records, so there is one way to apply them. Replaying records and data frames from
the newest snapshot on gives the state at the log's end.
"""

from __future__ import annotations

import enum

import msgspec

from danube_fast.broker.messages import Assignment
from danube_fast.broker.subscription.policy import FailurePolicy
from danube_fast.broker.topics.policy import TopicPolicy
from danube_fast.broker.topics.quota import NO_QUOTA, NamespaceQuota

__all__ = [
    "Acked",
    "Compacted",
    "Cursor",
    "EpochStarted",
    "Moving",
    "PartitionAssigned",
    "PartitionMoving",
    "PartitionRemoved",
    "PartitionState",
    "PolicySet",
    "ProducerExpired",
    "ProducerOpened",
    "ProducerState",
    "Purged",
    "Record",
    "Reserved",
    "SubscriptionCreated",
    "SubscriptionDeleted",
    "Uploaded",
    "decode_record",
    "decode_snapshot",
    "encode_record",
    "encode_snapshot",
]


class _Record(msgspec.Struct, array_like=True, frozen=True, gc=False, tag_field="op"):
    pass


class EpochStarted(_Record, tag=1, frozen=True):
    """A worker opened the log, or heard of a newer `metadata_revision`; the metadata had at least that
    one, durably. `clean`: the end before it was orderly."""

    epoch: int
    wall_ns: int
    boot_id: str
    clean: bool
    metadata_revision: int = 0


class PartitionAssigned(_Record, tag=2, frozen=True):
    """The partition lives in this log from here on; also written when its settings change."""

    partition_id: int
    topic: str
    index: int
    dispatch: str
    durability: str
    incarnation: int
    first_offset: int = 0
    policy: TopicPolicy = TopicPolicy()
    quota: NamespaceQuota = NO_QUOTA
    owner: str = ""

    @classmethod
    def of(cls, entry: Assignment) -> PartitionAssigned:
        """Make the record of what the coordinator says of a partition."""
        return cls(
            entry.partition_id, entry.topic, entry.index, entry.dispatch, entry.durability,
            entry.incarnation, entry.first_offset, entry.policy, entry.quota, entry.owner,
        )  # fmt: skip


class PartitionRemoved(_Record, tag=3, frozen=True):
    """The partition was deleted, or `moved` to another log; its frames before this are garbage."""

    partition_id: int
    moved: bool = False


class Reserved(_Record, tag=4, frozen=True):
    """Offsets below `until` may have been given out."""

    partition_id: int
    until: int


class ProducerOpened(_Record, tag=5, frozen=True):
    """A producer registered; `epoch` fences the ones before."""

    partition_id: int
    producer_id: int
    name: str
    epoch: int


class ProducerExpired(_Record, tag=6, frozen=True):
    """A producer was forgotten after long disuse."""

    partition_id: int
    producer_id: int


class SubscriptionCreated(_Record, tag=7, frozen=True):
    """A named cursor began at `cursor`."""

    partition_id: int
    name: str
    type: str
    cursor: int


class SubscriptionDeleted(_Record, tag=8, frozen=True):
    """A named cursor went away."""

    partition_id: int
    name: str


class Cursor(_Record, tag=9, frozen=True):
    """All below `cursor` is acked, and the flat [start, end) pairs of `acked` above it; nothing else.
    Written for seeks and in snapshots."""

    partition_id: int
    name: str
    cursor: int
    acked: list[int] = []


class Acked(_Record, tag=12, frozen=True):
    """Flat [start, end) pairs that are acked besides what was acked before. Once or twice is the same."""

    partition_id: int
    name: str
    ranges: list[int]


class PolicySet(_Record, tag=13, frozen=True):
    """A subscription's failure policy, and the principal that set it: empty if no one was asked who they are."""

    partition_id: int
    name: str
    policy: FailurePolicy
    setter: str = ""


class PartitionState(_Record, tag=10, frozen=True):
    """Where a partition stands: in snapshots, and where the log's frames alone do not tell."""

    partition_id: int
    next_offset: int
    append_time_ns: int
    first_offset: int
    reserved_until: int


class ProducerState(_Record, tag=11, frozen=True):
    """Snapshot only: a producer's next sequence and last batches (flat base_sequence, count,
    base_offset)."""

    partition_id: int
    producer_id: int
    next_sequence: int
    window: list[int]
    last_used_ns: int


class Purged(_Record, tag=20, frozen=True):
    """All messages below `until` are gone, for every subscription."""

    partition_id: int
    until: int


class Compacted(_Record, tag=22, frozen=True):
    """The messages of a partition that were written again, under their old offsets.

    Below `until` no two messages have one key, but for copies that stand below `stale_position` in the
    log; `left_bytes` is what a pass left of them. `tombstone_ns`: time of the newest tombstone among
    them, 0 if there is none. `breaks`, in snapshots: the offsets at which positions in the log fall.
    """

    partition_id: int
    until: int
    stale_position: int
    left_bytes: int
    tombstone_ns: int
    breaks: list[int] | None = None


class PendingGapsSet(_Record, tag=23, frozen=True):
    """All gaps that a subscription met while it had no consumer, [start, end, reason, lost] each, and no consumer
    was told yet; nothing else."""

    partition_id: int
    name: str
    gaps: list[tuple[int, int, str, bool]]


class Uploaded(_Record, tag=25, frozen=True):
    """The messages from `first_offset` to `until` are in the object store's history, or were never there.

    `manifest` is the number of the record of the partition's manifest that says so. The log may be trimmed up to
    `until`; messages below are read from history.
    """

    partition_id: int
    until: int
    first_offset: int
    manifest: int
    byte_count: int = 0
    """Bytes that the manifest names: of whole objects, so some may lie before `first_offset`."""


class Attempts(_Record, tag=24, frozen=True):
    """How often messages of a subscription were delivered, and failed: flat [start, end, entry], of a
    partition that arrives. A restart forgets it."""

    partition_id: int
    name: str
    runs: list[int]


class Moving(enum.IntEnum):
    """Whether a partition is on its way between two logs. The metadata decides which of them has it."""

    NO = 0
    LEAVING = 1
    """Nothing is accepted any more; the other log may have it already."""
    ARRIVING = 2
    """All of it is here; this log may have it already."""


class PartitionMoving(_Record, tag=21, frozen=True):
    """A partition is closed until the metadata has decided; with NO: it was decided for this log.

    `assigned` makes the partition known when it arrives. `owner_epoch` is the one it will have.
    """

    partition_id: int
    moving: Moving
    owner_epoch: int
    assigned: PartitionAssigned | None = None


Record = (
    EpochStarted | PartitionAssigned | PartitionRemoved | Reserved | ProducerOpened
    | ProducerExpired | SubscriptionCreated | SubscriptionDeleted | Cursor | PartitionState
    | ProducerState | Acked | PolicySet | Purged | PartitionMoving | Compacted | PendingGapsSet
    | Attempts | Uploaded
)  # fmt: skip

encode_record = msgspec.msgpack.Encoder().encode
"""Record -> bytes."""

decode_record = msgspec.msgpack.Decoder(Record).decode
"""Bytes -> record. Raises msgspec.DecodeError or ValidationError on anything else."""

encode_snapshot = msgspec.msgpack.Encoder().encode
"""list[Record] -> bytes."""

decode_snapshot = msgspec.msgpack.Decoder(list[Record]).decode
"""Bytes -> list[Record]."""
