"""Prove that a store keeps its promises before history is entrusted to it."""

from __future__ import annotations

import secrets

from danube_fast.errors import AlreadyExists, DanubeError, FailedPrecondition
from danube_fast.history.stores.store import ObjectStore

__all__ = ["PROBE_PREFIX", "probe_store"]

PROBE_PREFIX = "probe/"


def probe_store(store: ObjectStore) -> None:
    """Create, create again, read, list, delete one small object.

    Raises what the store raises, and FailedPrecondition if it takes a second object under the same
    key or does not give back what it was given: several servers that speak S3 do so, and two writers
    could then overwrite each other's history.
    """
    key = f"{PROBE_PREFIX}{secrets.token_hex(16)}"
    data = key.encode()
    store.create(key, data)
    try:
        try:
            store.create(key, b"another")
        except AlreadyExists:
            pass
        else:
            raise FailedPrecondition(
                f"{store.url}: the store has overwritten an object that it was asked to create "
                "only if it did not exist; history needs a store with conditional writes"
            )
        if store.read(key, 1, len(data) - 2) != data[1:-1]:
            raise FailedPrecondition(
                f"{store.url}: the store gave back other bytes than it was given; history needs "
                "ranged reads that follow a write at once"
            )
    finally:
        _forget(store, key)


def _forget(store: ObjectStore, key: str) -> None:
    try:
        store.delete([key])
    except DanubeError:
        return  # a sweep of PROBE_PREFIX removes it later; the first error is the one to tell
