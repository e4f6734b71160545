"""Files of this host with pieces of history that workers read just now, and no more of them than is allowed."""

from __future__ import annotations

import bisect
import collections
import contextlib
import itertools
import shutil
from pathlib import Path
from typing import NamedTuple

from danube_fast.broker.messages import Block
from danube_fast.errors import ResourceExhausted

__all__ = ["Cache", "Piece"]

PIECES_MAX = 4096
"""Those of a store on this host take no room, but have to be known."""


class Piece(NamedTuple):
    """Blocks of a partition in a file."""

    start: int
    """There is no message from here to the first block, or it is in that."""
    path: str
    blocks: list[Block]
    byte_count: int
    """Of a file of the cache; 0 if the store itself has it on this host."""

    @property
    def end_offset(self) -> int:
        """Behind the last message."""
        return self.blocks[-1].end_offset


class Cache:
    """Keep the pieces that were asked for last. The files are for this life of the uploader only."""

    def __init__(self, directory: Path, bytes_max: int) -> None:
        self._directory, self._bytes_max = directory, bytes_max
        self._pieces: collections.OrderedDict[tuple[int, int], Piece] = collections.OrderedDict()
        """By partition id and start."""
        self._starts: dict[int, list[int]] = {}
        """By partition id: where its pieces start, in order."""
        self._bytes = 0
        self._numbers = itertools.count()

    def clear(self) -> None:
        """Remove all files, those of lives before, too."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._pieces.clear()
        self._starts.clear()
        self._bytes = 0

    def find(self, partition_id: int, offset: int) -> Piece | None:
        """Find the piece with an offset."""
        starts = self._starts.get(partition_id, [])
        place = bisect.bisect_right(starts, offset) - 1
        if place < 0:
            return None
        key = partition_id, starts[place]
        piece = self._pieces[key]
        if offset >= piece.end_offset:
            return None
        self._pieces.move_to_end(key)
        return piece

    def has_end(self, partition_id: int, offset: int) -> bool:
        """Whether there is a piece that ends at an offset."""
        starts = self._starts.get(partition_id, [])
        place = bisect.bisect_left(starts, offset) - 1
        return place >= 0 and self._pieces[partition_id, starts[place]].end_offset == offset

    def write(self, data: bytes) -> str:
        """Write a file; its path. Runs in a thread. Raises ResourceExhausted if the disk is full."""
        path = self._directory / f"{next(self._numbers):012d}"
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            path.write_bytes(data)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise ResourceExhausted(
                f"{path}: {error.strerror}; history that consumers read is kept there for a moment: give the "
                "disk some room"
            ) from None
        return str(path)

    def add(self, partition_id: int, piece: Piece) -> None:
        """Keep a piece; remove those that were asked for longest ago if they are too many."""
        start = piece.start
        old = self._pieces.pop((partition_id, start), None)
        if old is not None:
            self._remove(old)
        else:
            bisect.insort(self._starts.setdefault(partition_id, []), start)
        self._pieces[partition_id, start] = piece
        self._bytes += piece.byte_count
        while len(self._pieces) > 1 and self._is_full():
            (other_id, other_start), other = self._pieces.popitem(last=False)
            self._starts[other_id].remove(other_start)
            if not self._starts[other_id]:
                del self._starts[other_id]
            self._remove(other)

    def _is_full(self) -> bool:
        return self._bytes > self._bytes_max or len(self._pieces) > PIECES_MAX

    def _remove(self, piece: Piece) -> None:
        self._bytes -= piece.byte_count
        if piece.byte_count:
            with contextlib.suppress(OSError):
                Path(piece.path).unlink()
