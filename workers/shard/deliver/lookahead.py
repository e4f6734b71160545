"""Delayed messages: known before a consumer asks for them, in memory before they are due.

    restart, arrival   backlog of a subscription --frames--> due times, before its consumers are back
    every 100 ms       due within 1 s --frame--> all of the frame that is due within 30 s, cut out

A frame of a mebibyte is read once for what becomes due of it in half a minute, and never from the
disk while the loop waits: if it is not in the page cache, the system reads it meanwhile.
"""

from __future__ import annotations

import collections
import logging
from typing import NamedTuple

from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.consumer import PENDING, Read, Stored
from danube_fast.broker.subscription.subscription import Subscription
from danube_fast.clock import MILLISECOND_NS
from danube_fast.errors import DanubeError
from danube_fast.wal.index import Run
from danube_fast.workers.shard.read.frames import frames_of
from danube_fast.workers.shard.read.log_reader import LogReader
from danube_fast.workers.shard.read.places import first_run
from danube_fast.workers.shard.state import ShardState

__all__ = ["Lookahead"]

_log = logging.getLogger(__name__)

AHEAD_NS = 1000 * MILLISECOND_NS
"""Longer than a slow disk takes for a frame."""
CUT_AHEAD_NS = 30_000 * MILLISECOND_NS
KEPT_NS = 10_000 * MILLISECOND_NS
"""How long messages that were cut out wait for a consumer."""
INTERVAL_NS = 100 * MILLISECOND_NS
SOON_MS = 250
"""How often a worker looks when nothing else happens, while a message is due within AHEAD_NS."""
AGAIN_NS = 10 * MILLISECOND_NS
"""A frame that was not in the page cache is tried again after this time."""
FRAMES_AT_ONCE = 8
STEPS_PER_TURN = 32
LOOKUPS_MAX = 256
"""Frames that are looked up in the index at a time; the others are read when they are due."""
BYTES_PER_TURN = 4 * 1024 * 1024
READ_BYTES = 1024 * 1024
CUT_BYTES_MAX = 32 * 1024 * 1024
"""Cut out and not due yet, of all subscriptions; the others are read when they are due."""


class _Wanted(NamedTuple):
    """A run of frames, some messages of which become due for a subscription."""

    partition: Partition
    sub: Subscription
    run: Run
    until_ns: int
    """When it is of no use any more, monotonic."""


