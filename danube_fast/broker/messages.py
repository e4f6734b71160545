"""The messages between the processes of one broker: every operation, its arguments, its answer.

    coordinator -- Assign, FreezePartition, SkipMessages ... --> worker
                <-- FindAssignments, LogUsage ... ------------
    worker ------- ReadPartition, PublishBundle ... ---------> worker

A field is an argument. `answer` is the type of what is answered; None: that it is done; a notice, which has no
answer, says so in its docstring. The mailbox carries them (`workers/process/mailbox.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from danube_fast.broker.answers import ClientPage, PartitionCounts, SubscriptionCounts
from danube_fast.broker.audit_messages import Denied as Denied
from danube_fast.broker.audit_messages import PublishAudit as PublishAudit
from danube_fast.broker.history_messages import Backlog as Backlog
from danube_fast.broker.history_messages import BeginUploader as BeginUploader
from danube_fast.broker.history_messages import Block as Block
from danube_fast.broker.history_messages import Extent as Extent
from danube_fast.broker.history_messages import FetchedHistory as FetchedHistory
from danube_fast.broker.history_messages import FetchHistory as FetchHistory
from danube_fast.broker.history_messages import FileRange as FileRange
from danube_fast.broker.history_messages import FindHistoryTime as FindHistoryTime
from danube_fast.broker.history_messages import FindWithoutHistory as FindWithoutHistory
from danube_fast.broker.history_messages import Flushed as Flushed
from danube_fast.broker.history_messages import FlushedPartition as FlushedPartition
from danube_fast.broker.history_messages import FlushHistory as FlushHistory
from danube_fast.broker.history_messages import ForgetDeleted as ForgetDeleted
from danube_fast.broker.history_messages import HistoryReport as HistoryReport
from danube_fast.broker.history_messages import HistoryRuns as HistoryRuns
from danube_fast.broker.history_messages import ListBacklogs as ListBacklogs
from danube_fast.broker.history_messages import ListDeleted as ListDeleted
from danube_fast.broker.history_messages import Listed as Listed
from danube_fast.broker.history_messages import ListExtents as ListExtents
from danube_fast.broker.history_messages import ListLogOnly as ListLogOnly
from danube_fast.broker.history_messages import NameProducers as NameProducers
from danube_fast.broker.history_messages import NoteOlderCopy as NoteOlderCopy
from danube_fast.broker.history_messages import ReleaseHold as ReleaseHold
from danube_fast.broker.history_messages import RenewedHold as RenewedHold
from danube_fast.broker.history_messages import RenewHold as RenewHold
from danube_fast.broker.history_messages import Runs as Runs
from danube_fast.broker.history_messages import SetUploaded as SetUploaded
from danube_fast.broker.history_messages import Uploader as Uploader
from danube_fast.broker.message import Message as Message
from danube_fast.broker.security_messages import AddSignOns as AddSignOns
from danube_fast.broker.security_messages import FindSecurity as FindSecurity
from danube_fast.broker.security_messages import IssuersRead as IssuersRead
from danube_fast.broker.security_messages import SecurityChanged as SecurityChanged
from danube_fast.broker.security_messages import SecurityConfirmed as SecurityConfirmed
from danube_fast.broker.security_messages import SecurityPage as SecurityPage
from danube_fast.broker.security_messages import SignOnFailed as SignOnFailed
from danube_fast.broker.security_messages import SignOnsAdded as SignOnsAdded
from danube_fast.broker.security_messages import SignOnsTold as SignOnsTold
from danube_fast.broker.security_messages import UseServerKey as UseServerKey
from danube_fast.broker.subscription.policy import FailurePolicy
from danube_fast.broker.topics.policy import TopicPolicy
from danube_fast.broker.topics.quota import NO_QUOTA, NamespaceQuota

# ---------------------------------------------------------------- which partitions are a worker's


class Inherited(msgspec.Struct, frozen=True):
    """A subscription that a new partition of a growing topic begins with."""

    subscription: str
    type: str
    failure_policy: FailurePolicy
    policy_setter: str = ""
    """Principal that set the policy."""


class Assignment(msgspec.Struct, frozen=True):
    """One partition and the log it lives in."""

    partition_id: int
    topic: str
    index: int
    dispatch: str
    durability: str
    log_id: int
    incarnation: int
    first_offset: int = 0
    owner_epoch: int = 0
    policy: TopicPolicy = TopicPolicy()
    quota: NamespaceQuota = NO_QUOTA
    """Of the namespace that the topic is in."""
    subscriptions: list[Inherited] = []
    is_old: bool = False
    """The metadata knew it when the broker started."""
    owner: str = ""
    """Principal that made a reply topic; empty for others."""


class Assign(Message, frozen=True):
    """Take these partitions over; answered when all of them are durable."""

    partitions: list[Assignment]
    revision: int = 0
    """Of the metadata that names them."""


class Unassign(Message, frozen=True):
    """Drop these partitions, which were deleted; answered when that is durable."""

    partition_ids: list[int]
    reason: str = "deleted"
    revision: int = 0


class Assignments(msgspec.Struct, frozen=True):
    """All partitions of some logs."""

    partitions: list[Assignment]
    revision: int = 0
    deleted: list[int] = []
    """To be dropped from these logs."""
    elsewhere: list[int] = []
    """Those of the undecided that are in other logs, or nowhere any more."""


class LogMarks(Message, frozen=True):
    """How far a worker's logs are, and what they know of the metadata. A notice."""

    logs: list[tuple[int, int, int, int]] = []
    """Id, epoch, synced position, number of losses."""
    partition_id_max: int = 0
    metadata_revision: int = 0


