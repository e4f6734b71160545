"""URLs of object stores.

    file:///absolute/folder
    memory://
    s3://bucket/prefix?endpoint_url=http://host:9000&region=eu-west-1&path_style=true
    gs://bucket/prefix?endpoint_url=http://host:4443
    az://container/prefix?account=name
    az://container/prefix?account=devstoreaccount1&endpoint_url=http://host:10000/devstoreaccount1

A URL never holds a password or a key: they come from where each store's own tools look for them.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import msgspec

from danube_fast.errors import InvalidArgument
from danube_fast.history.stores.store import check_object_prefix

__all__ = ["StoreUrl", "parse_store_url", "store_options"]

_SECRET = re.compile(r"secret|password|token|key_id$|access_key|account_key|sas", re.IGNORECASE)
_NO_SECRETS = frozenset({"sse_kms_key_id"})
_PLACES = {
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
}

T = TypeVar("T", bound=msgspec.Struct)


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
    options = dict(pairs)
    hidden = "@" in text or any(_SECRET.search(name) for name in options.keys() - _NO_SECRETS)
    if hidden:
        places = _PLACES.get(parts.scheme, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        raise InvalidArgument(
            f"the URL of the store {parts.scheme}://... holds credentials; leave them out and give "
            f"them where the store's own tools look for them, such as {places}"
        )
    if not parts.scheme or "://" not in text or parts.fragment:
        raise InvalidArgument(
            f"{text!r} is not the URL of a store; write file:///folder, s3://bucket/prefix, "
            "gs://bucket/prefix or az://container/prefix"
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
        options = msgspec.convert(dict(url.options), kind, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(field.encode_name for field in msgspec.structs.fields(kind))
        raise InvalidArgument(
            f"{url.text!r}: {error}; {url.scheme}:// takes the parameters {known}"
        ) from None
    endpoint = getattr(options, "endpoint_url", None)
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise InvalidArgument(f"{url.text!r}: endpoint_url begins with http:// or https://")
    return options
