"""The copy of a broker's security records that a worker keeps: read whole at the start, then kept by notices.

load:  FindSecurity("") -> page -> FindSecurity(last) -> ... -> what was in no page is dropped
later: SecurityChanged is applied; SecurityConfirmed of another version loads anew
"""

from __future__ import annotations

import logging
import select

import msgspec

from danube_fast.broker import messages as m
from danube_fast.clock import MILLISECOND_NS, SECOND_NS
from danube_fast.roles import COORDINATOR
from danube_fast.security.records import Record, key_of
from danube_fast.workers.process.access import Access
from danube_fast.workers.process.boot import Boot
from danube_fast.workers.process.mailbox import Reply, Request

__all__ = ["SecurityCopy"]

_log = logging.getLogger(__name__)

ASK_TIMEOUT_MS = 5000
RETRY_NS = SECOND_NS
POLL_MS = 50
PAGE_RECORDS = 1000
RESTART_NS = 50 * MILLISECOND_NS
"""A coordinator that has just started again is asked so much later: it reads its records first."""
_decoder = msgspec.json.Decoder(Record)


class SecurityCopy:
    """Keep the records of `access`. Used by the loop of its process only."""

    def __init__(self, boot: Boot, access: Access) -> None:
        self._boot, self._access = boot, access
        self._policy = access.policy
        self._seen: set[str] | None = None
        """Keys that a load has met; None: none is under way."""
        self._failed_ns = 0
        """When a load has failed, monotonic; 0: it has not."""
        mailbox = boot.mailbox
        mailbox.serve(m.SecurityChanged, self._changed)
        mailbox.serve(m.SecurityConfirmed, self._confirmed)
        mailbox.epoch_watchers.append(self._peer_restarted)

    def load_and_wait(self) -> None:
        """Load the records before any client is served; until then the process does nothing else."""
        boot = self._boot
        self._load()
        poll = select.poll()
        poll.register(boot.mailbox.fileno(), select.POLLIN)
        while not self._access.is_loaded and not boot.stop_requested:
            boot.heartbeat()
            if boot.mailbox.prepare_sleep():
                poll.poll(POLL_MS)
            now_ns = boot.clock.monotonic_ns()
            boot.mailbox.do_work(now_ns)
            self.do_work(now_ns)

    def do_work(self, now_ns: int) -> None:
        """Load again behind a load that failed, when it is time."""
        if self._failed_ns and now_ns - self._failed_ns >= RETRY_NS:
            self._load()

    # ---------------------------------------------------------------- loads

    def _load(self) -> None:
        self._seen, self._failed_ns = set(), 0
        self._ask("", self._seen)

    def _ask(self, after: str, seen: set[str]) -> None:
        def got(reply: Reply) -> None:
            if self._seen is not seen:
                return  # another load has begun since
            if reply.error is not None:
                _log.info("the security records cannot be read, asking again: %s", reply.error)
                self._seen, self._failed_ns = None, self._boot.clock.monotonic_ns()
                return
            page: m.SecurityPage = reply.value
            self._put(page.records)
            if page.last:
                self._ask(page.last, seen)
            else:
                self._end(page.version, seen)

        question = m.FindSecurity(after)
        self._boot.mailbox.call(COORDINATOR, question, on_reply=got, timeout_ms=ASK_TIMEOUT_MS)

    def _end(self, version: int, seen: set[str]) -> None:
        self._seen, policy, after = None, self._policy, ""
        while page := policy.page(after, PAGE_RECORDS):
            after = key_of(page[-1])
            for record in page:
                if key_of(record) not in seen:
                    policy.remove(key_of(record))
        policy.version = version
        self._access.is_loaded = True
        self._access.loads += 1
        self._access.confirm()

    def _put(self, records: list[bytes]) -> None:
        for data in records:
            record = _decoder.decode(data)
            self._policy.put(record)
            if self._seen is not None:
                self._seen.add(key_of(record))

    # ---------------------------------------------------------------- notices

    def _changed(self, request: Request[m.SecurityChanged]) -> None:
        change = request.message
        self._put(change.records)
        for key in change.removed:
            self._policy.remove(key)
            if self._seen is not None:
                self._seen.discard(key)
        has_missed = self._seen is None and change.previous != self._policy.version
        self._policy.version = change.version
        if has_missed:
            self._load()
        elif self._seen is None and self._access.is_loaded:
            self._access.confirm()

    def _confirmed(self, request: Request[m.SecurityConfirmed]) -> None:
        if self._seen is not None:
            return  # a load is under way
        if request.message.version != self._policy.version:
            self._load()
        elif self._seen is None and self._access.is_loaded:
            self._access.confirm()

    def _peer_restarted(self, peer: int, epoch: int) -> None:
        if peer == COORDINATOR:
            self._failed_ns = self._boot.clock.monotonic_ns() - RETRY_NS + RESTART_NS
