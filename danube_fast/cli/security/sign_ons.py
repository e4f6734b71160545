"""`danube-fast security sign-ons`: the keys that API keys and tokens have let in just now."""

from __future__ import annotations

from typing import Annotated

import typer

from danube_fast.cli.broker import Ask, asking
from danube_fast.cli.options import YesOption, group
from danube_fast.cli.output import counted, refuse_without_yes, safe_text
from danube_fast.errors import InvalidArgument

__all__ = ["app"]

app = group(
    "sign-ons",
    "Clients that have signed on with an API key or a token.",
    "danube-fast security sign-ons list --user ann",
)

UserOption = Annotated[str, typer.Option("--user", metavar="USER", help="Those of this user.")]
IssuerOption = Annotated[
    str,
    typer.Option("--issuer", metavar="NAME", help="Those that tokens of this issuer have made."),
]
ApiKeyOption = Annotated[
    str, typer.Option("--api-key", metavar="ID", help="Those that this API key has made.")
]
AuthenticatorOption = Annotated[
    str,
    typer.Option("--authenticator", metavar="NAME", help="Those that this authenticator has made."),
]


@asking(app, "danube-fast security sign-ons list --issuer corp", name="list")
def list_sign_ons(
    ask: Ask, user: UserOption = "", issuer: IssuerOption = "", api_key: ApiKeyOption = "",
    authenticator: AuthenticatorOption = "",
    most: Annotated[
        int | None, typer.Option("--max", min=1, metavar="N", help="At most so many.")
    ] = None,
) -> None:  # fmt: skip
    """List the sign-ons that are in force: key, user, groups of the token, end, and what each was made with."""
    source = _source_of(issuer, api_key, authenticator)
    rows = ask("list_sign_ons", principal=user, source=source, limit=most)
    ask.table(rows, "no sign-ons")


@asking(
    app,
    "danube-fast security sign-ons end 'Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID' --yes",
    "danube-fast security sign-ons end --user ann --yes",
)
def end(
    ask: Ask,
    public_key: Annotated[
        str, typer.Argument(metavar="[PUBLIC_KEY]", help="The one in the list, with or without curve: before it.", show_default=False)
    ] = "",
    user: UserOption = "", issuer: IssuerOption = "", api_key: ApiKeyOption = "",
    authenticator: AuthenticatorOption = "", yes: YesOption = False,
) -> None:  # fmt: skip
    """Send clients away that have signed on: one key, or all of a user, an issuer, an API key or an authenticator. They sign
    on again by themselves with a token that is still good: disable the user, remove the API key or withdraw the issuer to keep them out."""
    given = [each for each in (public_key, user, issuer, api_key, authenticator) if each]
    if len(given) != 1:
        raise InvalidArgument(
            "say whose sign-ons end: give one of PUBLIC_KEY, --user, --issuer, --api-key and --authenticator"
        )
    source = _source_of(issuer, api_key, authenticator)
    refuse_without_yes(yes, f"ends all sign-ons of {safe_text(given[0])}")
    key = public_key.removeprefix("curve:")
    done = ask(
        "end_sign_ons", public_key=key or None, principal=user or None, source=source or None
    )
    ask.show(done, f"ended {counted(done.get('ended', 0), 'sign-on')}")


def _source_of(issuer: str, api_key: str, authenticator: str) -> str:
    """Return what sign-ons were made with, as the list shows it; empty: anything. Raises InvalidArgument."""
    from danube_fast.security.records import API_KEY_SOURCE, AUTHENTICATOR_SOURCE, JWT_SOURCE

    named = {JWT_SOURCE: issuer, API_KEY_SOURCE: api_key, AUTHENTICATOR_SOURCE: authenticator}
    given = [f"{kind}{name}" for kind, name in named.items() if name]
    if len(given) > 1:
        raise InvalidArgument(
            "a sign-on has one source; give one of --issuer, --api-key and --authenticator"
        )
    return given[0] if given else ""
