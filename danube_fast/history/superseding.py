"""The records of a partition's manifest, put aside for one snapshot; and put back, if an uploader lives beside.

    records as they were read? --> the snapshot --> the mark `pruned` --> each record, the oldest first
                                                                              |
    another record has come meanwhile: all is put back <-----------'

    superseded/<partition id>/<number of the snapshot>/<number>        a record that was put aside

An uploader that makes a record once its own snapshot is put aside takes that record back itself (manifest.py). So what
it can make unseen came before, and the last listing shows it.
"""

from __future__ import annotations

from collections.abc import Sequence

from danube_fast.errors import AlreadyExists, FailedPrecondition, NotFound
from danube_fast.history.manifest import (
    PRUNED_NAME,
    ManifestReader,
    Record,
    manifest_key,
    manifest_prefix,
)
from danube_fast.history.stores.store import ObjectStore

__all__ = ["SUPERSEDED_PREFIX", "in_use", "supersede"]

SUPERSEDED_PREFIX = "superseded/"


def supersede(store: ObjectStore, snapshot: Record, keys: Sequence[str]) -> None:
    """Make a snapshot, and put the records before it aside: `keys`, in the order of their numbers.

    Raises what the store raises, and FailedPrecondition if other records come meanwhile: those that were there are
    where they were then, unless a broker has gone on from the snapshot already.
    """
    partition_id, number = snapshot.partition_id, snapshot.number
    key = manifest_key(partition_id, number)
    _expect(store, partition_id, keys)
    try:
        store.create(key, snapshot.encode())
    except AlreadyExists:
        raise in_use(store, f"record {number} of partition {partition_id} was made") from None
    # a start that knows a later record, which is missing, looks for this one
    is_mark_new = _create(store, _mark_of(partition_id), b"")
    folder = f"{SUPERSEDED_PREFIX}{partition_id:010d}/{number:012d}/"
    for each in keys:
        _put_aside(store, each, folder)
    # a listing may be late: what it still shows of those that were put aside is no sign
    came = sorted(_listed(store, partition_id) - {key, *keys})
    if came:
        if came[-1] < key:  # else a broker goes on from the snapshot, which has to stay
            _put_back(store, keys, folder)
            store.delete([_mark_of(partition_id)] if is_mark_new else [])
            store.delete([key])
            store.delete([_in_folder(each, folder) for each in keys])
        raise in_use(store, f"{came[-1]} was made meanwhile")
    ManifestReader(store, snapshot.identity, partition_id).load(number)


def in_use(store: ObjectStore, how: str) -> FailedPrecondition:
    """Make the error of a store that a broker uses meanwhile."""
    return FailedPrecondition(
        f"{store.url} is in use: {how}; stop the broker that uses it and repair again"
    )


def _expect(store: ObjectStore, partition_id: int, keys: Sequence[str]) -> None:
    """Look whether the records of a partition are those that were read. Raises FailedPrecondition."""
    changed = sorted(_listed(store, partition_id) ^ set(keys))
    if changed:
        raise in_use(store, f"{changed[-1]} has come or gone meanwhile")


def _listed(store: ObjectStore, partition_id: int) -> set[str]:
    prefix = manifest_prefix(partition_id)
    keys = (info.key for info in store.list(prefix))
    return {key for key in keys if key.removeprefix(prefix).isdecimal()}


def _put_aside(store: ObjectStore, key: str, folder: str) -> None:
    """Move a record out of the way; its bytes stay."""
    try:
        _create(store, _in_folder(key, folder), store.read(key))
    except NotFound:
        return
    store.delete([key])


def _put_back(store: ObjectStore, keys: Sequence[str], folder: str) -> None:
    """Bring records back, the newest first: one that is there proves that all later ones are."""
    for key in reversed(keys):
        try:
            _create(store, key, store.read(_in_folder(key, folder)))
        except NotFound:
            continue  # it was gone before it could be put aside


def _create(store: ObjectStore, key: str, data: bytes) -> bool:
    """Make an object; False if there is one."""
    try:
        store.create(key, data)
    except AlreadyExists:
        return False
    return True


def _in_folder(key: str, folder: str) -> str:
    return f"{folder}{key.rpartition('/')[2]}"


def _mark_of(partition_id: int) -> str:
    return f"{manifest_prefix(partition_id)}{PRUNED_NAME}"
