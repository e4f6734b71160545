"""The copy of a broker's security records that a worker keeps: read whole at the start, then kept by notices.

load:  FindSecurity("") -> page -> FindSecurity(last) -> ... -> what was in no page is dropped, but sign-ons
later: SecurityChanged is applied; SecurityConfirmed of another version loads anew

A coordinator that has started again knows no sign-ons. Those in copies end when their time has come, or with the principal
or the API key that they were made by.
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
from danube_fast.workers.process.mailbox import PAUSE_NS, Reply, Request

__all__ = ["SecurityCopy"]

_log = logging.getLogger(__name__)

ASK_TIMEOUT_MS = 5000
RETRY_NS = SECOND_NS
POLL_MS = 50
RESTART_NS = 50 * MILLISECOND_NS
"""A coordinator that has just started again is asked so much later: it reads its records first."""
PURGE_NS = SECOND_NS
_BEHIND_ALL = "\U0010ffff"
"""No key of a record is behind this one."""
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
        self._purged_ns = 0
        mailbox = self._mailbox = boot.mailbox
        self._asked_pauses = self._heard_pauses = mailbox.pauses
        """How many pauses of this process there were when the coordinator was asked last; and when it was asked what it
        has answered."""
        access.has_heard = self._has_heard
        access.serve_from(mailbox.run_soon)
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
        """Load again behind a load that failed, and remove sign-ons that have ended, when it is time; ask for the version
        behind a pause of this process."""
        if now_ns - self._purged_ns >= PURGE_NS:
            self._purged_ns = now_ns
            self._policy.purge(self._boot.clock.wall_ns())
        if self._asked_pauses != self._mailbox.pauses and self._seen is None:
            self._ask_version()
        if self._failed_ns and now_ns - self._failed_ns >= RETRY_NS:
            self._load()

    def _has_heard(self) -> bool:
        """Whether this process has heard from the coordinator since it was stopped the last time, or held up."""
        mailbox = self._mailbox
        age_ns = self._boot.clock.monotonic_ns() - mailbox.turn_ns
        return age_ns <= PAUSE_NS and mailbox.pauses == self._heard_pauses

    # ---------------------------------------------------------------- loads

    def _ask_version(self) -> None:
        """Ask which version is the newest: the answer comes behind all that the coordinator has told before."""
        pauses = self._asked_pauses = self._mailbox.pauses

        def got(reply: Reply) -> None:
            if reply.error is not None:
                self._failed_ns = self._boot.clock.monotonic_ns()
            elif self._seen is None and reply.value.version == self._policy.version:
                self._heard_pauses = pauses
                self._access.confirm()
            elif self._seen is None:
                self._load()

        question = m.FindSecurity(_BEHIND_ALL)
        self._mailbox.call(COORDINATOR, question, on_reply=got, timeout_ms=ASK_TIMEOUT_MS)

    def _load(self) -> None:
        self._seen, self._failed_ns = set(), 0
        self._asked_pauses = self._mailbox.pauses
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
                if page.is_settling:
                    self._access.begin_again()

        question = m.FindSecurity(after)
        self._boot.mailbox.call(COORDINATOR, question, on_reply=got, timeout_ms=ASK_TIMEOUT_MS)

    def _end(self, version: int, seen: set[str]) -> None:
        self._seen, policy = None, self._policy
        for key in policy.all_keys():
            if key not in seen and not key.startswith("sign_on/"):
                policy.discard(key)
        policy.version = version
        self._heard_pauses = self._asked_pauses
        self._access.is_loaded = True
        self._access.loads += 1
        self._access.confirm()

    def _put(self, records: list[bytes]) -> None:
        for data in records:
            record = _decoder.decode(data)
            self._policy.take(record)
            if self._seen is not None:
                self._seen.add(key_of(record))

    # ---------------------------------------------------------------- notices

    def _changed(self, request: Request[m.SecurityChanged]) -> None:
        change = request.message
        self._put(change.records)
        for key in change.removed:
            self._policy.discard(key)
            if self._seen is not None:
                self._seen.discard(key)
        has_missed = self._seen is None and change.previous != self._policy.version
        self._policy.version = change.version
        if has_missed:
            self._load()
        elif self._seen is None and self._access.is_loaded:
            self._access.confirm()
        request.reply()

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
