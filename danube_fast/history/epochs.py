"""Whose a store is, and marks of uploaders in it: each has an epoch that no other one has had there.

    uploaders/<epoch>        the token of the uploader

A broker gives each epoch once, higher than all before. If the store knows it from another uploader, or a later one, the
broker's data are an older copy: it does not know topics that were made behind the copy, and must not take them for
deleted ones. Later ones count as well, because an epoch can be lost: its uploader ended before it had reached the store.
"""

from __future__ import annotations

from danube_fast.errors import AlreadyExists, NotFound
from danube_fast.history.manifest import MANIFESTS_PREFIX, ManifestReader
from danube_fast.history.stores.store import ObjectStore

__all__ = ["EPOCHS_PREFIX", "check_owner", "claim_epoch"]

EPOCHS_PREFIX = "uploaders/"


def check_owner(store: ObjectStore, identity: bytes) -> None:
    """Look at one manifest of a store, if there is any. Raises FailedPrecondition if it is of another broker:
    objects of both would have the same keys."""
    for info in store.list(MANIFESTS_PREFIX):
        partition_id, _, name = info.key.removeprefix(MANIFESTS_PREFIX).partition("/")
        if name.isdigit() and partition_id.isdigit():
            try:
                ManifestReader(store, identity, int(partition_id)).read(int(name))
            except NotFound:
                continue  # it was pruned just now
            return


def claim_epoch(store: ObjectStore, epoch: int, token: bytes) -> bool:
    """Mark an epoch as that of the uploader with a token; False if another one has had it, or a later one. Raises what
    the store raises."""
    key = f"{EPOCHS_PREFIX}{epoch:08d}"
    try:
        store.create(key, token)
    except AlreadyExists:  # or of a try whose answer was lost
        if store.read(key) != token:
            return False
    names = [info.key.removeprefix(EPOCHS_PREFIX) for info in store.list(EPOCHS_PREFIX)]
    return max((int(name) for name in names if name.isdigit()), default=epoch) <= epoch
