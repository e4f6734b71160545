"""Sign-ons: CURVE keys that API keys and tokens have vouched for, found by key, principal and source, and by their end.

    proof --> record                 asked for each connection, by the thread of ZAP too
    principal, source --> keys       removed with them
    end --> keys                     purged when it has come
    revocation --> keys              made until then: removed, and refused if they are told again

A sign-on that is renewed keeps its key, and gets another end and other groups.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping

from danube_fast.clock import SECOND_NS
from danube_fast.security.authentication import Identity
from danube_fast.security.records import API_KEY_SOURCE, ApiKey, Record, Revocation, SignOn

__all__ = ["KEPT_MAX", "LIFETIME_NS_MAX", "WEIGHT_MAX", "SignOns", "weight_of"]

LIFETIME_NS_MAX = 24 * 3600 * SECOND_NS
"""A sign-on ends after that time at the latest, and a revocation has nothing left to end."""

WEIGHT_MAX = 400_000
"""Sign-ons that are there at one time, and groups that they claim."""
KEPT_MAX = 2 * WEIGHT_MAX
"""Of a copy, which keeps those that a coordinator had before it started again; then those go that end first."""
_STALE_ENDS_MAX = 1000
REVOKED_AT_ONCE = 5000
"""Sign-ons that are removed in one turn when all of an issuer are revoked. They are good for nothing before."""


def weight_of(record: SignOn) -> int:
    """Return what a sign-on counts for in bounds."""
    return 1 + len(record.groups)


class SignOns:
    """The sign-ons of one copy of the records. One thread changes them, others may call `principal_of`."""

    def __init__(
        self, records: Mapping[str, Record], subjects: Mapping[str, tuple[str, ...]]
    ) -> None:
        """`records`: all of the copy, by key; `subjects`: of bindings, by the name of each enabled principal."""
        self._records, self._subjects = records, subjects
        self._by_proof: dict[str, SignOn] = {}
        self._claims: dict[str, tuple[str, ...]] = {}
        self._by_holder: dict[str, set[str]] = {}
        """Keys in the store, by `principal/NAME` and by source."""
        self._ends: list[tuple[int, str]] = []
        """A heap of ends and public keys, stale ones among them."""
        self._revoked: deque[str] = deque()
        """Keys in the store that revocations have named; some may be gone or renewed."""
        self._weights: dict[str, int] = {}
        """By principal."""
        self.weight = 0
        """Of all."""

    def __len__(self) -> int:
        return len(self._by_proof)

    def put(self, record: SignOn) -> None:
        """Add a sign-on, or replace that of the same key; a thread that asks meanwhile finds one of the two."""
        proof, key = f"curve:{record.public_key}", f"sign_on/{record.public_key}"
        self._let_go(self._by_proof.get(proof), key)
        self._claims[proof] = tuple(f"group:{group}" for group in record.groups)
        self._by_proof[proof] = record
        for holder in record.holders[1:]:
            self._by_holder.setdefault(holder, set()).add(key)
        self._weigh(record.principal, weight_of(record))
        heapq.heappush(self._ends, (record.expires_ns, record.public_key))
        if len(self._ends) > 2 * len(self._by_proof) + _STALE_ENDS_MAX:
            self._ends = [(each.expires_ns, each.public_key) for each in self._by_proof.values()]
            heapq.heapify(self._ends)

    def discard(self, record: SignOn) -> None:
        """Remove the sign-on of that record's key, if there is one."""
        proof, key = f"curve:{record.public_key}", f"sign_on/{record.public_key}"
        self._let_go(self._by_proof.pop(proof, None), key)
        self._claims.pop(proof, None)

    def _let_go(self, old: SignOn | None, key: str) -> None:
        """Take a sign-on from its principal and its source."""
        if old is None:
            return
        for holder in old.holders[1:]:
            keys = self._by_holder[holder]
            keys.discard(key)
            if not keys:
                del self._by_holder[holder]
        self._weigh(old.principal, -weight_of(old))

    def _weigh(self, principal: str, difference: int) -> None:
        self.weight += difference
        self._weights[principal] = self._weights.get(principal, 0) + difference
        if not self._weights[principal]:
            del self._weights[principal]

    def get(self, proof: str) -> SignOn | None:
        """Return the sign-on of a key (`curve:KEY`), ended or not."""
        return self._by_proof.get(proof)

    def principal_of(self, proof: str, now_ns: int) -> str | None:
        """Return the principal that a key stands for at that wall time, None if it stands for none."""
        sign_on = self._by_proof.get(proof)
        if sign_on is None or now_ns >= sign_on.expires_ns or not self.vouches(sign_on, now_ns):
            return None
        return sign_on.principal

    def vouches(self, sign_on: SignOn, now_ns: int) -> bool:
        """Whether a sign-on may be, but for its own end: it is not revoked, its API key is there, its principal may come in."""
        if self.is_revoked(sign_on):
            return False
        if sign_on.source.startswith(API_KEY_SOURCE):
            found = self._records.get(f"api_key/{sign_on.source.removeprefix(API_KEY_SOURCE)}")
            if not isinstance(found, ApiKey) or found.principal != sign_on.principal:
                return False
            if found.expires_ns and now_ns >= found.expires_ns:
                return False
        return sign_on.principal in self._subjects or self._may_be_unknown(sign_on)

    def is_revoked(self, sign_on: SignOn) -> bool:
        """Whether a revocation ends a sign-on."""
        for holder in sign_on.holders:
            found = self._records.get(f"revocation/{holder}")
            if isinstance(found, Revocation) and sign_on.made_ns <= found.until_ns:
                return True
        return False

    def _may_be_unknown(self, sign_on: SignOn) -> bool:
        return not sign_on.registered and f"principal/{sign_on.principal}" not in self._records

    def subjects_of(
        self, identity: Identity, subjects: tuple[str, ...] | None
    ) -> tuple[str, ...] | None:
        """Add the groups that a sign-on brings to the subjects of bindings that its principal goes by; None: it may do
        nothing."""
        sign_on = self._by_proof.get(identity.proof)
        if sign_on is None or sign_on.principal != identity:
            return subjects
        if subjects is None:
            if not self._may_be_unknown(sign_on):
                return None
            subjects = (f"user:{identity}",)
        return (*subjects, *self._claims.get(identity.proof, ()))

    def all(self) -> list[SignOn]:
        """Return all sign-ons, ended ones that are not purged yet among them."""
        return list(self._by_proof.values())

    def held_by(self, holder: str) -> list[str]:
        """Return the keys (`sign_on/KEY`) of a principal (`principal/NAME`) or of a source; of a key itself, if it is there."""
        kind, _, key = holder.partition("/")
        if kind == "sign_on":
            return [holder] if f"curve:{key}" in self._by_proof else []
        return list(self._by_holder.get(holder, ()))

    def revoke(self, revocation: Revocation) -> list[str]:
        """Return some keys (`sign_on/KEY`) that a revocation ends; they are to be removed, and the others with `removable`."""
        self._revoked.extend(self.held_by(revocation.holder))
        return self._some_revoked()

    def removable(self, now_ns: int) -> list[str]:
        """Return the keys (`sign_on/KEY`) of those that have ended at that wall time, and of some that are revoked."""
        return self.ended(now_ns) + self._some_revoked()

    def _some_revoked(self) -> list[str]:
        found: list[str] = []
        while self._revoked and len(found) < REVOKED_AT_ONCE:
            key = self._revoked.popleft()
            record = self._records.get(key)
            if isinstance(record, SignOn) and self.is_revoked(record):  # and not renewed since
                found.append(key)
        return found

    def weight_of(self, principal: str) -> int:
        """Return what the sign-ons of a principal weigh together, ended ones that are not purged yet among them."""
        return self._weights.get(principal, 0)

    def ended(self, now_ns: int) -> list[str]:
        """Return the keys (`sign_on/KEY`) of those that have ended at that wall time; they are to be removed."""
        keys = []
        while self._ends and self._ends[0][0] <= now_ns:
            expires_ns, public_key = heapq.heappop(self._ends)
            if self._is_end(expires_ns, public_key):
                keys.append(f"sign_on/{public_key}")
        return keys

    def first_to_end(self) -> str:
        """Return the key (`sign_on/KEY`) of the one that ends first; empty: there is none."""
        while self._ends:
            expires_ns, public_key = self._ends[0]
            if self._is_end(expires_ns, public_key):
                return f"sign_on/{public_key}"
            heapq.heappop(self._ends)
        return ""

    def _is_end(self, expires_ns: int, public_key: str) -> bool:
        record = self._by_proof.get(f"curve:{public_key}")
        return record is not None and record.expires_ns == expires_ns
