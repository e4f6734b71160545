"""Reads of history: the uploader fetches blocks into files of this host, and the worker reads those.

    read --> a chunk that is here: Ready, or a Gap
         --> else Pending; FetchHistory --> uploader --> a file; the partition is marked ready, and asks again

The worker never waits for a store. Some chunks are asked for before they are read.
"""

from __future__ import annotations

import collections

from danube_fast.broker import messages as m
from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.consumer import PENDING, Gap, Read, Ready
from danube_fast.clock import SECOND_NS
from danube_fast.errors import DanubeError, DataLoss, FailedPrecondition, Unavailable
from danube_fast.workers.process.mailbox import Reply
from danube_fast.workers.shard.history.chunks import Chunk, FileGone
from danube_fast.workers.shard.job import Job
from danube_fast.workers.shard.read.places import NEVER_USED, TRIMMED
from danube_fast.workers.shard.state import ShardState

__all__ = ["HistoryReads"]

CHUNKS_MAX = 64
"""Files that are open at a time, of all partitions."""
AHEAD = 3
"""Chunks that are here before they are read."""
FETCH_MS = 60_000
RETRY_NS = SECOND_NS
"""Pause after a fetch that failed."""
_FINAL = DataLoss, FailedPrecondition
"""Errors that readers are told of; after others they wait."""

Place = tuple[int, int]
"""Partition id and offset that were asked for."""


