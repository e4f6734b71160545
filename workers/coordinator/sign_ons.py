"""Sign-ons as the coordinator lets them in: what the process beside it has verified, checked against the records.

    sign_on --AddSignOns--> checks, one by one --> memory --SecurityChanged--> all copies
            <--outcomes-------------------------------------their answers--'
            --IssuersRead-> another entry than before: a revocation in the store ---SecurityChanged--> all copies

They are not stored: after a restart other processes know them still, and that of sign-on tells them again. Stored are the
digests of the entries of issuers that they were made by.
"""

from __future__ import annotations

import msgspec

from danube_fast.broker import messages as m
from danube_fast.clock import Clock
from danube_fast.errors import (
    DanubeError,
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from danube_fast.metadata.store import MetadataStore
from danube_fast.security.curve import is_public_key
from danube_fast.security.policy import Policy
from danube_fast.security.records import BOOTSTRAP, JWT_SOURCE, SignOn, check_record
from danube_fast.security.sign_ons import LIFETIME_NS_MAX, WEIGHT_MAX, weight_of
from danube_fast.workers.coordinator.audit import AuditLog
from danube_fast.workers.coordinator.security import SecurityDirectory
from danube_fast.workers.process.mailbox import Mailbox, Request

__all__ = ["SignOnChecks"]

PRINCIPAL_WEIGHT_MAX = 20_000
"""Of one principal: others have room when a program signs on without end."""
ISSUERS_KEY = "/issuers"
_decoder = msgspec.json.Decoder(SignOn)


class SignOnChecks:
    """Decide which sign-ons come into force. Used by the coordinator's loop only."""

    def __init__(
        self,
        store: MetadataStore,
        directory: SecurityDirectory,
        mailbox: Mailbox,
        clock: Clock,
        audit: AuditLog | None = None,
    ) -> None:
        """`audit`: where ends are recorded that no administrator has asked for; None: nowhere."""
        self._store, self._directory, self._clock, self._audit = store, directory, clock, audit
        self.issuers_fault = ""
        """Why the newest file of trusted issuers is not in use; empty: it is, or there is none."""
        self.fault = ""
        """Why the process of sign-on could not start, or takes no connections; empty: it does, or there is none."""
        found = store.get(ISSUERS_KEY)
        self._issuers: dict[str, str] = {} if found is None else msgspec.json.decode(found.value)
        """Digests of the entries of trusted issuers, by name, as they are stored: sign-ons of others have been ended."""
        mailbox.serve(m.AddSignOns, self._add)
        mailbox.serve(m.IssuersRead, self._issuers_read)
        mailbox.serve(m.SignOnFailed, self._failed)

    def _failed(self, request: Request[m.SignOnFailed]) -> None:
        self.fault = request.message.fault

    def _issuers_read(self, request: Request[m.IssuersRead]) -> None:
        """Store what is in use, behind the end of the sign-ons that other entries have let in."""
        read = request.message
        self.issuers_fault, self.fault = read.fault, read.port_fault
        # without a file that can be used nothing tells whether an issuer is gone
        issuers = read.issuers if read.issuers is not None else self._issuers
        for name, digest in self._issuers.items():
            if issuers.get(name) != digest:
                source = f"{JWT_SOURCE}{name}"
                self._directory.end_sign_ons(source)
                if self._audit is not None:
                    self._audit.record("end_sign_ons", resource=source)
        if issuers != self._issuers:
            self._store.put(ISSUERS_KEY, msgspec.json.encode(issuers))
            self._issuers = issuers
        request.reply()

    def _add(self, request: Request[m.AddSignOns]) -> None:
        if not self._directory.is_enforced:
            raise FailedPrecondition("this broker asks no one who they are; there is no sign-on")
        codes, texts = [], []
        admitted: list[SignOn] = []
        policy, now_ns = self._directory.policy, self._clock.wall_ns()
        policy.purge(now_ns)
        seen: set[str] = set()
        for data, entry in zip(request.message.records, request.message.entries, strict=True):
            try:
                record = _decoder.decode(data)
                if record.public_key in seen:
                    raise Unavailable("this key signs on just now; try again")
                if entry and self._issuers.get(record.source.removeprefix(JWT_SOURCE)) != entry:
                    raise Unavailable("what is trusted here changes just now; try again")
                self._check(policy, record, now_ns, sum(map(weight_of, admitted)))
            except DanubeError as error:
                codes.append(error.code)
                texts.append(str(error))
                continue
            seen.add(record.public_key)
            admitted.append(record)
            codes.append(0)
            texts.append("")
        answer = m.SignOnsAdded(codes, texts)
        if admitted:
            self._directory.keep(admitted, request.peer, lambda: request.reply(answer))
        else:
            request.reply(answer)

    def _check(self, policy: Policy, record: SignOn, now_ns: int, more: int) -> None:
        """Raise the error for a sign-on that may not be. `more`: what others weigh that come in with it."""
        check_record(record)
        if not is_public_key(record.public_key):
            raise InvalidArgument("that is no public key; send its 40 characters of Z85")
        name = record.principal
        if not now_ns < record.expires_ns <= now_ns + LIFETIME_NS_MAX:
            raise PermissionDenied("what you sign on with ends just now; get a new one")
        if policy.sign_ons.is_revoked(record):
            raise Unavailable(f"sign-ons of {name} were ended just now; try again")
        if name == BOOTSTRAP or not policy.sign_ons.vouches(record, now_ns):
            raise PermissionDenied(
                f"{name} may not sign on: it is not a user of this broker, or disabled; ask an administrator"
            )
        proof = f"curve:{record.public_key}"
        if policy.get(f"credential/{proof}") is not None:
            raise FailedPrecondition("this key is registered; connect with it, or draw a new one")
        old = policy.sign_ons.get(proof)
        if old is not None and old.principal != name:
            raise FailedPrecondition("this key signed on as another user; draw a new one")
        weight = weight_of(record) - (weight_of(old) if old is not None else 0) + more
        if policy.sign_ons.weight_of(name) + weight > PRINCIPAL_WEIGHT_MAX:
            raise ResourceExhausted(
                f"{name} has signed on with too many keys; wait until some of them end, and let programs keep theirs"
            )
        if policy.sign_ons.weight + weight > WEIGHT_MAX:
            raise ResourceExhausted("too many clients have signed on; try again later")
