"""The store of a URL.

Stores of other schemes come from packages: an entry point of the group `danube_fast.object_stores`, named
like the scheme, gives a callable that takes a `StoreUrl`, a `Clock` and a folder for parts that wait, and
returns an `ObjectStore`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danube_fast.clock import Clock
from danube_fast.errors import DanubeError, InvalidArgument
from danube_fast.history.stores.local import LocalStore
from danube_fast.history.stores.memory import MemoryStore
from danube_fast.history.stores.store import ObjectStore
from danube_fast.history.stores.url import StoreUrl, parse_store_url

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["ENTRY_POINT_GROUP", "check_broker_store", "open_store"]

ENTRY_POINT_GROUP = "danube_fast.object_stores"
_BUILT_IN = ("file", "memory", "s3", "gs", "az")
_EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure"}
_PACKAGES = {"s3": "boto3", "gs": "google.cloud.storage", "az": "obstore"}
"""Package that a scheme needs."""

Opener = Callable[[StoreUrl, Clock, Path], ObjectStore]


def open_store(text: str, clock: Clock, scratch: Path, *, must_exist: bool = False) -> ObjectStore:
    """Open the store of a URL; does not talk to it yet.

    `scratch` is a folder of this host for stores that keep parts of an object until it is complete.
    `must_exist` is for a caller that only reads: the folder of a `file://` URL is not made then.
    Raises InvalidArgument for a URL that names none, or whose package is not installed.
    """
    url = parse_store_url(text)
    if url.scheme == "file":
        return LocalStore(Path(url.prefix), clock, must_exist=must_exist)
    return _find_opener(url.scheme)(url, clock, scratch)


def check_broker_store(text: str) -> None:
    """Check the URL of a broker's store before anything begins; does not talk to it, and loads no package.

    Raises InvalidArgument for a URL that names no store, or one that ends with its process.
    """
    url = parse_store_url(text)
    if url.scheme == "memory":
        raise InvalidArgument(
            "memory:// ends with its process, and a broker's history has to stay; use file:///DIR or "
            "s3://BUCKET/PREFIX"
        )
    if url.scheme not in _BUILT_IN:
        _entry_point(url.scheme)
    package = _PACKAGES.get(url.scheme)
    if package is not None and not _is_installed(package):
        raise _not_installed(url.scheme, package)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def _find_opener(scheme: str) -> Opener:
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
        raise _not_installed(scheme, str(error.name)) from None
    return _load(scheme)


def _not_installed(scheme: str, package: str) -> InvalidArgument:
    return InvalidArgument(
        f"{scheme}:// needs a package that is not installed ({package}); run "
        f"pip install 'danube-fast[{_EXTRAS[scheme]}]'"
    )


def _load(scheme: str) -> Opener:
    """The callable of another package. Raises InvalidArgument if none has that name, or it fails."""
    entry = _entry_point(scheme)
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


def _entry_point(scheme: str) -> EntryPoint:
    """The entry point of a scheme. Raises InvalidArgument if there is none."""
    from importlib.metadata import entry_points  # imports two dozen modules, which few brokers need

    found = entry_points(group=ENTRY_POINT_GROUP, name=scheme)
    if not found:
        others = sorted(entry_points(group=ENTRY_POINT_GROUP).names)
        known = ", ".join(f"{name}://" for name in (*_BUILT_IN, *others))
        raise InvalidArgument(f"there is no store {scheme}://; there are {known}")
    return next(iter(found))
