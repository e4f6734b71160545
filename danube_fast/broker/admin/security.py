"""Administrative operations on who may do what: principals, credentials, roles, bindings."""

from __future__ import annotations

from danube_fast.broker.admin.registry import AdminContext, Answer, operation
from danube_fast.errors import FailedPrecondition, InvalidArgument
from danube_fast.types import CLUSTER, Permission

__all__: list[str] = []

LISTED_MAX = 1000


@operation(Permission.MANAGE_CLUSTER)
def list_security(
    context: AdminContext,
    answer: Answer,
    *,
    record_kind: str,
    after: str = "",
    limit: int = LISTED_MAX,
) -> None:
    """List records of a kind (principal, credential, role, binding, api_key) behind the name `after`, at most `limit`. No record
    holds a secret."""
    if limit < 1:
        raise InvalidArgument(f"limit {limit} shows nothing; ask for 1 or more")
    answer.done(context.security.describe(record_kind, after, min(limit, LISTED_MAX)))


@operation(Permission.MANAGE_CLUSTER)
def set_principal(
    context: AdminContext, answer: Answer, *, name: str, groups: list[str] | None = None,
    disabled: bool | None = None, credentials: list[str] | None = None, roles: list[str] | None = None,
    scope: str = CLUSTER,
) -> None:  # fmt: skip
    """Make a principal, or change its groups, or disable it: then it may do nothing; with `credentials` that prove it, and
    with `roles` within `scope`, all of that or nothing. What is not given stays, of a credential that it has, too. Answer:
    {"name", "groups", "disabled"}, as they are now."""
    for credential in credentials or ():
        _check_is_not_own(context, credential)
    answer.done(
        context.security.put_principal(
            name,
            groups,
            disabled=disabled,
            credentials=credentials or (),
            roles=roles or (),
            scope=scope,
        )
    )


@operation(Permission.MANAGE_CLUSTER)
def set_credential(
    context: AdminContext, answer: Answer, *, credential: str, principal: str,
    expires_seconds: int | None = None, label: str | None = None,
) -> None:  # fmt: skip
    """Let a credential prove that a client is this principal: `curve:` and a public key, `uid:` and the number of a
    local user, or `mtls:` and the SHA-256 of a certificate or its subject. It ends after `expires_seconds`, 0: never. Of
    one that is known, what is not given stays. Answer: {"expires_ns", "label"}, as they are now."""
    if expires_seconds is not None and expires_seconds < 0:
        raise InvalidArgument(f"expires_seconds is {expires_seconds}; write 0 or more")
    _check_is_not_own(context, credential)
    answer.done(
        context.security.put_credential(
            credential, principal, expires_seconds=expires_seconds, label=label
        )
    )


def _check_is_not_own(context: AdminContext, credential: str) -> None:
    """Raise InvalidArgument for a key of the broker."""
    kind, _, public_key = credential.partition(":")
    # a broker that asks no one has no such key: it says so itself
    if kind == "curve" and public_key in _own_keys(context):
        raise InvalidArgument(
            "that is the public key of the broker itself; register the one of the user's own key file"
        )


def _own_keys(context: AdminContext) -> list[str]:
    """Public keys of the broker."""
    try:
        return list(context.server_key.describe()["keys"])
    except FailedPrecondition:
        return []


@operation(Permission.MANAGE_CLUSTER)
def add_api_key(
    context: AdminContext, answer: Answer, *, principal: str, key_id: str, salt: str, digest: str,
    expires_seconds: int = 0, label: str = "",
) -> None:  # fmt: skip
    """Let an API key sign on as this principal. Who makes it keeps the secret: `salt` and `digest` are what it is known
    by. It ends after `expires_seconds`, 0: never. A principal has at most two live ones."""
    if expires_seconds < 0:
        raise InvalidArgument(f"expires_seconds is {expires_seconds}; write 0 or more")
    context.security.add_api_key(
        key_id, principal, salt=salt, digest=digest, expires_seconds=expires_seconds, label=label
    )
    answer.done()


@operation(Permission.MANAGE_CLUSTER)
def set_role(
    context: AdminContext, answer: Answer, *, name: str, permissions: list[Permission]
) -> None:
    """Make a role of these permissions, or change it."""
    context.security.put_role(name, permissions)
    answer.done()


@operation(Permission.MANAGE_CLUSTER)
def set_binding(
    context: AdminContext, answer: Answer, *, binding: str, subject: str, role: str, scope: str
) -> None:
    """Bind a subject (`user:NAME` or `group:NAME`) to a role within a scope: `cluster`, `namespace:NAME`, a topic, or a
    topic, `#` and a subscription, each with patterns."""
    context.security.put_binding(binding, subject, role, scope)
    answer.done()


@operation(Permission.MANAGE_CLUSTER)
def delete_security(
    context: AdminContext, answer: Answer, *, record_kind: str, name: str, force: bool = False
) -> None:
    """Delete a record. With a principal its credentials, bindings and sign-ons go; clients that have come in by it are sent
    away. Without `force` it is refused if no administrator with a CURVE key would be left."""
    context.security.remove_record(record_kind, name, force=force)
    answer.done()


@operation(Permission.MANAGE_CLUSTER)
def list_sign_ons(
    context: AdminContext, answer: Answer, *, principal: str = "", source: str = "", after: str = "",
    limit: int = LISTED_MAX,
) -> None:  # fmt: skip
    """List the sign-ons of a principal, of a source (`api_key:ID`, `jwt:ISSUER`, `authenticator:NAME`), or all, behind the
    public key `after`. Answers {"sign_ons": [...], "after": the place to go on from, empty at the end}; a page may have less than `limit` of them."""
    if limit < 1:
        raise InvalidArgument(f"limit {limit} shows nothing; ask for 1 or more")
    answer.done(context.security.list_sign_ons(after, min(limit, LISTED_MAX), principal, source))


@operation(Permission.MANAGE_CLUSTER)
def end_sign_ons(
    context: AdminContext, answer: Answer, *, public_key: str = "", principal: str = "",
    source: str = "",
) -> None:  # fmt: skip
    """End the sign-on of a public key, or all of a principal or of a source (`api_key:ID`, `jwt:ISSUER`,
    `authenticator:NAME`): {"ended"}. Clients are sent away, and may sign on again with what is still good. NotFound for a
    principal that has neither a record nor a sign-on."""
    holders = [
        f"{kind}{name}"
        for kind, name in (("sign_on/", public_key), ("principal/", principal), ("", source))
        if name
    ]
    if len(holders) != 1:
        raise InvalidArgument(
            "say whose sign-ons end: give one of public_key, principal and source"
        )
    answer.done({"ended": context.security.end_sign_ons(holders[0])})


@operation(Permission.MANAGE_CLUSTER)
def check_permission(
    context: AdminContext, answer: Answer, *, principal: str, permission: Permission, resource: str
) -> None:
    """Tell whether a principal may do that, and has a record: {"allowed", "registered"}. `resource` is named as a scope is."""
    answer.done(context.security.check(principal, permission, resource))
