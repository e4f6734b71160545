"""`danube-fast status`: one screen about a running broker."""

from __future__ import annotations

import typer

from danube_fast.cli.broker import operation
from danube_fast.cli.options import DEFAULT_URL, OutputForm, OutputOption, UrlOption, example
from danube_fast.cli.output import print_result

__all__ = ["register", "status"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=example("danube-fast status --url danube://broker.example:6650"))(status)


def status(url: UrlOption = DEFAULT_URL, output: OutputOption = OutputForm.TEXT) -> None:
    """Show a running broker: its processes, logs, disk and counters."""
    print_result(output, operation(url, "cluster_status"))
