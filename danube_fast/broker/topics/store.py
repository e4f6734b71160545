"""The topic directory's view of a metadata store, so that it knows none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from danube_fast.errors import DanubeError

__all__ = ["Store", "StoredEntry", "replace"]


class StoredEntry(Protocol):
    """A store's answer for a key."""

    @property
    def value(self) -> bytes:
        """The bytes that were written."""
        ...

    @property
    def revision(self) -> int:
        """Number of the change that wrote them."""
        ...


class Store(Protocol):
    """The part of a metadata store that is needed (`danube_fast.metadata.store.MetadataStore`)."""

    def get(self, key: str) -> StoredEntry | None:
        """The entry of a key."""
        ...

    def cas(self, key: str, value: bytes, expected_revision: int) -> int | None:
        """Write if the revision is the expected one (0: the key is missing); None if it is not."""
        ...

    def put(self, key: str, value: bytes) -> int:
        """Write whatever is there."""
        ...

    def transact(
        self,
        changes: Sequence[tuple[str, bytes | None]],
        expected: Mapping[str, int] | None = None,
    ) -> int | None:
        """Make all changes at once, or none if a key has not its expected revision."""
        ...

    def delete(self, key: str) -> bool:
        """Remove a key."""
        ...

    def list(self, prefix: str) -> Sequence[tuple[str, StoredEntry]]:
        """All entries under a prefix."""
        ...


def replace(store: Store, key: str, value: bytes, expected_revision: int) -> bool:
    """Write if the revision is the expected one; whether it was. Raises what the store raises, if nothing
    was written."""
    try:
        return store.cas(key, value, expected_revision) is not None
    except DanubeError:
        # whether a write that failed took place is for the store to say
        found = store.get(key)
        if found is None or found.value != value:
            raise
        return True
