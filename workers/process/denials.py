"""Denied actions of one process, and what it closed as rights were taken away, aggregated: the first of a kind at once, its
repetitions as a count.

    loop, ZAP thread --note--> table by (who, from where, what, why) --take, every half second--> the audit log
    pass over what is open --Closings, counted--^

The table and the list that waits are bounded, so that a flood of denials costs neither memory nor bandwidth; what finds no
room is counted.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from typing import Any, NamedTuple

from danube_fast.clock import SECOND_NS, Clock
from danube_fast.config import Settings
from danube_fast.errors import PermissionDenied
from danube_fast.net.session import Session
from danube_fast.security.audit import (
    NAME_CHARACTERS_MAX,
    AuditRecord,
    fingerprint,
    shown_address,
    shown_text,
    shown_time,
)

__all__ = ["DENIED", "Closings", "Denial", "Denials", "is_audited"]

DENIED = PermissionDenied.__name__
WINDOW_NS = 10 * SECOND_NS
"""Repetitions within it are one record."""
KINDS_MAX = 1024
"""Kinds of denials that are told apart; the one met first makes room."""
REASON_CHARACTERS_MAX = 100
"""Of a reason, as far as it is told apart."""
NOTED_MAX = 512
"""Denials that wait for the table."""
WAITING_MAX = 64
"""Records that wait to be taken."""
_CLOSED = "closed"


def is_audited(settings: Settings) -> bool:
    """Whether the broker keeps an audit log."""
    return settings.audit == "on" or (settings.audit == "auto" and settings.auth == "required")


class Denial(NamedTuple):
    """One refusal, as it was met; or one thing that was closed."""

    action: str
    principal: str = ""
    proof: str = ""
    address: str = ""
    resource: str = ""
    outcome: str = DENIED
    request: str = ""
    reason: str = ""
    """Why, if refusals of one action differ in it: each reason has a record of its own."""
    event: str = "denied"
    arguments: tuple[tuple[str, Any], ...] = ()
    """Of an operation, as far as they may be shown."""

    @property
    def kind(self) -> tuple[str, ...]:
        """Key that repetitions of it share."""
        who = self.event, self.principal, self.address, self.action
        if self.event == _CLOSED:  # clients name none of it
            return *who, self.proof, self.resource
        return *who, self.reason[:REASON_CHARACTERS_MAX]


class _Kind:
    """Denials of one kind since its last record."""

    __slots__ = ("count", "last", "since_ns")

    def __init__(self, last: Denial, since_ns: int) -> None:
        self.last, self.since_ns, self.count = last, since_ns, 0


class Denials:
    """Aggregate denials. `note` may be called in any thread."""

    def __init__(self, clock: Clock, *, is_on: bool = True) -> None:
        """`is_on`: whether anyone takes them; else `note` does nothing."""
        self._clock, self._is_on = clock, is_on
        self._lock = threading.Lock()
        self._kinds: OrderedDict[tuple[str, ...], _Kind] = OrderedDict()
        self._noted: deque[tuple[Denial, int]] = deque()
        self._waiting: list[AuditRecord] = []
        self._lost = 0

    def __len__(self) -> int:
        with self._lock:
            self._gather()
            return len(self._kinds)

    def note(self, denial: Denial, count: int = 1) -> None:
        """Count a denial, or so many of them."""
        if not self._is_on:
            return
        if len(denial.resource) > NAME_CHARACTERS_MAX:  # a client's text may have megabytes
            denial = denial._replace(resource=denial.resource[: NAME_CHARACTERS_MAX + 1])
        # gathered later: the answer to a refusal is not to take longer than others
        self._noted.append((denial, count))
        if len(self._noted) >= NOTED_MAX:
            with self._lock:
                self._gather()

    def _gather(self) -> None:
        """Under the lock: enter what was noted into the table."""
        while self._noted:
            denial, count = self._noted.popleft()
            key = denial.kind
            kind = self._kinds.get(key)
            if kind is not None:
                kind.count += count
                kind.last = denial
                continue
            if len(self._kinds) >= KINDS_MAX:
                _, oldest = self._kinds.popitem(last=False)
                self._close(oldest)
            self._kinds[key] = _Kind(denial, self._clock.monotonic_ns())
            self._add(denial, count)

    def take(self, now_ns: int) -> tuple[list[AuditRecord], int]:
        """Take what waits: records, and how many denials found no room."""
        with self._lock:
            self._gather()
            over = [key for key, kind in self._kinds.items() if now_ns - kind.since_ns >= WINDOW_NS]
            for key in over:
                kind = self._kinds[key]
                if not kind.count:
                    del self._kinds[key]
                elif len(self._waiting) < WAITING_MAX:
                    self._close(kind)
                    kind.since_ns, kind.count = now_ns, 0
            taken, self._waiting = self._waiting, []
            lost, self._lost = self._lost, 0
            return taken, lost

    def _close(self, kind: _Kind) -> None:
        if kind.count:
            self._add(kind.last, kind.count)

    def _add(self, denial: Denial, count: int) -> None:
        if len(self._waiting) >= WAITING_MAX:
            self._lost += count
            return
        self._waiting.append(
            AuditRecord(
                event=denial.event,
                time=shown_time(self._clock.wall_ns()),
                principal=shown_text(denial.principal),
                proof=fingerprint(denial.proof),
                address=shown_address(denial.address),
                action=shown_text(denial.action),
                resource=shown_text(denial.resource, NAME_CHARACTERS_MAX),
                outcome=denial.outcome,
                request=denial.request,
                arguments=dict(denial.arguments),
                count=count,
            )
        )


class Closings:
    """Count what a pass closes because rights or credentials have gone, so that it is a few records."""

    def __init__(self, denials: Denials) -> None:
        self._denials = denials
        self._counts: Counter[Denial] = Counter()

    def note(self, session: Session, what: str, resource: str = "") -> None:
        """Count the session itself, or something that it had open on `resource`."""
        who = session.principal, session.proof, session.address
        # all reply topics look the same
        shown = shown_text(resource, NAME_CHARACTERS_MAX)
        self._counts[Denial(what, *who, shown, outcome="", event=_CLOSED)] += 1
        if len(self._counts) >= WAITING_MAX:
            self.tell()

    def tell(self) -> None:
        """Pass on what was counted."""
        for closing, count in self._counts.items():
            self._denials.note(closing, count)
        self._counts.clear()
