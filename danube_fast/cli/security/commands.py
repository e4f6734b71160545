"""`danube-fast security`: who may do what: users, keys, roles, bindings."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any

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
)
from danube_fast.cli.output import print_result, safe_text
from danube_fast.cli.security import audit, certificates, server_key, sign_ons, tokens
from danube_fast.cli.security.deletions import ForceOption, delete_record, list_records
from danube_fast.cli.security.recover import recover
from danube_fast.errors import InvalidArgument, NotFound

__all__ = ["app"]

app = typer.Typer(
    name="security",
    help="Say who may do what: users, keys, roles, bindings.",
    no_args_is_help=True,
    epilog=example(
        "danube-fast security new-key ann.key",
        "danube-fast security users add ann --public-key-of ann.key --role admin",
        "danube-fast security bindings add user:ann producer '/orders/*'",
    ),
)
users = typer.Typer(
    epilog=example("danube-fast security users list"),
    name="users",
    help="People and programs that come in.",
    no_args_is_help=True,
)
keys = typer.Typer(
    epilog=example("danube-fast security keys list"),
    name="keys",
    help="What proves who they are.",
    no_args_is_help=True,
)
roles = typer.Typer(
    epilog=example("danube-fast security roles list"),
    name="roles",
    help="Permissions under a name.",
    no_args_is_help=True,
)
bindings = typer.Typer(
    epilog=example("danube-fast security bindings list"),
    name="bindings",
    help="Who has which role, and where.",
    no_args_is_help=True,
)
for _group in (users, keys, tokens.app, sign_ons.app, roles, bindings, server_key.app):
    app.add_typer(_group)
app.command("recover", epilog=recover.epilog)(recover)  # type: ignore[attr-defined]
app.command("new-certificate", epilog=certificates.new_certificate.epilog)(  # type: ignore[attr-defined]
    certificates.new_certificate
)

UserArgument = Annotated[str, typer.Argument(metavar="USER", help="Its name.")]
KeyOption = Annotated[
    str | None, typer.Option("--public-key", metavar="KEY", help="Public key, 40 characters.")
]
KeyFileOption = Annotated[
    Path | None,
    typer.Option("--public-key-of", metavar="FILE", help="Key file whose public key is taken."),
]
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
    int | None, typer.Option("--uid", help="Number of a local user, whom the kernel vouches for.")
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
    public_key: str | None, key_file: Path | None, uid: int | None, certificate: Path | None = None,
    subject: str | None = None, subject_file: Path | None = None,
) -> list[str]:  # fmt: skip
    """The credentials that options name. Raises InvalidArgument."""
    found = []
    if public_key is not None:
        from danube_fast.security.curve import is_public_key

        if key_file is not None:
            raise InvalidArgument(
                "--public-key and --public-key-of name a key each; give one of them"
            )
        if not is_public_key(public_key):  # not repeated: a secret may have been given by mistake
            raise InvalidArgument(
                "--public-key is not a public key; give the 40 characters that `danube-fast security new-key` printed"
            )
        found.append(f"curve:{public_key}")
    if key_file is not None:
        from danube_fast.security.curve import read_key_file

        found.append(f"curve:{read_key_file(key_file).public}")
    if uid is not None:
        found.append(f"uid:{uid}")
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
    role: Annotated[str, typer.Option(help="A role that it gets at once.")] = "",
    scope: Annotated[str | None, typer.Option(help="Where it has this role.", show_default="cluster")] = None,
) -> None:  # fmt: skip
    """Make a user, or change one, with its key and a role if you give them; say whether it is disabled."""
    credentials = _credentials(public_key, public_key_of, uid)
    _refuse_pinned(credentials)
    groups = [] if group == [""] else group or None
    if scope is not None and not role:
        raise InvalidArgument("--scope says where a role counts; give --role too")
    scope = "cluster" if scope is None else scope
    _check_grant(user, role, scope)
    with ask.connect() as client:  # one connection: the first key is good for no more
        if role:
            _check_role(client, role)
        made = client.admin.set_principal(name=user, groups=groups, disabled=disabled)
        for credential in credentials:
            client.admin.set_credential(credential=credential, principal=user)
        if role:
            client.admin.set_binding(
                binding=_name_of(f"user:{user}", role, scope),
                subject=f"user:{user}",
                role=role,
                scope=scope,
            )
    ask.show(made, _user_text(user, made))


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


def _check_grant(user: str, role: str, scope: str) -> None:
    """Raise InvalidArgument for what no user, role or scope can be, before anything is changed."""
    from danube_fast.security.records import Binding, Principal, check_record

    check_record(Principal(name=user))
    if role:
        subject = f"user:{user}"
        binding = _name_of(subject, role, scope)
        check_record(Binding(binding=binding, subject=subject, role=role, scope=scope))


def _check_role(client: Any, role: str) -> None:
    """Raise NotFound for a role that is not there, before anything is changed."""
    from danube_fast.security.records import BUILTIN_ROLES

    if role in BUILTIN_ROLES:
        return
    made = client.admin.list_security(record_kind="role")
    if not any(each["name"] == role for each in made):
        raise NotFound(f"there is no role {role}; see: danube-fast security roles list")


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
        effect=f"deletes the user {user}, its keys, bindings and sign-ons",
        done="deleted user",
        force=force,
    )


@asking(keys, "danube-fast security keys add ann --public-key-of ann.key", name="add")
def add_key(
    ask: Ask, user: UserArgument, public_key: KeyOption = None, public_key_of: KeyFileOption = None,
    uid: UidOption = None, certificate_of: CertificateOption = None,
    certificate_subject: SubjectOption = None, certificate_subject_of: SubjectFileOption = None,
    expires_seconds: ExpiresOption = 0,
    label: Annotated[str, typer.Option(help="What it is for.")] = "",
) -> None:  # fmt: skip
    """Register a key, a local user, a certificate or its subject as this user. A second one may stand beside it while you rotate."""
    credentials = _credentials(
        public_key, public_key_of, uid, certificate_of, certificate_subject, certificate_subject_of
    )
    if not credentials:
        raise typer.BadParameter(
            "give --public-key, --public-key-of, --uid, --certificate-of, --certificate-subject or "
            "--certificate-subject-of"
        )
    made = None
    for credential in credentials:
        made = ask(
            "set_credential",
            credential=credential,
            principal=user,
            expires_seconds=expires_seconds,
            label=label,
        )
    ask.show(made, "\n".join(f"registered {each} as {user}" for each in credentials))


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
        ask,
        yes,
        "credential",
        credential,
        effect=f"revokes {credential}",
        done="revoked",
        force=force,
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
    delete_record(
        ask, yes, "role", name, effect=f"deletes the role {name}", done="deleted role", force=force
    )


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
    made = name or _name_of(subject, role, scope)
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
        ask,
        yes,
        "binding",
        name,
        effect=f"deletes the binding {name}",
        done="deleted binding",
        force=force,
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
    ask.show(found, f"{safe_text(user)} {may} {permission} {safe_text(resource)}")
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


def _name_of(subject: str, role: str, scope: str) -> str:
    """A name for a binding: the same one makes the same binding."""
    return hashlib.sha256(f"{subject} {role} {scope}".encode()).hexdigest()[:16]
