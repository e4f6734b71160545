"""The broker's metadata: topics, subscriptions and owners, and the stores that keep them."""

from danube_fast.metadata.lmdb_store import LmdbStore
from danube_fast.metadata.memory import MemoryStore
from danube_fast.metadata.store import (
    ENTRY_POINT_GROUP,
    Entry,
    Event,
    Lease,
    MetadataStore,
    Watch,
)

__all__ = [
    "ENTRY_POINT_GROUP",
    "Entry",
    "Event",
    "Lease",
    "LmdbStore",
    "MemoryStore",
    "MetadataStore",
    "Watch",
]
