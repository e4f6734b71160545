"""Options that the commands over stored topics have in common."""

from __future__ import annotations

from typing import Annotated

import typer

from danube_fast.cli.broker import reach
from danube_fast.cli.options import DEFAULT_URL

__all__ = [
    "BROKER_DEFAULT",
    "EndOption",
    "MasterOption",
    "StartOption",
    "StoreOption",
    "UrlOption",
    "place_options",
]

BROKER_DEFAULT = f"[default: that of the context, or {DEFAULT_URL}]"
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="DANUBE_URL",
        metavar="URL",
        help=f"Where the broker listens.  {BROKER_DEFAULT}",
    ),
]
StoreOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Object store, as the broker's --store: file:///DIR, s3://BUCKET/PREFIX, gs:// or az://. Without --url "
        "and DANUBE_URL no broker is asked, and what was uploaded is read.  [default: that of the broker]",
    ),
]
StartOption = Annotated[
    str | None,
    typer.Option(
        metavar="WHERE",
        help="From here: earliest, an offset, a time (RFC 3339) or -10m.  [default: earliest]",
    ),
]
EndOption = Annotated[
    str | None,
    typer.Option(metavar="WHERE", help="Up to here: latest, an offset, a time.  [default: latest]"),
]
MasterOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Where Spark runs: local[2], spark://..., yarn, sc://...  [default: this host]",
    ),
]


def place_options(url: str | None, store: str | None) -> dict[str, str]:
    """Return the options of a read that say where: the store, and the broker with the way in there. It is that of the
    context in use if neither it nor a store is named. Raises as `reach`."""
    found = {"store": store or ""}
    if url or not store:
        broker, access = reach(url or "")
        found |= {"url": broker, **access._asdict()}
    return {name: text for name, text in found.items() if text}
