"""`danube-fast security tokens`: API keys, with which programs sign on. Made here; the broker never sees the secret."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from danube_fast.cli.broker import Ask, asking
from danube_fast.cli.options import ExpiresOption, YesOption, group
from danube_fast.cli.output import note
from danube_fast.cli.security.deletions import delete_record, list_records
from danube_fast.errors import DanubeError, DeadlineExceeded, Unavailable

__all__ = ["app"]

app = group("tokens", "API keys that programs sign on with.", "danube-fast security tokens list")
_UNANSWERED = (Unavailable, DeadlineExceeded, KeyboardInterrupt)
"""Errors behind which the broker may have done what it was asked."""


@asking(app, "danube-fast security tokens add orders --to-file orders.token --label cash-desk")
def add(
    ask: Ask,
    user: Annotated[str, typer.Argument(metavar="USER", help="Its name.")],
    expires_seconds: ExpiresOption = 0,
    label: Annotated[str, typer.Option(help="What it is for.")] = "",
    to_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File to make, readable by you; otherwise it is printed."
        ),
    ] = None,
) -> None:
    """Make an API key of a user, and show it once. A user has at most two: the second one is to replace the first."""
    from danube_fast.security.api_keys import new_api_key, write_api_key

    made = new_api_key()
    if to_file is not None:
        write_api_key(to_file, made.text)
    is_asked = False
    try:
        with ask.connect() as client:
            is_asked = True
            client.admin.add_api_key(
                principal=user, key_id=made.id, salt=made.salt, digest=made.digest,
                expires_seconds=expires_seconds, label=label,
            )  # fmt: skip
    except BaseException as error:
        if not is_asked or not isinstance(error, _UNANSWERED):
            if to_file is not None:
                to_file.unlink()
            raise
        advice = _if_it_is_there(made.id, to_file)
        if isinstance(error, DanubeError):
            raise type(error)(f"{error}; {advice}") from None
        note(f"danube-fast: {advice}")
        raise
    if to_file is not None:
        ask.show({"id": made.id, "file": str(to_file)}, f"API key {made.id} is in {to_file}")
        return
    note("danube-fast: keep it now, it is not shown again; programs read it from DANUBE_TOKEN_FILE")
    ask.show({"id": made.id, "api_key": made.text}, made.text)


def _if_it_is_there(key_id: str, file: Path | None) -> str:
    """Say what to do about a key that the broker was asked to take, and has not said whether it did."""
    seen = f"the broker may have taken the API key {key_id} all the same: if `danube-fast security tokens list` shows it,"
    if file is not None:
        return f"{seen} it is good, and in {file}; if not, remove {file} and repeat this command"
    return f"{seen} run `danube-fast security tokens remove {key_id} --yes`, as it was not shown; then repeat this command"


@asking(app, "danube-fast security tokens list", name="list")
def list_tokens(ask: Ask) -> None:
    """List all API keys; none of them shows its secret."""
    list_records(ask, "api_key", "no API keys")


@asking(app, "danube-fast security tokens remove 8fK2lq0ZbX1cVd3e --yes")
def remove(
    ask: Ask,
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The one in the list.")],
    yes: YesOption = False,
) -> None:
    """Take an API key back: clients that have signed on with it are sent away."""
    delete_record(
        ask, yes, "api_key", key_id, f"takes the API key {key_id} back", "removed the API key"
    )
