"""Objects that end with their process: for tests and simulations."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from danube_fast.clock import Clock
from danube_fast.errors import AlreadyExists, InvalidArgument, NotFound
from danube_fast.history.stores.store import (
    ObjectInfo,
    Part,
    Upload,
    check_object_key,
    check_object_prefix,
    check_parts,
    check_range,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["MemoryStore"]


class _Object(NamedTuple):
    data: bytes
    modified_ns: int


class _Open(NamedTuple):
    upload: Upload
    begun_ns: int
    parts: dict[int, bytes]


class MemoryStore:
    """A dict under a lock."""

    url = "memory://"
    part_bytes_min = 1

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._objects: dict[str, _Object] = {}
        self._uploads: dict[str, _Open] = {}
        self._begun = 0

    def create(self, key: str, data: Buffer) -> None:
        """Make an object. Raises AlreadyExists if there is one."""
        check_object_key(key)
        with self._lock:
            self._add(key, bytes(data))

    def head(self, key: str) -> ObjectInfo | None:
        """Tell of one object; None if there is none."""
        with self._lock:
            found = self._objects.get(check_object_key(key))
        return ObjectInfo(key, len(found.data), found.modified_ns) if found else None

    def read(self, key: str, start: int = 0, count: int | None = None) -> bytes:
        """Read a range. Raises NotFound, or DataLoss if the object ends before."""
        with self._lock:
            found = self._objects.get(check_object_key(key))
        if found is None:
            raise NotFound(f"{self.url}: there is no object {key}")
        return found.data[start : start + check_range(self.url, key, len(found.data), start, count)]

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object under `prefix`, in order."""
        check_object_prefix(prefix)
        with self._lock:
            found = sorted(item for item in self._objects.items() if item[0].startswith(prefix))
        for key, (data, modified_ns) in found:
            yield ObjectInfo(key, len(data), modified_ns)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects."""
        with self._lock:
            for key in keys:
                self._objects.pop(check_object_key(key), None)

    def begin(self, key: str) -> Upload:
        """Begin an object that is sent in parts."""
        with self._lock:
            self._begun += 1
            upload = Upload(check_object_key(key), f"upload-{self._begun}")
            self._uploads[upload.upload_id] = _Open(upload, self._clock.wall_ns(), {})
        return upload

    def put_part(self, upload: Upload, number: int, offset: int, data: Buffer) -> Part:
        """Keep one part. Raises NotFound if the upload has ended."""
        with self._lock:
            kept = self._open(upload).parts[number] = bytes(data)
        return Part(number, offset, len(kept), f"part-{number}")

    def complete(self, upload: Upload, parts: Sequence[Part]) -> None:
        """Join the parts. Raises AlreadyExists, or NotFound if the upload has ended."""
        size = check_parts(upload, parts)
        with self._lock:
            kept = self._open(upload).parts
            data = b"".join(kept.get(part.number, b"") for part in parts)
            if len(data) != size:
                raise InvalidArgument(f"{upload.key}: parts of {size} bytes are {len(data)}")
            self._add(upload.key, data)
            del self._uploads[upload.upload_id]

    def abort(self, upload: Upload) -> None:
        """Drop an upload."""
        with self._lock:
            self._uploads.pop(upload.upload_id, None)

    def uploads(self, prefix: str = "") -> Iterator[tuple[Upload, int]]:
        """Uploads that have not ended."""
        check_object_prefix(prefix)
        with self._lock:
            found = [(entry.upload, entry.begun_ns) for entry in self._uploads.values()]
        yield from (entry for entry in found if entry[0].key.startswith(prefix))

    def close(self) -> None:
        """Nothing is held; the objects stay."""

    def _add(self, key: str, data: bytes) -> None:
        if key in self._objects:
            raise AlreadyExists(f"{self.url}: there is an object {key} already")
        self._objects[key] = _Object(data, self._clock.wall_ns())

    def _open(self, upload: Upload) -> _Open:
        found = self._uploads.get(upload.upload_id)
        if found is None:
            raise NotFound(f"{self.url}: the upload of {upload.key} has ended")
        return found
