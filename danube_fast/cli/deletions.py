"""Deletes of security records: without --yes a command looks whether there is something to delete."""

from __future__ import annotations

from danube_fast.cli.broker import Ask
from danube_fast.cli.output import safe_text
from danube_fast.errors import NotFound

__all__ = ["look_first"]

_PLACES = {
    "principal": ("name", "user", "users"),
    "credential": ("credential", "key", "keys"),
    "role": ("name", "role", "roles"),
    "binding": ("binding", "binding", "bindings"),
    "api_key": ("id", "API key", "tokens"),
}
"""Kinds of records: the field that names one, the noun, the group of commands."""


def look_first(ask: Ask, yes: bool, kind: str, name: str) -> None:
    """Raise NotFound for a record that is not there; with --yes the broker says so itself."""
    if yes:
        return
    field, noun, group = _PLACES[kind]
    if not any(row[field] == name for row in ask("list_security", record_kind=kind)):
        raise NotFound(
            f"there is no {noun} {safe_text(name)}; see: danube-fast security {group} list"
        )
