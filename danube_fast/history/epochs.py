"""Marks of uploaders in a store: each has an epoch that no other one has had there.

    uploaders/<epoch>        the token of the uploader

A broker gives each epoch once. If the store knows it from another uploader, the broker's data are an older copy: it does
not know topics that were made behind the copy, and must not take them for deleted ones.
"""

from __future__ import annotations

from danube_fast.errors import AlreadyExists
from danube_fast.history.stores.store import ObjectStore

__all__ = ["EPOCHS_PREFIX", "claim_epoch"]

EPOCHS_PREFIX = "uploaders/"


def claim_epoch(store: ObjectStore, epoch: int, token: bytes) -> bool:
    """Mark an epoch as that of the uploader with a token; False if another one has had it. Raises what the store
    raises."""
    key = f"{EPOCHS_PREFIX}{epoch:08d}"
    try:
        store.create(key, token)
    except AlreadyExists:  # or of a try whose answer was lost
        return store.read(key) == token
    return True
