"""Records of the security policy: roles, bindings of them, principals, credentials, API keys, sign-ons, revocations.

Each has a key of its own in the store (`role/NAME`, `binding/ID`, `principal/NAME`, `credential/ID`, `api_key/ID`,
`revocation/HOLDER`) and is checked before it is written. A credential holds what names a key, never a secret. A sign-on
(`sign_on/KEY`) is in memory only; a revocation is stored, so that no copy that has missed it brings a sign-on back.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any

import msgspec

from danube_fast.checks import shown_name
from danube_fast.errors import InvalidArgument, NotFound
from danube_fast.security.scopes import parse_scope
from danube_fast.types import Permission

__all__ = [
    "API_KEY_SOURCE",
    "AUTHENTICATOR_SOURCE",
    "BOOTSTRAP",
    "BUILTIN_ROLES",
    "EXPIRES_NS_MAX",
    "GROUPS_MAX",
    "JWT_SOURCE",
    "LABEL_CHARACTERS_MAX",
    "NOUNS",
    "SUBJECT_BYTES_MAX",
    "ApiKey",
    "Binding",
    "Credential",
    "Principal",
    "Record",
    "Revocation",
    "Role",
    "SignOn",
    "binding_name",
    "check_key",
    "check_record",
    "is_name",
    "key_of",
    "no_user",
    "parse_scope",
]

BOOTSTRAP = "bootstrap-admin"
"""Principal of the key that a secured broker begins with; no token and no API key is good for it."""
API_KEY_SOURCE = "api_key:"
"""In front of the id of the API key that a sign-on was made with."""
JWT_SOURCE = "jwt:"
"""In front of the name of the issuer whose token a sign-on was made with."""
AUTHENTICATOR_SOURCE = "authenticator:"
"""In front of the name of the authenticator of another package that has vouched for a sign-on."""

NOUNS = {
    "principal": "user", "credential": "key", "role": "role", "binding": "binding", "api_key": "API key",
}  # fmt: skip
"""Kinds of records, as people call them."""
GROUPS_MAX = 256
"""Groups of one principal: every check looks at each of them."""
LABEL_CHARACTERS_MAX = 256
"""Enough to say which machine a key is on; labels are sent with every copy of the policy."""
SUBJECT_BYTES_MAX = 192
"""Of the subject of a certificate, in UTF-8: it fits a key of the store, and the audit log shows all of it."""
EXPIRES_NS_MAX = 2**63 - 1
"""Fits 8 bytes with a sign: the year 2262."""
_UID_MAX = 2**32 - 2  # the last of 32 bits means no user

# Names become parts of keys and of log lines: no separators, no characters that only look alike.
# Names of dots alone mean folders to other programs.
_NAME = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9_.@-]{1,128}\Z")
_NAME_RULE = "1 to 128 letters, digits, '_', '.', '@' or '-'"
_CREDENTIAL = re.compile(
    r"curve:[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}\Z|uid:(?P<uid>0|[1-9][0-9]{0,9})\Z|mtls:[0-9a-f]{64}\Z"
    r"|mtls:(?P<subject>[0-9A-Za-z.-]+=.*)\Z"
)
_API_KEY_ID = re.compile(r"[A-Za-z0-9_-]{16}\Z")
_SALT = re.compile(r"[0-9a-f]{32}\Z")
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


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
    """Proof of a principal: a public key, a user of this host, or a certificate."""

    credential: str
    """`curve:` and 40 characters of Z85, `uid:` and a number, or `mtls:` and the SHA-256 of a client's certificate, or
    its subject."""
    principal: str
    expires_ns: int = 0
    """Wall clock; 0 means never."""
    label: str = ""


class ApiKey(_Record, frozen=True, gc=False, tag="api_key"):
    """A secret text that a client signs on with, as its salted digest."""

    id: str
    """16 characters that stand in front of the secret, to find the record by."""
    principal: str
    salt: str
    """16 bytes, hexadecimal."""
    digest: str
    """SHA-256 of the salt and the secret, hexadecimal."""
    expires_ns: int = 0
    """Wall clock; 0 means never."""
    label: str = ""


class SignOn(_Record, frozen=True, gc=False, tag="sign_on"):
    """A client's CURVE key that an API key or a token has vouched for, until it expires. In memory only."""

    public_key: str
    """40 characters of Z85."""
    principal: str
    groups: list[str]
    """Those that the token claims; they count together with those of the principal's record."""
    expires_ns: int
    """Wall clock."""
    source: str
    """`api_key:ID`, `jwt:NAME` of an issuer, or `authenticator:NAME`."""
    registered: bool = True
    """The principal must have a record. Without, the source is trusted with principals that have none."""
    made_ns: int = 0
    """When it was asked for, wall clock: a revocation of that time or later ends it."""

    @property
    def holders(self) -> tuple[str, str, str]:
        """Names by which it may be revoked: its own key, its principal, its source."""
        return f"sign_on/{self.public_key}", f"principal/{self.principal}", self.source


