"""The records of a secured broker: roles, bindings, principals, credentials. The coordinator owns them.

    administrator --change--> metadata store --> own copy --SecurityChanged--> workers
                                                          --SecurityConfirmed, every few seconds-->

A change is durable before any process acts on it; sign-ons are in memory only. Changes to one worker and the pages that it asks for go the same way in
order, so a copy that is read while records change is right at its end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from danube_fast.broker import messages as m
from danube_fast.checks import shown_name
from danube_fast.clock import SECOND_NS, Clock
from danube_fast.countdown import Countdown
from danube_fast.errors import (
    AlreadyExists,
    DanubeError,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
)
from danube_fast.metadata.store import CHANGES_MAX, MetadataStore
from danube_fast.security.api_keys import LIVE_KEYS_MAX
from danube_fast.security.certificates import canonical_subject
from danube_fast.security.policy import Policy
from danube_fast.security.records import (
    BOOTSTRAP,
    BUILTIN_ROLES,
    NOUNS,
    ApiKey,
    Binding,
    Credential,
    Principal,
    Record,
    Revocation,
    Role,
    SignOn,
    binding_name,
    check_record,
    key_of,
    no_user,
)
from danube_fast.security.sign_ons import LIFETIME_NS_MAX
from danube_fast.types import CLUSTER, Permission
from danube_fast.workers.coordinator.administrators import (
    PAGE_RECORDS,
    check_keeps_administrator,
    has_administrator,
    stored,
)
from danube_fast.workers.coordinator.refusals import (
    check_is_no_binding_of_first,
    check_is_not_first,
    check_is_shown,
    check_resource,
)
from danube_fast.workers.process.access import OVERFLOW, Access
from danube_fast.workers.process.mailbox import Mailbox, Request

__all__ = ["SecurityDirectory"]

_log = logging.getLogger(__name__)

PREFIX = "/security/"
SCANNED_MAX = 5000
"""Sign-ons that are looked at for one page of a list."""
CONFIRM_NS = 5 * SECOND_NS
KNOWN_MS = 2000
"""A worker that does not say in that time that it knows a sign-on refuses no key before it has heard all: see PAUSE_NS."""
COMMANDS = {
    "principal": "users", "credential": "keys", "role": "roles", "binding": "bindings", "api_key": "tokens",
}  # fmt: skip
"""Kinds of records, and the commands of `danube-fast security` about them."""
UNTOLD = ("salt", "digest")
"""Fields of an API key that no list shows."""
_decoder = msgspec.json.Decoder(Record)


def _place_of(key: str) -> str:
    """Return the path of a record in the store; names have characters that paths do not take."""
    kind, _, name = key.partition("/")
    return f"{PREFIX}{kind}/{name.encode().hex()}"


class SecurityDirectory:
    """Change and hand out the records of one broker. Used by the coordinator's loop only."""

    def __init__(
        self, store: MetadataStore, mailbox: Mailbox, clock: Clock, access: Access | None,
        told: Iterable[int] = (),
    ) -> None:  # fmt: skip
        """`access`: the coordinator's own, whose copy this keeps; None while security is off. `told`: those that have copies."""
        self._store, self._mailbox, self._clock = store, mailbox, clock
        self._access = access
        self._policy = access.policy if access is not None else Policy()
        self._told = set(told)
        """Processes that have asked for the records, and not started again since."""
        mailbox.epoch_watchers.append(lambda peer, _: self._told.discard(peer))
        self.on_first_key_gone: Callable[[], None] = lambda: None
        """Called when the key that a broker begins with has ended, or was removed."""
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
    def rights(self) -> Access | Policy:
        """Answers who may do what, as processes decide it."""
        return self._access or self._policy

    @property
    def is_enforced(self) -> bool:
        """Whether security is on."""
        return self._access is not None

    def check(self, principal: str, permission: Permission, resource: str) -> dict[str, bool]:
        """Tell whether a principal may do that, and has a record; see the operation. Raises InvalidArgument for what is no
        name of a user, or no scope."""
        made = Principal(principal)
        check_record(made)
        check_resource(resource)
        allowed = self.rights.permits(principal, permission, resource)
        return {"allowed": allowed, "registered": self._policy.get(key_of(made)) is not None}

    def has_administrator(self) -> bool:
        """Whether a principal that may change these records can come in."""
        return has_administrator(self._policy, self._clock.wall_ns())

    def do_work(self, now_ns: int) -> None:
        """Confirm the newest version to the processes that have copies, and purge sign-ons, when it is time."""
        if now_ns - self._confirmed_ns < CONFIRM_NS:
            return
        self._confirmed_ns = now_ns
        self._policy.purge(self._clock.wall_ns())
        if self._access is not None:
            self._access.confirm()
        self._notify(m.SecurityConfirmed(self._policy.version))

    def begin(self, public_key: str) -> None:
        """Register the key that a secured broker begins with, as an administrator; none before it counts any more."""
        keys = [each for each in stored(self._policy) if isinstance(each, Credential)]
        self.remove([key_of(each) for each in keys if each.principal == BOOTSTRAP])
        self.change(
            [
                Principal(name=BOOTSTRAP),
                Credential(credential=f"curve:{public_key}", principal=BOOTSTRAP, label=BOOTSTRAP),
                Binding(
                    binding=BOOTSTRAP, subject=f"user:{BOOTSTRAP}", role="admin", scope=CLUSTER
                ),
            ]
        )

    def used(self, principal: str, proof: str) -> None:
        """Note that a client has come in: the key that a broker begins with ends at its first use."""
        if principal == BOOTSTRAP:
            self.remove([f"credential/{proof}"])

    # ---------------------------------------------------------------- changes

    def keep(self, records: Sequence[Record], asker: int, on_done: Callable[[], None]) -> None:
        """Put records in memory, here and in all processes; `on_done` is called when they have them, or do not answer.
        The process that asks for it is not waited for."""
        values = [msgspec.json.encode(record) for record in records]
        for record in records:
            self._policy.put(record)
        previous = self._policy.version
        self._policy.version = previous + 1
        message = m.SecurityChanged(self._policy.version, previous, values, [])
        with Countdown(lambda _: on_done()) as countdown:
            self._notify(message, [asker])
            for process in self._told - {asker}:
                heard = countdown.add()
                self._mailbox.call(
                    process, message, on_reply=lambda _, heard=heard: heard(None), timeout_ms=KNOWN_MS,  # type: ignore[misc]
                )  # fmt: skip

    def change(self, records: Sequence[Record]) -> None:
        """Make these records, or put them in place of those of the same keys, all or none. Raises InvalidArgument."""
        self._check_enforced()
        for record in records:
            check_record(record)
        values = [msgspec.json.encode(record) for record in records]
        keys = [key_of(record) for record in records]
        revision = self._store.transact(
            [(_place_of(key), value) for key, value in zip(keys, values, strict=True)]
        )
        for record in records:
            self._policy.take(record)
        self._changed(revision, values, [])

    def remove(self, keys: Iterable[str]) -> None:
        """Remove the records of these keys; those that are gone already are no error."""
        records = {key: self._policy.get(key) for key in keys}
        gone = [key for key, record in records.items() if record is not None]
        for start in range(0, len(gone), CHANGES_MAX):
            some = gone[start : start + CHANGES_MAX]
            revision = self._store.transact([(_place_of(key), None) for key in some])
            for key in some:
                self._policy.discard(key)
            self._changed(revision, [], some)
        if any(
            isinstance(each, Credential) and each.principal == BOOTSTRAP
            for each in records.values()
        ):
            self.on_first_key_gone()

    def put_role(self, name: str, permissions: list[Permission]) -> None:
        """Make or change a role; see the operation. Raises FailedPrecondition."""
        self._put(Role(name=name, permissions=permissions))

    def _put(self, *records: Record) -> None:
        """Make or change records that may be an administrator's, all or none. Raises InvalidArgument, FailedPrecondition."""
        self._check_enforced()
        for record in records:
            check_record(record)
        keys = [key_of(record) for record in records]
        check_keeps_administrator(self._policy, self._clock.wall_ns(), keys, records)
        self.change(records)

    def put_principal(
        self, name: str, groups: list[str] | None, *, disabled: bool | None,
        credentials: Sequence[str] = (), roles: Sequence[str] = (), scope: str = CLUSTER,
    ) -> dict[str, Any]:  # fmt: skip
        """Make or change a principal; see the operation. What is None stays as it is. Raises NotFound, InvalidArgument,
        FailedPrecondition."""
        check_is_not_first(name)
        check_is_shown(credentials, roles, groups or ())
        known = self._policy.get(f"principal/{name}")
        if isinstance(known, Principal):
            groups = known.groups if groups is None else groups
            disabled = known.disabled if disabled is None else disabled
        made = Principal(name, groups or [], disabled=bool(disabled))
        subject = f"user:{name}"
        bindings = [
            Binding(binding_name(subject, role, scope), subject, role, scope)
            for role in dict.fromkeys(roles)
        ]
        self._check_enforced()
        for binding in bindings:
            self._check_binding(binding)
        keys = [self._credential(each, name, None, None) for each in dict.fromkeys(credentials)]
        self._put(made, *keys, *bindings)
        return {"name": name, "groups": made.groups, "disabled": made.disabled}

    def put_credential(
        self, credential: str, principal: str, *, expires_seconds: int | None, label: str | None
    ) -> dict[str, Any]:
        """Make or change a credential; see the operation. What is None stays as it is. Raises InvalidArgument, NotFound,
        FailedPrecondition."""
        self._check_principal(principal)
        check_is_not_first(principal)
        made = self._credential(credential, principal, expires_seconds, label)
        self._put(made)
        return {"expires_ns": made.expires_ns, "label": made.label}

    def _credential(
        self, credential: str, principal: str, expires_seconds: int | None, label: str | None
    ) -> Credential:
        """Return the record of a credential as it will be. Raises InvalidArgument, FailedPrecondition."""
        kind, _, subject = credential.partition(":")
        if kind == "mtls" and "=" in subject and canonical_subject(subject) != subject:
            raise InvalidArgument(
                f"certificates are compared with another form of that subject: write mtls:{canonical_subject(subject)}"
            )
        if credential == OVERFLOW:
            raise InvalidArgument(
                f"{credential} is every user of another user namespace; register the user that the client runs as"
            )
        if self._policy.sign_ons.get(credential) is not None:
            raise FailedPrecondition(f"{credential} has signed on; register another key")
        known, now_ns = self._policy.get(f"credential/{credential}"), self._clock.wall_ns()
        expires_ns = self._end_of(expires_seconds)
        if not isinstance(known, Credential):
            return Credential(credential, principal, expires_ns, label or "")
        if known.principal != principal:
            raise FailedPrecondition(
                f"{credential} belongs to {known.principal}; remove it there before it is given to {principal}"
            )
        if expires_seconds is None:
            expires_ns = known.expires_ns
            if expires_ns and now_ns >= expires_ns:
                raise FailedPrecondition(
                    f"{credential} of {principal} has ended, and stays so; to let it in again, say how long it is good from "
                    "now on: danube-fast security keys add --expires-seconds"
                )
        return Credential(
            credential, principal, expires_ns, known.label if label is None else label
        )

    def add_api_key(
        self, key_id: str, name: str, *, salt: str, digest: str, expires_seconds: int, label: str
    ) -> None:
        """Add an API key of the principal `name`; see the operation. Raises NotFound, AlreadyExists, FailedPrecondition."""
        now_ns = self._clock.wall_ns()
        made = ApiKey(key_id, name, salt, digest, self._end_of(expires_seconds), label)
        check_record(made)
        self._check_principal(name)
        check_is_not_first(name)
        known = self._policy.get(key_of(made))
        if isinstance(known, ApiKey):
            if (known.principal, known.digest) == (name, made.digest):
                return  # asked a second time
            raise AlreadyExists("there is an API key of that id; draw another one")
        records = stored(self._policy)
        mine = [each for each in records if isinstance(each, ApiKey) and each.principal == name]
        ended = [each for each in mine if each.expires_ns and now_ns >= each.expires_ns]
        if len(mine) - len(ended) >= LIVE_KEYS_MAX:
            ids = " and ".join(each.id for each in mine if each not in ended)
            raise FailedPrecondition(
                f"{name} has {LIVE_KEYS_MAX} live API keys, {ids}: remove the one that is no longer used, with: "
                "danube-fast security tokens remove ID --yes"
            )
        self.change([made])
        self.remove(key_of(each) for each in ended)

    def put_binding(self, binding: str, subject: str, role: str, scope: str) -> None:
        """Make or change a binding; see the operation. Raises InvalidArgument, NotFound, FailedPrecondition."""
        made = Binding(binding=binding, subject=subject, role=role, scope=scope)
        self._check_enforced()
        check_record(made)
        check_is_no_binding_of_first(made)
        kind, _, name = subject.partition(":")
        # groups need no record: tokens bring them
        if kind == "user":
            self._check_principal(name)
        self._check_binding(made)
        self._put(made)

    def _check_principal(self, name: str) -> None:
        if self._policy.get(f"principal/{name}") is None:
            raise no_user(name)

    def _end_of(self, expires_seconds: int | None) -> int:
        """When a key ends that is made now and is good for so long; 0: never."""
        return self._clock.wall_ns() + expires_seconds * SECOND_NS if expires_seconds else 0

    def _check_binding(self, made: Binding) -> None:
        """Raise NotFound for a role that is not there: a mistyped one would grant nothing, or some day the wrong thing.
        Raise FailedPrecondition for a name that another binding has, InvalidArgument for what is no binding."""
        check_record(made)
        if made.role not in BUILTIN_ROLES and self._policy.get(f"role/{made.role}") is None:
            raise NotFound(
                f"there is no role {shown_name(made.role)}; see: danube-fast security roles list"
            )
        known = self._policy.get(f"binding/{made.binding}")
        if isinstance(known, Binding) and known.subject != made.subject:
            raise FailedPrecondition(
                f"the binding {made.binding} is of {known.subject}; give this one another name, or delete that one first"
            )

    def _check_enforced(self) -> None:
        if self._access is None:
            raise FailedPrecondition(
                "this broker asks no one who they are, so anyone could give rights; serve it with --auth required first"
            )

    def remove_record(self, kind: str, name: str, *, force: bool = False) -> None:
        """Remove a record; with a principal its credentials and bindings. Raises NotFound, InvalidArgument, and without
        `force` FailedPrecondition if no administrator is left."""
        _check_kind(kind)
        key = f"{kind}/{name}"
        if self._policy.get(key) is None:
            raise NotFound(
                f"there is no {NOUNS[kind]} {shown_name(name)}; see: danube-fast security {COMMANDS[kind]} list"
            )
        keys = [key]
        if kind == "principal":
            # what is left behind would come to life with the next principal of that name
            subject = f"user:{name}"
            keys = [
                key_of(record)
                for record in stored(self._policy)
                if (isinstance(record, Credential | ApiKey) and record.principal == name)
                or (isinstance(record, Binding) and record.subject == subject)
            ] + keys
        if not force:
            check_keeps_administrator(self._policy, self._clock.wall_ns(), keys)
        if kind == "principal" and self.is_enforced:  # else there are none
            self.end_sign_ons(key)
        self.remove(keys)

    def end_sign_ons(self, holder: str) -> int:
        """End the sign-ons that were made so far by a key, for a principal or by a source (see Revocation), also where they
        are told again later; their number, as far as they are known here. Raises InvalidArgument, NotFound."""
        self._check_enforced()
        now_ns, sign_ons = self._clock.wall_ns(), self._policy.sign_ons
        held = [self._policy.get(key) for key in sign_ons.held_by(holder)]
        # the wall clock may have been set back since
        made_ns = max((each.made_ns for each in held if isinstance(each, SignOn)), default=0)
        made = Revocation(holder, max(now_ns, made_ns))
        check_record(made)
        name = holder.removeprefix("principal/")
        is_known = held or self._policy.get(holder) or self._policy.get(key_of(made))
        if name != holder and not is_known:
            raise NotFound(
                f"there is no user {name}, and no sign-on of that name; see: danube-fast security sign-ons list"
            )
        self.change([made])
        self.remove(
            key_of(record)
            for record in stored(self._policy)
            if isinstance(record, Revocation) and record.until_ns + LIFETIME_NS_MAX < now_ns
        )
        return len(held)

    def list_sign_ons(self, after: str, limit: int, principal: str, source: str) -> dict[str, Any]:
        """List sign-ons behind a public key; see the operation."""
        now_ns, place = self._clock.wall_ns(), f"sign_on/{after}"
        sign_ons = self._policy.sign_ons
        found: list[dict[str, Any]] = []
        page = [each for each in self._policy.page(place, SCANNED_MAX) if isinstance(each, SignOn)]
        for record in page:
            after = record.public_key
            is_asked = principal in ("", record.principal) and source in ("", record.source)
            if is_asked and sign_ons.principal_of(f"curve:{after}", now_ns) is not None:
                found.append(msgspec.to_builtins(record))
            if len(found) == limit:
                return {"sign_ons": found, "after": after}
        return {"sign_ons": found, "after": after if len(page) == SCANNED_MAX else ""}

    def describe(self, kind: str, after: str, limit: int) -> list[dict[str, Any]]:
        """List records of a kind behind a name, as maps. Raises InvalidArgument."""
        _check_kind(kind)
        rows: list[dict[str, Any]] = []
        place = f"{kind}/{after}"
        while len(rows) < limit:
            page = self._policy.page(place, PAGE_RECORDS)
            for record in page:
                if not key_of(record).startswith(f"{kind}/") or len(rows) == limit:
                    return rows
                row = msgspec.to_builtins(record)
                rows.append({name: row[name] for name in row if name not in UNTOLD})
            if len(page) < PAGE_RECORDS:
                break
            place = key_of(page[-1])
        return rows

    # ---------------------------------------------------------------- copies

    def _changed(self, revision: int | None, values: list[bytes], removed: list[str]) -> None:
        previous = self._policy.version
        self._policy.version = max(previous + 1, revision or 0)
        self._notify(m.SecurityChanged(self._policy.version, previous, values, removed))

    def _notify(self, message: m.Message, processes: Iterable[int] | None = None) -> None:
        for process in self._told if processes is None else processes:
            try:
                self._mailbox.notify(process, message)
            except DanubeError as error:  # its copy is not confirmed any more, and it will ask
                _log.warning("process %d is not told of a change of rights: %s", process, error)

    def _find(self, request: Request[m.FindSecurity]) -> None:
        self._told.add(request.peer)
        page = self._policy.page(request.message.after, PAGE_RECORDS)
        last = key_of(page[-1]) if len(page) == PAGE_RECORDS else ""
        values = [msgspec.json.encode(record) for record in page]
        is_settling = self._access is not None and self._access.is_settling
        request.reply(m.SecurityPage(self._policy.version, values, last, is_settling))


def _check_kind(kind: str) -> None:
    """Raise InvalidArgument for records that no command is about: of revocations and sign-ons, say."""
    if kind not in COMMANDS:
        raise InvalidArgument(f"{kind!a:.100} is no kind of records; write {', '.join(COMMANDS)}")
