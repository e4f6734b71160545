"""Brokers whose history goes to SeaweedFS, through a proxy that fails when told."""

from __future__ import annotations

import collections
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.clock import SystemClock
from danube_fast.history.manifest import MANIFESTS_PREFIX, ManifestReader
from danube_fast.history.objects import verify_object
from danube_fast.history.stores.opening import open_store
from danube_fast.history.stores.store import ObjectStore
from danube_fast.testing.broker import Broker
from danube_fast.workers.uploader.checkpoint import CHECKPOINT_NAME, Checkpoint
from tests.history.faulty_proxy import FaultyProxy
from tests.history.s3_servers import ACCESS_KEY, BUCKET, SECRET_KEY

KIB, MIB = 1024, 1024 * 1024
PART_BYTES = 5 * MIB
"""The smallest that S3 takes."""
QUICK: dict[str, Any] = {
    "segment_bytes": 4 * MIB, "retention_seconds_min": 0, "history_flush_seconds": 1,
    "history_part_bytes": PART_BYTES, "restart_delay_ms": 0,
}  # fmt: skip
_PART = re.compile(r"[?&]partNumber=(\d+)")
_UPLOAD = re.compile(r"[?&]uploadId=([^&]+)")

PartId = tuple[str, int]
"""Id of the upload, and number of the part."""


def give_credentials(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let brokers that are started from now on have SeaweedFS's credentials."""
    patch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    patch.setenv("AWS_CONFIG_FILE", str(folder / "config"))
    patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "credentials"))


def s3_url(endpoint: str, prefix: str, bucket: str = BUCKET) -> str:
    """URL of a store there."""
    return f"s3://{bucket}/{prefix}?endpoint_url={endpoint}&region=us-east-1&path_style=true"


@contextlib.contextmanager
def opened(url: str) -> Iterator[ObjectStore]:
    """A store, past the proxy if the URL says so."""
    store = open_store(url, SystemClock(), Path("/nowhere"))
    try:
        yield store
    finally:
        store.close()


@contextlib.contextmanager
def proxied(upstream: str) -> Iterator[FaultyProxy]:
    """A proxy before a server."""
    proxy = FaultyProxy(upstream)
    try:
        yield proxy
    finally:
        proxy.close()


def manifests(store: ObjectStore) -> list[ManifestReader]:
    """All manifests of a store."""
    prefix = MANIFESTS_PREFIX
    ids = {int(info.key.removeprefix(prefix).partition("/")[0]) for info in store.list(prefix)}
    found = [ManifestReader(store, None, partition_id) for partition_id in sorted(ids)]
    for reader in found:
        reader.load()
    return found


def uploaded_count(store: ObjectStore) -> int:
    """Messages that the manifests name."""
    return sum(
        section.message_count for reader in manifests(store) for section in reader.manifest.sections
    )


def verify_store(store: ObjectStore) -> set[str]:
    """Check every byte that the manifests name, and that no offset is in two places; the keys of the objects."""
    keys: set[str] = set()
    for reader in manifests(store):
        at = 0
        for section in reader.manifest.sections:
            assert section.base_offset >= at, f"{section.key} holds what another object holds"
            at = section.end_offset
            keys.add(section.key)
        assert at <= reader.manifest.end_offset
        assert reader.identity is not None
        identity = reader.identity
    for key in keys:
        verify_object(store, key, identity)
    return keys


def parts_seen(proxy: FaultyProxy) -> collections.Counter[PartId]:
    """How often each part was sent through the proxy."""
    found: collections.Counter[PartId] = collections.Counter()
    for method, path in list(proxy.seen):
        number, upload = _PART.search(path), _UPLOAD.search(path)
        if method == "PUT" and number and upload:
            found[upload.group(1), int(number.group(1))] += 1
    return found


def checkpoint_of(broker: Broker) -> Checkpoint | None:
    """The checkpoint that an uploader has left."""
    path = broker.data_dir / CHECKPOINT_NAME
    if not path.exists():
        return None
    found = Checkpoint.decode(path.read_bytes())
    assert found is not None, f"{path} is damaged"
    return found
