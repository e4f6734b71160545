"""Denied actions on a worker, told to the coordinator, which keeps the audit log. At least once: an answer may be lost."""

from __future__ import annotations

from danube_fast.broker import messages as m
from danube_fast.clock import MILLISECOND_NS
from danube_fast.roles import COORDINATOR
from danube_fast.security.audit import encode_record
from danube_fast.workers.process.denials import Denials
from danube_fast.workers.process.mailbox import Mailbox, Reply
from danube_fast.workers.shard.job import PeriodicJob

__all__ = ["DenialReports"]

WAITING_MAX = 256
"""Records that are kept while the coordinator is down."""


class DenialReports(PeriodicJob):
    """Pass on what the `Denials` of its process has. Used by its loop only."""

    interval_ns = 500 * MILLISECOND_NS

    def __init__(self, mailbox: Mailbox, denials: Denials) -> None:
        self._mailbox, self._denials = mailbox, denials
        self._waiting: list[bytes] = []
        self._lost = 0
        self._is_telling = False

    def run(self, now_ns: int) -> None:
        """Tell of what has come since."""
        records, lost = self._denials.take(now_ns)
        room = WAITING_MAX - len(self._waiting)
        self._waiting += [encode_record(record) for record in records[:room]]
        self._lost += lost + sum(record.count for record in records[room:])
        if (self._waiting or self._lost) and not self._is_telling:
            self._tell()

    def _tell(self) -> None:
        told, lost = list(self._waiting), self._lost
        self._is_telling = True

        def answered(reply: Reply) -> None:
            self._is_telling = False
            if reply.error is None:
                del self._waiting[: len(told)]
                self._lost -= lost

        self._mailbox.call(COORDINATOR, m.Denied(told, lost), on_reply=answered)
