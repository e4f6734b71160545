"""The records of a secured broker: roles, bindings, principals, credentials. The coordinator owns them.

    administrator --change--> metadata store --> own copy --SecurityChanged--> workers
                                                          --SecurityConfirmed, every few seconds-->

A change is durable before any process acts on it. Changes to one worker and the pages that it asks for go the same way in
order, so a copy that is read while records change is right at its end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from danube_fast.broker import messages as m
from danube_fast.clock import SECOND_NS, Clock
from danube_fast.errors import DanubeError, FailedPrecondition, InvalidArgument, NotFound
from danube_fast.metadata.store import CHANGES_MAX, MetadataStore
from danube_fast.security.policy import Policy
from danube_fast.security.records import (
    Binding,
    Credential,
    Principal,
    Record,
    Role,
    check_record,
    key_of,
)
from danube_fast.types import Permission
from danube_fast.workers.process.access import BOOTSTRAP, OVERFLOW, Access
from danube_fast.workers.process.mailbox import Mailbox, Request

__all__ = ["SecurityDirectory"]

_log = logging.getLogger(__name__)

PREFIX = "/security/"
PAGE_RECORDS = 500
CONFIRM_NS = 5 * SECOND_NS
COMMANDS = {"principal": "users", "credential": "keys", "role": "roles", "binding": "bindings"}
"""Kinds of records, and the commands of `danube-fast security` about them."""
_decoder = msgspec.json.Decoder(Record)


def _place_of(key: str) -> str:
    """Return the path of a record in the store; names have characters that paths do not take."""
    kind, _, name = key.partition("/")
    return f"{PREFIX}{kind}/{name.encode().hex()}"


class SecurityDirectory:
    """Change and hand out the records of one broker. Used by the coordinator's loop only."""

    def __init__(
        self, store: MetadataStore, mailbox: Mailbox, clock: Clock, access: Access | None
    ) -> None:
        """`access`: the coordinator's own, whose copy this keeps; None while security is off."""
        self._store, self._mailbox, self._clock = store, mailbox, clock
        self._access = access
        self._policy = access.policy if access is not None else Policy()
        self._told: set[int] = set()
        """Processes that have asked for the records."""
        self._confirmed_ns = 0
        for _, entry in store.list(PREFIX):
            self._policy.put(_decoder.decode(entry.value))
            self._policy.version = max(self._policy.version, entry.revision)
        if access is not None:
            access.is_loaded = access.is_owner = True
            access.confirm()
        mailbox.serve(m.FindSecurity, self._find)

    @property
    def policy(self) -> Policy:
        """All records."""
        return self._policy

    @property
    def is_enforced(self) -> bool:
        """Whether security is on."""
        return self._access is not None

    def has_administrator(self) -> bool:
        """Whether a principal that may change these records can come in."""
        now_ns = self._clock.wall_ns()
        names = {
            self._policy.principal_of(record.credential, now_ns)
            for record in self._all()
            if isinstance(record, Credential)
        }
        permission = Permission.MANAGE_CLUSTER
        return any(
            name is not None
            and name != BOOTSTRAP
            and self._policy.permits(name, permission, "cluster")
            for name in names
        )

    def do_work(self, now_ns: int) -> None:
        """Confirm the newest version to the processes that have copies, when it is time."""
        if now_ns - self._confirmed_ns < CONFIRM_NS:
            return
        self._confirmed_ns = now_ns
        if self._access is not None:
            self._access.confirm()
        self._notify(m.SecurityConfirmed(self._policy.version))

    def begin(self, public_key: str) -> None:
        """Register the key that a secured broker begins with, as an administrator; none before it counts any more."""
        self.remove(
            [
                key_of(record)
                for record in self._all()
                if isinstance(record, Credential) and record.principal == BOOTSTRAP
            ]
        )
        self.change(
            [
                Principal(name=BOOTSTRAP),
                Credential(credential=f"curve:{public_key}", principal=BOOTSTRAP, label=BOOTSTRAP),
                Binding(
                    binding=BOOTSTRAP, subject=f"user:{BOOTSTRAP}", role="admin", scope="cluster"
                ),
            ]
        )

    def used(self, principal: str, proof: str) -> None:
        """Note that a client has come in: the key that a broker begins with ends at its first use."""
        if principal == BOOTSTRAP:
            self.remove([f"credential/{proof}"])

    # ---------------------------------------------------------------- changes

    def change(self, records: Sequence[Record]) -> None:
        """Make these records, or put them in place of those of the same keys, all or none. Raises InvalidArgument."""
        if self._access is None:
            raise FailedPrecondition(
                "this broker asks no one who they are, so anyone could give rights; serve it with --auth required first"
            )
        for record in records:
            check_record(record)
        values = [msgspec.json.encode(record) for record in records]
        keys = [key_of(record) for record in records]
        revision = self._store.transact(
            [(_place_of(key), value) for key, value in zip(keys, values, strict=True)]
        )
        for record in records:
            self._policy.put(record)
        self._changed(revision, values, [])

    def remove(self, keys: Iterable[str]) -> None:
        """Remove the records of these keys; those that are gone already are no error."""
        gone = [key for key in keys if self._policy.get(key) is not None]
        for start in range(0, len(gone), CHANGES_MAX):
            some = gone[start : start + CHANGES_MAX]
            revision = self._store.transact([(_place_of(key), None) for key in some])
            for key in some:
                self._policy.remove(key)
            self._changed(revision, [], some)

    def put_role(self, name: str, permissions: list[Permission]) -> None:
        """Make or change a role; see the operation."""
        self.change([Role(name=name, permissions=permissions)])

    def put_principal(self, name: str, groups: list[str] | None, *, disabled: bool | None) -> None:
        """Make or change a principal; see the operation. What is None stays as it is."""
        known = self._policy.get(f"principal/{name}")
        if isinstance(known, Principal):
            groups = known.groups if groups is None else groups
            disabled = known.disabled if disabled is None else disabled
        groups, disabled = groups or [], bool(disabled)
        self.change([Principal(name=name, groups=groups, disabled=disabled)])

    def put_credential(
        self, credential: str, principal: str, *, expires_seconds: int, label: str
    ) -> None:
        """Make or change a credential; see the operation. Raises NotFound, FailedPrecondition."""
        if self._policy.get(f"principal/{principal}") is None:
            raise NotFound(
                f"there is no principal {principal}; make it with: danube-fast security users add {principal}"
            )
        if credential == OVERFLOW:
            raise InvalidArgument(
                f"{credential} is every user of another user namespace; register the user that the client runs as"
            )
        known = self._policy.get(f"credential/{credential}")
        if isinstance(known, Credential) and known.principal != principal:
            raise FailedPrecondition(
                f"{credential} belongs to {known.principal}; remove it there before it is given to {principal}"
            )
        expires_ns = self._clock.wall_ns() + expires_seconds * SECOND_NS if expires_seconds else 0
        self.change(
            [
                Credential(
                    credential=credential, principal=principal, expires_ns=expires_ns, label=label
                )
            ]
        )

    def put_binding(self, binding: str, subject: str, role: str, scope: str) -> None:
        """Make or change a binding; see the operation. Raises FailedPrecondition."""
        known = self._policy.get(f"binding/{binding}")
        if isinstance(known, Binding) and known.subject != subject:
            raise FailedPrecondition(
                f"the binding {binding} is of {known.subject}; give this one another name, or delete that one first"
            )
        self.change([Binding(binding=binding, subject=subject, role=role, scope=scope)])

    def remove_record(self, kind: str, name: str) -> None:
        """Remove a record; with a principal its credentials and bindings. Raises NotFound, InvalidArgument."""
        key = f"{kind}/{name}"
        if self._policy.get(key) is None:
            group = COMMANDS.get(kind, "users")
            raise NotFound(f"there is no {kind} {name}; see: danube-fast security {group} list")
        keys = [key]
        if kind == "principal":
            # what is left behind would come to life with the next principal of that name
            subject = f"user:{name}"
            keys = [
                key_of(record)
                for record in self._all()
                if (isinstance(record, Credential) and record.principal == name)
                or (isinstance(record, Binding) and record.subject == subject)
            ] + keys
        self.remove(keys)

    def describe(self, kind: str, after: str, limit: int) -> list[dict[str, Any]]:
        """List records of a kind behind a name, as maps. Raises InvalidArgument."""
        if kind not in COMMANDS:
            raise InvalidArgument(
                f"{kind!r} is no kind of records; write role, binding, principal or credential"
            )
        rows: list[dict[str, Any]] = []
        place = f"{kind}/{after}"
        while len(rows) < limit:
            page = self._policy.page(place, PAGE_RECORDS)
            for record in page:
                if not key_of(record).startswith(f"{kind}/") or len(rows) == limit:
                    return rows
                rows.append(msgspec.to_builtins(record))
            if len(page) < PAGE_RECORDS:
                break
            place = key_of(page[-1])
        return rows

    def _all(self) -> Iterable[Record]:
        after = ""
        while page := self._policy.page(after, PAGE_RECORDS):
            yield from page
            after = key_of(page[-1])

    # ---------------------------------------------------------------- copies

    def _changed(self, revision: int | None, values: list[bytes], removed: list[str]) -> None:
        previous = self._policy.version
        self._policy.version = max(previous + 1, revision or 0)
        self._notify(m.SecurityChanged(self._policy.version, previous, values, removed))

    def _notify(self, message: m.Message) -> None:
        for process in self._told:
            try:
                self._mailbox.notify(process, message)
            except DanubeError as error:  # its copy is not confirmed any more, and it will ask
                _log.warning("process %d is not told of a change of rights: %s", process, error)

    def _find(self, request: Request[m.FindSecurity]) -> None:
        self._told.add(request.peer)
        page = self._policy.page(request.message.after, PAGE_RECORDS)
        last = key_of(page[-1]) if len(page) == PAGE_RECORDS else ""
        values = [msgspec.json.encode(record) for record in page]
        request.reply(m.SecurityPage(self._policy.version, values, last))
