"""Looking at a log from outside: what `danube-fast wal inspect` and `wal verify` print.

`inspect_log` reads headers only, takes no lock and may look at a log that is in use. `verify_log`
takes the lock and checks every byte from the oldest segment on; with `accept_loss` it repairs what
it finds (repair.py) and records what was lost.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from danube_fast.errors import DataLoss, NotFound
from danube_fast.frame.layout import HEADER_BYTES, HEADER_DTYPE, At
from danube_fast.wal.layout import (
    LOSSES_NAME,
    SEGMENT_HEADER_BYTES,
    SEGMENT_SUFFIX,
    SPARE_PREFIX,
)
from danube_fast.wal.lock import LogLock
from danube_fast.wal.repair import Damage, Loss, read_losses, repair
from danube_fast.wal.scan import ScanCode, describe_scan
from danube_fast.wal.segment import Chain, Segment, list_segments
from danube_fast.wal.snapshot import list_snapshots, read_snapshot
from danube_fast.wal.trims import trimmed_position
from danube_fast.wal.walk import Walk, collect_evidence, next_group, read_at

__all__ = [
    "LogReport",
    "SegmentReport",
    "SnapshotReport",
    "VerifyReport",
    "inspect_log",
    "verify_log",
]

_LOCK_TIMEOUT_MS = 1000


class SegmentReport(msgspec.Struct, frozen=True):
    """One segment: positions [first_position, end_position), file size, health of the header."""

    path: str
    first_position: int
    end_position: int
    file_bytes: int
    epoch: int
    fault: str | None


class SnapshotReport(msgspec.Struct, frozen=True):
    """One snapshot; `clean`: written by an orderly stop."""

    path: str
    position: int
    state_bytes: int
    clean: bool
    epoch: int
    created_ns: int
    fault: str | None


class LogReport(msgspec.Struct, frozen=True):
    """The contents of a log's folder."""

    directory: str
    log_id: int | None
    oldest_position: int
    segments: list[SegmentReport]
    snapshots: list[SnapshotReport]
    spare_segments: int
    bytes_on_disk: int
    losses: list[Loss]


class VerifyReport(msgspec.Struct, frozen=True):
    """The result of reading every byte of a log.

    `cut`: where the log ends. `synced_position`: known to have been durable. `faults`: damage below
    that, in order. `torn`: what stands at the cut, None if nothing does. `repaired`: the faults were
    accepted as lost.
    """

    directory: str
    log_id: int | None
    frames: int
    messages: int
    first_position: int
    cut: int
    epoch: int
    synced_position: int
    faults: list[Damage]
    torn: str | None
    repaired: bool


def inspect_log(directory: str | os.PathLike[str]) -> LogReport:
    """Headers, sizes, health. Raises NotFound if there is no log, FailedPrecondition if newer."""
    path = _existing(directory)
    chain = Chain(list_segments(path, SEGMENT_HEADER_BYTES))
    segments = [
        SegmentReport(
            str(segment.path),
            segment.first_position,
            chain.end_of(index),
            segment.file_bytes,
            segment.epoch,
            segment.fault,
        )
        for index, segment in enumerate(chain)
    ]
    names = os.listdir(path)
    spares = [
        name for name in names if name.startswith(SPARE_PREFIX) and name.endswith(SEGMENT_SUFFIX)
    ]
    total = sum(_size(path / name) for name in names)
    return LogReport(
        directory=str(path),
        log_id=_log_id(chain),
        oldest_position=chain.oldest_position,
        segments=segments,
        snapshots=_snapshot_reports(path),
        spare_segments=len(spares),
        bytes_on_disk=total,
        losses=read_losses(path / LOSSES_NAME),
    )


def _existing(directory: str | os.PathLike[str]) -> Path:
    path = Path(directory)
    if not path.is_dir() or not any(name.endswith(SEGMENT_SUFFIX) for name in os.listdir(path)):
        raise NotFound(f"there is no log in {path}; name the folder that holds its .seg files")
    return path


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size if path.is_file() else 0
    return 0


def _log_id(chain: Chain) -> int | None:
    return next((segment.log_id for segment in chain if segment.log_id is not None), None)


def _snapshot_reports(directory: Path) -> list[SnapshotReport]:
    reports = []
    for position, path in reversed(list_snapshots(directory)):
        try:
            header = read_snapshot(path).header
        except DataLoss as fault:
            size = _size(path)
            reports.append(SnapshotReport(str(path), position, size, False, 0, 0, str(fault)))
            continue
        reports.append(
            SnapshotReport(
                path=str(path),
                position=position,
                state_bytes=header.state_bytes,
                clean=header.clean,
                epoch=header.epoch,
                created_ns=header.created_ns,
                fault=None,
            )
        )
    return reports


