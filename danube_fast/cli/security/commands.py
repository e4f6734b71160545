"""`danube-fast security`: who may do what: users, keys, roles, bindings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from danube_fast.cli.broker import Ask, asking
from danube_fast.cli.contexts.context_file import value_of
from danube_fast.cli.options import (
    ExpiresOption,
    OutputForm,
    OutputOption,
    YesOption,
    command,
    example,
    group,
)
from danube_fast.cli.output import print_result, safe_text, time_text
from danube_fast.cli.security import audit, certificates, server_key, sign_ons, tokens
from danube_fast.cli.security.deletions import ForceOption, delete_record, list_records
from danube_fast.cli.security.recover import recover
from danube_fast.errors import InvalidArgument

__all__ = ["app"]

FIRST_KEY = "bootstrap-admin.key"
"""File with the key that a broker begins with."""
T = TypeVar("T")

app = group(
    "security",
    "Say who may do what: users, keys, roles, bindings.",
    "danube-fast security new-key ann.key",
    "danube-fast security users add ann --public-key-of ann.key --role admin",
    "danube-fast security bindings add user:ann producer '/orders/*'",
)
users = group("users", "People and programs that come in.", "danube-fast security users list")
keys = group("keys", "What proves who they are.", "danube-fast security keys list")
roles = group("roles", "Permissions under a name.", "danube-fast security roles list")
bindings = group("bindings", "Who has which role, and where.", "danube-fast security bindings list")
for _group in (users, keys, tokens.app, sign_ons.app, roles, bindings, server_key.app):
    app.add_typer(_group)
app.command("recover", epilog=recover.epilog)(recover)  # type: ignore[attr-defined]
app.command("new-certificate", epilog=certificates.new_certificate.epilog)(  # type: ignore[attr-defined]
    certificates.new_certificate
)

UserArgument = Annotated[str, typer.Argument(metavar="USER", help="Its name.")]
KeyOption = Annotated[
    list[str] | None,
    typer.Option("--public-key", metavar="KEY", help="Public key, 40 characters; may be repeated."),
]
KeyFileOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--public-key-of", metavar="FILE",
        help="Key file whose public key is taken; may be repeated.",
    ),
]  # fmt: skip
CertificateOption = Annotated[
    Path | None,
    typer.Option("--certificate-of", metavar="FILE", help="PEM file with a certificate for HTTPS."),
]
SubjectOption = Annotated[
    str | None,
    typer.Option(
        "--certificate-subject", metavar="SUBJECT",
        help="Subject of certificates for HTTPS, like CN=orders,O=Shop: all that a CA of tls_client_ca signs for it.",
    ),
]  # fmt: skip
SubjectFileOption = Annotated[
    Path | None,
    typer.Option(
        "--certificate-subject-of", metavar="FILE",
        help="PEM file with a certificate whose subject is taken.",
    ),
]  # fmt: skip
UidOption = Annotated[
    list[int] | None,
    typer.Option(
        "--uid", help="Number of a local user, whom the kernel vouches for; may be repeated."
    ),
]


audit.enter(app)


@app.command("new-key", epilog=example("danube-fast security new-key ann.key"))
@command("danube-fast security new-key ann.key")
def new_key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to make, readable by you.")],
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Make a key pair in a file, and print its public key, which an administrator registers."""
    from danube_fast.security.curve import new_key_pair, write_key_file

    pair = new_key_pair()
    write_key_file(file, pair)
    print_result(output, {"public": pair.public}, pair.public)


def _credentials(
    public_keys: list[str] | None, key_files: list[Path] | None, uids: list[int] | None,
    certificate: Path | None = None, subject: str | None = None, subject_file: Path | None = None,
) -> list[str]:  # fmt: skip
    """The credentials that options name. Raises InvalidArgument."""
    found = []
    for public_key in public_keys or ():
        from danube_fast.security.curve import is_public_key

        if not is_public_key(public_key):  # not repeated: a secret may have been given by mistake
            raise InvalidArgument(
                "--public-key is not a public key; give the 40 characters that `danube-fast security new-key` printed"
            )
        found.append(f"curve:{public_key}")
    for key_file in key_files or ():
        from danube_fast.security.curve import read_key_file

        found.append(f"curve:{read_key_file(key_file).public}")
    found += [f"uid:{uid}" for uid in uids or ()]
    return found + _certificate_credentials(certificate, subject, subject_file)


