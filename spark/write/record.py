"""What a store knows of a write: its rows, whether they are committed, and whether they are published.

    writes/<write id>/<batch>/staged/<run>/<task>-<attempt>-<number>    packed frames, by a task
    writes/<write id>/<batch>/record                                    the commit: which of these count
    writes/<write id>/<batch>/done                                      all of them are published
    writes/<write id>/<batch>/doubt                                     why it cannot be told what is published

`record` is created once, by the first driver that comes so far: it names the objects, and the sequence of the first row
of each partition under the producer `spark-<write id>`. So any driver that goes on with it publishes the same rows under the
same sequences, of which the broker takes each once. A batch write has batch 0; a stream those of its query, of which
only the newest stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

import msgspec

from danube_fast.errors import AlreadyExists, DataLoss, NotFound
from danube_fast.history.sealed import seal, unseal
from danube_fast.history.stores.store import ObjectStore

__all__ = [
    "WRITES_PREFIX",
    "BatchState",
    "Commit",
    "Done",
    "StagedObject",
    "batch_prefix",
    "create_commit",
    "create_done",
    "delete_batches",
    "find_batch",
    "list_batches",
    "mark_doubt",
    "read_commit",
    "read_done",
    "read_doubt",
    "staged_prefix",
    "try_read_commit",
]

WRITES_PREFIX = "writes/"
FORMAT_VERSION = 1
COMMIT_MAGIC = int.from_bytes(b"DanubeWr", "little")
DONE_MAGIC = int.from_bytes(b"DanubeWd", "little")
_RECORD, _DONE, _DOUBT, _STAGED = "record", "done", "doubt", "staged/"
_KEY_PARTS = 4
"""Of a key: prefix, write id, batch, the rest."""
TEXT_BYTES_MAX = 4096


class StagedObject(msgspec.Struct, frozen=True, array_like=True):
    """An object of frames that a task has staged."""

    key: str
    byte_count: int
    crc: int
    """crc32c of all its bytes."""
    rows: dict[int, int]
    """How many messages it has for each partition, by index."""


class Commit(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Which rows of a batch are published, and under which sequences."""

    write_id: str
    batch: int
    topic: str
    query: str
    """Id of the stream's query; empty: a batch write."""
    made_ns: int
    partition_ids: list[int]
    """Of the topic when the rows were staged; a topic that was made again has others."""
    sequences: list[int]
    """Of the first row of each partition."""
    producer_epochs: list[int]
    """Of the producer when the sequences were asked for; a broker that has forgotten it begins again at 1."""
    objects: list[StagedObject]

    @property
    def row_counts(self) -> list[int]:
        """How many rows each partition gets."""
        counts = [0] * len(self.partition_ids)
        for each in self.objects:
            for index, count in each.rows.items():
                counts[index] += count
        return counts


