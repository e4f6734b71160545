"""`danube-fast status` and `danube-fast clients`: what a running broker does, and for which clients."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from danube_fast.cli.broker import Ask, asking
from danube_fast.cli.options import OutputForm, group
from danube_fast.types import AUTH_NONE_TEXT

__all__ = ["app", "status"]

TOPICS_SHOWN = 3

app = group("clients", "See who is connected.", "danube-fast clients list")


@app.callback()
def _group() -> None:
    """See who is connected."""


@asking(app, "danube-fast clients list", "danube-fast clients list -o json", name="list")
def list_clients(
    ask: Ask,
    most: Annotated[
        int | None, typer.Option("--max", min=1, metavar="N", help="At most so many connections.")
    ] = None,
) -> None:
    """List connections, with the producers and consumers on each.

    A client has a connection to the coordinator, and one to each worker that it uses. JSON names each
    producer and consumer, 100 of each at most.
    """
    rows = ask("list_clients", limit=most)
    shown = rows if ask.form is OutputForm.JSON else [_line(row) for row in rows]
    ask.table(shown, "no connections")


def _line(row: dict[str, Any]) -> dict[str, Any]:
    """One line of the table."""
    topics = list(dict.fromkeys(item["topic"] for item in (*row["producers"], *row["consumers"])))
    more = [f"and {len(topics) - TOPICS_SHOWN} more"] if len(topics) > TOPICS_SHOWN else []
    return {
        "client": row["client"],
        "user": row["principal"],
        "process": row["process"],
        "session": row["session"],
        "transport": row["transport"],
        "silent_s": round(row["silent_ms"] / 1000, 1),
        "producers": row["producer_count"],
        "consumers": row["consumer_count"],
        "topics": topics[:TOPICS_SHOWN] + more,
    }


@asking(None, "danube-fast status --url danube://broker.example:6650")
def status(ask: Ask) -> None:
    """Show a running broker: its processes, logs, disk and counters."""
    found = ask("cluster_status")
    if ask.form is OutputForm.TEXT and found.get("auth") == "none":
        found = {**found, "auth": AUTH_NONE_TEXT}
    ask.show(found)
