"""Lists that ended because another package's authorizer had not answered all: what it has answered is kept for the next try.

list --> what is known of its asker --24 s are over: Unavailable--> kept, by session's user and proof --> the same list again
                                                  '--rights or rules change, or it is too old--> forgotten
"""

from __future__ import annotations

from danube_fast.clock import SECOND_NS, Clock
from danube_fast.errors import DanubeError, Unavailable
from danube_fast.net.session import Session
from danube_fast.security.authorization import Authorizer
from danube_fast.workers.process.access import Access

__all__ = ["KEPT_NS", "UnfinishedLists"]

KEPT_NS = 300 * SECOND_NS
"""How old an answer may be that a list goes on with."""
KEPT_MAX = 16
"""Askers whose lists are kept."""
NAMES_MAX = 65_536
"""Names that are kept of one asker; of more none are."""


class _Known:
    """Names that one asker may be told of or not, by the rights of a version."""

    def __init__(self, version: tuple[int, int, int], now_ns: int) -> None:
        self.names: dict[str, bool] = {}
        self.version, self.began_ns = version, now_ns


class UnfinishedLists:
    """Keep the names of lists. Used by the coordinator's loop only."""

    def __init__(self, authorizer: Authorizer, clock: Clock) -> None:
        self._clock = clock
        self._access = (
            authorizer if isinstance(authorizer, Access) and authorizer.has_outer else None
        )
        """Where there are questions that are waited for."""
        self._kept: dict[tuple[str, str], _Known] = {}

    def begin(self, session: Session) -> _Known:
        """Return what is known of a session's principal: of the list before, if that has not ended well."""
        now_ns = self._clock.monotonic_ns()
        version = (0, 0, 0) if self._access is None else self._access.version
        kept = self._kept.get((str(session.principal), session.proof))
        if kept is None or kept.version != version or now_ns - kept.began_ns >= KEPT_NS:
            return _Known(version, now_ns)
        return kept

    def end(self, session: Session, known: _Known, error: DanubeError | None) -> None:
        """Keep what is known if the answers have not come; it is forgotten with the next change of rights."""
        is_unfinished = isinstance(error, Unavailable) and 0 < len(known.names) <= NAMES_MAX
        if self._access is None or not is_unfinished:
            return
        key = str(session.principal), session.proof
        self._kept.pop(key, None)
        self._kept[key] = known
        if len(self._kept) > KEPT_MAX:
            del self._kept[next(iter(self._kept))]
