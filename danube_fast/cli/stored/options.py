"""Options that the commands over stored topics have in common."""

from __future__ import annotations

from typing import Annotated

import typer

from danube_fast.cli.broker import reach

__all__ = ["EndOption", "MasterOption", "StartOption", "StoreOption", "UrlOption", "place_options"]

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


def place_options(url: str | None, store: str | None) -> dict[str, str]:
    """Return the options of a read that say where: the store, and the broker with the way in there. It is that of the
    context in use if neither it nor a store is named. Raises as `reach`."""
    found = {"store": store or ""}
    if url or not store:
        broker, access = reach(url or "")
        found |= {"url": broker, **access._asdict()}
    return {name: text for name, text in found.items() if text}
