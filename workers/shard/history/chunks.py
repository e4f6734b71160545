"""A piece of history in a file of this host, read block by block."""

from __future__ import annotations

import bisect
import os

from danube_fast.broker.messages import FetchedHistory
from danube_fast.broker.subscription.consumer import Stored
from danube_fast.descriptors import open_file
from danube_fast.errors import DataLoss, Unavailable
from danube_fast.frame.crc import crc32c
from danube_fast.workers.shard.read.frames import frames_of

__all__ = ["Chunk", "FileGone"]


class FileGone(Unavailable):
    """Raised if the file of a piece is not there any more."""


class Chunk:
    """Blocks that the uploader has fetched; each is checked when it is read."""

    def __init__(self, partition_id: int, asked_offset: int, fetched: FetchedHistory) -> None:
        """Open the file. Raises FileGone, or Unavailable if it cannot be opened just now."""
        self._partition_id, self._blocks = partition_id, fetched.blocks
        self.start = asked_offset
        """There is no message from here to the first block."""
        self.base_offset = fetched.blocks[0].base_offset
        self.end_offset = fetched.blocks[-1].end_offset
        try:
            self._fd = open_file(fetched.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise FileGone(f"{fetched.path}: {error.strerror}") from None
        except OSError as error:
            raise Unavailable(f"{fetched.path}: {error.strerror}") from None

    def read(self, offset: int, byte_limit: int) -> list[Stored]:
        """Frames of the block with an offset, or the first behind it, and of the next ones; none if they are not
        there any more. Raises DataLoss if the first block is damaged; of later ones those before it are read."""
        first = bisect.bisect_right(self._blocks, offset, key=lambda block: block.end_offset)
        size, last = 0, first
        while last < len(self._blocks) and (last == first or size < byte_limit):
            size += self._blocks[last].byte_count
            last += 1
        data = bytearray(size)
        try:
            if os.preadv(self._fd, [data], self._blocks[first].position) != size:
                return []
        except OSError:
            return []
        sound = self._sound_bytes(data, first, last)
        return frames_of(self._partition_id, data if sound == size else data[:sound])

    def _sound_bytes(self, data: bytearray, first: int, last: int) -> int:
        at, view = 0, memoryview(data)
        for block in self._blocks[first:last]:
            after = at + block.byte_count
            if crc32c(view[at:after]) != block.crc:
                if not at:
                    raise DataLoss(f"the block at offset {block.base_offset} is damaged")
                break
            at = after
        return at

    def close(self) -> None:
        """Give the file back."""
        os.close(self._fd)
