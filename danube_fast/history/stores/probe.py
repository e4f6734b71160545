"""Prove that a store keeps its promises before history is entrusted to it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable

from danube_fast.errors import AlreadyExists, DanubeError, FailedPrecondition
from danube_fast.history.stores.store import ObjectStore

__all__ = ["PROBE_PREFIX", "probe_store"]

PROBE_PREFIX = "probe/"


def probe_store(store: ObjectStore, token: bytes | None = None) -> None:
    """Create an object, create it again, at once and in parts, read and delete it. `token` makes its name, which
    no other object may have; it is drawn if it is None.

    Raises what the store raises, and FailedPrecondition if it takes a second object under the same
    key or does not give back what it was given: several servers that speak S3 do so, and two writers
    could then overwrite each other's history.
    """
    key = f"{PROBE_PREFIX}{(token or secrets.token_bytes(16)).hex()}"
    data = key.encode()
    try:
        with contextlib.suppress(AlreadyExists):  # of a try whose answer was lost; the read tells
            store.create(key, data)
        upload = store.begin(key)
        try:
            part = store.put_part(upload, 1, 0, b"in parts")
            for attempt in (
                lambda: store.create(key, b"another"),
                lambda: store.complete(upload, [part]),
            ):
                _expect_refusal(store, attempt)
        finally:
            store.abort(upload)
        if store.read(key, 1, len(data) - 2) != data[1:-1]:
            raise FailedPrecondition(
                f"{store.url}: the store gave back other bytes than it was given; history needs "
                "ranged reads that follow a write at once"
            )
    finally:
        _forget(store, key)


def _expect_refusal(store: ObjectStore, attempt: Callable[[], None]) -> None:
    try:
        attempt()
    except AlreadyExists:
        return
    raise FailedPrecondition(
        f"{store.url}: the store has overwritten an object that it was asked to create only if it did "
        "not exist; history needs a store with conditional writes, of objects in parts, too"
    )


def _forget(store: ObjectStore, key: str) -> None:
    try:
        store.delete([key])
    except DanubeError:
        return  # a sweep of PROBE_PREFIX removes it later; the first error is the one to tell