class Done(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """All rows of a batch are published."""

    topic: str
    query: str
    rows: int
    made_ns: int


class BatchState(NamedTuple):
    """What a listing tells of one batch of a write."""

    write_id: str
    batch: int
    is_committed: bool
    is_done: bool
    is_doubtful: bool
    staged: list[str]
    """Keys of staged objects."""
    staged_bytes: int
    modified_ns: int
    """When its newest object was made, by the store's clock."""
    is_superseded: bool = False
    """Whether a later batch is done: then this one was, too, or its driver came too late."""

    @property
    def is_pending(self) -> bool:
        """Whether it is committed, and not all of it may be published yet."""
        return self.is_committed and not self.is_done and not self.is_superseded

    @property
    def state(self) -> str:
        """One word for people."""
        if self.is_done or self.is_superseded:
            return "done"
        if self.is_doubtful:
            return "doubtful"
        return "committed" if self.is_committed else "staged"


def batch_prefix(write_id: str, batch: int) -> str:
    """What the keys of a batch begin with."""
    return f"{WRITES_PREFIX}{write_id}/{batch:012d}/"


def staged_prefix(write_id: str, batch: int, run: str) -> str:
    """What the keys of objects begin with that the tasks of one run stage."""
    return f"{batch_prefix(write_id, batch)}{_STAGED}{run}/"


def create_commit(store: ObjectStore, commit: Commit) -> Commit:
    """Commit a batch; what counts from now on: this, or what another driver has committed before.

    Raises what the store raises, DataLoss, FailedPrecondition.
    """
    key = f"{batch_prefix(commit.write_id, commit.batch)}{_RECORD}"
    try:
        store.create(key, _encode(COMMIT_MAGIC, commit))
    except AlreadyExists:  # or of a try whose answer was lost
        return _decode(store, key, COMMIT_MAGIC, Commit)
    return commit


def read_commit(store: ObjectStore, write_id: str, batch: int) -> Commit:
    """Read the commit of a batch. Raises NotFound, DataLoss, FailedPrecondition, what the store raises."""
    return _decode(store, f"{batch_prefix(write_id, batch)}{_RECORD}", COMMIT_MAGIC, Commit)


def create_done(store: ObjectStore, write_id: str, batch: int, done: Done) -> None:
    """Note that a batch is published; again does no harm. Raises what the store raises."""
    try:
        store.create(f"{batch_prefix(write_id, batch)}{_DONE}", _encode(DONE_MAGIC, done))
    except AlreadyExists:
        pass


def read_done(store: ObjectStore, write_id: str, batch: int) -> Done:
    """Read what is noted of a published batch. Raises as `read_commit`."""
    return _decode(store, f"{batch_prefix(write_id, batch)}{_DONE}", DONE_MAGIC, Done)


def mark_doubt(store: ObjectStore, write_id: str, batch: int, reason: str) -> None:
    """Note why it cannot be told any more what of a batch is published: nothing goes on with it from now on."""
    try:
        store.create(f"{batch_prefix(write_id, batch)}{_DOUBT}", reason.encode()[:TEXT_BYTES_MAX])
    except AlreadyExists:
        pass


def read_doubt(store: ObjectStore, write_id: str, batch: int) -> str:
    """Why it cannot be told what of a batch is published. Raises NotFound, what the store raises."""
    return store.read(f"{batch_prefix(write_id, batch)}{_DOUBT}").decode(errors="replace")


def list_batches(store: ObjectStore, write_id: str = "") -> list[BatchState]:
    """List the batches that a store knows, in order; those of one write, or of all. Raises what the store raises."""
    prefix = f"{WRITES_PREFIX}{write_id}/" if write_id else WRITES_PREFIX
    found: dict[tuple[str, int], BatchState] = {}
    for info in store.list(prefix):
        parts = info.key.split("/", _KEY_PARTS - 1)
        if len(parts) < _KEY_PARTS or not parts[2].isdecimal():
            continue
        place, rest = (parts[1], int(parts[2])), parts[3]
        before = found.get(place) or BatchState(*place, False, False, False, [], 0, 0)
        is_staged = rest.startswith(_STAGED)
        found[place] = before._replace(
            is_committed=before.is_committed or rest == _RECORD,
            is_done=before.is_done or rest == _DONE,
            is_doubtful=before.is_doubtful or rest == _DOUBT,
            staged=[*before.staged, info.key] if is_staged else before.staged,
            staged_bytes=before.staged_bytes + is_staged * info.size,
            modified_ns=max(before.modified_ns, info.modified_ns),
        )
    newest_done: dict[str, int] = {}
    for place, each in found.items():
        if each.is_done:
            newest_done[place[0]] = max(place[1], newest_done.get(place[0], 0))
    return [
        found[place]._replace(is_superseded=place[1] < newest_done.get(place[0], 0))
        for place in sorted(found)
    ]


T = TypeVar("T", Commit, Done)


def _encode(magic: int, value: Commit | Done) -> bytes:
    return seal(magic, FORMAT_VERSION, msgspec.msgpack.encode(value))


def _decode(store: ObjectStore, key: str, magic: int, kind: type[T]) -> T:
    data, where = store.read(key), f"{store.url}: {key}"
    try:
        body = unseal(data, magic, FORMAT_VERSION, where, "record of a write")
    except DataLoss as error:
        raise DataLoss(f"{error}; {_REMEDY}") from None
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise DataLoss(f"{where} is damaged ({error}); {_REMEDY}") from None


_REMEDY = (
    "look which of its rows the topic has, then give it up with `danube-fast spark writes abort`"
)


def delete_batches(store: ObjectStore, batches: Iterable[BatchState]) -> None:
    """Delete all that a store has of these batches: what is staged first, so that a kill leaves the words of what
    became of them. Raises what the store raises."""
    for each in batches:
        store.delete(each.staged)
        prefix = batch_prefix(each.write_id, each.batch)
        store.delete([f"{prefix}{_RECORD}"])
        store.delete([f"{prefix}{_DOUBT}", f"{prefix}{_DONE}"])


def find_batch(batches: Iterable[BatchState], batch: int) -> BatchState | None:
    """The state of one batch of a listing; None: there is nothing."""
    return next((each for each in batches if each.batch == batch), None)


def try_read_commit(store: ObjectStore, write_id: str, batch: int) -> Commit | None:
    """Read the commit of a batch; None if it is gone. Raises as `read_commit`."""
    try:
        return read_commit(store, write_id, batch)
    except NotFound:
        return None
