"""Lists and deletes of security records: without --yes a command looks whether there is something to delete."""

from __future__ import annotations

from typing import Annotated

import typer

from danube_fast.cli.broker import Ask
from danube_fast.cli.options import OutputForm
from danube_fast.cli.output import note, refuse_without_yes, safe_text
from danube_fast.errors import NotFound

__all__ = ["ForceOption", "delete_record", "list_records"]

_PLACES = {
    "principal": ("name", "user", "users"),
    "credential": ("credential", "key", "keys"),
    "role": ("name", "role", "roles"),
    "binding": ("binding", "binding", "bindings"),
    "api_key": ("id", "API key", "tokens"),
}
"""Kinds of records: the field that names one, the noun, the group of commands."""


ForceOption = Annotated[
    bool, typer.Option("--force", help="Also if no administrator with a key is left.")
]


def list_records(ask: Ask, kind: str, empty: str) -> None:
    """Print all records of a kind; a table does not say in each row which that is."""
    rows = ask("list_security", record_kind=kind)
    if ask.form is OutputForm.TEXT:
        rows = [{name: row[name] for name in row if name != "kind"} for row in rows]
    ask.table(rows, empty)


def delete_record(
    ask: Ask, yes: bool, kind: str, name: str, effect: str, done: str, *, force: bool = False
) -> None:
    """Delete a record and say that it is `done`; without --yes only tell the `effect`. Raises NotFound, and without
    `force` FailedPrecondition for the last administrator."""
    if not yes:  # with --yes the broker says itself that there is none
        _look(ask, kind, name)
    refuse_without_yes(yes, effect)
    forced = {"force": True} if force else {}
    gone = ask("delete_security", record_kind=kind, name=name, **forced)
    ask.show(gone, f"{done} {name}")
    if force:
        note(
            "danube-fast: if no administrator with a key is left, restart the broker: it makes bootstrap-admin.key in its data "
            "directory"
        )


def _look(ask: Ask, kind: str, name: str) -> None:
    field, noun, group = _PLACES[kind]
    if not any(row[field] == name for row in ask("list_security", record_kind=kind)):
        raise NotFound(
            f"there is no {noun} {safe_text(name)}; see: danube-fast security {group} list"
        )
