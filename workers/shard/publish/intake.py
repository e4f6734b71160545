"""PUBLISH on its way in: bundles through the admission kernel into the open groups.

    bundle --kernel--> result rows --> logged frames: journal's open group
                                   --> memory frames: visible at the end of the turn
                                   --> refused frames: their status

One call a bundle; the rows of all bundles of a turn stand one behind the other until every open
group is written.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from danube_fast.broker.admission import admission
from danube_fast.broker.admission.layout import INT64_MAX, Mode, PartitionWord
from danube_fast.broker.admission.tables import AdmissionTables
from danube_fast.broker.partition import Partition
from danube_fast.broker.records import Reserved
from danube_fast.broker.subscription.consumer import Stored
from danube_fast.config import Settings
from danube_fast.errors import AlreadyExists, InvalidArgument, ResourceExhausted, Status
from danube_fast.frame.check import describe_fault
from danube_fast.frame.kernel import address_of, direct
from danube_fast.frame.layout import (
    AT_BUNDLE_FRAME_COUNT,
    BUNDLE_ENTRY_BYTES,
    BUNDLE_HEADER_BYTES,
    FRAME_BYTES_CAP,
)
from danube_fast.net.greeting import bundle_bytes_max
from danube_fast.ring.counters import HISTOGRAM_WORDS, observe
from danube_fast.workers.shard.publish.group import Group
from danube_fast.workers.shard.publish.journal import Journal, Publication

__all__ = ["Intake"]

_admit = direct(admission.admit)

PARTITION_ID_BYTES = 4
BUNDLE_SHARE_MIN = 4
"""A frame that stays in memory for long is copied if it is less than this part of its bundle."""
LAG_BYTES_MAX = 8 * 1024 * 1024
"""How far consumers of a non_reliable topic may be behind before acks of its producers wait a little."""
FLOOD_BYTES_MIN = 128 * 1024
"""Only acks of larger bundles wait: a producer at a modest rate waits for no consumer."""
ACK_WAIT_NS_MAX = 50_000_000
STILL_NS = 250_000_000
"""No producer waits for a consumer that took nothing for so long."""
_U32 = struct.Struct("<I")
_START = struct.Struct("<II")
"""How many frames a bundle has, and the partition of the first."""
_MODE = int(PartitionWord.MODE)
_MEMORY = int(Mode.MEMORY)
REFUSALS = {
    AlreadyExists.code: "accepted before, but too long ago to name its offset: only the last 64 "
    "batches of a producer are remembered",
    Status.FENCED: "the producer is not open on this session, or a newer one of its name took over",
    Status.NOT_OWNER: "this worker does not own the partition; look the topic up again",
    Status.OUT_OF_SEQUENCE: "an earlier batch of this producer is missing; send that one first",
}
Outcome = tuple[int, list[int]]
"""Request number of a PUBLISH, and status and offset of each of its frames, flat."""
OK = Status.OK
DUPLICATE = Status.DUPLICATE
TOLD = (OK, DUPLICATE, Status.THROTTLED)
"""Statuses that a number follows: an offset, or a time."""


def _invalid_text(fault: int) -> str:
    if fault == admission.OVERLAP:
        return (
            "some of the frame's messages were accepted before and some were not; a resend must be "
            "cut into the same frames as the first time"
        )
    if fault == admission.FRAME_TOO_LARGE:
        return (
            f"a frame of several messages may have {FRAME_BYTES_CAP} bytes; send fewer messages in "
            "it (one message alone may be larger)"
        )
    return f"damaged frame: {describe_fault(fault)}; see docs/protocol.md"


class Intake:
    """Admit bundles for one worker."""

    def __init__(
        self, tables: AdmissionTables, journals: dict[int, Journal], settings: Settings
    ) -> None:
        self.tables, self.journals = tables, journals
        self.apply(settings)
        self.partitions_by_slot: dict[int, Partition] = {}
        self.partitions_by_id: dict[int, Partition] = {}
        self.result_index = 0
        self.memory_entries: list[tuple[Partition, Stored]] = []
        """Frames that are visible at the end of this turn."""
        self._unsafe: dict[int, deque[tuple[int, Stored | None, Publication]]] = {}
        """By partition: frames that wait for a durable reservation of their offsets, by their end;
        and resends of such."""
        self.touched: dict[int, Partition] = {}
        """Partitions that reserve offsets and took messages lately."""
        self.forward: Callable[[Publication, int, int, memoryview], bool] = lambda *_: False
        """See `Forwarder.publish`."""
        self.charge: Callable[[Partition, Any, int, int], None] = lambda *_: None
        self.wait_ms: Callable[[Partition], int] = lambda _: 0
        """See `Limits`."""
        self.namespace_text: Callable[[Partition], str] = lambda _: ""
        """See `Namespaces.full_text`."""
        self.answered: list[Publication] = []
        """Publications that are ready to be answered."""
        self.put_off: deque[tuple[int, Partition, Publication]] = deque()
        """Publications to non_reliable topics whose ack waits for consumers that are close behind, at
        most until a monotonic time: better a short wait than a loss."""
        self._now_ns = 0
        self.ack_times = [0] * HISTOGRAM_WORDS
        """How long publishes waited for a log: the words of `Histogram.ACK`."""
        self.bundles_in = self.frames_in = self.messages_in = self.bytes_in = 0
        self.frames_answered = self.duplicates = self.refused = 0

    def apply(self, settings: Settings) -> None:
        """Take over how large a bundle may be, and from when on a consumer is too far behind to wait for."""
        self.bundle_bytes_max = bundle_bytes_max(settings)
        self.lag_bytes_hopeless = settings.tail_bytes_max // 4 * 3

    def begin_turn(self, now_ns: int) -> None:
        """Reuse the result rows if no group needs them any more. `now_ns` is monotonic."""
        self._now_ns = now_ns
        for journal in self.journals.values():
            if journal.has_open_group:
                return
        self.result_index = 0

    def note_time(self, now_ns: int) -> None:
        """Note the time within a turn, monotonic."""
        self._now_ns = now_ns

    @property
    def is_busy(self) -> bool:
        """Whether frames wait to be shown, or publications to be answered."""
        return bool(self.answered or self.memory_entries or self.put_off)

    def publish(
        self, publication: Publication, part: zmq.Frame | bytes | bytearray, now_ns: int
    ) -> None:
        """Admit one bundle."""
        buffer = part.buffer if isinstance(part, zmq.Frame) else part
        size = len(buffer)
        if size > self.bundle_bytes_max:
            limit = self.bundle_bytes_max
            text = f"a bundle of {size} bytes is over the limit of {limit}; send less"
            self._refuse_bundle(publication, text)
            return
        if not self._stays_in_memory(buffer):
            for journal in self.journals.values():
                journal.reserve(size)
        self._admit_from(publication, part, buffer, 0, now_ns)

    def admitted(
        self, publication: Publication, part: bytes, rows: list[list[int]], now_ns: int
    ) -> None:
        """Take a bundle that was admitted already, with its result rows from `result_index` on."""
        count = len(rows)
        skip = self._sort(publication, part, part, rows, count, 0)
        if skip == count:
            self._end_bundle(publication, len(part), count)
        else:
            self._admit_from(publication, part, part, skip, now_ns)

    def _admit_from(
        self, publication: Publication, part: Any, buffer: Any, skip: int, now_ns: int
    ) -> None:
        """Admit the frames of a bundle from number `skip` on."""
        size = len(buffer)
        while True:
            first = self.result_index
            count = _admit(
                self.tables.address, address_of(buffer), size, publication.session, first, skip,
                now_ns,
            )  # fmt: skip
            if count == admission.TOO_MANY_FRAMES:
                self._make_room(buffer, size)
                continue
            if count < 0:
                text = f"damaged bundle: {describe_fault(count)}; see docs/protocol.md"
                self._refuse_bundle(publication, text)
                return
            rows = self.tables.results[first + skip : first + count].tolist()
            skip = self._sort(publication, part, buffer, rows, count, skip)
            if skip == count:
                break
        self._end_bundle(publication, size, count)

    def _end_bundle(self, publication: Publication, size: int, count: int) -> None:
        self.result_index += count
        self.bytes_in += size
        self.bundles_in += 1
        self.release(publication)

    def _stays_in_memory(self, buffer: Any) -> bool:
        """Whether a bundle is one frame for a partition that writes to no log: then no log needs room."""
        if len(buffer) < AT_BUNDLE_FRAME_COUNT + _START.size:
            return False
        count, partition_id = _START.unpack_from(buffer, AT_BUNDLE_FRAME_COUNT)
        partition = self.partitions_by_id.get(partition_id) if count == 1 else None
        if partition is None:
            return False
        # the same word that the kernel reads, even while settings change
        return bool(self.tables.partitions[partition.slot, _MODE] == _MEMORY)

    def _make_room(self, buffer: Any, size: int) -> None:
        """Write the open groups, which frees their result rows; grow the table if need be."""
        frame_count = _U32.unpack_from(buffer, AT_BUNDLE_FRAME_COUNT)[0]
        for journal in self.journals.values():
            journal.write()
        self.result_index = 0
        if frame_count > len(self.tables.results):
            self.tables.grow_results(frame_count)
        for journal in self.journals.values():
            journal.reserve(size)

    def _refuse_bundle(self, publication: Publication, text: str) -> None:
        publication.statuses, publication.texts = (
            [InvalidArgument.code, 0],
            {InvalidArgument.code: text},
        )
        self.refused += 1
        self.release(publication)

    def _sort(
        self, publication: Publication, part: Any, buffer: Any, rows: list[list[int]], count: int,
        skip: int,
    ) -> int:  # fmt: skip
        """Look at the result rows from number `skip` on; returns where admission has to go on, or `count`."""
        first = self.result_index
        statuses = publication.statuses
        for index, row in enumerate(rows, skip):
            status = row[0]
            stopped = status == admission.NEED_RESERVATION
            if status == OK:
                self._accepted(publication, part, index, count, first + index, row)
            elif status == DUPLICATE:
                self.duplicates += 1
                partition = self.partitions_by_slot[row[1]]
                unsafe = self._unsafe.get(partition.partition_id)
                if unsafe:
                    publication.pending += 1
                    unsafe.append((unsafe[-1][0], None, publication))
                elif partition.logged:
                    journal = self.journals[partition.log_slot]
                    journal.wait_for_original(publication, len(statuses))
            elif stopped:
                partition = self.partitions_by_slot[row[1]]
                stuck = self.journals[partition.log_slot].stuck
                if stuck is None and self.reserve_offsets(partition, urgent=True):
                    return index
                status = ResourceExhausted.code
                publication.texts[status] = f"no more offsets could be reserved: {stuck}"
            elif status == Status.NOT_OWNER and self._forward(publication, buffer, index, row):
                status = OK
            elif status == Status.THROTTLED:
                row[2] = self.wait_ms(self.partitions_by_slot[row[1]])
            else:
                self._explain(publication, status, row)
            statuses.append(status)
            statuses.append(row[2] if status in TOLD else 0)
            if stopped:
                return index + 1
        return count

    def _forward(self, publication: Publication, buffer: Any, index: int, row: list[int]) -> bool:
        """Pass a frame on to the worker that owns its partition, if that is known."""
        entry = BUNDLE_HEADER_BYTES + index * BUNDLE_ENTRY_BYTES
        partition_id = int.from_bytes(buffer[entry : entry + PARTITION_ID_BYTES], "little")
        frame = memoryview(buffer)[row[4] : row[4] + row[5]]
        return self.forward(publication, len(publication.statuses), partition_id, frame)

    def _accepted(
        self, publication: Publication, part: Any, index: int, count: int, result_index: int,
        row: list[int],
    ) -> None:  # fmt: skip
        _, slot, offset, messages, start, frame_bytes, position, _, _, _, flags, producer_id = row
        partition = self.partitions_by_slot[slot]
        stored = Stored(
            partition.partition_id, offset, offset + messages, messages, frame_bytes,
            producer_id, part, start, index, count, is_delayed=flags != 0,
        )  # fmt: skip
        self.frames_in += 1
        self.messages_in += messages
        if partition.rate is not None:
            self.charge(partition, partition.rate, messages, frame_bytes)
        if position < 0:
            self.touched[partition.partition_id] = partition
            if partition.keeps_memory and frame_bytes * BUNDLE_SHARE_MIN < len(part):
                stored.holder = bytes(
                    memoryview(getattr(part, "buffer", part))[start:][:frame_bytes]
                )
                stored.start = stored.index = stored.bundle_frames = 0
            self._show_when_safe(publication, partition, stored)
            return
        group = self.journals[partition.log_slot].open_group(self._now_ns)
        place = len(publication.statuses)
        group.entries.append((partition, stored, result_index, publication, place))
        buffers = group.buffers
        end = start + frame_bytes
        if buffers and buffers[-1][0] is part and buffers[-1][2] == start:
            buffers[-1] = (part, buffers[-1][1], end)
        else:
            buffers.append((part, start, end))
        group.byte_count += frame_bytes
        strict = partition.strict
        if not strict:
            self.touched[partition.partition_id] = partition
            # without a durable reservation of its offset, or behind a frame that waits for a sync,
            # a frame of an `os` topic waits too
            strict = stored.end_offset > partition.safe_until
            strict = strict or partition.strict_end > partition.visible
        if not strict:
            group.written_entries.append((partition, stored))
            waiting = group.on_written
        else:
            partition.await_sync(stored.end_offset)
            group.synced_entries.append((partition, stored))
            group.needs_sync = True
            waiting = group.on_synced
        if not waiting or waiting[-1] is not publication:
            waiting.append(publication)
            publication.pending += 1

    def _show_when_safe(
        self, publication: Publication, partition: Partition, stored: Stored
    ) -> None:
        """Show a frame that is kept in memory: now, or when its offsets are reserved durably."""
        if stored.end_offset <= partition.safe_until:
            self.memory_entries.append((partition, stored))
            bundle: Any = stored.holder
            flood = not partition.reliable and len(bundle) >= FLOOD_BYTES_MIN
            if flood and self._is_followed(partition):
                self.put_off.append((self._now_ns + ACK_WAIT_NS_MAX, partition, publication))
                publication.pending += 1
            return
        publication.pending += 1
        unsafe = self._unsafe.setdefault(partition.partition_id, deque())
        unsafe.append((stored.end_offset, stored, publication))

    def _is_followed(self, partition: Partition) -> bool:
        """Whether the last of the consumers is behind and moving, and nothing was lost to it yet."""
        behind, still_ns = partition.watch_lag(self._now_ns)
        return still_ns < STILL_NS and LAG_BYTES_MAX < behind < self.lag_bytes_hopeless

    def answer(self, group: Group, publications: list[Publication]) -> None:
        """Release publications that waited for a group to be written, or synced."""
        if publications and group.began_ns:
            observe(self.ack_times, self._now_ns - group.began_ns, len(publications))
        for publication in publications:
            self.release(publication)

    def take_answers(self) -> tuple[dict[int, list[Outcome]], dict[int, dict[int, str]]]:
        """Take the outcomes of finished publications, and the texts of refusals, by session."""
        by_session: dict[int, list[Outcome]] = {}
        texts: dict[int, dict[int, str]] = {}
        answered, self.answered = self.answered, []
        for publication in answered:
            if publication.done is not None:
                publication.done(publication)
                continue
            outcome = (publication.request, publication.statuses)
            by_session.setdefault(publication.session, []).append(outcome)
            self.frames_answered += len(publication.statuses) // 2
            if publication.texts:
                texts.setdefault(publication.session, {}).update(publication.texts)
        return by_session, texts

    def answer_put_off(self) -> None:
        """Answer publications that were put off, once consumers have caught up or the time is over."""
        put_off = self.put_off
        while put_off:
            until_ns, partition, publication = put_off[0]
            if self._now_ns < until_ns and partition.lag()[0] > LAG_BYTES_MAX:
                return
            put_off.popleft()
            self.release(publication)

    def _show_safe(self, partition: Partition) -> None:
        """Show frames that waited for a durable reservation of their offsets."""
        waiting = self._unsafe.get(partition.partition_id)
        while waiting and waiting[0][0] <= partition.safe_until:
            _, stored, publication = waiting.popleft()
            if stored is not None:
                self.memory_entries.append((partition, stored))
            self.release(publication)

    def forget(self, partition: Partition) -> None:
        """Release all that waits for a partition that was removed."""
        self.touched.pop(partition.partition_id, None)
        for _, _, publication in self._unsafe.pop(partition.partition_id, ()):
            self.release(publication)

    def _explain(self, publication: Publication, status: int, row: list[int]) -> None:
        self.refused += 1
        if status == InvalidArgument.code:
            text = _invalid_text(row[2])
            if row[2] == admission.MESSAGE_TOO_LARGE:
                refusing = self.partitions_by_slot[row[1]]
                limit = refusing.policy.message_bytes_max
                text = (
                    f"{refusing.topic} takes messages of at most {limit} bytes (message_bytes_max "
                    "of its policy); send smaller ones, or raise it: danube-fast topics set-policy"
                )
        elif status == ResourceExhausted.code:
            partition = self.partitions_by_slot.get(row[1])
            text = ""
            if partition is not None:
                text = partition.refusal or self.journals[partition.log_slot].refusal
                if row[2] == admission.NAMESPACE_FULL:
                    text = self.namespace_text(partition)
        else:
            text = REFUSALS.get(status, "refused")
        publication.texts[status] = text

    def count_served(
        self, frames: int, byte_count: int, answered: int, logged: int, took_ns: int
    ) -> None:
        """Count bundles of one frame that kernels took and showed; `answered`, and `logged`, are those of them that
        were, within `took_ns`."""
        self.frames_in += frames
        self.bundles_in += frames
        self.bytes_in += byte_count
        self.frames_answered += answered
        if logged:
            observe(self.ack_times, took_ns, logged)

    def answer_served(self, session: int, request: int, offset: int) -> None:
        """Answer a bundle of one frame that a kernel showed and could not answer."""
        publication = Publication(session, request)
        publication.statuses = [OK, offset]
        self.release(publication)

    def release(self, publication: Publication) -> None:
        """Note the end of one step that a publication waits for; admission itself is one of them."""
        publication.pending -= 1
        if publication.pending == 0:
            self.answered.append(publication)

    # ------------------------------------------------------------ offsets

    def reserve_offsets(self, partition: Partition, *, urgent: bool = False) -> bool:
        """Reserve the next block of a partition's offsets in the log.

        With `urgent` the offsets can be used at once, by messages that wait for the record;
        otherwise when it is durable. False if the partition needs none.
        """
        words = self.tables.partitions[partition.slot]
        if int(words[PartitionWord.RESERVED_UNTIL]) == INT64_MAX:
            return False
        until = partition.next_reservation(int(words[PartitionWord.NEXT_OFFSET]))
        journal = self.journals[partition.log_slot]

        def use(error: Any = None) -> None:
            if error is not None:
                journal.wait_again(use)
                return
            allow()
            partition.note_reserved(until)
            self._show_safe(partition)

        def allow() -> None:
            row = self.tables.partitions[partition.slot]
            if row[PartitionWord.RESERVED_UNTIL] != INT64_MAX:
                row[PartitionWord.RESERVED_UNTIL] = max(
                    int(row[PartitionWord.RESERVED_UNTIL]), until
                )

        journal.record(Reserved(partition.partition_id, until), use)
        if urgent:
            allow()
        return True

    def needs_reservation(self, partition: Partition) -> bool:
        """Whether more than three quarters of the last block are used."""
        row = self.tables.partitions[partition.slot]
        if row[PartitionWord.MODE] == Mode.CLOSED:
            return False
        if row[PartitionWord.RESERVED_UNTIL] == INT64_MAX:
            return False
        left = partition.safe_until - int(row[PartitionWord.NEXT_OFFSET])
        return left < partition.reserve_block // 4
