"""Trusted issuers, live: another file of issuers counts without a restart, and what it no longer trusts ends.

    file changes --> verifier, caches of keys --> new tokens        at once
                '--> faults, digests of entries -> coordinator      until it has stored them; it ends the sign-ons of each
                                                                    issuer that is gone or differs from what was stored

A token lets no one in by an entry that the coordinator has not stored. So what it has stored tells of all sign-ons that are
there, also when the file has changed while both processes were down. A process that starts again with a file that cannot be
used knows no issuers: no token counts, and no sign-on ends, until it can be used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from danube_fast.broker import messages as m
from danube_fast.clock import MILLISECOND_NS
from danube_fast.config import Settings
from danube_fast.roles import COORDINATOR
from danube_fast.security.issuers import Issuer, read_issuers
from danube_fast.security.jwks import check_files
from danube_fast.security.live_files import LiveFiles
from danube_fast.security.tokens import TokenVerifier
from danube_fast.workers.process.mailbox import Mailbox, Reply
from danube_fast.workers.sign_on.verifier import Verifier

__all__ = ["IssuerWatch", "issuer_files"]

_log = logging.getLogger(__name__)

TIMEOUT_MS = 3000
RETRY_NS = 500 * MILLISECOND_NS


def issuer_files(settings: Settings, *, may_wait: bool = False) -> LiveFiles[list[Issuer] | None]:
    """Read the trusted issuers, live; without the setting `tokens` there are none. A file of them counts only if the files
    that it names can be used, too.

    `may_wait`: they are None until the file can be used. Else raises FailedPrecondition, InvalidArgument, Unavailable.
    """
    paths = [Path(settings.tokens)] if settings.tokens else []

    def load() -> list[Issuer]:
        issuers = [each for path in paths for each in read_issuers(path)]
        if issuers:
            TokenVerifier(issuers)  # a file that needs a library that is missing cannot be used
        for each in issuers:
            check_files(each)
        return issuers

    return LiveFiles(
        "the file of trusted issuers", paths, load, (lambda: None) if may_wait else None
    )


def _digests_of(issuers: list[Issuer] | None) -> dict[str, str] | None:
    return None if issuers is None else {each.name: each.digest for each in issuers}


class IssuerWatch:
    """Keep a verifier in step with the file of issuers. Used by the event loop only."""

    def __init__(
        self, files: LiveFiles[list[Issuer] | None], verifier: Verifier, mailbox: Mailbox,
        port_fault: Callable[[], str] = str,
    ) -> None:  # fmt: skip
        """`port_fault` says why the port of sign-on takes no connections, which goes to the coordinator, too."""
        self._files, self._verifier, self._mailbox = files, verifier, mailbox
        self._port_fault = port_fault
        self._digests = _digests_of(files.loaded)
        self._is_asking = False
        self._now_ns = self._next_ns = 0
        self._told: m.IssuersRead | None = None
        """What the coordinator has been told; None: nothing yet."""

    def start(self) -> None:
        """Load the keys of all issuers from now on."""
        for cache in self._verifier.caches.values():
            cache.start()

    def tell_again(self) -> None:
        """Tell a coordinator that has started again, which does not keep why a file is not in use."""
        self._told = None

    def do_work(self, now_ns: int) -> None:
        """Look at the file, and tell the coordinator what follows, when it is time."""
        self._now_ns = now_ns
        if self._files.refresh(now_ns):
            self._change()
        if self._is_asking or now_ns < self._next_ns:
            return
        fault = self._files.fault
        if self._digests is None:
            fault = f"no token counts until this file can be used: {fault}"
        keys = [
            f"issuer {name} (its keys before count for {cache.issuer.stale_seconds} s at most): {cache.fault}"
            for name, cache in self._verifier.caches.items()
            if cache.fault
        ]
        fault = "; ".join(filter(None, [fault, *keys]))
        read = m.IssuersRead(fault, self._digests, self._port_fault())
        if self._told != read:
            self._tell(read)

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
        for name, cache in after.items():
            if before.get(name) is not cache:
                cache.start()

    def _tell(self, read: m.IssuersRead) -> None:
        """Tell the coordinator; nothing else before it has answered."""
        self._told, self._is_asking = read, True

        def answered(reply: Reply) -> None:
            self._is_asking = False
            if reply.error is not None:
                self._next_ns = self._now_ns + RETRY_NS
                self._told = None

        self._mailbox.call(COORDINATOR, read, on_reply=answered, timeout_ms=TIMEOUT_MS)