class FindAssignments(Message, frozen=True):
    """Ask which partitions live in these logs."""

    log_ids: list[int]
    undecided: list[int] = []
    """Partitions of which the worker does not know whether they are in these logs."""
    marks: LogMarks = LogMarks()
    answer = Assignments


class PartitionsDropped(Message, frozen=True):
    """These partitions were dropped durably. A notice."""

    partition_ids: list[int]


class Owner(msgspec.Struct, frozen=True):
    """Process index of a partition's worker; None if there is no such partition."""

    process: int | None


class FindOwner(Message, frozen=True):
    """Ask which worker owns a partition."""

    partition_id: int
    answer = Owner


# ---------------------------------------------------------------- a partition that moves


class CopyPartition(Message, frozen=True):
    """Copy a partition from the worker `source`; answered when nearly all messages are here."""

    assignment: Assignment
    source: int
    owner_epoch: int


class Copied(msgspec.Struct, frozen=True):
    """How far ReadPartition came; the frames are the body of the answer."""

    next_offset: int
    end_offset: int
    is_end: bool
    is_logged: bool


class ReadPartition(Message, frozen=True):
    """Ask for frames of a partition from an offset on."""

    partition_id: int
    offset: int
    answer = Copied


class Frozen(msgspec.Struct, frozen=True):
    """Where a partition stood when it was closed."""

    end_offset: int
    first_offset: int
    state_bytes: int
    message_count: int
    byte_count: int
    drained_ms: int
    """For so long its consumers were waited for, and publishing went on."""


class FreezePartition(Message, frozen=True):
    """Close a partition that moves; answered when that is durable."""

    partition_id: int
    owner_epoch: int
    answer = Frozen


class ReadState(Message, frozen=True):
    """Ask for the state of a closed partition from byte `at` on: the body of the answer."""

    partition_id: int
    at: int


class FinishMove(Message, frozen=True):
    """Copy what is left of a closed partition; answered when all of it is durable."""

    partition_id: int
    frozen: Frozen


class PartitionMoved(Message, frozen=True):
    """Forget a partition: another log has it."""

    partition_id: int


class CancelMove(Message, frozen=True):
    """Open a partition again: it stays."""

    partition_id: int


class DropCopy(Message, frozen=True):
    """Drop what was copied of a partition: it does not come."""

    partition_id: int


# ---------------------------------------------------------------- publishing to another worker's partition


