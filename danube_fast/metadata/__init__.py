"""What the broker knows about topics, subscriptions and owners, and where it keeps that."""

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
