"""The admission tables as numpy arrays: made, grown and edited here, between kernel calls.

Row access by name goes through the enums of `layout.py`. Growing an array moves it, so the state
block is refreshed whenever that happens; no other code may keep an address across a call.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from danube_fast.broker.admission import admission
from danube_fast.broker.admission.layout import (
    DEDUP_BATCHES,
    INT64_MAX,
    LOG_WORDS,
    PARTITION_WORDS,
    PRODUCER_WORDS,
    RESULT_WORDS,
    STATE_WORDS,
    WINDOW_WORDS,
    WORD_BYTES,
    LogWord,
    Mode,
    PartitionWord,
    ProducerWord,
    StateWord,
    WindowWord,
)
from danube_fast.frame.kernel import direct

__all__ = ["AdmissionTables"]

Words = NDArray[np.int64]
_LOG_ROW = struct.Struct(f"={len(LogWord)}q")
"""A row of `logs`: the words in the order of LogWord."""

_find = direct(admission.find_producer)
_insert = direct(admission.insert_producer)
_remember = direct(admission.remember_batch)
_undo = direct(admission.undo)


class AdmissionTables:
    """Everything that the admission kernel reads and writes, for one worker."""

    def __init__(self, *, results_max: int = 8192) -> None:
        """`results_max`: frames in one open group."""
        self.state: Words = np.zeros(STATE_WORDS, np.int64)
        self.partitions: Words = np.zeros((16, PARTITION_WORDS), np.int64)
        self.slot_of: Words = np.full(64, -1, np.int64)
        self.logs: Words = np.zeros((1, LOG_WORDS), np.int64)
        self.producers: Words = np.zeros((16, PRODUCER_WORDS), np.int64)
        self.windows: Words = np.zeros((16, DEDUP_BATCHES, WINDOW_WORDS), np.int64)
        self.hash: Words = np.zeros(64, np.int64)
        self.results: Words = np.zeros((results_max, RESULT_WORDS), np.int64)
        self.partition_count = 0
        self._free_producers: list[int] = []
        self.producer_count = 0
        self._publish()

    def _publish(self) -> None:
        """Refresh the addresses in the state block."""
        state = self.state
        state[StateWord.PARTITIONS] = self.partitions.ctypes.data
        state[StateWord.SLOT_OF] = self.slot_of.ctypes.data
        state[StateWord.SLOT_OF_COUNT] = len(self.slot_of)
        state[StateWord.LOGS] = self.logs.ctypes.data
        state[StateWord.PRODUCERS] = self.producers.ctypes.data
        state[StateWord.WINDOWS] = self.windows.ctypes.data
        state[StateWord.HASH] = self.hash.ctypes.data
        state[StateWord.HASH_MASK] = len(self.hash) - 1
        state[StateWord.RESULTS] = self.results.ctypes.data
        state[StateWord.RESULTS_MAX] = len(self.results)
        self.address = int(state.ctypes.data)

    # ------------------------------------------------------------ partitions

    def add_partition(self, partition_id: int, log_slot: int, mode: Mode) -> int:
        """A row for a partition; returns its slot. Offsets start at 0, nothing is reserved."""
        if partition_id >= len(self.slot_of):
            grown = np.full(max(2 * len(self.slot_of), partition_id + 1), -1, np.int64)
            grown[: len(self.slot_of)] = self.slot_of
            self.slot_of = grown
        slot = self.partition_count
        self.partition_count += 1
        if slot == len(self.partitions):
            self.partitions = np.concatenate([self.partitions, np.zeros_like(self.partitions)])
        row = self.partitions[slot]
        row[:] = 0
        row[PartitionWord.PARTITION_ID] = partition_id
        row[PartitionWord.MODE] = mode
        row[PartitionWord.LOG_SLOT] = log_slot
        row[PartitionWord.RESERVED_UNTIL] = INT64_MAX
        self.slot_of[partition_id] = slot
        self._publish()
        return slot

    def unlist_partition(self, partition_id: int) -> None:
        """Answer frames for a partition with NOT_OWNER: it is elsewhere."""
        self.slot_of[partition_id] = -1

    def remove_producers_of(self, partition_id: int) -> None:
        """Forget the producers of a partition that was deleted. Its row stays, to refuse for it."""
        used = self.producers[: self.producer_count, ProducerWord.PARTITION_ID] == partition_id
        self.remove_producers(np.flatnonzero(used).tolist())

    # ------------------------------------------------------------ producers

    def find_producer(self, partition_id: int, producer_id: int) -> int:
        """Slot of a producer, or -1."""
        if min(partition_id, producer_id) < 0 or max(partition_id, producer_id) > INT64_MAX:
            return -1  # a client's numbers, which need not fit a kernel
        return int(_find(self.address, partition_id, producer_id))

    def add_producer(self, partition_id: int, producer_id: int) -> int:
        """A row for a new producer; returns its slot. Its next sequence is 0."""
        if self._free_producers:
            slot = self._free_producers.pop()
        else:
            slot = self.producer_count
            self.producer_count += 1
            if slot == len(self.producers):
                self.producers = np.concatenate([self.producers, np.zeros_like(self.producers)])
                self.windows = np.concatenate([self.windows, np.zeros_like(self.windows)])
        row = self.producers[slot]
        row[:] = 0
        row[ProducerWord.PARTITION_ID] = partition_id
        row[ProducerWord.PRODUCER_ID] = producer_id
        row[ProducerWord.SESSION] = -1
        if 2 * self.producer_count >= len(self.hash):
            self._rehash(2 * len(self.hash))
        else:
            self._publish()
            _insert(self.address, slot)
        return slot

    def remove_producers(self, slots: list[int]) -> None:
        """Forget producers (expired ones)."""
        for slot in slots:
            self.producers[slot] = 0
            self._free_producers.append(slot)
        if slots:
            self._rehash(len(self.hash))

    def _rehash(self, cells: int) -> None:
        """Rebuild the hash table; a row with partition id 0 is free."""
        self.hash = np.zeros(cells, np.int64)
        self._publish()
        for slot in np.flatnonzero(
            self.producers[: self.producer_count, ProducerWord.PARTITION_ID]
        ):
            _insert(self.address, int(slot))

    def announce(self, slot: int, consumer: int) -> None:
        """Note which consumer, by its number, was told the name of a producer last."""
        self.producers[slot, ProducerWord.ANNOUNCED] = consumer

    def remember(self, slot: int, base_sequence: int, message_count: int, base_offset: int) -> None:
        """Record a batch of a producer, as replay finds it in the log."""
        _remember(self.address, slot, base_sequence, message_count, base_offset)

    def window(self, slot: int) -> list[int]:
        """The remembered batches, oldest first: flat [base_sequence, count, base_offset, ...]."""
        batches = int(self.producers[slot, ProducerWord.BATCH_COUNT])
        known = self.windows[slot]
        oldest = batches % DEDUP_BATCHES if batches > DEDUP_BATCHES else 0
        older: list[int] = known[oldest : min(batches, DEDUP_BATCHES)].reshape(-1).tolist()
        newer: list[int] = known[:oldest].reshape(-1).tolist()
        return older + newer

    def restore_window(self, slot: int, flat: list[int], next_sequence: int) -> None:
        """Put a window back, as `window` gave it."""
        for i in range(0, len(flat), WINDOW_WORDS):
            place = i // WINDOW_WORDS % DEDUP_BATCHES
            self.windows[slot, place, WindowWord.BASE_SEQUENCE] = flat[i]
            self.windows[slot, place, WindowWord.MESSAGE_COUNT] = flat[i + 1]
            self.windows[slot, place, WindowWord.BASE_OFFSET] = flat[i + 2]
        self.producers[slot, ProducerWord.BATCH_COUNT] = len(flat) // WINDOW_WORDS
        self.producers[slot, ProducerWord.NEXT_SEQUENCE] = next_sequence

    # ------------------------------------------------------------ results

    def grow_results(self, count: int) -> None:
        """Room for a bundle of `count` frames; the rows that are there are lost."""
        self.results = np.zeros((count, RESULT_WORDS), np.int64)
        self._publish()

    def undo(self, index: int) -> None:
        """Take the accepted frame of result row `index` back. Newest first, if there are several."""
        _undo(self.address, int(self.results.ctypes.data) + index * RESULT_WORDS * WORD_BYTES)

    # ------------------------------------------------------------ logs

    def add_log(self, slot: int) -> None:
        """Have a row for a log."""
        if slot >= len(self.logs):
            self.logs = np.concatenate([self.logs, np.zeros_like(self.logs)])
            self._publish()
            self.add_log(slot)

    def set_log(self, slot: int, log_id: int, position: int, epoch: int, synced: int) -> None:
        """Set what the kernel stamps, and where the next frame goes."""
        # for every bundle: assigning to an array costs four times as much
        _LOG_ROW.pack_into(self.logs.data, slot * _LOG_ROW.size, log_id, position, epoch, synced)
