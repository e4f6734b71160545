"""Whether records let an administrator in, and go on doing so behind a change."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from danube_fast.clock import SECOND_NS
from danube_fast.errors import DanubeError, FailedPrecondition
from danube_fast.security.curve import read_key_file
from danube_fast.security.policy import Policy
from danube_fast.security.records import (
    BOOTSTRAP,
    BUILTIN_ROLES,
    Binding,
    Credential,
    Principal,
    Record,
    Role,
    SignOn,
    key_of,
)
from danube_fast.types import CLUSTER, Permission

__all__ = [
    "PAGE_RECORDS",
    "check_keeps_administrator",
    "has_administrator",
    "is_first_key",
    "is_recovery",
    "stored",
]

_log = logging.getLogger(__name__)

PAGE_RECORDS = 500
"""Records that are read at a time."""
ADMINISTRATOR_NS = 24 * 3600 * SECOND_NS
"""So long the key of the last administrator must be good at least."""


def has_administrator(policy: Policy, at_ns: int) -> bool:
    """Whether a principal that may change the records can come in at that wall time."""
    names = {
        policy.principal_of(record.credential, at_ns)
        for record in stored(policy)
        if isinstance(record, Credential)
        # clients begin here by tcp: a local user alone, or a certificate, is no way in
        and record.credential.startswith("curve:")
    }
    return any(name is not None and name != BOOTSTRAP and _rules(policy, name) for name in names)


def check_keeps_administrator(
    policy: Policy, now_ns: int, gone: Sequence[str], made: Sequence[Record] = ()
) -> None:
    """Raise FailedPrecondition if no administrator could come in any more without the records of these keys, and with
    those that are made in their place."""
    old = [policy.get(key) for key in gone]
    if not any(_is_of_administrator(policy, record) for record in old):
        return
    # a key that is about to end is no way in for long
    at_ns = now_ns + ADMINISTRATOR_NS
    if not has_administrator(policy, at_ns):
        at_ns = now_ns
        if not has_administrator(policy, at_ns):
            return  # it is so already
    left, lost = Policy(), set(gone)
    for record in stored(policy):
        if key_of(record) not in lost:
            left.put(record)
    for record in made:
        left.put(record)
    if not has_administrator(left, at_ns):
        raise FailedPrecondition(
            "no administrator with a key would be left, and a new one could come in only behind a restart of the broker; make "
            "another one first, with: danube-fast security users add NAME --public-key-of FILE --role admin (or delete "
            "with --force)"
        )


def stored(policy: Policy) -> Iterator[Record]:
    """Go through the records that are stored; sign-ons, of which there may be many, come behind them."""
    after = ""
    while page := policy.page(after, PAGE_RECORDS):
        for record in page:
            if isinstance(record, SignOn):
                return
            yield record
        after = key_of(page[-1])


def _rules(policy: Policy, principal: str) -> bool:
    """Whether a principal may change the records."""
    return policy.permits(principal, Permission.MANAGE_CLUSTER, CLUSTER)


def _is_of_administrator(policy: Policy, record: Record | None) -> bool:
    """Whether an administrator may be one by this record."""
    match record:
        case Principal(name=name) | Credential(principal=name):
            return _rules(policy, name)
        case Binding(scope=scope, role=role):
            known = BUILTIN_ROLES.get(role) or policy.get(f"role/{role}")
            return scope == CLUSTER and _is_of_administrator(policy, known)
        case Role(permissions=permissions):
            return Permission.MANAGE_CLUSTER in permissions
        case _:
            return False


def is_recovery(request: Path, key_file: Path) -> bool:
    """Whether the key of an administrator that is in `key_file` is to be taken although there is one: `request` names it."""
    try:
        public = request.read_text(encoding="ascii").strip()
        return public == read_key_file(key_file).public
    except FileNotFoundError:
        return False
    except (OSError, ValueError, DanubeError) as error:
        _log.warning(
            "%s is not taken; run `danube-fast security recover` again: %s", key_file, error
        )
        return False


def is_first_key(policy: Policy, key_file: Path) -> bool:
    """Whether the key in a file, if there is one, lets a first administrator in."""
    try:
        known = policy.get(f"credential/curve:{read_key_file(key_file).public}")
        why = "its key is not on record"
    except DanubeError as error:
        known, why = None, str(error)
    is_first = isinstance(known, Credential) and known.principal == BOOTSTRAP
    if isinstance(known, Credential) and not is_first:
        why = f"its key is one of {known.principal}; if that is in use, give the file another name"
    if not is_first and os.path.lexists(key_file):
        _log.warning("%s is no key of a first administrator, so remove it: %s", key_file, why)
    return is_first
