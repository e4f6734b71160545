"""An object store as a network away: busy, slow, with answers that are lost and writes that arrive late.

    call --> refused: the store is busy, or away                    nothing is done
         --> done, and the answer is lost                           Unavailable
         --> done, and the store's client tried again by itself     AlreadyExists
         --> on its way for a while: done later, or not at all      Unavailable at once;
             often soon after a read that has not found it

Objects stay through every fault; an object that was made is there for every read at once, and in a listing later.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from danube_fast.clock import MICROSECOND_NS, MILLISECOND_NS, SECOND_NS
from danube_fast.errors import AlreadyExists, DanubeError, Unavailable
from danube_fast.history.manifest import MANIFESTS_PREFIX
from danube_fast.history.stores.memory import MemoryStore
from danube_fast.history.stores.store import ObjectInfo, Part, Upload
from danube_fast.testing.virtual_clock import Schedule, Trace

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["FaultyStore", "StoreFaults"]

LATE_NS = (300 * MILLISECOND_NS, 3 * SECOND_NS)
"""How long a write may be on its way, whose caller has given up."""
AFTER_READ_SHARE = 0.5
AFTER_READ_NS = 80 * MILLISECOND_NS
"""How often, and how soon, such a write arrives after a read that has not found it."""
MANIFESTS_LATE = 2
"""Writes of manifests are late so many times as often as others."""


class StoreFaults(NamedTuple):
    """Shares of the calls that go wrong, and how late listings are."""

    busy: float = 0.0
    """Refused; nothing is done."""
    lost: float = 0.0
    """Writes that are done, and whose answer is lost."""
    again: float = 0.0
    """Writes that are done, and are answered as a second try is."""
    late: float = 0.0
    """Writes whose caller gives up before they arrive."""
    list_late_ns: int = 0
    """Objects that are younger are not listed."""


class FaultyStore:
    """A store in memory, behind faults that the seed draws."""

    url = MemoryStore.url
    part_bytes_min = MemoryStore.part_bytes_min

    def __init__(
        self, schedule: Schedule, draw: random.Random, trace: Trace, faults: StoreFaults
    ) -> None:
        self.objects = MemoryStore(schedule.clock)
        """What the store has, without its faults."""
        self.faults = faults
        self.away_until_ns = 0
        """It cannot be reached until then."""
        self.slow_until_ns = 0
        self._schedule, self._draw, self._trace = schedule, draw, trace
        self._is_calm = False
        self._on_way: dict[str, Callable[[], None]] = {}
        """Writes whose callers have given up, by key."""
        self.on_made: Callable[[], None] = lambda: None
        """Called when an object was made, as an event of its own: a fault that it finds is none of the uploader."""
        self.on_way: Callable[[bool], None] = lambda is_manifest: None
        """Called when a write is on its way and its caller has given up, as an event of its own."""

    def heal(self) -> None:
        """No fault any more, but that listings are late."""
        self._is_calm = True
        self.away_until_ns = self.slow_until_ns = 0

    def delay_ns(self) -> int:
        """How long the next call takes."""
        late_ns = self.slow_until_ns - self._schedule.clock.now_ns
        if late_ns > 0:
            return self._draw.randrange(5 * MILLISECOND_NS, late_ns + 10 * MILLISECOND_NS)
        return self._draw.randrange(100 * MICROSECOND_NS, 8 * MILLISECOND_NS)

    # ------------------------------------------------------------ writes

    def create(self, key: str, data: Buffer) -> None:
        """Make an object, unless a fault prevents it. Raises AlreadyExists, Unavailable."""
        kept = bytes(data)  # the caller may use its buffer again

        def make() -> None:
            self.objects.create(key, kept)
            self._schedule.call(0, lambda: self.on_made())

        self._write(key, f"create {key}", make)

    def complete(self, upload: Upload, parts: Sequence[Part]) -> None:
        """Make the object of these parts. Raises AlreadyExists, NotFound, Unavailable."""
        kept = list(parts)
        self._write(
            upload.key, f"complete {upload.key}", lambda: self.objects.complete(upload, kept)
        )

    def put_part(self, upload: Upload, number: int, offset: int, data: Buffer) -> Part:
        """Keep one part. Raises NotFound, Unavailable."""
        self._meet(f"part {number} of {upload.key}")
        return self.objects.put_part(upload, number, offset, data)

    def begin(self, key: str) -> Upload:
        """Begin an object that is sent in parts. Raises Unavailable."""
        self._meet(f"begin {key}")
        return self.objects.begin(key)

    def abort(self, upload: Upload) -> None:
        """Drop an upload. Raises Unavailable."""
        self._meet(f"abort {upload.key}")
        self.objects.abort(upload)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects. Raises Unavailable."""
        self._meet("delete")
        self.objects.delete(keys)

    def _write(self, key: str, what: str, work: Callable[[], None]) -> None:
        self._meet(what)
        drawn, faults = self._draw.random(), self.faults
        is_manifest = key.startswith(MANIFESTS_PREFIX)
        late = faults.late * (MANIFESTS_LATE if is_manifest else 1)
        if self._is_calm or drawn >= late + faults.lost + faults.again:
            work()
            self._trace.note(f"store: {what}")
            return
        if drawn < late:
            self._trace.note(f"store: {what} is on its way")
            late_ns = self._draw.randrange(self._draw.choice(LATE_NS))
            self._on_way[key] = work
            self._schedule.call(late_ns, lambda: self._arrive(key, work))
            self._schedule.call(0, lambda: self.on_way(is_manifest))
            raise Unavailable(f"{self.url}: {what}: no answer came in time")
        try:
            work()
        except DanubeError:
            self._trace.note(f"store: {what} was refused, and the answer is lost")
            raise Unavailable(f"{self.url}: {what}: the connection was lost") from None
        self._trace.note(f"store: {what}, and the answer is lost")
        if drawn < late + faults.lost:
            raise Unavailable(f"{self.url}: {what}: the connection was lost")
        raise AlreadyExists(f"{self.url}: {what}: it is there already")

    def _arrive(self, key: str, work: Callable[[], None]) -> None:
        if self._on_way.get(key) is not work:
            return  # it has arrived, or another one is on its way
        del self._on_way[key]
        try:
            work()
        except DanubeError as error:
            self._trace.note(f"store: {key} came too late: {type(error).__name__}")
        else:
            self._trace.note(f"store: {key} has arrived")

    # ------------------------------------------------------------ reads

    def head(self, key: str) -> ObjectInfo | None:
        """Tell of one object; None if there is none. Raises Unavailable."""
        self._meet(f"head {key}")
        return self.objects.head(key)

    def read(self, key: str, start: int = 0, count: int | None = None) -> bytes:
        """Read a range. Raises NotFound, DataLoss, Unavailable."""
        self._meet(f"read {key}")
        work = self._on_way.get(key)
        if work is not None and self._draw.random() < AFTER_READ_SHARE:
            late_ns = self._draw.randrange(AFTER_READ_NS)
            self._schedule.call(late_ns, lambda: self._arrive(key, work))
        return self.objects.read(key, start, count)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List the objects under a prefix but the youngest. Raises Unavailable."""
        self._meet(f"list {prefix}")
        until_ns = self._schedule.clock.wall_ns() - self.faults.list_late_ns
        for info in self.objects.list(prefix):
            if info.modified_ns <= until_ns:
                yield info

    def uploads(self, prefix: str = "") -> Iterator[tuple[Upload, int]]:
        """List uploads that have not ended. Raises Unavailable."""
        self._meet(f"uploads {prefix}")
        return self.objects.uploads(prefix)

    def close(self) -> None:
        """Nothing is held; the objects stay."""

    def _meet(self, what: str) -> None:
        """Raise Unavailable if the store is away, or busy."""
        if self._is_calm:
            return
        if self.away_until_ns > self._schedule.clock.now_ns:
            raise Unavailable(f"{self.url}: {what}: the store cannot be reached")
        if self._draw.random() < self.faults.busy:
            self._trace.note(f"store: {what}: busy")
            raise Unavailable(f"{self.url}: {what}: slow down")