class Opened(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state that an opened producer begins with."""

    producer_id: int
    producer_epoch: int
    next_sequence: int
    frame_bytes_max: int = 0
    """Largest frame of several messages that keeps the rate of its namespace within a tenth in a second; 0: any."""
    frame_messages_max: int = 0
    """The same for messages."""


class OpenProducer(Message, frozen=True):
    """Open a producer on a partition of the worker that is asked."""

    partition_id: int
    name: str
    session: int = 0
    """Of the client that asks, on the worker that passes this on; 0: the producer is the worker's own."""
    answer = Opened


class CloseProducer(Message, frozen=True):
    """A client has closed a producer that was passed on. A notice."""

    partition_id: int
    producer_id: int
    session: int


class SessionsEnded(Message, frozen=True):
    """Sessions of clients have ended whose producers were passed on. A notice."""

    sessions: list[int]


class PublishBundle(Message, frozen=True):
    """Publish the body, a bundle; answers pairs of status and offset."""

    session: int = 0
    """As that of `OpenProducer`."""
    answer = list[int]


class TopicPlaces(msgspec.Struct, frozen=True):
    """The partitions of a topic: id and process index of the worker."""

    partitions: list[tuple[int, int]]


class FindDeadLetterTopic(Message, frozen=True):
    """Ask for a topic that takes dead letters, which is made if it is missing; without `create` it is only
    checked."""

    topic: str
    create: bool = True
    setter: str = ""
    """Principal that named the topic in a failure policy."""
    answer = TopicPlaces


# ---------------------------------------------------------------- asked by administrators


class PartitionStats(Message, frozen=True):
    """Ask for counts and subscriptions of these partitions; None: of all."""

    partition_ids: list[int] | None = None
    answer = list[PartitionCounts]


class ListSubscriptions(Message, frozen=True):
    """Ask for the subscriptions of these partitions; None: of all."""

    partition_ids: list[int] | None = None
    answer = list[SubscriptionCounts]


class Deleted(msgspec.Struct, frozen=True):
    """How many subscriptions were deleted."""

    deleted: int


class DeleteSubscription(Message, frozen=True):
    """Delete a subscription and close its consumers; answered when that is durable."""

    partition_ids: list[int]
    subscription: str
    answer = Deleted


class SetFailurePolicy(Message, frozen=True):
    """Change values of a subscription's failure policy; answers the policies when they are durable."""

    partition_ids: list[int]
    subscription: str
    values: dict[str, Any]
    setter: str = ""
    """Principal that asks for it, in a secured broker."""
    answer = list[FailurePolicy]


class PurgePartitions(Message, frozen=True):
    """Drop all messages; answers rows of partition id, messages, first offset when that is durable."""

    partition_ids: list[int]
    answer = list[tuple[int, int, int]]


class SkipMessages(Message, frozen=True):
    """Ack the next `count` messages of each partition, all without a count; answers rows of partition id,
    messages, cursor when that is durable."""

    partition_ids: list[int]
    subscription: str
    count: int | None = None
    answer = list[tuple[int, int, int]]


class ListClients(Message, frozen=True):
    """Ask for a page of connections: `limit` of them behind the session number `after`."""

    after: int
    limit: int
    answer = ClientPage


# ---------------------------------------------------------------- reports of workers


class CommitCursor(NamedTuple):
    """How far a log had come when its worker spoke last; positions in bytes, which never restart."""

    log_id: int
    oldest_position: int
    """First byte that is still there."""
    snapshot_position: int
    """Up to here the state is in a durable snapshot."""
    synced_position: int
    """All below is durable."""
    written_position: int
    """All below survives the worker's death."""


class LogUsage(Message, frozen=True):
    """Bytes of a worker's logs, and how far each has come. A notice."""

    bytes: int
    logs: list[CommitCursor]


class LogAllowance(Message, frozen=True):
    """The bytes that a worker's logs may take. A notice."""

    bytes: int


class StorageUsed(Message, frozen=True):
    """Bytes that partitions with a storage quota keep, by id. A notice."""

    used: dict[int, int]


class StorageFull(Message, frozen=True):
    """Why partitions of these ids take no publishes; the others of that worker do. A notice."""

    full: dict[int, str]


class NamespaceUse(msgspec.Struct, frozen=True):
    """Use that a worker makes of one namespace with a quota."""

    storage_bytes: int
    accepted_bytes: int
    """Accepted by this worker since the broker's start, counted when `storage_bytes` was."""
    handles: int
    is_measured: bool
    """Sizes of all its partitions were known, and looked at as there is a limit."""


class NamespaceUsed(Message, frozen=True):
    """Use that a worker makes of namespaces with a quota, by name: of those that have changed. A notice."""

    used: dict[str, NamespaceUse]
    is_whole: bool = False
    """All of them: there are no others on that worker."""


class NamespaceFull(Message, frozen=True):
    """Why namespaces take no publishes, by name; empty: they do. Those that have changed. A notice."""

    full: dict[str, str]


class ReplyTopicsAbandoned(Message, frozen=True):
    """Reply topics without a consumer for longer than they may be. A notice."""

    topics: list[str]


class TopicMetrics(Message, frozen=True):
    """Counts by topic and by subscription, those with a row of their own and the sums of the rest. A notice."""

    topics: list[tuple[str, list[int]]]
    subscriptions: list[tuple[str, str, list[int], float]]
    other_topics: list[int]
    other_subscriptions: list[int]
    namespaces: list[tuple[str, list[int]]] = []
    """Messages and bytes published; those without a row of their own under the empty name."""


class LoadReport(Message, frozen=True):
    """Share of the time for which a worker was busy. A notice."""

    load: float
    partitions: list[tuple[int, float, int]]
    """Id, its part of the load, bytes that a move would copy; the busiest."""
