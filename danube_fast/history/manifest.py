"""Manifests: which objects hold the history of a partition, as numbered records that are made once.

    manifests/<partition id>/000000000007       record 7: what was added and removed since its `previous`

A record is made by a conditional create, so of two uploaders that want the same number one succeeds.
An uploader has an epoch; a newer one began later. Records are believed by two rules:

    1. the newest one counts, unless a record before it has a higher epoch
    2. a record names the `previous` one that it builds on: those that are found so count, too

    manifests/<partition id>/pruned             made before the first record is ever deleted

So an old uploader that wakes up can still make a record, but only one that the living uploader has seen
(then it counts) or one that no other builds on. The newest record is found by reading on until
there is none; a listing, which may be late, is only where that begins. Every 64th record or so is a
snapshot: it holds everything, and replay begins there; older records can be pruned, the oldest first. So
a record that is there proves that all later ones are.

    record   0      8      12     16     20     24
             +------+------+------+------+------+---------
             | magic| vers | crc  | bytes|      | msgpack of Record, an array
             +------+------+------+------+------+---------
"""

from __future__ import annotations

import bisect
import copy
import shlex
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from danube_fast.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    Internal,
    NotFound,
    Unavailable,
)
from danube_fast.history.sealed import seal, unseal
from danube_fast.history.stores.store import ObjectStore

__all__ = [
    "LOST_PREFIX",
    "MANIFESTS_PREFIX",
    "NONE",
    "PRUNED_NAME",
    "Manifest",
    "ManifestLog",
    "ManifestReader",
    "Record",
    "Section",
    "believed",
    "lost_section",
    "manifest_key",
    "manifest_prefix",
    "newest_producers",
    "repair_command",
]

MAGIC = int.from_bytes(b"DanubeMf", "little")
VERSION = 1
SNAPSHOT_EVERY = 64
"""Records between two snapshots."""
PRODUCERS_MAX = 16 * 1024
"""Names of producers that a manifest keeps, the newest: a snapshot has all of them."""
NONE = -1
MANIFESTS_PREFIX = "manifests/"
PRUNED_NAME = "pruned"
LOST_PREFIX = "lost/"
"""What the keys of lost sections begin with: there is never such an object."""
_MAKE_TRIES = 1000
"""Numbers that older uploaders may have taken in the meantime."""


class Section(msgspec.Struct, frozen=True, array_like=True):
    """The frames of one partition in one object."""

    key: str
    position: int
    """Where its frames begin in the object, bytes."""
    byte_count: int
    base_offset: int
    end_offset: int
    """Behind the last message."""
    message_count: int
    append_min_ns: int
    append_max_ns: int
    publish_min_ns: int
    publish_max_ns: int
    blocks_position: int
    """Where its rows of the table of blocks begin in the object, bytes."""
    block_count: int
    blocks_crc: int


def lost_section(partition_id: int, base_offset: int, end_offset: int, time_ns: int) -> Section:
    """Make the section of messages that no object has: so a reader that comes to them is told of the loss. `time_ns`:
    of the last message before them; no search for a time ends there."""
    key = f"{LOST_PREFIX}{partition_id:010d}/{base_offset:012d}-{end_offset:012d}"
    return Section(
        key=key, position=0, byte_count=0, base_offset=base_offset, end_offset=end_offset,
        message_count=0, append_min_ns=time_ns, append_max_ns=time_ns, publish_min_ns=time_ns,
        publish_max_ns=time_ns, blocks_position=0, block_count=1, blocks_crc=0,
    )  # fmt: skip