class Revocation(_Record, frozen=True, gc=False, tag="revocation"):
    """Ends the sign-ons that were made so far by a key, for a principal or by a source; later ones are good."""

    holder: str
    """`sign_on/KEY`, `principal/NAME`, `api_key:ID`, `jwt:NAME` or `authenticator:NAME`."""
    until_ns: int
    """Wall clock."""


Record = Role | Binding | Principal | Credential | ApiKey | SignOn | Revocation

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
        case ApiKey():
            return f"api_key/{record.id}"
        case SignOn():
            return f"sign_on/{record.public_key}"
        case Revocation():
            return f"revocation/{record.holder}"
    raise _not_a_record(record)


def binding_name(subject: str, role: str, scope: str) -> str:
    """A name for a binding that is given none: the same one makes the same binding."""
    return hashlib.sha256(f"{subject} {role} {scope}".encode()).hexdigest()[:16]


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
    _check_name(principal.name, "a user")
    _check_groups(principal.name, principal.groups)
    if not isinstance(principal.disabled, bool):
        raise InvalidArgument(
            f"disabled of {principal.name} is not true or false; write one of them"
        )


def _check_groups(principal: str, groups: list[str]) -> None:
    if not isinstance(groups, list) or len(groups) > GROUPS_MAX:
        raise InvalidArgument(
            f"the groups of {principal} are not a list of at most {GROUPS_MAX} names; leave some "
            "out, or bind the roles to the user itself"
        )
    for group in groups:
        _check_name(group, "a group")
    if len(set(groups)) != len(groups):
        raise InvalidArgument(f"{principal} is in a group twice; list each group once")


def _check_credential(credential: Credential) -> None:
    text = credential.credential
    found = _CREDENTIAL.match(text) if isinstance(text, str) else None
    if found is None or (found["uid"] is not None and int(found["uid"]) > _UID_MAX):
        # the text is not repeated: a secret may have been given by mistake
        raise InvalidArgument(
            "that does not name a key; write curve: and the 40 characters of a public key in "
            f"Z85, uid: and the number of a user, 0 to {_UID_MAX}, or mtls: and the 64 digits of the SHA-256 of a "
            "certificate, or its subject"
        )
    if found["subject"] is not None:
        _check_subject(found["subject"])
    _check_name(credential.principal, "a user")
    what = f"a key of {credential.principal}"
    _check_expiry(what, credential.expires_ns)
    _check_label(what, credential.label)


def _check_subject(subject: str) -> None:
    if not subject.isprintable() or len(subject.encode()) > SUBJECT_BYTES_MAX:
        raise InvalidArgument(
            f"the subject {subject!a:.300} is not printable, or longer than {SUBJECT_BYTES_MAX} bytes of UTF-8; register "
            "its certificates with --certificate-of"
        )


