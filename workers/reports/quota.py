"""Reports of workers on their logs, and the log quota that they share.

    worker --LogUsage {bytes, logs: commit cursors} once a second at most--> coordinator
           <--LogAllowance {bytes}------------------------------------

A worker that uses little lends to one that needs more: `wal_bytes_max` counts for all logs together. A worker may always use its equal share;
the unused part of the other shares is granted on top. While the coordinator is down the last allowance stands.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from typing import TYPE_CHECKING

from danube_fast.admin.view import Room
from danube_fast.broker import messages as m
from danube_fast.config import Settings
from danube_fast.ring.counters import Counter, CounterBlock
from danube_fast.roles import COORDINATOR
from danube_fast.workers.process.boot import BootConfig
from danube_fast.workers.process.mailbox import Mailbox, Request

if TYPE_CHECKING:
    from danube_fast.wal.log import Log

__all__ = ["LogQuotas", "WorkerQuota", "log_quota_bytes", "room_of"]

QUOTA_BYTES_CEILING = 100 * 1024**3
SAY_AGAIN_NS = 5_000_000_000
"""How often an unchanged report is repeated: a coordinator that was restarted knows nothing."""
SEGMENTS_MIN = 4
"""Segments, spares among them, that a log cannot do without."""


def log_quota_bytes(config: BootConfig, used_bytes: int = 0) -> int:
    """Return `wal_bytes_max`, or its default: the smaller of 100 GiB and half of the free space."""
    settings: Settings = config.settings
    if settings.wal_bytes_max:
        return settings.wal_bytes_max
    free = shutil.disk_usage(config.data_dir).free
    return min(QUOTA_BYTES_CEILING, (free + used_bytes) // 2)


def room_of(config: BootConfig, counters: CounterBlock) -> Room:
    """Measure what the disk and the log quota have left. Raises OSError."""
    used = counters.total(Counter.LOG_BYTES)
    disk = shutil.disk_usage(config.data_dir)
    quota = log_quota_bytes(config, used)
    return Room(disk.total, disk.free, quota, max(0, quota - used))


class LogQuotas:
    """Divide the quota, and remember the commit cursors by log id. The coordinator's side."""

    def __init__(self, mailbox: Mailbox, config: BootConfig) -> None:
        self._mailbox, self._config = mailbox, config
        self._used: dict[int, int] = {}
        self.cursors: dict[int, m.CommitCursor] = {}
        mailbox.serve(m.LogUsage, self._usage)

    def _usage(self, request: Request[m.LogUsage]) -> None:
        self._used[request.peer] = request.message.bytes
        for cursor in request.message.logs:
            self.cursors[cursor.log_id] = cursor
        total = log_quota_bytes(self._config, sum(self._used.values()))
        share = total // max(1, self._config.worker_count)
        others = sum(
            max(used, share if used > share else 0)
            for peer, used in self._used.items()
            if peer != request.peer
        )
        silent = self._config.worker_count - len(self._used)
        allowance = max(share, total - others - silent * share)
        self._mailbox.notify(request.peer, m.LogAllowance(allowance))


class WorkerQuota:
    """Know how much the logs of one worker may use. The worker's side."""

    def __init__(self, mailbox: Mailbox, config: BootConfig) -> None:
        self._mailbox = mailbox
        self._floor = SEGMENTS_MIN * config.settings.segment_bytes * max(1, len(config.logs))
        self._allowance = log_quota_bytes(config) // max(1, config.worker_count)
        self._said: m.LogUsage | None = None
        self._said_ns = 0
        mailbox.serve(m.LogAllowance, self._allowed)

    @property
    def allowance_bytes(self) -> int:
        """Bytes that this worker's logs may use together."""
        return max(self._allowance, self._floor)

    def report(self, used_bytes: int, logs: Iterable[Log], now_ns: int) -> None:
        """Tell the coordinator the size and the position of the logs, if either has changed."""
        said = m.LogUsage(used_bytes, [_cursor(log) for log in logs])
        if said == self._said and now_ns - self._said_ns < SAY_AGAIN_NS:
            return
        self._said, self._said_ns = said, now_ns
        self._mailbox.notify(COORDINATOR, said)

    def _allowed(self, request: Request[m.LogAllowance]) -> None:
        self._allowance = request.message.bytes


def _cursor(log: Log) -> m.CommitCursor:
    return m.CommitCursor(
        log.log_id, log.oldest_position, log.snapshot_position, log.synced_position,
        log.written_position,
    )  # fmt: skip
