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


class Piece(NamedTuple):
    """Blocks of a partition in a file."""

    path: str
    blocks: list[Block]
    byte_count: int
    """Of a file of the cache; 0 if the store itself has it on this host."""


class Cache:
    """Keep the pieces that were asked for last. The files are for this life of the uploader only."""

    def __init__(self, directory: Path, bytes_max: int) -> None:
        self._directory, self._bytes_max = directory, bytes_max
        self._pieces: collections.OrderedDict[tuple[int, int], Piece] = collections.OrderedDict()
        """By partition id and first offset."""
        self._starts: dict[int, list[int]] = {}
        """By partition id: first offsets of its pieces, in order."""
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
        if offset >= piece.blocks[-1].end_offset:
            return None
        self._pieces.move_to_end(key)
        return piece

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
        start = piece.blocks[0].base_offset
        old = self._pieces.pop((partition_id, start), None)
        if old is not None:
            self._remove(old)
        else:
            bisect.insort(self._starts.setdefault(partition_id, []), start)
        self._pieces[partition_id, start] = piece
        self._bytes += piece.byte_count
        while self._bytes > self._bytes_max and len(self._pieces) > 1:
            (other_id, other_start), other = self._pieces.popitem(last=False)
            self._starts[other_id].remove(other_start)
            self._remove(other)

    def _remove(self, piece: Piece) -> None:
        self._bytes -= piece.byte_count
        if piece.byte_count:
            with contextlib.suppress(OSError):
                Path(piece.path).unlink()