def _certificate_credentials(
    certificate: Path | None, subject: str | None, subject_file: Path | None
) -> list[str]:
    """The credentials that options for certificates name. Raises InvalidArgument, FailedPrecondition."""
    if certificate is None and subject is None and subject_file is None:
        return []
    from danube_fast.security.certificates import canonical_subject, subject_of
    from danube_fast.security.http_proofs import MTLS, mtls_credential
    from danube_fast.security.tls import read_certificate

    if subject is not None and subject_file is not None:
        raise InvalidArgument(
            "--certificate-subject and --certificate-subject-of name a subject each; give one of them"
        )
    found = []
    if certificate is not None:
        found.append(mtls_credential(read_certificate(certificate)))
    if subject_file is not None:
        subject = subject_of(read_certificate(subject_file))
    if subject is not None:
        found.append(f"{MTLS}{canonical_subject(subject)}")
    return found


@asking(users, "danube-fast security users add ann --public-key-of ann.key --role admin")
def add(
    ask: Ask, user: UserArgument,
    group: Annotated[list[str] | None, typer.Option(help="A group it belongs to; may be repeated. '' alone: none any more.")] = None,
    disabled: Annotated[bool | None, typer.Option("--disabled/--enabled", help="Whether its keys and tokens let no one in; without, that stays.")] = None,
    public_key: KeyOption = None, public_key_of: KeyFileOption = None, uid: UidOption = None,
    role: Annotated[list[str] | None, typer.Option(help="A role that it gets at once; may be repeated.")] = None,
    scope: Annotated[list[str] | None, typer.Option(help="Where it has these roles.", show_default="cluster")] = None,
) -> None:  # fmt: skip
    """Make a user, or change one, with its keys and roles if you give them: all of it, or nothing. Say whether it is disabled."""
    credentials = _credentials(public_key, public_key_of, uid)
    _refuse_pinned(credentials)
    groups = [] if group == [""] else group or None
    given: dict[str, Any] = {"credentials": credentials} if credentials else {}
    if role:
        given |= {"roles": role, "scope": _only("--scope", scope) or "cluster"}
    elif scope:
        raise InvalidArgument("--scope says where a role counts; give --role too")
    _check_user(user, credentials, role or [], given.get("scope", ""))
    made = ask("set_principal", name=user, groups=groups, disabled=disabled, **given)
    ask.show(made, _user_text(user, made))


def _only(option: str, given: list[T] | None) -> T | None:
    """Return the value of an option that is good once. Raises InvalidArgument."""
    if given and len(given) > 1:
        raise InvalidArgument(f"{option} is given {len(given)} times; give it once")
    return given[0] if given else None


def _user_text(user: str, made: dict[str, Any] | None) -> str:
    """A line about a user as it is now; brokers of before tell nothing of it."""
    if not made or "disabled" not in made:
        return f"user {user}"
    if not made["disabled"]:
        return f"user {user} is enabled"
    return (
        f"user {user} is disabled, and its keys, tokens and sign-ons let no one in; to let it in: danube-fast security users add "
        f"{user} --enabled"
    )


def _refuse_pinned(credentials: list[str]) -> None:
    """Raise InvalidArgument for the key of the broker itself."""
    pinned = value_of("server_key").replace(",", " ").split()
    if any(each.removeprefix("curve:") in pinned for each in credentials):
        raise InvalidArgument(
            "that is the public key of the broker, not of a user; make the user's with: danube-fast security new-key FILE"
        )


