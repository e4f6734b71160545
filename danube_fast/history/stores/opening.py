"""The store of a URL.

Stores of other schemes come from packages: an entry point of the group `danube_fast.object_stores`, named
like the scheme, gives a callable that takes a `StoreUrl`, a `Clock` and a folder for parts that wait, and
returns an `ObjectStore`.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

from danube_fast.clock import Clock
from danube_fast.errors import DanubeError, InvalidArgument
from danube_fast.history.stores.local import LocalStore
from danube_fast.history.stores.memory import MemoryStore
from danube_fast.history.stores.store import ObjectStore
from danube_fast.history.stores.url import StoreUrl, parse_store_url

__all__ = ["ENTRY_POINT_GROUP", "open_store"]

ENTRY_POINT_GROUP = "danube_fast.object_stores"
_BUILT_IN = ("file", "memory", "s3", "gs", "az")
_EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure"}

Opener = Callable[[StoreUrl, Clock, Path], ObjectStore]


def open_store(text: str, clock: Clock, scratch: Path) -> ObjectStore:
    """Open the store of a URL; does not talk to it yet.

    `scratch` is a folder of this host for stores that keep parts of an object until it is complete.
    Raises InvalidArgument for a URL that names none, or whose package is not installed.
    """
    url = parse_store_url(text)
    return _find_opener(url.scheme)(url, clock, scratch)


def _find_opener(scheme: str) -> Opener:
    if scheme == "file":
        return lambda url, clock, scratch: LocalStore(Path(url.prefix), clock)
    if scheme == "memory":
        return lambda url, clock, scratch: MemoryStore(clock)
    try:
        if scheme == "s3":
            from danube_fast.history.stores.s3 import open_s3

            return open_s3
        if scheme == "gs":
            from danube_fast.history.stores.gcs import open_gcs

            return open_gcs
        if scheme == "az":
            from danube_fast.history.stores.azure import open_azure

            return open_azure
    except ImportError as error:
        raise InvalidArgument(
            f"{scheme}:// needs a package that is not installed ({error.name}); run "
            f"pip install 'danube-fast[{_EXTRAS[scheme]}]'"
        ) from None
    return _load(scheme)


def _load(scheme: str) -> Opener:
    """The callable of another package. Raises InvalidArgument if none has that name, or it fails."""
    found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=scheme)
    if not found:
        others = sorted(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP).names)
        known = ", ".join(f"{name}://" for name in (*_BUILT_IN, *others))
        raise InvalidArgument(f"there is no store {scheme}://; there are {known}")
    entry = next(iter(found))
    try:
        opener: Any = entry.load()
    except Exception as error:  # whatever a foreign package raises while it is imported
        raise InvalidArgument(
            f"{scheme}:// is {entry.value} of another package, which cannot be loaded: {error!r}"
        ) from error
    if not callable(opener):
        raise InvalidArgument(f"{scheme}:// is {entry.value}, which cannot be called")

    def checked(url: StoreUrl, clock: Clock, scratch: Path) -> ObjectStore:
        try:
            return opener(url, clock, scratch)  # type: ignore[no-any-return]
        except DanubeError:
            raise
        except Exception as error:  # a foreign package knows nothing of our errors
            raise InvalidArgument(f"{entry.value} cannot open {url.text}: {error!r}") from error

    return checked