class _Verifier:
    """Walks a log over its damage and collects it."""

    def __init__(
        self,
        directory: Path,
        chain: Chain,
        log_id: int,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self.directory = directory
        self.chain = chain
        self._on_progress = on_progress
        self._bytes = sum(chain.end_of(index) - chain[index].first_position
                          for index in range(len(chain)))  # fmt: skip
        self.log_id = log_id
        self.named_position = max((at for at, _ in list_snapshots(directory)), default=0)
        self.frames = 0
        self.messages = 0
        self.epoch = 0
        self.synced = self.named_position
        self.cut = chain.oldest_position
        self.torn: str | None = None

    def faults(self) -> Iterator[Damage]:
        """Damage below what was durable, in order; the walk goes on behind each."""
        yield from self._front()
        yield from self._headers()
        position = self.chain.oldest_position
        epoch = self.chain[0].epoch if len(self.chain) else 0
        while True:
            walk = Walk(self.chain, self.log_id, position, epoch)
            for block in walk.blocks():
                self.frames += len(block.rows)
                self.messages += int(block.rows["message_count"].sum())
                if self._on_progress is not None:
                    self._on_progress(walk.position - self.chain.oldest_position, self._bytes)
            self.cut, epoch = walk.position, walk.epoch
            evidence = collect_evidence(self.chain, self.log_id, self.cut)
            self.synced = max(self.synced, walk.synced, evidence.synced)
            self.epoch = max(self.epoch, epoch, evidence.epoch)
            if self.cut >= self.synced and not walk.met_short_file:
                self.torn = None if walk.code == ScanCode.END else describe_scan(walk.code)
                return
            following = self._next(walk, epoch)
            path = str(walk.segment.path) if walk.segment else str(self.directory)
            yield Damage(path, self.cut, following, describe_scan(walk.code), epoch)
            position = following

    def _front(self) -> Iterator[Damage]:
        """Segments that are missing before the oldest one."""
        oldest = self.chain.oldest_position
        reports = _snapshot_reports(self.directory)
        sound = [(report.position, report.epoch) for report in reports if not report.fault]
        start, epoch = max(sound, default=(0, 0))
        if start < oldest:
            reason = "the segments before the oldest one are missing"
            if not sound:
                reason = "there is no sound snapshot of what stood before the oldest segment"
            yield Damage(str(self.directory), start, oldest, reason, epoch)
        elif trimmed_position(self.directory) < oldest:
            reason = "the segments from there on are missing"
            yield Damage(
                str(self.directory), trimmed_position(self.directory), oldest, reason, epoch=0
            )

    def _headers(self) -> Iterator[Damage]:
        """Damaged headers: nothing is lost with one, the name and the frames say the same."""
        for segment in self.chain:
            if segment.fault is not None:
                at = segment.first_position
                yield Damage(str(segment.path), at, at, segment.fault, segment.epoch)

    def _next(self, walk: Walk, epoch: int) -> int:
        """Where the log can be read again behind the damage at the cut."""
        choices = [next_group(self.chain, self.log_id, self.cut, epoch)]
        if walk.code == ScanCode.BODY_CRC and walk.segment is not None:
            choices.append(self.cut + _frame_bytes(walk.segment, self.cut))
        choices += [segment.first_position for segment in self.chain]
        choices.append(self.chain[-1].end_position)
        choices.append(self.named_position)
        return min(at for at in choices if at is not None and at >= self.cut + HEADER_BYTES)


def _frame_bytes(segment: Segment, position: int) -> int:
    """Length in a frame's header whose crc is known to be right."""
    field = HEADER_DTYPE["frame_bytes"]
    head = read_at(segment, position + At.FRAME_BYTES, field.itemsize)
    return int.from_bytes(head, "little")


def _snapshot_damage(directory: Path) -> list[Damage]:
    return [
        Damage(report.path, report.position, report.position, report.fault, 0)
        for report in _snapshot_reports(directory)
        if report.fault is not None
    ]


def verify_log(
    directory: str | os.PathLike[str],
    *,
    accept_loss: bool = False,
    wall_ns: int = 0,
    lock_timeout_ms: int = _LOCK_TIMEOUT_MS,
    on_progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Check every byte. With `accept_loss` make the log whole again without what is damaged.

    `on_progress` hears now and then how many bytes of how many are checked. Each loss is recorded with
    `wall_ns`. Raises NotFound, FailedPrecondition while a broker has the
    log open or if its format is newer.
    """
    path = _existing(directory)
    lock = LogLock(path, lock_timeout_ms)
    chain = Chain(list_segments(path, SEGMENT_HEADER_BYTES))
    try:
        log_id = _log_id(chain)
        verifier = _Verifier(path, chain, log_id or 0, on_progress)
        faults = [*verifier.faults(), *_snapshot_damage(path)]
        if accept_loss and faults:
            repair(path, chain, log_id or 0, faults, wall_ns)
    finally:
        chain.close()
        lock.release()
    return VerifyReport(
        directory=str(path),
        log_id=log_id,
        frames=verifier.frames,
        messages=verifier.messages,
        first_position=chain.oldest_position,
        cut=verifier.cut,
        epoch=verifier.epoch,
        synced_position=verifier.synced,
        faults=faults,
        torn=verifier.torn,
        repaired=accept_loss and bool(faults),
    )