class HistoryReads(Job):
    """Read the history of the partitions of one worker."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._chunks: collections.OrderedDict[Place, Chunk] = collections.OrderedDict()
        """The ones that were read last stand at the end."""
        self._asked: dict[Place, bool] = {}
        """Fetches that are under way; whether a reader waits."""
        self._failed: dict[Place, tuple[DanubeError, int]] = {}
        """Fetches that failed, and when they may be tried again."""
        self._gone: dict[int, int] = {}
        """By partition id: history below was given up. The owner is told of that by the uploader, but not of what an
        older copy of its log has not seen; what that log has itself can be read."""
        self._empty: dict[int, tuple[int, int]] = {}
        """By partition id: from one offset to the other history has no message; of the place that was asked for last."""
        state.removal_listeners.append(self._forget)

    def read(self, partition: Partition, offset: int, end: int, byte_limit: int) -> Read:
        """Frames from `offset` on, about `byte_limit` bytes; the gap there, up to `end` at most; or PENDING.

        Raises DataLoss if the messages are lost.
        """
        chunk = self._find(partition.partition_id, offset)
        if chunk is None:
            gone_until = self._gone.get(partition.partition_id, 0)
            if offset < gone_until:
                return Gap(min(end, gone_until), TRIMMED, lost=True)
            empty_until = self._empty_until(partition.partition_id, offset)
            if empty_until:
                return Gap(min(end, empty_until), NEVER_USED)
            self._ask(partition, offset, is_waited_for=True)
            return PENDING
        self._ask_ahead(partition, chunk)
        if offset < chunk.base_offset:
            return Gap(min(end, chunk.base_offset), NEVER_USED)
        is_damaged, found = False, []
        try:
            found = chunk.read(offset, byte_limit)
        except DataLoss:  # the uploader tells what is lost
            is_damaged = True
        frames = [each for each in found if offset < each.end_offset <= partition.visible]
        if not frames:
            self._drop(partition.partition_id, chunk)
            self._ask(partition, offset, is_waited_for=True, is_damaged=is_damaged)
            return PENDING
        return Ready(frames)

    def _find(self, partition_id: int, offset: int) -> Chunk | None:
        for place in reversed(self._chunks):
            chunk = self._chunks[place]
            if place[0] == partition_id and chunk.start <= offset < chunk.end_offset:
                self._chunks.move_to_end(place)
                return chunk
        return None

    def _empty_until(self, partition_id: int, offset: int) -> int:
        """Find where history may have messages again; 0: it may have one at the offset."""
        start, end = self._empty.get(partition_id, (0, 0))
        return end if start <= offset < end else 0

    # ------------------------------------------------------------ fetching

    def _ask_ahead(self, partition: Partition, chunk: Chunk) -> None:
        """Ask for the first chunk behind one that is not here, so that some always are."""
        for _ in range(AHEAD):
            at = chunk.end_offset
            if at >= partition.uploaded.until or at < self._gone.get(partition.partition_id, 0):
                return
            following = self._find(partition.partition_id, at)
            if following is None and self._empty_until(partition.partition_id, at):
                return
            if following is None:
                self._ask(partition, at, is_waited_for=False)
                return
            chunk = following

    def _ask(
        self, partition: Partition, offset: int, *, is_waited_for: bool, is_damaged: bool = False
    ) -> None:
        place = partition.partition_id, offset
        error, until_ns = self._failed.get(place, (None, 0))
        if error is not None and self._state.now_ns < until_ns:
            if is_waited_for and isinstance(error, _FINAL):
                raise error
            return
        if place in self._asked:
            self._asked[place] |= is_waited_for
            return
        if not is_waited_for and self._find(*place) is not None:
            return
        uploader = self._state.boot.config.processes.uploader
        if uploader is None:
            raise FailedPrecondition(
                f"{partition.topic} has messages in history, and the broker was started without "
                "--store; start it with the store that it had"
            )
        self._asked[place] = is_waited_for
        uploaded = partition.uploaded
        message = m.FetchHistory(*place, uploaded.manifest, is_damaged)
        self._state.boot.mailbox.call(
            uploader,
            message,
            on_reply=lambda reply: self._answered(partition, offset, uploaded.until, reply),
            timeout_ms=FETCH_MS,
        )

    def _answered(self, partition: Partition, offset: int, until: int, reply: Reply) -> None:
        """Keep what has come for an offset; `until`: how far the partition was uploaded when it was asked for."""
        if self._state.partition(partition.partition_id) is not partition:
            return  # it has left; if it came back meanwhile, it has asked anew
        place = partition.partition_id, offset
        is_waited_for = self._asked.pop(place, False)
        try:
            fetched: m.FetchedHistory = reply.result()
            if fetched.blocks:
                self._add(place, Chunk(partition.partition_id, offset, fetched))
            elif offset < fetched.gone_until:
                self._gone[partition.partition_id] = fetched.gone_until
            elif offset < (empty_until := min(fetched.end_offset, until)):
                # what is uploaded meanwhile may stand behind that
                self._empty[partition.partition_id] = offset, empty_until
            else:
                raise Unavailable(f"history of {partition.topic} ends before offset {offset}")
        except (
            FileGone
        ):  # it may be in another object by now, or lost: the uploader looks at the manifest
            self._ask(partition, offset, is_waited_for=is_waited_for, is_damaged=True)
            return
        except DanubeError as error:
            self._failed[place] = error, self._state.now_ns + RETRY_NS
            if not isinstance(error, _FINAL):
                return  # `do_work` lets them ask again
        else:
            self._failed.pop(place, None)
        if is_waited_for:
            self._state.mark_ready(partition)

    def _add(self, place: Place, chunk: Chunk) -> None:
        old = self._chunks.pop(place, None)
        if old is not None:
            old.close()
        self._chunks[place] = chunk
        if len(self._chunks) > CHUNKS_MAX:
            _, oldest = self._chunks.popitem(last=False)
            oldest.close()

    def do_work(self, now_ns: int) -> None:
        """Let readers whose fetch has failed ask again."""
        for place, (_, until_ns) in list(self._failed.items()):
            if now_ns >= until_ns:
                del self._failed[place]
                partition = self._state.partition(place[0])
                if partition is not None:
                    self._state.mark_ready(partition)

    # ------------------------------------------------------------ forgetting

    def _drop(self, partition_id: int, chunk: Chunk) -> None:
        for place, each in list(self._chunks.items()):
            if each is chunk:
                del self._chunks[place]
        chunk.close()

    def _forget(self, partition: Partition) -> None:
        self._gone.pop(partition.partition_id, None)
        self._empty.pop(partition.partition_id, None)
        for place in [place for place in self._chunks if place[0] == partition.partition_id]:
            self._chunks.pop(place).close()
        for place in [place for place in self._failed if place[0] == partition.partition_id]:
            del self._failed[place]
        # An answer that is still to come wakes readers of this life of the partition alone.
        for place in [place for place in self._asked if place[0] == partition.partition_id]:
            del self._asked[place]
