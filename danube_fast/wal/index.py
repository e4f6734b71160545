"""The index: (partition, offset) and (partition, time) -> position, in LMDB. Only a cache.

    db "offset"  partition_id u32 | base_offset u64     (big-endian)   -> position, bytes, span, time,
                                                                          check
    db "time"    partition_id u32 | append_time_ns u64  (big-endian)   -> base_offset u64, check
    db "meta"    what it was built from: log id, format, boot id, clean flag, indexed position, crc

It is believed only if the file is sound (danube_fast/lmdb_file.py), the log id matches and either the boot
id matches (the page cache is the one that LMDB wrote to) or it was closed cleanly; then it is caught
up from `indexed`, otherwise built anew. What an entry says is checked when it is read: `check` mixes
key and value. A fault found then is an lmdb.Error, and the index is built anew.

It is opened without sync and without a writable map. The map begins small, and before each write it grows
by what that may take at most, the file's blocks first: a full disk is an error here, never a SIGBUS and
never met inside LMDB, and such an error costs nothing but time: what could not be written stays in the
tail table and is tried again.

Entries of trimmed segments are swept in bounded batches; readers skip them by position until then.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import numpy as np

from danube_fast.clock import Clock
from danube_fast.errors import DataLoss
from danube_fast.frame.crc import crc32c
from danube_fast.lmdb_file import check_lmdb_file
from danube_fast.wal.entries import KEY, MIXERS, TIME_VALUE, VALUE, Sweep, mix

__all__ = ["Index", "Run", "Runs"]

_INDEX_VERSION = 2
_U64 = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_MASK_32 = 0xFFFF_FFFF
_KEY_DTYPE = np.dtype([("partition_id", ">u4"), ("second", ">u8")])
_VALUE_DTYPE = np.dtype(
    [
        ("position", "<u8"),
        ("byte_count", "<u4"),
        ("offset_span", "<u4"),
        ("append_time_ns", "<i8"),
        ("check", "<u4"),
    ]
)
_TIME_VALUE_DTYPE = np.dtype([("base_offset", "<u8"), ("check", "<u4")])
_META_KEYS = (b"log_id", b"version", b"boot_id", b"clean", b"indexed")
_DATABASES = 3
_MAP_FREE_PART = 4  # grow when less than a quarter of the map is free
_GROWTH_BYTES_MAX = 64 * 1024 * 1024  # at a time: more would keep the worker's loop waiting
_ENTRY_BYTES = 256  # far more than an entry of both tables takes in new pages
_PAGES_KEPT = 16  # what each transaction writes beside its entries
_RETRY_NS = 1_000_000_000
_PAGE_BYTES = 4096


Runs = np.ndarray[Any, Any]
"""RUN_DTYPE, one row for each run, in order of position."""


class Run(msgspec.Struct, frozen=True, gc=False):
    """Frames of one partition that stand back to back in the log, as one read."""

    partition_id: int
    base_offset: int
    offset_span: int
    position: int
    byte_count: int
    append_time_ns: int

    @property
    def end_offset(self) -> int:
        """One past the last offset."""
        return self.base_offset + self.offset_span


def _boot_id() -> bytes:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return b""


def _allocate(path: Path, byte_count: int) -> None:
    """Give the file real blocks, so that a later write cannot find the disk full."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, byte_count)
    finally:
        os.close(fd)


