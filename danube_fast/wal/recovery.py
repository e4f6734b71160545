"""Recovery: finds what a log still holds after its process ended, however it ended.

    snapshot position          cut                       end of the newest segment
         |---- frames, strict ----|???????????????????????????|
                                   ^ first position that is not a frame of this log

Behind the cut there may be nothing, stale bytes, or the leftovers of a group that was being
written: a torn tail, and it is cut. But if any valid header, in front of the cut or behind it, or
the name of a snapshot, says that the log was durable beyond the cut, then bytes that were
acknowledged are gone: a corrupt middle, and the log refuses to start until an operator has looked
(`danube-fast wal verify`). Never a silent start on less than was acknowledged.

A segment's file has its full size before it gets its name, and no crash takes that back: a walk that
comes to the end of a shorter file has met damage, whatever was durable.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from danube_fast.durable import sync_directory
from danube_fast.errors import DataLoss, FailedPrecondition, Internal
from danube_fast.wal.layout import SegmentHeader, SnapshotHeader
from danube_fast.wal.scan import ScanCode, describe_scan
from danube_fast.wal.segment import Chain
from danube_fast.wal.spares import SparePool
from danube_fast.wal.trims import trimmed_position
from danube_fast.wal.walk import Evidence, ReplayBlock, Walk, collect_evidence

__all__ = ["Corruption", "Recovery", "end_at_cut"]


class Corruption(NamedTuple):
    """Where bytes are missing that may have been acknowledged, and why.

    `synced_position`: the log was durable up to here once, as far as is known.
    """

    path: str
    position: int
    reason: str
    synced_position: int

    def __str__(self) -> str:
        known = ""
        if self.synced_position > self.position:
            known = f", but the log was durable up to position {self.synced_position}"
        return (
            f"{self.path} is damaged at position {self.position}: {self.reason}{known}; see what is "
            "lost with `danube-fast wal verify`, and go on without it with `wal verify --accept-loss`"
        )


class Recovery:
    """One pass over a log from its snapshot to the cut.

    After `blocks()` is exhausted: `cut`, and `epoch`, the highest ever seen.
    """

    def __init__(
        self,
        directory: Path,
        chain: Chain,
        log_id: int,
        snapshot: SnapshotHeader | None,
        named_position: int,
    ) -> None:
        self.directory = directory
        self.chain = chain
        self.log_id = log_id
        self.named_position = named_position
        self.start_position = snapshot.position if snapshot else chain.oldest_position
        self.has_snapshot = snapshot is not None
        self.start_epoch = self._start_epoch(snapshot)
        self.epoch = self.start_epoch
        self.cut: int | None = None
        self.evidence: Evidence | None = None

    def _start_epoch(self, snapshot: SnapshotHeader | None) -> int:
        """The epoch that the first frame must at least have.

        A snapshot says which epoch was in force at its position: without that, leftovers of an
        earlier torn group that stand exactly there would be taken.
        """
        epoch = snapshot.epoch if snapshot else 0
        index = self.chain.index_of(self.start_position)
        return max(epoch, self.chain[index].epoch) if index >= 0 else epoch

    def find_hole(self) -> Corruption | None:
        """A segment that is not there although its neighbours say it was. Looks at headers only."""
        chain = self.chain
        oldest = chain.oldest_position
        missing_from = "the segments from there on are missing"
        if not len(chain) or oldest > self.start_position or (oldest and not self.has_snapshot):
            if not self.named_position and not len(chain):
                return None
            missing = self.start_position if self.has_snapshot else 0
            reason = missing_from
            if not self.has_snapshot:
                reason = "there is no sound snapshot and the log does not start there"
            return Corruption(
                str(self.directory), missing, reason, max(self.named_position, oldest)
            )
        end = chain[-1].end_position
        if end < self.start_position:
            return Corruption(str(self.directory), end, missing_from, self.start_position)
        trimmed = trimmed_position(self.directory)
        if oldest > trimmed:
            return Corruption(str(self.directory), trimmed, missing_from, oldest)
        for index in range(1, len(chain)):
            before, after = chain[index - 1], chain[index]
            linked = after.previous_position in (None, before.first_position)
            if not linked or after.first_position > before.end_position:
                return Corruption(
                    str(after.path),
                    min(before.end_position, after.first_position),
                    "the segment before this one is missing",
                    after.first_position,
                )
        return None

    def _advise(self, advice: int) -> None:
        """Tell the kernel how the newest segment is read.

        Read-ahead into a part that was only allocated would make it look written, and all of it
        would be searched behind the cut: half a second instead of a few milliseconds.
        """
        if len(self.chain):
            os.posix_fadvise(self.chain[-1].open(), 0, 0, advice)

    def blocks(self) -> Iterator[ReplayBlock]:
        """Replay. Raises DataLoss at the end if the cut is below what was durable, or a file ends there."""
        self._advise(os.POSIX_FADV_RANDOM)
        walk = Walk(self.chain, self.log_id, self.start_position, self.start_epoch)
        yield from walk.blocks()
        if walk.code == ScanCode.VERSION:
            raise FailedPrecondition(
                f"the log in {self.directory} has frames of a newer format at position "
                f"{walk.position}: start the newer danube-fast that wrote them"
            )
        evidence = collect_evidence(self.chain, self.log_id, walk.position)
        self._advise(os.POSIX_FADV_NORMAL)
        self.evidence = evidence
        epochs = [segment.epoch for segment in self.chain]
        self.epoch = max(walk.epoch, evidence.epoch, *epochs, 0)
        synced = max(walk.synced, evidence.synced, self.named_position)
        if walk.position < synced or walk.met_short_file:
            path = walk.segment.path if walk.segment else self.directory
            corruption = Corruption(str(path), walk.position, describe_scan(walk.code), synced)
            raise DataLoss(str(corruption))
        self.cut = walk.position


def end_at_cut(chain: Chain, spares: SparePool, recovery: Recovery, wall_ns: int) -> None:
    """Make the log end at the cut: segments behind it leave, the rest is made whole and durable.

    What replay found may only be in the page cache (its writer was killed before it synced), so
    every segment from the snapshot on is synced. Raises Internal if the disk refuses.
    """
    cut = recovery.cut or 0
    try:
        while len(chain) and (chain[-1].first_position > cut or chain[-1].is_foreign):
            segment = chain.pop_last()
            segment.close()
            spares.give(segment.path, segment.file_bytes)
        if len(chain):
            newest = chain[-1]
            previous = chain[-2].first_position if len(chain) > 1 else newest.first_position
            header = SegmentHeader(
                log_id=recovery.log_id,
                first_position=newest.first_position,
                previous_position=previous,
                segment_bytes=newest.segment_bytes,
                created_ns=wall_ns,
                epoch=recovery.start_epoch,
            )
            newest.restore(header)
        for index in range(max(chain.index_of(recovery.start_position), 0), len(chain)):
            os.fdatasync(chain[index].open())
        sync_directory(recovery.directory)
    except OSError as fault:
        raise Internal(
            f"{recovery.directory} cannot be made durable: {fault.strerror}; check the disk"
        ) from fault