def _check_api_key(api_key: ApiKey) -> None:
    sound = (
        (_API_KEY_ID, api_key.id),
        (_SALT, api_key.salt),
        (_DIGEST, api_key.digest),
    )
    if not all(isinstance(text, str) and pattern.match(text) for pattern, text in sound):
        # no text is repeated: the secret may have been given by mistake
        raise InvalidArgument(
            "that is no record of an API key; make one with: danube-fast security tokens add"
        )
    _check_name(api_key.principal, "a user")
    what = f"an API key of {api_key.principal}"
    _check_expiry(what, api_key.expires_ns)
    _check_label(what, api_key.label)


def _check_sign_on(sign_on: SignOn) -> None:
    if _CREDENTIAL.match(f"curve:{sign_on.public_key}") is None:
        raise InvalidArgument("that is no public key; send its 40 characters of Z85")
    _check_name(sign_on.principal, "a user")
    _check_groups(sign_on.principal, sign_on.groups)
    _check_expiry(f"a sign-on of {sign_on.principal}", sign_on.expires_ns)
    _check_expiry(f"a sign-on of {sign_on.principal}", sign_on.made_ns)
    if not _is_source(sign_on.source) or not sign_on.expires_ns:
        raise InvalidArgument(
            f"a sign-on of {sign_on.principal} needs what it was made with, and an end"
        )


def _check_revocation(revocation: Revocation) -> None:
    kind, _, name = revocation.holder.partition("/")
    is_holder = (
        (kind == "sign_on" and _CREDENTIAL.match(f"curve:{name}") is not None)
        or (kind == "principal" and is_name(name))
        or _is_source(revocation.holder)
    )
    if not is_holder:
        raise InvalidArgument(
            f"{name or revocation.holder!a:.300} has no sign-ons; give the public key of one, a user, or what they were made "
            f"with: {API_KEY_SOURCE}ID, {JWT_SOURCE}ISSUER or {AUTHENTICATOR_SOURCE}NAME"
        )
    _check_expiry("a revocation", revocation.until_ns)


def _is_source(text: str) -> bool:
    """Whether a text says what a sign-on was made with."""
    kind, colon, name = text.partition(":")
    sources = API_KEY_SOURCE, JWT_SOURCE, AUTHENTICATOR_SOURCE
    return f"{kind}{colon}" in sources and is_name(name)


def _check_expiry(what: str, expires_ns: int) -> None:
    if type(expires_ns) is not int or not 0 <= expires_ns <= EXPIRES_NS_MAX:
        raise InvalidArgument(
            f"{what} cannot expire at {expires_ns!r:.100}; give "
            "nanoseconds since 1970 that fit 8 bytes, or 0 for never"
        )


def _check_label(what: str, label: str) -> None:
    if not isinstance(label, str) or len(label) > LABEL_CHARACTERS_MAX or not label.isprintable():
        raise InvalidArgument(
            f"the label of {what} is not a line of text; write at most "
            f"{LABEL_CHARACTERS_MAX} printable characters"
        )


_CHECKS: dict[type, Callable[[Any], None]] = {
    Role: _check_role,
    Binding: _check_binding,
    Principal: _check_principal,
    Credential: _check_credential,
    ApiKey: _check_api_key,
    SignOn: _check_sign_on,
    Revocation: _check_revocation,
}


def no_user(name: str) -> NotFound:
    """Return the error for a user that is not there, and is to have something."""
    shown = shown_name(name)
    return NotFound(
        f"there is no user {shown}; make it with: danube-fast security users add {shown}"
    )


def is_name(text: object) -> bool:
    """Whether a text can be the name of a principal or a group."""
    return isinstance(text, str) and _NAME.match(text) is not None


def _check_name(name: str, what: str) -> None:
    if not is_name(name):
        raise InvalidArgument(f"{name!a:.300} is not the name of {what}; give {_NAME_RULE}")


def _not_a_record(record: object) -> InvalidArgument:
    return InvalidArgument(
        f"{type(record).__name__} is not a record of the policy; give a Role, a Binding, a Principal, "
        "a Credential, an ApiKey, a SignOn or a Revocation"
    )
