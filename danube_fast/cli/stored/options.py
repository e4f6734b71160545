"""Options that the commands over stored topics have in common."""

from __future__ import annotations

from typing import Annotated

import typer

from danube_fast.cli.contexts.context_file import value_of

__all__ = ["EndOption", "MasterOption", "StartOption", "StoreOption", "UrlOption", "broker_of"]

UrlOption = Annotated[
    str | None,
    typer.Option("--url", envvar="DANUBE_URL", metavar="URL", help="Where the broker listens."),
]
StoreOption = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Store with the history; without --url no broker is asked."),
]
StartOption = Annotated[
    str | None,
    typer.Option(metavar="WHERE", help="From here: earliest, an offset, a time or -10m."),
]
EndOption = Annotated[
    str | None, typer.Option(metavar="WHERE", help="Up to here: latest, an offset, a time.")
]
MasterOption = Annotated[
    str | None, typer.Option(metavar="URL", help="Where Spark runs.  [default: this host]")
]


def broker_of(url: str | None, store: str | None) -> str | None:
    """Return the broker to ask: that of the context in use if neither it nor a store is named."""
    return url or (None if store else value_of("url") or None)