def _check_user(user: str, credentials: list[str], roles: list[str], scope: str) -> None:
    """Raise InvalidArgument for what no user, key, role or scope can be, before the broker is asked: the first key is good
    for one connection."""
    from danube_fast.security.records import (
        BUILTIN_ROLES,
        Binding,
        Credential,
        Principal,
        binding_name,
        check_record,
    )

    check_record(Principal(name=user))
    for credential in credentials:
        check_record(Credential(credential, user))
    for role in roles:
        subject = f"user:{user}"
        check_record(Binding(binding_name(subject, role, scope), subject, role, scope))
        if role not in BUILTIN_ROLES and Path(value_of("key_file")).name == FIRST_KEY:
            raise InvalidArgument(
                f"{role} is none of the roles {', '.join(BUILTIN_ROLES)}, and {FIRST_KEY} is good for one connection: make an "
                "administrator with it (--role admin), who gives the others"
            )


@asking(users, "danube-fast security users list", name="list")
def list_users(ask: Ask) -> None:
    """List all users."""
    list_records(ask, "principal", "no users")


@asking(users, "danube-fast security users delete ann --yes")
def delete(
    ask: Ask, user: UserArgument, yes: YesOption = False, force: ForceOption = False
) -> None:
    """Delete a user, its keys, bindings and sign-ons; its clients are sent away."""
    delete_record(
        ask,
        yes,
        "principal",
        user,
        f"deletes the user {user}, its keys, bindings and sign-ons",
        "deleted user",
        force=force,
    )


@asking(keys, "danube-fast security keys add ann --public-key-of ann.key", name="add")
def add_key(
    ask: Ask, user: UserArgument, public_key: KeyOption = None, public_key_of: KeyFileOption = None,
    uid: UidOption = None, certificate_of: CertificateOption = None,
    certificate_subject: SubjectOption = None, certificate_subject_of: SubjectFileOption = None,
    expires_seconds: ExpiresOption = None,
    label: Annotated[str | None, typer.Option(help="What it is for.")] = None,
) -> None:  # fmt: skip
    """Register a key, a local user, a certificate or its subject as this user. A second one may stand beside it while you rotate.
    One that the user has keeps its end and its label where you give none."""
    credentials = _credentials(
        public_key, public_key_of, uid, certificate_of, certificate_subject, certificate_subject_of
    )
    if not credentials:
        raise typer.BadParameter(
            "give --public-key, --public-key-of, --uid, --certificate-of, --certificate-subject or "
            "--certificate-subject-of"
        )
    made, lines = None, []
    for credential in credentials:
        made = ask(
            "set_credential",
            credential=credential,
            principal=user,
            expires_seconds=expires_seconds,
            label=label,
        )
        ends_ns = made.get("expires_ns") if made else 0  # brokers of before tell nothing of it
        end = f", until {time_text(ends_ns)}" if ends_ns else ""
        lines.append(f"registered {credential} as {user}{end}")
    ask.show(made, "\n".join(lines))


@asking(keys, "danube-fast security keys list", name="list")
def list_keys(ask: Ask) -> None:
    """List all keys and local users that are registered."""
    list_records(ask, "credential", "no keys")


@asking(keys, "danube-fast security keys revoke uid:1000 --yes")
def revoke(
    ask: Ask,
    credential: Annotated[
        str, typer.Argument(metavar="KEY", help="curve:KEY, uid:NUMBER, mtls:HEX or mtls:SUBJECT")
    ],
    yes: YesOption = False,
    force: ForceOption = False,
) -> None:
    """Take a key back: clients that came in with it are sent away."""
    delete_record(
        ask, yes, "credential", credential, f"revokes {credential}", "revoked", force=force
    )


@asking(roles, "danube-fast security roles add auditor lookup consume", name="add")
def add_role(
    ask: Ask,
    name: Annotated[str, typer.Argument(metavar="ROLE", help="Its name.")],
    permissions: Annotated[
        list[str],
        typer.Argument(
            metavar="PERMISSION...",
            help="lookup, produce, consume, manage_namespace, manage_topic, manage_schema, manage_broker, manage_cluster",
        ),
    ],
) -> None:
    """Make a role of permissions, or change it. There are admin, operator, producer, consumer and viewer."""
    _check_permissions(permissions)
    made = ask("set_role", name=name, permissions=permissions)
    ask.show(made, f"role {name}: {' '.join(permissions)}")


