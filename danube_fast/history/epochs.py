"""Marks of uploaders in a store: each has an epoch that no other one has had there.

    uploaders/<epoch>        the token of the uploader

A broker gives each epoch once, higher than all before. If the store knows it from another uploader, or a later one, the
broker's data are an older copy: it does not know topics that were made behind the copy, and must not take them for
deleted ones. Later ones count as well, because an epoch can be lost: its uploader ended before it had reached the store.
"""

from __future__ import annotations

from danube_fast.errors import AlreadyExists
from danube_fast.history.stores.store import ObjectStore

__all__ = ["EPOCHS_PREFIX", "claim_epoch"]

EPOCHS_PREFIX = "uploaders/"


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
