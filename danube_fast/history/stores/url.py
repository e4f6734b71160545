"""URLs of object stores, and the store that each of them opens.

    file:///absolute/folder
    memory://
    s3://bucket/prefix?endpoint_url=http://host:9000&region=eu-west-1&path_style=true

A URL never holds a password or a key: they come from where each store's own tools look for them. Other
schemes come from packages: an entry point of the group `danube_fast.object_stores`, named like the
scheme, gives a callable that takes a `StoreUrl`, a `Clock` and a folder for parts that wait, and returns an
`ObjectStore`.
"""

from __future__ import annotations

import importlib.metadata
import re
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from danube_fast.clock import Clock
from danube_fast.errors import DanubeError, InvalidArgument
from danube_fast.history.stores.local import LocalStore
from danube_fast.history.stores.memory import MemoryStore
from danube_fast.history.stores.store import ObjectStore, check_object_prefix

__all__ = ["ENTRY_POINT_GROUP", "StoreUrl", "open_store", "parse_store_url", "store_options"]

ENTRY_POINT_GROUP = "danube_fast.object_stores"
_SECRET = re.compile(r"secret|password|token|key_id$|access_key|account_key|sas", re.IGNORECASE)
_NO_SECRETS = frozenset({"sse_kms_key_id"})
_BUILT_IN = ("file", "memory", "s3")

T = TypeVar("T", bound=msgspec.Struct)
Opener = Callable[["StoreUrl", Clock, Path], ObjectStore]


class StoreUrl(NamedTuple):
    """A URL in its parts."""

    text: str
    scheme: str
    place: str
    """Bucket or container; empty for `file` and `memory`."""
    prefix: str
    """Empty, or what all keys begin with, '/' at its end. For `file` the absolute folder."""
    options: Mapping[str, str]


def parse_store_url(text: str) -> StoreUrl:
    """Take a URL apart. Raises InvalidArgument with what to write instead."""
    try:
        parts = urllib.parse.urlsplit(text)
        pairs = (
            urllib.parse.parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True)
            if parts.query
            else []
        )
    except ValueError as error:
        raise InvalidArgument(f"{text!r} is not the URL of a store: {error}") from None
    if not parts.scheme or "://" not in text or parts.fragment:
        raise InvalidArgument(
            f"{text!r} is not the URL of a store; write file:///folder or s3://bucket/prefix"
        )
    options = dict(pairs)
    if "@" in parts.netloc or any(_SECRET.search(name) for name in options.keys() - _NO_SECRETS):
        raise InvalidArgument(
            f"the URL of the store {parts.scheme}://... holds credentials; leave them out and give "
            "them where the store's own tools look for them, such as AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        )
    if parts.scheme == "file":
        return _parse_file(text, parts, options)
    if parts.scheme == "memory":
        if parts.netloc or parts.path.strip("/") or options:
            raise InvalidArgument(f"{text!r}: memory:// takes nothing behind it")
        return StoreUrl(text, "memory", "", "", {})
    if not parts.netloc:
        raise InvalidArgument(f"{text!r} names no bucket; write {parts.scheme}://bucket/prefix")
    prefix = urllib.parse.unquote(parts.path.strip("/"))
    prefix = check_object_prefix(f"{prefix}/" if prefix else "")
    return StoreUrl(text, parts.scheme, parts.netloc, prefix, options)


def _parse_file(text: str, parts: urllib.parse.SplitResult, options: dict[str, str]) -> StoreUrl:
    path = urllib.parse.unquote(parts.path)
    if parts.netloc or not path.startswith("/") or path == "/" or options:
        raise InvalidArgument(f"{text!r} is not a folder; write file:///absolute/folder")
    return StoreUrl(text, "file", "", path, {})


def store_options(url: StoreUrl, kind: type[T]) -> T:
    """Read the URL's parameters as `kind`. Raises InvalidArgument that names the wrong one."""
    try:
        return msgspec.convert(dict(url.options), kind, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(field.encode_name for field in msgspec.structs.fields(kind))
        raise InvalidArgument(
            f"{url.text!r}: {error}; {url.scheme}:// takes the parameters {known}"
        ) from None


def open_store(text: str, clock: Clock, scratch: Path) -> ObjectStore:
    """Open the store of a URL; does not talk to it yet.

    `scratch` is a folder of this host for stores that keep parts of an object until it is complete. Raises InvalidArgument for a URL that names none, or whose package is not installed.
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
    except ImportError as error:
        raise InvalidArgument(
            f"{scheme}:// needs a package that is not installed ({error.name}); run "
            f"pip install 'danube-fast[{scheme}]'"
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