@asking(roles, "danube-fast security roles list", name="list")
def list_roles(ask: Ask) -> None:
    """List the roles that were made here."""
    ask.table(
        ask("list_security", record_kind="role"),
        "no roles but admin, operator, producer, consumer, viewer",
    )


@asking(roles, "danube-fast security roles delete auditor --yes", name="delete")
def delete_role(ask: Ask, name: Annotated[str, typer.Argument(metavar="ROLE")], yes: YesOption = False, force: ForceOption = False) -> None:  # fmt: skip
    """Delete a role: its bindings give nothing any more."""
    from danube_fast.security.records import BUILTIN_ROLES

    if name in BUILTIN_ROLES:
        raise InvalidArgument(
            f"the role {name} is built in and stays; take it from users with: danube-fast security bindings delete"
        )
    delete_record(ask, yes, "role", name, f"deletes the role {name}", "deleted role", force=force)


@asking(bindings, "danube-fast security bindings add user:ann producer '/orders/*'", name="add")
def add_binding(
    ask: Ask,
    subject: Annotated[str, typer.Argument(metavar="SUBJECT", help="user:NAME or group:NAME")],
    role: Annotated[str, typer.Argument(metavar="ROLE", help="Its name.")],
    scope: Annotated[
        str,
        typer.Argument(
            metavar="SCOPE",
            help="cluster, namespace:NAME, /namespace/topic or /namespace/topic#subscription, with * and ?",
        ),
    ],
    name: Annotated[str, typer.Option(help="Name of the binding.")] = "",
) -> None:
    """Give a user or a group a role within a scope."""
    from danube_fast.security.records import binding_name

    made = name or binding_name(subject, role, scope)
    answer = ask("set_binding", binding=made, subject=subject, role=role, scope=scope)
    ask.show(answer, f"binding {made}: {subject} is {role} of {scope}")


@asking(bindings, "danube-fast security bindings list", name="list")
def list_bindings(ask: Ask) -> None:
    """List all bindings."""
    list_records(ask, "binding", "no bindings")


@asking(bindings, "danube-fast security bindings delete 1f6a02c3 --yes", name="delete")
def delete_binding(ask: Ask, name: Annotated[str, typer.Argument(metavar="BINDING")], yes: YesOption = False, force: ForceOption = False) -> None:  # fmt: skip
    """Delete a binding: what was open by it is closed."""
    delete_record(
        ask, yes, "binding", name, f"deletes the binding {name}", "deleted binding", force=force
    )


@asking(app, "danube-fast security check ann produce /orders/new")
def check(
    ask: Ask, user: UserArgument,
    permission: Annotated[str, typer.Argument(metavar="PERMISSION")],
    resource: Annotated[
        str, typer.Argument(metavar="RESOURCE", help="/namespace/topic, namespace:NAME or cluster")
    ],
) -> None:  # fmt: skip
    """Say whether a user may do something; exit code 1 if not."""
    _check_permissions([permission])
    found = ask("check_permission", principal=user, permission=permission, resource=resource)
    is_refused = found.get("allowed") is False
    may = "may not" if is_refused else "may"
    is_unknown = (
        is_refused and found.get("registered") is False
    )  # brokers of before tell nothing of it
    why = ": there is no user of that name" if is_unknown else ""
    ask.show(found, f"{safe_text(user)} {may} {permission} {safe_text(resource)}{why}")
    if is_refused:
        raise typer.Exit(1)


def _check_permissions(permissions: list[str]) -> None:
    """Raise InvalidArgument for what is no permission; the text lists them."""
    from danube_fast.types import Permission

    for each in permissions:
        if each not in list(Permission):
            raise InvalidArgument(
                f"there is no permission {each!r:.100}; there are: {', '.join(Permission)}"
            )
