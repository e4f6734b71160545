"""Trusted issuers, live: another file of issuers counts without a restart, and what it no longer trusts ends.

    file changes --> verifier, caches of keys --> new tokens        at once
                '--> EndSignOns(jwt:NAME) ------> coordinator       for each issuer that is gone or differs, until it is done
                '--> fault, digests of entries -> coordinator       a file that cannot be used: the old one counts

An issuer may have gone while this process or the coordinator was down, so both starts compare the sign-ons that are there.
Its entry may differ after a start of this process: the coordinator compares the digests with those that it was told before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import msgspec

from danube_fast.broker import messages as m
from danube_fast.clock import MILLISECOND_NS
from danube_fast.config import Settings
from danube_fast.roles import COORDINATOR
from danube_fast.security.issuers import Issuer, read_issuers
from danube_fast.security.live_files import LiveFiles
from danube_fast.security.policy import Policy
from danube_fast.security.records import JWT_SOURCE
from danube_fast.security.tokens import TokenVerifier
from danube_fast.workers.process.mailbox import Mailbox, Reply
from danube_fast.workers.sign_on.verifier import Verifier

__all__ = ["IssuerWatch", "issuer_files"]

_log = logging.getLogger(__name__)

TIMEOUT_MS = 3000
RETRY_NS = 500 * MILLISECOND_NS


def issuer_files(settings: Settings) -> LiveFiles[list[Issuer]]:
    """Read the trusted issuers, live; without the setting `tokens` there are none. Raises FailedPrecondition, InvalidArgument."""
    paths = [Path(settings.tokens)] if settings.tokens else []

    def load() -> list[Issuer]:
        issuers = [each for path in paths for each in read_issuers(path)]
        if issuers:
            TokenVerifier(issuers)  # a file that needs a library that is missing cannot be used
        return issuers

    return LiveFiles("the file of trusted issuers", paths, load)


def _digests_of(issuers: list[Issuer]) -> dict[str, str]:
    """Return what entries are told apart by, by the names of their issuers."""
    return {each.name: sha256(msgspec.json.encode(each)).hexdigest() for each in issuers}


class IssuerWatch:
    """Keep a verifier in step with the file of issuers. Used by the event loop only."""

    def __init__(
        self, files: LiveFiles[list[Issuer]], verifier: Verifier, policy: Policy, mailbox: Mailbox
    ) -> None:
        self._files, self._verifier = files, verifier
        self._policy, self._mailbox = policy, mailbox
        self._digests = _digests_of(files.loaded)
        self._to_end: set[str] = set()
        """Sources of sign-ons that the coordinator is to end."""
        self._is_asking = False
        self._now_ns = self._next_ns = 0
        self._told: m.IssuersRead | None = None
        """What the coordinator has been told; None: nothing yet."""

    def start(self) -> None:
        """Load the keys of all issuers from now on."""
        for cache in self._verifier.caches.values():
            cache.start()
        self.compare()

    def compare(self) -> None:
        """Let sign-ons end whose issuer is not trusted, and tell the coordinator again what it does not keep."""
        trusted = {f"{JWT_SOURCE}{name}" for name in self._verifier.caches}
        sources = {record.source for record in self._policy.sign_ons.all()}
        self._to_end |= {each for each in sources if each.startswith(JWT_SOURCE)} - trusted
        self._told = None

    def do_work(self, now_ns: int) -> None:
        """Look at the file, and tell the coordinator what follows, when it is time."""
        self._now_ns = now_ns
        if self._files.refresh(now_ns):
            self._change()
        if self._is_asking or now_ns < self._next_ns:
            return
        if self._to_end:
            source = self._to_end.pop()
            self._ask(m.EndSignOns(source), lambda: self._to_end.add(source))
            return
        read = m.IssuersRead(self._files.fault, self._digests)
        if self._told != read:
            self._told = read
            self._ask(read, self._forget)

    def close(self) -> None:
        """Load no keys any more."""
        for cache in self._verifier.caches.values():
            cache.close()

    def _change(self) -> None:
        before = self._verifier.caches
        self._verifier.trust(self._files.loaded)
        self._digests = _digests_of(self._files.loaded)
        after = self._verifier.caches
        _log.info("trusted issuers are now: %s", ", ".join(after) or "none")
        for name, cache in before.items():
            if after.get(name) is not cache:
                cache.close()
                self._to_end.add(f"{JWT_SOURCE}{name}")
        for name, cache in after.items():
            if before.get(name) is not cache:
                cache.start()

    def _forget(self) -> None:
        self._told = None

    def _ask(self, message: m.Message, on_failure: Callable[[], None]) -> None:
        """Tell the coordinator one thing; nothing else before it has answered."""
        self._is_asking = True

        def answered(reply: Reply) -> None:
            self._is_asking = False
            if reply.error is not None:
                self._next_ns = self._now_ns + RETRY_NS
                on_failure()

        self._mailbox.call(COORDINATOR, message, on_reply=answered, timeout_ms=TIMEOUT_MS)
