"""A store that costs nothing: parts of objects are kept as they come, in the memory of the uploader, uncopied.

So what an upload costs a broker is measured without a disk or a network, and consumers can still read it all.
Manifests and probes are files of a folder, where another process finds them.
"""

from __future__ import annotations

import bisect
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from danube_fast.clock import Clock
from danube_fast.errors import AlreadyExists, NotFound
from danube_fast.history.layout import OBJECTS_PREFIX
from danube_fast.history.stores.local import LocalStore
from danube_fast.history.stores.store import ObjectInfo, Part, Upload, check_parts, check_range
from danube_fast.history.stores.url import StoreUrl

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Sink", "open_sink"]


class _Pieces:
    """The bytes of an object, piece by piece."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.views: list[memoryview] = []

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self.starts[-1] + len(self.views[-1]) if self.views else 0

    def put(self, offset: int, data: Buffer) -> None:
        """Keep a piece; they may come in any order."""
        place = bisect.bisect_left(self.starts, offset)
        self.starts.insert(place, offset)
        self.views.insert(place, memoryview(data).cast("B"))

    def read(self, start: int, count: int) -> bytes:
        """Join a range."""
        found = bytearray()
        place = max(bisect.bisect_right(self.starts, start) - 1, 0)
        while len(found) < count:
            at = start + len(found) - self.starts[place]
            found += self.views[place][at : at + count - len(found)]
            place += 1
        return bytes(found)


class Sink:
    """Objects of frames in memory, all else in a folder."""

    part_bytes_min = 1

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._files = LocalStore(folder, clock)
        self.url = self._files.url
        self._objects: dict[str, _Pieces] = {}
        self._open: dict[str, _Pieces] = {}

    def create(self, key: str, data: Buffer) -> None:
        """Make an object. Raises AlreadyExists."""
        if not _is_kept(key):
            self._files.create(key, data)
            return
        pieces = _Pieces()
        pieces.put(0, data)
        self._add(key, pieces)

    def head(self, key: str) -> ObjectInfo | None:
        """Tell of one object; None if there is none."""
        if not _is_kept(key):
            return self._files.head(key)
        found = self._objects.get(key)
        return None if found is None else ObjectInfo(key, found.size, time.time_ns())

    def read(self, key: str, start: int = 0, count: int | None = None) -> bytes:
        """Read a range. Raises NotFound, or DataLoss if the object ends before."""
        if not _is_kept(key):
            return self._files.read(key, start, count)
        found = self._objects.get(key)
        if found is None:
            raise NotFound(f"{self.url}: there is no object {key}")
        return found.read(start, check_range(self.url, key, found.size, start, count))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object of the folder: those in memory are not listed."""
        return self._files.list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects."""
        for key in keys:
            if self._objects.pop(key, None) is None:
                self._files.delete([key])

    def begin(self, key: str) -> Upload:
        """Begin an object in parts."""
        if not _is_kept(key):
            return self._files.begin(key)
        upload = Upload(key, secrets.token_hex(8))
        self._open[upload.upload_id] = _Pieces()
        return upload

    def put_part(self, upload: Upload, number: int, offset: int, data: Buffer) -> Part:
        """Keep a part."""
        pieces = self._open.get(upload.upload_id)
        if pieces is None:
            return self._files.put_part(upload, number, offset, data)
        pieces.put(offset, data)
        return Part(number, offset, len(memoryview(data).cast("B")), str(number))

    def complete(self, upload: Upload, parts: Sequence[Part]) -> None:
        """Make the object. Raises AlreadyExists."""
        pieces = self._open.get(upload.upload_id)
        if pieces is None:
            self._files.complete(upload, parts)
            return
        check_parts(upload, parts)
        self._add(upload.key, pieces)
        del self._open[upload.upload_id]

    def abort(self, upload: Upload) -> None:
        """Drop an upload."""
        if self._open.pop(upload.upload_id, None) is None:
            self._files.abort(upload)

    def uploads(self, prefix: str = "") -> Iterator[tuple[Upload, int]]:
        """Uploads of the folder that have not ended."""
        return self._files.uploads(prefix)

    def close(self) -> None:
        """Nothing is held; the objects stay."""

    def _add(self, key: str, pieces: _Pieces) -> None:
        if self._objects.setdefault(key, pieces) is not pieces:
            raise AlreadyExists(f"{self.url}: there is an object {key} already")


def _is_kept(key: str) -> bool:
    return key.startswith(OBJECTS_PREFIX)


def open_sink(url: StoreUrl, clock: Clock, scratch: Path) -> Sink:
    """Open the sink of a URL, which names its folder."""
    return Sink(Path(url.options["folder"]), clock)
