"""Entries of the index: keys and values as LMDB has them, and how they are removed behind the trim.

    offset  partition_id u32 | base_offset u64     (big-endian)   -> position, bytes, span, time, check
    time    partition_id u32 | append_time_ns u64  (big-endian)   -> base_offset u64, check

Positions rise with offsets, so what lies below the trim comes first; only in a partition whose runs
were written again may survivors stand among what goes.
"""

from __future__ import annotations

import struct
from typing import Any

__all__ = ["KEY", "MIXERS", "PARTITION_ID_MAX", "TIME_VALUE", "VALUE", "Sweep", "mix"]

KEY = struct.Struct(">IQ")
VALUE = struct.Struct("<QIIqI")
TIME_VALUE = struct.Struct("<QI")
MIXERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93,
          0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)  # fmt: skip
"""Odd numbers without a pattern: a changed bit anywhere changes about half of the sum."""
MASK_64 = 0xFFFF_FFFF_FFFF_FFFF
PARTITION_ID_MAX = 0xFFFF_FFFF


def mix(*words: int) -> int:
    """32 bits that depend on every bit of the words."""
    total = sum(word * mixer for word, mixer in zip(words, MIXERS, strict=False)) & MASK_64
    return (total ^ (total >> 32)) & PARTITION_ID_MAX


class Sweep:
    """Removes entries of trimmed segments, and of partitions that were dropped, in bounded steps."""

    def __init__(self) -> None:
        self.dropped: set[int] = set()
        """Partitions of which nothing is left but entries."""
        self.rewritten: set[int] = set()
        """Partitions whose positions do not rise with their offsets."""
        self._next = PARTITION_ID_MAX + 1  # nothing to sweep
        self._offset = 0
        self._below = 0

    @property
    def is_done(self) -> bool:
        """Nothing is left to do."""
        return self._next > PARTITION_ID_MAX

    def start(self, oldest_position: int) -> None:
        """Remove what lies below `oldest_position`."""
        if oldest_position > self._below:
            self._below = oldest_position
            self.start_over()

    def start_over(self) -> None:
        """Go through all partitions again."""
        self._next = self._offset = 0

    def stop(self) -> None:
        """Leave the rest to the next start."""
        self._next = PARTITION_ID_MAX + 1

    def step(self, transaction: Any, databases: tuple[Any, Any], entries_max: int) -> int:
        """Go on with the next partition, and to the one behind it when it is done; how many entries
        were looked at. `databases`: by offset, by time."""
        offsets = transaction.cursor(databases[0])
        if not offsets.set_range(KEY.pack(self._next, self._offset)):
            self.stop()
            self.dropped.clear()
            return 0
        partition_id = KEY.unpack(offsets.key())[0]
        if partition_id in self.rewritten and partition_id not in self.dropped:
            done = self._sweep_everywhere(transaction, databases[1], offsets, entries_max)
        else:
            times = transaction.cursor(databases[1])
            done = self._sweep_front(times, offsets, entries_max)
        if done < 0:
            self._next, self._offset = partition_id + 1, 0
            return ~done
        return done

    def _sweep_front(self, times: Any, offsets: Any, entries_max: int) -> int:
        """Remove entries up to the first survivor; how many, inverted if that was all."""
        partition_id = KEY.unpack(offsets.key())[0]
        dropped = partition_id in self.dropped
        times.set_range(KEY.pack(partition_id, 0))
        for removed in range(entries_max):
            partition, base_offset = KEY.unpack(offsets.key()) if offsets.key() else (-1, 0)
            if partition != partition_id:
                return ~removed
            if not dropped and VALUE.unpack(offsets.value())[0] >= self._below:
                return ~removed
            offsets.delete()
            while times.key() and KEY.unpack(times.key())[0] == partition_id:
                if TIME_VALUE.unpack(times.value())[0] > base_offset:
                    break
                times.delete()
        return entries_max

    def _sweep_everywhere(
        self, transaction: Any, times: Any, offsets: Any, entries_max: int
    ) -> int:
        """Look at up to `entries_max` entries; how many, inverted if that was all. A time whose first
        run goes is the next run's of the same time."""
        partition_id = KEY.unpack(offsets.key())[0]
        for looked_at in range(entries_max):
            partition, base_offset = KEY.unpack(offsets.key()) if offsets.key() else (-1, 0)
            if partition != partition_id:
                return ~looked_at
            self._next, self._offset = partition_id, base_offset + 1
            position, _, _, time_ns, _ = VALUE.unpack(offsets.value())
            if position >= self._below:
                offsets.next()
                continue
            offsets.delete()
            key = KEY.pack(partition_id, max(time_ns, 0))
            value = transaction.get(key, db=times)
            if value is None or TIME_VALUE.unpack(value)[0] != base_offset:
                continue
            transaction.delete(key, db=times)
            if offsets.key() and KEY.unpack(offsets.key())[0] == partition_id:
                following, its_time_ns = (
                    KEY.unpack(offsets.key())[1],
                    VALUE.unpack(offsets.value())[3],
                )
                if its_time_ns == time_ns:
                    check = mix(partition_id, following, max(time_ns, 0))
                    transaction.put(key, TIME_VALUE.pack(following, check), db=times)
        return entries_max
