"""Objects of packed frames: tasks make them of rows, the driver reads them to publish.

    rows of a task --packed as a producer packs--> frames --back to back, 16 MiB or so--> objects

A frame is that of the wire, its partition id in the header (which the broker writes again), without producer and
sequence: those are of the commit.
"""

from __future__ import annotations

import concurrent.futures
import struct
import tempfile
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from danube_fast.client.link.buffers import FRAME_AT, BufferPool
from danube_fast.client.produce.outgoing import Outgoing, Packer
from danube_fast.client.values.limits import BATCH_BYTES_DEFAULT
from danube_fast.clock import SystemClock
from danube_fast.errors import AlreadyExists, DataLoss, InvalidArgument, NotFound
from danube_fast.frame.crc import crc32c
from danube_fast.frame.layout import HEADER_BYTES, At, Codec
from danube_fast.frame.view import FrameView
from danube_fast.history.stores.opening import open_store
from danube_fast.history.stores.store import ObjectStore
from danube_fast.spark.write.record import StagedObject

__all__ = ["Stager", "StagingTarget", "open_staging", "read_staged"]

OBJECT_BYTES = 16 * 1024 * 1024
"""An object ends with the frame that makes it as large as this."""
READS_AHEAD = 2
"""Objects that are read while the one before is published."""
_PARTITION_ID = struct.Struct("<I")


class StagingTarget(NamedTuple):
    """What a task has to know of the topic and of its broker."""

    topic: str
    partition_ids: tuple[int, ...]
    limits: dict[str, int]
    """The broker's, of frames and messages."""
    store: str
    """URL of the store where rows are staged."""
    payload_bytes_max: int = 0
    """The topic's own limit of a payload; 0: that of the broker."""


def open_staging(url: str, *, must_exist: bool = False) -> ObjectStore:
    """Open a store to write to it. `must_exist`: its folder has to be there. Raises as `open_store`."""
    scratch = Path(tempfile.gettempdir())
    if must_exist:
        open_store(url, SystemClock(), scratch, must_exist=True).close()
    return open_store(url, SystemClock(), scratch)


class Stager:
    """Packs the rows of one task and makes objects of them."""

    def __init__(self, store: ObjectStore, target: StagingTarget, prefix: str) -> None:
        """`prefix`: what the keys of the objects begin with; no other task has it."""
        self._store, self._target, self._prefix = store, target, prefix
        self._packer = Packer(BufferPool(BATCH_BYTES_DEFAULT), Codec.NONE)
        self._packer.keep_to([target.limits])
        self._open = bytearray()
        self._rows: Counter[int] = Counter()
        self._objects: list[StagedObject] = []

    def add(self, outgoing: Outgoing, partitions: Sequence[int]) -> int:
        """Pack messages in frames for these partitions in turn, by index; how many frames that were.

        Raises InvalidArgument for a message that is too large, and what the store raises.
        """
        if self._target.payload_bytes_max:
            self._check_sizes(outgoing)
        start, frames = 0, 0
        while start < len(outgoing.payloads):
            index = partitions[frames % len(partitions)]
            buffer, size, count = self._packer.pack(outgoing, start)
            place = len(self._open)
            self._open += buffer.view[FRAME_AT : FRAME_AT + size]
            self._packer.pool.give_back(buffer)
            partition_id = self._target.partition_ids[index]
            _PARTITION_ID.pack_into(self._open, place + At.PARTITION_ID, partition_id)
            self._rows[index] += count
            start, frames = start + count, frames + 1
            if len(self._open) >= OBJECT_BYTES:
                self._make_object()
        return frames

    def _check_sizes(self, outgoing: Outgoing) -> None:
        """Refuse what the topic would, before anything is committed: a commit that is refused half way stays so."""
        limit = self._target.payload_bytes_max
        longest = max((len(payload) for payload in outgoing.payloads if payload), default=0)
        if longest > limit:
            raise InvalidArgument(
                f"a row has a payload of {longest} bytes, and the policy of {self._target.topic} allows {limit} "
                "(message_bytes_max); split it, or raise that"
            )

    def finish(self) -> list[StagedObject]:
        """Make the last object; all of the task. Raises what the store raises."""
        if self._open:
            self._make_object()
        return self._objects

    def _make_object(self) -> None:
        key = f"{self._prefix}{len(self._objects):06d}"
        data = bytes(self._open)
        try:
            self._store.create(key, data)
        except AlreadyExists:
            pass  # of a try whose answer was lost: the key is this task's own
        self._objects.append(StagedObject(key, len(data), crc32c(data), dict(self._rows)))
        self._open, self._rows = bytearray(), Counter()


def read_staged(
    store: ObjectStore, objects: Sequence[StagedObject]
) -> Iterator[tuple[int, memoryview, int]]:
    """Read the frames of objects in order: partition id, frame, how many messages it has. The next objects are read
    ahead. Raises what the store raises, DataLoss for an object that is missing or has other bytes."""
    left = deque(objects)
    under_way: deque[concurrent.futures.Future[bytes]] = deque()
    with concurrent.futures.ThreadPoolExecutor(READS_AHEAD) as pool:
        while left or under_way:
            while left and len(under_way) < READS_AHEAD:
                under_way.append(pool.submit(_read_object, store, left.popleft()))
            yield from _frames(under_way.popleft().result())


def _read_object(store: ObjectStore, staged: StagedObject) -> bytes:
    try:
        data = store.read(staged.key)
    except NotFound:
        raise DataLoss(
            f"{store.url}: {staged.key} is missing, and not all of its rows are published; put it back from a copy, "
            "or give the rest up with `danube-fast spark writes abort`"
        ) from None
    if len(data) != staged.byte_count or crc32c(data) != staged.crc:
        raise DataLoss(
            f"{store.url}: {staged.key} has other bytes than were staged; put it back from a copy, or give the rest "
            "up with `danube-fast spark writes abort`"
        )
    return data


def _frames(data: bytes) -> Iterator[tuple[int, memoryview, int]]:
    place = 0
    while place + HEADER_BYTES <= len(data):
        view = FrameView(data, place)
        frame = bytearray(data[place : place + view.frame_bytes])
        _PARTITION_ID.pack_into(frame, At.PARTITION_ID, 0)
        yield view.partition_id, memoryview(frame), view.message_count
        place += view.frame_bytes