class Lookahead:
    """Read delayed messages of one worker ahead; used by its loop only."""

    def __init__(self, state: ShardState, reader: LogReader) -> None:
        self._state, self._reader = state, reader
        self._backlogs: collections.deque[Partition] = collections.deque()
        self._wanted: collections.deque[_Wanted] = collections.deque()
        self._done: dict[tuple[int, str, int], int] = {}
        """Partition, subscription, first offset of a run -> nothing that is due before is still to be
        cut out, wall clock."""
        self._holders: dict[Subscription, tuple[Partition, int]] = {}
        """Subscriptions with messages that were cut out, and since when."""
        self._is_fetching = False
        """Whether the next backlog is on its way from the disk."""
        self._cut_bytes = 0
        self._lookups_left = 0
        self._next_ns = self._again_ns = 0

    @property
    def is_busy(self) -> bool:
        """Whether there is more to look at now."""
        backlogs = self._backlogs and not self._is_fetching
        return bool(backlogs or (self._wanted and self._again_ns <= self._state.now_ns))

    def wake_ms(self, due_ms: int) -> int:
        """When a worker wants to wake up that has something to do in `due_ms`."""
        if self._wanted:
            return AGAIN_NS // MILLISECOND_NS
        lead_ms = AHEAD_NS // MILLISECOND_NS
        return due_ms - lead_ms if due_ms > lead_ms else min(due_ms, SOON_MS)

    def look_at(self, *partitions: Partition) -> None:
        """Look through partitions that were restored from a log, or came from another worker."""
        for partition in partitions:
            if any(sub.looks_ahead for sub in partition.subscriptions.values()):
                self._backlogs.append(partition)

    def do_work(self, now_ns: int) -> None:
        """Do a slice of the work."""
        if self._backlogs and not (self._is_fetching and self._reader.fetches):
            self._is_fetching = False
            self._look()
        while self._wanted and self._wanted[0].until_ns <= now_ns:
            self._wanted.popleft()
        if self._wanted and now_ns >= self._again_ns:
            self._read(self._wanted.popleft())
        if now_ns >= self._next_ns:
            self._next_ns = now_ns + INTERVAL_NS
            self._find()

    # ------------------------------------------------------------ backlogs

    def _look(self) -> None:
        state, partition = self._state, self._backlogs[0]
        stop = self._reader.bytes_read + BYTES_PER_TURN
        known = state.partition(partition.partition_id) is partition
        more = known and not partition.moving
        try:
            for _ in range(STEPS_PER_TURN):
                if not more or self._is_fetching or self._reader.bytes_read >= stop:
                    break
                more = partition.look_ahead(self._read_log, FRAMES_AT_ONCE, self._prefetch_next)
        except DanubeError as error:
            _log.warning("%s cannot be looked at: %s", partition.topic, error)
            more = False
        if not more:
            self._backlogs.popleft()

    def _read_log(self, partition: Partition, offset: int) -> Read:
        read = self._reader.read(partition, offset, READ_BYTES)
        self._is_fetching = read is PENDING
        return read

    def _prefetch_next(self, sub: Subscription, stored: Stored) -> int:
        """Cut out messages that are due, or nearly: a backlog is looked through fast, as consumers are coming back."""
        return self._prefetch(sub, stored, AHEAD_NS)

    def _prefetch(self, sub: Subscription, stored: Stored, ahead_ns: int = CUT_AHEAD_NS) -> int:
        """Cut out what is due soon; before which time nothing is left to be cut out of it."""
        now_ns, prefetched = self._state.now_wall_ns, sub.prefetched
        if self._cut_bytes >= CUT_BYTES_MAX:
            return now_ns + AHEAD_NS
        before = prefetched.byte_count
        done_ns = prefetched.prefetch(stored, now_ns + AHEAD_NS, now_ns + ahead_ns)
        self._cut_bytes += prefetched.byte_count - before
        partition = self._state.catalog.by_id[sub.partition_id]
        self._holders.setdefault(sub, (partition, self._state.now_ns))
        return done_ns

    # ------------------------------------------------------------ what is due soon

    def _find(self) -> None:
        """Find frames with messages that become due within AHEAD_NS."""
        state = self._state
        now_ns, wall_ns = state.now_ns, state.now_wall_ns
        self._lookups_left = LOOKUPS_MAX
        for sub in state.catalog.timers.soon(now_ns + AHEAD_NS):
            partition = state.partition(sub.partition_id)
            if sub.delays and sub.consumers and partition is not None and partition.logged:
                self._find_frames(
                    partition, sub, sub.delays.due_between(wall_ns, wall_ns + AHEAD_NS)
                )
        self._done = {key: until for key, until in self._done.items() if until > wall_ns}
        self._count_cut()

    def _count_cut(self) -> None:
        """Count what was cut out, and drop it where no consumer has come back."""
        now_ns, is_full = self._state.now_ns, self._cut_bytes >= CUT_BYTES_MAX
        for sub, (partition, since_ns) in list(self._holders.items()):
            is_waited_for = sub.consumers or now_ns - since_ns < KEPT_NS
            if not is_waited_for or not self._has(partition, sub):
                sub.prefetched.clear()
            elif is_full:
                sub.prefetched.prune()
            if not sub.prefetched:
                del self._holders[sub]
        self._cut_bytes = sum(sub.prefetched.byte_count for sub in self._holders)

    def _has(self, partition: Partition, sub: Subscription) -> bool:
        """Whether partition and subscription are still there."""
        known = self._state.partition(partition.partition_id) is partition
        return known and not partition.moving and partition.subscriptions.get(sub.name) is sub

    def _find_frames(self, partition: Partition, sub: Subscription, offsets: list[int]) -> None:
        oldest = partition.oldest_in_tail()
        log, wall_ns = self._state.logs[partition.log_slot], self._state.now_wall_ns
        end = 0
        for offset in offsets:
            if offset < end or offset in sub.prefetched:
                continue
            if oldest is not None and offset >= oldest.base_offset:
                break  # it is in memory
            if not self._lookups_left:
                break
            self._lookups_left -= 1
            run = first_run(log, partition, offset)
            if run is None:
                break
            end = run.end_offset
            key = (partition.partition_id, sub.name, run.base_offset)
            if self._done.get(key, 0) < wall_ns + AHEAD_NS:
                self._done[key] = wall_ns + 2 * AHEAD_NS  # once is enough
                until_ns = self._state.now_ns + AHEAD_NS
                self._wanted.append(_Wanted(partition, sub, run, until_ns))

    def _read(self, wanted: _Wanted) -> None:
        """Cut out of one run what is due soon, if the run is in the page cache."""
        partition, sub, run, _ = wanted
        state = self._state
        if not self._has(partition, sub):
            return
        try:
            data = self._reader.read_run(partition, run)
            if data is None:
                self._wanted.append(wanted)
                self._again_ns = state.now_ns + AGAIN_NS // len(self._wanted)
                return
            frames = [each for each in frames_of(partition.partition_id, data) if each.is_delayed]
            if frames:
                done_ns = min(self._prefetch(sub, stored) for stored in frames)
                self._done[partition.partition_id, sub.name, run.base_offset] = done_ns
        except DanubeError as error:
            _log.warning("%s cannot be looked at: %s", partition.topic, error)