class Record(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One step of a manifest."""

    identity: bytes
    """Of the broker whose history it is: of its metadata's seal, 16 bytes."""
    partition_id: int
    topic: str
    incarnation: int
    number: int
    previous: int
    """Number of the record that this one builds on; -1: none."""
    snapshot: int
    """Number of the newest snapshot that it builds on, its own if it is one."""
    owner_epoch: int
    uploader_epoch: int
    first_offset: int
    """First message that may be read."""
    end_offset: int
    """All below is in history, or was never there."""
    added: list[Section] = []
    removed: list[str] = []
    """Keys of objects whose sections of this partition are history no more."""
    producers: dict[int, str] = {}
    """Names by the producer ids of frames, those that no record before has; of a snapshot, all that are kept."""

    @property
    def is_snapshot(self) -> bool:
        """Whether `added` holds everything."""
        return self.snapshot == self.number

    def encode(self) -> bytes:
        """The object's bytes."""
        return seal(MAGIC, VERSION, msgspec.msgpack.encode(self))

    @classmethod
    def decode(cls, data: bytes, where: str) -> Record:
        """Read one. Raises DataLoss if it is damaged, FailedPrecondition if its format is newer."""
        body = unseal(data, MAGIC, VERSION, where, "manifest")
        try:
            return msgspec.msgpack.decode(body, type=cls)
        except msgspec.MsgspecError as error:
            raise DataLoss(f"{where} is damaged: {error}") from None


class Manifest:
    """The history of one partition, as its newest record tells it."""

    def __init__(self) -> None:
        self.number = NONE
        """Of the newest record."""
        self.snapshot = NONE
        self.owner_epoch = self.uploader_epoch = 0
        self.topic = ""
        self.incarnation = 0
        self.first_offset = self.end_offset = 0
        self.sections: list[Section] = []
        """In the order of offsets."""
        self.producers: dict[int, str] = {}
        """Names by the producer ids of frames, as far as they are known."""

    def apply(self, record: Record) -> None:
        """Take one record more."""
        gone = set(record.removed)
        kept = (
            [] if record.is_snapshot else [each for each in self.sections if each.key not in gone]
        )
        # before the sections: a reader in another thread that misses one of them finds that it has expired
        self.first_offset, self.end_offset = record.first_offset, record.end_offset
        # a new list: a reader in another thread may have the old one
        self.sections = sorted([*kept, *record.added], key=lambda section: section.base_offset)
        before = {} if record.is_snapshot else self.producers
        self.producers = newest_producers({**before, **record.producers})
        self.number, self.snapshot = record.number, record.snapshot
        self.owner_epoch, self.uploader_epoch = record.owner_epoch, record.uploader_epoch
        self.topic, self.incarnation = record.topic, record.incarnation

    @property
    def gone_until(self) -> int:
        """Messages below were given up. A purge can make the first offset larger than the end: what comes behind the
        end is not known here, and may be of another life of the log."""
        return min(self.first_offset, self.end_offset)

    @property
    def byte_count(self) -> int:
        """Bytes of all sections."""
        return sum(section.byte_count for section in self.sections)

    def find(self, offset: int) -> Section | None:
        """The section that holds `offset`, or the first one behind it; None if there is none."""
        place = bisect.bisect_right(self.sections, offset, key=lambda section: section.end_offset)
        return self.sections[place] if place < len(self.sections) else None

    def find_time(self, time_ns: int) -> Section | None:
        """The first section that may hold a message that the broker got at `time_ns` or later."""
        for section in self.sections:
            if section.append_max_ns >= time_ns:
                return section
        return None


class ManifestReader:
    """The records of one partition in a store. Reading makes nothing there."""

    def __init__(self, store: ObjectStore, identity: bytes | None, partition_id: int) -> None:
        """`identity` None: that of the first record which is read; all others must have it, too."""
        self._store = store
        self.identity = identity
        self._partition_id = partition_id
        self._next = 0
        """Number that is free, as far as was read."""
        self.manifest = Manifest()

    def load(self, hint: int = NONE) -> Manifest:
        """Read the manifest anew. `hint` is the number of a record that was made once; -1 lists.

        Raises what the store raises, DataLoss for a record that is damaged or missing,
        FailedPrecondition for one of another broker.
        """
        records: dict[int, Record] = {}
        newest = self._read_on(hint, records) if hint != NONE else NONE
        if newest == NONE:
            if hint != NONE and not self._is_pruned():
                raise DataLoss(
                    f"{self._store.url}: record {manifest_key(self._partition_id, hint)} is missing, "
                    f"and was there; {self._remedy} --adopt {self._partition_id}"
                )
            newest = self._read_on(self._listed(), records)
            if newest == NONE and self._is_pruned():
                raise Unavailable(
                    f"{self._store.url}: records of partition {self._partition_id} were pruned, and "
                    "the store does not list the later ones yet"
                )
        if newest < hint:
            raise DataLoss(
                f"{self._store.url}: record {manifest_key(self._partition_id, hint)} is missing, and {newest} is the "
                f"newest one; {self._remedy} --adopt {self._partition_id}"
            )
        chain, start = believed(records)
        while start != NONE and start not in records:
            for number in range(start, min(records)):
                records[number] = self._read(number)
            chain, start = believed(records)
        self._next = newest + 1
        self.manifest = Manifest()
        for record in chain:
            self.manifest.apply(record)
        return self.manifest

    def read(self, number: int) -> Record:
        """Read one record. Raises as `load`, and NotFound if it is not there."""
        key = manifest_key(self._partition_id, number)
        return self._decode(self._store.read(key), key)

    @property
    def _remedy(self) -> str:
        return (
            "restore it from a copy of the store, or stop the broker and run "
            f"{repair_command(self._store.url)}"
        )

    def _read(self, number: int) -> Record:
        try:
            return self.read(number)
        except NotFound:
            raise DataLoss(
                f"{self._store.url}: record {manifest_key(self._partition_id, number)} is missing, "
                f"and later ones build on it; {self._remedy}"
            ) from None

    def _decode(self, data: bytes, key: str) -> Record:
        try:
            record = Record.decode(data, f"{self._store.url}: {key}")
        except DataLoss as error:
            raise DataLoss(f"{error}; {self._remedy}") from None
        if self.identity is None:
            self.identity = record.identity
        if record.identity != self.identity:
            raise FailedPrecondition(
                f"{self._store.url}: {key} is the history of another broker "
                f"({record.identity.hex()}); give each broker a store, or a prefix, of its own"
            )
        named = manifest_key(record.partition_id, record.number)
        if named != key:
            raise DataLoss(f"{self._store.url}: {key} holds the record {named}; {self._remedy}")
        if not NONE <= record.previous < record.number or not 0 <= record.snapshot <= record.number:
            # links that do not lead back would be followed for ever
            raise DataLoss(
                f"{self._store.url}: {key} builds on record {record.previous} and snapshot "
                f"{record.snapshot}, which are not before it; {self._remedy}"
            )
        return record

    def _listed(self) -> int:
        """Number of a record to begin with: the newest that a listing shows, 0 if it shows none."""
        prefix = manifest_prefix(self._partition_id)
        newest = 0
        for info in self._store.list(prefix):
            name = info.key.removeprefix(prefix)
            if name.isdigit():
                newest = int(name)
        return newest

    def _read_on(self, number: int, records: dict[int, Record]) -> int:
        """Read `number` and on, until there is none; the newest, -1 if `number` itself is not there."""
        at = number
        while True:
            key = manifest_key(self._partition_id, at)
            try:
                data = self._store.read(key)
            except NotFound:
                return at - 1 if records else NONE
            records[at] = self._decode(data, key)
            at += 1

    def _is_pruned(self) -> bool:
        return self._store.head(self._pruned_key) is not None

    @property
    def _pruned_key(self) -> str:
        return f"{manifest_prefix(self._partition_id)}{PRUNED_NAME}"


class ManifestLog(ManifestReader):
    """The records of one partition in a store, as one uploader reads and makes them."""

    def __init__(
        self, store: ObjectStore, identity: bytes, partition_id: int, uploader_epoch: int
    ) -> None:
        super().__init__(store, identity, partition_id)
        self._identity = identity
        self._epoch = uploader_epoch

    def load(self, hint: int = NONE) -> Manifest:
        """Read the manifest anew. Raises FailedPrecondition, too, if a newer uploader has made records."""
        manifest = super().load(hint)
        self._check_epoch(manifest.uploader_epoch)
        return manifest

    def commit(
        self,
        topic: str,
        incarnation: int,
        owner_epoch: int,
        *,
        first_offset: int,
        end_offset: int,
        added: Sequence[Section] = (),
        removed: Sequence[str] = (),
        producers: Mapping[int, str] | None = None,
    ) -> Manifest:
        """Make the next record; the manifest with it. `producers`: names that no record before has.

        Raises FailedPrecondition if a newer uploader has made one: this one has to end. After any
        other error either the same call is made again, or `load`: the record may have been made.
        """
        base = self.manifest
        for number in range(self._next, self._next + _MAKE_TRIES):
            is_snapshot = base.number == NONE or number - base.snapshot >= SNAPSHOT_EVERY
            record = Record(
                identity=self._identity, partition_id=self._partition_id, topic=topic,
                incarnation=incarnation, number=number, previous=base.number,
                snapshot=number if is_snapshot else base.snapshot, owner_epoch=owner_epoch,
                uploader_epoch=self._epoch, first_offset=first_offset, end_offset=end_offset,
                added=list(added), removed=list(removed), producers=dict(producers or {}),
            )  # fmt: skip
            if is_snapshot and base.number != NONE:
                full = copy.copy(base)
                full.apply(replace(record, snapshot=base.snapshot))
                record = replace(record, added=full.sections, removed=[], producers=full.producers)
            if self._make(record):
                self._next = number + 1
                base.apply(record)
                return base
        raise Internal(
            f"{self._store.url}: {_MAKE_TRIES} records of partition {self._partition_id} were made "
            "by older uploaders at the same time; end them, and this one tries again"
        )

    def prune(self, oldest: int) -> int:
        """Delete records from `oldest` up to the newest snapshot; the number of the oldest one left.

        The manifest must be known to the owner of the partition up to that snapshot: a start reads on
        from the record that it knows.
        """
        if oldest < self.manifest.snapshot and not self._is_pruned():
            try:
                self._store.create(self._pruned_key, b"")
            except AlreadyExists:
                pass
        for number in range(oldest, self.manifest.snapshot):
            self._store.delete([manifest_key(self._partition_id, number)])  # one by one, in order
        return max(oldest, self.manifest.snapshot)

    # ------------------------------------------------------------ one record

    def _make(self, record: Record) -> bool:
        """Create it; False if an older uploader has taken its number."""
        key = manifest_key(self._partition_id, record.number)
        data = record.encode()
        try:
            self._store.create(key, data)
        except AlreadyExists:
            try:
                found = self._store.read(key)
            except NotFound:
                raise self._fenced("a record was pruned") from None
            if found != data:
                self._check_epoch(self._decode(found, key).uploader_epoch, is_own_wrong=True)
                return False
            # else the answer of an earlier try was lost
        self._check_not_pruned(record)
        return True

    def _check_not_pruned(self, record: Record) -> None:
        """Take a record back whose number was free because a newer uploader has pruned the one that it had.

        Raises FailedPrecondition then. What a record builds on is pruned by newer uploaders only.
        """
        base = self.manifest
        if base.number == NONE:
            is_pruned = self._is_pruned()
        else:
            base_key = manifest_key(self._partition_id, base.snapshot)
            is_pruned = self._store.head(base_key) is None
        if is_pruned:
            self._store.delete([manifest_key(self._partition_id, record.number)])
            raise self._fenced("it has pruned what this one builds on")

    def _check_epoch(self, found: int, *, is_own_wrong: bool = False) -> None:
        if found > self._epoch or (is_own_wrong and found == self._epoch):
            raise self._fenced(f"epoch {found}, this one has {self._epoch}")

    def _fenced(self, how: str) -> FailedPrecondition:
        return FailedPrecondition(
            f"{self._store.url}: a newer uploader writes the history of partition "
            f"{self._partition_id}: {how}; if none runs, this broker's data are an older copy: put back the newest one"
        )


def newest_producers(producers: dict[int, str]) -> dict[int, str]:
    """Keep PRODUCERS_MAX names, those that were told last."""
    return dict([*producers.items()][-PRODUCERS_MAX:])


def believed(records: Mapping[int, Record]) -> tuple[list[Record], int]:
    """Which of these count, in the order of their numbers; and the snapshot that they begin with.

    If that is not among them, they do not reach far enough back: read from it on.
    """
    head: Record | None = None
    for number in sorted(records):
        if head is None or records[number].uploader_epoch >= head.uploader_epoch:
            head = records[number]
    if head is None:
        return [], NONE
    chain, at = [], head.number
    while at >= head.snapshot and at in records:
        chain.append(records[at])
        at = records[at].previous
    return chain[::-1], head.snapshot


def repair_command(url: str) -> str:
    """Write the command that mends the manifests of a store."""
    return f"danube-fast history repair --store {shlex.quote(url)}"


def manifest_prefix(partition_id: int) -> str:
    """Prefix of the keys of a partition's records."""
    return f"{MANIFESTS_PREFIX}{partition_id:010d}/"


def manifest_key(partition_id: int, number: int) -> str:
    """Key of one record."""
    return f"{manifest_prefix(partition_id)}{number:012d}"
