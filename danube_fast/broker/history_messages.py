"""The messages about history between workers, the uploader and the coordinator.

uploader -- ListBacklogs, ListLogOnly, HistoryRuns, NameProducers, SetUploaded --> worker
worker ---- FetchHistory, FindHistoryTime, ListExtents -------------> uploader
uploader -- BeginUploader, FindWithoutHistory ----------------------> coordinator
         <- FlushHistory, RenewHold, ReleaseHold --------------------
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from danube_fast.broker.message import Message

__all__ = [
    "Backlog",
    "BeginUploader",
    "Block",
    "Extent",
    "FetchHistory",
    "FetchedHistory",
    "FileRange",
    "FindHistoryTime",
    "FindWithoutHistory",
    "FlushHistory",
    "Flushed",
    "FlushedPartition",
    "ForgetDeleted",
    "HistoryReport",
    "HistoryRuns",
    "ListBacklogs",
    "ListDeleted",
    "ListExtents",
    "ListLogOnly",
    "Listed",
    "NameProducers",
    "NoteOlderCopy",
    "ReleaseHold",
    "RenewHold",
    "RenewedHold",
    "Runs",
    "SetUploaded",
    "Uploader",
]


class Uploader(NamedTuple):
    """The epoch of a new uploader, and the broker that it works for."""

    identity: bytes
    """Of the broker, 16 bytes."""
    epoch: int
    """Higher than that of every uploader before."""
    is_older_copy: bool
    """Whether the store was found to know of newer data than the broker has."""


class BeginUploader(Message, frozen=True):
    """Ask the coordinator for the epoch of a new uploader."""

    answer = Uploader


class NoteOlderCopy(Message, frozen=True):
    """Tell the coordinator that the store knows of uploaders behind its data: it keeps that in mind for this store."""

    store: str
    """Its URL."""
    uploader_epoch: int
    """Of the uploader that tells; from one that is not the newest it may have learned of later ones of these data."""
    answer = None


class Backlog(msgspec.Struct, frozen=True):
    """A partition with history, and what of it is in the log only."""

    partition_id: int
    topic: str
    incarnation: int
    first_offset: int
    """First message that may be read."""
    uploaded_until: int
    """All below is in the store."""
    manifest: int
    """Number of the manifest's record that says so; -1: there is none."""
    end_offset: int
    bytes: int
    """About so many are not uploaded."""
    age_ns: int
    """Of the oldest message that is not uploaded."""
    retention_seconds: int
    """How long messages stay; 0: for ever."""
    retention_bytes: int
    """So much stays, the newest; 0: all."""
    bytes_in_log: int
    """Bytes from `uploaded_until` on, not more than there are: a bound of sizes may give up what lies before."""
    is_urgent: bool
    """Whether the log is nearly full."""


class Listed(msgspec.Struct, frozen=True):
    """Partitions with history, and what waits of all that the worker has."""

    backlogs: list[Backlog]
    bytes: int
    """About so many are not uploaded."""
    age_ns: int
    """Of the oldest message that is not uploaded, as far as it was looked for lately."""


class ListBacklogs(Message, frozen=True):
    """Ask a worker for its partitions with history; the worker believes no older uploader from then on."""

    uploader_epoch: int
    fault: str = ""
    """Why nothing can be uploaded just now."""
    named: list[int] | None = None
    """Ids of partitions that are listed; None: all are."""
    are_others: bool = False
    """Whether those are listed, too, of which an object waits, and some of the others, all in turn."""
    answer = Listed


class ListLogOnly(Message, frozen=True):
    """Ask a worker for those of some partitions whose messages are in its log and have no history; their backlogs count
    as empty."""

    uploader_epoch: int
    partition_ids: list[int]
    answer = list[Backlog]


class FindWithoutHistory(Message, frozen=True):
    """Ask the coordinator which of these partitions were deleted, or are to have no history any more."""

    partition_ids: list[int]
    are_unknown_told: bool = True
    """Whether those count that the coordinator does not know."""
    answer = list[int]


class ListDeleted(Message, frozen=True):
    """Ask the coordinator for partitions that are recorded as deleted: history of others must not go because it does
    not know them, for its data may be an older copy."""

    answer = list[int]


class ForgetDeleted(Message, frozen=True):
    """Tell the coordinator that nothing of these is in the store any more."""

    partition_ids: list[int]
    answer = None