class Index:
    """The LMDB environment of one log. Used by the worker's loop alone.

    `indexed_position`: every run below it is in here. `fault` is the text of the last error, None
    when all is well. `valid` says after opening whether what was there can be believed.
    """

    def __init__(self, directory: Path, log_id: int, map_bytes: int, clock: Clock) -> None:
        self.directory = directory
        self.fault: str | None = None
        self.valid = False
        self.indexed_position = 0
        self._log_id = log_id
        self._map_bytes = -(-map_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self._clock = clock
        self._retry_at_ns = 0
        self._sweep = Sweep()
        self._environment: Any = None
        self._offsets: Any = None
        self._times: Any = None
        self._meta: Any = None
        self._meta_values: dict[bytes, bytes] = {}

    # -- opening and closing -----------------------------------------------------------------

    def open(self) -> None:
        """Open or make it. Anything unreadable or foreign is thrown away; raises OSError only."""
        try:
            check_lmdb_file(self.directory / "data.mdb")
            self._open()
            self.valid = self._believe()
        except (lmdb.Error, DataLoss):
            self.close_environment()
            self.valid = False
        if not self.valid:
            self.clear()

    def clear(self) -> None:
        """Start again with an empty one."""
        self.close_environment()
        shutil.rmtree(self.directory, ignore_errors=True)
        self.indexed_position = 0
        try:
            self._open()
        except lmdb.Error as fault:
            self._note(fault)

    def _open(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        data = self.directory / "data.mdb"
        size = max(self._map_bytes, data.stat().st_size if data.exists() else 0)
        self._map_bytes = -(-size // _PAGE_BYTES) * _PAGE_BYTES
        self._environment = lmdb.open(
            str(self.directory),
            map_size=self._map_bytes,
            max_dbs=_DATABASES,
            sync=False,
            metasync=False,
            lock=False,  # the log's own lock is held, and only one thread comes here
            readahead=False,
        )
        self._offsets = self._environment.open_db(b"offset")
        self._times = self._environment.open_db(b"time")
        self._meta = self._environment.open_db(b"meta")
        with contextlib.suppress(OSError):
            _allocate(data, self._map_bytes)  # on a full disk a later write says so

    def _believe(self) -> bool:
        with self._environment.begin(db=self._meta) as transaction:
            found = {key: bytes(transaction.get(key) or b"") for key in (*_META_KEYS, b"crc")}
        if found.pop(b"crc") != meta_crc(found):
            return False
        if found[b"log_id"] != _U64.pack(self._log_id):
            return False
        if found[b"version"] != _U64.pack(_INDEX_VERSION):
            return False
        if found[b"clean"] != b"1" and (found[b"boot_id"] != _boot_id() or not _boot_id()):
            return False
        self.indexed_position = _U64.unpack(found[b"indexed"])[0]
        self._meta_values = found
        return True

    def mark_open(self) -> None:
        """Say durably that the index is in use: after a power cut it will not be believed."""
        self._write_meta({b"clean": b"0"}, durable=True)

    def close(self, *, clean: bool) -> None:
        """Close; with `clean` everything is made durable and believed at the next start."""
        if clean and self._environment is not None and self.fault is None:
            self._environment.sync(True)
            self._write_meta({b"clean": b"1"}, durable=True)
        self.close_environment()

    def close_environment(self) -> None:
        """Close the environment without a word."""
        if self._environment is not None:
            self._environment.close()
            self._environment = None

    def _write_meta(self, changes: dict[bytes, bytes], *, durable: bool) -> None:
        if self._environment is None:
            return
        try:
            own = {
                b"log_id": _U64.pack(self._log_id),
                b"version": _U64.pack(_INDEX_VERSION),
                b"boot_id": _boot_id(),
                b"indexed": _U64.pack(self.indexed_position),
            }
            with self._environment.begin(write=True) as transaction:
                self._put_meta(transaction, own | changes)
            if durable:
                self._environment.sync(True)
        except (lmdb.Error, OSError) as fault:
            self._note(fault)

    def _put_meta(self, transaction: Any, changes: dict[bytes, bytes]) -> None:
        self._meta_values.update(changes)
        for key, value in {**changes, b"crc": meta_crc(self._meta_values)}.items():
            transaction.put(key, value, db=self._meta)

    def _note(self, fault: Exception) -> None:
        self.fault = f"index {self.directory} cannot be written: {fault}; free space on its disk"
        self._retry_at_ns = self._clock.monotonic_ns() + _RETRY_NS

    # -- writing -----------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether a write is worth trying: no fault, or the last one is a second ago."""
        return self.fault is None or self._clock.monotonic_ns() >= self._retry_at_ns

    def add(self, runs: Runs, indexed_position: int) -> bool:
        """Put runs in and move `indexed_position`; all or nothing. False on an error (`fault`)."""
        if self._environment is None:
            self.clear()
            if self._environment is None:
                return False
        if self._sweep.dropped and len(runs):
            runs = runs[~np.isin(runs["partition_id"], list(self._sweep.dropped))]
        for _ in range(2):
            try:
                self._grow_ahead(len(runs))
                self._put(runs, indexed_position)
            except lmdb.MapFullError:
                self._grow(self._map_bytes + min(self._map_bytes, _GROWTH_BYTES_MAX))
                continue
            except (lmdb.Error, OSError) as fault:
                self._note(fault)
                return False
            self.indexed_position = indexed_position
            self.fault = None
            return True
        return False

    def _put(self, runs: Runs, indexed_position: int) -> None:
        runs = runs[np.lexsort((runs["base_offset"], runs["partition_id"]))]
        count = len(runs)
        keys = np.zeros(count, dtype=_KEY_DTYPE)
        keys["partition_id"] = runs["partition_id"]
        keys["second"] = runs["base_offset"]
        values = np.zeros(count, dtype=_VALUE_DTYPE)
        for field in ("position", "byte_count", "offset_span", "append_time_ns"):
            values[field] = runs[field]
        words = ("partition_id", "base_offset", "position", "byte_count", "offset_span")
        values["check"] = _checks(*(runs[word] for word in words), runs["append_time_ns"])
        by_offset = _pairs(keys, values)
        times = np.zeros(count, dtype=_TIME_VALUE_DTYPE)
        keys["second"] = np.maximum(runs["append_time_ns"], 0)
        times["base_offset"] = runs["base_offset"]
        times["check"] = _checks(runs["partition_id"], runs["base_offset"], keys["second"])
        by_time = _pairs(keys, times)
        with self._environment.begin(write=True) as transaction:
            if count:
                transaction.cursor(self._offsets).putmulti(by_offset)
                # The first run of an instant stays: keys are in the order of offsets.
                transaction.cursor(self._times).putmulti(by_time, overwrite=False)
                again = list(self._sweep.rewritten)
                for row in np.flatnonzero(np.isin(runs["partition_id"], again)) if again else ():
                    key, value = by_time[row]
                    partition, second = KEY.unpack(key)
                    entry = transaction.get(key, db=self._times)
                    known = self._time_entry(partition, second, entry)
                    if known > int(runs["base_offset"][row]):
                        transaction.put(key, value, db=self._times)
            self._put_meta(transaction, {b"indexed": _U64.pack(indexed_position)})

    def _grow_ahead(self, entries: int) -> None:
        """Make room for a change of so many entries: each on pages of its own, which are copied, and
        split. Raises OSError if the disk has no room.
        """
        used = (self._environment.info()["last_pgno"] + 1) * _PAGE_BYTES
        pages = 2 * min(used, 2 * entries * _PAGE_BYTES) + _PAGES_KEPT * _PAGE_BYTES
        need = used + pages + entries * _ENTRY_BYTES
        size = self._map_bytes
        while size < need or size - used < min(size // _MAP_FREE_PART, _GROWTH_BYTES_MAX):
            size += min(size, _GROWTH_BYTES_MAX)
        if size > self._map_bytes:
            self._grow(size)

    def _grow(self, size: int) -> None:
        _allocate(self.directory / "data.mdb", size)
        self._environment.set_mapsize(size)
        self._map_bytes = size

    # -- looking up --------------------------------------------------------------------------

    def runs(self, partition_id: int, offset: int, oldest_position: int) -> Iterator[Run]:
        """Runs of a partition that end behind `offset`, in order; those below the trim are skipped.

        Raises lmdb.Error if the index is damaged, as `find_time` does: build it anew.
        """
        if self._environment is None or partition_id in self._sweep.dropped:
            return
        with (
            self._environment.begin(db=self._offsets) as transaction,
            transaction.cursor() as cursor,
        ):
            if not _seek(cursor, partition_id, offset):
                return
            for key, value in cursor:
                partition, base_offset = KEY.unpack(key)
                if partition != partition_id:
                    return
                position, byte_count, span, time_ns = self._entry(partition, base_offset, value)
                if base_offset + span > offset and position >= oldest_position:
                    yield Run(partition_id, base_offset, span, position, byte_count, time_ns)

    @staticmethod
    def _entry(partition_id: int, base_offset: int, value: bytes) -> tuple[int, int, int, int]:
        if len(value) == VALUE.size:
            position, byte_count, span, time_ns, check = VALUE.unpack(value)
            if check == mix(partition_id, base_offset, position, byte_count, span, time_ns):
                return position, byte_count, span, time_ns
        raise lmdb.CorruptedError(
            f"the entry of partition {partition_id}, offset {base_offset}, is not what was written"
        )

    @staticmethod
    def _time_entry(partition_id: int, time_ns: int, value: bytes) -> int:
        if len(value) == TIME_VALUE.size:
            base_offset, check = TIME_VALUE.unpack(value)
            if check == mix(partition_id, base_offset, time_ns):
                return int(base_offset)
        raise lmdb.CorruptedError(
            f"the entry of partition {partition_id}, time {time_ns}, is not what was written"
        )

    def find_time(self, partition_id: int, time_ns: int, oldest_position: int) -> int | None:
        """Base offset of the first run appended at `time_ns` or later."""
        if self._environment is None or partition_id in self._sweep.dropped:
            return None
        with self._environment.begin(db=self._times) as transaction:
            cursor = transaction.cursor()
            if not cursor.set_range(KEY.pack(partition_id, max(time_ns, 0))):
                return None
            for key, value in cursor:
                partition, second = KEY.unpack(key)
                if partition != partition_id:
                    return None
                offset = self._time_entry(partition, second, value)
                for run in self.runs(partition_id, offset, oldest_position):
                    if run.append_time_ns >= time_ns:
                        return run.base_offset
                    break
        return None

    # -- forgetting --------------------------------------------------------------------------

    def drop_partition(self, partition_id: int) -> None:
        """Hide a partition at once; its entries go with the next sweeps."""
        self._sweep.dropped.add(partition_id)
        self._sweep.rewritten.discard(partition_id)
        self._sweep.start_over()

    def purge(self, partition_id: int, entries_max: int) -> bool:
        """Remove what is left of a partition that comes back, up to `entries_max` entries; True when
        nothing is and it is indexed again from here on."""
        if self._environment is not None and not self._purge_some(partition_id, entries_max):
            return False
        self._sweep.dropped.discard(partition_id)
        return True

    def _purge_some(self, partition_id: int, entries_max: int) -> bool:
        removed = 0
        try:
            self._grow_ahead(entries_max)
            with self._environment.begin(write=True) as transaction:
                for database in (self._offsets, self._times):
                    cursor = transaction.cursor(database)
                    cursor.set_range(KEY.pack(partition_id, 0))
                    while cursor.key() and KEY.unpack(cursor.key())[0] == partition_id:
                        if removed == entries_max:
                            return False
                        cursor.delete()
                        removed += 1
        except (lmdb.Error, OSError, struct.error) as fault:
            self._note(fault)
            return False
        return True

    def note_rewritten(self, partition_id: int) -> None:
        """Positions of a partition do not rise with its offsets."""
        self._sweep.rewritten.add(partition_id)

    def start_sweep(self, oldest_position: int) -> None:
        """Let `sweep` remove what lies below `oldest_position`."""
        self._sweep.start(oldest_position)

    def sweep(self, entries_max: int) -> int:
        """Remove up to `entries_max` entries, looking at no more partitions than that.

        Returns how many entries and partitions were looked at. 0: nothing is left to do.
        """
        if self._environment is None or self._sweep.is_done:
            return 0
        done = 0
        databases = self._offsets, self._times
        try:
            self._grow_ahead(entries_max)
            with self._environment.begin(write=True) as transaction:
                while done < entries_max and not self._sweep.is_done:
                    done += 1 + self._sweep.step(transaction, databases, entries_max - done)
        except (lmdb.Error, OSError, struct.error) as fault:
            self._note(fault)
            self._sweep.stop()  # the next trim starts again
        return done


def meta_crc(values: dict[bytes, bytes]) -> bytes:
    """Checksum of what the index says of itself."""
    return _CRC.pack(crc32c(b"".join(values.get(key, b"") + b"\0" for key in _META_KEYS)))


def _checks(*columns: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """`mix` of every row."""
    total = np.zeros(len(columns[0]), dtype=np.uint64)
    for column, mixer in zip(columns, MIXERS, strict=False):
        total += column.astype(np.int64).view(np.uint64) * np.uint64(mixer)
    mixed: np.ndarray[Any, Any] = (total ^ (total >> np.uint64(32))) & np.uint64(_MASK_32)
    return mixed


def _pairs(keys: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> list[tuple[bytes, bytes]]:
    """The rows of two arrays as (key, value) byte strings."""
    return list(zip(_rows(keys), _rows(values), strict=True))


def _rows(array: np.ndarray[Any, Any]) -> list[bytes]:
    """The rows of an array as byte strings."""
    rows: list[bytes] = array.view(f"V{array.dtype.itemsize}").tolist()
    return rows


def _seek(cursor: Any, partition_id: int, offset: int) -> bool:
    """Place the cursor at the entry that may contain `offset`, else at the next one."""
    found = cursor.set_range(KEY.pack(partition_id, offset))
    if found and cursor.key() == KEY.pack(partition_id, offset):
        return True
    before = cursor.prev() if found else cursor.last()
    if before and KEY.unpack(cursor.key())[0] == partition_id:
        return True
    return bool(cursor.set_range(KEY.pack(partition_id, offset)))
