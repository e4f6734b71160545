"""Records of the security policy: roles, bindings of them, principals, credentials.

Each has a key of its own in the store (`role/NAME`, `binding/ID`, `principal/NAME`, `credential/ID`) and
is checked before it is written. A credential holds what names a key, never a secret.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from danube_fast.errors import InvalidArgument
from danube_fast.security.scopes import parse_scope
from danube_fast.types import Permission

__all__ = [
    "BUILTIN_ROLES",
    "EXPIRES_NS_MAX",
    "GROUPS_MAX",
    "LABEL_CHARACTERS_MAX",
    "Binding",
    "Credential",
    "Principal",
    "Record",
    "Role",
    "check_key",
    "check_record",
    "key_of",
    "parse_scope",
]

GROUPS_MAX = 256
"""Groups of one principal: every check looks at each of them."""
LABEL_CHARACTERS_MAX = 256
"""Enough to say which machine a key is on; labels are sent with every copy of the policy."""
EXPIRES_NS_MAX = 2**63 - 1
"""Fits 8 bytes with a sign: the year 2262."""
_UID_MAX = 2**32 - 2  # the last of 32 bits means no user

# Names become parts of keys and of log lines: no separators, no characters that only look alike.
# Names of dots alone mean folders to other programs.
_NAME = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9_.@-]{1,128}\Z")
_NAME_RULE = "1 to 128 letters, digits, '_', '.', '@' or '-'"
_CREDENTIAL = re.compile(
    r"curve:[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}\Z|uid:(?P<uid>0|[1-9][0-9]{0,9})\Z"
)


# Fields that this version does not know are refused: one of them might forbid something.
class _Record(
    msgspec.Struct, frozen=True, gc=False, kw_only=False, tag_field="kind", forbid_unknown_fields=True
):  # fmt: skip
    """Common to all records: a tag, and that they do not change."""


class Role(_Record, frozen=True, gc=False, tag="role"):
    """Permissions under a name."""

    name: str
    permissions: list[Permission]


class Binding(_Record, frozen=True, gc=False, tag="binding"):
    """Grants a role to a user or a group, inside a scope."""

    binding: str
    subject: str
    """`user:NAME` or `group:NAME`."""
    role: str
    scope: str


class Principal(_Record, frozen=True, gc=False, tag="principal"):
    """A user or a service, and the groups it is in."""

    name: str
    groups: list[str] = []
    disabled: bool = False


class Credential(_Record, frozen=True, gc=False, tag="credential"):
    """Proof of a principal: a public key, or a user of this host."""

    credential: str
    """`curve:` and 40 characters of Z85, or `uid:` and a number."""
    principal: str
    expires_ns: int = 0
    """Wall clock; 0 means never."""
    label: str = ""


Record = Role | Binding | Principal | Credential

BUILTIN_ROLES: dict[str, Role] = {
    role.name: role
    for role in (
        Role("admin", list(Permission)),
        Role(
            "operator",
            [
                Permission.LOOKUP,
                Permission.MANAGE_NAMESPACE,
                Permission.MANAGE_TOPIC,
                Permission.MANAGE_SCHEMA,
                Permission.MANAGE_BROKER,
            ],
        ),
        Role("producer", [Permission.LOOKUP, Permission.PRODUCE]),
        Role("consumer", [Permission.LOOKUP, Permission.CONSUME]),
        Role("viewer", [Permission.LOOKUP]),
    )
}
"""Roles that are always there, and always the same."""


def key_of(record: Record) -> str:
    """Key of a record in the store."""
    match record:
        case Role():
            return f"role/{record.name}"
        case Binding():
            return f"binding/{record.binding}"
        case Principal():
            return f"principal/{record.name}"
        case Credential():
            return f"credential/{record.credential}"
    raise _not_a_record(record)


def check_key(key: str) -> None:
    """Raise InvalidArgument for the key of what cannot be changed or removed."""
    kind, _, name = key.partition("/")
    if kind == "role" and name in BUILTIN_ROLES:
        raise InvalidArgument(
            f"the role {name} is built in and stays as it is; make a role of another name"
        )


def check_record(record: Record) -> None:
    """Raise InvalidArgument, which says what to write instead, for a record that makes no sense."""
    check = _CHECKS.get(type(record))
    if check is None:
        raise _not_a_record(record)
    check(record)


def _check_role(role: Role) -> None:
    _check_name(role.name, "a role")
    check_key(key_of(role))
    permissions = role.permissions
    if not isinstance(permissions, list) or not all(
        isinstance(permission, Permission) for permission in permissions
    ):
        raise InvalidArgument(
            f"the permissions of role {role.name} are not a list of permissions; choose from "
            f"{', '.join(Permission)}"
        )
    if len(set(permissions)) != len(permissions):
        raise InvalidArgument(f"role {role.name} lists a permission twice; list each once")


def _check_binding(binding: Binding) -> None:
    _check_name(binding.binding, "a binding")
    _check_name(binding.role, "a role")
    subject = binding.subject
    kind, _, name = subject.partition(":") if isinstance(subject, str) else ("", "", "")
    if kind not in ("user", "group") or not _NAME.match(name):
        raise InvalidArgument(
            f"{subject!a:.300} is not the subject of a binding; write user:NAME or group:NAME, the "
            f"name of {_NAME_RULE}"
        )
    parse_scope(binding.scope)


def _check_principal(principal: Principal) -> None:
    _check_name(principal.name, "a principal")
    groups = principal.groups
    if not isinstance(groups, list) or len(groups) > GROUPS_MAX:
        raise InvalidArgument(
            f"the groups of {principal.name} are not a list of at most {GROUPS_MAX} names; leave some "
            "out, or bind the roles to the principal itself"
        )
    for group in groups:
        _check_name(group, "a group")
    if len(set(groups)) != len(groups):
        raise InvalidArgument(f"{principal.name} is in a group twice; list each group once")
    if not isinstance(principal.disabled, bool):
        raise InvalidArgument(
            f"disabled of {principal.name} is not true or false; write one of them"
        )


def _check_credential(credential: Credential) -> None:
    text = credential.credential
    found = _CREDENTIAL.match(text) if isinstance(text, str) else None
    if found is None or (found["uid"] is not None and int(found["uid"]) > _UID_MAX):
        # the text is not repeated: a secret may have been given by mistake
        raise InvalidArgument(
            "that does not name a credential; write curve: and the 40 characters of a public key in "
            f"Z85, or uid: and the number of a user, 0 to {_UID_MAX}"
        )
    _check_name(credential.principal, "a principal")
    expires_ns = credential.expires_ns
    if type(expires_ns) is not int or not 0 <= expires_ns <= EXPIRES_NS_MAX:
        raise InvalidArgument(
            f"a credential of {credential.principal} cannot expire at {expires_ns!r:.100}; give "
            "nanoseconds since 1970 that fit 8 bytes, or 0 for never"
        )
    label = credential.label
    if not isinstance(label, str) or len(label) > LABEL_CHARACTERS_MAX or not label.isprintable():
        raise InvalidArgument(
            f"the label of a credential of {credential.principal} is not a line of text; write at most "
            f"{LABEL_CHARACTERS_MAX} printable characters"
        )


_CHECKS: dict[type, Callable[[Any], None]] = {
    Role: _check_role,
    Binding: _check_binding,
    Principal: _check_principal,
    Credential: _check_credential,
}


def _check_name(name: str, what: str) -> None:
    if not isinstance(name, str) or not _NAME.match(name):
        raise InvalidArgument(f"{name!a:.300} is not the name of {what}; give {_NAME_RULE}")


def _not_a_record(record: object) -> InvalidArgument:
    return InvalidArgument(
        f"{type(record).__name__} is not a record of the policy; give a Role, a Binding, a Principal "
        "or a Credential"
    )