class FileRange(NamedTuple):
    """Whole frames of one partition in a file of the log."""

    path: str
    position: int
    byte_count: int
    end_offset: int
    """Behind the last of their messages."""


class Runs(msgspec.Struct, frozen=True):
    """Frames in the order of their offsets."""

    ranges: list[FileRange]
    end_offset: int
    """Behind them: there are no others below."""


class HistoryRuns(Message, frozen=True):
    """Ask where the frames of a partition stand, from an offset on: durable ones only. What is asked for is kept in the
    log if the partition has history; else it may be given up meanwhile."""

    uploader_epoch: int
    partition_id: int
    offset: int
    bytes_max: int
    answer = Runs


class NameProducers(Message, frozen=True):
    """Ask for the names of producers by the ids that frames of a partition have; unknown ones are left out."""

    uploader_epoch: int
    partition_id: int
    producer_ids: list[int]
    answer = dict[int, str]


class SetUploaded(Message, frozen=True):
    """Tell that a partition's messages below `until` are in the store; answered when that is durable."""

    uploader_epoch: int
    partition_id: int
    until: int
    first_offset: int
    manifest: int
    byte_count: int
    """Bytes of the partition that the manifest names."""


class Block(NamedTuple):
    """Whole frames of a partition, back to back."""

    base_offset: int
    end_offset: int
    position: int
    """In the file."""
    byte_count: int
    crc: int
    """crc32c of its bytes."""


class FetchedHistory(msgspec.Struct, frozen=True):
    """History in a file of this host. Its bytes count if their crc is that of their block."""

    path: str
    blocks: list[Block]
    """None of them: there is no message from the offset on, or those there were given up."""
    gone_until: int = 0
    """Without blocks: messages below were given up."""
    end_offset: int = 0
    """Without blocks: there are none from the offset to here, as far as the worker knew it to be uploaded."""


class FetchHistory(Message, frozen=True):
    """Ask for blocks of a partition's history, from the one with a message at or behind an offset on."""

    partition_id: int
    offset: int
    manifest: int
    is_damaged: bool = False
    """Whether what came last for this offset has another crc: then the answer is checked, and an error tells what is
    lost."""
    answer = FetchedHistory


class FindHistoryTime(Message, frozen=True):
    """Ask for the offset of the first message in history that came at a time (wall clock) or later; None: all are older."""

    partition_id: int
    time_ns: int
    manifest: int
    answer = int | None


class Extent(NamedTuple):
    """Offsets of a partition, and how many bytes history has of them."""

    base_offset: int
    end_offset: int
    byte_count: int


class ListExtents(Message, frozen=True):
    """Ask how many bytes a partition's history has, section by section in order; of very many, some together."""

    partition_id: int
    manifest: int
    answer = list[Extent]


class FlushedPartition(msgspec.Struct, frozen=True):
    """One partition, uploaded up to an offset."""

    partition_id: int
    partition: str
    first_offset: int
    end_offset: int
    """Behind the last message when the flush was asked for."""
    manifest: int
    """Number of the manifest's newest record."""


class Flushed(msgspec.Struct, frozen=True):
    """All that a reader of the store needs to know."""

    store: str
    identity: str
    """Of the broker, 32 hexadecimal digits."""
    partitions: list[FlushedPartition]
    hold: str
    """Key of the hold on the objects; empty: there is none."""
    expires: int
    """When the hold ends, Unix time in seconds."""


class FlushHistory(Message, frozen=True):
    """Ask the uploader to upload all of some partitions up to now, and to hold their objects for so long."""

    partition_ids: list[int]
    hold_seconds: int
    timeout_ms: int
    answer = Flushed


class RenewedHold(NamedTuple):
    """A hold that was renewed."""

    hold: str
    """Its new key."""
    expires: int
    """When it ends, Unix time in seconds."""


class RenewHold(Message, frozen=True):
    """Ask the uploader to hold the objects of a hold for so many seconds from now on."""

    hold: str
    hold_seconds: int
    topic: str = ""
    """A hold of another topic counts as gone; empty: any hold will do."""
    answer = RenewedHold


class ReleaseHold(Message, frozen=True):
    """Ask the uploader to give the objects of a hold back; one that is gone already is no error."""

    hold: str
    topic: str = ""


class HistoryReport(Message, frozen=True):
    """Why nothing can be uploaded just now; empty: all is well. A notice."""

    fault: str
